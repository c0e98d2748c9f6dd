"""The output of a training run: header, progress bar, one line per step on screen and in the JSON log, last lines."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys

from tqdm import tqdm

from gpt2core.app.checkpoint_directory import describe_step
from gpt2core.app.loss_plot import run_curves, write_plot
from gpt2core.app.output_files import check_output_files, continue_log, log_rows, rename_with_number
from gpt2core.app.run_lock import older_run
from gpt2core.app.terminal import wrapped
from gpt2core.errors import ConfigError, counted
from gpt2core.model import parameter_count


class RunLog:
    """Reports each step to the screen, a log file and a plot.

    path: the log, one JSON object per line, or None; rows of steps before `first` are kept, for a resumed run.
    recorded: the `last_log_row` of the checkpoint of a resumed run, see output_files.check_log_of_run().
    plot: the PNG file of the loss curve, or None; title: of the plot. every: steps between lines. steps: the total
    number.

    Floats are written at full precision. Steps with validation have val_loss and val_perplexity; the last line has
    parameters_sha256 and, on a GPU, peak_memory_bytes. Raises ConfigError if `path` is not a log; write_row() and
    close() raise it if a file cannot be written, for example because the disk is full.
    """

    def __init__(self, path, plot, every, first, steps, title="", recorded=None):
        self.every, self.plot, self.title = every, plot, title
        self.file, self.rows = continue_log(path, first, recorded) if path else (None, [])
        self.last_log_row = step_and_loss(self.rows[-1]) if self.rows else {}  # of the log's last row, for checkpoints
        self.complete = os.path.getsize(path) if path else 0  # bytes of the log's complete lines
        self.constants = []  # the lines of constants() that were printed last
        self.bar = tqdm(total=steps, initial=first, unit="step", disable=None, leave=False, dynamic_ncols=True)

    def __call__(self, step, val_loss, final_fields):
        """Report a Step. val_loss: None without validation; final_fields: more fields of the last line, or None."""
        row = {key: value for key, value in dataclasses.asdict(step).items() if value is not None}
        if val_loss is not None:
            row |= {"val_loss": val_loss, "val_perplexity": perplexity(val_loss)}
        row |= final_fields or {}
        self.bar.update()
        self.bar.set_postfix_str(f"loss {step.loss:.4f}")
        self.rows.append(row)
        if step.step % self.every == 0 or val_loss is not None or final_fields:
            self.write_row(row)
            self.print_step(step, val_loss)

    def print_step(self, step, val_loss):
        """Print the lines of constants(step) that have changed, the line of the Step, and any validation loss."""
        last, self.constants = self.constants, constants(step)
        for line in self.constants:
            if line not in last:
                self.print(line)
        self.print(step_line(step))
        if val_loss is not None:
            self.print(f"validation: loss {val_loss:.6f}, perplexity {perplexity(val_loss):.3f}")

    def print(self, text):
        """Print lines above the progress bar."""
        tqdm.write(wrapped(text))

    def print_error(self, text):
        """Print a line on standard error."""
        tqdm.write(text, file=sys.stderr)

    def write_row(self, row):
        if self.file:
            line = json.dumps(row) + "\n"  # ASCII
            try:
                self.file.write(line)
                self.file.flush()
                self.complete += len(line)
                self.last_log_row = step_and_loss(row)
            except OSError as error:
                file, self.file = self.file, None
                with contextlib.suppress(OSError):
                    file.close()
                with contextlib.suppress(OSError):
                    os.truncate(file.name, self.complete)  # remove the incomplete line
                raise ConfigError(
                    f"{file.name}: cannot be written ({error.strerror}) at step {row['step']}: free some space"
                ) from None

    def close(self):
        self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):  # every row was flushed when it was written
                self.file.close()
        if self.plot and self.rows:
            try:
                write_plot(run_curves(self.rows), self.title, self.plot)
            except OSError as error:
                raise ConfigError(f"{self.plot}: cannot be written ({error.strerror}): free some space") from None


def open_run_log(config, first, recorded, lock, notes):
    """The RunLog of a RunConfig. With --overwrite, renames the files of an older run.

    first: the number of the next step; recorded: as for RunLog; lock: the RunLock of --out, or None; notes: a list to
    which lines to print are appended. Raises ConfigError if this run may not write --log or --plot; then no file has
    been renamed.
    """
    check_output_files(config.log, config.plot)
    rows = len(list(log_rows(config.log))) if config.log and not config.resume else 0
    if rows and not config.overwrite:
        raise ConfigError(
            f"--log {config.log}: holds {counted(rows, 'step')} of another run: continue it with --resume, give "
            f"--overwrite to rename the file, or choose another one"
        )
    if older := older_run(config):
        held = f"{config.out} held {describe_step(older)} of an earlier run"
        notes.append(f"note: {held}: it is now {lock.rename_directory()}")
    if rows and config.log.exists():  # false if the log was in the directory just renamed
        notes.append(f"note: {config.log} was the log of an earlier run: it is now {rename_with_number(config.log)}")
    notes += lock.notes if lock else []
    title = f"GPT-2 {config.init_from or config.preset} on {config.data.name}"
    return RunLog(config.log, config.plot, config.log_every, first, max(config.steps, first), title, recorded)


class SilentLog:
    """The log of a rank that is not the root: it writes nothing."""

    def print(self, text):
        pass

    print_error = print

    def __call__(self, step, val_loss, final_fields):
        pass

    def close(self):
        pass


def step_and_loss(row):
    return {name: row[name] for name in ("step", "loss")}


def step_line(step):
    """The line of a Step on the screen, in at most 79 characters at usual sizes."""
    parts = [
        f"step {step.step:5d}",
        f"loss {step.loss:.6f}",
        f"lr {step.lr:.3e}",
        f"norm {step.grad_norm:.4f}",
        f"{step.seconds * 1e3:6.1f} ms",
    ]
    if step.mfu is not None:
        parts.append(f"mfu {step.mfu:.0%}")
    return " | ".join(parts)


def constants(step):
    """Lines with the values of a Step that seldom change."""
    lines = []
    if step.bytes_sent is not None:
        lines.append(f"rank 0 sends {step.bytes_sent / 1e6:.2f} MB per step")
    if step.loss_scale is not None:
        lines.append(f"loss scale {step.loss_scale:g}" + (f", skipped {step.skipped}" if step.skipped else ""))
    return lines


def describe(config, trainer, corpus):
    """The header of a run: model, data, division of the work."""
    model, world, data, threads = trainer.config, trainer.world, trainer.mesh.data, trainer.workers.size
    lines = [
        f"GPT-2 {config.init_from or config.preset}: {parameter_count(model):,} parameters, {model.n_layer} layers, "
        f"{model.n_head} heads, {model.n_embd} wide, vocabulary {model.vocab_size}",
        f"{len(corpus.tokens):,} tokens of {config.data.name}, {config.batch_size} x {config.seq_len} per step in "
        f"{counted(trainer.micro_batches, 'micro-batch')} on {counted(threads, 'thread')}, "
        f"{config.precision} on {trainer.backend.runtime.name}",
    ]
    if not world.one_process:
        lines.append(
            f"{counted(world.size, 'rank')}: {data.size} data x {trainer.mesh.tensor.size} tensor parallel, "
            f"--dp {config.dp}, --collectives {config.collectives}, --compress {config.compress}, --zero {config.zero}"
            + f", --zero-gather {config.zero_gather}" * (config.zero_gather != "end")
            + f", --transport {config.transport}" * bool(config.transport)
        )
    if trainer.measured:
        lines.append(str(trainer.measured))
    if config.zero:
        whole = 2 * trainer.arena.size * trainer.parameters.itemsize
        lines.append(
            f"optimizer state: {trainer.optimizer.nbytes / 2**20:.2f} MiB per rank; {whole / 2**20:.2f} MiB with "
            f"--zero 0"
        )
    if not config.out:
        lines.append("no --out: nothing will be saved")
    return "\n".join(lines)


def unused_threads(usable, config, trainer):
    """A list with one note if the batch has work for fewer than `usable` threads; otherwise []."""
    if trainer.workers.size >= usable:
        return []
    return [
        f"note: a batch of {config.batch_size} in {counted(trainer.micro_batches, 'micro-batch')} keeps no more than "
        f"{trainer.workers.size} of {usable} threads busy"
    ]


def time_left(seconds, steps):
    """A list with one note about the time of `steps` more steps of `seconds` each, or [] if it is less than 10 s."""
    left = seconds * steps
    return [f"about {duration(left)} for {counted(steps, 'more step')}"] if left >= 10 else []


def report_end(config, trainer, first_step, seconds, stopped_by, command, emit):
    """Print how the run ended.

    seconds: the time of its steps. stopped_by: the number of a signal, or None. command: the one that resumes the run.
    """
    out = config.out
    if first_step >= config.steps:
        emit(f"nothing was left to train after {counted(first_step, 'step')}: --steps is {config.steps} in total")
    if stopped_by and trainer.steps < config.steps:
        done = f"{reason(stopped_by)} after {trainer.steps} of {counted(config.steps, 'step')}"
        emit(f"{done}: " + (f"continue with\n  {command}" if out else "nothing was saved, because --out was not given"))
        return
    total = f", {trainer.steps} in total" if first_step else ""
    saved = f", saved in {out}" if out else " (no --out: nothing was saved)"
    emit(f"trained {counted(trainer.steps - first_step, 'step')} in {duration(seconds)}{total}{saved}")
    if trainer.loss_scale.value is not None:
        skipped, factor = trainer.loss_scale.skipped, trainer.loss_scale.value
        emit(f"loss scale {factor:g}; steps repeated because of overflow: {skipped}")
    if held := trainer.backend.runtime.peak_memory():
        emit(f"device memory held, at most: {held / 2**30:.2f} GiB")


def reason(number):
    """Why a run ended early, from the number of the signal."""
    name = signal.Signals(number).name
    return "interrupted" if name == "SIGINT" else f"stopped by {name}"


def duration(seconds):
    """Seconds as text: in seconds below 2 minutes, in minutes below 2 hours, otherwise in hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def perplexity(loss):
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def read_log(path):
    """The rows of a log without an incomplete last line, which a crash can leave; [] if there is no such file.

    Raises ConfigError if the file is not a log.
    """
    return [row for row, _ in log_rows(path)]


def flops_per_token(config, seq_len):
    """Floating-point operations of a training step per token (PaLM, appendix B).

    6 per weight of a matrix product, and 12 * n_layer * n_embd * seq_len for attention.
    """
    positions = config.block_size * config.n_embd
    unused = positions + (
        0 if config.tied else config.vocab_size * config.n_embd
    )  # weights used only in table look-ups
    return 6 * (parameter_count(config) - unused) + 12 * config.n_layer * config.n_embd * seq_len


def with_utilisation(trainer, step):
    """The Step with its model-FLOPs utilisation, if the peak of the device is known; otherwise the Step unchanged."""
    peak = trainer.backend.runtime.peak_flops(trainer.backend.precision)
    if not peak:
        return step
    flops = step.tokens_per_second * flops_per_token(trainer.config, trainer.seq_len)
    return dataclasses.replace(step, mfu=flops / (peak * trainer.world.size))

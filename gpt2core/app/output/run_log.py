"""The steps of a training run: a progress bar, and one line per step on the screen and in the log."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from stat import S_ISREG

from tqdm import tqdm

from gpt2core.app.checkpoints.directory import describe_step
from gpt2core.app.checkpoints.out_flag import checkpoint_of_older_run
from gpt2core.app.exclusive_paths import is_open_file, of_another_run, rename_with_number
from gpt2core.app.output.failed_output import noted
from gpt2core.app.output.loss_plot import run_curves, write_plot
from gpt2core.app.output.output_files import check_output_files, continue_log, log_rows
from gpt2core.app.output.terminal import wrapped
from gpt2core.errors import ConfigError, counted


class RunLog:
    """Reports each step to the screen, a log file and a plot.

    path: the log file, or None. next_step: the number of the next step; the log keeps its rows of earlier steps.
    recorded: the last row of the log when the checkpoint was saved, see output_files.check_log_of_run(). plot: the PNG
    file of the loss curve, or None. title: the title of the plot. every: the number of steps between two lines on the
    screen and in the log. steps: the total number of steps of the run.

    A row of the log is a JSON object with the fields of a Step that are not None, at full precision. Rows of steps with
    validation also have val_loss and val_perplexity; the last row has parameters_sha256 and, on a GPU,
    peak_memory_bytes. The constructor raises ConfigError if `path` is not a log. write_row() raises ConfigError if the
    log cannot be written, for example because the disk is full. A plot that cannot be written is only noted.
    """

    hides_bar = None  # whether there is no progress bar; None: only if standard error is no terminal

    def __init__(self, path, plot, every, next_step, steps, title="", recorded=None):
        self.every, self.plot, self.title = every, plot, title
        self.file, self.rows = continue_log(path, next_step, recorded) if path else (None, [])
        self.path = path
        # Saved in each checkpoint. Before the first step it remains that of the loaded checkpoint.
        self.last_log_row = step_and_loss(self.rows[-1]) if self.rows else recorded or {}
        self.complete_bytes = os.path.getsize(path) if path else 0  # size of the log up to its last complete line
        self.lost = False  # whether rows are lost because another program has changed the log
        self.previous_lines = []  # the rarely_changing_lines() of the step that was printed last
        options = dict(unit="step", leave=False, dynamic_ncols=True)
        self.bar = tqdm(total=steps, initial=next_step, disable=self.hides_bar, **options)

    def __call__(self, step, val_loss, final_fields):
        """Report a Step. val_loss: None without validation. final_fields: a dict of more fields of the last row."""
        row = {key: value for key, value in dataclasses.asdict(step).items() if value is not None}
        if val_loss is not None:
            row |= {"val_loss": val_loss, "val_perplexity": perplexity(val_loss)}
        row |= final_fields or {}
        self.bar.update()
        self.bar.set_postfix_str(f"loss {step.loss:.4f}")
        self.rows.append(row)
        if not self.path:
            self.last_log_row = {}  # this step is in no log
        if step.step % self.every == 0 or val_loss is not None or final_fields:
            self.write_row(row)
            self.print_step(step, val_loss)

    def print_step(self, step, val_loss):
        """Print those rarely_changing_lines() that have changed, the line of the Step and, if given, `val_loss`."""
        lines = rarely_changing_lines(step)
        for line in lines:
            if line not in self.previous_lines:
                self.print(line)
        self.previous_lines = lines
        self.print(step_line(step))
        if val_loss is not None:
            self.print(f"validation: loss {val_loss:.6f}, perplexity {perplexity(val_loss):.3f}")

    def print(self, text):
        """Print text above the progress bar."""
        tqdm.write(wrapped(text))

    def print_error(self, text):
        """Print text on standard error, above the progress bar."""
        tqdm.write(text, file=sys.stderr)

    def write_row(self, row):
        """Append a row to the log, if there is a log. After an error, cut the incomplete line and close the log."""
        if self.file:
            line = json.dumps(row) + "\n"  # ASCII, so its length is its number of bytes
            try:
                self.file.write(line)
                self.file.flush()
                self.complete_bytes += len(line)
                self.last_log_row = step_and_loss(row)
                self.note_lost_rows()
            except OSError as error:
                file, self.file = self.file, None
                with contextlib.suppress(OSError):
                    file.close()
                with contextlib.suppress(OSError):
                    os.truncate(file.name, self.complete_bytes)
                raise ConfigError(
                    f"{file.name}: cannot be written ({error.strerror}) at step {row['step']}: free some space"
                ) from None

    def note_lost_rows(self):
        """Print a note, only once, if another program has removed, replaced or shortened the log."""
        stat = os.fstat(self.file.fileno())
        shorter = S_ISREG(stat.st_mode) and stat.st_size < self.complete_bytes
        if not self.lost and (shorter or not is_open_file(self.path, self.file)):
            self.print_error(f"note: --log {self.path}: was removed or changed during the run: rows are lost")
            self.lost = True

    def close(self):
        """Remove the progress bar, close the log and write the plot."""
        self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):  # nothing is lost: every row was flushed when it was written
                self.file.close()
        if self.plot and self.rows:
            with noted(f"--plot {self.plot}: cannot be written"):
                write_plot(run_curves(self.rows), self.title, self.plot)


def open_run_log(config, next_step, recorded, lock, notes, make_log=RunLog):
    """The RunLog of a RunConfig; if it may overwrite an older run, its directory and log are renamed first.

    next_step, recorded: arguments of RunLog. lock: the RunLock of the output directory, or None. notes: a list to which
    this function appends lines to print. make_log: RunLog or a subclass. Raises ConfigError, before anything is
    renamed, if this run may not write its log, plot or trace.
    """
    row_count = rows_of_older_run(config)
    if older := checkpoint_of_older_run(config):
        held = f"{config.out} held {describe_step(older)} of an earlier run"
        notes.append(f"note: {held}: it is now {lock.rename_directory()}")
    if row_count and config.log.exists():  # it does not exist if it was in the directory that was just renamed
        notes.append(f"note: {config.log} was the log of an earlier run: it is now {rename_with_number(config.log)}")
    if older:
        check_output_files(config.log, config.plot, config.trace)  # creates their folders in the new directory
    notes += lock.notes if lock else []
    title = f"GPT-2 {config.init_from or config.preset} on {config.data.name}"
    steps = max(config.steps, next_step)
    return make_log(config.log, config.plot, config.log_every, next_step, steps, title, recorded)


def rows_of_older_run(config):
    """The number of rows in the log that another run has written, which this run may overwrite.

    Raises ConfigError if this run may not write its log, plot or trace.
    """
    check_output_files(config.log, config.plot, config.trace)
    row_count = len(list(log_rows(config.log))) if config.log and not config.resume else 0
    if row_count and not config.overwrite:
        raise ConfigError(of_another_run(f"--log {config.log}", counted(row_count, "step"), "", "file"))
    return row_count


class SilentLog:
    """The RunLog of a rank that is not the root: it writes and prints nothing."""

    def print(self, text):
        pass

    print_error = print

    def __call__(self, step, val_loss, final_fields):
        pass

    def close(self):
        pass


def step_and_loss(row):
    """The fields of a row that a checkpoint stores, so that a resumed run can recognise its own log."""
    return {name: row[name] for name in ("step", "loss")}


def step_line(step):
    """The line of a Step on the screen; it has at most 79 characters if its numbers have a usual size."""
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


def rarely_changing_lines(step):
    """A list of lines with the values of a Step that are usually equal to those of the previous step."""
    lines = []
    if step.bytes_sent is not None:
        lines.append(f"rank 0 sends {step.bytes_sent / 1e6:.2f} MB per step")
    if step.loss_scale is not None:
        repetitions = f"; repetitions of this step because of overflow: {step.skipped}" if step.skipped else ""
        lines.append(f"loss scale {step.loss_scale:g}{repetitions}")
    return lines


def perplexity(loss):
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def read_log(path):
    """A list of the rows of the log at `path`; [] if there is no such file. Raises the errors of log_rows()."""
    return [row for row, _ in log_rows(path)]

"""The training command: open_run(), make_training() and open_outputs(), then the loop, a report and a sample text."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gpt2core.app.backend_setup import memory_errors, step_sizes
from gpt2core.app.checkpoints.out_flag import continue_flags, resume_command
from gpt2core.app.inference.continuations import write_continuation, write_text
from gpt2core.app.output.failed_output import noted
from gpt2core.app.output.run_log import RunLog, SilentLog, open_run_log
from gpt2core.app.output.run_summary import report_end, run_header, time_left, unused_threads
from gpt2core.app.output.terminal import training_width, wrapped
from gpt2core.app.resume import run_state
from gpt2core.app.settings.config_file import earlier_settings, text_of
from gpt2core.app.stop_signals import StopSignals
from gpt2core.app.training.background_writer import BackgroundWriter
from gpt2core.app.training.loop import LogLost, run
from gpt2core.app.training.setup import Training, make_training, open_run
from gpt2core.architecture import parameter_shapes
from gpt2core.errors import CheckpointError, Diverged, UserError, counted
from gpt2core.parallel.all_or_raise import on_root, shared_error
from gpt2core.parallel.launcher_env import tell_launcher
from gpt2core.parallel.micro_batches.count import possible_ranks
from gpt2core.parallel.pipeline.measured import pictures
from gpt2core.parallel.whole_parameters import current_model, named_moments, named_parameters, parameter_hash


@contextlib.contextmanager
def prepared_run(stage, world, args, cores, make_log=RunLog, on_step=None):
    """A context with the Outputs of the run with the TrainSettings `args`, in which its output directory is locked.

    stage: a Stage. world: the Communicator of all ranks. cores: the number of cores that this rank may use. make_log:
    RunLog or a subclass. on_step(step, validation_loss), if given, is called after each step, on every rank; it must
    raise no error. All ranks must call this function with equal settings. Only the root reads the inputs, and writes
    log and checkpoints.
    """
    with contextlib.ExitStack() as locks:
        opened = open_run(stage, world, args, locks)
        training = make_training(stage, world, opened, cores)
        outputs = open_outputs(world, args, opened, training, make_log, on_step)
        del opened  # free the arrays of the checkpoint, which the trainer has copied
        yield outputs


def open_outputs(world, args, opened, training, make_log, on_step):
    """The Outputs of a Training with its log; all ranks call it. opened: the OpenedRun of the Training.

    The other arguments are those of prepared_run().
    """
    config, trainer, notes = training.config, training.trainer, list(training.notes)
    recorded, lock = opened.progress and opened.progress.last_log_row, opened.lock
    log = on_root(world, lambda: open_run_log(config, trainer.steps, recorded, lock, notes, make_log)) or SilentLog()
    trainer.backend.runtime.on_notice = log.print_error
    notes = [*trainer.backend.runtime.notes(trainer.config), *notes]
    if config.sample_every and not config.sample:
        notes.append(f"note: --sample-every {config.sample_every}: no effect, because --sample is 0")
    if config.async_checkpoints and not (config.checkpoint_every or config.checkpoint_seconds):
        text = "no effect without --checkpoint-every or --checkpoint-seconds"
        notes.append(f"note: --async-checkpoints: {text}, because only the last checkpoint is saved")
    settings_text = on_root(world, lambda: text_of(args, config, earlier_settings(args)))
    again = resume_command(replace(args, out=config.out))
    if world.is_root:
        with noted("the launcher would start a failed job only with the same number of ranks"):
            tell_launcher(ranks=possible_worlds(config, trainer))
    return Outputs(training, log, settings_text, notes, on_step, again)


def possible_worlds(config, trainer):
    """The numbers of ranks with which a run can be continued with the same flags."""
    is_fixed = config.deterministic or config.micro_batches
    replicas = possible_ranks(config.batch_size, trainer.micro_batches if is_fixed else None, config.deterministic)
    return [config.tp * config.pp * number for number in replicas]


def train_command(stage, world, args, cores):
    """Train, report and sample; returns the exit code. The arguments are those of prepared_run()."""
    with prepared_run(stage, world, args, cores) as outputs:
        training, log = outputs.training, outputs.log
        config, trainer, first_step = training.config, training.trainer, training.trainer.steps
        unused = unused_threads(training.threads, config, trainer)
        for text in (run_header(config, trainer, training.corpus), *unused, *outputs.notes):
            log.print(wrapped(text, training_width()))
        if first_step:
            log.print(f"resumed after {counted(first_step, 'step')}")
        signal, seconds = run_steps(outputs, StopSignals(world.is_root))
        resumed = resume_command(replace(args, out=config.out), None if world.one_process else world.size)
        command = trainer.backend.runtime.environment + resumed
        if world.is_root:
            with noted("the last lines of the run are missing"):
                report_end(config, trainer, first_step, seconds, signal, command)
        if signal:
            return 128 + signal
        if config.sample > 0:
            model = current_model(trainer)  # a collective: all ranks call it
            if world.is_root:
                with noted("the sample text is missing"):
                    write_sample(config, training.corpus, trainer, model)
        return 0


# -- the run -----------------------------------------------------------------------------------------------------------


def run_steps(outputs, signals):
    """Run the loop of prepared_run(), close its log; returns (number of the signal that stopped it or None, seconds).

    signals: the StopSignals of this rank.
    """
    training = outputs.training
    config, trainer = training.config, training.trainer
    sizes = step_sizes(config, trainer.micro_batches, trainer.mesh.data.size)
    first_step, start = trainer.steps, time.perf_counter()
    try:
        with signals as stop, memory_errors(trainer.backend, trainer.config, *sizes), outputs.writer:
            if training.trace:
                training.trace.begin()
            signal = run(
                trainer,
                training.windows,
                training.schedule,
                config.steps,
                validation=training.validation,
                eval_every=config.eval_every,
                on_step=outputs.report,
                save=outputs.save if config.out else None,
                save_every=config.checkpoint_every,
                save_seconds=config.checkpoint_seconds or math.inf,
                verify_every=config.verify_every,
                sample=outputs.sample,
                sample_every=config.sample_every if config.sample else 0,
                received_signal=lambda: stop.received or 0,
            )
            stop.ended_by = signal
            return signal, time.perf_counter() - start
    except LogLost as error:
        if config.out:
            saved = f"the {counted(error.steps, 'step')} trained so far are saved"
            error.args = (f"{error}; {saved}: continue with {continue_flags(config.out)}",)
        raise
    except Diverged:
        raise_if_damaged(config.resume or config.init_from, trainer, first_step)
        raise
    finally:
        outputs.log.close()


@dataclass
class Outputs:
    """What a run writes. The training loop calls report(), save() and sample() after a step, on all ranks."""

    training: Training
    log: RunLog | SilentLog  # a RunLog on the root
    settings_text: str | None  # on the root, the content of the file with the settings of this run
    notes: list[str]  # lines for the user
    on_step: Callable | None = None  # see prepared_run()
    resume_command: str = ""  # continues this run from its newest checkpoint

    def __post_init__(self):
        self.config, self.corpus, self.trainer = self.training.config, self.training.corpus, self.training.trainer
        self.first_step = self.trainer.steps
        runtime = self.trainer.backend.runtime
        self.writer = BackgroundWriter(on_error=lambda text: self.log.print_error(text), runtime=runtime)
        config = self.config
        saves_between = config.out and (config.checkpoint_every or config.checkpoint_seconds)
        if saves_between and config.async_checkpoints and self.trainer.world.is_root:
            with contextlib.suppress(OSError):  # the first checkpoint reports it
                self.writer.prepare(3 * [shape for _, shape in parameter_shapes(self.trainer.config)])

    def save(self, trainer, last):
        waits = last or not self.config.async_checkpoints
        # collectives: all ranks call them
        parameters, moments = named_parameters(trainer, to_host=waits), named_moments(trainer, to_host=waits)
        if not trainer.world.is_root:
            return
        save = self.writer.save_now if waits else self.writer.save
        save(
            self.config.out,
            trainer.steps,
            config=trainer.config,
            parameters=parameters,
            moments=moments,
            tokenizer=self.corpus.tokenizer,
            state=run_state(trainer, self.config, self.corpus.fingerprint, self.log.last_log_row),
            keep=self.config.keep,
            settings_text=self.settings_text,
            command=self.resume_command,
        )

    def sample(self, trainer):
        """Print a sample text during training. One thread generates it, so that training keeps its matrix products."""
        model, parts = current_model(trainer), []  # a collective: all ranks call it
        if trainer.world.is_root:
            with noted("a sample text is missing"):
                prompt = sample_prompt(self.corpus, trainer)
                emit = lambda text, end="\n", **_: parts.append(text + end)  # noqa: E731
                write_continuation(
                    model, self.corpus.tokenizer, prompt, self.config.sample, emit=emit, width=training_width()
                )
                self.log.print(f"sample after {counted(trainer.steps, 'step')}: {''.join(parts).strip()}")

    def report(self, step, validation_loss, last):
        trainer, log = self.trainer, self.log
        self.writer.poll()
        # first what all ranks do together: an error of the log on one rank must not leave the others waiting
        fields, note, lines = final_fields(trainer) if last else None, None, []
        try:
            lines = list(self.training.trace.step_ended(step, last)) if self.training.trace else []
        except UserError as error:  # raised on all ranks; the run needs no trace
            note = f"note: there is no trace: {error}"
        if last and self.config.schedule_picture and self.config.pp > 1:
            lines += pictures(trainer.accumulator, trainer.mesh.pipeline, training_width())
        if self.on_step:
            self.on_step(step, validation_loss)
        log(step, validation_loss, fields)
        # If the first step is captured as a CUDA graph, its time is not that of later steps.
        if step.step == self.first_step and not trainer.backend.runtime.uses_graphs:
            lines = [*time_left(step.seconds, self.config.steps - self.first_step - 1), *lines]
        for line in lines:
            log.print(line)
        if note:
            log.print_error(note)


def raise_if_damaged(source, trainer, first_step):
    """Raise CheckpointError on all ranks if the checkpoint `source`, a path or None, is the cause that a step diverged.

    It is not if none was loaded, if a step has succeeded, or in fp16, which can overflow.
    """
    if source and trainer.steps == first_step and trainer.loss_scale.value is None:
        raise shared_error(
            CheckpointError(
                f"{source}: the loss or its gradient is not finite before the first update: the checkpoint is damaged, "
                f"or its run had diverged: use an earlier one"
            )
        ) from None


def final_fields(trainer):
    """The additional fields of the last row of the log, a dict; all ranks must call it."""
    peak = trainer.backend.runtime.peak_memory()
    return {"parameters_sha256": parameter_hash(trainer)} | ({} if peak is None else {"peak_memory_bytes": peak})


def write_sample(config, corpus, trainer, model):
    """Continue the first tokens of the corpus with the trained `model`; only the root calls it."""
    trainer.backend.runtime.use_threads(trainer.pool.size)
    write_text(model, corpus.tokenizer, sample_prompt(corpus, trainer), config.sample, width=training_width())


def sample_prompt(corpus, trainer):
    """The first tokens of the corpus, as a list of ids."""
    return np.asarray(corpus.tokens[: min(256, trainer.config.block_size)]).tolist()

"""The training command: read the inputs, build the Trainer, run the loop, report and sample.

Setup that can fail on one rank runs in all_or_raise() or on_root(), so that all ranks raise the error. If only one rank
raised it, the other ranks would wait for this rank forever.
"""

import contextlib
import time
from dataclasses import dataclass, replace

import numpy as np

from gpt2core.app.backend_setup import make_backends, memory_errors, step_sizes, usable_cores, usable_threads
from gpt2core.app.checkpoints.directory import save_checkpoint
from gpt2core.app.checkpoints.out_flag import continue_flags, resume_command
from gpt2core.app.checkpoints.run_folders import lock_new_run
from gpt2core.app.checkpoints.run_lock import RunLock
from gpt2core.app.config_file import NAME, earlier_settings, text_of, write_settings
from gpt2core.app.corpus import Corpus, naming_text, share_corpus, text_names
from gpt2core.app.host_memory import check_host_memory
from gpt2core.app.inference.continuations import write_continuation, write_text
from gpt2core.app.one_process import check_one_process, check_rank_flags
from gpt2core.app.output.failed_output import noted
from gpt2core.app.output.run_log import RunLog, SilentLog, open_run_log
from gpt2core.app.output.run_summary import report_end, run_header, time_left, unused_threads
from gpt2core.app.output.terminal import training_width, wrapped
from gpt2core.app.resume import restore, run_state
from gpt2core.app.run_config import RunConfig, data_parallel_ranks
from gpt2core.app.stop_signals import StopSignals
from gpt2core.app.training_inputs import read_inputs
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.engine.run import LogLost, run
from gpt2core.errors import CheckpointError, ConfigError, Diverged, counted
from gpt2core.optimizer import Schedule
from gpt2core.parallel.all_or_raise import all_or_raise, on_root, shared_error
from gpt2core.parallel.config import plan_micro_batches
from gpt2core.parallel.local_windows import LocalWindows
from gpt2core.parallel.pipeline.measured import pictures
from gpt2core.parallel.whole_parameters import current_model, named_moments, named_parameters, parameter_hash
from gpt2core.tracing.trace import Trace


@dataclass
class TrainingRun:
    """What run_steps() needs, on one rank. log: a RunLog on the root, a SilentLog on the other ranks."""

    config: RunConfig
    corpus: Corpus
    trainer: FastTrainer
    windows: Windows | LocalWindows
    validation: Windows | None
    schedule: Schedule
    log: RunLog | SilentLog
    trace: Trace | None
    notes: list[str]  # lines for the user
    threads: int  # the worker threads that this rank may use
    settings: str | None  # on the root, the content of the file with the settings of this run


@contextlib.contextmanager
def prepared_run(stage, world, args, cores, make_log=RunLog):
    """A context with the TrainingRun of the settings `args`, in which its output directory is locked.

    stage: a Stage. world: the Communicator of all ranks. cores: the number of cores that this rank may use. make_log:
    RunLog or a subclass. All ranks must call it with equal settings. Only the root reads the inputs, and writes log and
    checkpoints.
    """
    check_one_process(stage, world)
    check_rank_flags(stage, world, args)
    transport = all_or_raise(world, lambda: world.use_transport(args.transport))
    with contextlib.ExitStack() as locks:
        yield prepare_run(stage, world, args, cores, transport, locks, make_log)


def open_run(stage, world, args, transport, locks):
    """Read the inputs and lock the output directory; all ranks call it.

    Returns the lock and the Inputs, both None unless this is the root, and (RunConfig, Progress, Tokenizer) of the
    Inputs. locks: the ExitStack that holds the lock.
    """
    lock = on_root(world, lambda: locks.enter_context(RunLock(args.out)) if args.out else None)
    inputs = on_root(world, lambda: read_inputs(world, args, transport, stage.backend.deterministic))
    config, *others = world.broadcast_object(inputs and (inputs.config, inputs.progress, inputs.tokenizer))
    if config.save and not config.out:
        lock = on_root(world, lambda: locks.enter_context(lock_new_run(stage.name, config.preset)))
        config = replace(config, out=world.broadcast_object(lock and lock.directory))
    return lock, inputs, (config, *others)


def prepare_run(stage, world, args, cores, transport, locks, make_log):
    """Do the work of prepared_run(). locks: the ExitStack that holds the lock of the output directory on the root."""
    lock, inputs, (config, progress, tokenizer) = open_run(stage, world, args, transport, locks)
    notes = inputs.notes if inputs else []
    cores = usable_cores(config, cores)
    all_or_raise(world, lambda: world.use_collectives(config.collectives))
    corpus = share_corpus(world, config, inputs and (inputs.tokens, inputs.validation), tokenizer)
    trainer = all_or_raise(world, lambda: make_trainer(stage, world, config, cores, config.seed))
    if config.schedule_picture and config.pp > 1:
        trainer.accumulator.executor.record_times()
    trace = all_or_raise(world, lambda: make_trace(config, trainer))
    windows, validation, schedule = all_or_raise(
        world, lambda: make_data_and_schedule(config, corpus, trainer.mesh.data)
    )
    if config.resume or config.init_from:
        source = inputs and inputs.source
        notes += all_or_raise(world, lambda: restore(trainer, source, progress, config.autotune))
    inputs = source = None  # free the arrays of the checkpoint, which the trainer has copied
    recorded = progress and progress.last_log_row
    log = on_root(world, lambda: open_run_log(config, trainer.steps, recorded, lock, notes, make_log)) or SilentLog()
    trainer.backend.runtime.on_notice = log.print_error
    notes = [*trainer.backend.runtime.notes(trainer.config), *notes]
    threads = usable_threads(stage.backend, config.threads, cores)
    if config.sample_every and not config.sample:
        notes.append(f"note: --sample-every {config.sample_every}: no effect, because --sample is 0")
    settings = on_root(world, lambda: text_of(args, config, earlier_settings(args)))
    return TrainingRun(config, corpus, trainer, windows, validation, schedule, log, trace, notes, threads, settings)


def train_command(stage, world, args, cores):
    """Train with the parsed flags; returns the exit code. The arguments are those of prepared_run()."""
    with prepared_run(stage, world, args, cores) as prepared:
        return run_training(world, args, prepared)


def run_training(world, args, prepared):
    """Do the work of train_command() with a TrainingRun: train, report and sample."""
    config, corpus, trainer, log = prepared.config, prepared.corpus, prepared.trainer, prepared.log
    first_step = trainer.steps
    unused = unused_threads(prepared.threads, config, trainer)
    for text in (run_header(config, trainer, corpus), *unused, *prepared.notes):
        log.print(wrapped(text, training_width()))
    if first_step:
        log.print(f"resumed after {counted(first_step, 'step')}")
    signal, seconds = run_steps(prepared, StopSignals(world.is_root))
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
                write_sample(config, corpus, trainer, model)
    return 0


# -- the objects of the training loop ----------------------------------------------------------------------------------


def make_trainer(stage, world, config, cores, seed):
    """The FastTrainer of a RunConfig; all ranks call it. seed: of the initial parameters, or None."""
    replicas = data_parallel_ranks(world, config.tp, config.pp)
    threads = usable_threads(stage.backend, config.threads, cores)
    micro_batches, threads = plan_micro_batches(
        config.batch_size, config.micro_batches, threads, replicas, config.deterministic
    )
    backends = all_or_raise(world, lambda: make_backends(stage.backend, config, threads))
    all_or_raise(world, lambda: backends[0].runtime.check_training(config.model))
    all_or_raise(world, lambda: check_host_memory(stage, backends, config, world, replicas))
    with memory_errors(backends[0], config.model, *step_sizes(config, micro_batches, replicas)):
        return FastTrainer(
            config.model,
            backends,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            micro_batches=micro_batches,
            optimizer=config.optimizer,
            world=world,
            parallel=config.parallel,
            seed=seed,
            capture=config.graph is not False,
        )


def make_trace(config, trainer):
    """The Trace of a run, or None. Call it before the first step, which may be captured; all ranks call it."""
    return Trace(trainer, config.trace, config.trace_steps) if config.trace else None


def make_data_and_schedule(config, corpus, group):
    """(training Windows, validation Windows or None, Schedule) for this rank; group: the data-parallel group."""
    names = text_names(config)
    with naming_text(names[0]):
        if config.local_shuffle:
            windows = LocalWindows(corpus.tokens, config.seq_len, config.seed, group.rank, group.size)
        else:
            order = "shuffled" if config.shuffle else "sequential"
            windows = Windows(corpus.tokens, config.seq_len, order, config.seed)
    with naming_text(names[1]):
        validation = None if corpus.validation is None else Windows(corpus.validation, config.seq_len)
    return windows, validation, config.learning_rate


# -- the run -----------------------------------------------------------------------------------------------------------


def run_steps(prepared, signals, on_step=None):
    """Run the loop of a TrainingRun, close its log; returns (number of the signal that stopped it or None, seconds).

    signals: the StopSignals of this rank. on_step(step, validation_loss), if given, is called after each step, on every
    rank; it must raise no error.
    """
    config, trainer, log, trace = prepared.config, prepared.trainer, prepared.log, prepared.trace
    sizes = step_sizes(config, trainer.micro_batches, trainer.mesh.data.size)
    outputs, first_step, start = Outputs(prepared, on_step), trainer.steps, time.perf_counter()
    try:
        with signals as stop, memory_errors(trainer.backend, trainer.config, *sizes):
            if trace:
                trace.begin()
            signal = run(
                trainer,
                prepared.windows,
                prepared.schedule,
                config.steps,
                validation=prepared.validation,
                eval_every=config.eval_every,
                on_step=outputs.report,
                save=outputs.save if config.out else None,
                save_every=config.checkpoint_every,
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
        log.close()


class Outputs:
    """What the training loop calls after a step: report(), save() and sample(). All ranks call them."""

    def __init__(self, prepared, on_step=None):
        self.config, self.corpus, self.trainer = prepared.config, prepared.corpus, prepared.trainer
        self.log, self.trace, self.on_step, self.settings = prepared.log, prepared.trace, on_step, prepared.settings
        self.first_step = self.trainer.steps

    def save(self, trainer):
        parameters, moments = named_parameters(trainer), named_moments(trainer)  # collectives: all ranks call them
        if trainer.world.is_root:
            save_checkpoint(
                self.config.out,
                trainer.steps,
                config=trainer.config,
                parameters=parameters,
                moments=moments,
                tokenizer=self.corpus.tokenizer,
                state=run_state(trainer, self.config, self.corpus.fingerprint, self.log.last_log_row),
                keep=self.config.keep,
            )
            with noted(f"{NAME} was not written"):
                write_settings(self.config.out / NAME, self.settings)

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
        # first what all ranks do together: an error of the log on one rank must not leave the others waiting
        fields, note, lines = final_fields(trainer) if last else None, None, []
        try:
            lines = list(self.trace.step_ended(step, last)) if self.trace else []
        except ConfigError as error:  # raised on all ranks; the run needs no trace
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

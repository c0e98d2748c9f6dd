"""What a run needs before its first step: open_run() reads the inputs, make_training() makes the trainer with its data.

Setup that can fail on one rank runs in all_or_raise() or on_root(), so that all ranks raise the error. If only one rank
raised it, the other ranks would wait for this rank forever.
"""

from dataclasses import dataclass, replace

from gpt2core.app.backend_setup import make_backends, memory_errors, step_sizes, usable_cores, usable_threads
from gpt2core.app.checkpoints.run_folders import lock_new_run
from gpt2core.app.checkpoints.run_lock import RunLock
from gpt2core.app.corpus import Corpus, naming_text, share_corpus, text_names
from gpt2core.app.host_memory import check_host_memory
from gpt2core.app.resume import Progress, restore
from gpt2core.app.settings.final_values import data_parallel_ranks
from gpt2core.app.settings.run_config import RunConfig
from gpt2core.app.stage_checks import check_one_process, check_rank_flags
from gpt2core.app.training.inputs import Inputs, read_inputs
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.optimizer import Schedule
from gpt2core.parallel.all_or_raise import all_or_raise, on_root
from gpt2core.parallel.data.local_windows import LocalWindows
from gpt2core.parallel.launcher_env import started_again
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.text.tokenizer import Tokenizer
from gpt2core.tracing.trace import Trace


@dataclass(frozen=True)
class OpenedRun:
    """What the ranks know before they make a trainer. lock: that of the output directory; inputs: what the root read.

    Both are None on the other ranks; lock is also None if nothing is saved.
    """

    config: RunConfig
    progress: Progress | None  # of a resumed run
    tokenizer: Tokenizer
    lock: RunLock | None
    inputs: Inputs | None


@dataclass(frozen=True)
class Training:
    """A trainer with its data, on one rank."""

    config: RunConfig
    corpus: Corpus
    trainer: FastTrainer
    windows: Windows | LocalWindows
    validation: Windows | None
    schedule: Schedule
    trace: Trace | None
    threads: int  # the worker threads that this rank may use
    notes: list[str]  # lines for the user


def open_run(stage, world, args, locks):
    """Check the flags, lock the output directory and read the inputs: an OpenedRun; all ranks call it.

    locks: the ExitStack that holds the lock. The other arguments are those of prepared_run().
    """
    if started_again() and not args.resume:  # the files that exist are of the run that failed
        args = replace(args, overwrite=True)
    check_one_process(stage, world)
    check_rank_flags(stage, world, args)
    transport = all_or_raise(world, lambda: world.use_transport(args.transport))
    lock = on_root(world, lambda: locks.enter_context(RunLock(args.out)) if args.out else None)
    inputs = on_root(world, lambda: read_inputs(world, args, transport, stage.backend.deterministic))
    config, progress, tokenizer = world.broadcast_object(inputs and (inputs.config, inputs.progress, inputs.tokenizer))
    if config.save and not config.out:
        lock = on_root(world, lambda: locks.enter_context(lock_new_run(stage.name, config.preset)))
        config = replace(config, out=world.broadcast_object(lock and lock.directory))
    return OpenedRun(config, progress, tokenizer, lock, inputs)


def make_training(stage, world, opened, cores):
    """The Training of an OpenedRun, continued from its checkpoint if there is one; all ranks call it."""
    config, inputs = opened.config, opened.inputs
    notes, cores = list(inputs.notes) if inputs else [], usable_cores(config, cores)
    all_or_raise(world, lambda: world.use_collectives(config.collectives))
    corpus = share_corpus(world, config, inputs and (inputs.tokens, inputs.validation), opened.tokenizer)
    trainer = all_or_raise(world, lambda: make_trainer(stage, world, config, cores, config.seed))
    if config.schedule_picture and config.pp > 1:
        trainer.accumulator.executor.record_times()
    trace = all_or_raise(world, lambda: make_trace(config, trainer))
    data = all_or_raise(world, lambda: make_data_and_schedule(config, corpus, trainer.mesh.data))
    if config.resume or config.init_from:
        source = inputs and inputs.source
        notes += all_or_raise(world, lambda: restore(trainer, source, opened.progress, config.autotune))
    return Training(config, corpus, trainer, *data, trace, usable_threads(stage.backend, config.threads, cores), notes)


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
            dropout=config.dropout,
            dropout_seed=config.seed,
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

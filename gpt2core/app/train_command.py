"""The two commands, from flags to objects: train_gpt2.py builds a Trainer and runs it, inference.py writes a text."""

import contextlib
import functools
import hashlib
import sys
from dataclasses import dataclass, replace

import numpy as np

from gpt2core.app import checkpoint_directory as checkpoints
from gpt2core.app.inference_io import load_tokenizer, read_prompt, read_prompts, write_batch, write_text
from gpt2core.app.presets import MODES, PRESETS, SHAPE, fill_defaults, positive
from gpt2core.app.rank_agreement import (
    available_cores,
    check_ranks,
    check_started,
    choose_collectives,
    data_parallel_ranks,
    shared_arrays,
    shared_checkpoint,
    shared_tokens,
    silent,
)
from gpt2core.app.resume import restore, run_state
from gpt2core.app.run_log import RunLog, SilentLog
from gpt2core.app.stop_signals import StopSignals
from gpt2core.communicator import Solo
from gpt2core.data import Windows, split_validation
from gpt2core.errors import ConfigError, DeviceMemoryError, counted
from gpt2core.model import parameter_count
from gpt2core.optimizer import Schedule
from gpt2core.parallel.all_or_raise import all_or_raise, on_root, shared_error
from gpt2core.parallel.config import ParallelConfig, plan_micro_batches
from gpt2core.parallel.local_windows import LocalWindows
from gpt2core.parallel.tensor_parallel import check_tensor_parallel, load_model
from gpt2core.parallel.threads import limit_blas
from gpt2core.parallel.whole_parameters import current_model, named_moments, named_parameters, parameter_hash
from gpt2core.sampler import GroupSampler, chooser
from gpt2core.text.token_file import brings_tokenizer, load_tokens
from gpt2core.text.tokenizer import Tokenizer
from gpt2core.trainer import Trainer
from gpt2core.training_loop import LogLost, run

OPTIMIZER = "beta1", "beta2", "eps", "weight_decay", "clip", "rounding", "seed"  # flags that are AdamW's options


def train_command(make_backend, world, args):
    """Train as the parsed flags say; returns the exit code. make_backend(precision) -> Backend, one for each thread.

    All ranks call it with the same flags. The root reads and tokenizes, logs, saves and samples for all.
    """
    check_started(world, make_backend.many_ranks)
    check_ranks(world, args, make_backend.many_ranks)
    resumed, initial = read_sources(world, args)
    notes = all_or_raise(
        world, lambda: fill_defaults(args, resumed, make_backend.deterministic) + choose_collectives(world, args)
    )
    corpus = read_corpus(world, args, resumed or initial)
    trainer = all_or_raise(world, lambda: make_trainer(make_backend, world, args, resumed or initial, corpus.tokenizer))
    windows, validation = all_or_raise(world, lambda: make_windows(args, corpus, trainer.mesh.data))
    notes += all_or_raise(world, lambda: restore(trainer, resumed, initial, corpus, args.autotune))
    resumed = initial = None  # the trainer has its own copy
    rates = args.schedule, args.lr, args.min_lr, args.warmup, args.steps
    schedule = all_or_raise(world, lambda: Schedule(*rates))
    begun, threads = trainer.steps, trainer.workers.size
    out, log = on_root(world, lambda: open_outputs(args, trainer, notes)) or (args.out, SilentLog())
    trainer.backend.runtime.notify = log.tell
    log.say(describe(args, trainer, corpus))
    remarks = trainer.backend.runtime.notes(trainer.config)
    for note in [*idle_threads(possible_threads(make_backend, world, args), args, trainer), *remarks, *notes]:
        log.say(note)
    if begun:
        log.say(f"resumed after step {begun - 1}" + ("" if out else "; no --out: nothing will be saved"))

    def save(trainer):
        parameters, moments = named_parameters(trainer), named_moments(trainer)  # gathered: all ranks take part
        if world.is_root:
            checkpoints.save_checkpoint(
                out,
                trainer.steps,
                config=trainer.config,
                parameters=parameters,
                moments=moments,
                tokenizer=corpus.tokenizer,
                state=run_state(trainer, args, corpus.fingerprint),
                keep=args.keep,
            )

    try:
        sizes = step_sizes(args, trainer.micro_batches, trainer.mesh.data.size)
        with StopSignals() as stop, told_of_memory(trainer.backend, trainer.config, *sizes):
            signal = run(
                trainer,
                windows,
                schedule,
                args.steps,
                validation=validation,
                eval_every=args.eval_every,
                on_step=lambda step, loss, last: log(step, loss, last_words(trainer) if last else None),
                save=save if out else None,
                save_every=args.checkpoint_every,
                verify_every=args.verify_every,
                received_signal=lambda: stop.received or 0,
            )
    except LogLost as error:
        if out:
            saved = f"; the {counted(error.steps, 'step')} made are saved: go on with --resume {out} --out {out}"
            error.args = (f"{error}{saved}",)
        raise
    finally:
        log.close()
    say = print if world.is_root else silent
    if begun >= args.steps:
        say(f"nothing was left to train after {counted(begun, 'step')}: --steps is {args.steps} in all")
    if signal:
        done = f"stopped by signal {signal} after {trainer.steps} of {counted(args.steps, 'step')}"
        hint = f"go on with --resume {out} --out {out}" if out else "nothing was saved, because --out was not given"
        say(f"{done}: {hint}")
        return 128 + signal
    saved = f", saved in {out}" if out else " (no --out: nothing was saved)"
    say(f"trained {counted(trainer.steps, 'step')}{saved}")
    if trainer.loss_scale.value is not None:
        skipped, factor = trainer.loss_scale.skipped, trainer.loss_scale.value
        say(f"loss scale {factor:g}; steps that overflowed and were made again: {skipped}")
    if held := trainer.backend.runtime.peak_memory():
        say(f"device memory held, at most: {held / 2**30:.2f} GiB")
    if args.sample > 0:
        model = current_model(trainer)  # gathered: all ranks take part
        if world.is_root:
            trainer.backend.runtime.use_threads(threads)
            prompt = corpus.tokens[: min(256, trainer.config.block_size)].tolist()
            write_text(model, corpus.tokenizer, prompt, args.sample)
    return 0


def inference_command(make_backend, world, args):
    """Write the text that the parsed flags ask for; returns the exit code. All ranks call it with the same flags."""
    check_started(world, make_backend.many_ranks)
    weights = shared_checkpoint(world, args.weights)

    def choose():
        if args.mode not in MODES:
            raise ConfigError(f"--mode {args.mode} is unknown: choose from {', '.join(MODES)}")
        if (args.mode == "batch") != (args.prompts is not None):
            raise ConfigError("--prompts FILE, one prompt a line, and --mode batch need each other: give both or none")
        if args.mode == "batch" and (args.stream or args.prompt is not None or args.prompt_file is not None):
            raise ConfigError("--mode batch takes no --prompt and no --stream: it writes all of --prompts at its end")
        world.use_transport(args.transport)
        backend = make_backend(args.precision)
        limit_blas(1)
        positive("--threads", args.threads)
        backend.runtime.use_threads(possible_threads(make_backend, world, args))
        narrowed = args.top_k or args.top_p != 1
        temperature = (1.0 if narrowed else 0.0) if args.temperature is None else args.temperature
        if args.max_new_tokens < 0:
            raise ConfigError(f"--max-new-tokens {args.max_new_tokens} must not be negative")
        return backend, lambda seed=args.seed: chooser(temperature, args.top_k, args.top_p, seed)

    def read():
        tokenizer = load_tokenizer(args.tokenizer, weights.path)
        if tokenizer.vocab_size > weights.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the weights in {weights.path} know "
                f"{weights.config.vocab_size}: give the --tokenizer they were trained with"
            )
        prompts = read_prompts(args.prompts, tokenizer) if args.prompts else [read_prompt(args, tokenizer, weights)]
        return tokenizer, prompts

    backend, make_chooser = all_or_raise(world, choose)
    tokenizer, prompts = world.broadcast_object(on_root(world, read))
    arrays, config = shared_arrays(world, weights), weights.config
    with told_of_memory(backend, config, parallel=ParallelConfig(tp=world.size if args.mode == "tensor" else 1)):
        if args.mode == "batch":
            model = load_model(config, arrays, backend)
            write_batch(world, model, tokenizer, prompts, make_chooser, args)
            return 0
        group = {"replicate": Solo(), "tensor": world}[args.mode]  # the ranks that share the model
        all_or_raise(world, lambda: check_tensor_parallel(config, group.size, "mpirun -n"))
        model = load_model(config, arrays, backend, group)
        say, prompt, block = print if world.is_root else silent, prompts[0], config.block_size
        for remark in backend.runtime.notes(config):
            say(remark, file=sys.stderr)
        if len(prompt) > block:
            note = f"note: the prompt has {len(prompt)} tokens, the block {block}: its last {block} tokens are used"
            say(note, file=sys.stderr)
            prompt = prompt[-block:]
        choose = make_chooser() if world.one_process else GroupSampler(make_chooser(), world)
        write_text(model, tokenizer, prompt, args.max_new_tokens, choose, args.stop, args.stream, args.stats, say)
        return 0


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """What is trained and validated on."""

    tokens: np.ndarray
    validation: np.ndarray | None
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self):
        """Number of tokens and a hash of them (of both ends, where they are too many to read)."""
        digest, edge = hashlib.sha256(), 1 << 22
        for part in (self.tokens[:edge], self.tokens[max(edge, len(self.tokens) - edge) :]):
            digest.update(part.tobytes())
        return f"{len(self.tokens):,} tokens with hash {digest.hexdigest()[:16]}"


def read_sources(world, args):
    """(the checkpoint to resume or None, the weights to start from or None)."""
    if args.resume and args.init_from:
        exclusive = "--resume and --init-from exclude each other: go on with a run, or start a new one"
        raise shared_error(ConfigError(exclusive))
    return shared_checkpoint(world, args.resume, with_optimizer=True), shared_checkpoint(world, args.init_from)


def read_corpus(world, args, source):
    """The Corpus that the flags name; the tokenizer is the checkpoint's where no flag says otherwise."""

    def read():
        tokenizer = args.tokenizer
        if source and not tokenizer and not brings_tokenizer(args.data):
            tokenizer = load_tokenizer(None, source.path)
        return load_tokens(args.data, tokenizer)

    tokens, tokenizer = shared_tokens(world, read, args.data)
    if args.val_data:
        validation, _ = shared_tokens(world, lambda: load_tokens(args.val_data, tokenizer), args.val_data)
        return Corpus(tokens, validation, tokenizer)
    if args.val_fraction:
        tokens, validation = all_or_raise(world, lambda: split_validation(tokens, args.val_fraction))
        return Corpus(tokens, validation, tokenizer)
    return Corpus(tokens, None, tokenizer)


def make_trainer(make_backend, world, args, source, tokenizer):
    """The Trainer that the flags ask for."""
    replicas = data_parallel_ranks(world, args.tp)
    threads = possible_threads(make_backend, world, args)
    micro_batches, threads = plan_micro_batches(
        args.batch_size, args.micro_batches, threads, replicas, args.deterministic
    )
    config = model_config(args, source, tokenizer)
    args.seq_len = args.seq_len or config.block_size

    def make_backends():  # one rank's device or libraries may fail where the others' do not
        backends = [make_backend(args.precision, args.deterministic) for _ in range(threads)]
        check_graph(args, backends)
        for backend in backends if args.autotune else ():
            backend.runtime.retune()
        return backends

    backends = all_or_raise(world, make_backends)
    with told_of_memory(backends[0], config, *step_sizes(args, micro_batches, replicas)):
        return Trainer(
            config,
            backends,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            micro_batches=micro_batches,
            optimizer={name: getattr(args, name) for name in OPTIMIZER},
            world=world,
            parallel=parallel_of(args),
            seed=args.seed,
            record=args.graph is not False,
        )


def parallel_of(args):
    return ParallelConfig(args.tp, args.dp, args.bucket_mb, args.compress, args.zero, args.zero_gather)


def step_sizes(args, micro_batches, replicas):
    """What Backend.out_of_memory wants to know of a training step, behind the model."""
    in_order = args.transport == "nccl" and args.collectives == "canonical"  # by mpi they are added up on the host
    return args.batch_size, args.seq_len, micro_batches, replicas, parallel_of(args), in_order


@contextlib.contextmanager
def told_of_memory(backend, config, *sizes, **shared):
    """Where the device runs out of memory inside, raise DeviceMemoryError with what the backend knows of it."""
    try:
        yield
    except Exception as error:
        if (told := backend.runtime.explain_oom(error, config, *sizes, **shared)) is None:
            raise
        raise DeviceMemoryError(told) from error


def check_graph(args, backends):
    """Raise ConfigError for --graph and --no-graph where the backend records nothing; do as --nvtx says."""
    records, name = backends[0].runtime.records, backends[0].name
    if args.graph is not None and not records:
        flag = "--graph" if args.graph else "--no-graph"
        raise ConfigError(f"{flag} has no meaning here: {name} records no step, so leave the flag away")
    if args.nvtx and records and args.graph is not False:
        raise ConfigError("--nvtx names nothing in a step that is replayed from its graph: add --no-graph")
    for backend in backends if args.nvtx else ():
        backend.runtime.annotate(backend)


def make_windows(args, corpus, group):
    """(training windows, validation windows or None) for one rank of the data-parallel group."""
    if args.local_shuffle:
        windows = LocalWindows(corpus.tokens, args.seq_len, args.seed, group.rank, group.size)
    else:
        windows = Windows(corpus.tokens, args.seq_len, "shuffled" if args.shuffle else "sequential", args.seed)
    return windows, None if corpus.validation is None else Windows(corpus.validation, args.seq_len)


def open_outputs(args, trainer, notes):
    """(the directory for checkpoints or None, the run log), both proven to be writable."""
    out = checkpoints.writable_directory(args.out) if args.out else None
    log = RunLog(args.log, args.plot, args.log_every, trainer.steps, max(args.steps, trainer.steps))
    if out and not args.resume and (older := checkpoints.newest_step(out)):
        notes.append(f"note: {out} holds {older.name} of an earlier run, which this replaces: --resume goes on with it")
    return out, log


def model_config(args, source, tokenizer):
    """A checkpoint's own GPT2Config, else the preset's with the flags' sizes and the tokenizer's vocabulary."""
    given = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    if source is None:
        return replace(PRESETS[args.preset], vocab_size=tokenizer.vocab_size, **given)
    config = source.config
    for name, value in given.items():
        if getattr(config, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value} is not the checkpoint's {getattr(config, name)}: leave the flag away")
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the checkpoint's vocabulary is {config.vocab_size}: "
            f"give the --tokenizer it was trained with"
        )
    return config


def describe(args, trainer, corpus):
    """What is trained, on what, and by whom, in a few lines."""
    config, world, data, threads = trainer.config, trainer.world, trainer.mesh.data, trainer.workers.size
    lines = [
        f"GPT-2 {args.init_from or args.preset}: {parameter_count(config):,} parameters, {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, vocabulary {config.vocab_size}",
        f"{len(corpus.tokens):,} tokens of {args.data.name}, {args.batch_size} x {args.seq_len} a step in "
        f"{counted(trainer.micro_batches, 'micro-batch')} on {counted(threads, 'thread')}, "
        f"{args.precision} on {trainer.backend.name}",
    ]
    if not world.one_process:
        lines.append(
            f"{counted(world.size, 'rank')}: {data.size} data x {trainer.mesh.tensor.size} tensor parallel, "
            f"--dp {args.dp}, --collectives {args.collectives}, --compress {args.compress}, --zero {args.zero}"
            + f", --zero-gather {args.zero_gather}" * (args.zero_gather != "end")
            + f", --transport {args.transport}" * bool(args.transport)
        )
    if trainer.measured:
        lines.append(str(trainer.measured))
    if args.zero:
        whole = 2 * trainer.arena.size * trainer.parameters.itemsize
        lines.append(
            f"optimizer state: {trainer.optimizer.nbytes / 2**20:.2f} MiB a rank, and {whole / 2**20:.2f} MiB with "
            f"--zero 0"
        )
    return "\n".join(lines)


def possible_threads(make_backend, world, args):
    """How many threads of this rank may share the work; raises ConfigError where the backend has no use for them."""
    if args.threads and not make_backend.uses_threads:
        raise ConfigError(f"--threads {args.threads} has no meaning here: the device works through the batch by itself")
    return args.threads or (available_cores(world) if make_backend.uses_threads else 1)


def idle_threads(could, args, trainer):
    """What to tell where fewer threads work than there could, one sentence or none."""
    if trainer.workers.size < could:
        yield (
            f"note: a batch of {args.batch_size} in {counted(trainer.micro_batches, 'micro-batch')} keeps no more than "
            f"{trainer.workers.size} of {could} threads busy"
        )


def last_words(trainer):
    """What the last line of the log says beside its step's numbers; all ranks must call it."""
    held = trainer.backend.runtime.peak_memory()
    return {"parameters_sha256": parameter_hash(trainer)} | ({} if held is None else {"peak_memory_bytes": held})

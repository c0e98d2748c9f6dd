"""The two commands, from flags to objects: train_gpt2.py builds a Trainer and runs it, inference.py writes a text."""

import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpt2core
from gpt2core import checkpoint as checkpoints
from gpt2core.dataset import Windows, brings_tokenizer, first_tokens, load_tokens, read_text, split_validation
from gpt2core.errors import CheckpointError, ConfigError, DataError
from gpt2core.model import GPT2, PRESETS, parameter_count
from gpt2core.optimizer import Schedule
from gpt2core.parallel.workers import limit_blas
from gpt2core.recipes import CORPUS, RESUMED, SHAPE, fill_defaults, positive, saved_arguments
from gpt2core.runlog import RunLog
from gpt2core.sampler import chooser, generate
from gpt2core.tokenizer import Tokenizer, build_tokenizer
from gpt2core.trainer import Trainer, plan, run


def train_command(make_backend, world, args):
    """Train as the parsed flags say; returns the exit code. make_backend(precision) -> Backend, one for each thread."""
    resumed = checkpoints.load_checkpoint(args.resume, with_optimizer=True) if args.resume else None
    initial = checkpoints.load_checkpoint(args.init_from) if args.init_from else None
    if resumed and initial:
        raise ConfigError("--resume and --init-from exclude each other: go on with a run, or start a new one")
    notes = fill_defaults(args, resumed)
    source = resumed or initial
    threads = args.threads or available_cores()
    micro_shards, threads = plan(args.batch_size, args.micro_shards, threads, world.size, args.deterministic)
    backends = [make_backend(args.precision) for _ in range(threads)]
    schedule = Schedule(args.schedule, args.lr, args.min_lr, args.warmup, args.steps)

    tokenizer = args.tokenizer
    if source and not tokenizer and not brings_tokenizer(args.data):
        tokenizer = load_tokenizer(None, source.path)
    tokens, tokenizer = load_tokens(args.data, tokenizer)
    validation = None
    if args.val_data:
        validation, _ = load_tokens(args.val_data, tokenizer)
    elif args.val_fraction:
        tokens, validation = split_validation(tokens, args.val_fraction)
    corpus = fingerprint(tokens)
    config = model_config(args, source, tokenizer)
    seq_len = args.seq_len = args.seq_len or config.block_size
    windows = Windows(tokens, seq_len, "shuffled" if args.shuffle else "sequential", args.seed)
    if validation is not None:
        validation = Windows(validation, seq_len)

    trainer = Trainer(
        config,
        backends,
        batch_size=args.batch_size,
        seq_len=seq_len,
        micro_shards=micro_shards,
        optimizer={key: getattr(args, key) for key in ("beta1", "beta2", "eps", "weight_decay", "clip")},
        world=world,
        seed=args.seed,
    )
    if resumed:
        restore(trainer, resumed, corpus)
    elif initial:
        trainer.load(initial.parameters)
    resumed = initial = source = None  # the trainer has its own copy
    begun = trainer.steps
    out = checkpoints.writable_directory(args.out) if args.out else None
    log = RunLog(args.log, args.plot, args.log_every, trainer.steps, max(args.steps, trainer.steps))
    log.say(
        f"GPT-2 {args.init_from or args.preset}: {parameter_count(config):,} parameters, {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, vocabulary {config.vocab_size}\n"
        f"{len(tokens):,} tokens of {args.data.name}, {args.batch_size} x {seq_len} a step in {micro_shards} "
        f"micro-shards on {threads} thread{'s' * (threads > 1)}, {args.precision} on {backends[0].name}"
    )
    if threads < (args.threads or available_cores()):
        notes.append(
            f"note: {threads} of {args.threads or available_cores()} threads are used: a batch of {args.batch_size} in "
            f"{micro_shards} micro-shards keeps no more busy"
        )
    if out and not args.resume and (older := checkpoints.newest_step(out)):
        notes.append(f"note: {out} holds {older.name} of an earlier run, which this replaces: --resume goes on with it")
    for note in notes:
        log.say(note)
    if trainer.steps:
        log.say(f"resumed after step {trainer.steps - 1}" + ("" if out else "; no --out: nothing will be saved"))

    def save(trainer):
        checkpoints.save_checkpoint(
            out,
            trainer.steps,
            config=config,
            parameters=trainer.named_parameters(),
            moments=trainer.named_moments(),
            tokenizer=tokenizer,
            state=run_state(trainer, args, corpus),
            keep=args.keep,
        )

    try:
        signal = run(
            trainer,
            windows,
            schedule,
            args.steps,
            validation=validation,
            eval_every=args.eval_every,
            on_step=lambda step, loss, last: log(step, loss, trainer.parameter_hash() if last else None),
            save=save if out else None,
            save_every=args.checkpoint_every,
        )
    finally:
        log.close()
    if begun >= args.steps:
        print(f"nothing was left to train: {begun} steps were done, and --steps is {args.steps} in all")
    if signal:
        done = f"stopped by signal {signal} after {trainer.steps} of {args.steps} steps"
        hint = f"go on with --resume {out} --out {out}" if out else "nothing was saved, because --out was not given"
        print(f"{done}: {hint}")
        return 128 + signal
    print(f"trained {trainer.steps} steps" + (f", saved in {out}" if out else " (no --out: nothing was saved)"))
    if args.sample > 0:
        backends[0].use_threads(threads)
        prompt = tokens[: min(256, config.block_size)].tolist()
        write_text(trainer.model(), tokenizer, prompt, args.sample)
    return 0


def inference_command(make_backend, world, args):
    """Write the text that the parsed flags ask for; returns the exit code."""
    backend = make_backend(args.precision)
    limit_blas(1)
    backend.use_threads(positive("--threads", args.threads) or available_cores())
    weights = checkpoints.load_checkpoint(args.weights)
    tokenizer = load_tokenizer(args.tokenizer, weights.path)
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the weights in {weights.path} know "
            f"{weights.config.vocab_size}: give the --tokenizer they were trained with"
        )
    if args.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens {args.max_new_tokens} must not be negative")
    block = weights.config.block_size
    prompt = read_prompt(args, tokenizer, weights)
    if len(prompt) > block:
        note = f"note: the prompt has {len(prompt)} tokens, the block {block}: its last {block} tokens are used"
        print(note, file=sys.stderr)
        prompt = prompt[-block:]
    narrowed = args.top_k or args.top_p != 1
    temperature = (1.0 if narrowed else 0.0) if args.temperature is None else args.temperature
    choose = chooser(temperature, args.top_k, args.top_p, args.seed)
    model = GPT2.of_arrays(weights.config, weights.parameters, backend)
    write_text(model, tokenizer, prompt, args.max_new_tokens, choose, args.stop, args.stream, args.stats)
    return 0


# -- training ----------------------------------------------------------------------------------------------------------


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


def run_state(trainer, args, corpus):
    """What state.json keeps: where training stood, and the flags that a resume goes on with."""
    arguments = {name: getattr(args, name, None) for name in RESUMED}
    for name in ("data", "val_data"):
        arguments[name] = arguments[name] and str(Path(arguments[name]).resolve())
    return {
        "step": trainer.steps,
        "position": trainer.position,
        "seed": trainer.seed,
        "world_size": trainer.world.size,
        "corpus": corpus,
        "arguments": arguments,
        "version": gpt2core.__version__,
    }


def restore(trainer, resumed, corpus):
    """Load a checkpoint's parameters, moments and position; raises CheckpointError when it learnt another corpus."""
    state = resumed.state
    for key in ("step", "position"):
        if not isinstance(state.get(key), int) or state[key] < 0:
            raise CheckpointError(f"{resumed.path / 'state.json'}: has no whole number {key!r}: it cannot be resumed")
    if state.get("corpus", corpus) != corpus:
        raise CheckpointError(
            f"{resumed.path}: was trained on {state['corpus']}, but --data has {corpus}: "
            f"give the same corpus, or start anew with --init-from"
        )
    trainer.load(resumed.parameters, resumed.moments, state["step"], state["position"])


def fingerprint(tokens):
    """Number of tokens and a hash of them (of both ends, where they are too many to read)."""
    digest, edge = hashlib.sha256(), 1 << 22
    for part in (tokens[:edge], tokens[max(edge, len(tokens) - edge) :]):
        digest.update(part.tobytes())
    return f"{len(tokens):,} tokens with hash {digest.hexdigest()[:16]}"


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- inference ---------------------------------------------------------------------------------------------------------


def load_tokenizer(spec, weights):
    if spec is None and not (weights / "tokenizer.json").exists():
        raise DataError(f"{weights}: has no tokenizer.json: give --tokenizer word, byte or a file")
    return build_tokenizer(spec, read_text(CORPUS)) if spec else Tokenizer.load(weights)


def read_prompt(args, tokenizer, weights):
    """The prompt's tokens: --prompt, --prompt-file, or the first 256 of the corpus that the weights were trained on.

    Fewer where the block is shorter; the shipped corpus where the weights do not say, or theirs is gone.
    """
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: give one of them")
    if args.prompt is None and args.prompt_file is None:
        corpus = Path(saved_arguments(weights).get("data", CORPUS))
        corpus = corpus if corpus.exists() else CORPUS
        try:
            return first_tokens(corpus, tokenizer, min(256, weights.config.block_size)).tolist()
        except DataError as error:
            raise DataError(f"{corpus.name} is no prompt for these weights, so give --prompt: {error}") from None
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file).removesuffix("\n")
    tokens = tokenizer.encode_prompt(text).tolist()
    if not tokens:
        raise DataError("the prompt is empty: give at least one word to continue")
    return tokens


def write_text(model, tokenizer, prompt, count, choose=None, stop=None, stream=False, stats=False):
    """Print a prompt and its continuation; with `stream` token by token, with `stats` what it took."""
    print(f"Prompt ({len(prompt)} tokens):\n{tokenizer.decode(prompt)}\n\nContinuation:", flush=True)
    start, times, text, decoder = time.perf_counter(), [], "", tokenizer.stream()
    for token in generate(model, prompt, count, choose):
        times.append(time.perf_counter() - start)
        piece = decoder.push(token)
        text += piece
        if stream:
            print(piece, end="", flush=True)
        if stop and stop in text:
            break
    print(decoder.flush() if stream else text + decoder.flush())
    if stats and times:
        rest = (times[-1] - times[0]) / max(1, len(times) - 1) * 1e3
        print(
            f"\nprompt tokens {len(prompt)} | new tokens {len(times)} | time to first token {times[0] * 1e3:.1f} ms | "
            f"{rest:.2f} ms/token | total {times[-1]:.3f} s"
        )

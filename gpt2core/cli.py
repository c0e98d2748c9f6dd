"""Every flag of every stage: what a stage's objects cannot do is refused with one sentence and exit code 2."""

import argparse
import contextlib
import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core import checkpoint as checkpoints
from gpt2core.dataset import Windows, load_tokens, read_text, split_validation
from gpt2core.errors import CheckpointError, ConfigError, DataError, UserError
from gpt2core.model import GPT2, PRESETS, parameter_count
from gpt2core.optimizer import Schedule
from gpt2core.runlog import RunLog
from gpt2core.sampler import chooser, generate
from gpt2core.tensor import Tensor
from gpt2core.tokenizer import Tokenizer, build_tokenizer
from gpt2core.trainer import Trainer, plan, run

DATA = Path(__file__).resolve().parents[1] / "data"
CORPUS, WEIGHTS = DATA / "dummy.txt", DATA / "gpt2-paper"

# What a preset trains with when no flag says otherwise: the paper's Adam, or GPT-2's recipe for the large ones.
PAPER = dict(
    steps=50, batch_size=16, lr=3e-4, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0, beta1=0.9, beta2=0.999
)
LARGE = dict(
    steps=1000, batch_size=8, lr=6e-4, schedule="cosine", warmup=100, weight_decay=0.1, clip=1.0, beta1=0.9, beta2=0.95
)
RECIPES = {name: LARGE for name in PRESETS} | {
    "paper": PAPER,
    "tiny": PAPER | dict(steps=60, lr=3e-3),
    "nano": PAPER | dict(steps=20, batch_size=4, lr=3e-3),
}
COMMON = dict(preset="paper", seed=0, deterministic=True, precision="fp32", eps=1e-8, shuffle=False)
# What a resume takes from the checkpoint where no flag says otherwise, and the kind of each.
RESUMED = {name: type(value) for name, value in (PAPER | COMMON).items()} | dict(
    min_lr=float, seq_len=int, micro_shards=int, data=str, val_data=str, val_fraction=float
)
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")  # flags that change the model itself


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line, as every other mistake's is."""

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the options)\n")


def integer(text):
    """An int of 31 bits: no size made of it overflows, so that too large a model is a matter of memory."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def train_parser():
    parser = Parser(description="Train a GPT-2. Without flags: the paper's configuration on the shipped corpus.")
    add = parser.add_argument
    add("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add("--preset", help=f"model and recipe: {', '.join(PRESETS)} (default paper)")
    add("--n-layer", type=integer, help="layers of the model (default: the preset's)")
    add("--n-head", type=integer, help="heads of each layer (default: the preset's)")
    add("--n-embd", type=integer, help="width of the model, a multiple of its heads (default: the preset's)")
    add("--block-size", type=integer, help="positions that the model can see, in tokens (default: the preset's)")
    add("--steps", type=integer, help="updates in all, also after a resume (default: the preset's; paper 50)")
    add("--batch-size", type=integer, help="sequences per step over all ranks (default: the preset's; paper 16)")
    add("--seq-len", type=integer, help="tokens per sequence (default: the model's block size)")
    add("--lr", type=float, help="peak learning rate (default: the preset's; paper 3e-4)")
    add("--min-lr", type=float, help="where linear and cosine decay end (default: a tenth of --lr)")
    add("--schedule", help="constant, linear or cosine (default: the preset's; paper constant)")
    add("--warmup", type=integer, help="steps of linear warm-up (default: the preset's; paper 0)")
    add("--clip", type=float, help="bound of the gradient's global norm, 0 for none (default: the preset's; paper 0)")
    add("--weight-decay", type=float, help="decoupled decay of the matrices (default: the preset's; paper 0)")
    add("--beta1", type=float, help="decay of Adam's first moment (default 0.9)")
    add("--beta2", type=float, help="decay of Adam's second moment (default: the preset's; paper 0.999)")
    add("--eps", type=float, help="Adam's epsilon (default 1e-8)")
    add("--seed", type=int, help="of initial parameters, shuffling and sampling (default 0)")
    add("--threads", type=integer, help="worker threads a rank (default: the cores divided by the ranks on this host)")
    add("--precision", choices=("fp32", "tf32", "bf16", "fp16"), help="of the arithmetic (default fp32)")
    add("--data", type=Path, help="corpus: a UTF-8 text, or a token file of data/prepare.py (default: data/dummy.txt)")
    add("--tokenizer", help="word, byte, or a tokenizer.json (default word; of a token file: its own)")
    add("--shuffle", action=argparse.BooleanOptionalAction, help="windows in a seeded random order (default: in order)")
    add("--val-data", type=Path, help="text or token file to validate on")
    add("--val-fraction", type=float, help="share of the corpus, at its end, kept for validation (default 0)")
    add("--eval-every", type=integer, default=0, metavar="N", help="steps between validations (default: at the end)")
    add("--out", type=Path, help="directory for checkpoints; always ends with one (default: nothing is saved)")
    add("--checkpoint-every", type=integer, default=0, metavar="N", help="steps between checkpoints (default: the end)")
    add("--keep", type=integer, default=2, metavar="K", help="checkpoints to keep, 0 for all (default 2)")
    add("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, with its flags where none is given")
    add("--init-from", type=Path, metavar="DIR", help="start from a Hugging Face GPT-2 directory, optimizer fresh")
    add("--log", type=Path, metavar="FILE.jsonl", help="one JSON object a step")
    add("--log-every", type=integer, default=1, metavar="N", help="steps between lines of screen and log (default 1)")
    add("--plot", type=Path, metavar="FILE.png", help="write the loss curve")
    add("--micro-shards", type=integer, help="parts of the batch that are summed in one fixed tree (default 8)")
    flag = argparse.BooleanOptionalAction
    add("--deterministic", action=flag, help="the same bits for any number of threads and ranks (default)")
    add("--sample", type=integer, default=30, metavar="N", help="tokens to write after training, 0: none (default 30)")
    return parser


def inference_parser():
    parser = Parser(description="Continue a text. Without flags: the shipped weights and the corpus's first tokens.")
    add = parser.add_argument
    add("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add("--weights", type=Path, default=WEIGHTS, help="checkpoint or Hugging Face directory (default: the shipped one)")
    add("--tokenizer", help="word, byte or a tokenizer.json (default: the one beside the weights)")
    add("--prompt", help="text to continue (default: the first 256 tokens of the corpus)")
    add("--prompt-file", type=Path, help="file with the text to continue; its last line break is not part of it")
    add("--max-new-tokens", type=integer, default=30, metavar="N", help="tokens to write (default 30)")
    add("--stop", metavar="TEXT", help="end as soon as the continuation contains this text")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token, above 0 draws (default 0)")
    add("--top-k", type=integer, default=0, metavar="K", help="draw among the K likeliest tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest that sum to P (default 1: all)")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--stream", action="store_true", help="print each token as it comes")
    add("--stats", action="store_true", help="print prompt tokens, new tokens, time to first token, ms a token")
    add("--threads", type=integer, help="BLAS threads (default: the cores)")
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add("--precision", choices=precisions, default="fp32", help="of the arithmetic (default fp32)")
    return parser


# -- the two commands --------------------------------------------------------------------------------------------------


def train(backend, world, argv=None):
    """The whole of a stage's train_gpt2.py. backend(precision) -> Backend; world() -> Communicator."""
    command(lambda: train_command(backend, world(), train_parser().parse_args(argv)))


def infer(backend, world, argv=None):
    """The whole of a stage's inference.py."""
    command(lambda: inference_command(backend, world(), inference_parser().parse_args(argv)))


def command(body):
    """Run `body` and exit with the code it returns; a user's mistake is one line on standard error and exit code 2."""
    try:
        with np.errstate(all="ignore"):  # numbers that overflow end in one sentence, not in a dozen warnings
            code = body()
        sys.stdout.flush()
    except UserError as error:
        code = fail(error)
    except MemoryError as error:
        code = fail(f"out of memory ({error}): lower --batch-size, raise --micro-shards or take a smaller --preset")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # at once: any other exit waits for the worker threads to end their step
    except BrokenPipeError:  # the reader of our output has left: there is nobody to tell
        code = 1
    except OSError as error:
        code = fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    try:
        sys.stdout.flush()
    except OSError:  # what cannot be written now would be complained about at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def fail(message):
    print("error:", " ".join(str(message).splitlines()), file=sys.stderr)
    return 2


def train_command(make_backend, world, args):
    resumed = checkpoints.load_checkpoint(args.resume, with_optimizer=True) if args.resume else None
    initial = checkpoints.load_checkpoint(args.init_from) if args.init_from else None
    if resumed and initial:
        raise ConfigError("--resume and --init-from exclude each other: go on with a run, or start a new one")
    fill_defaults(args, resumed)
    source = resumed or initial
    threads = args.threads or available_cores()
    micro_shards, threads = plan(args.batch_size, args.micro_shards, threads, world.size, args.deterministic)
    limit_blas(1)
    backends = [make_backend(args.precision) for _ in range(threads)]
    schedule = Schedule(args.schedule, args.lr, args.min_lr, args.warmup, args.steps)

    own = source and (source.path / "tokenizer.json").exists() and not args.tokenizer
    tokens, tokenizer = load_tokens(args.data, Tokenizer.load(source.path) if own else args.tokenizer)
    corpus = fingerprint(tokens)
    validation = None
    if args.val_data:
        validation, _ = load_tokens(args.val_data, tokenizer)
    elif args.val_fraction:
        tokens, validation = split_validation(tokens, args.val_fraction)
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
    out = checkpoints.writable_directory(args.out) if args.out else None
    log = RunLog(args.log, args.plot, args.log_every, trainer.steps, max(args.steps, trainer.steps))
    log.say(
        f"GPT-2 {args.preset}: {parameter_count(config):,} parameters, {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} wide, vocabulary {config.vocab_size}\n"
        f"{len(tokens):,} tokens of {args.data.name}, {args.batch_size} x {seq_len} a step in {micro_shards} "
        f"micro-shards on {threads} thread{'s' * (threads > 1)}, {args.precision} on {backends[0].name}"
    )
    if args.threads and threads != args.threads:
        log.say(f"--threads {args.threads}: {threads} are used, because {micro_shards} micro-shards keep no more busy")
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
    if signal:
        done = f"stopped by signal {signal} after {trainer.steps} of {args.steps} steps"
        print(f"{done}: {f'go on with --resume {out}' if out else 'nothing was saved, because --out was not given'}")
        return 128 + signal
    print(f"trained {trainer.steps} steps" + (f", saved in {out}" if out else " (no --out: nothing was saved)"))
    if args.sample > 0:
        limit_blas(threads)
        prompt = tokens[: min(256, config.block_size)].tolist()
        write_text(trainer.model(), tokenizer, prompt, args.sample)
    return 0


def inference_command(make_backend, world, args):
    backend = make_backend(args.precision)
    limit_blas(positive("--threads", args.threads) or available_cores())
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
    prompt = read_prompt(args, tokenizer, block)
    if len(prompt) > block:
        note = f"note: the prompt has {len(prompt)} tokens, the block {block}: its last {block} tokens are used"
        print(note, file=sys.stderr)
        prompt = prompt[-block:]
    choose = chooser(args.temperature, args.top_k, args.top_p, args.seed)
    parameters = {name: Tensor(backend.asarray(array), backend) for name, array in weights.parameters.items()}
    model = GPT2(weights.config, parameters)
    write_text(model, tokenizer, prompt, args.max_new_tokens, choose, args.stop, args.stream, args.stats)
    return 0


# -- training: from flags to objects -----------------------------------------------------------------------------------


def fill_defaults(args, resumed):
    """Give every flag a value: the command line's, else the resumed checkpoint's, else the preset's recipe."""
    saved = saved_arguments(resumed) if resumed else {}
    if args.preset not in (None, saved.get("preset", args.preset)):
        raise ConfigError(f"--preset {args.preset} is not the checkpoint's {saved['preset']}: leave the flag away")
    for name, value in saved.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    preset = args.preset or COMMON["preset"]
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is unknown: choose from {', '.join(PRESETS)}")
    for name, value in (COMMON | RECIPES[preset]).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.data = Path(args.data or CORPUS)
    args.val_data = args.val_data and Path(args.val_data)
    if args.min_lr is None:
        args.min_lr = 0.0 if args.schedule == "constant" else args.lr / 10
    for name in ("steps", "eval_every", "checkpoint_every", "keep", "sample", "seed"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must not be negative")
    for name in ("threads", "seq_len", "log_every"):
        positive(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.val_data and args.val_fraction:
        raise ConfigError(f"--val-data {args.val_data} and --val-fraction {args.val_fraction} exclude each other")


def saved_arguments(resumed):
    """The flags in a checkpoint's state.json; raises CheckpointError where one is not of its kind."""
    path, arguments = resumed.path / "state.json", resumed.state.get("arguments", {})
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{path}: arguments is {arguments!r}, not an object: it cannot be resumed")
    saved = {name: arguments[name] for name in RESUMED if arguments.get(name) is not None}
    for name, value in saved.items():
        if not isinstance(value, int | float if RESUMED[name] is float else RESUMED[name]):
            raise CheckpointError(f"{path}: {name} is {value!r}, not of type {RESUMED[name].__name__}")
    if saved.get("preset", "paper") not in PRESETS:
        raise CheckpointError(f"{path}: preset is {saved['preset']!r}, not one of {', '.join(PRESETS)}")
    return saved


def positive(flag, value):
    """`value`, which may be None; raises ConfigError below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{flag} {value} must be at least 1")
    return value


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


def limit_blas(threads):
    """Tell the loaded BLAS how many threads it may use: threads x BLAS threads over the cores is twice as slow."""
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")


# -- inference: from flags to text -------------------------------------------------------------------------------------


def load_tokenizer(spec, weights):
    if spec is None and not (weights / "tokenizer.json").exists():
        raise DataError(f"{weights}: has no tokenizer.json: give --tokenizer word, byte or a file")
    return build_tokenizer(spec, read_text(CORPUS)) if spec else Tokenizer.load(weights)


def read_prompt(args, tokenizer, block):
    """The prompt's tokens: --prompt, --prompt-file, or the corpus's first 256 tokens, fewer for a shorter block."""
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: give one of them")
    if args.prompt is None and args.prompt_file is None:
        try:
            return tokenizer.encode(read_text(CORPUS))[: min(256, block)].tolist()
        except DataError as error:
            raise DataError(f"{CORPUS.name} is no prompt for these weights, so give --prompt: {error}") from None
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file).removesuffix("\n")
    tokens = tokenizer.encode_prompt(text).tolist()
    if not tokens:
        raise DataError("the prompt is empty: give at least one word to continue")
    return tokens


def write_text(model, tokenizer, prompt, count, choose=None, stop=None, stream=False, stats=False):
    """Print a prompt and its continuation; with `stream` token by token, with `stats` what it took."""
    print(f"Prompt ({len(prompt)} tokens):\n{tokenizer.decode(prompt)}\n\nContinuation:", flush=True)
    start, times, ids, text, decoder = time.perf_counter(), [], [], "", tokenizer.stream()

    def emit(piece):
        if stream:
            print(piece, end="", flush=True)
        return text + piece

    for token in generate(model, prompt, count, choose):
        times.append(time.perf_counter() - start)
        ids.append(token)
        text = emit(decoder.push(token))
        if stop and stop in text:
            break
    text = emit(decoder.flush())
    print("" if stream else text)
    if stats and ids:
        rest = (times[-1] - times[0]) / max(1, len(ids) - 1) * 1e3
        print(
            f"\nprompt tokens {len(prompt)} | new tokens {len(ids)} | time to first token {times[0] * 1e3:.1f} ms | "
            f"{rest:.2f} ms/token | total {times[-1]:.3f} s"
        )

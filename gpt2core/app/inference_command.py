"""The inference command: load weights and prompts, divide them among the ranks, write the continuations."""

import sys

from gpt2core.app.backend_setup import memory_errors, usable_threads
from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.app.inference_io import load_tokenizer, read_prompt, read_prompts, write_batch, write_text
from gpt2core.app.presets import MODES
from gpt2core.app.rank_agreement import check_one_process, print_nothing, share_arrays
from gpt2core.app.resume import edited_notes
from gpt2core.app.run_config import check_positive
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import all_or_raise, on_root
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.group_sampler import GroupSampler
from gpt2core.parallel.tensor_parallel import check_tensor_parallel, load_model
from gpt2core.parallel.threads import limit_blas
from gpt2core.sampler import chooser


def inference_command(make_backend, world, args, cores):
    """Write the continuations that the parsed flags ask for; returns the exit code.

    All ranks must call it with equal flags. cores: the number of cores that this rank may use.
    """
    check_one_process(world, make_backend.many_ranks)
    weights = on_root(world, lambda: load_checkpoint(args.weights, accept_edited=args.accept_edited))
    for note in edited_notes(weights):
        print(note, file=sys.stderr)
    all_or_raise(world, lambda: check_mode(args))
    all_or_raise(world, lambda: world.use_transport(args.transport))
    backend = all_or_raise(world, lambda: make_inference_backend(make_backend, args, cores))
    all_or_raise(world, lambda: make_sampler(args, args.seed))
    inputs = on_root(world, lambda: read_inputs(args, weights))
    config, tokenizer, prompts = world.broadcast_object(inputs)
    arrays = share_arrays(world, config, weights and weights.parameters)
    weights = None  # the arrays are shared now
    ranks = world.size if args.mode == "tensor" else 1  # that share the model
    with memory_errors(backend, config, parallel=ParallelConfig(tp=ranks)):
        if args.mode == "batch":
            model = load_model(config, arrays, backend)
            write_batch(
                world, model, tokenizer, prompts, args.max_new_tokens, lambda i: make_sampler(args, args.seed + i),
                args.stop, args.stats,
            )  # fmt: skip
            return 0
        group = {"replicate": Solo(), "tensor": world}[args.mode]
        all_or_raise(world, lambda: check_tensor_parallel(config, group.size, "mpirun -n"))
        model = load_model(config, arrays, backend, group)
        emit, prompt = print if world.is_root else print_nothing, prompts[0]
        for note in [*backend.runtime.notes(config), *long_prompt(prompt, config.block_size)]:
            emit(note, file=sys.stderr)
        rule = make_sampler(args, args.seed)
        rule = rule if world.one_process else GroupSampler(rule, world)
        prompt = prompt[-config.block_size :]
        write_text(model, tokenizer, prompt, args.max_new_tokens, rule, args.stop, args.stream, args.stats, emit)
        return 0


def check_mode(args):
    """Raise ConfigError for a --mode and prompt flags that cannot be combined."""
    if args.mode not in MODES:
        raise ConfigError(f"--mode {args.mode} is unknown: choose from {', '.join(MODES)}")
    if (args.mode == "batch") != (args.prompts is not None):
        raise ConfigError("--prompts FILE, one prompt per line, and --mode batch must be given together")
    if args.mode == "batch" and (args.stream or args.prompt is not None or args.prompt_file is not None):
        raise ConfigError("--mode batch takes no --prompt and no --stream: it continues --prompts; omit the flag")


def make_inference_backend(make_backend, args, cores):
    """The Backend of this rank, with its number of threads set; raises ConfigError for a wrong --threads."""
    backend = make_backend(args.precision)
    limit_blas(1)
    check_positive("--threads", args.threads)
    backend.runtime.use_threads(usable_threads(make_backend, args.threads, cores))
    return backend


def make_sampler(args, seed):
    """The sampling rule of the flags; raises ConfigError for a flag outside its range."""
    if args.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens {args.max_new_tokens} must not be negative")
    narrowed = args.top_k or args.top_p != 1
    temperature = (1.0 if narrowed else 0.0) if args.temperature is None else args.temperature
    return chooser(temperature, args.top_k, args.top_p, seed)


def read_inputs(args, weights):
    """(GPT2Config, Tokenizer, list of prompts as token ids); the root calls it. One prompt unless --mode is batch."""
    tokenizer, config = load_tokenizer(args.tokenizer, weights.path), weights.config
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the vocabulary of the weights in {weights.path} is "
            f"{config.vocab_size}: give the --tokenizer they were trained with"
        )
    if args.prompts:
        return config, tokenizer, read_prompts(args.prompts, tokenizer)
    return config, tokenizer, [read_prompt(args.prompt, args.prompt_file, tokenizer, weights)]


def long_prompt(prompt, block):
    """A list with one note if the prompt is longer than the block; otherwise []."""
    if len(prompt) <= block:
        return []
    return [f"note: the prompt has {len(prompt)} tokens, the block {block}: its last {block} tokens are used"]

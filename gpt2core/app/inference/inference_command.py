"""The inference command: load weights and prompts, divide the work among the ranks, write the continuations."""

import contextlib
import sys

import numpy as np

from gpt2core.app.backend_setup import memory_errors, usable_threads
from gpt2core.app.checkpoint_tokenizer import check_tokenizer, check_vocabulary, load_tokenizer
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.checkpoints.run_folders import newest_run, shown
from gpt2core.app.inference.continuations import write_batch, write_continuation, write_text
from gpt2core.app.inference.group_sampler import GroupSampler
from gpt2core.app.inference.prompts import check_decoded, read_prompt, read_prompts, typed_prompt
from gpt2core.app.resume import edited_notes
from gpt2core.app.settings.definitions import GENERATION, InferenceSettings
from gpt2core.app.settings.setting_fields import complete, flag, names_of
from gpt2core.app.shipped import check_downloaded, shipped_weights
from gpt2core.app.stage_checks import check_many_ranks, check_one_process, check_transport
from gpt2core.architecture import parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import all_or_raise, on_root
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.tensor.loaded_model import load_inference_model
from gpt2core.parallel.tensor.shards import check_tensor_parallel
from gpt2core.sampler import chooser
from gpt2core.threads import limit_blas


def inference_command(stage, world, args, cores):
    """Write the continuations of the prompts that the flags select; returns the exit code.

    All ranks must call it with equal flags. stage: a Stage. world: the Communicator of all ranks. cores: the number of
    cores that this rank may use.
    """
    check_one_process(stage, world)
    given, args = args, complete(args)
    if args.mode == "tensor":
        check_many_ranks(stage, world, "mode", args.mode)
    checkpoint = on_root(world, lambda: read_weights(args, stage.name))
    for note in edited_notes(checkpoint):
        print(note, file=sys.stderr)
    all_or_raise(world, lambda: check_mode(args, given))
    check_transport(stage, args)
    all_or_raise(world, lambda: world.use_transport(args.transport))
    backend = all_or_raise(world, lambda: make_inference_backend(stage.backend, args, cores))
    all_or_raise(world, lambda: sampling_rule(args, args.seed))  # only checks the flags
    inputs = on_root(world, lambda: read_request(args, checkpoint))
    config, tokenizer, prompts = world.broadcast_object(inputs)
    group = world if args.mode == "tensor" else Solo()  # the ranks that divide each layer
    all_or_raise(world, lambda: check_tensor_parallel(config, group.size, "mpirun -n"))
    all_or_raise(world, lambda: backend.check_model(config))
    tokens = config.block_size if args.mode == "evaluate" else args.max_new_tokens
    all_or_raise(world, lambda: backend.runtime.check_generation(config, tokens))
    if checkpoint and not args.weights:
        print(f"weights: {checkpoint.path}", file=sys.stderr)
    arrays = share_arrays(world, config, checkpoint and checkpoint.parameters)
    checkpoint = None  # free the arrays of the checkpoint on the root: `arrays` has them on every rank
    emit = print if world.is_root else print_nothing
    with memory_errors(backend, config, parallel=ParallelConfig(tp=group.size)):
        if args.mode == "evaluate":
            # here: generation starts faster without them
            from gpt2core.app.inference.evaluation import evaluate_file
            from gpt2core.parallel.tensor.loaded_model import load_model

            evaluate_file(world, load_model(config, arrays, backend, group), tokenizer, args.data, emit)
            return 0
        model = load_inference_model(config, arrays, backend, group)
        if args.mode == "batch":
            prompts = [fit_prompt(ids, config.block_size, emit, f"prompt {i}") for i, ids in enumerate(prompts, 1)]
            write_batch(
                world, model, tokenizer, prompts, args.max_new_tokens, lambda i: sampling_rule(args, args.seed + i),
                args.stop, args.stats, emit,
            )  # fmt: skip
            return 0
        if args.interactive:
            continue_typed_prompts(world, model, tokenizer, args, emit)
            return 0
        prompt = fit_prompt(prompts[0], config.block_size, emit)
        rule = group_sampling_rule(world, args, args.seed)
        write_text(model, tokenizer, prompt, args.max_new_tokens, rule, args.stop, args.stream, args.stats, emit)
        return 0


def read_weights(args, stage):
    """The Checkpoint that the flags select for the stage of this name; only the root calls it."""
    check_downloaded(args.weights)
    weights = args.weights or newest_run(stage, args.preset) or shown(shipped_weights(args.preset, stage))
    return load_checkpoint(weights, accept_edited=args.accept_edited)


def continue_typed_prompts(world, model, tokenizer, args, emit):
    """Continue each line of the root's standard input, up to an empty line or the end; all ranks must call this.

    Each token is printed as soon as it is generated. The lines are numbered from 0; line i has the seed + i.
    """
    with contextlib.suppress(AttributeError):  # a replaced sys.stdin may have no reconfigure()
        # The tokenizer reports bytes that are not UTF-8. A CR that no LF follows is a part of the line.
        sys.stdin.reconfigure(errors="surrogateescape", newline="\n")
    # Also if standard input is a pipe, as in a rank of mpiexec, where a user may type at a terminal.
    emit("type a prompt and press Enter; an empty line or Ctrl-D ends the program", file=sys.stderr)
    decoders, number = {}, 0
    while (prompt := world.broadcast_object(on_root(world, lambda: typed_prompt(tokenizer)))) is not None:
        prompt = fit_prompt(prompt, model.config.block_size, emit)
        rule = group_sampling_rule(world, args, args.seed + number)
        write_continuation(
            model, tokenizer, prompt, args.max_new_tokens, rule, args.stop, True, args.stats, emit, decoders
        )
        number += 1


def check_mode(args, given):
    """Raise ConfigError if --mode, --interactive and the flags of prompts and generation exclude each other.

    given: `args` without defaults. Raises DataError for a --stop that is not UTF-8.
    """
    if args.mode == "evaluate":
        others = "prompt", "prompt_file", "prompts", "interactive", *names_of(InferenceSettings, group=GENERATION)
        for name in (name for name in others if getattr(given, name) is not None):
            raise ConfigError(f"--mode evaluate generates no text: omit {flag(name)}")
    if args.stop:  # a text that was not decoded is in no continuation
        check_decoded(args.stop, "--stop", sys.getfilesystemencoding())
    if args.interactive:
        if args.mode == "batch":
            raise ConfigError("--interactive and --mode batch exclude each other: omit one of them")
        for name in ("prompt", "prompt_file", "prompts"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--interactive reads its prompts from standard input: omit {flag(name)}")
    if (args.mode == "batch") != (args.prompts is not None):
        raise ConfigError("--prompts FILE, one prompt per line, and --mode batch must be given together")
    if args.mode == "batch" and (args.stream or args.prompt is not None or args.prompt_file is not None):
        raise ConfigError("--mode batch continues --prompts: omit --prompt, --prompt-file and --stream")


def make_inference_backend(make_backend, args, cores):
    """The Backend of this rank, with its number of threads set."""
    backend = make_backend(args.precision)
    limit_blas(1)
    if args.blas:
        backend.runtime.use_blas(args.blas)
    backend.runtime.use_threads(usable_threads(make_backend, args.threads, cores))
    return backend


def sampling_rule(args, seed):
    """The sampling rule of the flags; raises ConfigError for a flag outside its range."""
    sampling_flags = args.top_k or args.top_p != 1
    default_temperature = 1.0 if sampling_flags else 0.0
    temperature = default_temperature if args.temperature is None else args.temperature
    return chooser(temperature, args.top_k, args.top_p, seed)


def group_sampling_rule(world, args, seed):
    """The sampling rule of the flags; with many ranks, a GroupSampler, so that all ranks choose the same token."""
    rule = sampling_rule(args, seed)
    return rule if world.one_process else GroupSampler(rule, world)


def read_request(args, checkpoint):
    """(GPT2Config, Tokenizer, list of prompts as token ids) of the flags and a Checkpoint; only the root calls it.

    The list has one prompt; with --mode batch, one prompt for each line of --prompts; with --interactive and --mode
    evaluate it is empty.
    """
    tokenizer, config = tokenizer_of(args, checkpoint), checkpoint.config
    if args.interactive or args.mode == "evaluate":
        return config, tokenizer, []
    if args.prompts:
        return config, tokenizer, read_prompts(args.prompts, tokenizer)
    return config, tokenizer, [read_prompt(args.prompt, args.prompt_file, tokenizer, checkpoint)]


def tokenizer_of(args, checkpoint):
    """The Tokenizer of a Checkpoint, or the one that the flags name; raises an error if it is not for these weights."""
    tokenizer = load_tokenizer(args.tokenizer, checkpoint.path)
    check_tokenizer(tokenizer, checkpoint)
    check_vocabulary(tokenizer, checkpoint.config.vocab_size, f"the weights in {checkpoint.path}")
    return tokenizer


def fit_prompt(prompt, block, emit, name="the prompt"):
    """The last `block` tokens of a prompt; emits a note if the prompt is longer. emit: called like print()."""
    if len(prompt) > block:
        text = f"{name} has {len(prompt)} tokens, the model reads at most {block}: only the last {block} are used"
        emit(f"note: {text}", file=sys.stderr)
    return prompt[-block:]


def share_arrays(world, config, parameters):
    """{name: array} of all parameters of a GPT2Config, on every rank. parameters: this dict on the root, else None."""

    def share(name, shape):
        return world.broadcast(parameters[name] if world.is_root else np.empty(shape, np.float32))

    return {name: share(name, shape) for name, shape in parameter_shapes(config)}


def print_nothing(*text, **options):
    """A function that does nothing, used in place of print() on the ranks that are not the root."""

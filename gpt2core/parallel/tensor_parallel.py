"""Tensor parallelism: a group divides attention by heads, the MLP by hidden channels, the embeddings by vocabulary."""

# C channels, V vocabulary, K columns, p parts (ranks of the tensor group)
#
# Megatron's scheme (Shoeybi et al. 2019). Two consecutive matrices (C, K) and (K, C) are split along K: a rank
# multiplies by its columns of the first matrix, then by its rows of the second. Nothing is sent between the two
# products; one all-reduce adds the results of all ranks. What each rank computes, and what the ranks send:
#
#                      forward                                                          backward
#     embedding        the rows of its tokens; all-reduce                               gradient of its rows
#     attention, MLP   its columns, then its heads or gelu, then its rows; all-reduce   all-reduce of dx
#     cross-entropy    its logits; all-reduces of 3 numbers for each token              all-reduce of dx
#
# dx is the gradient of the input. The embedding is divided by tokens (its rows), and so are the logits.
#
# model.py contains the forward pass, which has the group as an argument. This file defines how parameters are split.

import math

import numpy as np

from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.communicator import SOLO
from gpt2core.errors import ConfigError
from gpt2core.inference_model import InferenceModel

# {end of a parameter's name: (axis that is split, number of blocks along this axis)}; each block is split separately
SPLITS = {
    "wte.weight": (0, 1),
    "lm_head.weight": (0, 1),
    "attn.c_attn.weight": (1, 3),  # the three blocks are q, k and v: a rank gets the same heads of each block
    "attn.c_attn.bias": (0, 3),
    "attn.c_proj.weight": (0, 1),
    "mlp.c_fc.weight": (1, 1),
    "mlp.c_fc.bias": (0, 1),
    "mlp.c_proj.weight": (0, 1),
}  # every rank holds all other parameters whole: LayerNorms, wpe, and the biases that are added after an all-reduce


def split_of(name):
    """(axis, blocks) of a parameter, or None if every rank holds it whole."""
    return next((split for end, split in SPLITS.items() if name.endswith(end)), None)


def is_replicated(name):
    """Whether every rank holds this parameter whole, with the same bits and the same gradient."""
    return split_of(name) is None


def shard_shapes(shapes, parts):
    """{name: shape of the shard of one of `parts` ranks}; shapes: the pairs (name, whole shape) of parameter_shapes().

    `parts` must divide the sizes: see check_tensor_parallel.
    """
    shards = dict(shapes)
    for name, shape in shards.items():
        if not is_replicated(name):
            axis, _ = split_of(name)
            shards[name] = (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
    return shards


def shard(name, array, rank, parts):
    """The shard of `rank`, C-contiguous, of a whole host array; it shares memory with the whole array if possible."""
    if is_replicated(name):
        return array
    axis, blocks = split_of(name)
    before, n, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    shards = np.moveaxis(array.reshape(*before, blocks, parts, n // blocks // parts, *after), axis + 1, 0)
    return np.ascontiguousarray(shards[rank].reshape(*before, n // parts, *after))


def unshard(name, shards):
    """The whole array from all ranks' shards (p, ...): the inverse of shard(). A single shard is not copied."""
    if is_replicated(name):
        return shards[0]
    axis, blocks = split_of(name)
    parts, *shape = shards.shape
    before, n, after = shape[:axis], shape[axis], shape[axis + 1 :]
    whole = np.moveaxis(shards.reshape(parts, *before, blocks, n // blocks, *after), 0, axis + 1)
    return whole.reshape(*before, parts * n, *after)


def load_inference_model(config, arrays, backend, group=SOLO):
    """An InferenceModel. arrays: {name: whole host array}; it gets this rank's shards, copied to one arena.

    Kernels read weights faster from one large buffer than from many small buffers.
    """
    backend.check_model(config)
    arena = Arena(shard_shapes(parameter_shapes(config), group.size))
    views = arena.views(backend.zeros((arena.size,), backend.compute_dtype))
    for name, view in views.items():
        view[...] = backend.asarray(shard(name, arrays[name], group.rank, group.size))
    return InferenceModel(config, views, backend, group)


def load_model(config, arrays, backend, group=SOLO):
    """A GPT2 with the arrays of load_inference_model()."""
    from gpt2core.model import GPT2  # here, because a program that only generates text does not import autograd
    from gpt2core.tensor import Tensor

    views = load_inference_model(config, arrays, backend, group).arrays
    return GPT2(config, {name: Tensor(view, backend) for name, view in views.items()}, group)


def gather(name, array, group):
    """The whole array on every rank. array: this rank's shard. All ranks of the group must call this function.

    A replicated parameter is returned itself; in a group of one the result shares the memory of `array`.
    """
    if is_replicated(name):
        return array
    return unshard(name, group.all_gather(array[None]))


def check_tensor_parallel(config, parts, flag="`tp`"):
    """Raise ConfigError, with valid numbers, unless `parts` (the value of `flag`) divides heads and vocabulary."""
    for what, count in (("n_head", config.n_head), ("the vocabulary of", config.vocab_size)):
        if parts < 1 or count % parts:
            common = math.gcd(config.n_head, config.vocab_size)
            *most, last = (str(n) for n in range(1, common + 1) if common % n == 0)
            choices = f"{', '.join(most)} or {last}" if most else last
            raise ConfigError(
                f"{what} {count} is not divisible by {flag} {parts}: use {flag} {choices}: it must divide both "
                f"n_head {config.n_head} and the vocabulary of {config.vocab_size}"
            )

"""Each layer divided over a group: attention by heads, the MLP by hidden channels, the embeddings by vocabulary."""

# C channels, V vocabulary, p parts (ranks of the tensor group)
#
# Megatron's scheme (Shoeybi et al. 2019). A pair of matrices (C, K) and (K, C) is split along K: a rank multiplies by
# its columns of the first, then by its rows of the second. Nothing is sent in between; the results are summed once.
#
#                      forward                                              backward
#     embedding        own tokens' rows, all-reduce                         own rows, nothing to send
#     attention, MLP   columns, own heads or gelu, rows, all-reduce         all-reduce of the input's gradient
#     cross-entropy    own logits, all-reduce of 3 numbers per row          all-reduce of the input's gradient
#
# The forward pass is in model.py, with a group passed in. This file defines how each parameter is split.

import math

import numpy as np

from gpt2core.arena import Arena
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2, parameter_shapes
from gpt2core.ops import SOLO
from gpt2core.tensor import Tensor

# {end of a parameter's name: (axis that is split, number of blocks along this axis, each of which is split)}
SPLITS = {
    "wte.weight": (0, 1),
    "lm_head.weight": (0, 1),
    "attn.c_attn.weight": (1, 3),  # the blocks are q, k and v: a rank gets the same heads of each
    "attn.c_attn.bias": (0, 3),
    "attn.c_proj.weight": (0, 1),
    "mlp.c_fc.weight": (1, 1),
    "mlp.c_fc.bias": (0, 1),
    "mlp.c_proj.weight": (0, 1),
}  # every rank holds all other parameters whole: LayerNorms, positions, and the biases that are added after a reduce


def split_of(name):
    """(axis, blocks) of a parameter, or None if every rank holds it whole."""
    return next((split for end, split in SPLITS.items() if name.endswith(end)), None)


def is_replicated(name):
    """Whether every rank holds this parameter whole, with the same bits and the same gradient."""
    return split_of(name) is None


def shard_shapes(shapes, parts):
    """{name: shape of one rank's piece}, from the (name, whole shape) pairs of parameter_shapes(config), in order.

    `parts` must divide the sizes: see check_tensor_parallel.
    """
    local = dict(shapes)
    for name, shape in local.items():
        if not is_replicated(name):
            axis, _ = split_of(name)
            local[name] = (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
    return local


def shard(name, array, rank, parts):
    """Rank's piece of a whole host array, C-contiguous; it shares memory with the whole array if possible."""
    if is_replicated(name):
        return array
    axis, blocks = split_of(name)
    before, n, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    pieces = np.moveaxis(array.reshape(*before, blocks, parts, n // blocks // parts, *after), axis + 1, 0)
    return np.ascontiguousarray(pieces[rank].reshape(*before, n // parts, *after))


def unshard(name, pieces):
    """The whole array from all ranks' pieces (p, ...): the inverse of shard, bit for bit; one piece is not copied."""
    if is_replicated(name):
        return pieces[0]
    axis, blocks = split_of(name)
    parts, *shape = pieces.shape
    before, n, after = shape[:axis], shape[axis], shape[axis + 1 :]
    whole = np.moveaxis(pieces.reshape(parts, *before, blocks, n // blocks, *after), 0, axis + 1)
    return whole.reshape(*before, parts * n, *after)


def load_model(config, arrays, backend, group=SOLO):
    """A GPT2 for generation from {name: whole host array}: this rank's shards, copied into one arena.

    Kernels read weights faster from one large buffer than from many small ones.
    """
    backend.check_model(config)
    arena = Arena(shard_shapes(parameter_shapes(config), group.size))
    views = arena.views(backend.zeros((arena.size,), backend.compute_dtype))
    for name, view in views.items():
        view[...] = backend.asarray(shard(name, arrays[name], group.rank, group.size))
    return GPT2(config, {name: Tensor(view, backend) for name, view in views.items()}, group)


def gather(name, array, group):
    """The whole array on every rank, from each rank's piece: a collective, except for a replicated parameter.

    In a group of one the result shares the memory of `array`.
    """
    if is_replicated(name):
        return array
    return unshard(name, group.all_gather(array[None]))


def check_tensor_parallel(config, parts, flag="--tp"):
    """Raise ConfigError, naming valid numbers, unless `parts` (of `flag`) divides the heads and the vocabulary."""
    for what, count in (("n_head", config.n_head), ("the vocabulary of", config.vocab_size)):
        if parts < 1 or count % parts:
            common = math.gcd(config.n_head, config.vocab_size)
            *most, last = (str(n) for n in range(1, common + 1) if common % n == 0)
            choices = f"{', '.join(most)} or {last}" if most else last
            raise ConfigError(
                f"{what} {count} is not divisible by {flag} {parts}: use {flag} {choices}: it must divide both "
                f"n_head {config.n_head} and the vocabulary of {config.vocab_size}"
            )

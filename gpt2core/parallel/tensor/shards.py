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
# dx is the gradient of the input. If the number of ranks does not divide the vocabulary, the last rank has fewer
# tokens. No array is padded, except in a message. model.py contains the forward pass. This file defines how parameters
# are split: in one slice for each rank, or in several (ParallelConfig.canonical_tp), which sliced_units.py computes.

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.parallel.config import are_slices_of
from gpt2core.vocabulary import own_slice

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


def shard_shape(name, shape, rank, parts):
    """The shape of the shard of `rank`, one of `parts`, of a parameter of this whole shape.

    `parts` must divide all sizes but the vocabulary: see check_tensor_parallel. Rank 0 has a largest shard.
    """
    if is_replicated(name):
        return shape
    axis, blocks = split_of(name)
    own = own_slice(shape[axis] // blocks, rank, parts)
    return *shape[:axis], blocks * (own.stop - own.start), *shape[axis + 1 :]


def shard_shapes(shapes, rank, parts, slices=1):
    """{name: shard_shape()} of the arrays of a rank; shapes: the pairs (name, whole shape) of parameter_shapes().

    slices: of each divided parameter, which are arrays of their own: see own_slices().
    """
    return {
        each: shard_shape(name, shape, part, parts * slices)
        for name, shape in shapes
        for each, part in own_slices(name, rank, slices)
    }


def own_slices(name, rank, slices):
    """[(name of an array of this rank, the number of its slice among those of all ranks)] of a parameter.

    A rank has a replicated parameter whole, and otherwise `slices` consecutive slices: NAME, or NAME/0, NAME/1, ...
    """
    if slices == 1 or is_replicated(name):
        return [(name, rank)]
    return [(f"{name}/{i}", rank * slices + i) for i in range(slices)]


def whole_name(name):
    """The name of the parameter of which `name` is a slice: see own_slices()."""
    return name.partition("/")[0]


def shard(name, array, rank, parts):
    """The shard of `rank`, C-contiguous, of a whole host array; it shares memory with the whole array if possible."""
    if is_replicated(name):
        return array
    axis, _ = split_of(name)
    array = in_blocks(name, array)
    own = array[(slice(None),) * (axis + 1) + (own_slice(array.shape[axis + 1], rank, parts),)]
    return np.ascontiguousarray(joined_blocks(name, own))


def unshard(name, shards):
    """The whole array from all ranks' shards: the inverse of shard(). A single shard is not copied."""
    if is_replicated(name) or len(shards) == 1:
        return shards[0]
    axis, _ = split_of(name)
    return joined_blocks(name, np.concatenate([in_blocks(name, each) for each in shards], axis + 1))


def in_blocks(name, array):
    """A view of a divided parameter, or of its shard, in which its blocks are an axis of their own."""
    axis, blocks = split_of(name)
    return array.reshape(*array.shape[:axis], blocks, array.shape[axis] // blocks, *array.shape[axis + 1 :])


def joined_blocks(name, array):
    """The inverse of in_blocks()."""
    axis, _ = split_of(name)
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def gather(name, slices, shape, group):
    """The whole array, of this shape, on every rank. slices: the list of this rank's slices, often of its one shard.

    All ranks of the group must call this function. A replicated parameter is returned itself; in a group of one, a
    single slice is returned too.
    """
    if is_replicated(name):
        return slices[0]
    largest, gathered = shard_shape(name, shape, 0, group.size * len(slices)), []
    for array in slices:
        if array.shape != largest:  # the last slice has fewer tokens; all ranks send equal shapes
            missing = np.zeros_like(array, shape=(largest[0] - len(array), *largest[1:]))
            array = np.concatenate([array, missing])
        gathered.append(group.all_gather(array[None]))
    in_order = [each[rank] for rank in range(group.size) for each in gathered]
    return unshard(name, in_order)[: shape[0]]


def check_tensor_parallel(config, parts, flag="`tp`", tp=1):
    """Raise ConfigError, with valid numbers, unless `parts` (the value of `flag`) divides n_head.

    Each part must also have a token, which it has unless the vocabulary is very small. tp: the ranks that divide the
    parts.
    """
    heads, V = config.n_head, config.vocab_size
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and are_slices_of(n, tp)]
    valid = [n for n in divisors if own_slice(V, n - 1, n).start < V]
    if parts in valid:
        return
    *most, last = map(str, valid)
    choices = f"{', '.join(most)} or {last}" if most else last
    problem = f"n_head {heads} is not divisible by {flag} {parts}"
    if parts in divisors:
        problem = f"the vocabulary of {V} is too small for {flag} {parts}, which leaves a rank without a token"
    raise ConfigError(f"{problem}: use {flag} {choices}")

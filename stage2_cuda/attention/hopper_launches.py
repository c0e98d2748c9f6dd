"""Launches of the Gluon kernels of attention, which are faster than the plain Triton kernels on a Hopper GPU.

GLUON_TILES in launches.py and serves() say which GPUs and shapes they serve: compute capability 9.0, bf16 and fp16,
head sizes 64 and 128, T_q a multiple of 4, any T_k, causal or not. The plain kernels of forward.py and backward.py
serve all others. Importing this file does not import Gluon: a kernel is imported when its launch is described.
"""

# B batch, T time, H heads, D head size

import importlib
import math
from typing import NamedTuple

from stage2_cuda.runtime.gluon_launch import tile_descriptor
from stage2_cuda.runtime.triton_launch import KernelLaunch, Pointer

HEAD_SIZES = 64, 128
# For T up to SHORT one plain kernel computes dq, dk and dv in one launch. With many heads B*H the Gluon kernels are
# used at T = SHORT too: on an H200 they were faster with 768 heads. The limit MANY_HEADS itself was not measured.
SHORT, MANY_HEADS = 256, 512
ALIGNED_ROWS = 4  # a copy of the logsumexp (float32) starts at a multiple of 16 bytes, or the GPU reports an error
GROUP_BYTES = 16 << 20  # of keys and values of the heads that are computed at a time: they fit the L2 cache
ROWS = 64  # queries or keys of a tile of one warp group: ROWS of hopper_tiles.py
MAX_HEADS = 2**16 - 1  # limit of CUDA for the third dimension of a grid


class GluonTile(NamedTuple):
    """A Gluon kernel in place of a TileConfig. design: "pipelined" or "specialized", see the files of the kernels."""

    design: str

    def text(self):
        """The text that tuning caches and state.json hold; do not change."""
        return f"Gluon {self.design}"


# {(kernel, design, D): its constants, and the registers per thread that the compiler may use (maxnreg)}. REGISTERS: of
# each thread that computes, in a specialized kernel, whose warp groups may have different numbers of registers.
CONSTANTS = {
    ("forward", "pipelined", 64): dict(BLOCK_N=128, STAGES=2, maxnreg=168),
    ("forward", "specialized", 64): dict(BLOCK_N=128, STAGES=4, WARP_GROUPS=3, REGISTERS=160, maxnreg=128),
    ("forward", "specialized", 128): dict(BLOCK_N=128, STAGES=2, WARP_GROUPS=2, REGISTERS=240, maxnreg=168),
    ("dq", "pipelined", 64): dict(BLOCK_N=64, K_STAGES=4, V_STAGES=2, maxnreg=168),
    ("dq", "specialized", 64): dict(BLOCK_N=64, K_STAGES=4, V_STAGES=4, REGISTERS=160, KEEP_OPERANDS=True, maxnreg=128),
    ("dq", "specialized", 128): dict(
        BLOCK_N=64, K_STAGES=3, V_STAGES=2, REGISTERS=160, KEEP_OPERANDS=False, maxnreg=128
    ),
    ("dkdv", "pipelined", 64): dict(STAGES=3, LEAN=True, maxnreg=168),
    ("dkdv", "specialized", 64): dict(STAGES=4, REGISTERS=240, LEAN=False, maxnreg=168),
    ("dkdv", "specialized", 128): dict(STAGES=4, REGISTERS=240, LEAN=True, maxnreg=168),
}
# Warp groups that compute in a specialized kernel of dq, dk and dv. "forward" has its number in CONSTANTS.
WARP_GROUPS = {"dq": 3, "dkdv": 2}


def module_of(kernel):
    return importlib.import_module(f"stage2_cuda.attention.hopper_{kernel}")


def serves(itemsize, heads, T_q, T_k, D):
    """Whether the kernels serve elements of `itemsize` bytes, this number of heads B*H, positions and head size."""
    T = max(T_q, T_k)
    fits = heads <= MAX_HEADS and heads * T < 2**31  # coordinates of a descriptor have 32 bits
    long_enough = T > SHORT or (T == SHORT and heads >= MANY_HEADS)
    return itemsize == 2 and D in HEAD_SIZES and T_q % ALIGNED_ROWS == 0 and long_enough and fits


def designs(kernel, D):
    """The designs of this kernel ("forward", "dq" or "dkdv") for head size D."""
    return [design for name, design, size in CONSTANTS if (name, size) == (kernel, D)]


# -- descriptors -------------------------------------------------------------------------------------------------------


def head_descriptors(block_rows, *heads):
    return [tile_descriptor(x.base, x.shape, x.strides, (1, 1, block_rows, x.shape[3])) for x in heads]


def vector_descriptor(array, size):
    """A descriptor of array (B, H, T) as a vector of size = B*H*T elements, in blocks of ROWS."""
    return tile_descriptor(array if hasattr(array, "data_ptr") else Pointer(array), [size], [1], (ROWS,))


# -- launches ----------------------------------------------------------------------------------------------------------


def grid_of(heads, T, D, rows, length):
    """(heads of a group, tiles of `rows` of `length` rows, groups): the keys and values of a group fit the L2 cache."""
    limit = max(1, GROUP_BYTES // (4 * T * D))
    group = next(size for size in range(min(limit, heads), 0, -1) if heads % size == 0)
    return group, -(-length // rows), heads // group


def kernel_launch(kernel, tile, grid, arguments, D, **constants):
    constants |= CONSTANTS[kernel, tile.design, D]
    function = getattr(module_of(kernel), f"{tile.design}_kernel")
    return KernelLaunch(function, grid, arguments, {**constants, "D": D, "num_warps": 4})


def rows_of(kernel, tile, D):
    """The queries (of "dkdv": the keys) of one program: ROWS for each warp group that computes."""
    if tile.design == "pipelined":
        return ROWS
    return ROWS * (WARP_GROUPS.get(kernel) or CONSTANTS[kernel, tile.design, D]["WARP_GROUPS"])


def forward_launch(y, lse, q, k, v, tile, causal, natural, log2e):
    """As forward_launch() of launches.py, for a GluonTile."""
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    block_n = CONSTANTS["forward", tile.design, D]["BLOCK_N"]
    y, q, *kv = *head_descriptors(ROWS, y, q), *head_descriptors(block_n, k, v)
    arguments = y, lse, q, *kv, T_q, T_k, H, log2e / math.sqrt(D)
    masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, block_n, causal), NATURAL=natural)
    grid = grid_of(B * H, T_k, D, rows_of("forward", tile, D), T_q)
    return kernel_launch("forward", tile, grid, arguments, D, **masks)


def dq_launch(dq, delta, lse2, dy, y, lse, q, k, v, rotation, tile, causal):
    """The KernelLaunch of dq, delta and lse2; the arguments are those of backward_launches() of launches.py."""
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    block_n = CONSTANTS["dq", tile.design, D]["BLOCK_N"]
    dq, dy, y, q = head_descriptors(ROWS, dq, dy, y, q)
    arrays = dq, delta, lse2, dy, y, lse, q, *head_descriptors(block_n, k, v), rotation
    masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, block_n, causal), NATURAL=lse2 is not None)
    grid = grid_of(B * H, T_k, D, rows_of("dq", tile, D), T_q)
    return kernel_launch("dq", tile, grid, (*arrays, T_q, T_k, H, 1 / math.sqrt(D)), D, **masks)


def dkdv_launch(dk, dv, delta, dy, lse2, q, k, v, rotation, tile, causal):
    """The KernelLaunch of dk and dv; lse2 is in base 2. The other arguments: as dq_launch()."""
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    dk, dv, dy, q, k, v = head_descriptors(ROWS, dk, dv, dy, q, k, v)
    delta, lse2 = (vector_descriptor(array, B * H * T_q) for array in (delta, lse2))
    grid = grid_of(B * H, T_q, D, rows_of("dkdv", tile, D), T_k)
    arguments = dk, dv, delta, dy, lse2, q, k, v, rotation, T_q, H, 1 / math.sqrt(D)
    return kernel_launch("dkdv", tile, grid, arguments, D, CAUSAL=causal)


def mask_keys(T_q, T_k, block_n, causal):
    """Whether a tile may contain keys beyond T_k that no causal mask hides."""
    return (T_q > T_k if causal else True) and T_k % block_n != 0

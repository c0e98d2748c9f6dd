"""Attention without the T x T matrix in memory: FlashAttention-2 (Dao 2023), forward and backward.

For q (T_q, D), k and v (T_k, D) of one head; s, p, dp and ds are (T_q, T_k), k' is the transpose of k, sums run along a
row:

    s = q k' / sqrt(D)    lse = log(sum(exp(s)))    p = exp(s - lse)    y = p v
    dv = p' dy    dp = dy v'    delta = sum(p * dp) = sum(y * dy)    ds = p * (dp - delta)
    dq = ds k / sqrt(D)    dk = ds' q / sqrt(D)

In causal attention query i attends to the keys 0 to i only: s is -inf above the diagonal. Tiles above the diagonal are
skipped, and only tiles on the diagonal are masked. The programs with the longest loops are launched first, so that all
processors finish at about the same time.

The kernels are in forward.py and backward.py, and in Gluon for Hopper GPUs in hopper_*.py. This file chooses their
tiles and describes their launches: attention_forward() and attention_backward() for a packed array of the model,
forward_launch() and backward_launches() for separate q, k and v of any strides. For a short T one kernel computes dq,
dk and dv: half of its programs compute dq, the other half dk and dv. With few tiles, several programs can have a part
of one tile's loop each; torch_bridge/kernels/attention_parts.py then adds their results.
"""

# B batch, T time, C channels, H heads, D = C // H head size, HEAD_DIM = D rounded up to a power of two
# a tile of s is BLOCK_M queries (rows) by BLOCK_N keys (columns)

import functools
import math
from typing import NamedTuple

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2core.errors import ConfigError
from stage2_cuda.attention import hopper_launches
from stage2_cuda.attention.backward import both_kernel, dkdv_kernel, dq_kernel
from stage2_cuda.attention.forward import LOG2E, forward_kernel
from stage2_cuda.attention.hopper_launches import GluonTile, mask_keys
from stage2_cuda.runtime.gluon_launch import gluon_kind
from stage2_cuda.runtime.triton_launch import KernelLaunch, Pointer, gpu_model


class TileConfig(NamedTuple):
    """The tile and the launch parameters of one kernel.

    loops: 1 loop over all tiles, with a test for the diagonal in each iteration, or 2 loops: one over the tiles below
    the diagonal, which need no mask, and one over the tiles on it.
    parts: the number of programs that divide the loop of one tile, a power of two. Above 1 only for the kernels forward
    and both, and not for packed arrays: torch_bridge/kernels/attention_parts.py.
    """

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int  # software pipeline depth: tiles in flight or in use
    loops: int = 1
    parts: int = 1

    def text(self):
        """The text that tuning caches and state.json hold; do not change. They have no tiles with parts."""
        return "{} x {}, {} warps, {} stages, {} loops".format(*self)


class AttentionTiles(NamedTuple):
    """A TileConfig or a GluonTile for each kernel, None for a kernel that is not launched.

    both: a square tile for the kernel that computes dq, dk and dv in one launch, in place of `dq` and `dkdv`.
    """

    forward: TileConfig | GluonTile | None = None
    dq: TileConfig | GluonTile | None = None
    dkdv: TileConfig | GluonTile | None = None
    both: TileConfig | None = None

    def __str__(self):
        """The text that tuning caches and state.json hold: "dq 128 x 64, 4 warps, 3 stages, 1 loops"; do not change."""
        return "; ".join(f"{kernel} {tile.text()}" for kernel, tile in self._asdict().items() if tile)


NO_LIMIT = 1 << 62
# {kind of products: {(largest D, largest T): tiles}}; the first entry that fits is used. "16 bits": the fastest on an
# H200, except for the forward pass of a short T. The others are estimates that spill few registers when compiled for
# an H200; strict fp32 ("ieee") does not use tensor cores. Positional tiles: forward, dq, dkdv.
DEFAULT_TILES = {
    "16 bits": {
        (64, 256): AttentionTiles(TileConfig(64, 64, 4, 3), both=TileConfig(64, 64, 4, 2)),
        (64, 4096): AttentionTiles(TileConfig(128, 64, 8, 3), TileConfig(128, 32, 4, 3), TileConfig(64, 64, 4, 3)),
        (64, NO_LIMIT): AttentionTiles(TileConfig(64, 128, 4, 2), TileConfig(128, 64, 4, 3), TileConfig(64, 64, 4, 3)),
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 64, 4, 3), TileConfig(128, 32, 8, 3), TileConfig(64, 128, 8, 3)),
    },
    "ieee": {
        (64, NO_LIMIT): AttentionTiles(*[TileConfig(32, 32, 8, 2)] * 3),
        (128, NO_LIMIT): AttentionTiles(*[TileConfig(16, 16, 8, 2)] * 3),
    },
    "tf32": {
        (64, NO_LIMIT): AttentionTiles(*[TileConfig(64, 64, 4, 2)] * 3),
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 32, 8, 2), TileConfig(64, 32, 8, 2), TileConfig(32, 64, 8, 2)),
    },
    "tf32x3": {
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 32, 4, 2), TileConfig(64, 32, 4, 2), TileConfig(32, 64, 4, 2)),
    },
}
# {GPU: {(largest D, largest T): tiles}}: the fastest on this GPU, where hopper_launches.serves() is true. Other arrays
# have the plain tiles of DEFAULT_TILES.
PIPELINED, SPECIALIZED = GluonTile("pipelined"), GluonTile("specialized")
HOPPER_TILES = {
    (64, 4096): AttentionTiles(PIPELINED, PIPELINED, PIPELINED),
    (128, NO_LIMIT): AttentionTiles(SPECIALIZED, SPECIALIZED, SPECIALIZED),
}
GLUON_TILES = {"H100": HOPPER_TILES, "H200": HOPPER_TILES}
# Head sizes for which dkdv_kernel also reads lse and delta through descriptors, if the arrays have 16 bits and T is a
# multiple of BLOCK_M. For these sizes it was measured to be faster.
DESCRIPTOR_HEAD_SIZES = (64,)


# -- launches of the kernels -------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """An array (B, H, T, D) of any strides, which are counted in elements; the last is 1.

    base: the address of the first element, with a dtype: a Pointer or a PyTorch tensor. Every other stride must be a
    multiple of 16 bytes, and so must the address.
    """

    base: object
    shape: tuple
    strides: tuple

    def descriptor(self, block_rows):
        """A descriptor for blocks of `block_rows` rows of one head; their columns are padded to HEAD_DIM."""
        block_shape = [1, 1, block_rows, padded_head_size(self.shape[3])]
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), block_shape)


def forward_launch(y, lse, q, k, v, tile, precision="ieee", causal=True, natural=False):
    """The KernelLaunch that computes y and lse.

    q and y (B, H, T_q, D), k and v (B, H, T_k, D): Heads. lse (B, H, T_q): a contiguous float32 array. With
    natural=True it is the lse of the formula, a natural logarithm; otherwise it is in base 2, log2(e) times as large.
    tile: a TileConfig or a GluonTile; with tile.parts > 1, y (B, H * parts, T_q, D) and lse (B, H * parts, T_q) are
    those of each part. precision: as for attention_forward().
    """
    if isinstance(tile, GluonTile):
        return hopper_launches.forward_launch(y, lse, q, k, v, tile, causal, natural, LOG2E.value)
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    arrays = y.descriptor(tile.block_m), lse, q.descriptor(tile.block_m), *descriptors(tile.block_n, k, v)
    arguments = *arrays, T_q, T_k, H, LOG2E.value / math.sqrt(D)
    masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, tile.block_n, causal))
    options = launch_options(tile, D, precision, NATURAL=natural, IN_PARTS=tile.parts > 1, **masks)
    grid = parts_grid((B * H, triton.cdiv(T_q, tile.block_m)), tile)
    return KernelLaunch(forward_kernel, grid, arguments, options)


def backward_launches(
    dq, dk, dv, delta, dy, q, k, v, y, lse, tiles, precision="ieee", causal=True, lse2=None, rotation=None
):
    """Yield the one or two KernelLaunches that compute dq, dk and dv.

    dq, dk, dv, dy, q, k, v, y: Heads. lse and delta: contiguous float32 arrays (B, H, T_q); lse is that of
    forward_launch(), delta is scratch. lse2: None if lse is in base 2. If lse is a natural logarithm, lse2 is scratch
    like delta, and a kernel writes lse in base 2 to it.

    tiles: AttentionTiles. With only `dq`, dk and dv are not computed. With only `dkdv`, dq is not computed, and delta
    and lse2 must contain the values that a launch with `dq` has written. With tiles.both.parts > 1, dq, dk and dv are
    the terms of each part: (B, H * parts, T, D).

    rotation: None, or that of kernels/rotary.py (T, 2, D / 2), which has rotated q and k: then dq and dk are rotated
    back. T_q is T_k, and tiles.both.parts is 1.
    """
    (B, H, T_q, D), T_k, scale, natural = q.shape, k.shape[2], 1 / math.sqrt(q.shape[3]), lse2 is not None
    pairs = dict(PAIRS=0 if rotation is None else D // 2)
    if tile := tiles.both:
        arrays = *descriptors(tile.block_m, dq, dk, dv, dy, y), lse, *descriptors(tile.block_m, q, k, v)
        masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, tile.block_n, causal), EVEN=T_q % tile.block_m == 0)
        options = launch_options(tile, D, precision, **pairs, NATURAL=natural, IN_PARTS=tile.parts > 1, **masks)
        grid = parts_grid((B * H, 2 * triton.cdiv(max(T_q, T_k), tile.block_m)), tile)
        yield KernelLaunch(both_kernel, grid, (*arrays, rotation, T_q, T_k, H, scale), options)
        return
    if isinstance(tiles.dq, GluonTile):
        yield hopper_launches.dq_launch(dq, delta, lse2, dy, y, lse, q, k, v, rotation, tiles.dq, causal)
    elif tile := tiles.dq:
        dq_m, dy_m, y_m, q_m = descriptors(tile.block_m, dq, dy, y, q)
        arrays = dq_m, delta, lse2, dy_m, y_m, lse, q_m, *descriptors(tile.block_n, k, v)
        masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, tile.block_n, causal))
        options = launch_options(tile, D, precision, **pairs, **masks)
        grid = B * H, triton.cdiv(T_q, tile.block_m)
        yield KernelLaunch(dq_kernel, grid, (*arrays, rotation, T_q, T_k, H, scale), options)
    if isinstance(tiles.dkdv, GluonTile):
        lse_in = lse2 if natural else lse
        yield hopper_launches.dkdv_launch(dk, dv, delta, dy, lse_in, q, k, v, rotation, tiles.dkdv, causal)
    elif tile := tiles.dkdv:
        dk_n, dv_n, k_n, v_n = descriptors(tile.block_n, dk, dv, k, v)
        dy_m, q_m = descriptors(tile.block_m, dy, q)
        delta_in, lse_in, even = delta, lse2 if natural else lse, T_q % tile.block_m == 0
        use_descriptor = even and D in DESCRIPTOR_HEAD_SIZES and q.base.dtype.itemsize == 2 and B * H * T_q < 2**31
        if use_descriptor:
            delta_in, lse_in = (row_descriptor(array, B * H * T_q, tile.block_m) for array in (delta_in, lse_in))
        arrays = dk_n, dv_n, delta_in, dy_m, lse_in, q_m, k_n, v_n
        masks = dict(CAUSAL=causal, EVEN=even, USE_DESCRIPTOR=use_descriptor)
        options = launch_options(tile, D, precision, **pairs, **masks)
        grid = B * H, triton.cdiv(T_k, tile.block_n)
        yield KernelLaunch(dkdv_kernel, grid, (*arrays, rotation, T_q, H, scale), options)


def parts_grid(grid, tile):
    return (*grid, tile.parts) if tile.parts > 1 else grid


def pointer(array):
    """The base of Heads: a PyTorch tensor itself, a Pointer to another array."""
    return array if hasattr(array, "data_ptr") else Pointer(array)


def descriptors(block_rows, *heads):
    return [array.descriptor(block_rows) for array in heads]


def row_descriptor(array, size, block_rows):
    """A descriptor of array (B, H, T) as a vector of size = B*H*T elements, in blocks of `block_rows`.

    T must be a multiple of block_rows; otherwise a block would contain rows of the next head.
    """
    base = pointer(array)
    return TensorDescriptor(base, [size], [1], [block_rows])


@functools.cache
def padded_head_size(D):
    return max(16, triton.next_power_of_2(D))  # tl.dot needs at least 16


def launch_options(tile, D, precision, **constants):
    """`constants` with the constants and launch parameters that all attention kernels of this file share."""
    return tile_options(tile, D, LOOPS=tile.loops, PRECISION=precision, **constants)


def tile_options(tile, D, **constants):
    """`constants` with the block sizes and the launch parameters of `tile`."""
    shared = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEAD_DIM": padded_head_size(D)}
    return {**shared, "num_warps": tile.num_warps, "num_stages": tile.num_stages, **constants}


# -- packed arrays of a model ------------------------------------------------------------------------------------------


def attention_forward(y, lse, qkv, n_head, precision="ieee", tiles=None):
    """y (B, T, C) and lse (B, H, T) float32 of causal attention, from qkv (B, T, 3C): columns q, then k, then v.

    Each part has the columns (H, D). lse is in base 2, because the kernels use exp2: log2(e) times the lse of the
    formula. precision: how tl.dot multiplies float32, "ieee", "tf32" or "tf32x3"; products of fp16 and bf16 are exact,
    and all sums are float32. tiles: AttentionTiles to use instead of those of select_tiles(). Raises ConfigError unless
    the head size is a multiple of 8 up to 128.
    """
    tiles = tiles or select_tiles(qkv, n_head, precision)
    (y,) = packed_heads(y, n_head, 1)
    forward_launch(y, lse, *packed_heads(qkv, n_head, 3), tiles.forward, precision).run()


def attention_backward(dqkv, delta, dy, qkv, y, lse, n_head, precision="ieee", tiles=None, rotation=None):
    """dqkv (B, T, 3C) from dy (B, T, C) and the qkv, y, lse of attention_forward(); delta (B, H, T) float32: scratch.

    precision, tiles: as for attention_forward(); for tiles of only one kernel, and for rotation, see
    backward_launches().
    """
    tiles = tiles or select_tiles(qkv, n_head, precision)
    (dy,), (y,) = packed_heads(dy, n_head, 1), packed_heads(y, n_head, 1)
    dqkv, qkv = packed_heads(dqkv, n_head, 3), packed_heads(qkv, n_head, 3)
    for kernel_launch in backward_launches(*dqkv, delta, dy, *qkv, y, lse, tiles, precision, rotation=rotation):
        kernel_launch.run()


def packed_heads(array, n_head, parts):
    """The Heads of each part of array (B, T, parts C); raises ConfigError as check_head_size()."""
    B, T, columns = array.shape
    C = columns // parts
    D = check_head_size(C, n_head)
    shape, strides = (B, n_head, T, D), (T * columns, D, columns, 1)
    return [Heads(Pointer(array, part * C * array.dtype.itemsize), shape, strides) for part in range(parts)]


def check_head_size(width, n_head):
    """Return D = width / n_head; raises ConfigError unless it is a multiple of 8 up to 128."""
    D, rest = divmod(width, n_head)
    if rest or D % 8 or not 8 <= D <= 128:
        raise ConfigError(f"attention takes head sizes that are multiples of 8 up to 128, not {width} / {n_head}")
    return D


def head_shape(qkv, n_head):
    """(B, T, D) of qkv (B, T, 3C); raises ConfigError as check_head_size()."""
    B, T, columns = qkv.shape
    return B, T, check_head_size(columns // 3, n_head)


def select_tiles(qkv, n_head, precision):
    """The AttentionTiles for qkv (B, T, 3C), of GLUON_TILES if the Gluon kernels serve it, else of DEFAULT_TILES."""
    (B, T, D), itemsize = head_shape(qkv, n_head), qkv.dtype.itemsize
    return default_tiles(itemsize, T, D, precision, gluon_table(itemsize, B * n_head, T, D))


def gluon_table(itemsize, heads, T, D):
    """The entries of GLUON_TILES for CuPy's current device; {} if the plain kernels serve B*H = `heads` heads."""
    return gluon_tiles_of(*gpu_model()) if hopper_launches.serves(itemsize, heads, T, T, D) else {}


def gluon_tiles_of(capability, name):
    """The entries of GLUON_TILES for a GPU of this compute capability and name; {} if it has no Gluon kernels."""
    return GLUON_TILES.get(gluon_kind(capability, name), {})


def default_tiles(itemsize, T, D, precision, gluon=None):
    """The AttentionTiles for elements of `itemsize` bytes, T positions and head size D.

    gluon: a gluon_table(), whose entries replace those of DEFAULT_TILES unless it is empty, or None.
    """
    entries = gluon or DEFAULT_TILES["16 bits" if itemsize == 2 else precision]
    return next(tiles for (max_D, max_T), tiles in entries.items() if D <= max_D and T <= max_T)

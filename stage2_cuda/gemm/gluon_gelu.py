"""Matrix products with GELU or its derivative, in Gluon, for Hopper GPUs.

    gelu_product            h = a b + bias                      y = gelu(h)
    gelu_backward_product   dh = (a b') * gelu'(h)              partials: sums of rows of dh

If all warps of a program compute GELU at the same time, the tensor cores are idle during this time. Here two or three
warp groups, the consumers, compute different tiles: while one computes the product of its tile, the others finish their
previous tiles: they compute GELU, and write the results. Backward has three consumers, because its derivative and its
sums take longer than a product. One more warp, the producer, copies the tiles of a and b to a ring in shared memory. A
program computes tiles until none is left, so the producer already copies the operands of the next tile.

Rounding: the sums are float32, and y is computed from h before h is rounded. The derivative is computed from the
rounded h; partials are sums of dh before it is rounded. There are no atomic operations. The steps over K are added in
ascending order, with the same instructions for all rows. So equal inputs give equal bits, and the bits of a row depend
neither on M nor on the program that computes the row.
"""

# a (M, K), b (K, N) or its transpose (N, K), results (M, N). A consumer computes a tile of ROWS x COLUMNS, in steps of
# DEPTH terms, and finishes it in PARTS, which have COLUMNS / PARTS columns each. Barriers and rings: see
# runtime/gluon_tiles.py. n: number of a tile within a program; c: consumer.

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from stage2_cuda.kernels.gelu import D0, D2, U1, U3
from stage2_cuda.runtime import gluon_tiles as gt
from stage2_cuda.runtime.gluon_launch import tile_descriptor
from stage2_cuda.runtime.triton_launch import Pointer, launch, multiprocessors

# {CONSUMERS: registers per thread of a consumer}, and {CONSUMERS: those per thread of all warps, on average}
REGISTERS, MAX_REGISTERS = gl.constexpr({2: 240, 3: 160}), {2: 168, 3: 128}
WARPS = gl.constexpr(4)  # of a consumer
ALIGNED = 8  # elements: a descriptor needs rows whose length is a multiple of 16 bytes


class GeluTile(NamedTuple):
    """The tile of a consumer. The fields are constants of the kernel."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 5  # of the ring
    consumers: int = 2  # 2 or 3
    parts: int = 2  # 2 or 4
    buffers: int = 2  # parts in shared memory, per consumer, through which it writes; backward: all parts, first with h
    group: int = 16  # rows of tiles that are computed at a time

    def text(self):
        sizes = f"{self.rows} x {self.columns} x {self.depth}, stages {self.stages}, consumers {self.consumers}"
        return f"{sizes}, parts {self.parts}, buffers {self.buffers}, group {self.group}"


# The tiles that the stages use, and the variants that benchmarks.gpu.fusions --gluon compares. Each needs at most 227
# KiB of shared memory.
FORWARD_TILE = GeluTile()
BACKWARD_TILE = GeluTile(stages=4, consumers=3, parts=4, buffers=4)
FORWARD_TILES = [FORWARD_TILE, GeluTile(stages=4, group=8), GeluTile(group=32), GeluTile(consumers=3, buffers=1)]
BACKWARD_TILES = [BACKWARD_TILE, BACKWARD_TILE._replace(group=32), GeluTile(), GeluTile(parts=4, buffers=4)]


# -- the order of the work ---------------------------------------------------------------------------------------------
# These functions have no tensors, so that a test calls them in Python to simulate the barriers.


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(row, column) of a tile, in tiles. GROUP rows of tiles are computed at a time: their operands stay in L2."""
    first = tile // (GROUP * tiles_n) * GROUP
    size = tiles_m - first if tiles_m - first < GROUP else GROUP
    place = tile % (GROUP * tiles_n)
    return first + place % size, place // size


@gluon.jit
def turn_parity(n, c, CONSUMERS: gl.constexpr):
    """The parity with which consumer c waits for its turn to compute tile n; tile 0 waits for nothing.

    A wait returns if the last completed phase has this parity. Without turns, a consumer could wait for use u of the
    ring while the copy of use u - STAGES is in flight. The last completed phase is then that of use u - 2 STAGES, which
    has the same parity as use u, so the wait would return too early.
    """
    return (n // CONSUMERS + (1 if c == 0 else 0)) & 1


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(
    arrays, BACKWARD: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that starts the copies: a and b of each step and, in backward, h of each tile."""
    tiles, barriers, descs, counts = arrays
    a_tiles, b_tiles, out_tiles = tiles
    full, empty, h_full, h_empty = barriers
    h_desc, a_desc, b_desc = descs
    tiles_m, tiles_n, steps = counts
    step_bytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    use, n = 0, 0  # the number of the step and of the tile, within this program
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = tile_place(tile, tiles_m, tiles_n, GROUP)
        row, col = row * ROWS, col * COLUMNS
        for step in range(steps):
            i, parity = gt.slot(use, STAGES)
            mbarrier.wait(empty.index(i), parity ^ 1)
            mbarrier.expect(full.index(i), step_bytes)
            gt.start_load(a_desc, [row, step * DEPTH], full.index(i), a_tiles.index(i))
            if BACKWARD:
                gt.start_load(b_desc, [col, step * DEPTH], full.index(i), b_tiles.index(i))
            else:
                gt.start_load(b_desc, [step * DEPTH, col], full.index(i), b_tiles.index(i))
            use += 1
        if BACKWARD:  # h is needed only after the last step
            i, parity = gt.slot(n, CONSUMERS)  # the consumer that computes the tile, and the parity
            mbarrier.wait(h_empty.index(i), parity ^ 1)
            mbarrier.expect(h_full.index(i), PARTS * h_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                h_place = [row, col + part * (COLUMNS // PARTS)]
                gt.start_load(h_desc, h_place, h_full.index(i), out_tiles.index(PARTS * i + part))
        n += 1


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(
    acc, tiles, barriers, n, steps,
    c: gl.constexpr, BACKWARD: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The product (ROWS, COLUMNS) of tile n, float32. One step is in flight while the next one starts.

    acc: registers for the result; their values are not used.
    """
    a_tiles, b_tiles = tiles[0], tiles[1]
    full, empty, turns = barriers
    mbarrier.wait(turns.index(c), turn_parity(n, c, CONSUMERS))
    for step in range(steps):
        i, parity = gt.slot(n * steps + step, STAGES)
        mbarrier.wait(full.index(i), parity)
        b = b_tiles.index(i).permute((1, 0)) if BACKWARD else b_tiles.index(i)
        acc = warpgroup_mma(a_tiles.index(i), b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # the previous step has ended
        previous, _ = gt.slot(n * steps + step + STAGES - 1, STAGES)
        mbarrier.arrive(empty.index(previous), pred=step > 0)
    mbarrier.arrive(turns.index((c + 1) % CONSUMERS))  # all operands of this tile have arrived
    acc = warpgroup_mma_wait(0, [acc])
    last, _ = gt.slot((n + 1) * steps - 1, STAGES)
    mbarrier.arrive(empty.index(last))
    return acc


@gluon.jit
def consumer(
    arrays, c: gl.constexpr, BACKWARD: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The tiles of one consumer: the product, then GELU or its derivative for each part of the columns."""
    tiles, barriers, outputs, counts, shape = arrays
    LAYOUT: gl.constexpr = gt.product_layout(COLUMNS)
    full, empty, turns, h_full, h_empty = barriers
    tiles_m, tiles_n, steps = counts
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    n, acc = gl.to_tensor(c), zeros
    for tile in range(gl.program_id(0) + n * gl.num_programs(0), tiles_m * tiles_n, CONSUMERS * gl.num_programs(0)):
        row, col = tile_place(tile, tiles_m, tiles_n, GROUP)
        # Zeros take 128 instructions when it is this consumer's turn; keeping acc needs 128 registers until then.
        start = acc if CONSUMERS == 2 else zeros
        acc = multiply(start, tiles, (full, empty, turns), n, steps, c, BACKWARD, STAGES, CONSUMERS)
        parts = column_parts(acc, PARTS)
        if BACKWARD:
            mbarrier.wait(h_full.index(c), (n // CONSUMERS) & 1)
        for part in gl.static_range(PARTS):
            place = (row * ROWS, col * COLUMNS + part * (COLUMNS // PARTS))
            # the layout of a product of fewer columns: the values stay in their registers
            values = gl.convert_layout(parts[part], gt.product_layout(COLUMNS // PARTS), assert_trivial=True)
            if BACKWARD:
                finish_backward(values, tiles[2].index(PARTS * c + part), outputs, place, shape)
            else:
                finish_forward(values, tiles[2], outputs, place, shape, c, BUFFERS)
        if BACKWARD:
            tma.store_wait(0)
            gt.synchronize()
            mbarrier.arrive(h_empty.index(c))
        n += CONSUMERS
    tma.store_wait(0)


@gluon.jit
def column_parts(acc, PARTS: gl.constexpr):
    """acc (ROWS, COLUMNS) as a tuple of PARTS tensors (ROWS, COLUMNS / PARTS)."""
    left, right = split_columns(acc)
    if PARTS == 2:
        parts = (left, right)
    else:
        parts = split_columns(left) + split_columns(right)
    return parts


@gluon.jit
def split_columns(x):
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def finish_forward(h, out_tiles, outputs, place, shape, c: gl.constexpr, BUFFERS: gl.constexpr):
    """Add the bias to h (ROWS, COLUMNS / PARTS), and write h and gelu(h)."""
    y_desc, h_desc, bias_ptr = outputs
    cols = place[1] + gl.arange(0, h.shape[1], gl.SliceLayout(0, h.type.layout))
    h += gl.load(bias_ptr + cols, mask=cols < shape[1], other=0.0).to(gl.float32)[None, :]
    tma.store_wait(BUFFERS - 1)  # the tile in shared memory has been read
    gt.synchronize()
    store_by_tile(h_desc, place, out_tiles.index(BUFFERS * c), h)
    y = h * sigmoid_of_2u(h)
    tma.store_wait(BUFFERS - 1)
    gt.synchronize()
    store_by_tile(y_desc, place, out_tiles.index(BUFFERS * c + BUFFERS - 1), y)


@gluon.jit
def finish_backward(dy, tile, outputs, place, shape):
    """Write dh = dy * gelu'(h) and its column sums. h is in `tile`, a part in shared memory, which then gets dh."""
    dh_desc, _, partials_ptr = outputs
    layout: gl.constexpr = dy.type.layout
    dh = dy * gelu_derivative(tile.load(layout).to(gl.float32))
    gt.synchronize()  # all warps have read h
    store_by_tile(dh_desc, place, tile, dh)
    row, col = place
    # rows 16 w to 16 w + 15 of each 64 are in the registers of warp w; a sum over several warps would take longer
    by_warp = dh.reshape([dy.shape[0] // 64, WARPS, 64 // WARPS, dy.shape[1]])
    sums = gl.sum(gl.sum(by_warp, 0), 1)
    cols = col + gl.arange(0, dy.shape[1], gl.SliceLayout(0, sums.type.layout))
    rows = row // dy.shape[0] * WARPS + gl.arange(0, WARPS, gl.SliceLayout(1, sums.type.layout))
    mask = (cols < shape[1])[None, :] & (row < shape[0])  # beyond M a and h are 0, and so is dh
    gl.store(partials_ptr + rows.to(gl.int64)[:, None] * shape[1] + cols[None, :], sums, mask=mask)


@gluon.jit
def store_by_tile(desc, place, tile, values):
    """Copy `values` to a tile in shared memory, and start to write it. No warp and no copy may still use the tile."""
    tile.store(values.to(desc.dtype))
    hopper.fence_async_shared()
    gt.synchronize()
    gt.start_store(desc, [place[0], place[1]], tile)


# -- GELU --------------------------------------------------------------------------------------------------------------


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, with an error of at most one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid_of_2u(x):
    """s = 1 / (1 + exp(-2u)), see kernels/gelu.py; gelu(x) = x s."""
    return reciprocal(1.0 + gt.exp2(x * (x * x * U3 + U1)))


@gluon.jit
def gelu_derivative(x):
    """gelu'(x) = s + 2 y (1 - s) du/dx, with y = x s."""
    s = sigmoid_of_2u(x)
    return s + (s - s * s) * (x * (x * x * D2 + D0))


# -- kernel and launches -----------------------------------------------------------------------------------------------


@gluon.jit
def gelu_kernel(
    out_desc, h_desc, vector_ptr, a_desc, b_desc, M, N, K, BACKWARD: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr,
    BUFFERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Forward: out is y, the vector is the bias. BACKWARD: out is dh, the vector is partials, h is read."""
    tiles = (gt.new_tiles(a_desc, STAGES), gt.new_tiles(b_desc, STAGES), gt.new_tiles(out_desc, CONSUMERS * BUFFERS))
    full, empty, turns = gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 1), gt.new_barriers(CONSUMERS, 1)
    h_full, h_empty = full, empty
    if BACKWARD:  # a barrier that is initialised must be used: see new_barriers()
        h_full, h_empty = gt.new_barriers(CONSUMERS, 1), gt.new_barriers(CONSUMERS, 1)
    hopper.fence_async_shared()
    counts, shape = (gl.cdiv(M, ROWS), gl.cdiv(N, COLUMNS), gl.cdiv(K, DEPTH)), (M, N)
    computed = (tiles, (full, empty, turns, h_full, h_empty), (out_desc, h_desc, vector_ptr), counts, shape)
    copied = (tiles, (full, empty, h_full, h_empty), (h_desc, a_desc, b_desc), counts)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (computed, 0, BACKWARD, ROWS, COLUMNS, STAGES, CONSUMERS, PARTS, BUFFERS, GROUP)),
            (consumer, (computed, 1, BACKWARD, ROWS, COLUMNS, STAGES, CONSUMERS, PARTS, BUFFERS, GROUP)),
            (producer, (copied, BACKWARD, ROWS, COLUMNS, DEPTH, STAGES, CONSUMERS, PARTS, GROUP)),
        ], [4, 1], [REGISTERS[CONSUMERS], gt.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (computed, 0, BACKWARD, ROWS, COLUMNS, STAGES, CONSUMERS, PARTS, BUFFERS, GROUP)),
            (consumer, (computed, 1, BACKWARD, ROWS, COLUMNS, STAGES, CONSUMERS, PARTS, BUFFERS, GROUP)),
            (consumer, (computed, 2, BACKWARD, ROWS, COLUMNS, STAGES, CONSUMERS, PARTS, BUFFERS, GROUP)),
            (producer, (copied, BACKWARD, ROWS, COLUMNS, DEPTH, STAGES, CONSUMERS, PARTS, GROUP)),
        ], [4, 4, 1], [REGISTERS[CONSUMERS], REGISTERS[CONSUMERS], gt.PRODUCER_REGISTERS])  # fmt: skip


def serves(itemsize, M, N, K):
    """Whether the kernel serves operands with elements of `itemsize` bytes, and these sizes; on a Hopper GPU."""
    aligned = N % ALIGNED == 0 and K % ALIGNED == 0
    indices_fit = min(M, N, K) > 0 and max(M, N, K) < 2**30 and M * N < 2**44  # 32-bit coordinates, tile numbers
    return itemsize == 2 and aligned and indices_fit


def partials_shape(M, N, tile=BACKWARD_TILE):
    """The shape of the float32 scratch of gelu_backward_product(): for each tile of rows, one row of each warp."""
    return WARPS.value * -(-M // tile.rows), N


def gelu_product(y, h, a, b, bias, tile=FORWARD_TILE):
    """h (M, N) = a (M, K) b (K, N) + bias (N), and y = gelu(h): contiguous arrays of one dtype, see serves()."""
    launch_product(False, y, h, bias, a, b, tile)


def gelu_backward_product(dh, partials, a, b, h, tile=BACKWARD_TILE):
    """dh (M, N) = (a (M, K) b') * gelu'(h (M, N)) with b (N, K), and partial sums of the rows of dh.

    partials: of partials_shape(M, N, tile). Call column_sums.add_partials(partials, dbias) afterwards.
    """
    launch_product(True, dh, h, partials, a, b, tile)


def launch_product(backward, out, h, vector, a, b, tile):
    """Launch the kernel: `out` and h are (M, N) arrays, `vector` is the bias or partials."""
    allowed = (tile.parts,) if backward else (1, 2)
    if tile.buffers not in allowed:
        raise ValueError(f"buffers {tile.buffers}: this product needs {' or '.join(map(str, allowed))}")
    (M, K), N = a.shape, out.shape[1]
    block_b = (tile.columns, tile.depth) if backward else (tile.depth, tile.columns)
    part = tile.rows, tile.columns // tile.parts
    blocks = part, part, (tile.rows, tile.depth), block_b
    out, h, a, b = (descriptor(array, block) for array, block in zip((out, h, a, b), blocks, strict=True))
    # one for each multiprocessor, because of their shared memory; the results do not depend on this number
    programs = min(multiprocessors(), -(-M // tile.rows) * -(-N // tile.columns))
    constants = {name.upper(): value for name, value in tile._asdict().items()}
    constants |= dict(BACKWARD=backward, num_warps=4, maxnreg=MAX_REGISTERS[tile.consumers])
    launch(gelu_kernel, (programs,), out, h, vector, a, b, M, N, K, **constants)


def descriptor(array, block_shape):
    return tile_descriptor(Pointer(array), array.shape, (array.shape[1], 1), block_shape)

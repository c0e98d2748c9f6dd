"""Which tiles of the attention kernels are the fastest for torch_bridge.flash_attention, for each D and T?

Kernels: forward, dq, dkdv, and both (dq, dk and dv in one launch). forward and both can have several programs for each
tile (parts). The fastest are copied by hand into DEFAULT_TILES of stage2_cuda/attention/launches.py, for few programs
into SMALL_TILES of torch_bridge/attention_ops.py, for float32 into TILES of torch_bridge/kernels/fp16x3_launches.py.
The lines "in use" are the tiles of these tables. Device time in milliseconds, causal, one head, from CUDA graphs.

    python -m benchmarks.torch.attention_tiles --dry-run  # the names of the rows
    python -m benchmarks.torch.attention_tiles --kernel forward --head-size 64 --length 1024  # one kernel
    python -m benchmarks.torch.attention_tiles  # all tiles that are missing
"""

import functools
import itertools

import torch
import triton
from triton import OutOfResources

from benchmarks.harness.rows import ROW_FLAGS, mean_and_deviation, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from benchmarks.peers.torch_graphs import captured
from stage2_cuda.attention.launches import AttentionTiles, TileConfig
from torch_bridge import attention_ops

# T time (queries and keys), D head size

KERNELS = "forward", "dq", "dkdv", "both"
WITH_PARTS = "forward", "both"  # float32 has only these kernels
MAX_SUMS = 160  # float32 sums of one thread, of its 255 registers
SHARED = 227 << 10  # bytes
RANKING = Table("", "tile = {name.split(' / ')[-1]} | ms = {time.mean:.4f} | x = {time.mean / fastest:.3f}")
WARM_UP, MEASURED, SHOWN = 10, 40, 5  # milliseconds before and of a measurement; lines of a ranking


def tiles(kernel, D, itemsize):
    """The TileConfigs to time: their sums fit into registers, and their operands into shared memory."""
    sizes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))
    for tile in itertools.starmap(TileConfig, sizes):
        m, n, threads = tile.block_m, tile.block_n, 32 * tile.num_warps
        outputs = {"forward": m, "dq": m, "dkdv": 2 * n, "both": 2 * n}[kernel]  # rows of D sums
        sums = m * n * (1 if kernel == "forward" else 2) + D * outputs
        operands = itemsize * D * (2 * tile.num_stages * (m if kernel in ("dkdv", "both") else n) + 2 * m)
        if 16 <= sums / threads <= MAX_SUMS and operands <= SHARED and (kernel != "both" or m == n):
            yield tile


def tile_row(kernel, tile, dtype_name, T, D):
    """The time of one kernel with one tile, or with the tiles in use if tile is None."""
    dtype, in_use = getattr(torch, dtype_name), attention_ops.select_tiles
    q, k, v, do = (torch.randn(1, T, D, device="cuda", dtype=dtype) for _ in range(4))
    used = in_use(attention_ops.input_heads(q), attention_ops.input_heads(k), attention_ops.precision_of(q))
    tile = tile or getattr(used, kernel)
    if tile is None:
        return {"not_used": True}
    stream = torch.cuda.Stream()
    attention_ops.select_tiles = lambda *_: AttentionTiles(used.forward)._replace(**{kernel: tile})
    try:
        with torch.cuda.stream(stream):
            o, lse = attention_ops.triton_forward(q, k, v, True)
            call = functools.partial(attention_ops.triton_backward, do, q, k, v, o, lse, True)
            if kernel == "forward":
                call = functools.partial(attention_ops.triton_forward, q, k, v, True)
            call()
            graph, _ = captured(call, stream)
            samples = triton.testing.do_bench(graph.replay, WARM_UP, MEASURED, return_mode="all")
    except OutOfResources as error:
        return {"does_not_fit": str(error).splitlines()[0]}
    finally:
        attention_ops.select_tiles = in_use
    return {"time": mean_and_deviation(samples)}


def cases(args):
    """{name of a row: function}. A kernel is compiled once for all T with one part, and once with several."""
    found = {}
    for dtype, D, kernel in itertools.product(args.dtype, args.head_size, args.kernel):
        if dtype == "float32" and kernel not in WITH_PARTS:
            continue
        for tile in [None, *tiles(kernel, D, 2 if dtype == "bfloat16" else 4)]:
            for T, parts in itertools.product(args.length, args.parts if tile and kernel in WITH_PARTS else [1]):
                described = "{} x {}, {} warps, {} stages, {} parts".format(*tile[:4], parts) if tile else "in use"
                divided_tile = tile and tile._replace(parts=parts)
                row = functools.partial(tile_row, kernel, divided_tile, dtype, T, D)
                found[f"{dtype} / D {D} / T {T} / {kernel} / {described}"] = row
    return found


def print_rankings(rows):
    """Print the fastest tiles of each kernel, D and T, and the tiles in use."""
    rows = sorted((row for row in rows if "time" in row), key=lambda row: row["time"]["mean"])
    for case in sorted({row["name"].rpartition(" / ")[0] for row in rows}):
        ranked = [row for row in rows if row["name"].rpartition(" / ")[0] == case]
        shown = ranked[:SHOWN] + [row for row in ranked[SHOWN:] if row["name"].endswith(" / in use")]
        RANKING.print([row | {"fastest": ranked[0]["time"]["mean"]} for row in shown], case)


@benchmark(
    common=ROW_FLAGS,
    dtype=dict(nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"], help="(default bfloat16)"),
    head_size=dict(type=int, nargs="+", default=[64, 128], help="D (default 64 128)"),
    length=dict(type=int, nargs="+", default=[1024, 4096, 16384], help="T (default 1024 4096 16384)"),
    parts=dict(type=int, nargs="+", default=[1, 2, 4, 8], help="programs of a tile (default 1 2 4 8)"),
    kernel=dict(nargs="+", choices=KERNELS, default=list(KERNELS), help="(default all)"),
)
def main(args):
    print_rankings(run_rows(args, cases(args)))

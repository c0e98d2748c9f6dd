"""Which tile is the fastest for D = ReLU(A B + C), and how fast is it beside PyTorch and cublasLt?

A grid search over the fields of MatmulTile. It prints the ranking with the resources of each tile, why the first one
wins, and a comparison in interleaved rounds with PyTorch, eager and compiled, and with cublasLt and a fused ReLU
(PyTorch's _addmm_activation fuses a bias vector only). Device time in milliseconds, from CUDA graphs of several calls.

    python -m benchmarks.torch.matmul_search                         # M = N = K = 2048
    python -m benchmarks.torch.matmul_search --size 1024 --rounds 3  # a smaller size
    python -m benchmarks.torch.matmul_search --dry-run               # the names of the rows
"""

import argparse
import functools
import itertools
import statistics

import torch
from triton import OutOfResources

from benchmarks.harness.report import paired_ratio
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.rows import ROW_FLAGS, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from benchmarks.peers import torch_graphs
from torch_bridge.kernels.fused_matmul import MatmulTile, StridedMatrix, matmul_launch
from torch_bridge.matmul import matmul_add_relu
from torch_bridge.triton_launch import compiled_variant, launch

# a (M, K), b (K, N), c and d (M, N), here M = N = K = size, fp16

GRID = (64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (3, 4, 5), ("start", "early", "end")
SHARED, REGISTERS, WARPS = 227 << 10, 1 << 16, 64  # of one multiprocessor: bytes for tiles, registers, warps
MAX_SUMS = 128  # float32 sums of one thread; more would leave too few of its 255 registers
CALLS = 20  # calls in a CUDA graph
SHOWN = 12  # lines of the ranking
EAGER, COMPILED, CUBLASLT, OURS = "torch eager", "torch.compile", "cublasLt, fused ReLU", "ours"
RANKING = """
    tile = {name.split(" / ")[1]} | ms = {median_ms:.4f} | TFLOP/s = {2e-9 * size**3 / median_ms:.0f}
    registers | spills | shared | resident | tiles | waves = {waves:.2f}"""


def tiles():
    """The MatmulTiles of the grid that fit: their operands into shared memory, their sums into registers."""
    for tile in itertools.starmap(MatmulTile, itertools.product(*GRID)):
        operand_bytes = 2 * tile.block_k * (tile.block_m + tile.block_n) * tile.num_stages
        sums = tile.block_m * tile.block_n // (32 * tile.num_warps)
        if operand_bytes <= SHARED and 32 <= sums <= MAX_SUMS:
            yield tile


def text(tile):
    return "{} x {} x {}, {} warps, {} stages, C at {}".format(*tile)


def resident(registers, shared, warps):
    """The number of programs that one multiprocessor runs at the same time."""
    per_program = -(-registers // 8) * 8 * 32 * warps  # registers are allocated in units of eight per thread
    return min(REGISTERS // per_program, WARPS // warps, (SHARED + 1024) // (shared + 1024))


@functools.cache
def operands(size):
    """a, b, c and d on the GPU; b is small, so that repeated d = ReLU(a b + d) do not overflow."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(size, size, device="cuda").half() for _ in range(3))
    return a, b * 2**-10, c, torch.empty_like(c)


side_stream = functools.cache(torch.cuda.Stream)


def captured(call):
    """A CUDA graph of CALLS calls."""
    for _ in range(2):
        call()
    return torch_graphs.captured(call, side_stream(), CALLS)[0]


def milliseconds(graph):
    """Device time of one call, from one replay of a graph; an untimed replay before it raises the GPU's clock."""
    with torch.cuda.stream(side_stream()):
        graph.replay()
        return torch_graphs.milliseconds(graph.replay) / CALLS


def launch_of(size, tile):
    """The KernelLaunch of the fused product."""
    a, b, c, d = operands(size)
    matrices = (StridedMatrix(x, tuple(x.shape), x.stride()) for x in (d, a, b, c))
    return matmul_launch(*matrices, activation="relu", tile=tile)


def tile_row(size, tile, rounds):
    """The time of a tile and its resources; {"does_not_fit": reason} if the GPU cannot run it."""
    found = launch_of(size, tile)
    try:
        launch(*found, "cuda")
    except OutOfResources as error:
        return {"does_not_fit": str(error).splitlines()[0]}
    graph = captured(functools.partial(launch, *found, "cuda"))
    compiled = compiled_variant(*found)
    times = [milliseconds(graph) for _ in range(rounds)]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    programs = resident(compiled.n_regs, compiled.metadata.shared, tile.num_warps)
    return {
        "ms": times,
        "median_ms": statistics.median(times),
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "shared": compiled.metadata.shared,
        "resident": programs,
        "tiles": found.grid[0],
        "waves": found.grid[0] / (multiprocessors * programs),
    }


def peers(size):
    """{name: function of no arguments} of what the fused product is compared with."""
    a, b, c, d = operands(size)

    def formula(a, b, c):
        return torch.relu(a @ b + c)

    compiled = torch.compile(formula)
    found = {EAGER: lambda: formula(a, b, c), COMPILED: lambda: compiled(a, b, c)}
    compiled(a, b, c)
    try:
        import cupy
    except ImportError:
        print("CuPy is not installed: the table has no row of cublasLt")
        return found
    from stage2_cuda.cuda_backend import CudaBackend

    gemm = CudaBackend("fp16", deterministic=False).products.gemm
    arrays = [cupy.from_dlpack(x) for x in (d, a, b)]  # d is added to, which reads and writes as much as c and d

    def cublaslt():
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            gemm.matmul(*arrays, activation="relu", accumulate=True)

    return found | {CUBLASLT: cublaslt}


def compare(size, tile, rounds):
    """The fastest tile beside its peers, in interleaved rounds: "ms", {name: milliseconds of each round}.

    us, peer, ratio: our median in microseconds, the fastest peer with its, and the ratio.
    """
    a, b, c, _ = operands(size)
    calls = {OURS: lambda: matmul_add_relu(a, b, c, tile), **peers(size)}
    timers = {name: functools.partial(milliseconds, captured(call)) for name, call in calls.items()}
    ms = interleaved(timers, rounds)
    us = {name: 1e3 * statistics.median(times) for name, times in ms.items()}
    peer = min(us.keys() - {OURS}, key=us.get)
    found = {"tile": text(tile), "size": size, "ms": ms, "us": us[OURS]}
    return {**found, "peer": {"name": peer, "us": us[peer]}, "ratio": paired_ratio(ms[peer], ms[OURS])}


def print_ranking(size, rows):
    """Print the fastest tiles of one size; returns the row of the fastest."""
    ranked = sorted((row for row in rows if "median_ms" in row), key=lambda row: row["median_ms"])
    title = f"{size} x {size} x {size}: {len(ranked)} tiles, {len(rows) - len(ranked)} that do not fit"
    Table("", RANKING).print([row | {"size": size} for row in ranked[:SHOWN]], title)
    return ranked[0]


def explain(size, best, times):
    """Print why the fused product is faster than eager, and why this tile is the fastest."""
    matrix = 2 * size * size / 1e6  # MB
    saved = 8 * matrix - 4 * matrix
    gain = 1e3 * (statistics.median(times[EAGER]) - statistics.median(times[OURS]))
    idle = 1 - best["waves"] / -(-best["waves"] // 1)
    lines = [
        f"Bytes: eager reads and writes 8 matrices of {matrix:.1f} MB (a, b, ab, ab, c, sum, sum, d), the fused kernel",
        f"4 (a, b, c, d). It saves {saved:.1f} MB; the measured gain is {gain:.1f} us.",
        f"Occupancy: a multiprocessor runs {best['resident']} program(s) of {best['shared'] / 1024:.0f} KiB and "
        f"{best['registers']} registers per thread;",
        f"{best['spills']} bytes of registers are spilled.",
        f"Waves: {best['tiles']} tiles in {best['waves']:.2f} waves; in the last wave {idle:.0%} of the GPU is idle.",
    ]
    print("", *lines, sep="\n")


@benchmark(
    common=ROW_FLAGS | dict(rounds=15),
    size=dict(type=int, nargs="+", default=[2048], help="M = N = K, one ranking each (default 2048)"),
)
def main(args):
    cases = {
        f"{size} / {text(tile)}": functools.partial(tile_row, size, tile, args.rounds)
        for size, tile in itertools.product(args.size, tiles())
    }
    rows, by_text = run_rows(args, cases), {text(tile): tile for tile in tiles()}
    for size in args.size:
        of_size = [row for row in rows if row["name"].startswith(f"{size} / ")]
        if not args.dry_run and any("median_ms" in row for row in of_size):
            best = print_ranking(size, of_size)
            tile = by_text[best["name"].split(" / ")[1]]
            again = argparse.Namespace(**{**vars(args), "only": [], "fresh": True})
            comparison = {f"{size} / comparison": functools.partial(compare, size, tile, args.rounds)}
            compared = run_rows(again, comparison)
            explain(size, best, compared[0]["ms"])
            TABLES["torch-matmul"].print(compared)

"""Are the constants in stage2_cuda/kernels the fastest for this GPU? Compares other values with the current ones.

A candidate is a dictionary {name of a constant: value} for one module; {} means the current constants. Its results are
compared with those of the current constants. A training run itself times a few tiles of the attention kernels
(stage2_cuda/attention/tuned_tiles.py); this script times more.

    python -m benchmarks.gpu.tune                                 # all kernels
    python -m benchmarks.gpu.tune --kernel layernorm column_sums  # two kernels
"""

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from benchmarks.gpu.timing import time_functions
from benchmarks.harness.report import save
from benchmarks.harness.rounds import SEED
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from gpt2core.errors import ConfigError
from stage2_cuda.attention import launches as attention
from stage2_cuda.cuda_backend import dtype_of
from stage2_cuda.kernels import column_sums, cross_entropy, gelu, layernorm
from stage2_cuda.runtime.triton_launch import array_module

ROUNDS, CALLS = 9, 10  # rounds, and calls of each candidate in a round
MAX_DIFFERENCE = 2e-2  # a larger relative difference is an error: in bf16, another order of sums changes less
# Sizes by their names for --shape. SHAPES: (rows, channels, vocabulary, padded vocabulary); HEADS: (B, T, H, D) of
# attention, with B sequences of T tokens and H heads of size D.
SHAPES = {"paper": (4096, 384, 172, 176), "gpt2": (65536, 768, 50257, 50304)}
HEADS = {"paper": (16, 256, 6, 64), "gpt2": (64, 1024, 12, 64), "long": (1, 16384, 16, 64)}
SHORTLIST = {  # the fastest tiles of each attention kernel, arguments of TileConfig; all combinations are timed
    "forward": [(128, 64, 8, 3), (128, 64, 8, 3, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    "dq": [(128, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    "dkdv": [(64, 64, 4, 3), (128, 64, 4, 2)],
}


class Case(NamedTuple):
    """A kernel at one size, and the candidates for the constants of its module."""

    title: str
    module: object
    prepare: object  # prepare() allocates scratch for the current constants and returns a function that runs the kernel
    outputs: list  # the arrays that the function writes
    candidates: list
    bytes: int  # that the function must read and write


def grid(**values):
    """[candidates]: {} (the current constants) and every combination of these values, {constant: value}."""
    return [{}, *(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))]


# Each of these functions yields the fields of Cases without the title; arrays: see cases().


def cross_entropy_cases(arrays, rows, channels, vocab, width):
    n = min(rows, 10672)  # at most the rows of one chunk of logits
    targets = arrays.xp.asarray(np.random.default_rng(SEED).integers(0, vocab, n), np.int32)
    logits = arrays.normal(n, width)
    outputs = [arrays.xp.empty_like(logits), *(arrays.floats(n) for _ in range(3))]

    def prepare():
        return lambda: cross_entropy.cross_entropy_forward_backward(*outputs, logits, targets, 1 / n, vocab)

    # without the kernel in CUDA C, which the current constants may use
    candidates = grid(CUDA_WIDTHS=((),), TILE_BYTES=(8192, 16384, 32768), STAGES=(1, 2, 3))
    yield cross_entropy, prepare, outputs, candidates, 2 * logits.nbytes


def layernorm_cases(arrays, n, channels, *_):
    x, a, dy, ds = (arrays.normal(n, channels) for _ in range(4))
    w, b, bias = (arrays.normal(channels) for _ in range(3))
    outputs = [arrays.xp.empty_like(x), arrays.xp.empty_like(x), arrays.floats(n), arrays.floats(n)]
    layernorm.residual_layernorm_forward(*outputs, x, a, bias, w, b, 1e-5)
    s, _, mean, rstd = (array.copy() for array in outputs)

    def prepare():
        return lambda: layernorm.residual_layernorm_forward(*outputs, x, a, bias, w, b, 1e-5)

    yield layernorm, prepare, outputs, grid(TILE_ELEMENTS=(1024, 2048, 4096)), 4 * x.nbytes
    dx = arrays.xp.empty_like(x)

    def prepare_backward():
        partials = arrays.floats(*layernorm.layernorm_partials_shape(n, channels, x.dtype))
        return lambda: layernorm.residual_layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd)

    constants = dict(TILE_ELEMENTS=(1024, 2048), PROGRAMS=(264, 528, 1056), PIPELINE_TILES=(1, 8, 1 << 30))
    candidates = grid(CUDA_CHANNELS=((),), **constants)  # without the kernel in CUDA C
    yield layernorm, prepare_backward, [dx], candidates, 4 * x.nbytes


def gelu_cases(arrays, n, channels, *_):
    h, dy, bias = arrays.normal(n, 4 * channels), arrays.normal(n, 4 * channels), arrays.normal(4 * channels)
    y, dh = arrays.xp.empty_like(h), arrays.xp.empty_like(h)
    tiles = [dict(BLOCK_ROWS=rows, BLOCK_COLS=columns, WARPS=warps) for rows, columns, warps in
             ((2, 512, 2), (2, 512, 4), (4, 512, 4), (1, 1024, 4), (4, 256, 4), (4, 256, 2))]  # fmt: skip
    yield gelu, lambda: lambda: gelu.bias_gelu_forward(y, h, bias), [y], [{}, *tiles], 2 * h.nbytes

    def prepare():
        partials = arrays.floats(*gelu.gelu_partials_shape(*h.shape))
        return lambda: gelu.bias_gelu_backward(dh, partials, dy, h, bias)

    candidates = [tile | dict(PROGRAMS=programs) for tile in tiles for programs in (176, 352, 704)]
    yield gelu, prepare, [dh], [{}, *candidates], 3 * h.nbytes


def column_sums_cases(arrays, n, channels, *_):
    x, out = arrays.normal(n, 3 * channels), arrays.floats(3 * channels)

    def prepare():
        partials = arrays.floats(*column_sums.partials_shape(*x.shape))
        return lambda: column_sums.column_sums(out, partials, x)

    candidates = grid(
        BLOCK_ROWS=(32, 64), BLOCK_COLS=(64, 128), MIN_PROGRAMS=(132, 264), MAX_PROGRAMS=(264, 528, 1056), STAGES=(1, 3)
    )
    yield column_sums, prepare, [out], candidates, x.nbytes


def attention_cases(arrays, B, T, H, D):
    qkv, dy = arrays.normal(B, T, 3 * H * D), arrays.normal(B, T, H * D)
    y, lse, delta = arrays.xp.empty_like(dy), arrays.floats(B, H, T), arrays.floats(B, H, T)
    dqkv, current = arrays.xp.empty_like(qkv), attention.default_tiles(qkv.dtype.itemsize, T, D, "ieee")
    attention.attention_forward(y, lse, qkv, H)
    outputs = [y.copy(), lse.copy()]

    def candidates(new_tiles):
        """[candidates]: {}, and one for every combination of the new tiles; other kernels keep their current tiles.

        new_tiles: {kernel: [arguments of TileConfig]}.
        """
        tiles = [[attention.TileConfig(*tile) for tile in each] for each in new_tiles.values()]
        combinations = (dict(zip(new_tiles, chosen, strict=True)) for chosen in itertools.product(*tiles))
        configs = [current._replace(**combination) for combination in combinations]
        # plain tiles only; on a GPU with Gluon kernels {} stands for these kernels
        tables = (dict(DEFAULT_TILES={"16 bits": {(D, T): config}}, GLUON_TILES={}) for config in configs)
        return [{}, *tables]

    tiles = list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))
    prepare = lambda: lambda: attention.attention_forward(*outputs, qkv, H)  # noqa: E731
    yield attention, prepare, outputs, candidates({"forward": tiles}), qkv.nbytes + y.nbytes

    def backward():
        attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H)

    def forward_and_backward():
        attention.attention_forward(*outputs, qkv, H)
        backward()

    prepare = lambda: backward  # noqa: E731
    for kernel in ("both",) if current.both else ("dq", "dkdv"):  # "both" computes dq, dk and dv with square tiles
        chosen = [(M, N, *rest) for M, N, *rest in tiles if kernel != "both" or M == N]
        pointers = [dict(DESCRIPTOR_HEAD_SIZES=())] * (kernel == "dkdv")  # loads through pointers, not descriptors
        yield attention, prepare, [dqkv], candidates({kernel: chosen}) + pointers, 2 * qkv.nbytes + 2 * y.nbytes
    prepare = lambda: forward_and_backward  # noqa: E731
    if not current.both:
        yield attention, prepare, [*outputs, dqkv], candidates(SHORTLIST), 3 * qkv.nbytes + 3 * y.nbytes


KERNELS = {
    "cross_entropy": cross_entropy_cases,
    "layernorm": layernorm_cases,
    "gelu": gelu_cases,
    "column_sums": column_sums_cases,
    "attention": attention_cases,
}


def cases(args):
    """Yield the Cases of --kernel and --shape. A shape that a kernel does not have is skipped."""
    xp, bf16 = array_module(), dtype_of("bfloat16")
    rng = xp.random.default_rng(SEED)
    arrays = SimpleNamespace(
        xp=xp,
        normal=lambda *shape: rng.standard_normal(shape, dtype=np.float32).astype(bf16),
        floats=lambda *shape: xp.empty(shape, np.float32),
    )
    for kernel, shape in itertools.product(args.kernel, args.shape):
        sizes = (HEADS if kernel == "attention" else SHAPES).get(shape)
        for number, case in enumerate(KERNELS[kernel](arrays, *sizes) if sizes else (), 1):
            yield Case(f"{kernel} {number} {shape}", *case)


@contextlib.contextmanager
def replaced(module, values):
    """Replace constants of a module, {name: value}, within a with block."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def with_constants(case, values):
    """A function that runs the kernel of a case with these constants; its scratch is allocated at the first call."""
    prepare = functools.cache(case.prepare)

    def function():
        with replaced(case.module, values):
            prepare()()

    return function


def measure(case):
    """[{"label", "ms", "error"}] of the candidates of a case, the fastest first; see time_functions()."""
    print(case.title, flush=True)
    functions = {
        " ".join(f"{name}={value}" for name, value in candidate.items()) or "in use": with_constants(case, candidate)
        for candidate in case.candidates
    }
    found = time_functions(functions, ROUNDS, CALLS, case.outputs, MAX_DIFFERENCE)
    return sorted(({"label": label, **row} for label, row in found.items() if "ms" in row), key=lambda row: row["ms"])


def show(case, rows, limit=6):
    """Print a table of the `limit` fastest candidates and of the current constants ("in use")."""
    current = next(row for row in rows if row["label"] == "in use")
    shown = rows[:limit] + [current] * (current not in rows[:limit])
    columns = f"{case.title} = {{label}} | ms = {{ms:.5f}} | times as fast = {{{current['ms']} / ms:.3f}}"
    Table("", f"{columns} | TB/s = {{{case.bytes} / ms / 1e9:.3g}} | error = {{error:.0e}}").print(shown)


@benchmark(
    kernel=dict(choices=KERNELS, nargs="+", default=list(KERNELS), help="kernels (default all)"),
    shape=dict(choices=HEADS, nargs="+", default=list(HEADS), help="sizes; only attention has long (default all)"),
)
def main(args):
    if args.shape == ["long"] and "attention" not in args.kernel:
        asked = " ".join(args.kernel)
        raise ConfigError(f"--shape long: only attention has this size, but --kernel is {asked}; use --shape gpt2")
    results = {}
    for case in cases(args):
        results[case.title] = measure(case)
        show(case, results[case.title])
    save(results, args)

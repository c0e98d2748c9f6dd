"""Are the constants in stage2_cuda/kernels the fastest for this GPU? Other values against the current ones.

    python -m benchmarks.gpu.tune --kernel layernorm column_sums

A candidate is a set of values for constants of one module; {} means the current ones. Every candidate is compiled in a
helper process, compared with the current version (relative norm of the results), captured in a CUDA graph and replayed
in interleaved rounds with changing order; the median of its rounds is reported.

A training run times a few attention tiles itself (stage2_cuda/tuning/attention_tiles.py). This script searches more
widely: for the table of tiles, for the candidates of a training run, and for the constants of the other kernels.
"""

import argparse
import contextlib
import itertools
import subprocess
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.harness.jobs import ROOT
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from gpt2core.errors import ConfigError
from stage2_cuda.cuda_backend import dtype_of
from stage2_cuda.kernels import attention, column_sums, cross_entropy, gelu, layernorm
from stage2_cuda.runtime.triton_launch import array_module
from stage2_cuda.tuning.tuner import capture_calls, difference, medians

BENCHMARK = "benchmarks.gpu.tune"
SEED = 20260101
COMPILERS = 12  # processes that compile in parallel
ROUNDS, CALLS = 9, 10  # rounds, and calls of each candidate in a round
DIFFERENT = 2e-2  # a relative norm larger than another order of bf16 sums can cause
SHAPES = {"paper": (4096, 384, 172, 176), "gpt2": (65536, 768, 50257, 50304)}  # rows, channels, vocabulary, padded
HEADS = {"paper": (16, 256, 6, 64), "gpt2": (64, 1024, 12, 64), "long": (1, 16384, 16, 64)}  # B, T, H, D of attention
SHORTLIST = {  # the fastest attention tiles of each part, tried in combination
    "forward": [(128, 64, 8, 3), (128, 64, 8, 3, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    "dq": [(128, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    "dkdv": [(64, 64, 4, 3), (128, 64, 4, 2)],
}


class Case(NamedTuple):
    """`prepare()` returns a call that writes all `outputs`; it allocates scratch for the module's current constants."""

    title: str
    module: object
    prepare: object
    outputs: list
    candidates: list
    bytes: int  # bytes that the call must read and write


class Arrays:
    """Arrays on the device: random bf16 inputs and uninitialised fp32 outputs."""

    def __init__(self):
        self.xp, self.bf16 = array_module(), dtype_of("bfloat16")
        self.rng = self.xp.random.default_rng(SEED)

    def normal(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32).astype(self.bf16)

    def floats(self, *shape):
        return self.xp.empty(shape, np.float32)


def grid(**values):
    """{} (the current constants) and every combination of these values."""
    return [{}, *(dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))]


# -- the kernels ------------------------------------------------------------------------------------------------------


def cross_entropy_case(of, rows, channels, vocab, width):
    n = min(rows, 10672)  # at most the rows of one chunk of logits
    logits, targets = of.normal(n, width), of.xp.asarray(np.random.default_rng(SEED).integers(0, vocab, n), np.int32)
    outputs = [of.xp.empty_like(logits), *(of.floats(n) for _ in range(3))]

    def prepare():
        return lambda: cross_entropy.cross_entropy_forward_backward(*outputs, logits, targets, 1 / n, vocab)

    yield cross_entropy, prepare, outputs, grid(TILE_BYTES=(8192, 16384, 32768), STAGES=(1, 2, 3)), 2 * logits.nbytes


def layernorm_case(of, n, channels, *_):
    x, a, dy, ds = (of.normal(n, channels) for _ in range(4))
    w, b, bias = (of.normal(channels) for _ in range(3))
    forward = [of.xp.empty_like(x), of.xp.empty_like(x), of.floats(n), of.floats(n)]
    layernorm.residual_layernorm_forward(*forward, x, a, bias, w, b, 1e-5)
    s, _, mean, rstd = (array.copy() for array in forward)

    def prepare():
        return lambda: layernorm.residual_layernorm_forward(*forward, x, a, bias, w, b, 1e-5)

    yield layernorm, prepare, forward, grid(TILE_ELEMENTS=(1024, 2048, 4096)), 4 * x.nbytes
    dx = of.xp.empty_like(x)

    def prepare_backward():
        partials = of.floats(*layernorm.layernorm_partials_shape(n, channels))
        return lambda: layernorm.residual_layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd)

    candidates = grid(TILE_ELEMENTS=(1024, 2048), PROGRAMS=(264, 528, 1056), PIPELINE_TILES=(1, 8, 1 << 30))
    yield layernorm, prepare_backward, [dx], candidates, 4 * x.nbytes


def gelu_case(of, n, channels, *_):
    h, dy, bias = of.normal(n, 4 * channels), of.normal(n, 4 * channels), of.normal(4 * channels)
    y, dh = of.xp.empty_like(h), of.xp.empty_like(h)
    tiles = [dict(BLOCK_ROWS=rows, BLOCK_COLS=columns, WARPS=warps) for rows, columns, warps in
             ((2, 512, 2), (2, 512, 4), (4, 512, 4), (1, 1024, 4), (4, 256, 4), (4, 256, 2))]  # fmt: skip
    yield gelu, lambda: lambda: gelu.bias_gelu_forward(y, h, bias), [y], [{}, *tiles], 2 * h.nbytes

    def prepare():
        partials = of.floats(*gelu.gelu_partials_shape(*h.shape))
        return lambda: gelu.bias_gelu_backward(dh, partials, dy, h, bias)

    candidates = [tile | dict(PROGRAMS=programs) for tile in tiles for programs in (176, 352, 704)]
    yield gelu, prepare, [dh], [{}, *candidates], 3 * h.nbytes


def column_sums_case(of, n, channels, *_):
    x, out = of.normal(n, 3 * channels), of.floats(3 * channels)

    def prepare():
        partials = of.floats(*column_sums.partials_shape(*x.shape))
        return lambda: column_sums.column_sums(out, partials, x)

    candidates = grid(
        BLOCK_ROWS=(32, 64), BLOCK_COLS=(64, 128), MIN_PROGRAMS=(132, 264), MAX_PROGRAMS=(264, 528, 1056), STAGES=(1, 3)
    )
    yield column_sums, prepare, [out], candidates, x.nbytes


def attention_case(of, B, T, H, D):
    qkv, dy = of.normal(B, T, 3 * H * D), of.normal(B, T, H * D)
    y, lse, delta = of.xp.empty_like(dy), of.floats(B, H, T), of.floats(B, H, T)
    dqkv, *_, used = of.xp.empty_like(qkv), *attention.shapes_and_tiles(qkv, H, "ieee")
    attention.attention_forward(y, lse, qkv, H)
    out = [y.copy(), lse.copy()]

    def several(*parts):
        """{} and every combination of tiles; each part is (name, tiles)."""
        names, tiles = zip(*parts, strict=True)
        chosen = [[attention.TileConfig(*tile) for tile in each] for each in tiles]
        configs = [used._replace(**dict(zip(names, each, strict=True))) for each in itertools.product(*chosen)]
        return [{}, *(dict(DEFAULT_TILES={"16 bits": {(D, T): config}}) for config in configs)]

    tiles = list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))
    prepare = lambda: lambda: attention.attention_forward(*out, qkv, H)  # noqa: E731
    yield attention, prepare, out, several(("forward", tiles)), qkv.nbytes + y.nbytes

    def backward():
        attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H)

    def both_ways():
        attention.attention_forward(*out, qkv, H)
        backward()

    prepare = lambda: backward  # noqa: E731
    for part in ("both",) if used.both else ("dq", "dkdv"):
        chosen = [(M, N, *rest) for M, N, *rest in tiles if part != "both" or M == N]
        pointers = [dict(DESCRIPTOR_HEAD_SIZES=())] * (part == "dkdv")
        yield attention, prepare, [dqkv], several((part, chosen)) + pointers, 2 * qkv.nbytes + 2 * y.nbytes
    prepare = lambda: both_ways  # noqa: E731
    if not used.both:
        yield attention, prepare, [*out, dqkv], several(*SHORTLIST.items()), 3 * qkv.nbytes + 3 * y.nbytes


KERNELS = {
    "cross_entropy": cross_entropy_case,
    "layernorm": layernorm_case,
    "gelu": gelu_case,
    "column_sums": column_sums_case,
    "attention": attention_case,
}


def cases(args):
    of = Arrays()
    for kernel, shape in itertools.product(args.kernel, args.shape):
        sizes = (HEADS if kernel == "attention" else SHAPES).get(shape)
        for number, case in enumerate(KERNELS[kernel](of, *sizes) if sizes else (), 1):
            yield Case(f"{kernel} {number} {shape}", *case)


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(module, values):
    """Replace constants of a module within a with block."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def compile_all(args):
    """Fill Triton's disk cache: several processes each run their share of the candidates once."""
    command = [sys.executable, "-m", BENCHMARK, "--kernel", *args.kernel, "--shape", *args.shape, "--share"]
    quiet = dict(cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for share in [subprocess.Popen([*command, str(part)], **quiet) for part in range(COMPILERS)]:
        share.wait()


def compile_share(args):
    """Run this process's share of the candidates once; failures are ignored here and reported by measure()."""
    for case in cases(args):
        for values in case.candidates[args.share :: COMPILERS]:
            with contextlib.suppress(Exception), replaced(case.module, values):
                case.prepare()()


def error_of(got, want):
    """The largest difference() of several arrays; NaN if any difference is NaN."""
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        error = difference(one, other)
        worst = worst if error <= worst else error
    return worst


def captured(case, values, stream):
    """(graph of CALLS calls with these constants, copies of the outputs, the call); the outputs are NaN before."""
    with replaced(case.module, values):
        for array in case.outputs:
            array[...] = np.nan
        call = case.prepare()
        call()
        outputs = [array.copy() for array in case.outputs]
        graph = capture_calls(stream, call, CALLS)
        return graph, outputs, call  # the caller keeps the call alive, and with it its scratch


def measure(case):
    """[{label, ms, error}] of the candidates of a case, the fastest first."""
    xp = array_module()
    stream, ready, want = xp.cuda.Stream(non_blocking=True), [], None
    xp.cuda.runtime.deviceSynchronize()  # the arrays were filled on another stream
    with stream:
        for values in case.candidates:
            label = " ".join(f"{name}={value}" for name, value in values.items()) or "in use"
            try:
                graph, outputs, call = captured(case, values, stream)
                stream.synchronize()
            except Exception as error:  # not enough shared memory or registers, or the compiler failed
                if want is None:
                    raise
                print(f"{case.title}: {label}: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            want = want or outputs
            if not (error := error_of(outputs, want)) < DIFFERENT:
                print(f"{case.title}: {label}: WRONG, {error:.3g}", flush=True)
                continue
            ready.append((label, error, graph, call))
        times = medians(xp, stream, [graph for _, _, graph, _ in ready], ROUNDS) / CALLS
    rows = [{"label": label, "ms": ms, "error": error} for (label, error, *_), ms in zip(ready, times, strict=True)]
    return sorted(rows, key=lambda row: row["ms"])


def show(case, rows, limit=6):
    """Print the fastest candidates and the current constants."""
    used = next(row for row in rows if row["label"] == "in use")
    table = [
        {
            case.title: row["label"],
            "ms": f"{row['ms']:.5f}",
            "x": f"{used['ms'] / row['ms']:.3f}",
            "TB/s": f"{case.bytes / row['ms'] / 1e9:.3g}",
            "error": f"{row['error']:.0e}",
        }
        for row in rows[:limit] + [used] * (used not in rows[:limit])
    ]
    print_table(table)
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS), help="kernels (default all)")
    add("--shape", choices=HEADS, nargs="+", default=list(HEADS), help="sizes; long: attention only (default all)")
    add("--share", type=int, help="used by the script itself: compile this share of the candidates")
    add_save_flags(add)
    args = parser.parse_args()
    if args.share is not None:
        return compile_share(args)
    if args.shape == ["long"] and "attention" not in args.kernel:
        asked = " ".join(args.kernel)
        raise ConfigError(f"--shape long: only attention has this size, but --kernel is {asked}; use --shape gpt2")
    compile_all(args)
    results = {}
    for case in cases(args):
        results[case.title] = measure(case)
        show(case, results[case.title])
    save(BENCHMARK, results, args)


if __name__ == "__main__":
    run_main(main)

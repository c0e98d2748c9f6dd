"""Which tiles and which variants of a kernel are the fastest on this GPU? Each against the one that is in use.

Every candidate is first compiled in processes beside this one, then compared with what is in use (relative norm of
what it writes), then captured in a CUDA graph and replayed in turns, A B C, B C A, ...; the median of its turns counts.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

from benchmarks import trial_attention, trial_rows
from benchmarks.harness import ROOT, print_table, run, save
from stage2_cuda.kernels import attention, column_sums, cross_entropy, layernorm
from stage2_cuda.triton_driver import array_module

BENCHMARK = "benchmarks.gpu_tune"
SEED = 20260101
COMPILERS = 12  # processes that compile beside each other


class Candidate(NamedTuple):
    """One way to do it: `call()` writes all of `outputs`; `timed()`, where there is one, is what is timed."""

    label: str
    call: object
    timed: object = None


class Case(NamedTuple):
    """A kernel at a shape: the candidates, the one in use first; what they write; bytes and operations of one call."""

    title: str
    candidates: list
    outputs: list
    bytes: float = 0
    flops: float = 0


# -- what is tried -----------------------------------------------------------------------------------------------------


class Arrays:
    """Random arrays on the device, or where nothing is run empty ones."""

    def __init__(self):
        import ml_dtypes

        self.xp, self.bf16 = array_module(), np.dtype(ml_dtypes.bfloat16)
        self.rng = self.xp.random.default_rng(SEED)

    def normal(self, *shape, dtype=None):
        return self.rng.standard_normal(shape, dtype=np.float32).astype(dtype or self.bf16)

    def empty(self, *shape, dtype=None):
        return self.xp.full(shape, np.nan, np.float32).astype(dtype or self.bf16)

    def floats(self, *shape):
        return self.empty(*shape, dtype=np.float32)


ATTENTION = {"packed": (64, 12, 1024, 64), "long": (1, 16, 16384, 64), "short": (16, 6, 256, 64)}


def attention_shape(which, small):
    B, H, T, D = ATTENTION[which]
    return (1, H, min(T, 1024), D) if small else (B, H, T, D)


def attention_cases(which, small):
    B, H, T, D = attention_shape(which, small)
    of = Arrays()
    C = H * D
    qkv, dy = of.normal(B, T, 3 * C), of.normal(B, T, C)
    y, lse, delta, dqkv = of.empty(B, T, C), of.floats(B, H, T), of.floats(B, H, T), of.empty(B, T, 3 * C)
    attention.attention_forward(y, lse, qkv, H)
    attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H)
    flops = 2 * B * H * T * T * D / 2  # of one product, causal
    out, out_lse, out_delta = of.empty(*y.shape), of.floats(*lse.shape), of.floats(*lse.shape)

    def forward(**options):
        return lambda: trial_attention.forward(out, out_lse, qkv, H, **options)

    tiles = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2)]
    tiles += [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (128, 128, 8, 3), (128, 32, 8, 4)]
    candidates = [Candidate("in use", lambda: attention.attention_forward(out, out_lse, qkv, H))]
    candidates += [
        Candidate(label(tile, loop=loop, qreg=qreg), forward(**named(tile), loop=loop, qreg=qreg))
        for tile, loop, qreg in itertools.product(tiles, (0, 1, 2), (0, 1))
        if tile[1] * tile[0] <= 8192 or loop < 2
    ]
    for tile, programs in itertools.product([(128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3)], (264, 396, 528)):
        options = dict(named(tile), programs=programs)
        candidates.append(
            Candidate(
                f"persistent {label(tile, programs=programs)}",
                lambda options=options: trial_attention.persistent(out, out_lse, qkv, H, **options),
            )
        )
    yield Case(f"attention forward {which}", candidates, [out, out_lse], flops=2 * flops)

    out = of.empty(*dqkv.shape)

    def dq(**options):
        return lambda: trial_attention.dq(out, out_delta, dy, qkv, y, lse, H, **options)

    tiles = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)]
    tiles += [(128, 128, 8, 2), (64, 128, 4, 2), (128, 32, 8, 3), (128, 32, 4, 3)]
    candidates = [Candidate("in use, 128x64 w8 s3", dq(**named((128, 64, 8, 3))))]
    candidates += [
        Candidate(label(tile, loop=loop, qreg=qreg), dq(**named(tile), loop=loop, qreg=qreg))
        for tile, loop, qreg in itertools.product(tiles, (0, 1), (0, 1))
    ]
    yield Case(f"attention dq {which}", candidates, [out[:, :, :C], out_delta], flops=3 * flops)

    def dkdv(**options):
        return lambda: trial_attention.dkdv(out, delta, dy, qkv, lse, H, **options)

    tiles = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2), (32, 128, 8, 3)]
    tiles += [(32, 64, 4, 3), (64, 64, 8, 3), (128, 64, 4, 2), (32, 128, 4, 3)]
    candidates = [Candidate("in use, 64x64 w4 s3", dkdv(**named((64, 64, 4, 3))))]
    candidates += [
        Candidate(label(tile, loop=loop, kreg=kreg, rows=rows), dkdv(**named(tile), loop=loop, kreg=kreg, rows=rows))
        for tile, loop, kreg, rows in itertools.product(tiles, (0, 1), (0, 1), (1, 2))
        if tile in tiles[:5] or (loop, kreg) in ((1, 0), (0, 0))
    ]
    yield Case(f"attention dkdv {which}", candidates, [out[:, :, C:]], flops=4 * flops)


def backward_cases(which, small):
    B, H, T, D = attention_shape(which, small)
    of = Arrays()
    C = H * D
    qkv, dy = of.normal(B, T, 3 * C), of.normal(B, T, C)
    y, lse, out, out_delta = of.empty(B, T, C), of.floats(B, H, T), of.empty(B, T, 3 * C), of.floats(B, H, T)
    attention.attention_forward(y, lse, qkv, H)
    flops = 2 * B * H * T * T * D / 2  # of one product, causal

    def two():
        attention.attention_backward(out, out_delta, dy, qkv, y, lse, H)

    candidates = [Candidate("in use", two)]
    sums = of.floats(B, H, T, D)

    def whole(**options):
        return lambda: trial_attention.whole(out, sums, out_delta, dy, qkv, y, lse, H, **options)

    tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 64, 4, 2)]
    tiles += [(32, 64, 4, 3), (32, 128, 4, 2), (64, 64, 8, 2)]
    candidates += [
        Candidate("whole " + label(tile, add=add, loop=loop), whole(**named(tile), add=add, loop=loop))
        for tile, add, loop in itertools.product(tiles, (0, 1), (1, 2))
    ]
    for tile, limit in itertools.product(tiles[:4], (128, 168)):
        options = dict(add=0, loop=1, maxnreg=limit)
        candidates.append(Candidate("whole " + label(tile, **options), whole(**named(tile), **options)))
    for M, warps, stages, parts in itertools.product((32, 64), (4, 8), (2, 3), (1, 2)):
        options = dict(M=M, warps=warps, stages=stages, parts=parts)
        candidates.append(
            Candidate(
                f"short {M} w{warps} s{stages} parts {parts}",
                lambda options=options: trial_attention.short(out, dy, qkv, y, lse, H, **options),
            )
        )
    for square in ((64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (64, 64, 8, 2)):
        config = attention.Config(attention.Tile(128, 64, 8, 3), both=attention.Tile(*square))
        candidates.append(
            Candidate(
                f"both {label(square)}",
                lambda config=config: attention.attention_backward(out, out_delta, dy, qkv, y, lse, H, config=config),
            )
        )
    yield Case(f"attention backward {which}", candidates, [out], flops=5 * flops)


def cross_entropy_cases(which, small):
    n, vocab, width = {"gpt2": (10672, 50257, 50304), "paper": (4096, 172, 192)}[which]
    n = 1024 if small else n
    of = Arrays()
    logits = of.normal(n, width)
    targets = of.xp.asarray(np.random.default_rng(SEED).integers(0, vocab, n), np.int32)
    outputs = [of.empty(n, width), *(of.floats(n) for _ in range(3))]

    in_place = [of.normal(n, width)]  # as the model calls it: the gradient takes the place of the logits
    in_place += [*outputs[1:], in_place[0]]

    def trial(kind, columns, warps, **options):
        def call(arrays=(*outputs, logits)):
            trial_rows.cross_entropy(*arrays, targets, 1 / n, vocab, kind, columns, warps, **options)

        words = " ".join(f"{key.lower()} {value}" for key, value in options.items() if key != "LANE")
        return Candidate(f"{kind} {columns} w{warps} {words}", call, lambda: call(in_place))

    def used(arrays=(*outputs, logits)):
        cross_entropy.cross_entropy_forward_backward(*arrays, targets, 1 / n, vocab)

    candidates = [Candidate("in use", used, lambda: used(in_place))]
    if which == "paper":
        for columns, warps in ((256, 1), (256, 2), (128, 1), (256, 4)):
            candidates.append(trial("tiles", columns, warps, KEEP="", DROP=""))
            constants = dict(LANE=8, STAGES=1, AGAIN=1, KEEP="", DROP="")
            candidates.append(trial("lanes", columns, warps, **constants))
            candidates.append(trial("registers", columns, warps))
        yield Case("cross_entropy paper", candidates, outputs, bytes=2 * logits.nbytes)
        return
    hints = (("", ""), ("evict_last", "evict_first"))
    for columns, warps in ((4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32), (4096, 32), (2048, 8)):
        for keep, drop in hints:
            candidates.append(trial("tiles", columns, warps, KEEP=keep, DROP=drop))
    shapes = ((4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32), (4096, 32), (2048, 8))
    for columns, warps in shapes:
        for stages, again in ((1, 1), (3, 1), (3, 3)):
            for keep, drop in hints:
                constants = dict(LANE=8, STAGES=stages, AGAIN=again, KEEP=keep, DROP=drop)
                candidates.append(trial("lanes", columns, warps, **constants))
    for columns, warps in ((2048, 16), (4096, 16), (8192, 32), (4096, 8), (2048, 8)):
        candidates.append(trial("registers", columns, warps))
    yield Case("cross_entropy gpt2", candidates, outputs, bytes=2 * logits.nbytes)


def layernorm_cases(which, small):
    n, channels = {"gpt2": (65536, 768), "paper": (4096, 384), "xl": (16384, 1600)}[which]
    n = 4096 if small else n
    of = Arrays()
    x, a, dy, ds = (of.normal(n, channels) for _ in range(4))
    w, b, bias = (of.normal(channels) for _ in range(3))
    s, y, dx = (of.empty(n, channels) for _ in range(3))
    mean, rstd = of.floats(n), of.floats(n)
    vectors = [of.floats(channels) for _ in range(3)]
    layernorm.residual_layernorm_forward(s, y, mean, rstd, x, a, bias, w, b, 1e-5)
    outputs = [of.empty(n, channels), of.empty(n, channels), of.floats(n), of.floats(n)]

    def forward(rows, warps, programs=None, stages=1):
        call = lambda: trial_rows.layernorm_forward(  # noqa: E731
            *outputs, x, a, bias, w, b, 1e-5, rows, warps, programs, stages
        )
        return Candidate(f"rows {rows} w{warps} programs {programs or 'all'} stages {stages}", call)

    candidates = [Candidate("in use", lambda: layernorm.residual_layernorm_forward(*outputs, x, a, bias, w, b, 1e-5))]
    candidates += [forward(*pair) for pair in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8))]
    for programs in (1056, 2112):
        for stages in (1, 2, 3):
            candidates += [forward(*pair, programs, stages) for pair in ((1, 1), (1, 2), (2, 4), (4, 4))]
    yield Case(f"layernorm forward {which}", candidates, outputs, bytes=4 * x.nbytes)

    partials = of.floats(8448, 3 * channels)
    scratch = of.floats(*layernorm.layernorm_partials_shape(n, channels))
    outputs = [dx, *vectors]

    def backward(rows, warps, programs, stages):
        call = lambda: trial_rows.layernorm_backward(  # noqa: E731
            *outputs, partials, ds, dy, s, w, mean, rstd, rows, warps, programs, stages
        )
        return Candidate(f"rows {rows} w{warps} programs {programs} stages {stages}", call)

    candidates = [
        Candidate("in use", lambda: layernorm.residual_layernorm_backward(*outputs, scratch, ds, dy, s, w, mean, rstd))
    ]
    several = (132, 264, 528, 1056, 2112) if which == "paper" else (264, 528, 792, 1056, 1584, 2112)
    for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (4, 8)):
        for programs in several:
            if 4 <= programs * warps / 132 <= 32:
                candidates += [backward(rows, warps, programs, stages) for stages in (1, 2, 3)]
    yield Case(f"layernorm backward {which}", candidates, outputs, bytes=4 * x.nbytes)


def column_sums_cases(which, small):
    n, columns = {"gpt2": (65536, 2304), "gpt2-c": (65536, 768), "paper": (4096, 1152)}[which]
    n = 4096 if small else n
    of = Arrays()
    x, out = of.normal(n, columns), of.floats(columns)
    scratch, partials = of.floats(*column_sums.partials_shape(n, columns)), of.floats(4224, columns)

    def trial(rows, width, warps, programs, stages):
        call = lambda: trial_rows.column_sums(out, partials, x, rows, width, warps, programs, stages)  # noqa: E731
        return Candidate(f"{rows}x{width} w{warps} programs {programs} stages {stages}", call)

    candidates = [Candidate("in use", lambda: column_sums.column_sums(out, scratch, x))]
    for rows, width, warps in ((16, 128, 4), (32, 128, 4), (16, 256, 4), (8, 256, 4), (32, 64, 4), (64, 64, 4)):
        for programs in (528, 1056, 2112, 4224):
            candidates += [trial(rows, width, warps, programs, stages) for stages in (1, 3)]
    yield Case(f"column sums {which}", candidates, [out], bytes=x.nbytes)


KERNELS = {
    "attention": (attention_cases, ("packed", "long", "short")),
    "backward": (backward_cases, ("packed", "short")),
    "cross_entropy": (cross_entropy_cases, ("gpt2", "paper")),
    "layernorm": (layernorm_cases, ("gpt2", "paper", "xl")),
    "column_sums": (column_sums_cases, ("gpt2", "gpt2-c", "paper")),
}


def named(tile):
    return dict(zip(("M", "N", "warps", "stages"), tile, strict=True))


def label(tile, **options):
    M, N, warps, stages = tile
    return " ".join([f"{M}x{N} w{warps} s{stages}", *(f"{key} {value}" for key, value in options.items())])


# -- measuring ---------------------------------------------------------------------------------------------------------


def compile_all(args):
    """Fill Triton's cache on disk from several processes: each runs its share of the candidates once."""
    command = [sys.executable, "-m", BENCHMARK, "--kernel", *args.kernel, "--only", args.only]
    shares = [
        subprocess.Popen(
            [*command, "--share", f"{part}/{args.compilers}"], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(args.compilers)
    ]  # fmt: skip
    for share in shares:
        share.wait()


def cases(args):
    for kernel in args.kernel:
        make, shapes = KERNELS[kernel]
        for which in shapes:
            if args.only in f"{kernel} {which}":
                yield from make(which, small=bool(args.share))  # enough to compile


def run_share(args):
    part, parts = map(int, args.share.split("/"))
    for case in cases(args):
        for candidate in case.candidates[part::parts]:
            try:
                candidate.call()
                array_module().cuda.runtime.deviceSynchronize()
            except Exception as error:
                print(case.title, candidate.label, repr(error)[:200])


def error_of(got, want):
    """norm(got - want) / norm(want), the largest of several arrays; a NaN stays one."""
    xp, worst = array_module(), 0.0
    for one, other in zip(got, want, strict=True):
        one, other = one.astype(np.float32), other.astype(np.float32)
        error = float(xp.linalg.norm((one - other).ravel()) / xp.linalg.norm(other.ravel()))
        worst = error if error != error else max(worst, error)
    return worst


def captured(call, repeats, stream):
    stream.begin_capture()
    for _ in range(repeats):
        call()
    return stream.end_capture()


def milliseconds(graph, stream):
    cuda = array_module().cuda
    start, stop = cuda.Event(), cuda.Event()
    start.record(stream)
    graph.launch(stream)
    stop.record(stream)
    stop.synchronize()
    return cuda.get_elapsed_time(start, stop)


def measure(case, args):
    """[{label, ms, error}] of a case, the fastest first."""
    xp = array_module()
    stream, ready, want = xp.cuda.Stream(non_blocking=True), [], None
    with stream:
        for candidate in case.candidates:
            for array in case.outputs:
                array[...] = np.nan
            try:
                candidate.call()
                stream.synchronize()
            except Exception as error:  # more shared memory or registers than there are, or a compiler that gives up
                print(f"{case.title}: {candidate.label}: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            if want is None:
                want = [array.copy() for array in case.outputs]
            error = error_of(case.outputs, want)
            if not error < 2e-2:
                print(f"{case.title}: {candidate.label}: WRONG, {error:.3g}", flush=True)
                continue
            call = candidate.timed or candidate.call
            call()
            stream.synchronize()
            started = time.perf_counter()
            call()
            stream.synchronize()
            once = time.perf_counter() - started
            repeats = int(min(max(args.turn / max(once, 1e-5), 1), 50))
            ready.append((candidate.label, error, captured(call, repeats, stream), repeats))
        times = {name: [] for name, *_ in ready}
        for turn in range(args.rounds):
            first = turn % len(ready)
            for name, _, graph, repeats in ready[first:] + ready[:first]:
                times[name].append(milliseconds(graph, stream) / repeats)
    used = statistics.median(times[ready[0][0]])
    rows = []
    for name, error, _, _ in ready:
        ms = statistics.median(times[name])
        row = {"label": name, "ms": ms, "min": min(times[name]), "speed": used / ms, "error": error}
        if case.bytes:
            row["TB/s"] = case.bytes / ms / 1e9
        if case.flops:
            row["TFLOP/s"] = case.flops / ms / 1e9
        rows.append(row)
    return sorted(rows, key=lambda row: row["ms"])


def show(title, rows, limit):
    used = next(row for row in rows if row["label"].startswith("in use"))
    shown = rows[:limit] + [used] * (used not in rows[:limit])
    table = []
    for row in shown:
        rate = {key: f"{row[key]:.3g}" for key in ("TB/s", "TFLOP/s") if key in row}
        table.append(
            {title: row["label"], "ms": f"{row['ms']:.5f}", "best": f"{row['min']:.5f}", "x": f"{row['speed']:.3f}"}
            | rate
            | {"error": f"{row['error']:.1e}"}
        )
    print_table(table)
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS), help="what is tuned (default all)")
    add("--only", default="", metavar="TEXT", help="only cases whose kernel and shape contain this (default all)")
    add("--rounds", type=int, default=9, help="turns of each candidate (default 9)")
    add("--turn", type=float, default=0.004, help="seconds of one turn, about (default 0.004)")
    add("--rows", type=int, default=14, help="fastest candidates that are shown (default 14)")
    add("--compilers", type=int, default=COMPILERS, help=f"processes that compile (default {COMPILERS})")
    add("--share", help="as one of the processes that compile: which share of how many")
    add("--commit", help="what is measured, for the record, where this is a copy without its repository")
    add("--save-as", default="gpu_tune", help="the file in results/, without .json (default gpu_tune)")
    add("--no-save", action="store_true", help="leave results/ as it is")
    args = parser.parse_args()

    if args.share:
        return run_share(args)
    started = time.perf_counter()
    compile_all(args)
    print(f"compiled after {time.perf_counter() - started:.0f} s\n", flush=True)
    results = {}
    for case in cases(args):
        results[case.title] = measure(case, args)
        show(case.title, results[case.title], args.rows)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "gpu_tune.json"), "w") as file:
            json.dump(results, file, indent=1)
    if not args.no_save:
        save(BENCHMARK, results, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)

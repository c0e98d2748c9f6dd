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

from benchmarks import trial_rows
from benchmarks.harness import ROOT, print_table, run, save
from stage2_cuda.kernels import adamw, attention, column_sums, cross_entropy, embedding, gelu, layernorm
from stage2_cuda.triton_driver import array_module, launch

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


ATTENTION = {
    "packed": (64, 12, 1024, 64),
    "long": (1, 16, 16384, 64),
    "short": (16, 6, 256, 64),
    "wide": (4, 16, 4096, 128),
}


def attention_cases(which, small):
    B, H, T, D = ATTENTION[which]
    B, T = (1, min(T, 1024)) if small else (B, T)
    of = Arrays()
    C = H * D
    qkv, dy = of.normal(B, T, 3 * C), of.normal(B, T, C)
    y, lse, delta, dqkv = of.empty(B, T, C), of.floats(B, H, T), of.floats(B, H, T), of.empty(B, T, 3 * C)
    attention.attention_forward(y, lse, qkv, H)
    *_, used = attention.plan(qkv, H, "ieee")
    flops = 2 * B * H * T * T * D / 2  # of one product, causal
    out, out_lse = of.empty(*y.shape), of.floats(*lse.shape)

    def forward(name, config):
        return Candidate(name, lambda: attention.attention_forward(out, out_lse, qkv, H, config=config))

    def backward(name, config):
        arguments = dqkv, delta, dy, qkv, y, lse, H
        return Candidate(name, lambda: attention.attention_backward(*arguments, config=config))

    def tiles(*several):
        return [attention.Tile(*tile) for tile in several]

    either = tiles((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 4, 3))
    either += tiles((64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 3), (64, 128, 4, 2), (64, 128, 8, 3))
    more = tiles((128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 4), (32, 64, 4, 3), (64, 64, 4, 4))
    candidates = [forward("in use", None)]
    candidates += [forward(label(tile), used._replace(forward=tile)) for tile in either + more]
    yield Case(f"attention forward {which}", candidates, [out, out_lse], flops=2 * flops)

    candidates = [backward("in use", None)]
    dq, dkdv = used.dq or used.both, used.dkdv or used.both
    more = tiles((128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 8, 2), (128, 32, 4, 4))
    candidates += [
        backward("dq " + label(tile), attention.Config(used.forward, dq=tile, dkdv=dkdv)) for tile in either + more
    ]
    more = tiles((32, 64, 4, 3), (32, 128, 8, 3), (32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 3), (32, 64, 4, 4))
    candidates += [
        backward("dkdv " + label(tile), attention.Config(used.forward, dq=dq, dkdv=tile)) for tile in either + more
    ]
    if T <= 1024:
        candidates += [
            backward("both " + label(tile), attention.Config(used.forward, both=tile))
            for tile in tiles((64, 64, 4, 2), (64, 64, 4, 3), (32, 32, 4, 2), (64, 64, 8, 2), (128, 128, 8, 2))
        ]
    yield Case(f"attention backward {which}", candidates, [dqkv], flops=5 * flops)


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

    scratch = of.floats(*layernorm.layernorm_partials_shape(n, channels))
    used = lambda: layernorm.residual_layernorm_backward(dx, scratch, ds, dy, s, w, mean, rstd)  # noqa: E731

    def backward(rows, warps, programs, stages):
        partials = of.floats(programs, 3 * channels)
        call = lambda: trial_rows.layernorm_backward(  # noqa: E731
            dx, partials, ds, dy, s, w, mean, rstd, rows, warps, stages
        )
        return Candidate(f"rows {rows} w{warps} programs {programs} stages {stages}", call)

    candidates = [Candidate("in use", used)]
    several = (128, 132, 256, 264, 512, 528, 1024) if which == "paper" else (264, 528, 792, 1056, 1584, 2112)
    for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 8), (16, 8)):
        for programs in several:
            if 2 <= programs * warps / 132 <= 32 and programs * rows <= n:
                candidates += [backward(rows, warps, programs, stages) for stages in (1, 2)]
    yield Case(f"layernorm backward {which}", candidates, [dx], bytes=4 * x.nbytes)


def column_sums_cases(which, small):
    n, columns = {"gpt2": (65536, 2304), "gpt2-c": (65536, 768), "paper": (4096, 1152), "paper-c": (4096, 384)}[which]
    n = 4096 if small else n
    of = Arrays()
    x, out = of.normal(n, columns), of.floats(columns)
    scratch = of.floats(*column_sums.partials_shape(n, columns))

    def trial(rows, width, warps, programs, stages):
        partials = of.floats(max(1, programs * width // columns), columns)
        call = lambda: trial_rows.column_sums(out, partials, x, rows, width, warps, stages)  # noqa: E731
        return Candidate(f"{rows}x{width} w{warps} programs {programs} stages {stages}", call)

    candidates = [Candidate("in use", lambda: column_sums.column_sums(out, scratch, x))]
    shapes = [(16, 128, 4), (32, 128, 4), (16, 256, 4), (8, 256, 4), (32, 64, 4), (64, 64, 4), (32, 128, 8)]
    for rows, width, warps in shapes + [(64, 128, 8), (128, 64, 8), (32, 256, 8)]:
        for programs in (132, 264, 528, 1056, 2112):
            if max(1, programs * width // columns) * rows <= n:
                candidates += [trial(rows, width, warps, programs, stages) for stages in (1, 3)]
    yield Case(f"column sums {which}", candidates, [out], bytes=x.nbytes)


def add_partials_cases(which, small):
    rows, columns, parts = {"1056": (1056, 384, 3), "352": (352, 1536, 1), "256": (256, 384, 3), "128": (128, 1152, 1)}[
        which
    ]
    of = Arrays()
    partials = of.normal(rows, parts * columns, dtype=np.float32)
    out = [of.floats(columns) for _ in range(parts)]
    firsts = [*out, None, None][:3]

    def trial(tall, wide, warps):
        grid = -(-columns // wide), parts
        arguments = *firsts, partials, rows, parts * columns, columns
        options = dict(ROWS=tall, COLUMNS=wide, num_warps=warps)
        return Candidate(
            f"{tall}x{wide} w{warps}", lambda: launch(column_sums.add_partials_kernel, grid, *arguments, **options)
        )

    candidates = [Candidate("in use", lambda: column_sums.add_partials(partials, *firsts))]
    for wide, (tall, warps) in itertools.product(
        (8, 16, 32), ((64, 4), (128, 4), (128, 8), (256, 4), (256, 8), (512, 8), (512, 16), (1024, 16), (1024, 32))
    ):
        if tall * wide <= 16384 and tall < 2 * rows:
            candidates.append(trial(tall, wide, warps))
    yield Case(f"add partials {which}", candidates, out, bytes=partials.nbytes)


def gelu_cases(which, small):
    n, columns = {"paper": (4096, 1536), "gpt2": (65536, 3072)}[which]
    n = 4096 if small else n
    of = Arrays()
    h, dy, bias, y, dh = of.normal(n, columns), of.normal(n, columns), of.normal(columns), of.empty(n, columns), None
    shapes = [(4, 512, 4), (2, 512, 4), (1, 1024, 4), (1, 512, 2), (2, 512, 2), (1, 2048, 4), (8, 128, 4), (4, 256, 4)]
    tries = list(itertools.product(shapes, trial_rows.GELU_MATHS))

    def forward(shape, maths):
        call = lambda: trial_rows.gelu_forward(y, h, bias, *shape, maths)  # noqa: E731
        return Candidate(f"{shape[0]}x{shape[1]} w{shape[2]} {maths}", call)

    candidates = [Candidate("in use", lambda: gelu.bias_gelu_forward(y, h, bias))]
    candidates += [forward(*pair) for pair in tries]
    yield Case(f"gelu forward {which}", candidates, [y], bytes=2 * h.nbytes)

    dh, scratch = of.empty(n, columns), of.floats(*gelu.gelu_partials_shape(n, columns))

    def backward(shape, maths, programs, stages):
        partials = of.floats(max(1, programs * shape[1] // columns), columns)
        call = lambda: trial_rows.gelu_backward(dh, partials, dy, h, bias, *shape, maths, stages)  # noqa: E731
        words = f"{shape[0]}x{shape[1]} w{shape[2]} {maths} programs {programs} rows {len(partials)} stages {stages}"
        return Candidate(words, call)

    candidates = [Candidate("in use", lambda: gelu.bias_gelu_backward(dh, scratch, dy, h, bias))]
    for (shape, maths), programs in itertools.product(tries, (528, 1056, 2112)):
        if maths == "approximate" or programs == 1056:
            candidates += [backward(shape, maths, programs, stages) for stages in (1, 2)]
    yield Case(f"gelu backward {which}", candidates, [dh], bytes=3 * h.nbytes)


def positions_cases(which, small):
    batch, time_, channels = {"paper": (16, 256, 384), "gpt2": (64, 1024, 768)}[which]
    of = Arrays()
    dy, out = of.normal(batch, time_, channels), of.floats(time_, channels)
    candidates = []
    for rows, columns, warps in itertools.product((8, 16, 32), (128, 256, 512), (1, 2, 4, 8)):
        if 128 <= rows * columns // warps <= 2048:
            grid, options = (time_, -(-channels // columns)), dict(ROWS=rows, COLUMNS=columns, num_warps=warps)
            call = lambda grid=grid, options=options: launch(  # noqa: E731
                embedding.positions_kernel, grid, out, dy, batch, time_, channels, 0, **options
            )
            name = f"{rows}x{columns} w{warps}"
            used = (rows, columns, warps) == (embedding.ROWS, embedding.COLUMNS, 4)
            candidates.insert(0 if used else len(candidates), Candidate("in use" if used else name, call))
    yield Case(f"embedding positions {which}", candidates, [out], bytes=dy.nbytes)


def squares_cases(which, small):
    blocks = {"paper": 10496, "gpt2": 121536}[which]
    of = Arrays()
    flat, out = of.normal(blocks * adamw.BLOCK, dtype=np.float32), of.floats(blocks)
    candidates = []
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        if 256 <= rows * adamw.BLOCK // warps <= 2048:
            options = dict(ROWS=rows, BLOCK=adamw.BLOCK, num_warps=warps)
            call = lambda rows=rows, options=options: launch(  # noqa: E731
                adamw.squares_kernel, (-(-blocks // rows),), out, flat, blocks, **options
            )
            used = (rows, warps) == (adamw.ROWS, 8)
            name = "in use" if used else f"rows {rows} w{warps}"
            candidates.insert(0 if used else len(candidates), Candidate(name, call))
    yield Case(f"squares {which}", candidates, [out], bytes=flat.nbytes)


KERNELS = {
    "cross_entropy": (cross_entropy_cases, ("gpt2", "paper")),
    "layernorm": (layernorm_cases, ("gpt2", "paper", "xl")),
    "gelu": (gelu_cases, ("paper", "gpt2")),
    "column_sums": (column_sums_cases, ("paper", "paper-c", "gpt2", "gpt2-c")),
    "add_partials": (add_partials_cases, ("1056", "352", "256", "128")),
    "positions": (positions_cases, ("paper", "gpt2")),
    "squares": (squares_cases, ("paper", "gpt2")),
    "attention": (attention_cases, ("short", "packed", "long", "wide")),
}


def label(tile):
    M, N, warps, stages = tile
    return f"{M}x{N} w{warps} s{stages}"


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
    xp.cuda.runtime.deviceSynchronize()  # the arrays were filled on another stream
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
        if not ready:
            return []
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
    if not rows:
        print(f"{title}: no candidate works\n", flush=True)
        return
    used = next((row for row in rows if row["label"] == "in use"), rows[0])
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

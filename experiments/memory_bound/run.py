"""LayerNorm and cross-entropy in CUDA C against the Triton kernels in use: values, then times. PYTHONPATH=. python DIR/run.py"""
import os, statistics, time, traceback
from pathlib import Path
import cupy as cp, ml_dtypes, numpy as np
from stage2_cuda.kernels import cross_entropy, layernorm
from stage2_cuda.runtime import triton_launch
HERE, OUT = Path(__file__).resolve().parent, Path(os.environ.get("OUT", "/tmp"))
log, bf = open(OUT / "memory.txt", "a"), np.dtype(ml_dtypes.bfloat16)
def say(*t):
    print(*t, flush=True); print(*t, file=log, flush=True)
def module(threads, per_sm):
    text = Path("stage2_cuda/decoding/cluster_instructions.cuh").read_text() + (HERE / "rows.cu").read_text()
    return cp.RawModule(code=text, options=("--std=c++17", "-DC=768", "-DBF16=1", "-DUNITS=3", f"-DBLOCK_THREADS={threads}", f"-DBLOCKS_PER_SM={per_sm}"))
def milliseconds(calls, rounds=7, repeat=10):
    times = {name: [] for name in calls}
    for name in list(calls):
        try:
            calls[name](); calls[name](); cp.cuda.Device().synchronize()
        except Exception:
            say(name, traceback.format_exc()[-300:]); calls.pop(name); times.pop(name)
    for _ in range(rounds):
        for name, call in calls.items():
            a, b = cp.cuda.Event(), cp.cuda.Event()
            a.record()
            for _ in range(repeat): call()
            b.record(); b.synchronize()
            times[name].append(cp.cuda.get_elapsed_time(a, b) / repeat)
    return {name: statistics.median(t) for name, t in times.items()}
def report(title, times, bytes_):
    for name, t in sorted(times.items(), key=lambda x: x[1]):
        say(f"{title}: {name:44} {1000*t:8.1f} us  {bytes_/t/1e9:5.2f} TB/s")
say(cp.cuda.runtime.getDeviceProperties(0)["name"].decode())
n, C = 65536, 768
rng = cp.random.default_rng(0)
N = lambda *s: rng.standard_normal(s, dtype=cp.float32).astype(bf)
dy, s, ds, w, b, bias, x, a = N(n, C), N(n, C), N(n, C), N(C), N(C), N(C), N(n, C), N(n, C)
f = lambda *sh: cp.empty(sh, cp.float32)
y0, s0, m0, r0 = cp.empty_like(x), cp.empty_like(x), f(n), f(n)
layernorm.residual_layernorm_forward(s0, y0, m0, r0, x, a, bias, w, b, 1e-5)
SM = triton_launch.multiprocessors()
# -- LayerNorm forward
calls = {"Triton": lambda: layernorm.residual_layernorm_forward(s0, y0, m0, r0, x, a, bias, w, b, 1e-5)}
y1, s1, m1, r1 = cp.empty_like(x), cp.empty_like(x), f(n), f(n)
for threads, per_sm, blocks in ((128, 3, 3), (128, 3, 6), (256, 1, 1), (256, 1, 2), (128, 3, 12), (256, 1, 4)):
    try:
        kernel = module(threads, per_sm).get_function("layernorm_forward_rows")
        args = (s1, y1, m1, r1, x, a, bias, w, b, np.int32(n), np.float32(1e-5))
        call = lambda kernel=kernel, blocks=blocks, threads=threads, args=args: kernel((SM * blocks,), (threads,), args)
        call(); cp.cuda.Device().synchronize()
        d = float(cp.abs(y1.astype(cp.float32) - y0.astype(cp.float32)).max()); e = float(cp.abs(s1.astype(cp.float32) - s0.astype(cp.float32)).max())
        calls[f"CUDA C, {threads} threads, {blocks} blocks an SM (diff {d:.3g} {e:.3g})"] = call
    except Exception:
        say(threads, per_sm, traceback.format_exc()[-300:])
report("LN forward", milliseconds(calls), 4 * n * C * 2)
# -- LayerNorm backward
dx0, p0 = cp.empty_like(x), f(*layernorm.layernorm_partials_shape(n, C))
calls = {"Triton": lambda: layernorm.residual_layernorm_backward(dx0, p0, ds, dy, s0, w, m0, r0)}
calls["Triton"]()
dx1 = cp.empty_like(x)
for threads, per_sm, blocks in ((128, 2, 2), (128, 3, 3), (128, 1, 3), (256, 1, 1), (256, 1, 2), (512, 1, 1), (128, 2, 4)):
    try:
        kernel, p1 = module(threads, per_sm).get_function("layernorm_backward_rows"), f(SM * blocks, 3 * C)
        args = (dx1, p1, ds, dy, s0, w, m0, r0, np.int32(n))
        call = lambda kernel=kernel, blocks=blocks, threads=threads, args=args: kernel((SM * blocks,), (threads,), args)
        call(); cp.cuda.Device().synchronize()
        d = float(cp.abs(dx1.astype(cp.float32) - dx0.astype(cp.float32)).max()); e = float(cp.abs(p1.sum(0) - p0.sum(0)).max())
        calls[f"CUDA C, {threads} threads, {per_sm}: {blocks} blocks an SM (diff {d:.3g} {e:.3g})"] = call
    except Exception:
        say(threads, per_sm, traceback.format_exc()[-300:])
for tile, programs in ((1024, 1056), (2048, 528), (2048, 1056), (4096, 264), (4096, 528)):  # constants of the Triton kernel
    def call(tile=tile, programs=programs):
        keep = layernorm.TILE_ELEMENTS, layernorm.PROGRAMS
        layernorm.TILE_ELEMENTS, layernorm.PROGRAMS = tile, programs
        try:
            layernorm.residual_layernorm_backward(dx0, f2[tile, programs], ds, dy, s0, w, m0, r0)
        finally:
            layernorm.TILE_ELEMENTS, layernorm.PROGRAMS = keep
    f2 = globals().setdefault("f2", {}); f2[tile, programs] = f(programs, 3 * C)
    calls[f"Triton, tile {tile}, {programs} programs"] = call
report("LN backward", milliseconds(calls), 4 * n * C * 2)
del dy, ds, x, a, dx0, dx1, y0, y1, s1
# -- cross-entropy
rows, V, width = 10240, 50257, 50304
L = (rng.standard_normal((rows, width), dtype=cp.float32) * 2).astype(bf)
t = rng.integers(0, V, rows).astype(cp.int32)
A, B = L.copy(), L.copy()
mx, sm, tl, mx1, sm1, tl1 = (f(rows) for _ in range(6))
cross_entropy.cross_entropy_forward_backward(A, mx, sm, tl, A, t, 1 / 65536, V)
calls = {"Triton": lambda: cross_entropy.cross_entropy_forward_backward(A, mx, sm, tl, A, t, 1 / 65536, V)}
for threads, per_sm in ((512, 2), (256, 2), (1024, 2), (768, 2)):
    try:
        B[...] = L
        kernel = module(threads, per_sm).get_function("cross_entropy_rows"); kernel.max_dynamic_shared_size_bytes = width * 2
        args = (B, mx1, sm1, tl1, t, np.int32(V), np.int32(width), np.float32(1 / 65536))
        call = lambda kernel=kernel, threads=threads, args=args: kernel((rows,), (threads,), args, shared_mem=width * 2)
        call(); cp.cuda.Device().synchronize()
        d = float(cp.abs(A.astype(cp.float32) - B.astype(cp.float32)).max() * 65536); A[...] = L; calls["Triton"]()
        calls[f"CUDA C, {threads} threads (diff x 65536 {d:.3g}, sums {float(cp.abs(sm1 / sm - 1).max()):.2g})"] = call
    except Exception:
        say(threads, per_sm, traceback.format_exc()[-300:])
report("cross-entropy", milliseconds(calls), 2 * rows * width * 2)

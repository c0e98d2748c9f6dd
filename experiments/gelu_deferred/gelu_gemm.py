"""One GPU call: check and time the Gluon products with GELU against cublasLt.   python3 .run/gelu_gemm.py

Run from the repository root (PYTHONPATH=.). Each check runs in its own process with a time limit; so does the timing.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, os.getcwd())
CHECK_LIMIT, TIME_LIMIT, SILENCE = 45, 60, 20  # seconds
BIG = (65536, 768, 3072)  # M, K, N
SMALL = [(128, 64, 256), (384, 192, 512), (128 * 133, 768, 256), (128 * 5, 1024, 768), (128 * 67, 128, 512)]
VARIANTS = {  # name: (constants, directions, source patches)
    "base": ({}, "fb", []),
    "stream": (dict(STREAM=True), "fb", []),
    "group8": (dict(GROUP=8), "fb", []),
    "stream group8": (dict(STREAM=True, GROUP=8), "fb", []),
    "rows16": (dict(EPILOGUE_ROWS=16), "fb", []),
    "k32x6": (dict(BLOCK_K=32, STAGES=6), "fb", []),
    "prefetch": (dict(PREFETCH=True), "b", []),
    "prefetch stream": (dict(PREFETCH=True, STREAM=True), "b", []),
    # timing only: how fast is the loop without its epilogue, and without the L2 traffic of all but one tile?
    "(no epilogue)": ({}, "fb", [("pending = gl.to_tensor(count)", "pending = gl.to_tensor(0)")]),
}


def module_of(name):
    """The kernel module, with the source patches of a variant."""
    import importlib.util

    from stage2_cuda.gemm import gluon_gelu

    patches = VARIANTS[name][2]
    if not patches:
        return gluon_gelu
    source = Path(gluon_gelu.__file__).read_text()
    for old, new in patches:
        assert old in source, old
        source = source.replace(old, new)
    path = Path(tempfile.gettempdir(), "gluon_gelu_" + "".join(c for c in name if c.isalnum()) + ".py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# -- numbers -----------------------------------------------------------------------------------------------------------


class Arrays:
    def __init__(self, cp, M, K, N, dtype, seed):
        rng = cp.random.default_rng(seed)

        def random(scale, *shape):
            return (rng.standard_normal(shape, dtype=cp.float32) * scale).astype(dtype)

        self.cp, self.shape, self.dtype = cp, (M, K, N), dtype
        self.x, self.w, self.b = random(1, M, K), random(1.5 / K**0.5, K, N), random(0.5, N)
        self.dy, self.w2 = random(1, M, K), random(1 / K**0.5, N, K)
        self.h_in = random(1.5, M, N)
        self.h, self.y, self.dh = (cp.empty((M, N), dtype) for _ in range(3))
        self.partials = cp.empty((M // 64, N), cp.float32)

    def poison(self):
        for array in (self.h, self.y, self.dh):
            array.view(self.cp.uint16).fill(0x7FFF)
        self.partials.fill(self.cp.nan)

    def call(self, module, tile, direction, rows=None):
        s = slice(rows)
        if direction == "f":
            module.gelu_product(self.y[s], self.h[s], self.x[s], self.w, self.b, tile)
        else:
            p = self.partials if rows is None else self.partials[: rows // 64]
            module.gelu_backward_product(self.dh[s], p, self.dy[s], self.w2, self.h_in[s], tile)

    def outputs(self, direction):
        u16 = self.cp.uint16
        if direction == "f":
            return [self.h.view(u16), self.y.view(u16)]
        return [self.dh.view(u16), self.partials.view(self.cp.uint32)]


def gelu64(cp, x):
    u = (2 / cp.pi) ** 0.5 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + cp.tanh(u))


def dgelu64(cp, x):
    a = (2 / cp.pi) ** 0.5
    t = cp.tanh(a * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * 0.044715 * x * x)


def worst(cp, got, want, floor):
    """Largest error relative to |want| + floor."""
    return float(cp.max(cp.abs(got - want) / (cp.abs(want) + floor)))


def errors(arrays, direction, unit):
    """{name: (error, limit)} on six blocks of 64 rows. unit: half a unit in the last place, relative, at most."""
    cp, (M, K, N) = arrays.cp, arrays.shape
    blocks = sorted({0, M // 64 - 1, M // 128, (M // 64) // 3, (2 * M // 64) // 3, 1})
    rows = cp.asarray([64 * g + r for g in blocks for r in range(64)])
    f64 = cp.float64
    if direction == "f":
        want = arrays.x[rows].astype(f64) @ arrays.w.astype(f64) + arrays.b.astype(f64)
        h, y = arrays.h[rows].astype(f64), arrays.y[rows].astype(f64)
        return {"h": (worst(cp, h, want, 0.05), 1.3 * unit), "y of h": (worst(cp, y, gelu64(cp, h), 2e-3), 1.05 * unit)}
    g = arrays.dy[rows].astype(f64) @ arrays.w2.astype(f64).T
    want = g * dgelu64(cp, arrays.h_in[rows].astype(f64))
    dh, sums = arrays.dh[rows].astype(f64), arrays.partials[cp.asarray(blocks)].astype(f64)
    want_sums = want.reshape(len(blocks), 64, N).sum(1)
    norm = float(cp.linalg.norm(sums - want_sums) / cp.linalg.norm(want_sums))
    stored = float(cp.linalg.norm(dh.reshape(len(blocks), 64, N).sum(1) - sums) / cp.linalg.norm(sums))
    return {"dh": (worst(cp, dh, want, 0.02), 2.6 * unit), "sums": (norm, unit), "sums of dh": (stored, unit)}


def check(name, direction):
    """Print one JSON line per shape."""
    import cupy as cp
    import ml_dtypes
    import numpy as np

    module = module_of(name)
    tile = module.GeluTile(**VARIANTS[name][0])
    cases = [(BIG, "bf16")] + [(shape, "bf16") for shape in (SMALL if name == "base" else SMALL[1:3])]
    if name == "base":
        cases += [((384, 192, 512), "fp16"), ((128 * 133, 768, 256), "fp16")]
    fine = True
    for seed, (shape, dtype) in enumerate(cases):
        if shape[1] % tile.BLOCK_K:
            continue
        start = time.time()
        arrays = Arrays(cp, *shape, np.dtype(ml_dtypes.bfloat16) if dtype == "bf16" else np.dtype(np.float16), 100 + seed)
        assert module.serves(2, shape[0], shape[2], shape[1], tile), shape
        unit, runs, problems = (2.0**-8 if dtype == "bf16" else 2.0**-11), [], []
        for repeat in range(4):
            arrays.poison()
            arrays.call(module, tile, direction)
            cp.cuda.runtime.deviceSynchronize()
            runs.append([out.copy() for out in arrays.outputs(direction)])
        if not all(bool((a == b).all()) for run in runs[1:] for a, b in zip(runs[0], run)):
            problems.append("bits differ between runs")
        for out in runs[0]:
            bad = int((out == 0x7FFF).sum()) if out.dtype == cp.uint16 else int(cp.isnan(out.view(cp.float32)).sum())
            if bad:
                problems.append(f"{bad} elements are NaN or were not written")
        found = errors(arrays, direction, unit)
        problems += [f"{key} {e:.1e} > {limit:.1e}" for key, (e, limit) in found.items() if not e <= limit]
        if shape == BIG:  # rows of another M have the same bits
            arrays.poison()
            arrays.call(module, tile, direction, rows=128 * 3)
            few = [out[: 384 if out.dtype == cp.uint16 else 6] for out in arrays.outputs(direction)]
            full = [out[: len(f)] for out, f in zip(runs[0], few)]
            if not all(bool((a == b).all()) for a, b in zip(few, full)):
                problems.append("bits depend on M")
        fine &= not problems
        text = ", ".join(f"{key} {e:.1e}" for key, (e, _) in found.items())
        print(json.dumps(dict(variant=name, direction=direction, shape=shape, dtype=dtype, problems=problems,
                              errors={k: e for k, (e, _) in found.items()}, seconds=round(time.time() - start, 1))), flush=True)
        print(f"{name} {direction} {shape} {dtype}: {text} {'; '.join(problems) or 'ok'}", file=sys.stderr, flush=True)
        del arrays, runs
        cp.get_default_memory_pool().free_all_blocks()
    sys.exit(0 if fine else 1)


# -- timing ------------------------------------------------------------------------------------------------------------


def timing(names_f, names_b):
    import cupy as cp
    import ml_dtypes
    import numpy as np

    from stage2_cuda.cuda_backend import CudaBackend
    from stage2_cuda.kernels import column_sums
    from stage2_cuda.tuning.tuner import capture_calls, milliseconds

    M, K, N = BIG
    backend = CudaBackend("bf16", deterministic=False)
    multiply = backend.products.multiply
    a = Arrays(cp, M, K, N, np.dtype(ml_dtypes.bfloat16), 7)
    db, sums = cp.empty(N, cp.float32), cp.empty(column_sums.partials_shape(M, N), cp.float32)
    plain = cp.empty((M, N), a.dtype)
    functions = {
        ("f", "cublasLt gelu"): lambda: multiply(a.y, a.x, a.w, bias=a.b, activation="gelu", aux=a.h),
        ("f", "cublasLt product only"): lambda: multiply(plain, a.x, a.w),
        ("b", "cublasLt dgelu"): lambda: multiply(a.dh, a.dy, a.w2, trans_b=True, activation="dgelu", aux=a.h_in),
        ("b", "cublasLt product only"): lambda: multiply(plain, a.dy, a.w2, trans_b=True),
        ("s", "column_sums of dh"): lambda: column_sums.column_sums(db, sums, a.dh),
        ("s", "add_partials"): lambda: column_sums.add_partials(a.partials, db),
    }
    functions["f", "cublasLt gelu"]()
    y, h = a.y.copy(), a.h.copy()
    functions["b", "cublasLt dgelu"]()
    dh = a.dh.copy()

    def difference(got, want):
        got, want = got[:4096].astype(cp.float32), want[:4096].astype(cp.float32)
        return float(cp.linalg.norm(got - want) / cp.linalg.norm(want))

    for direction, names in (("f", names_f), ("b", names_b)):
        for name in names:
            module = module_of(name)
            call = lambda m=module, t=module.GeluTile(**VARIANTS[name][0]), d=direction: a.call(m, t, d)  # noqa: E731
            call()
            cp.cuda.runtime.deviceSynchronize()
            print("@ compiled", name, direction, flush=True)
            functions[direction, name] = call
            if not name.startswith("("):
                pairs = [(a.y, y), (a.h, h)] if direction == "f" else [(a.dh, dh)]
                print(name, direction, "difference to cublasLt", [f"{difference(*p):.1e}" for p in pairs], flush=True)
    stream, graphs, times, calls = cp.cuda.Stream(non_blocking=True), {}, {}, 20
    for key, function in functions.items():
        function()
        cp.cuda.runtime.deviceSynchronize()
        with stream:
            graphs[key] = capture_calls(stream, function, calls)
        print("@ captured", key, flush=True)
    rng = np.random.default_rng(1)
    for graph in graphs.values():
        graph.launch(stream)
    for _ in range(9):
        for number in rng.permutation(len(graphs)):
            key = list(graphs)[number]
            ms = milliseconds(cp, stream, lambda g=graphs[key]: g.launch(stream)) / calls
            times.setdefault(key, []).append(ms)
        print("@ round", flush=True)
    rows, flops = [], 2e-9 * M * K * N
    for (direction, name), values in times.items():
        median = float(np.median(values))
        rows.append(dict(direction=direction, name=name, ms=median, low=min(values), high=max(values),
                         tflops=None if direction == "s" else flops / median))
    print("JSON " + json.dumps(rows), flush=True)


def show(rows, checks):
    bad = {(c["variant"], c["direction"]) for c in checks if c["problems"]}
    ran = {(c["variant"], c["direction"]) for c in checks}
    print(f"\n{'':2} {'what':24} {'ms':>8} {'low':>8} {'high':>8} {'TFLOP/s':>8}  checks")
    for row in sorted(rows, key=lambda r: (r["direction"], r["ms"])):
        key = row["name"], row["direction"]
        state = "WRONG" if key in bad else "ok" if key in ran else ""
        speed = f"{row['tflops']:8.0f}" if row["tflops"] else " " * 8
        print(f"{row['direction']:2} {row['name']:24} {row['ms']:8.4f} {row['low']:8.4f} {row['high']:8.4f} {speed}  {state}")


# -- processes ---------------------------------------------------------------------------------------------------------


def run_checks():
    """Run all checks, twelve processes at a time; -> (checks, names of variants that failed)."""
    jobs = [(n, d) for n, (_, directions, patches) in VARIANTS.items() if not patches for d in directions]
    waiting, running, checks, failed = list(jobs), {}, [], set()
    while waiting or running:
        while waiting and len(running) < 12:
            job = waiting.pop(0)
            out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
            process = subprocess.Popen([sys.executable, HERE, "--check", *job], stdout=out, stderr=err)
            running[job] = process, out, err, time.time()
        for job, (process, out, err, start) in list(running.items()):
            code = process.poll()
            if code is None and time.time() - start > CHECK_LIMIT:
                process.kill()
                process.wait()
                code = "timeout: it hangs or is too slow"
            if code is None:
                continue
            out.seek(0), err.seek(0)
            lines = [json.loads(line) for line in out.read().splitlines() if line.startswith("{")]
            checks += lines
            print(f"{job}: exit {code}, {len(lines)} shapes, {time.time() - start:.0f} s")
            text = err.read().splitlines()
            for line in (text if code == 0 and job[0] == "base" else text[-14:] if code else []):
                print("   ", line[:220])
            if code != 0:
                failed.add(job)
            del running[job]
        time.sleep(0.1)
    return checks, failed


def run_timing(failed):
    words = [",".join(n for n, (_, ds, _) in VARIANTS.items() if d in ds and (n, d) not in failed) for d in "fb"]
    process = subprocess.Popen([sys.executable, HERE, "--time", *words], stdout=subprocess.PIPE, text=True)
    rows, last = [], [time.time()]
    import threading

    def read():
        for line in process.stdout:
            last[0] = time.time()
            if line.startswith("JSON "):
                rows.extend(json.loads(line[5:]))
            elif not line.startswith("@"):
                print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    start = time.time()
    while process.poll() is None:
        time.sleep(0.2)
        if time.time() - last[0] > SILENCE or time.time() - start > TIME_LIMIT:
            process.kill()
            print("timing: killed")
    reader.join(5)
    return rows


def main():
    if "--check" in sys.argv:
        return check(*sys.argv[2:4])
    if "--time" in sys.argv:
        return timing(*(word.split(",") if word else [] for word in sys.argv[2:4]))
    start = time.time()
    checks, failed = run_checks()
    print(f"checks: {time.time() - start:.0f} s, failed: {sorted(failed) or 'none'}", flush=True)
    rows = run_timing(failed)
    out = os.environ.get("OUT")
    if out:
        Path(out, "gelu_gemm.json").write_text(json.dumps(dict(checks=checks, times=rows), indent=1))
    show(rows, checks)
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()

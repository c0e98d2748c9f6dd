"""Measure the floor of a decoded token of GPT-2 124M, bf16, one sequence, on an H200: python .run/decode_floor.py

Each part is a process with a timeout; the processes start in parallel, and the GPU runs one of them at a time.
"""

import argparse
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path.cwd() if (Path.cwd() / "stage2_cuda").is_dir() else HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]
OUT = Path(os.environ.get("OUT", "/tmp"))
SHARED_BYTES = 231616
LOAD, POLL = 1, 2
STEPS, START = 200, 256  # timed tokens of a round, and the position of the first one


# -- compiled code ------------------------------------------------------------------------------------------------------


def cubin(copies):
    """The path of the compiled decode_floor.cu with COPIES=copies; compiled if it is missing."""
    source = HERE / "decode_floor.cu"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    path = HERE / f"decode_floor-{copies}-{digest}.cubin"
    if not path.exists():
        path = Path(tempfile.gettempdir()) / path.name
        flags = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-O3", f"-DCOPIES={copies}"]
        subprocess.run(["nvcc", *flags, "-o", path, source], check=True)
    return str(path)


# -- worker: barriers and chains without weights ------------------------------------------------------------------------


class Floor:
    def __init__(self):
        import cupy
        import numpy as np

        self.cp, self.np = cupy, np
        self.module = cupy.RawModule(path=cubin(1))
        self.flags, self.progress = cupy.zeros(1024, np.uint32), cupy.zeros(128, np.uint32)
        self.errors = cupy.zeros(1, np.int32)

    def time(self, launch, phases):
        """The median microseconds of one phase."""
        cp, times = self.cp, []
        for _ in range(7):
            self.flags.fill(0)
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record()
            launch(phases)
            end.record()
            end.synchronize()
            times.append(1e3 * cp.cuda.get_elapsed_time(begin, end) / phases)
        return statistics.median(times[1:])

    def barriers(self, name):
        kernel, np = self.module.get_function("barriers_" + name), self.np
        self.flags.fill(0), self.progress.fill(0), self.errors.fill(0)
        kernel((128,), (384,), (self.flags, self.progress, self.errors, np.int32(500)))
        errors = int(self.errors.get()[0])
        if errors and name != "none":
            return {"error": f"{errors} early releases"}
        null = np.uintp(0)
        return {"us": self.time(lambda n: kernel((128,), (384,), (self.flags, null, self.errors, np.int32(n))), 1200)}

    def chain(self, name):
        cp, np = self.cp, self.np
        kernel, x0 = self.module.get_function("chain_" + name), np.random.default_rng(0).standard_normal(768, np.float32)
        buffer = cp.empty(3 * 768, np.uint32)
        weights = (1 + np.arange(768) % 4) / 1920

        def launch(phases):
            kernel((128,), (384,), (buffer, self.flags, np.int32(phases)))

        def reset():
            host = np.full(3 * 768, 0xFFFFFFFF, np.uint32)
            host[:768] = x0.view(np.uint32)
            buffer.set(host)

        for phases in (1, 2, 61, 122):
            reset()
            self.flags.fill(0)
            launch(phases)
            want = x0.astype(np.float64)
            for _ in range(phases):
                want = 0.5 * want + 0.5 * (weights * want).sum()
            got = buffer.get().view(np.float32).reshape(3, 768)[phases % 3]
            error = float(np.abs(got - want).max() / np.abs(want).max())
            if not error < 1e-4:
                return {"error": f"{phases} phases: relative error {error}"}
        times = []
        for _ in range(7):
            reset()
            self.flags.fill(0)
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record()
            launch(1200)
            end.record()
            end.synchronize()
            times.append(1e3 * cp.cuda.get_elapsed_time(begin, end) / 1200)
        return {"us": statistics.median(times[1:])}

    def answer(self, request):
        return getattr(self, request["what"])(request["name"])


# -- worker: the persistent decode kernel -------------------------------------------------------------------------------


class Skeleton:
    def __init__(self, copies):
        import cupy
        import numpy as np

        import floor_model

        self.cp, self.np, self.fm, self.copies = cupy, np, floor_model, copies
        module = cupy.RawModule(path=cubin(copies))
        self.kernel = module.get_function("decode")
        self.kernel.max_dynamic_shared_size_bytes = SHARED_BYTES
        self.model = floor_model.Model()
        self.packed = [np.ascontiguousarray(array) for array in self.model.packed()]
        self.graphs, self.ready = {}, False

    def allocate(self):
        cp, np, fm = self.cp, self.np, self.fm
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.weights = [cp.asarray(array) for array in self.packed]
        self.host_cache = self.model.random_cache(START)
        self.cache = cp.asarray(self.host_cache)
        self.exchange = cp.full(self.copies * fm.EXCHANGE_WORDS, fm.EMPTY, np.uint32)
        self.logits, self.x = cp.full(self.model.V, np.nan, np.float32), cp.full(768, np.nan, np.float32)
        self.state, self.readback = cp.zeros(3, np.int32), cp.zeros(1024, np.int32)
        self.trace = cp.zeros((128, 2, 64), np.uint32)
        self.ready = True
        cp.cuda.Device().synchronize()

    def launch(self, tokens, mode, trace=False):
        np = self.np
        trace = self.trace if trace else np.uintp(0)
        arguments = (
            *self.weights, self.cache, self.exchange, self.logits, self.x, self.state, self.readback, trace,
            np.int32(tokens), np.int32(mode),
        )  # fmt: skip
        self.kernel((128,), (384,), arguments, shared_mem=SHARED_BYTES)

    def check(self):
        """Five tokens in three launches against NumPy, and the same launches again, bit by bit."""
        np, cp = self.np, self.cp
        if not self.ready:
            self.allocate()
        report = []
        for repeat in range(2):
            self.exchange.fill(self.fm.EMPTY)
            self.cache.set(self.host_cache)
            self.state.set(np.array([11, START, 0], np.int32))
            cache, token, position, step = self.host_cache.copy(), 11, START, 0
            bits = []
            for tokens in (1, 3, 1):
                self.logits.fill(np.nan)
                self.launch(tokens, LOAD | POLL)
                cp.cuda.Device().synchronize()
                bits.append((self.logits.get().tobytes(), self.x.get().tobytes()))
                if repeat:
                    continue
                ids = self.readback.get()
                for _ in range(tokens):
                    x, logits = self.model.step(token, position, cache)
                    token, position, step = int(ids[step]), position + 1, step + 1
                    if not logits[token] > logits.max() - 0.02 * np.abs(logits).max():
                        return {"error": f"token {step}: {token}, expected {int(logits.argmax())}", "report": report}
                errors = [self.fm.error(self.x.get(), x), self.fm.error(self.logits.get(), logits)]
                report.append([round(e, 5) for e in errors])
                if not max(errors) < 1e-2:
                    return {"error": f"relative errors of x and of the logits {errors}", "report": report}
            if repeat and bits != first:
                return {"error": "a repeated run gave other bits", "report": report}
            first = bits
        return {"errors": report}

    def reset(self, position):
        """The state before a round; mode without POLL may have left any state."""
        np = self.np
        with self.stream:
            self.state.set(np.array([11, position, 0], np.int32), stream=self.stream)
            self.exchange.fill(self.fm.EMPTY)
        self.stream.synchronize()

    def time(self, tokens=1, mode=LOAD | POLL, position=START):
        cp = self.cp
        if (tokens, mode) not in self.graphs:
            self.reset(position)
            with self.stream:
                self.launch(tokens, mode)
                self.stream.synchronize()
                self.stream.begin_capture(cp.cuda.runtime.streamCaptureModeRelaxed)
                self.launch(tokens, mode)
                self.graphs[tokens, mode] = self.stream.end_capture()
        graph, count = self.graphs[tokens, mode], STEPS // tokens
        if position + STEPS + 8 * tokens > 1023:
            count = (1023 - position) // tokens - 3
        self.reset(position)
        for _ in range(50 // tokens):  # to the full clock rate
            graph.launch(self.stream)
        self.stream.synchronize()
        self.reset(position)
        for _ in range(2):
            graph.launch(self.stream)
        self.stream.synchronize()
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        started = time.perf_counter()
        begin.record(self.stream)
        for _ in range(count):
            graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        wall = 1e6 * (time.perf_counter() - started) / (count * tokens)
        return {"us": 1e3 * cp.cuda.get_elapsed_time(begin, end) / (count * tokens), "wall": wall}

    def stamps(self):
        """Cycles per kind of phase: from its input to its output, and from that output to the next input."""
        np = self.np
        self.reset(START + 100)
        with self.stream:
            for _ in range(8):
                self.launch(1, LOAD | POLL)
            for _ in range(3):
                self.launch(1, LOAD | POLL, trace=True)
        self.stream.synchronize()
        trace = self.trace.get().astype(np.int64)  # (G, input or output, stamp)
        np.save(OUT / "trace.npy", trace)
        names, result = ("qkv", "attention", "proj", "fc", "fc2"), {}
        for label, blocks in (("blocks with attention", slice(0, 48)), ("other blocks", slice(48, 128))):
            t = trace[blocks, :, :60].reshape(-1, 2, 12, 5)
            for p, name in enumerate(names):
                if p == 1 and label == "other blocks":
                    continue
                inside = (t[:, 1, 1:, p] - t[:, 0, 1:, p]) % 2**32
                after = names.index("proj") if p == 0 and label == "other blocks" else (p + 1) % 5
                follow = t[:, 0, 1:-1, after] if after > p else t[:, 0, 2:, after]
                waiting = (follow - t[:, 1, 1:-1, p]) % 2**32
                result[f"{label}: {name}"] = [float(np.median(inside)), float(np.median(waiting))]
        layers = (trace[:, 1, 59] - trace[:, 1, 4]) % 2**32 / 11
        tail = (trace[:, 1, 60] - trace[:, 0, 60]) % 2**32
        result["one layer"] = [float(np.median(layers)), 0.0]
        result["last LayerNorm and unembedding"] = [float(np.median(tail)), 0.0]
        return {"cycles": result, "clock MHz": self.cp.cuda.runtime.getDeviceProperties(0)["clockRate"] / 1e3
                if "clockRate" in self.cp.cuda.runtime.getDeviceProperties(0) else None}  # fmt: skip

    def answer(self, request):
        what = request.pop("what")
        return getattr(self, what)(**request)


# -- worker: the present decode step, and variants of it ---------------------------------------------------------------


class Present:
    """name: a variant in overlay.py."""

    def __init__(self, name, vocab=None):
        import overlay

        directory = tempfile.mkdtemp(prefix="overlay-")
        overlay.make(ROOT, directory, name)
        sys.path.insert(0, directory)
        import numpy as np

        from benchmarks.harness import ours
        from gpt2core.app.presets import PRESETS
        from gpt2core.sampler import Greedy

        import stage2_cuda

        assert str(Path(stage2_cuda.__file__).resolve()).startswith(str(Path(directory).resolve())), stage2_cuda.__file__
        config = PRESETS["gpt2"]
        self.generator = ours.CudaGenerator(config, 1, "bf16")
        options = {"block_vocab": vocab} if vocab else {}
        self.decoder = self.generator.decoder(1, **options)
        self.prompts, self.Greedy, self.ours = np.random.default_rng(3).integers(0, config.vocab_size, (1, START)).tolist(), Greedy, ours
        self.seconds = ours.seconds_per_step

    def check(self):
        decoder, tokens = self.decoder, []
        decoder.start(self.prompts, [self.Greedy()])
        for _ in range(STEPS):
            decoder.step()
            tokens += decoder.read_tokens()
        return {"tokens": tokens}

    def time(self):
        return {"us": 1e6 * self.seconds(self.decoder, self.prompts, STEPS)}

    def answer(self, request):
        return getattr(self, request["what"])()


# -- the protocol: one JSON line per request and answer ----------------------------------------------------------------


def serve(kind, *arguments):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    worker = {"floor": Floor, "skeleton": lambda n: Skeleton(int(n)), "present": Present}[kind](*arguments)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    def __init__(self, *arguments):
        self.name, self.lines, self.dead = " ".join(arguments), queue.Queue(), None
        self.log = open(OUT / "decode_floor.log", "a")
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, cwd=ROOT,
        )  # fmt: skip
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def receive(self, timeout):
        if self.dead:
            return {"error": self.dead}
        try:
            line = self.lines.get(timeout=max(0.1, timeout))
        except queue.Empty:
            line, self.dead = "", f"no answer after {timeout:.0f} s"
        if not line.startswith("{"):
            self.dead = self.dead or f"the process ended: {self.process.poll()}"
            self.process.kill()
            return {"error": self.dead}
        return json.loads(line)

    def ask(self, timeout=25, **request):
        if self.dead:
            return {"error": self.dead}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass
        return self.receive(timeout)

    def close(self):
        self.process.kill()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs="+")
    parser.add_argument("--seconds", type=float, default=85, help="no new measurement after this time (default 85)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-present", action="store_true")
    args = parser.parse_args()
    if args.worker:
        return serve(*args.worker)
    begin = time.perf_counter()
    left = lambda: args.seconds - (time.perf_counter() - begin)  # noqa: E731
    results = {"barriers": {}, "chains": {}, "checks": {}, "times": {}, "wall": {}}

    def save():
        (OUT / "decode_floor.json").write_text(json.dumps(results, indent=1))

    def note(*text):
        print(f"[{time.perf_counter() - begin:5.1f} s]", *text, flush=True)

    floor, skeletons = Worker("floor"), {n: Worker("skeleton", str(n)) for n in (1, 2, 4)}
    import overlay

    presents = {} if args.skip_present else {name: Worker("present", name) for name in overlay.VARIANTS}
    if presents:
        presents["merged LN, 16 rows"] = Worker("present", "merged LN", "16")

    note("floor", floor.receive(25))

    def measure_floor():
        for what, key, names in (("barriers", "barriers", ("none", "counter", "flags", "cluster4", "cluster8")),
                                 ("chain", "chains", ("counter", "flags", "cluster4", "empty"))):  # fmt: skip
            for name in names:
                answer = floor.ask(what=what, name=name)
                results[key].setdefault(name, []).append(answer.get("us", -1))
                if "error" in answer:
                    results["checks"][f"{key}, {name}"] = answer
        note(results["barriers"], results["chains"])
        save()

    measure_floor()
    usable = {}  # {row: (worker, request)}
    for n, worker in skeletons.items():
        ready = worker.receive(min(25, left()))
        answer = worker.ask(what="check") if "error" not in ready else ready
        results["checks"][f"skeleton, {n} copies"] = answer
        note(f"skeleton, {n} copies:", answer)
        if "error" in answer:
            continue
        usable[f"skeleton, {n} copies"] = worker, dict(what="time")
        if n > 1:
            continue
        for keep in (1, 2, 3):
            usable[f"skeleton, keep {keep} layers in L2"] = worker, dict(what="time", mode=LOAD | POLL | keep << 8)
        usable["skeleton, 8 tokens per launch"] = worker, dict(what="time", tokens=8)
        usable["skeleton, position 800"] = worker, dict(what="time", position=800)
        usable["skeleton, position 8"] = worker, dict(what="time", position=8)
        usable["skeleton, without loads"] = worker, dict(what="time", mode=POLL)
        usable["skeleton, without waits"] = worker, dict(what="time", mode=LOAD)
        usable["skeleton, without loads and waits"] = worker, dict(what="time", mode=0)
    save()
    # first the skeleton by itself, in case that the present step does not start
    for row, (worker, request) in usable.items():
        note(row, worker.ask(**request))
    if 1 in skeletons and "skeleton, 1 copies" in usable:
        results["stamps"] = skeletons[1].ask(what="stamps")
        for name, cycles in results["stamps"].get("cycles", {}).items():
            note(f"{name:40} {cycles[0]:8.0f} cycles, then {cycles[1]:8.0f} until the next input")
        if "error" in results["stamps"]:
            note("stamps", results["stamps"])
    save()

    expected = None
    for name, worker in presents.items():
        ready = worker.receive(min(30, left() - 15))
        answer = worker.ask(what="check") if "error" not in ready else ready
        tokens = answer.pop("tokens", None)
        if tokens:
            expected = expected or tokens
            same = sum(a == b for a, b in zip(tokens, expected, strict=True))
            answer = {"equal tokens": same, "of": len(expected)}
            usable[f"present, {name}"] = worker, dict(what="time")
        results["checks"][f"present, {name}"] = answer
        note(f"present, {name}:", answer)
        if left() < 15:
            break
    save()

    for number in range(args.rounds):
        for row in list(usable)[:: 1 if number % 2 == 0 else -1]:
            worker, request = usable[row]
            if left() < 2:
                break
            answer = worker.ask(timeout=min(25, left() + 5), **request)
            if "us" in answer:
                results["times"].setdefault(row, []).append(answer["us"])
                results["wall"].setdefault(row, []).append(answer.get("wall", answer["us"]))
            elif "failed " + row not in results["checks"]:
                results["checks"]["failed " + row] = answer
        save()
        if left() < 2:
            break
    measure_floor()  # again, because the other processes were starting when it was measured first
    for worker in [floor, *skeletons.values(), *presents.values()]:
        worker.close()
    note(f"{number + 1} rounds")
    print("\nbarriers, us:", {k: [round(us, 3) for us in v] for k, v in results["barriers"].items()})
    print("chains of 768 values, us per phase:", {k: [round(us, 3) for us in v] for k, v in results["chains"].items()})
    print(f"\n{'us per token':42} median     min  wall  rounds")
    for row, times in results["times"].items():
        wall = statistics.median(results["wall"][row])
        print(f"{row:42} {statistics.median(times):6.1f} {min(times):7.1f} {wall:6.1f} {len(times):4d}")
    for row, answer in results["checks"].items():
        print(f"check: {row}: {answer}")


if __name__ == "__main__":
    main()

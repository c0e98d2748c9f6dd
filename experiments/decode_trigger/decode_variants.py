"""Time variants of the decode step of GPT-2 124M, bf16, one sequence: python .run/decode_variants.py

Each variant is a process with a timeout; the processes start in parallel, and the GPU runs one of them at a time.
--dry: a tiny model in Triton's interpreter, to test this script without a GPU.
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
TREES = HERE / "decode_trees"
sys.path.insert(0, str(HERE))
OUT = Path(os.environ.get("OUT", "/tmp"))
DRY = os.environ.get("DECODE_DRY") == "1"
STEPS, START = (4, 9) if DRY else (200, 256)  # timed tokens of a round, and the position of the first one


class Present:
    """name: a variant in decode_overlays.py."""

    def __init__(self, name):
        import decode_overlays

        directory = tempfile.mkdtemp(prefix="decode-")
        fields = decode_overlays.make(TREES, directory, name)
        sys.path.insert(0, directory)
        import numpy as np

        from benchmarks.harness import ours
        from gpt2core.app.presets import PRESETS
        from gpt2core.sampler import Greedy

        import stage2_cuda

        assert str(Path(stage2_cuda.__file__).resolve()).startswith(str(Path(directory).resolve())), stage2_cuda.__file__
        config = PRESETS["nano" if DRY else "gpt2"]
        self.generator = ours.CudaGenerator(config, 1, "fp32" if DRY else "bf16")
        self.decoder = self.dry_decoder(fields) if DRY else self.generator.decoder(1, **fields)
        self.prompts = np.random.default_rng(3).integers(0, config.vocab_size, (1, START)).tolist()
        self.Greedy, self.seconds, self.np = Greedy, ours.seconds_per_step, np

    def dry_decoder(self, fields):
        from stage2_cuda.decoding.decode_stream import EagerStream
        from stage2_cuda.decoding.decoder import GpuDecoder

        backend = self.generator.backend
        tiling = backend.decode_tiling(1)._replace(**fields)
        return GpuDecoder(self.generator.model, 1, EagerStream(), tiling)

    def check(self):
        """The tokens, a digest of all logits, and the logits of the first and last step in a file."""
        decoder, tokens, digest, kept = self.decoder, [], hashlib.sha256(), []
        decoder.start(self.prompts, [self.Greedy()])
        for step in range(STEPS):
            decoder.step()
            tokens += decoder.read_tokens()
            logits = decoder.logits
            logits = self.np.array(logits) if isinstance(logits, self.np.ndarray) else logits.get()
            digest.update(logits.tobytes())
            if step in (1, STEPS - 1):
                kept.append(logits)
        path = tempfile.mktemp(prefix="logits-", suffix=".npy")
        self.np.save(path, self.np.stack(kept))
        return {"tokens": tokens, "digest": digest.hexdigest(), "logits": path}

    def time(self):
        return {"us": 1e6 * self.seconds(self.decoder, self.prompts, STEPS)}

    def answer(self, request):
        return getattr(self, request["what"])()


# -- the protocol: one JSON line per request and answer ----------------------------------------------------------------


def serve(name):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    worker = Present(name)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    def __init__(self, name):
        self.name, self.lines, self.dead = name, queue.Queue(), None
        self.log = open(OUT / "decode_variants.log", "a")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True,
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

    def ask(self, timeout=20, **request):
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
    parser.add_argument("--worker")
    parser.add_argument("--seconds", type=float, default=80, help="no new measurement after this time (default 80)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="parts of the names of variants; the base is always included")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.worker:
        return serve(args.worker)
    if args.dry:
        global DRY
        DRY = True
        os.environ.update(DECODE_DRY="1", TRITON_INTERPRET="1")
    import numpy as np
    from decode_overlays import VARIANTS

    begin = time.perf_counter()
    left = lambda: args.seconds - (time.perf_counter() - begin)  # noqa: E731
    names = [name for n, name in enumerate(VARIANTS) if n == 0 or not args.only or any(part in name for part in args.only)]
    results, usable, base = {"checks": {}, "times": {}}, {}, None

    def save():
        (OUT / "decode_variants.json").write_text(json.dumps(results, indent=1))

    def note(*text):
        print(f"[{time.perf_counter() - begin:5.1f} s]", *text, flush=True)

    workers = {name: Worker(name) for name in names}
    for name, worker in workers.items():
        if left() < 20:
            results["checks"][name] = {"error": "not checked, out of time"}
            continue
        ready = worker.receive(min(40, left() - 15))
        answer = worker.ask(what="check", timeout=min(25, left() - 10)) if "error" not in ready else ready
        if "tokens" in answer:
            logits = np.load(answer["logits"]).astype(np.float64)
            base = base or (answer["tokens"], answer["digest"], logits)
            same = sum(a == b for a, b in zip(answer["tokens"], base[0], strict=True))
            error = float(np.abs(logits - base[2])[0].max() / np.abs(base[2][0]).max())  # of the first decode step
            answer = {"equal": same, "of": len(base[0]), "different": len(set(base[0])), "bits": answer["digest"] == base[1]}
            answer["error"] = error
            usable[name] = worker
        results["checks"][name] = answer
        note(f"{name}:", answer)
    save()
    number = -1
    for number in range(args.rounds):
        for name in list(usable)[:: 1 if number % 2 == 0 else -1]:
            if left() < 2:
                break
            answer = usable[name].ask(timeout=min(10, left() + 5), what="time")
            if "us" in answer:
                results["times"].setdefault(name, []).append(answer["us"])
            else:
                results["checks"][name] = answer
        save()
        if left() < 2:
            break
    for worker in workers.values():
        worker.close()
    note(f"{number + 1} rounds")
    print(f"\n{'us per token':36} median     min  rounds  tokens equal to base's      logits")
    for name in names:
        times, check = results["times"].get(name), results["checks"].get(name, {})
        if not times:
            print(f"{name:36} {str(check)[:300]}")
            continue
        equal = f"{check.get('equal')} of {check.get('of')} ({check.get('different')} different)"
        bits = "equal bits" if check.get("bits") else f"relative error {check.get('error', -1):.1e}"
        print(f"{name:36} {statistics.median(times):6.1f} {min(times):7.1f} {len(times):5d}   {equal:27} {bits}")


if __name__ == "__main__":
    main()

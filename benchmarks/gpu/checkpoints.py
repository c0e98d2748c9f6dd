"""How much longer does training take if it saves checkpoints, in the training process or in another one?

Each run is the command of a user. Its time is measured from the line of one step to that of another, so it includes
the checkpoints between them, but not the start and the end.

python -m benchmarks.gpu.checkpoints                             # GPT-2 on a GPU
python -m benchmarks.gpu.checkpoints --device cpu --preset tiny  # on a CPU
"""

import functools
import re
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.harness.processes import BenchmarkFailed, raise_user_error
from benchmarks.harness.report import paired_ratio
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.script import benchmark
from gpt2core.errors import ConfigError
from testing.jobs import ROOT

LEAD_IN = 10  # steps before the time begins: the first ones compile and capture
MODULES = {"cpu": "stage0_serial.train_gpt2", "cuda": "stage2_cuda.train_gpt2"}


def seconds_of(words, steps, timeout):
    """Run a training command -> the seconds from the line of step LEAD_IN to that of step `steps` - 1."""
    seen = {}
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-u", *words]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            late = threading.Event()
            watchdog = threading.Timer(timeout, lambda: (late.set(), process.kill()))
            watchdog.start()
            try:
                for line in process.stdout:
                    if found := re.match(r"step +(\d+) \|", line):
                        seen[int(found[1])] = time.perf_counter()
            finally:
                watchdog.cancel()  # also after Ctrl-C, because the interpreter waits for the timer at exit
        errors.seek(0)
        if status := process.returncode:
            raise_user_error("training", status, text := errors.read())
            end = f"did not end within --timeout {timeout} s" if late.is_set() else f"ended with status {status}"
            raise BenchmarkFailed(f"{words} {end}:\n{text[-2000:]}")
    return seen[steps - 1] - seen[LEAD_IN]


@benchmark(
    "gpu-checkpoints",
    common=dict(preset="gpt2", device="cuda", rounds=3, steps=260, checkpoint_every=50, batch_size=64, timeout=300),
)
def main(args):
    if args.steps < LEAD_IN + 2:
        raise ConfigError(f"--steps {args.steps}: the first {LEAD_IN} steps are not timed: use {LEAD_IN + 2} or more")
    words = ["-m", MODULES[args.device], "--preset", args.preset, "--steps", args.steps, "--batch-size",
             args.batch_size, "--sample", 0]  # fmt: skip
    if args.device == "cuda":
        words += ["--precision", "bf16"]
    with tempfile.TemporaryDirectory() as folder:
        saving = ["--checkpoint-every", args.checkpoint_every, "--out", folder, "--overwrite"]
        programs = {  # {name: flags}
            "no checkpoint": ["--no-save"],
            "checkpoints": saving,
            "--async-checkpoints": [*saving, "--async-checkpoints"],
        }
        functions = {
            name: functools.partial(seconds_of, [str(word) for word in words + flags], args.steps, args.timeout)
            for name, flags in programs.items()
        }
        seconds = interleaved(functions, args.rounds)
    common = dict(preset=args.preset, steps=args.steps - 1 - LEAD_IN, checkpoint_every=args.checkpoint_every)
    results = [
        {"name": name, **common, "totals": each, "times": paired_ratio(each, seconds["no checkpoint"])}
        for name, each in seconds.items()
    ]
    return results

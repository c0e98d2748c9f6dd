"""Compare two checkouts of this repository: the bits of their training runs, or with --speed the time they take.

    python tests/tools/compare_checkouts.py ../previous                       # stages 0 and 1
    python tests/tools/compare_checkouts.py ../previous --gpu --gpus 2 --save # stage 2, and stage 3 on two GPUs
    python tests/tools/compare_checkouts.py ../previous --speed

Both checkouts run the same command lines. Every loss, gradient norm and learning rate of the two logs, the hash of the
final parameters and the exit code must be equal. The exit code is 1 if one differs or, with --speed, if this checkout
is slower than its bound.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from benchmarks.harness.report import commit, hardware, print_table  # noqa: E402

STAGES = ["stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda"]
FIELDS = ("step", "loss", "grad_norm", "lr", "val_loss", "loss_scale", "skipped")  # of every line of the log
HASH = "parameters_sha256"  # of the last line
WARM_UP = 3  # steps that are not timed
TIMEOUT = 600  # seconds for one run
LARGE_SCALE = 2.0**30  # an fp16 loss scale whose gradients overflow


class RunFailed(Exception):
    """A run gave no result: it took too long, or it ended before its signal."""


@dataclass(frozen=True)
class Case:
    """One run of train_gpt2.py. `how` is the function that plays it: straight through, resumed, stopped, ..."""

    name: str
    stage: int
    flags: tuple
    how: object
    steps: int
    ranks: int = 0  # 0: without a launcher
    fails: bool = False  # whether it must end with an error


@dataclass(frozen=True)
class Outcome:
    """What a case left in one checkout: its exit code, the lines of its log and the last line of standard error."""

    code: int
    rows: list
    error: str

    def difference(self, other):
        """The first thing in which two outcomes differ, as text; "" if all bits are equal."""
        if self.code != other.code:
            return f"exit code {other.code}, here {self.code}: {self.error or other.error}"
        if len(self.rows) != len(other.rows):
            return f"{len(other.rows)} steps, here {len(self.rows)}: {self.error or other.error}"
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            for field in FIELDS:
                if repr(mine.get(field)) != repr(theirs.get(field)):  # repr: NaN equals NaN
                    return f"step {mine['step']}: {field} {theirs.get(field)}, here {mine.get(field)}"
        hashes = [rows[-1].get(HASH) if rows else None for rows in (self.rows, other.rows)]
        return "" if hashes[0] == hashes[1] else f"{HASH} differs"


class Job:
    """One case in one checkout, with a directory for its log and its checkpoints."""

    def __init__(self, case, checkout, other, directory):
        self.case, self.checkout, self.other = case, checkout, other
        self.log, self.out, self.error = directory / "log.jsonl", directory / "out", ""

    def start(self, steps, *flags, checkout=None):
        """Start train_gpt2.py -> its process."""
        script = ["-m", f"{STAGES[self.case.stage]}.train_gpt2"]
        launch = ["-m", "stage1_mpi.launch", "-n", str(self.case.ranks), "--"] if self.case.ranks else []
        run = ["--steps", str(steps), "--sample", "0", "--log", str(self.log), *map(str, flags)]
        return start([*launch, *script, *self.case.flags, *run], checkout or self.checkout)

    def run(self, steps, *flags, checkout=None):
        """Run train_gpt2.py to its end -> its exit code."""
        process = self.start(steps, *flags, checkout=checkout)
        error = communicate(process)[1]
        self.error = (error.strip().splitlines() or [""])[-1]
        return process.returncode

    def lines(self):
        """The complete lines of the log so far."""
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def rows(self):
        """The log of a run that has ended."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def start(words, checkout):
    """Start Python on `words`, with the modules of a checkout -> its process."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, *words], cwd=checkout, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def communicate(process):
    """(standard output, standard error) of a process that has ended; kills it after TIMEOUT."""
    try:
        return process.communicate(timeout=TIMEOUT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RunFailed(f"no end after {TIMEOUT} s") from None
        raise


# -- how a case is played ---------------------------------------------------------------------------------------------


def straight(job):
    """All steps in one run."""
    return job.run(job.case.steps)


def resumed(job):
    """Half of the steps, and the rest in a second run."""
    return job.run(job.case.steps // 2, "--out", job.out) or job.run(job.case.steps, "--resume", job.out)


def handed_over(job):
    """Half of the steps in the other checkout, and the rest in this one: its checkpoints can still be resumed."""
    first = job.run(job.case.steps // 2, "--out", job.out, checkout=job.other)
    return first or job.run(job.case.steps, "--resume", job.out)


def stopped(job):
    """A run that is ended by SIGTERM after some steps, and is then resumed."""
    process = job.start(job.case.steps, "--out", job.out)
    while len(job.lines()) < job.case.steps // 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    communicate(process)
    if process.returncode != 128 + signal.SIGTERM:
        raise RunFailed(f"exit code {process.returncode} after SIGTERM")
    return job.run(job.case.steps, "--resume", job.out)


def overflowing(job):
    """Half of the fp16 steps, then a loss scale so large that gradients overflow, and the rest."""
    code = job.run(job.case.steps // 2, "--out", job.out)
    state = job.out / "latest" / "state.json"
    values = json.loads(state.read_text())
    values["loss_scale"]["factor"] = LARGE_SCALE
    values = {name: value for name, value in values.items() if not name.endswith("_sha256")}  # of the unchanged file
    state.write_text(json.dumps(values))
    code = code or job.run(job.case.steps, "--resume", job.out)
    if not any(row.get("skipped") for row in job.rows()):
        raise RunFailed("no step overflowed")
    return code


# -- the list of runs -------------------------------------------------------------------------------------------------


def cpu_cases():
    """`tiny`, 50 steps, on stages 0 and 1. --micro-shards is the flag's name that all versions accept."""
    tiny = Case("", 0, ("--preset", "tiny", "--threads", "1"), straight, 50)

    def case(name, *flags, **fields):
        return replace(tiny, name=name, flags=(*tiny.flags, *flags), **fields)

    def on_ranks(ranks, *flags):
        return case(f"stage 1, {ranks} ranks {' '.join(flags)}", *flags, stage=1, ranks=ranks)

    recipe = ("--clip", "0.5", "--weight-decay", "0.1", "--schedule", "cosine", "--shuffle", "--val-fraction", "0.1")
    yield case("stage 0")
    yield case("stage 0, 2 threads", "--threads", "2")
    yield case("stage 0, clip, decay, cosine, shuffle, validation", *recipe)
    yield case("stage 0, --micro-shards 4 --no-deterministic", "--micro-shards", "4", "--no-deterministic")
    yield case("stage 0, resumed", *recipe, how=resumed)
    yield case("stage 0, resumed from the other checkout", *recipe, "--micro-shards", "4", how=handed_over)
    yield case("stage 0, SIGTERM, resumed", *recipe, how=stopped)
    yield case("stage 0, diverges", "--lr", "1e6", fails=True)
    for ranks in (1, 2, 4):
        for dp in ("naive", "flat", "overlap", "bucket"):
            for zero in ("0", "1"):
                yield on_ranks(ranks, "--dp", dp, "--zero", zero, "--bucket-mb", "0.1")
    for compress in ("fp16", "bf16", "int8"):
        yield on_ranks(2, "--compress", compress)
    for dp in ("flat", "bucket"):
        yield on_ranks(2, "--dp", dp, "--zero", "1", "--zero-gather", "forward", "--bucket-mb", "0.1")
    yield on_ranks(2, "--tp", "2", "--clip", "0.5")
    yield on_ranks(4, "--tp", "2", "--zero", "1", "--clip", "0.5")
    yield case("stage 1, 2 ranks, resumed", *recipe, "--zero", "1", stage=1, ranks=2, how=resumed)
    yield case("stage 1, 2 ranks, SIGTERM, resumed", *recipe, stage=1, ranks=2, how=stopped)
    yield case("stage 1, 2 ranks, diverges", "--lr", "1e6", stage=1, ranks=2, fails=True)


def gpu_cases(gpus):
    """`paper`, 20 steps with --deterministic in each precision; gpt2 in bf16; stage 3 if there are two GPUs."""
    paper = Case("", 2, ("--preset", "paper", "--deterministic"), straight, 20)

    def case(name, *flags, **fields):
        return replace(paper, name=name, flags=(*paper.flags, *flags), **fields)

    for precision in ("fp32", "bf16", "fp16"):
        yield case(f"stage 2, paper {precision}", "--precision", precision, "--clip", "0.5")
    yield case("stage 2, paper bf16, --rounding stochastic", "--precision", "bf16", "--rounding", "stochastic")
    yield case("stage 2, paper fp16, forced overflow", "--precision", "fp16", "--clip", "0.5", how=overflowing)
    yield case("stage 2, paper bf16, resumed", "--precision", "bf16", how=resumed)
    yield case("stage 2, paper bf16, resumed from the other checkout", "--precision", "bf16", how=handed_over)
    yield case("stage 2, paper fp32, no graph", "--no-graph")
    # The rate rises slowly, so that the loss becomes infinite after the graph is captured, with a step in flight.
    late = ("--schedule", "linear", "--warmup", "20", "--lr", "1e12")
    yield case("stage 2, paper fp32, diverges with a step in flight", *late, fails=True)
    gpt2 = ("--preset", "gpt2", "--precision", "bf16", "--clip", "1.0", "--batch-size", "8")
    yield replace(case("stage 2, gpt2 bf16 --clip 1.0", *gpt2), steps=6)
    if gpus >= 2:
        for flags in (
            (), ("--dp", "bucket"), ("--zero", "1"), ("--zero", "1", "--zero-gather", "forward"),
            ("--tp", "2"), ("--compress", "bf16"), ("--compress", "int8"), ("--precision", "bf16", "--clip", "0.5"),
        ):  # fmt: skip
            yield case(" ".join(("stage 3, 2 GPUs", *flags)), *flags, stage=3, ranks=2)


def play(case, checkout, other):
    """Run a case in one checkout -> Outcome."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(case, checkout, other, Path(directory))
        try:
            code = case.how(job)
        except RunFailed as error:
            return Outcome(-1, [], str(error))
        return Outcome(code, job.rows(), job.error)


def compare_bits(cases, other):
    """-> a table row for each case; prints progress."""
    rows = []
    for case in cases:
        began = time.monotonic()
        theirs, ours = play(case, other, other), play(case, ROOT, other)
        result = ours.difference(theirs) or "equal"
        if result == "equal" and case.fails != bool(ours.code):
            result = f"exit code {ours.code} in both: {ours.error}"
        rows.append({"run": case.name, "steps": len(ours.rows), "exit code": ours.code, "result": result})
        print(f"{time.monotonic() - began:6.1f} s  {case.name}: {result}", file=sys.stderr, flush=True)
    return rows


# -- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """A command whose time is compared; `bound` is the least ratio of the other checkout's time to this one's."""

    name: str
    words: tuple
    bound: float


def train_timing(name, stage, steps, bound, *flags):
    script = ("-m", f"{STAGES[stage]}.train_gpt2", "--sample", "0", "--steps", str(steps))
    return Timing(f"{name}, seconds a step", (*script, *flags), bound)


def decode_timing(name, stage, tokens, bound, *flags):
    script = ("-m", f"{STAGES[stage]}.inference", "--stats", "--max-new-tokens", str(tokens))
    return Timing(f"{name}, seconds a token", (*script, *flags), bound)


def cpu_timings():
    for threads in ("1", "2"):
        yield train_timing(f"stage 0, paper, {threads} threads", 0, 20, 0.97, "--preset", "paper", "--threads", threads)
    yield decode_timing("stage 0, decode", 0, 100, 0.97, "--threads", "1")


def gpu_timings(gpus):
    for preset, flags in (("paper", ()), ("paper", ("--precision", "bf16")), ("gpt2", ("--precision", "bf16"))):
        yield train_timing(" ".join(("stage 2", preset, *flags)), 2, 100, 0.99, "--preset", preset, *flags)
    yield decode_timing("stage 2, decode", 2, 200, 0.99)
    if gpus >= 2:
        launch = ("-m", "stage1_mpi.launch", "-n", "2", "--")
        for preset in ("paper", "gpt2"):
            flags = ("--preset", preset, "--precision", "bf16")
            timing = train_timing(f"stage 3, 2 GPUs, {preset} bf16", 3, 100, 0.99, *flags)
            yield replace(timing, words=(*launch, *timing.words))


# Runs a training script and writes the times at which its steps are reported: the log's own figures may mean different
# things in two versions. Arguments: the file to write, the module, its flags.
TIMED = """
import atexit, json, pathlib, runpy, sys, time
import gpt2core
if (pathlib.Path(gpt2core.__file__).parent / "app").exists():
    from gpt2core.app.run_log import RunLog
else:  # before the restructuring
    from gpt2core.runlog import RunLog
file, module, times, report = sys.argv[1], sys.argv[2], [], RunLog.__call__

def timed(self, *arguments):
    times.append(time.perf_counter())
    return report(self, *arguments)

RunLog.__call__ = timed
atexit.register(lambda: times and json.dump(times, open(file, "w")))  # of several ranks only the root reports
sys.argv = sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def seconds(timing, checkout):
    """Run a timing in one checkout -> its median seconds from report to report, or seconds a token (from --stats)."""
    with tempfile.TemporaryDirectory() as directory:
        log, words = Path(directory) / "times.json", timing.words
        if "--steps" in words:
            at = max(number for number, word in enumerate(words) if word == "-m")  # that of the script
            script = Path(directory) / "timed.py"
            script.write_text(TIMED)
            words = (*words[:at], str(script), str(log), *words[at + 1 :])
        process = start(words, checkout)
        out, error = communicate(process)
        if process.returncode:
            raise RunFailed(f"{timing.name} in {checkout}: {error.strip()}")
        if log.exists():
            times = json.loads(log.read_text())[WARM_UP:]
            return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
        return float(re.search(r"([\d.]+) ms/token", out)[1]) / 1000


def compare_speed(timings, other, rounds):
    """-> a table row for each timing. The checkouts take turns A B B A, so that a slow drift hits both alike."""
    rows = []
    for timing in timings:
        found = {ROOT: [], other: []}
        for index in range(rounds):
            for checkout in (ROOT, other) if index % 2 else (other, ROOT):
                found[checkout].append(seconds(timing, checkout))
        ours, theirs = (statistics.median(found[checkout]) for checkout in (ROOT, other))
        ratio = statistics.median(a / b for a, b in zip(found[other], found[ROOT], strict=True))
        row = {"what": timing.name, "other": f"{theirs:.6f}", "here": f"{ours:.6f}", "ratio": f"{ratio:.3f}"}
        rows.append(row | {"at least": timing.bound, "result": "holds" if ratio >= timing.bound else "slower"})
        print(f"{timing.name}: {ratio:.3f}", file=sys.stderr, flush=True)
    return rows


# -- the command ------------------------------------------------------------------------------------------------------


def save(rows, other, name, of_commit):
    """Write the table to results/{name}.json, with date, commits and hardware."""
    path = ROOT / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "tests/tools/compare_checkouts.py", "OTHER", *sys.argv[2:]])
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": of_commit,
        "other_commit": commit_of(other),
        "command": command,
        "hardware": hardware(),
        "results": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nWritten to {path.relative_to(ROOT)}.")


def commit_of(checkout):
    """The commit of a checkout, "unknown" if it is a copy without its repository."""
    done = subprocess.run(["git", "-C", str(checkout), "describe", "--always"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("other", type=Path, help="the root of the other checkout, for example of the previous release")
    add("--gpu", action="store_true", help="compare stages 2 and 3 instead of stages 0 and 1")
    add("--gpus", type=int, default=1, help="GPUs; stage 3 is compared if there are two (default 1)")
    add("--only", default="", metavar="TEXT", help="compare only what has this text in its name")
    add("--speed", action="store_true", help="compare times instead of bits")
    add("--rounds", type=int, default=4, help="runs of each checkout with --speed (default 4)")
    add("--commit", help="the commit of this checkout, if it is a copy without its repository")
    add("--save", action="store_true", help="write the table to results/")
    args = parser.parse_args()
    other = args.other.resolve()
    if not (other / "gpt2core").is_dir():
        parser.error(f"other {args.other}: has no directory gpt2core; give the root of a checkout")

    if args.speed:
        items = gpu_timings(args.gpus) if args.gpu else cpu_timings()
    else:
        items = gpu_cases(args.gpus) if args.gpu else cpu_cases()
    items = [item for item in items if args.only in item.name]
    rows = compare_speed(items, other, args.rounds) if args.speed else compare_bits(items, other)
    print_table(rows)
    good = [row for row in rows if row["result"] in ("equal", "holds")]
    print(f"\n{len(good)} of {len(rows)} {'hold their bound' if args.speed else 'are equal, bit for bit'}")
    if args.save:
        name = "same_speed" if args.speed else "same_bits"
        save(rows, other, f"{'gpu' if args.gpu else 'cpu'}/{name}", args.commit or commit())
    return int(len(good) < len(rows))


if __name__ == "__main__":
    sys.exit(main())

"""Compare two checkouts of this repository: the bits of their training runs, or with --speed the time they take.

    python tests/tools/compare_checkouts.py ../previous                       # stages 0 and 1
    python tests/tools/compare_checkouts.py ../previous --gpu --gpus 2 --save # stage 2, and stage 3 on two GPUs
    python tests/tools/compare_checkouts.py ../previous --speed

"This" checkout is the one that contains this file; the argument is the other checkout. Both run the same command lines.
Every loss, gradient norm and learning rate of the two logs, the hash of the final parameters and the exit codes of the
runs must be equal. The exit code of this script is 1 if a run differs or, with --speed, if this checkout is slower than
a bound allows.
"""

import json
import math
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

from benchmarks.harness.processes import run_main  # noqa: E402
from benchmarks.harness.report import BenchmarkParser, commit, hardware, print_table  # noqa: E402

STAGES = ["stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda"]
FIELDS = ("step", "loss", "grad_norm", "lr", "val_loss", "loss_scale", "skipped")  # compared in every row of the log
HASH = "parameters_sha256"  # compared in the last row
WARM_UP = 3  # steps that are not timed
STATS = r"new tokens (\d+) \| time to first token ([\d.]+) ms .* total ([\d.]+) s"  # of inference.py --stats
TIMEOUT = 600  # seconds for one run
LARGE_SCALE = 2.0**30  # an fp16 loss scale with which gradients overflow


class RunFailed(Exception):
    """A run gave no result: it took too long, or it ended before it received its signal."""


@dataclass(frozen=True)
class Case:
    """A training with train_gpt2.py, in one run or in several."""

    name: str
    stage: int
    flags: tuple
    procedure: object  # runs train_gpt2.py for a Job and returns its last exit code: straight(), resumed(), ...
    steps: int
    ranks: int = 0  # 0: start train_gpt2.py without a launcher
    fails: bool = False  # whether the training must end with an error
    fields: tuple = FIELDS


@dataclass(frozen=True)
class Outcome:
    """The result of a case in one checkout."""

    code: int  # exit code
    rows: list  # of the log
    error: str  # the last line of standard error

    def difference(self, other, fields=FIELDS):
        """The first difference of `fields` from `other`, the outcome in the other checkout, as text, or ""."""
        if self.code != other.code:
            return f"exit code {other.code}, here {self.code}: {self.error or other.error}"
        if len(self.rows) != len(other.rows):
            return f"{len(other.rows)} steps, here {len(self.rows)}: {self.error or other.error}"
        for row, other_row in zip(self.rows, other.rows, strict=True):
            for field in fields:
                if repr(row.get(field)) != repr(other_row.get(field)):  # repr, because NaN != NaN
                    return f"step {row['step']}: {field} {other_row.get(field)}, here {row.get(field)}"
        hashes = [rows[-1].get(HASH) if rows else None for rows in (self.rows, other.rows)]
        return "" if hashes[0] == hashes[1] else f"{HASH} differs"


class Job:
    """One case in one checkout, with a directory for its log and its checkpoints."""

    def __init__(self, case, checkout, other, directory):
        self.case, self.checkout, self.other = case, checkout, other
        self.log, self.out, self.error = directory / "log.jsonl", directory / "out", ""

    def start(self, steps, *flags, checkout=None):
        """Start train_gpt2.py in `checkout`, by default the job's; return its process."""
        script = ["-m", f"{STAGES[self.case.stage]}.train_gpt2"]
        launch = ["-m", "stage1_mpi.launch", "-n", str(self.case.ranks), "--"] if self.case.ranks else []
        run = ["--out", str(self.out), "--steps", str(steps), "--sample", "0", "--log", str(self.log)]
        run += map(str, flags)  # they may have another --out
        return start([*launch, *script, *self.case.flags, *run], checkout or self.checkout)

    def run(self, steps, *flags, checkout=None):
        """Run train_gpt2.py until it ends; return its exit code."""
        process = self.start(steps, *flags, checkout=checkout)
        error = communicate(process)[1]
        self.error = (error.strip().splitlines() or [""])[-1]
        return process.returncode

    def lines(self):
        """The complete lines of the log so far."""
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def rows(self):
        """The rows of the log, after the run has ended."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def start(arguments, checkout, pipes=()):
    """Start Python with these arguments and the modules of a checkout; return its process. pipes: ends that it uses."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=checkout, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, pass_fds=pipes,
    )  # fmt: skip


def communicate(process):
    """Wait until the process ends; return (standard output, standard error).

    Raises RunFailed after TIMEOUT seconds, and kills the process.
    """
    try:
        return process.communicate(timeout=TIMEOUT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RunFailed(f"no end after {TIMEOUT} s") from None
        raise


# -- the procedures of the cases --------------------------------------------------------------------------------------


def straight(job):
    """Train all steps in one run."""
    return job.run(job.case.steps)


def resumed(job):
    """Train half of the steps, then resume for the other half."""
    return job.run(job.case.steps // 2, "--out", job.out) or job.run(job.case.steps, "--resume", job.out)


def resumed_from_other(job):
    """Train half of the steps with the other checkout, then resume: tests that its checkpoints can be read."""
    code = job.run(job.case.steps // 2, "--out", job.out, checkout=job.other)
    return code or job.run(job.case.steps, "--resume", job.out)


def stopped(job):
    """Stop a run by SIGTERM after some steps, then resume."""
    process = job.start(job.case.steps, "--out", job.out)
    while len(job.lines()) < job.case.steps // 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    communicate(process)
    if process.returncode != 128 + signal.SIGTERM:
        raise RunFailed(f"exit code {process.returncode} after SIGTERM")
    return job.run(job.case.steps, "--resume", job.out)


def overflowing(job):
    """Train half of the steps in fp16, make the loss scale so large that gradients overflow, then resume."""
    code = job.run(job.case.steps // 2, "--out", job.out)
    state_file = job.out / "latest" / "state.json"
    state = json.loads(state_file.read_text())
    state["loss_scale"]["factor"] = LARGE_SCALE
    state = {name: value for name, value in state.items() if not name.endswith("_sha256")}  # hashes of the old values
    state_file.write_text(json.dumps(state))
    code = code or job.run(job.case.steps, "--resume", job.out)
    if not any(row.get("skipped") for row in job.rows()):
        raise RunFailed("no step overflowed")
    return code


# -- the lists of cases -----------------------------------------------------------------------------------------------


def cpu_cases():
    """Yield Cases of preset `tiny`, 50 steps, on stages 0 and 1.

    --micro-shards is the old name of --micro-batches, which all versions accept.
    """
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
    yield case("stage 0, resumed", *recipe, procedure=resumed)
    flags = *recipe, "--micro-shards", "4"
    yield case("stage 0, resumed from the other checkout", *flags, procedure=resumed_from_other)
    # a run that is stopped also validates at its last step, which differs between two starts
    trained = tuple(field for field in FIELDS if field != "val_loss")
    yield case("stage 0, SIGTERM, resumed", *recipe, procedure=stopped, fields=trained)
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
    yield case("stage 1, 2 ranks, resumed", *recipe, "--zero", "1", stage=1, ranks=2, procedure=resumed)
    yield case("stage 1, 2 ranks, SIGTERM, resumed", *recipe, stage=1, ranks=2, procedure=stopped, fields=trained)
    yield case("stage 1, 2 ranks, diverges", "--lr", "1e6", stage=1, ranks=2, fails=True)


def gpu_cases(gpus):
    """Yield Cases of `paper`, 20 steps with --deterministic in each precision; of gpt2 in bf16; of stage 3.

    The cases of stage 3 need two GPUs.
    """
    paper = Case("", 2, ("--preset", "paper", "--deterministic"), straight, 20)

    def case(name, *flags, **fields):
        return replace(paper, name=name, flags=(*paper.flags, *flags), **fields)

    for precision in ("fp32", "bf16", "fp16"):
        yield case(f"stage 2, paper {precision}", "--precision", precision, "--clip", "0.5")
    yield case("stage 2, paper bf16, --rounding stochastic", "--precision", "bf16", "--rounding", "stochastic")
    yield case("stage 2, paper fp16, forced overflow", "--precision", "fp16", "--clip", "0.5", procedure=overflowing)
    bf16 = "--precision", "bf16"
    yield case("stage 2, paper bf16, resumed", *bf16, procedure=resumed)
    yield case("stage 2, paper bf16, resumed from the other checkout", *bf16, procedure=resumed_from_other)
    yield case("stage 2, paper fp32, no graph", "--no-graph")
    # The learning rate rises in 20 steps. So the loss becomes infinite only after the graph was captured, when the next
    # step is already launched (in flight).
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


def run_case(case, checkout, other):
    """Run a case in `checkout`, this one or the other one; return its Outcome."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(case, checkout, other, Path(directory))
        try:
            code = case.procedure(job)
        except RunFailed as error:
            return Outcome(-1, [], str(error))
        return Outcome(code, job.rows(), job.error)


def compare_bits(cases, other):
    """Run each case in both checkouts, and print its result. Returns the rows of the table."""
    rows = []
    for case in cases:
        began = time.monotonic()
        other_outcome, outcome = run_case(case, other, other), run_case(case, ROOT, other)
        result = outcome.difference(other_outcome, case.fields) or "equal"
        if result == "equal" and case.fails != bool(outcome.code):
            result = f"exit code {outcome.code} in both: {outcome.error}"
        rows.append({"run": case.name, "steps": len(outcome.rows), "exit code": outcome.code, "result": result})
        print(f"{time.monotonic() - began:6.1f} s  {case.name}: {result}", file=sys.stderr, flush=True)
    return rows


# -- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """A command whose time is compared."""

    name: str
    arguments: tuple  # of Python
    bound: float  # smallest accepted ratio: time in the other checkout / time in this checkout
    in_turns: bool = False  # whether the two checkouts run at the same time and take turns, step by step


def train_timing(name, stage, steps, bound, *flags):
    """The Timing of a training with `steps` steps. On a CPU each step ends before the next one, so they take turns."""
    script = ("-m", f"{STAGES[stage]}.train_gpt2", "--sample", "0", "--steps", str(steps))
    return Timing(f"{name}, seconds per step", (*script, *flags), bound, in_turns=stage == 0)


def decode_timing(name, stage, tokens, bound, *flags):
    """The Timing of an inference with `tokens` new tokens."""
    model = ("--weights", "data/gpt2-paper", "--max-new-tokens", str(tokens))
    script = ("-m", f"{STAGES[stage]}.inference", "--stats", *model)
    return Timing(f"{name}, seconds per token", (*script, *flags), bound)


def cpu_timings():
    for preset, steps in (("paper", 40), ("tiny", 400)):
        for threads in ("1", "2"):
            name = f"stage 0, {preset}, {threads} threads"
            yield train_timing(name, 0, steps, 0.98, "--preset", preset, "--threads", threads)
    yield decode_timing("stage 0, decode", 0, 100, 0.98, "--threads", "1")


def gpu_timings(gpus):
    for preset, flags in (("paper", ()), ("paper", ("--precision", "bf16")), ("gpt2", ("--precision", "bf16"))):
        yield train_timing(" ".join(("stage 2", preset, *flags)), 2, 100, 0.99, "--preset", preset, *flags)
    yield decode_timing("stage 2, decode", 2, 2000, 0.99)
    if gpus >= 2:
        launch = ("-m", "stage1_mpi.launch", "-n", "2", "--")
        for preset in ("paper", "gpt2"):
            flags = ("--preset", preset, "--precision", "bf16")
            timing = train_timing(f"stage 3, 2 GPUs, {preset} bf16", 3, 100, 0.99, *flags)
            yield replace(timing, arguments=(*launch, *timing.arguments))


# A program that runs a training module and writes the seconds of each step, from the times at which steps are logged.
# The seconds in the log are not used, because their meaning may differ between two versions. Its arguments: the file to
# write; the pipes on which it says that a step has ended and waits for its turn, or "" twice; the module and its flags.
TIMING_PROGRAM = """
import atexit, json, os, runpy, sys, time
try:
    from gpt2core.app.output.run_log import RunLog
except ImportError:  # an older checkout
    from gpt2core.app.run_log import RunLog
file, ended, turn, module = sys.argv[1:5]
begin, seconds, report = [], [], RunLog.__call__

def timed(self, *arguments):
    if begin:
        seconds.append(time.perf_counter() - begin.pop())
    if turn:
        os.write(int(ended), b"x")
        os.read(int(turn), 1)
    begin.append(time.perf_counter())
    return report(self, *arguments)

RunLog.__call__ = timed
atexit.register(lambda: seconds and json.dump(seconds, open(file, "w")))  # only rank 0 has some
sys.argv = sys.argv[4:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def timed(timing, directory, ended="", turn=""):
    """The arguments of Python for a Timing of a training: with TIMING_PROGRAM, which writes directory/seconds.json."""
    # replace the last -m, that of the training module; the launcher has another one
    index = max(number for number, argument in enumerate(timing.arguments) if argument == "-m")
    program = directory / "timed.py"
    program.write_text(TIMING_PROGRAM)
    first = map(str, (program, directory / "seconds.json", ended, turn))
    # an older checkout has no --no-save
    return (*timing.arguments[:index], *first, *timing.arguments[index + 1 :], "--out", str(directory / "run"))


def output_of(process, timing, checkout):
    """The standard output of a process. Raises RunFailed unless its exit code is 0."""
    out, error = communicate(process)
    if process.returncode:
        raise RunFailed(f"{timing.name} in {checkout}: {error.strip()}")
    return out


def means_of_two(numbers):
    """The means of numbers 0 and 1, of 2 and 3, ..."""
    return [(a + b) / 2 for a, b in zip(numbers[::2], numbers[1::2], strict=False)]


def seconds_of_steps(directory):
    return json.loads((directory / "seconds.json").read_text())[WARM_UP:]


def measure(timing, checkout):
    """Run a Timing in one checkout; return the median seconds per step, or the seconds per token (from --stats)."""
    with tempfile.TemporaryDirectory() as directory:
        if "--steps" in timing.arguments:
            output_of(start(timed(timing, Path(directory)), checkout), timing, checkout)
            return statistics.median(seconds_of_steps(Path(directory)))
        out = output_of(start(timing.arguments, checkout), timing, checkout)
        new, first, total = map(float, re.search(STATS, out).groups())
        return (total - first / 1000) / (new - 1)  # with more digits than ms/token has


def measure_in_turns(timing, checkouts):
    """Train in both checkouts, in turns A B B A, step by step; return {checkout: the mean seconds of each two steps}.

    The first step of a pair is slower, because the other process has used the caches; two steps contain one of each.
    """
    runs = {}  # {checkout: (process, directory, pipe for "a step has ended", pipe for "begin the next one")}
    with tempfile.TemporaryDirectory() as parent:
        for number, checkout in enumerate(checkouts):
            (ended, to_parent), (from_parent, turn) = os.pipe(), os.pipe()
            directory = Path(parent) / str(number)
            directory.mkdir()
            process = start(timed(timing, directory, to_parent, from_parent), checkout, (to_parent, from_parent))
            os.close(to_parent)
            os.close(from_parent)
            runs[checkout] = process, directory, ended, turn
        order = list(runs)
        running = all(os.read(runs[checkout][2], 1) for checkout in order)  # the first step of both has ended
        while running:
            for _, _, ended, turn in (runs[checkout] for checkout in order):
                os.write(turn, b"x")
                running = bool(os.read(ended, 1)) and running  # no byte: the process has ended
            order.reverse()
        for checkout, (process, _, ended, turn) in runs.items():
            os.close(ended)
            os.close(turn)  # a run that still waits goes on
            output_of(process, timing, checkout)
        return {checkout: means_of_two(seconds_of_steps(runs[checkout][1])) for checkout in checkouts}


def measure_by_run(timing, checkouts, rounds):
    """Run a Timing `rounds` times in each checkout, in the order A B B A; return {checkout: the seconds of each run}.

    In this order a slow change of the machine affects both equally.
    """
    seconds = {checkout: [] for checkout in checkouts}
    for index in range(rounds):
        for checkout in checkouts if index % 2 else reversed(checkouts):
            seconds[checkout].append(measure(timing, checkout))
    return seconds


def compare_speed(timings, other, rounds):
    """Measure each Timing in both checkouts, and print its ratio. Returns the rows of the table."""
    rows = []
    for timing in timings:
        both = (ROOT, other)
        seconds = measure_in_turns(timing, both) if timing.in_turns else measure_by_run(timing, both, rounds)
        here, there = (statistics.median(seconds[checkout]) for checkout in both)
        ratios = [a / b for a, b in zip(seconds[other], seconds[ROOT], strict=True)]
        ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
        row = {"what": timing.name, "other": f"{there:.6f}", "here": f"{here:.6f}", "pairs": len(ratios)}
        row |= {"ratio": f"{ratio:.3f}", "interval": f"{low:.3f} to {high:.3f}", "at least": timing.bound}
        rows.append(row | {"result": "holds" if ratio >= timing.bound else "slower"})
        print(f"{timing.name}: {ratio:.3f} of {', '.join(f'{a:.3f}' for a in ratios)}", file=sys.stderr, flush=True)
    return rows


def median_interval(samples):
    """Two of the samples, between which the median of all possible samples lies with a probability of at least 95 %.

    The interval leaves out the same number of samples at each end. The number of samples below the median has a
    binomial distribution with probability 1/2. With fewer than 6 samples the interval is wider than all of them, so
    the smallest and the largest sample are returned.
    """
    ordered, count, below, left_out = sorted(samples), len(samples), 0, 0
    for number in range(count // 2):
        below += math.comb(count, number) / 2**count
        if below > 0.025:
            break
        left_out = number + 1
    first = max(left_out - 1, 0)
    return ordered[first], ordered[count - 1 - first]


# -- the command ------------------------------------------------------------------------------------------------------


def save(rows, other, name, this_commit):
    """Write the table to results/{name}.json, with date, both commits and hardware."""
    path = ROOT / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "tests/tools/compare_checkouts.py", "OTHER", *sys.argv[2:]])
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": this_commit,
        "other_commit": commit_of(other),
        "command": command,
        "hardware": hardware(),
        "results": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nWritten to {path.relative_to(ROOT)}.")


def commit_of(checkout):
    """The commit of a checkout; "unknown" if the checkout has no .git."""
    done = subprocess.run(["git", "-C", str(checkout), "describe", "--always"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main():
    parser = BenchmarkParser(__doc__.splitlines()[0], usage="%(prog)s OTHER [flags]")
    add = parser.add_argument
    add("other", type=Path, help="the root of the other checkout, for example of the previous release")
    add("--gpu", action="store_true", help="compare stages 2 and 3 instead of stages 0 and 1")
    add("--gpus", type=int, default=1, help="GPUs; stage 3 is compared if there are two (default 1)")
    add("--only", default="", metavar="TEXT", help="compare only the runs whose names contain this text")
    add("--speed", action="store_true", help="compare times instead of bits")
    add(
        "--rounds",
        type=int,
        default=4,
        help="with --speed: runs of each command that is not measured step by step (default 4)",
    )
    add("--commit", help="the commit of this checkout, if the checkout has no .git")
    add("--save", action="store_true", help="write the table to results/")
    args = parser.parse_args()
    other = args.other.resolve()
    if not (other / "gpt2core").is_dir():
        parser.error(f"other {args.other}: has no directory gpt2core; give the root of a checkout")
    if other == ROOT:
        parser.error(f"other {args.other}: is this checkout; give the root of another checkout")

    if args.speed:
        items = gpu_timings(args.gpus) if args.gpu else cpu_timings()
    else:
        items = gpu_cases(args.gpus) if args.gpu else cpu_cases()
    items = [item for item in items if args.only in item.name]
    rows = compare_speed(items, other, args.rounds) if args.speed else compare_bits(items, other)
    print_table(rows)
    good = [row for row in rows if row["result"] in ("equal", "holds")]
    print(f"\n{len(good)} of {len(rows)} {'are within their bound' if args.speed else 'are bitwise identical'}")
    if args.save:
        name = "same_speed" if args.speed else "same_bits"
        save(rows, other, f"{'gpu' if args.gpu else 'cpu'}/{name}", args.commit or commit())
    return int(len(good) < len(rows))


if __name__ == "__main__":
    run_main(main, measures_time=False)

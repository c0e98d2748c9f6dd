"""Kill a resumed run at random moments of its start, many times: does its log keep all rows up to the checkpoint?

    python tests/tools/kill_at_start.py --times 50 --rows 50000

Each run resumes from the files that the killed run has left. The exit code is 1 if a row was lost or changed, or if the
steps in the log are not consecutive.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from benchmarks.harness.processes import run_main  # noqa: E402
from benchmarks.harness.report import BenchmarkParser  # noqa: E402
from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint  # noqa: E402
from gpt2core.app.output.run_log import read_log  # noqa: E402
from gpt2core.text.tokenizer import Tokenizer  # noqa: E402

TRAIN = (sys.executable, "-m", "stage0_serial.train_gpt2")


def prepare(directory, rows):
    """Make the files of a run whose checkpoint has `rows` steps; return (its --out directory, its log).

    The log has 1,000 further rows, as after a run that was killed between two checkpoints. A run of two steps gives the
    contents of the checkpoint and the fields of the rows.
    """
    short_out, short_log = directory / "short", directory / "short.jsonl"
    flags = "--preset", "nano", "--steps", 2, "--sample", 0, "--out", short_out, "--log", short_log
    subprocess.run([*TRAIN, *map(str, flags)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    short, row = load_checkpoint(short_out, with_optimizer=True), read_log(short_log)[0]
    last_row = {"step": rows - 1, "loss": row["loss"]}
    save_checkpoint(
        directory / "run", rows, config=short.config, parameters=short.parameters, moments=short.moments,
        tokenizer=Tokenizer.load(short.path),
        state=short.state | {"step": rows, "position": 4 * rows, "last_log_row": last_row},
    )  # fmt: skip
    log = directory / "run.jsonl"
    log.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(rows + 1000)))
    return directory / "run", log


def start(out, log, *flags):
    """Start a training that resumes from `out` and continues `log`; return its process."""
    command = [*TRAIN, "--resume", out, "--out", out, "--log", log, "--sample", "0", *flags]
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main():
    parser = BenchmarkParser(__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50, help="runs to kill (default 50)")
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the log up to the checkpoint (default 50000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed for the times of the kills (default 0)")
    args = parser.parse_args()
    rng, lost, consecutive = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        out, log = prepare(Path(directory), args.rows)
        rows_of_checkpoint = b"".join(log.read_bytes().splitlines(keepends=True)[: args.rows])
        began = time.monotonic()
        if start(out, log, "--steps", args.rows + 5).wait():
            sys.exit("a run failed although it was not killed")
        run_seconds = time.monotonic() - began
        for _ in range(args.times):
            with start(out, log, "--steps", args.rows + 10**6) as process:
                time.sleep(rng.uniform(0, run_seconds))
                process.kill()
            lost += not log.read_bytes().startswith(rows_of_checkpoint)
            steps = [row["step"] for row in read_log(log)]
            consecutive += steps == list(range(len(steps)))
    killed = f"{args.times} runs killed within {run_seconds:.1f} s of their start"
    print(f"{killed}: {lost} lost or changed one of the {args.rows:,} rows up to the checkpoint;")
    print(f"{consecutive} left a log of consecutive steps")
    return 1 if lost or consecutive < args.times else 0


if __name__ == "__main__":
    run_main(main, measures_time=False)

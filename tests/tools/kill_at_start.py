"""Kill a resumed run at random moments of its start, again and again: does its log keep every row of the checkpoint?

    python tests/tools/kill_at_start.py --times 50 --rows 50000

Each run continues what the killed one has left. The exit code is 1 if a row was lost or changed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from gpt2core.app.checkpoint_directory import load_checkpoint, save_checkpoint  # noqa: E402
from gpt2core.app.run_log import read_log  # noqa: E402
from gpt2core.text.tokenizer import Tokenizer  # noqa: E402

TRAIN = (sys.executable, "-m", "stage0_serial.train_gpt2")


def prepare(home, rows):
    """(checkpoint directory, log) of a run that has made `rows` steps; the log has 1,000 rows more."""
    flags = "--preset", "nano", "--steps", 2, "--sample", 0, "--out", home / "begun", "--log", home / "begun.jsonl"
    subprocess.run([*TRAIN, *map(str, flags)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    begun, row = load_checkpoint(home / "begun", with_optimizer=True), read_log(home / "begun.jsonl")[0]
    recorded = {"step": rows - 1, "loss": row["loss"]}
    save_checkpoint(
        home / "run", rows, config=begun.config, parameters=begun.parameters, moments=begun.moments,
        tokenizer=Tokenizer.load(begun.path),
        state=begun.state | {"step": rows, "position": 4 * rows, "last_log_row": recorded},
    )  # fmt: skip
    log = home / "run.jsonl"
    log.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(rows + 1000)))
    return home / "run", log


def start(out, log, *flags):
    command = [*TRAIN, "--resume", out, "--out", out, "--log", log, "--sample", "0", *flags]
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50, help="runs to kill (default 50)")
    parser.add_argument("--rows", type=int, default=50_000, help="rows that precede the checkpoint (default 50000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments (default 0)")
    args = parser.parse_args()
    choice, lost, continued = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as home:
        out, log = prepare(Path(home), args.rows)
        kept = b"".join(log.read_bytes().splitlines(keepends=True)[: args.rows])
        began = time.monotonic()
        if start(out, log, "--steps", args.rows + 5).wait():
            sys.exit("a run failed although it was not killed")
        longest = time.monotonic() - began
        for _ in range(args.times):
            with start(out, log, "--steps", args.rows + 10**6) as process:
                time.sleep(choice.uniform(0, longest))
                process.kill()
            content = log.read_bytes()
            lost += not content.startswith(kept)
            steps = [row["step"] for row in read_log(log)]
            continued += steps == list(range(len(steps)))
    print(f"{args.times} runs killed within {longest:.1f} s of their start: {lost} lost a row of {args.rows:,};")
    print(f"{continued} left a log of consecutive steps")
    return 1 if lost or continued < args.times else 0


if __name__ == "__main__":
    sys.exit(main())

"""The paper's Table 1 on one machine: how long do 50 training steps and the inference take in each of the programs?

All programs train `paper` in fp32, then continue 256 tokens by 30 with the shipped weights. The start of a program and
the compilation are not part of a time. Stage 1 has the 8 ranks of the paper's command, stage 3 one rank for each GPU.

    python -m benchmarks.gpus.table_1                       # all four stages, on a machine with a GPU
    python -m benchmarks.gpus.table_1 --stages 0 1 --steps 2  # a trial on a CPU
"""

import statistics

from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import PACKAGES, inference_seconds, python_command, train
from benchmarks.paper import PROCESSES, SECONDS
from gpt2core.app.shipped import WEIGHTS
from gpt2core.errors import UserError, counted

INFERENCE = ["--weights", str(WEIGHTS), "--max-new-tokens", "30", "--stats"]


def measure(stage, args):
    """The row of a stage: seconds of the training, of a step, and ("seconds") of the inference; and of the paper."""
    package, ranks = PACKAGES[stage], {1: args.ranks, 3: args.gpus}.get(stage)
    name = f"stage {stage}" + (f", {counted(ranks, 'rank')}" if ranks else "")
    precision = {"precision": "fp32"} if stage >= 2 else {}
    for steps in (2, args.steps):  # the first run compiles and chooses kernels
        log, _ = train(name, package, args.timeout, ranks=ranks, preset="paper", steps=steps, **precision)
    infer = python_command(ranks, f"{package}.inference", *INFERENCE)
    seconds = [inference_seconds(name, infer, args.timeout)[0] for _ in range(1 + args.rounds)]
    paper = list(SECONDS.values())[stage]
    return {
        "name": name,
        "ranks": ranks,
        "training": sum(row["seconds"] for row in log),
        "step": statistics.median(row["seconds"] for row in log[1:]),
        "seconds": seconds[1:],  # the first run compiles kernels
        "paper": {"training": paper[0], "inference": paper[1]},
        "last_loss": log[-1]["loss"],
    }


@benchmark(
    "table-1",
    dict(steps=50, rounds=3, timeout=600),
    stages=dict(type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="stages to run (default all)"),
    ranks=dict(type=int, default=PROCESSES["command"], help="ranks of stage 1 (default 8)"),
)
def main(args):
    args.gpus = len(nvidia_smi("name"))
    if args.steps < 2:
        raise UserError(f"--steps {args.steps}: the time of a step is that of the second and later ones: use 2 or more")
    if max(args.stages) >= 2 and not args.gpus:
        raise UserError("this machine has no GPU, which stages 2 and 3 need: use --stages 0 1")
    return [measure(stage, args) for stage in args.stages]

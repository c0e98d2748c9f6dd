"""How close are the planner's predictions to the steps that were measured on GPUs?

The measured steps are those of the files in results/gpus: GPT-2 124M divided over data-parallel GPUs, gpt2-xl with
ZeRO-2 and ZeRO-3, and pipelines; no GPU is needed. The constants are the defaults of `python -m gpt2core.app.plan`.
They are those of the H100, and the steps were measured on H200s, which compute as fast and have a faster memory. The
step of GPT-2 124M on one GPU is not counted: after a comparison with it, the bytes that a block reads and writes were
counted again.

    python -m benchmarks.gpus.plan         # print the table
    python -m benchmarks.gpus.plan --save  # and write it to results/
"""

import shlex

from benchmarks.gpus import pipeline
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import load
from benchmarks.ranks.grid import PUBLISHED
from gpt2core.app.planning.layout import Layout
from gpt2core.app.planning.machine import h100
from gpt2core.app.planning.step_time import step_seconds
from gpt2core.parallel.config import ParallelConfig
from gpt2core.presets import PRESETS

SCALING = "scaling_strong", "scaling_strong_two", "scaling_16", "scaling_64", "scaling_64_two"
OTHERS = "deterministic", "compress", "zero_gather"  # options whose time the planner does not predict


def measured_steps():
    """Yield (name, measured seconds, Layout) of each step; with one micro-batch for each GPU, except in a pipeline."""
    for file in SCALING:
        for table in load(f"gpus/{file}")["results"]["scaling"]:
            for row in table["rows"]:
                if row["side"] == "ours" and row["ranks"] > 1 and not any(row.get(option) for option in OTHERS):
                    yield of_row(f"gpt2, {table['title']}, {row['name']}", "gpt2", row)
    for row in load("gpus/sharding")["results"]:
        if row["side"] == "ours":
            recompute = "block" if "--recompute block" in row["name"] else "none"
            yield of_row(f"gpt2-xl, {row['name']}", "gpt2-xl", row, recompute=recompute)
    for file in ("pipeline", "pipeline_4"):
        record = load(f"gpus/{file}")
        args = pipeline.main.parser.parse_args(shlex.split(record["command"])[3:])
        for row in record["results"]:
            parallel = ParallelConfig(pp=args.ranks, pp_schedule=row["schedule"])
            config = PRESETS[args.preset]
            sizes = args.batch_size, config.block_size, args.micro_batches
            layout = Layout(config, parallel, *sizes, compute_bytes=2)
            yield f"{args.preset}, {args.ranks} GPUs --pp-schedule {row['schedule']}", row["median"], layout


def of_row(name, preset, row, **options):
    """(name, measured seconds, Layout) of a row of a results file."""
    parallel = ParallelConfig(dp=row.get("dp", "flat"), zero=row.get("zero", 0), **options)
    sizes = row["batch_size"], row["seq_len"], row["ranks"], row["ranks"]
    return name, row["seconds"]["median"], Layout(PRESETS[preset], parallel, *sizes, compute_bytes=2)


@benchmark("gpus-plan")
def main(args):
    results = []
    for name, measured, layout in measured_steps():
        predicted = sum(step_seconds(layout, h100("bf16")).values())
        row = {"name": name, "measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        results.append(row)
    errors = [abs(row["error"]) for row in results]
    print(f"error of {len(errors)} steps: mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")
    print(f"published errors: {PUBLISHED}")
    return results

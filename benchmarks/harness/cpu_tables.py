"""The tables of docs/RESULTS.md about stages 0 and 1, and that of docs/TEACHING.md."""

from benchmarks.harness.speedups import rank_speedups
from benchmarks.harness.table_format import Table, fill, flat
from benchmarks.paper import LOSSES

STEPS = (*range(0, 50, 5), 49)  # columns of the loss curve
COLLECTIVES = "ranks/collectives", "ranks/collectives_16_cores"

# -- rows -------------------------------------------------------------------------------------------------------------


def curves(results):
    """The rows of the loss curve: the paper's, ours, and the deviation."""
    lines = {
        "paper, serial": (LOSSES["serial"], ".3f"),
        "ours": (results["losses"], ".3f"),
        "deviation": (results["deviations"], "+.1%"),
    }
    for name, (values, spec) in lines.items():
        yield {"step": name, **{str(step): format(values[step], spec) for step in STEPS}}


def beside_one_process(results):
    """The results of ranks/ranks.py, with their speed-ups over one process and over DDP."""
    checked = rank_speedups(results, next(iter(results[0]["times_as_fast"])))
    for result in results:
        one_process, *ddp = result["times_as_fast"].values()
        text = f"{one_process['median']:.2f}"
        marked = checked[result["name"]].cell(text) if result["name"] in checked else text
        yield result | {"one_process": marked, "ddp": ddp[0] if ddp else None}


def beside_the_library(results, *operations):
    """The rows of operations of ranks/collectives.py: the times of the MPI library, the ratios of others to it."""
    for operation in operations:
        rows = sorted(results.get(operation, []), key=lambda row: (row["algorithm"] != "mpi", row["algorithm"]))
        for row in rows:
            title, text = row["algorithm"], "{ratio_to_native:ratio}"
            if title == "mpi":
                title, text = "MPI library", "{seconds:ms 3} ms"
            yield row | {"operation": operation, "title": title, "text": fill(text, row)}


def validations(results):
    """The runs of ranks/convergence.py: the validation losses at some steps, and the difference from --shuffle."""
    for result in results:
        yield {
            "": f"`{result['name']}`" if "--" in result["name"] else result["name"],
            **{f"loss after {step + 1} steps": f"{loss:.3f}" for step, loss in result["val_losses"]},
            "difference, mean of the seeds": fill("{row.difference:+.4f}", result),
            "largest difference": fill("{row.largest_difference:+.4f}", result),
        }


def parity_runs(results):
    """The runs of ranks/parity.py, one row for each preset and number of ranks."""
    for preset, found in results.items():
        for ranks in sorted({run["ranks"] for run in found["runs"]}):
            runs = [run for run in found["runs"] if run["ranks"] == ranks]
            options = {name: " ".join(dict.fromkeys(str(run[name]) for run in runs)) for name in ("dp", "zero")}
            equal = f"{sum(run['difference'] is None for run in runs)} of {len(runs)}"
            yield {"preset": preset, "steps": len(found["losses"]), "ranks": ranks, "equal": equal, **options}


# -- tables -----------------------------------------------------------------------------------------------------------

FASTEST, CORES = "fastest step, ms = {min * 1e3:.4g}", "cores used = {cores_used:.2f}"  # on the console only
STRATEGIES = """
    {ranks} ranks = `{name}` | messages | MB sent per rank = {max(bytes_sent):MB .1f} | ms per step = {seconds:ms}
    time of this row / time of `--dp flat` = {times_flat:ratio} | quartiles = {times_flat:quartiles s 3}
    optimizer MiB per rank = {max(optimizer_bytes):memory}"""
KILLS = """
    runs with one killed rank = {times} | of these, runs that ended cleanly = {summary.clean_ends}
    median and longest time from the kill to the end = {summary.median_seconds:.2f} s, {summary.longest_seconds:.2f} s
    runs that left a readable checkpoint = {summary.readable}
    runs that were resumed and gave the losses of an uninterrupted run, bit for bit = {summary.equal}"""

TABLES = {
    **Table("cpu/train_step", """
        = {name} | threads | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
        times as fast as eager = {times_as_fast_as_eager:ratio}
        time of sgemm floor / time of this row = {share_of_floor:percent 0}
        cores used = {cores_used:.2f} | peak MiB = {peak_bytes:memory}""",
        console=f"{FASTEST} | imports MiB = {{import_bytes:memory}}",
    ).kinds("cpu-step", "zen3", "zen5", "intel", "gpt2"),
    **Table("cpu/choices", """
        choice = `{choice}` | naive, us = {naive_seconds:us} | ours, us = {our_seconds:us}
        times as fast = {gain:ratio}""").kinds("cpu-choices", "intel"),
    "first-run": Table(
        "cpu/first_run", "command = `{name}` | seconds = {value:s 3}", lambda results: flat(results["seconds"], "name")
    ),
    "classroom": Table("cpu/classroom", """
        command = {"`%s`" % name if name.startswith("make ") else name} | seconds = {seconds:s 2}
        peak MiB = {peak_bytes:memory}"""),
    **Table("cpu/decode", """
        = {case}, {name} | threads | tokens = {prompt} + {new}
        ms per token = {token:ms 3} | quartiles = {token:quartiles ms 3}
        first token, ms = {first:ms 3} | all tokens, s = {total:s 3}
        times as fast as torch = {times_as_fast_as_torch:ratio}
        times as fast as recomputing = {row.times_as_fast_as_recomputing:.1f} | peak MiB = {peak_bytes:memory}""",
        lambda results: (result for result in results if "batch" not in result), CORES,
    ).kinds("cpu-decode", "zen3", "zen5", "intel"),
    **Table("cpu/decode", """
        = {case}, {name} | threads | tokens = {batch} x ({prompt} + {new})
        tokens/s = {tokens_per_second:number} | quartiles = {tokens_per_second:quartiles}
        times as fast as torch = {tokens_per_second_to_torch:ratio}
        first tokens, ms = {first:ms 3} | ms per later step = {token:ms 3}
        a later step: times as fast as torch = {times_as_fast_as_torch:ratio} | peak MiB = {peak_bytes:memory}""",
        lambda results: (result for result in results if "batch" in result), CORES,
    ).kinds("cpu-decode-batch", "zen3", "zen5", "intel"),
    "cpu-deployment": Table("cpu/deployment_intel", """
        = {program}, {version} | modules of this repository = {modules} | their import, ms = {ms:s 3}
        seconds of the command = {seconds:s 3} | quartiles = {seconds:quartiles s 3}
        peak MiB = {peak_bytes:memory}"""),
    "cpu-curve": Table("cpu/curve", rows=curves),
    **Table("ranks/ranks", """
        = {name} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
        times as fast as one process = {one_process} | times as fast as DDP = {ddp:ratio}
        cores used = {cores_used:.2f} | peak MiB per rank = {peak_bytes:memory}""",
        beside_one_process, f"{FASTEST} | last loss = {{losses[-1]:.9g}}").kinds("ranks-step", "intel"),
    "ranks-strategies": Table("ranks/strategies", STRATEGIES, console=f"{CORES} | last loss = {{final_loss:.9g}}"),
    "ranks-sparse": Table("ranks/sparse", """
        {ranks} ranks = V = {vocab_size:,}: {name} | distinct tokens of a rank = {row.distinct:,}
        MB sent per rank = {max(bytes_sent):MB .3f} | ms = {seconds:ms 3} | quartiles = {seconds:quartiles ms 3}
        time of this row / time with all rows = {times_all_rows:ratio}"""),
    "ranks-update-behind": Table("ranks/update_behind", """
        = {ranks} ranks: {name} | ms = {seconds:ms}
        time of this row / time of the first row = {times_after:ratio 3} | quartiles = {times_after:quartiles s 3}"""),
    "ranks-zero": Table("ranks/strategies_zero", STRATEGIES),
    "ranks-collectives": Table(
        COLLECTIVES, "= {bytes:MB g} MB, {title} | {ranks} ranks, {file.hardware.cores} cores = {text}",
        lambda results: beside_the_library(results, "all_reduce"),
        "GB/s = {bytes / seconds.median / 1e9:.3g} | bytes sent, most of any rank = {max(bytes_sent):,}",
        merged=True, order=lambda cells: float(cells[""].split()[0])),
    "ranks-collectives-others": Table("ranks/collectives_others_intel", """
        = {bytes:MB g} MB, `{operation}`, {title}
        {ranks} ranks, {file.hardware.cores} cores = {text}""",
        lambda results: beside_the_library(results, "reduce_scatter", "all_to_all"),
        merged=True, order=lambda cells: (cells[""].split(", ")[1], float(cells[""].split()[0]))),
    "ranks-fit": Table(COLLECTIVES, """
        alpha in us; beta in ns per byte = {"MPI library" if name == "mpi" else name}
        {ranks} ranks, {file.hardware.cores} cores = {value[0] * 1e6:.0f}; {value[1] * 1e9:.2f}""",
        lambda results: flat(results["alpha_beta"], "ranks", "name"), merged=True),
    "ranks-convergence": Table("ranks/convergence_intel", rows=validations),
    "ranks-idle": Table("ranks/collectives_idle", """
        {file.results.ranks - 1} of {file.results.ranks} ranks are = {name} | GFLOP/s of rank 0 = {value:s 3}
        relative to the row "asleep" = {file.results.share_of_speed[name]:percent 0}""",
        lambda results: flat(results["gflops"], "name")),
    **Table("ranks/parity", """
        = `{preset}`, {steps} steps | ranks | `--dp` = {dp} | `--zero` = {zero} | bit-identical runs = {equal}""",
        parity_runs).kinds("ranks-parity", "intel"),
    "ranks-kill": Table("ranks/kill", KILLS, lambda results: [results], lines=True),
    "ranks-survive": Table("ranks/survive_intel", """
        kills of a rank in one run = {summary.kills}
        of these, before the first checkpoint = {summary.moments["before the first checkpoint"]}
        of these, while a checkpoint is written = {summary.moments["while a checkpoint is written"]}
        of these, at a random moment = {summary.moments["at a random moment"]}
        kills that left an incomplete checkpoint, which no run reads = {summary.incomplete}
        most steps that were repeated after a kill = {summary.most_repeated}
        steps between checkpoints = {checkpoint_every}
        median and longest time from the kill to the next step = \
        {summary.median_seconds:.2f} s, {summary.longest_seconds:.2f} s
        whether losses, gradient norms and final parameters are those of an undisturbed run, bit for bit = \
        {"yes" if summary.equal else "NO"}""", lambda results: [results], lines=True),
}  # fmt: skip

"""The tables of docs/RESULTS.md about stages 0 and 1, and that of docs/TEACHING.md."""

from benchmarks.harness.speedups import rank_speedups
from benchmarks.harness.table_format import Table, fill, flat
from benchmarks.paper import LOSSES

LIBRARY = "MPI library"  # row title of the MPI library's own all-reduce
STEPS = (*range(0, 50, 5), 49)  # columns of the loss curve
COLLECTIVES = "ranks/collectives", "ranks/collectives_16_cores"

# -- rows -------------------------------------------------------------------------------------------------------------


def prompts(record):
    """The results of cpu/decode.py with one prompt."""
    return [result for result in record["results"] if "batch" not in result]


def batches(record):
    return [result for result in record["results"] if "batch" in result]


def commands(record):
    """The results of cpu/classroom.py; a command is set as code, a description is not."""
    for result in record["results"]:
        is_command = result["name"].startswith("make ")
        yield result | {"name": f"`{result['name']}`"} if is_command else result


def curves(record):
    """The rows of the loss curve: the paper's, ours, and the deviation."""
    results = record["results"]
    lines = {
        "paper, serial": (LOSSES["serial"], ".3f"),
        "ours": (results["losses"], ".3f"),
        "deviation": (results["deviations"], "+.1%"),
    }
    for name, (values, text) in lines.items():
        yield {"step": name, **{str(step): format(values[step], text) for step in STEPS}}


def beside_one_process(record):
    """The results of ranks/ranks.py, with the texts of the speed-ups: disturbed ones are marked."""
    results = record["results"]
    speedups = rank_speedups(results, next(iter(results[0]["times_as_fast"])))
    for result in results:
        one_process, *ddp = result["times_as_fast"].values()
        text = fill("{median:.2f}", one_process)
        marked = speedups[result["name"]].cell(text) if result["name"] in speedups else text
        yield result | {"one_process": marked, "ddp": ddp[0] if ddp else None}


def all_reduces(record):
    """The all-reduces, those of the MPI library first."""
    return beside_the_library(record["results"]["all_reduce"])


def other_collectives(record):
    """The other operations of ranks/collectives.py, each with that of the MPI library first."""
    for operation in ("reduce_scatter", "all_to_all"):
        for row in beside_the_library(record["results"].get(operation, [])):
            yield row | {"operation": operation}


def beside_the_library(results):
    results = sorted(results, key=lambda result: result["algorithm"])
    for result in sorted(results, key=lambda result: result["algorithm"] != "mpi"):
        native = result["algorithm"] == "mpi"
        cell = "{seconds:ms 3} ms" if native else "{ratio_to_native:ratio}"
        rate = 1e-9 * result["bytes"] / result["seconds"]["median"]
        title = LIBRARY if native else result["algorithm"]
        yield result | {"title": title, "cell": fill(cell, result), "rate": rate}


def fits(record):
    for row in flat(record["results"]["alpha_beta"], "ranks", "title"):
        yield row | {"title": LIBRARY} if row["title"] == "mpi" else row


def idle_speeds(record):
    found = record["results"]
    for row in flat(found["gflops"], "name"):
        yield row | {"others": found["ranks"] - 1, "share": found["share_of_speed"][row["name"]], **found}


def validations(record):
    """The runs of ranks/convergence.py: the validation losses at some steps, and the difference from --shuffle."""
    for result in record["results"]:
        losses = {f"loss after {step + 1} steps": f"{loss:.3f}" for step, loss in result["val_losses"]}
        differences = {
            "difference, mean of the seeds": fill("{difference?:+.4f}", result),
            "largest difference": fill("{largest_difference?:+.4f}", result),
        }
        yield {"": f"`{result['name']}`" if "--" in result["name"] else result["name"], **losses, **differences}


def parity_runs(record):
    """The runs of ranks/parity.py, one row for each preset and number of ranks."""
    for preset, found in record["results"].items():
        for ranks in sorted({run["ranks"] for run in found["runs"]}):
            runs = [run for run in found["runs"] if run["ranks"] == ranks]
            options = {name: list(dict.fromkeys(run[name] for run in runs)) for name in ("dp", "zero")}
            equal = f"{sum(run['difference'] is None for run in runs)} of {len(runs)}"
            yield {"preset": preset, "steps": len(found["losses"]), "ranks": ranks, "equal": equal, **options}


def kill_results(record):
    found, summary = record["results"], record["results"]["summary"]
    yield {"": "runs with one killed rank", "result": found["times"]}
    yield {"": "of these, runs that ended cleanly", "result": summary["clean_ends"]}
    seconds = fill("{median_seconds:.2f} s, {longest_seconds:.2f} s", summary)
    yield {"": "median and longest time from the kill to the end", "result": seconds}
    yield {"": "runs that left a readable checkpoint", "result": summary["readable"]}
    if "equal" in summary:
        title = "runs that were resumed and gave the losses of an uninterrupted run, bit for bit"
        yield {"": title, "result": summary["equal"]}


def survived_kills(record):
    found, summary = record["results"], record["results"]["summary"]
    yield {"": "kills of a rank in one run", "result": summary["kills"]}
    for moment, count in summary["moments"].items():
        yield {"": f"of these, {moment}", "result": count}
    yield {"": "kills that left an incomplete checkpoint, which no run reads", "result": summary["incomplete"]}
    yield {"": "most steps that were repeated after a kill", "result": summary["most_repeated"]}
    yield {"": "steps between checkpoints", "result": found["checkpoint_every"]}
    seconds = fill("{median_seconds:.2f} s, {longest_seconds:.2f} s", summary)
    yield {"": "median and longest time from the kill to the next step", "result": seconds}
    title = "whether losses, gradient norms and final parameters are those of an undisturbed run, bit for bit"
    yield {"": title, "result": "yes" if summary["equal"] else "NO"}


# -- tables -----------------------------------------------------------------------------------------------------------

STEP = """
    = {name} | threads | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
    times as fast as eager = {times_as_fast_as_eager:ratio}
    time of sgemm floor / time of this row = {share_of_floor:percent 0}
    cores used = {cores_used:.2f} | peak MiB = {peak_bytes:memory}"""
CHOICES = """
    choice = `{choice}` | naive, us = {naive_seconds:us} | ours, us = {our_seconds:us} | times as fast = {gain:ratio}"""
DECODE = """
    = {case}, {name} | threads | tokens = {prompt} + {new}
    ms per token = {token:ms 3} | quartiles = {token:quartiles ms 3}
    first token, ms = {first:ms 3} | all tokens, s = {total:s 3}
    times as fast as torch = {times_as_fast_as_torch:ratio}
    times as fast as recomputing = {times_as_fast_as_recomputing?:.1f} | peak MiB = {peak_bytes:memory}"""
DEPLOYMENT = """
    = {program}, {version} | modules of this repository = {modules} | their import, ms = {ms:s 3}
    seconds of the command = {seconds:s 3} | quartiles = {seconds:quartiles s 3} | peak MiB = {peak_bytes:memory}"""
DECODE_BATCH = """
    = {case}, {name} | threads | tokens = {batch} x ({prompt} + {new})
    tokens/s = {tokens_per_second:number} | quartiles = {tokens_per_second:quartiles}
    times as fast as torch = {tokens_per_second_to_torch:ratio}
    first tokens, ms = {first:ms 3} | ms per later step = {token:ms 3}
    a later step: times as fast as torch = {times_as_fast_as_torch:ratio} | peak MiB = {peak_bytes:memory}"""
RANKS = """
    = {name} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
    times as fast as one process = {one_process} | times as fast as DDP = {ddp:ratio}
    cores used = {cores_used:.2f} | peak MiB per rank = {peak_bytes:memory}"""
STRATEGIES = """
    {ranks} ranks = `{name}` | messages | MB sent per rank = {bytes_sent:largest MB .1f} | ms per step = {seconds:ms}
    time of this row / time of `--dp flat` = {times_flat:ratio} | quartiles = {times_flat:quartiles s 3}
    optimizer MiB per rank = {optimizer_bytes:largest memory}"""
SPARSE = """
    {ranks} ranks = V = {vocab_size:,}: {name} | distinct tokens of a rank = {distinct?:,}
    MB sent per rank = {bytes_sent:largest MB .3f} | ms = {seconds:ms 3} | quartiles = {seconds:quartiles ms 3}
    time of this row / time with all rows = {times_all_rows:ratio}"""
UPDATE_BEHIND = """
    = {ranks} ranks: {name} | ms = {seconds:ms}
    time of this row / time of the first row = {times_after:ratio 3} | quartiles = {times_after:quartiles s 3}"""
PARITY = """
    = `{preset}`, {steps} steps | ranks | `--dp` = {dp:joined} | `--zero` = {zero:joined}
    bit-identical runs = {equal}"""
IDLE = """
    {others} of {ranks} ranks are = {name} | GFLOP/s of rank 0 = {value:s 3}
    relative to the row "asleep" = {share:percent 0}"""
ALL_REDUCES = """
    = {bytes:MB g} MB, {title} | {ranks} ranks, {file[hardware][cores]} cores = {cell}"""
OTHERS = """
    = {bytes:MB g} MB, `{operation}`, {title} | {ranks} ranks, {file[hardware][cores]} cores = {cell}"""
FITS = """
    alpha in us; beta in ns per byte = {title}
    {ranks} ranks, {file[hardware][cores]} cores = {value[0]:times 1e6 .0f}; {value[1]:times 1e9 .2f}"""
FASTEST, CORES = "fastest step, ms = {min:times 1e3 .4g}", "cores used = {cores_used:.2f}"  # on the console only

TABLES = {
    **Table("cpu/train_step", STEP, console=f"{FASTEST} | imports MiB = {{import_bytes:memory}}").kinds(
        "cpu-step", "zen3", "zen5", "intel"
    ),
    **Table("cpu/choices", CHOICES).kinds("cpu-choices", "intel"),
    "first-run": Table(
        "cpu/first_run",
        "command = `{name}` | seconds = {value:s 3}",
        lambda record: flat(record["results"]["seconds"], "name"),
    ),
    "classroom": Table(
        "cpu/classroom", "command = {name} | seconds = {seconds:s 2} | peak MiB = {peak_bytes:memory}", commands
    ),
    **Table("cpu/decode", DECODE, prompts, CORES).kinds("cpu-decode", "zen3", "zen5", "intel"),
    **Table("cpu/decode", DECODE_BATCH, batches, CORES).kinds("cpu-decode-batch", "zen3", "zen5", "intel"),
    "cpu-deployment": Table("cpu/deployment_intel", DEPLOYMENT),
    "cpu-curve": Table("cpu/curve", rows=curves),
    **Table("ranks/ranks", RANKS, beside_one_process, f"{FASTEST} | last loss = {{losses:last .9g}}").kinds(
        "ranks-step", "intel"
    ),
    "ranks-strategies": Table("ranks/strategies", STRATEGIES, console=f"{CORES} | last loss = {{final_loss:.9g}}"),
    "ranks-sparse": Table("ranks/sparse", SPARSE),
    "ranks-update-behind": Table("ranks/update_behind", UPDATE_BEHIND),
    "ranks-zero": Table("ranks/strategies_zero", STRATEGIES),
    "ranks-collectives": Table(
        COLLECTIVES,
        ALL_REDUCES,
        all_reduces,
        "GB/s = {rate:.3g} | bytes sent, most of any rank = {bytes_sent:largest ,}",
        merged=True,
        order=lambda cells: float(cells[""].split()[0]),
    ),
    "ranks-collectives-others": Table(
        "ranks/collectives_others_intel",
        OTHERS,
        other_collectives,
        merged=True,
        order=lambda cells: (cells[""].split(", ")[1], float(cells[""].split()[0])),
    ),
    "ranks-fit": Table(COLLECTIVES, FITS, fits, merged=True),
    "ranks-convergence": Table("ranks/convergence_intel", rows=validations),
    "ranks-idle": Table("ranks/collectives_idle", IDLE, idle_speeds),
    **Table("ranks/parity", PARITY, parity_runs).kinds("ranks-parity", "intel"),
    "ranks-kill": Table("ranks/kill", rows=kill_results),
    "ranks-survive": Table("ranks/survive_intel", rows=survived_kills),
}

"""The tables of docs/RESULTS.md about stages 0 and 1.

Each function returns (rows, names of the source files in results/). A row is a dictionary {column title: cell}.
"""

from benchmarks.harness.speedups import rank_speedups
from benchmarks.harness.table_format import load, mib, number, percent, ratio, spread
from benchmarks.paper import LOSSES

LIBRARY = "MPI library"  # row title of the MPI library's own all-reduce


def cpu_step(kind=""):
    rows = []
    for result in load(f"cpu/train_step{kind}")["results"]:
        rows.append(
            {
                "": result["name"],
                "threads": result["threads"],
                "ms per step": number(result["seconds"], 1e3),
                "quartiles": spread(result["seconds"], 1e3),
                "times as fast as eager": ratio(result["times_as_fast_as_eager"]),
                "time of sgemm floor / time of this row": percent(result["share_of_floor"]["median"], 0),
                "cores used": f"{result['cores_used']:.2f}",
                "peak MiB": mib(result["peak_bytes"]),
            }
        )
    return rows, [f"cpu/train_step{kind}"]


def cpu_choices(kind=""):
    rows = [
        {
            "choice": f"`{result['choice']}`",
            "naive, us": number(result["naive_seconds"], 1e6),
            "ours, us": number(result["our_seconds"], 1e6),
            "times as fast": ratio(result["gain"]),
        }
        for result in load(f"cpu/choices{kind}")["results"]
    ]
    return rows, [f"cpu/choices{kind}"]


def first_run():
    seconds = load("cpu/first_run")["results"]["seconds"]
    rows = [{"command": f"`{name}`", "seconds": number(each, 1, 3)} for name, each in seconds.items()]
    return rows, ["cpu/first_run"]


def classroom():
    rows = []
    for result in load("cpu/classroom")["results"]:
        title = f"`{result['name']}`" if result["name"].startswith("make ") else result["name"]
        seconds, peak = number(result["seconds"], 1, 2), mib(result["peak_bytes"])
        rows.append({"command": title, "seconds": seconds, "peak MiB": peak})
    return rows, ["cpu/classroom"]


def cpu_decode(kind=""):
    rows = []
    for result in load(f"cpu/decode{kind}")["results"]:
        if "batch" in result:
            continue
        gain = result.get("times_as_fast_as_recomputing")  # the compiled program of PyTorch does not recompute
        rows.append(
            {
                "": f"{result['case']}, {result['name']}",
                "threads": result["threads"],
                "tokens": f"{result['prompt']} + {result['new']}",
                "ms per token": number(result["token"], 1e3, 3),
                "quartiles": spread(result["token"], 1e3, 3),
                "first token, ms": number(result["first"], 1e3, 3),
                "all tokens, s": number(result["total"], 1, 3),
                "times as fast as torch": ratio(result["times_as_fast_as_torch"]),
                "times as fast as recomputing": "" if gain is None else f"{gain:.1f}",
                "peak MiB": mib(result["peak_bytes"]),
            }
        )
    return rows, [f"cpu/decode{kind}"]


def cpu_decode_batch(kind=""):
    rows = [
        {
            "": f"{result['case']}, {result['name']}",
            "threads": result["threads"],
            "tokens": f"{result['batch']} x ({result['prompt']} + {result['new']})",
            "tokens/s": number(result["tokens_per_second"]),
            "quartiles": spread(result["tokens_per_second"]),
            "times as fast as torch": ratio(result["tokens_per_second_to_torch"]),
            "first tokens, ms": number(result["first"], 1e3, 3),
            "ms per later step": number(result["token"], 1e3, 3),
            "a later step: times as fast as torch": ratio(result["times_as_fast_as_torch"]),
            "peak MiB": mib(result["peak_bytes"]),
        }
        for result in load(f"cpu/decode{kind}")["results"]
        if "batch" in result
    ]
    return rows, [f"cpu/decode{kind}"]


def cpu_curve():
    losses = load("cpu/curve")["results"]["losses"]
    steps = [*range(0, 50, 5), 49]
    rows = [
        {"step": name, **{str(step): f"{curve[step]:.3f}" for step in steps}}
        for name, curve in (("paper, serial", LOSSES["serial"]), ("ours", losses))
    ]
    deviations = load("cpu/curve")["results"]["deviations"]
    rows.append({"step": "deviation", **{str(step): f"{deviations[step]:+.1%}" for step in steps}})
    return rows, ["cpu/curve"]


def ranks_step(kind=""):
    rows, results = [], load(f"ranks/ranks{kind}")["results"]
    speedups = rank_speedups(results, next(iter(results[0]["times_as_fast"])))
    for result in results:
        one_process, times_as_fast_as_ddp = result["times_as_fast"].values()
        cell = speedups[result["name"]].cell if result["name"] in speedups else str
        rows.append(
            {
                "": result["name"],
                "ms per step": number(result["seconds"], 1e3),
                "quartiles": spread(result["seconds"], 1e3),
                "times as fast as one process": cell(ratio(one_process)),
                "times as fast as DDP": ratio(times_as_fast_as_ddp),
                "cores used": f"{result['cores_used']:.2f}",
                "peak MiB per rank": mib(result["peak_bytes"]),
            }
        )
    return rows, [f"ranks/ranks{kind}"]


def strategies(name):
    rows = []
    for result in load(name)["results"]:
        rows.append(
            {
                f"{result['ranks']} ranks": f"`{result['name']}`",
                "messages": result["messages"],
                "MB sent per rank": f"{1e-6 * max(result['bytes_sent']):.1f}",
                "ms per step": number(result["seconds"], 1e3),
                "time of this row / time of `--dp flat`": ratio(result["times_flat"]),
                "quartiles": spread(result["times_flat"], 1, 3),
                "optimizer MiB per rank": mib(max(result["optimizer_bytes"])),
            }
        )
    return rows, [name]


def ranks_collectives():
    files = "ranks/collectives", "ranks/collectives_16_cores"
    columns = {}  # {column title: {(bytes, algorithm): cell}}
    for name in files:
        cores = load(name)["hardware"]["cores"]
        for result in load(name)["results"]["all_reduce"]:
            cells = columns.setdefault(f"{result['ranks']} ranks, {cores} cores", {})
            native = result["algorithm"] == "mpi"
            cell = f"{number(result['seconds'], 1e3, 3)} ms" if native else ratio(result["ratio_to_native"])
            cells[result["bytes"], LIBRARY if native else result["algorithm"]] = cell
    # Sorted by size. Among the rows of one size, that of the MPI library is the first.
    keys = sorted(
        {key for cells in columns.values() for key in cells}, key=lambda key: (key[0], key[1] != LIBRARY, key[1])
    )
    rows = [
        {"": f"{size / 1e6:g} MB, {algorithm}"}
        | {title: cells.get((size, algorithm), "") for title, cells in columns.items()}
        for size, algorithm in keys
    ]
    return rows, list(files)


def ranks_fit():
    files, rows = ("ranks/collectives", "ranks/collectives_16_cores"), {}
    for name in files:
        cores = load(name)["hardware"]["cores"]
        for ranks, fits in load(name)["results"]["alpha_beta"].items():
            for algorithm, (alpha, beta) in fits.items():
                title = LIBRARY if algorithm == "mpi" else algorithm
                row = rows.setdefault(algorithm, {"alpha in us; beta in ns per byte": title})
                row[f"{ranks} ranks, {cores} cores"] = f"{1e6 * alpha:.0f}; {1e9 * beta:.2f}"
    return list(rows.values()), list(files)


def ranks_idle():
    found = load("ranks/collectives_idle")["results"]
    rows = [
        {
            f"{found['ranks'] - 1} of {found['ranks']} ranks are": name,
            "GFLOP/s of rank 0": number(speed, 1, 3),
            'relative to the row "asleep"': percent(found["share_of_speed"][name]["median"], 0),
        }
        for name, speed in found["gflops"].items()
    ]
    return rows, ["ranks/collectives_idle"]


def ranks_parity(suffix=""):
    rows, source = [], f"ranks/parity{suffix}"
    for preset, found in load(source)["results"].items():
        for ranks in sorted({run["ranks"] for run in found["runs"]}):
            runs = [run for run in found["runs"] if run["ranks"] == ranks]
            rows.append(
                {
                    "": f"`{preset}`, {len(found['losses'])} steps",
                    "ranks": ranks,
                    "`--dp`": " ".join(dict.fromkeys(run["dp"] for run in runs)),
                    "`--zero`": " ".join(str(zero) for zero in dict.fromkeys(run["zero"] for run in runs)),
                    "bit-identical runs": f"{sum(run['difference'] is None for run in runs)} of {len(runs)}",
                }
            )
    return rows, [source]


def kills(name):
    found = load(name)["results"]
    summary, times = found["summary"], found["times"]
    rows = [
        {"": "runs with one killed rank", "result": times},
        {"": "of these, runs that ended cleanly", "result": summary["clean_ends"]},
        {"": "median and longest time from the kill to the end", "result": f"{summary['median_seconds']:.2f} s, "
         f"{summary['longest_seconds']:.2f} s"},
        {"": "runs that left a readable checkpoint", "result": summary["readable"]},
    ]  # fmt: skip
    if "equal" in summary:
        title = "runs that were resumed and gave the losses of an uninterrupted run, bit for bit"
        rows.append({"": title, "result": summary["equal"]})
    return rows, [name]


TABLES = {
    "cpu-step": cpu_step,
    "cpu-step-zen3": lambda: cpu_step("_zen3"),
    "cpu-step-zen5": lambda: cpu_step("_zen5"),
    "cpu-step-intel": lambda: cpu_step("_intel"),
    "cpu-choices": cpu_choices,
    "cpu-choices-intel": lambda: cpu_choices("_intel"),
    "first-run": first_run,
    "classroom": classroom,
    "cpu-decode": cpu_decode,
    "cpu-decode-zen3": lambda: cpu_decode("_zen3"),
    "cpu-decode-zen5": lambda: cpu_decode("_zen5"),
    "cpu-decode-intel": lambda: cpu_decode("_intel"),
    "cpu-decode-batch": cpu_decode_batch,
    "cpu-decode-batch-zen3": lambda: cpu_decode_batch("_zen3"),
    "cpu-decode-batch-zen5": lambda: cpu_decode_batch("_zen5"),
    "cpu-decode-batch-intel": lambda: cpu_decode_batch("_intel"),
    "cpu-curve": cpu_curve,
    "ranks-step": ranks_step,
    "ranks-step-intel": lambda: ranks_step("_intel"),
    "ranks-strategies": lambda: strategies("ranks/strategies"),
    "ranks-zero": lambda: strategies("ranks/strategies_zero"),
    "ranks-collectives": ranks_collectives,
    "ranks-fit": ranks_fit,
    "ranks-idle": ranks_idle,
    "ranks-parity": ranks_parity,
    "ranks-parity-intel": lambda: ranks_parity("_intel"),
    "ranks-kill": lambda: kills("ranks/kill"),
}

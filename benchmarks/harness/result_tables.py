"""The tables of docs/RESULTS.md, and those that its scripts print; table_format.py says how to add one."""

from collections import Counter
from dataclasses import replace
from itertools import groupby

from benchmarks.harness.speedups import efficiencies, rank_speedups
from benchmarks.harness.table_format import Table, beside, fill, flat, percent
from benchmarks.paper import LOSSES

STEPS = (*range(0, 50, 5), 49)  # columns of the loss curve
# The largest rates measured on an H200: TFLOP/s of bf16 products of random numbers, TB/s of a copy.
CEILINGS = {"tflops": 766, "tbps": 4.26}
# Groups of kernels: the table of the profile shows the total time of each group.
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")
COMMANDS = {
    "inference": "stage 2: `inference.py --stats --prompt ...`",
    "train": "stage 2: `train_gpt2.py --preset paper --out ...`",
}  # {name in gpu/start.json: command}
PEERS = "torch", "DDP", "fully_shard"  # how the names of PyTorch's programs begin
OPERATIONS = "all_reduce", "reduce_scatter", "all_to_all"

# -- rows -------------------------------------------------------------------------------------------------------------


def with_peer(results, *fields, time="seconds", ours="ours"):
    """The results; ours have "peer", the fastest program of PyTorch with the same fields, and "ratio" to it.

    The ratio is the median of the rounds if the file has it, and else the quotient of the two medians.
    """
    for result in results:
        same = [row for row in results if all(row.get(field) == result.get(field) for field in fields)]
        peers = [row for row in same if row["name"].startswith(PEERS) and "bf16" not in row["name"]]
        if result["name"].startswith(ours) and peers and (ours != "ours" or result["name"] == "ours"):
            peer = min(peers, key=lambda row: row[time]["median"])
            yield result | {"peer": peer, "ratio": ratio(result, peer, time)}
        else:
            yield result


def ratio(ours, peer, time):
    known = ours.get("times_as_fast") or {"torch eager": ours.get("times_as_fast_as_eager")}
    recorded = ours.get("tokens_per_second_to_torch") or ours.get("times_as_fast_as_torch") or known.get(peer["name"])
    return recorded or {"median": peer[time]["median"] / ours[time]["median"]}


def threads(results):
    """with_peer() of cpu/train_step.py; "base" is the time of the matrix products only."""
    return with_peer(list(beside(results, lambda row: row["name"] == "sgemm floor", "threads")), "threads")


def decoding(results):
    return with_peer(results, "case", "threads", "precision", time="token")


def steps(results):
    return with_peer([row["options"] | row for row in results], "preset", "precision")


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
    for result in with_peer(results, ours="stage 1"):
        one_process, *ddp = result["times_as_fast"].values()
        text = f"{one_process['median']:.2f}"
        marked = checked[result["name"]].cell(text) if result["name"] in checked else text
        yield result | {"one_process": marked, "ddp": ddp[0] if ddp else None}


def beside_the_library(results):
    """A row for each operation, size and number of ranks of ranks/collectives.py: the library and our algorithms."""
    for operation in (name for name in OPERATIONS if name in results):
        order = sorted(results[operation], key=lambda row: (row["bytes"], row["ranks"]))
        for (size, ranks), group in groupby(order, lambda row: (row["bytes"], row["ranks"])):
            found = {row["algorithm"]: row for row in group}
            library, ours = found.pop("mpi"), {name: row["ratio_to_native"]["median"] for name, row in found.items()}
            best = min(ours, key=ours.get)
            used = f"{ours['canonical']:.2f}; " if "canonical" in ours else ""
            text = fill("{seconds:ms 3} ms; ", library) + used + f"{best} {ours[best]:.2f}"
            each = ", ".join(f"{name} {times:.2f}" for name, times in ours.items())
            yield {"operation": operation, "bytes": size, "ranks": ranks, "text": text, "each": each}


def validations(results):
    """The runs of ranks/convergence.py: the validation losses at some steps, and the difference from --shuffle."""
    for result in results:
        yield {
            "": f"`{result['name']}`" if "--" in result["name"] else result["name"],
            **{f"loss after {step + 1} steps": f"{loss:.3f}" for step, loss in result["val_losses"]},
            "difference, mean of the seeds": fill("{row.difference:+.4f}", result),
            "largest difference": fill("{row.largest_difference:+.4f}", result),
        }


def counted(runs):
    """A row for each title of runs (title, numbers of ranks, runs, equal runs, largest deviation of a loss)."""
    for title in dict.fromkeys(title for title, *_ in runs):
        ranks, total, equal, deviation = zip(*(others for name, *others in runs if name == title), strict=True)
        numbers = " ".join(map(str, sorted({each for of_run in ranks for each in of_run})))
        yield {"title": title, "ranks": numbers, "equal": f"{sum(equal)} of {sum(total)}", "deviation": max(deviation)}


def runs_of_ranks(results):
    return counted([
        (f"`{preset}`, {len(found['losses'])} steps", [run["ranks"]], 1, run["difference"] is None, 0.0)
        for preset, found in results.items() for run in found["runs"]
    ])  # fmt: skip


def runs_on_gpus(results):
    fast = ", without `--deterministic`"
    return counted([
        (f"`paper`, 50 steps, {run['precision']}{fast * ('--deterministic' not in run['name'])}",
         [run["ranks"]], 1, run["difference"] is None, run["largest_deviation"])
        for run in results if run["name"] != "stage 2"
    ])  # fmt: skip


def runs_over_sockets(results):
    name = "GPT-2 124M, 15 steps, bf16, NCCL over sockets"
    runs = [run for run in results if "--deterministic" in run["name"] and "sockets" in run["name"]]
    return counted([(name, [run["ranks"]], 1, run["difference"] is None, 0.0) for run in runs])


def random_layouts(results):
    name = "random layouts, `small`, 20 steps, "
    return counted([(name + row["precision"], row["ranks"], row["runs"], row["equal"], 0.0) for row in results])


def kernel_groups(profile):
    """The time of each group of kernels of one profile with its share of CEILINGS, then the times of the whole step."""
    groups, shares = Counter(), Counter()
    for kernel in kernels(profile | {"rows": None}):
        group = group_of(kernel)
        groups[group] += kernel["ms"]
        shares[group] += kernel["ms"] * (kernel["of_tflops"] or kernel["of_tbps"] or 0)
    total = sum(groups.values())
    for group, ms in groups.most_common():
        yield {"title": group, "cell": f"{ms:.3f} ({percent(ms / total)})", "limit": shares[group] / ms or None}
    for title, cell in {
        "sum of the kernels": f"{total:.3f}",
        "idle, by device clock": percent(profile["idle_share"]),
        "idle, by the kernels' time stamps": fill("{idle_share_profiled:percent}", profile),
        "whole step, graph replayed": f"{1e3 * profile['graph_step_seconds']:.3f}",
        "whole step, launched from Python": f"{1e3 * profile['eager_step_seconds']:.3f}",
    }.items():
        yield {"title": title, "cell": cell, "limit": None}


def group_of(kernel):
    """The group of a kernel of the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = kernel["title"].partition(": ")[0]
    if name.startswith(("product", "splitK")):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def kernels(profile):
    """The kernels with the longest time, 21 or "rows" of them, with their share of CEILINGS; rates of 0 are None.

    The ceiling of products is known in bf16 only.
    """
    known = {rate: rate == "tbps" or profile["precision"] == "bf16" for rate in CEILINGS}
    for kernel in profile["graph"][: profile.get("rows", 21)]:
        yield kernel | {f"of_{rate}": (known[rate] and kernel[rate] or 0) / CEILINGS[rate] or None for rate in CEILINGS}


def attention_rows(results):
    """The results of gpu/attention.py; ours has the smaller speedups over PyTorch's programs, and the faster peer."""
    for shape in results:
        peers = [row for row in shape if row["name"].startswith(PEERS)]
        speedups = [row["ours_is_times_as_fast"] for row in peers]
        best = {kind: min((each[kind] for each in speedups), key=lambda times: times["median"], default=None)
                for kind in ("forward", "both")}  # fmt: skip
        peer = min(peers, key=lambda row: row["ms"]["both"]["median"], default=None)
        yield from (row | {"best": best, "peer": peer} if row["name"] == "ours" and peers else row for row in shape)


def decode_variant(result):
    """The fastest variant of PyTorch's program that the search found; "" without a search."""
    if "tried" not in result:
        return ""
    cut = f", cache cut to a multiple of {result['cut']}" if result.get("cut") else ""
    return f"attention: {result['attention']}, products: {result['products']}{cut}"


def decode_variants(results):
    """The variants of PyTorch's program that the search timed; the programs of a case share a search."""
    searched = {result["case"]: result for result in results if "tried" in result}
    return ({"batch": result["batch"], **each} for result in searched.values() for each in result["tried"])


def memory_cases(results):
    for result in results:
        batch, parts = result["options"]["batch_size"], result["options"]["micro_batches"]
        title = "{preset}, {precision}, {batch_size} sequence" + "s" * (batch > 1)
        title += ", {micro_batches} micro-batches" * (parts > 1)
        title += ", `--recompute block`" * (result["options"].get("recompute") == "block")
        largest = sorted(result["terms"].items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in largest)
        yield result | {"title": fill(title, result["options"]), "largest": terms}


def scaling_tables(results):
    """The results of all tables of gpus/scaling.py, with the texts of the efficiencies: disturbed ones are marked."""
    for table in results["scaling"]:
        checked = efficiencies(table["rows"])
        for result in table["rows"]:
            text = fill("{efficiency:percent}", result)
            marked = checked[result["name"]].cell(text) if result["name"] in checked else text
            yield result | {"title": table["title"], "marked": marked}


def schedules(results):
    """The results of gpus/strategies.py with their flags; those without communication have no added time."""
    for result in results:
        flags = result["name"].replace(f", {result['ranks']} GPUs", "").removeprefix("ours ")
        if result.get("communicate", True):
            yield result | {"flags": f"`{flags}`"}
        else:
            yield result | {"flags": flags, "messages": None, "communication_share": None}


def fused_products(results):
    """The times of the fused product and of its peers, for each size."""
    for result in sorted((row for row in results if "tile" in row), key=lambda row: int(row["name"].split(" /")[0])):
        for name, ms in result["ms"].items():
            yield {"size": int(result["name"].split(" /")[0]), "name": name, "ms": ms}


def survivals(results):
    moments = "; ".join(f"{count} {moment}" for moment, count in results["summary"]["moments"].items())
    return [results | {"moments": moments}]


# -- tables that the scripts print; docs/RESULTS.md has their last column in the table "choices" ----------------------

FASTEST, CORES = "fastest step, ms = {min * 1e3:.4g}", "cores used = {cores_used:.2f}"  # on the console only
IMPORTS = "imports MiB = {import_bytes:memory}"
RATIOS = {
    "cpu-choices": Table("cpu/choices*", """
        choice = `{choice}` | naive, us = {naive_seconds:us} | ours, us = {our_seconds:us}
        times as fast = {gain:ratio}"""),
    "gpu-choices": Table("gpu/choices", """
        = {preset}, without: {without} | ms per step = {seconds:ms}
        quartiles = {gain:quartiles} | time of this row / time of the full step = {gain:ratio 3}"""),
    "gpu-lesson": Table("gpu/lesson*", """
        measured = {name} | plain, us = {plain:us} | ours, us = {ours:us} | times as fast = {times_as_fast:ratio}"""),
    "gpu-fusions": Table("gpu/fusions", """
        = {fusion}, {"Triton" if version.startswith("Triton") else version} | rows x C x K = {rows} x {c} x {k}
        version | us = {us:.1f} | times as fast = {base.us / us:.2f}""",
        # The first version of a case has a separate kernel.
        lambda results: beside(results, lambda row: True, "rows", "c", "k", "fusion")),
    "gpu-gelu": Table("gpu/gelu_product", """
        = {direction} | tile of a consumer = {variant} | us = {us:.0f} | cublasLt, us = {row["cublasLt us"]:.0f}
        times as fast as cublasLt = {row["cublasLt us"] / us:.2f}""",
        lambda results: (result for result in results if "error" not in result),
        'product, us = {row["product us"]:.0f}'),
    "gpu-gluon-ladder": Table("gpu/gluon_ladder", """
        = {" x ".join(map(str, shape))}, {name} | ms = {ms.both:number} | TFLOP/s = {tflops.both:.0f}""",
        lambda results: sum(results, [])),
    "gpu-tune": Table("gpu/tune", """
        case | candidates = {len(value)} | current, ms = {current:.4f} | fastest, ms = {value[0].ms:.4f}
        current / fastest = {current / value[0].ms:.3f}""",
        lambda results: (
            row | {"current": next(each["ms"] for each in row["value"] if each["label"] == "in use")}
            for row in flat(results, "case")
        )),
    "gpu-checkpoints": Table("gpu/checkpoints", """
        = {"`%s`" % name if "--" in name else name} | ms per step = {totals.median / steps * 1e3:.2f}
        time of this row / time without checkpoints = {times:ratio 3}"""),
    "ranks-idle": Table("ranks/collectives_idle", """
        {file.results.ranks - 1} of {file.results.ranks} ranks are = {name} | GFLOP/s of rank 0 = {value:s 3}
        relative to the row "asleep" = {file.results.share_of_speed[name]:percent 0}""",
        lambda results: flat(results["gflops"], "name")),
    "ranks-sparse": Table("ranks/sparse", """
        = V = {vocab_size:,}, {name}{", %d tokens" % distinct if row.distinct else ""}
        MB sent per rank = {max(bytes_sent):MB .3f} | ms = {seconds:ms 3} | quartiles = {seconds:quartiles ms 3}
        time of this row / time with all rows = {times_all_rows:ratio}"""),
    "ranks-update-behind": Table("ranks/update_behind", """
        = {ranks} ranks, {name} | ms = {seconds:ms} | quartiles = {times_after:quartiles s 3}
        time of this row / time of the first row = {times_after:ratio 3}"""),
}  # fmt: skip
CHOICES = {  # {name in RATIOS: what was measured: the numbers}
    "cpu-choices": "NumPy backend; `formula -> override` is a kernel of `NumpyBackend`: times as fast",
    "gpu-choices": "GPU step without a choice: its time / the time of the full step",
    "gpu-lesson": "sections of stage 2's lesson, against plain code: times as fast",
    "gpu-fusions": "fusing an operation with a product: times as fast as a separate kernel, by shape and tile",
    "gpu-gelu": "Gluon product with GELU, by tile: times as fast as cublasLt's epilogue",
    "gpu-gluon-ladder": "attention, forward and backward: TFLOP/s",
    "gpu-tune": "attention's tiles; 1 forward, 2, 3 the kernels of backward, 4 all: time / time of the fastest tile",
    "gpu-checkpoints": "199 steps of GPT-2 124M, 1.5 GB saved every 50 steps: time / time without checkpoints",
    "ranks-idle": "rank 0 multiplies matrices on two cores while 7 ranks wait: its speed / its speed while they sleep",
    "ranks-sparse": "`--sparse-embedding`, 4 ranks, distinct tokens from few to all: time / time with all rows",
    "ranks-update-behind": "AdamW behind each bucket instead of after the last one: time of a step / time now",
}


def condensed(name, measured):
    """A row for each file of a table of RATIOS: the last column, as a range for rows of the same name."""

    def rows(results):
        found = {}
        for row in RATIOS[name].cells([{"results": results}]):
            found.setdefault(next(iter(row.values())), []).append([*row.values()][-1])
        yield {
            "text": "; ".join(
                f"{title} {' to '.join(dict.fromkeys((min(texts, key=value), max(texts, key=value))))}"
                for title, texts in found.items()
            )
        }

    columns = f"measured = {measured} | machine, commit = {{file.machine}}, {{file.commit}} | result = {{text}}"
    return Table(RATIOS[name].files, columns, rows)


def value(text):
    return float(text.strip(" %"))


# -- tables of docs/RESULTS.md ----------------------------------------------------------------------------------------

RANK_STRATEGIES = Table(("ranks/strategies", "ranks/strategies_zero"), """
    = `{name}` | {ranks} ranks: ms per step = {seconds:ms}
    {ranks} ranks: time / time of `--dp flat` = {row.times_flat:ratio}
    {ranks} ranks: MB sent = {max(bytes_sent):MB .1f} | {ranks} ranks: optimizer MiB = {max(optimizer_bytes):memory}""",
    console=f"{CORES} | messages | quartiles = {{times_flat:quartiles s 3}} | last loss = {{final_loss:.9g}}",
)  # fmt: skip
GPU_STRATEGIES = Table("gpus/strategies", """
    = {flags} | {ranks} GPUs: ms per step = {seconds:ms}
    {ranks} GPUs: added by communication, ms = {communication_share * seconds.median * 1e3:.1f}
    {ranks} GPUs: share of the step = {communication_share:percent} | {ranks} GPUs: messages = {messages}
    {ranks} GPUs: MB sent = {bytes_sent:MB ,.0f} | {ranks} GPUs: optimizer MB = {optimizer_bytes:MB ,.0f}""",
    schedules, """
    time of this row / time of the same `--dp` without further flags = {row.times_plain:ratio 3}
    last loss = {last_loss:.4f}""",
)  # fmt: skip
OVERLAP = Table("gpus/timeline", """
    = `{name.removesuffix(", 4 GPUs")}` | 4 GPUs: communication, ms = {value.communication_ms:.1f}
    4 GPUs: communication that overlaps = {value.hidden_ms / value.communication_ms:percent 0}""",
    lambda results: flat(results, "name"),
    "step, ms = {value.step_ms:.1f} | computation, ms = {value.compute_ms:.1f} | kernels = {value.kernels}",
)  # fmt: skip
PAPER_STEPS = Table(
    "gpus/scaling", "= {name} | 50 steps of `paper`, s = {totals:s 3}", lambda results: results["paper"]
)
FIT = Table("gpus/collectives", """
    {ranks} GPUs = {name} | alpha, us; beta, ps per byte = {value[0] * 1e6:.1f}; {value[1] * 1e12:.2f}
    best `--bucket-mb` for GPT-2 124M = {file.results.bucket_mb["%s GPUs, %s" % (ranks, name)]:.0f}""",
    lambda results: flat(results["alpha_beta"], "ranks", "name"))  # fmt: skip
RANKS_FIT = Table(("ranks/collectives", "ranks/collectives_16_cores"), """
    = {"MPI library" if name == "mpi" else name}: alpha in us; beta in ns per byte
    {ranks} ranks, {file.hardware.cores} cores = {value[0] * 1e6:.0f}; {value[1] * 1e9:.2f}""",
    lambda results: flat(results["alpha_beta"], "ranks", "name"), merged=True)  # fmt: skip
CONTEXTS = Table("gpu/positions", """
    positions = rotary, training, 1 x {tokens:,} tokens | ms per step = {seconds:ms} | held, GiB = {held_bytes:GiB}
    loss of the first step = {first_loss:.3f} | of the last step = {last_loss:.3f}""",
    lambda results: results["contexts"])  # fmt: skip
FIRST_RUN = Table(
    "cpu/first_run", "command = stage 0: `{name}` | {file.machine}, s = {value:s 3}",
    lambda results: flat(results["seconds"], "name"),
)  # fmt: skip
DEPLOYMENT = Table("cpu/deployment_intel", """
    command = one token, {program}, {version} | {file.machine}, s = {seconds:s 3}
    modules of this repository = {modules} | their import, ms = {ms:s 3}
    peak MiB = {peak_bytes:memory}""")  # fmt: skip
MATMUL = Table("torch/matmul_search", """
    us = ReLU(A B + C), fp16, {size} rows | {name} = {ms.median * 1e3:.1f}""", fused_products, merged=True)  # fmt: skip
PARITY = "= {title} | ranks | bit-identical runs, %s = {equal} | largest loss deviation = {deviation or None:.1e}"
KILLS = """
    = `kill -9` of one of 4 ranks, {file.machine} | kills = {times} | ended cleanly = {row.summary.clean_ends}
    median and longest time, s = {summary.median_seconds:.2f}, {summary.longest_seconds:.2f}
    readable checkpoints = {row.summary.readable} | resumed with the same bits = {row.summary.equal}"""
SURVIVE = Table(("ranks/survive_intel", "gpus/survive"), """
    = one run with `--max-restarts`, {file.machine} | kills = {summary.kills}
    median and longest time, s = {summary.median_seconds:.2f}, {summary.longest_seconds:.2f}
    readable checkpoints = all; {summary.incomplete} incomplete ones are not read
    resumed with the same bits = {"yes" if summary.equal else "NO"} | moments of the kills = {moments}
    most steps repeated = {summary.most_repeated} of {checkpoint_every}""", survivals)  # fmt: skip

TABLES = {
    **RATIOS,
    "cpu-step": Table("cpu/train_step*", """
        = {"GPT-2 124M" if "gpt2" in str(file.name) else "`paper`"}, {file.machine}, threads {threads}
        {name}, ms = {seconds:ms} | ours: times as fast as PyTorch = {row.ratio:ratio}
        floor / ours = {share_of_floor if row.ratio else None:percent 0}
        ours: peak MiB = {peak_bytes if row.ratio else None:memory}
        torch eager: peak MiB = {peak_bytes if name == "torch eager" else None:memory}""",
        threads, " | ".join(f"{{name}}, {each}" for each in (FASTEST, CORES, IMPORTS)), merged=True),
    "cpu-decode": Table("cpu/decode*", """
        = {case}, {file.machine} | {threads}: {name}, ms = {token:ms 3} | {threads}: times as fast = {row.ratio:ratio}
        {threads}: {name}, first token, ms = {first:ms 3}
        {threads}: recomputing / cache = {row.times_as_fast_as_recomputing if name == "ours" else None:.1f}""",
        lambda results: (row for row in decoding(results) if row["case"] != "recomputing"),
        "{threads}: {name}, tokens/s = {row.tokens_per_second:number}", merged=True),
    "cpu-curve": Table("cpu/curve", rows=curves),
    "classroom": Table("cpu/classroom", """
        command = {"`%s`" % name if name.startswith("make ") else name} | seconds = {seconds:s 2}
        peak MiB = {peak_bytes:memory}"""),
    "first-run": FIRST_RUN,
    "cpu-deployment": DEPLOYMENT,
    "start": Table("gpu/start*", """
        command = {command} | {file.machine}, {caches} caches, s = {value.seconds:s 3}""",
        lambda results: (row | {"command": COMMANDS[row["name"]]} for row in flat(results, "name", "caches")),
        merged=True, also=(FIRST_RUN, DEPLOYMENT)),
    "ranks-step": Table("ranks/ranks*", """
        = {file.machine}, {name} | ms per step = {seconds:ms} | times as fast as one process = {one_process}
        times as fast as DDP = {ddp:ratio} | cores used = {cores_used:.2f} | peak MiB per rank = {peak_bytes:memory}""",
        beside_one_process, f"{FASTEST} | last loss = {{losses[-1]:.9g}}"),
    "strategies": replace(RANK_STRATEGIES, rows=lambda results: (
        row for row in results if "--collectives" not in row["name"]  # they differ as in the table of the collectives
    ), merged=True, also=(GPU_STRATEGIES, OVERLAP)),
    "ranks-collectives": Table(
        ("ranks/collectives", "ranks/collectives_16_cores", "ranks/collectives_others*"), """
        = {operation}, {bytes:MB g} MB | {ranks} ranks, {file.hardware.cores} cores = {text}""",
        beside_the_library, "all = {each}", merged=True,
        order=lambda cells: (cells[""].split(", ")[0], float(cells[""].split()[1]))),
    "ranks-fit": RANKS_FIT,
    "ranks-convergence": Table("ranks/convergence_intel", rows=validations),
    "ranks-grid": Table(("ranks/grid_nano", "ranks/grid", "ranks/grid_paper"), """
        measured; predicted = {name} | {preset}, ms = {measured.ms:.1f}; {predicted.ms:.1f}
        {preset}, bubble = {measured.bubble:percent}; {predicted.bubble:percent}
        {preset}, MB of a rank = {measured.memory:MB .1f}; {predicted.memory:MB .1f}""", merged=True),
    "gpus-plan": Table("gpus/plan", """
        = {name} | measured, ms = {measured * 1e3:.1f} | predicted, ms = {predicted * 1e3:.1f}
        error = {error:percent}"""),
    "gpu-step": Table(
        tuple(f"gpu/step_{name}" for name in ("gpt2*", "recompute", "paper", "paper_fp32")), """
        = {preset}, {precision}, {batch_size} x {seq_len}, {file.machine}{" (again)" * ("recompute" in str(file.name))}
        {name}, ms = {seconds:ms} | times as fast = {row.ratio:ratio}
        if PyTorch reads losses at the end = {times_as_fast_as_unread[peer.name] if row.ratio else None:ratio}
        MFU of ours = {mfu if row.ratio else None:percent} | {name}, GiB = {held_bytes:GiB}""",
        steps, """
        {name}, tokens/s = {tokens_per_second:,.0f} | {name}, fastest step, ms = {min * 1e3:.4g}
        {name}, tensors GiB = {allocated_bytes:GiB} | {name}, driver GiB = {driver_bytes:GiB}
        {name}, last loss = {last_loss:.4f}""", merged=True),
    "gpu-real-run": Table("gpu/real_run", """
        = {name}, {parameters / 1e6:.1f} M parameters
        tokens = {tokens / 1e6:.1f} M | training loss, last {recipe.eval_every} steps = {final_loss:.4f}
        ours minus PyTorch = {row.difference:+.4f} | validation loss = {final_val_loss:.4f}
        ours minus PyTorch, validation = {row.val_difference:+.4f}
        largest distance of a validation = {row.largest_val_difference:.4f}
        ms per step = {seconds:ms} | seconds of the whole program = {wall_seconds:.0f}"""),
    "gpu-profile": Table(("gpu/profile", "gpu/profile_h100", "gpu/profile_paper"), """
        = {title} | {file.results.preset}, {file.results.precision}, {file.machine}, ms = {cell}
        {file.results.preset}, H200: share of the limit = {limit if "H200" in str(file.machine) else None:percent 0}""",
        kernel_groups, merged=True),
    "gpu-kernels": Table("gpu/profile", f"""
        kernel = `{{title}}` | calls = {{calls:g}} | ms = {{ms:.3f}} | share of time = {{share:percent}}
        TFLOP/s = {{tflops:.0f}} | share of {CEILINGS["tflops"]} TFLOP/s = {{of_tflops:percent 0}}
        TB/s = {{tbps:.2f}} | share of {CEILINGS["tbps"]} TB/s = {{of_tbps:percent 0}}""", kernels),
    "gpu-attention": Table(("gpu/attention", "gpu/attention_h100", "gpu/attention_h100_*"), """
        B x H x T x D = {" x ".join(map(str, shape))}, {file.machine}
        {name} = {tflops.forward:.0f}; {tflops.both:.0f}
        times as fast = {row.best.forward:ratio}{"; " * bool(row.best)}{row.best.both:ratio}""",
        attention_rows, "{name}, ms = {row.ms.forward:number}; {row.ms.both:number}", merged=True),
    "gpu-products": Table(
        "gpu/products", "N x C x K = {shape[0]} x {shape[1]} x {shape[2]} | {precision} = " + ", ".join(
        f"{{tflops.{kind}:.0f}} ({{times_as_fast.{kind}:ratio}})" for kind in ("forward", "input", "weight")),
        lambda results: (ours for ours, _ in results), merged=True),
    "gpu-decode": Table(("gpu/decode", "gpu/decode_*"), """
        = {preset}, {precision}, {batch} x ({prompt} + {new}), {file.machine}
        {name.replace(" + each step a graph", ", graph")}, us = {token:us}
        all tokens: times as fast = {row.ratio:ratio}
        ours, first token, ms = {first if name == "ours" else None:ms 3}
        torch, first token, ms = {first if "compiled" in name else None:ms 3}
        fastest variant of PyTorch = {variant}""",
        lambda results: (row | {"variant": decode_variant(row)} for row in decoding(results)),
        "{name}, cold start, ms = {cold * 1e3:.0f} | {name}, quartiles = {token:quartiles us}", merged=True),
    "gpu-decode-tried": Table(("gpu/decode", "gpu/decode_eight", "gpu/decode_many"), """
        products, attention = {products}, {attention} | cache cut to a multiple of = {row.cut or "not cut"}
        sequences = {batch} | us per token = {row.us_per_token:.0f}{row.error}""", decode_variants),
    "gpu-positions": Table("gpu/positions", """
        positions = {name}, generation | a token before the end of the block, us = {seconds.before:us}
        a token after it, us = {seconds.after:us} | times = {after_times:ratio}""",
        lambda results: ({"name": name, **found} for name, found in results["tokens"].items()), also=(CONTEXTS,)),
    "gpu-contexts": CONTEXTS,
    "gpu-memory": Table("gpu/memory", """
        = {title} | held, GiB = {held_bytes:GiB} | predicted, GiB = {model_bytes:GiB}
        difference = {difference * 100:+.1f} % | held according to the driver, GiB = {driver_bytes:GiB}""",
        memory_cases, "largest terms, GiB = {largest}"),
    "gpus-scaling": Table(
        tuple(f"gpus/scaling{name}" for name in ("_strong", "_two", "_16", "", "_64", "_64_two")), """
        = {name} | {title} = {seconds:ms}; {marked}; {times_as_fast:ratio}; {file.commit}""", scaling_tables, """
        tokens/s = {tokens_per_second:,.0f} | MB sent per rank = {bytes_sent:MB ,.1f}
        optimizer MB per rank = {optimizer_bytes:MB ,.1f} | last loss = {last_loss:.4f}""",
        merged=True, also=(PAPER_STEPS,)),
    "gpus-paper": PAPER_STEPS,
    "gpus-strategies": GPU_STRATEGIES,
    "ranks-strategies": RANK_STRATEGIES,
    "gpus-sharding": Table("gpus/sharding", """
        = {name} | ms per step = {seconds:ms} | tokens/s = {tokens_per_second:,.0f}
        times as fast as fully_shard = {times_as_fast:ratio} | GPU memory, GiB = {driver_bytes:GiB}
        relative to fully_shard's = {memory_ratio:.2f} | last loss = {last_loss:.4f}""", console="""
        held in pools, GiB = {held_bytes:GiB} | tensors, GiB = {allocated_bytes:GiB}
        first losses = {first_losses:list .4f}"""),
    "gpus-pipeline": Table("gpus/pipeline*", """
        ms per step; measured bubble; simulated bubble = {schedule}
        {file.machine} = {median * 1e3:.1f}; {measured:.1f} %; {simulated:.1f} %""", merged=True),
    "gpus-collectives": Table("gpus/collectives", """
        {ranks} GPUs = {name} | {bytes:MB ,.0f} MB = {seconds:us}; {times_as_fast_as_torch:ratio}
        bus GB/s of the largest = {bus_bandwidth:GB .0f}
        relative error at 10 MB = {file.results.errors[str(ranks)][name]:.1e}""",
        lambda results: results["all_reduce"], merged=True, also=(FIT,)),
    "gpus-fit": FIT,
    "gpus-timeline": OVERLAP,
    "torch-kernels": Table("torch/attention", """
        us = attention, forward and backward | {name.removeprefix("leaderboard / ")} = {row.both.mean * 1e3:.4g}""",
        lambda results: (row for row in results if row["name"].startswith("leaderboard / ")),
        merged=True, also=(MATMUL,)),
    "torch-matmul": MATMUL,
    "parity": Table("ranks/parity*", PARITY % "{file.machine}", runs_of_ranks, merged=True, also=(
        Table("gpus/parity", PARITY % "{file.machine}", runs_on_gpus),
        Table("gpus/layouts", PARITY % "{file.machine}", random_layouts),
        Table("gpus/parity_sockets", PARITY % "{file.machine}", runs_over_sockets),
    )),
    "kill": Table(("ranks/kill", "gpus/kill"), KILLS, lambda results: [results], also=(SURVIVE,)),
    "choices": Table((), also=tuple(condensed(name, measured) for name, measured in CHOICES.items())),
}  # fmt: skip

# -- the summary of docs/RESULTS.md, of which README has some rows ----------------------------------------------------


def compared(question, section, files, cell, rows=list, limit="", share="", readme=""):
    """A table of one comparison. cell: template of "x", ours or the peer. readme: title of the row in README."""
    program = '{peer.name.removeprefix("torch ").replace(" + each step a graph", ", CUDA graph")}'
    return Table(files, f"""
        key = {question}, {{file.machine}} | question = [{question}](#{section})
        readme = [{readme}](docs/RESULTS.md#{section}) | hardware = {{file.machine}}
        ours = {cell.replace("x.", "row.")} | strongest peer = {cell.replace("x.", "peer.")} ({program})
        ratio = {{ratio:ratio}} | limit = {limit} | share of the limit = {share}
        file = `{{file.name}}`, {{file.commit}}""",
        lambda results: (row for row in rows(results) if "ratio" in row), merged=True)  # fmt: skip


def two_threads(results):
    return (row for row in decoding(results) if row["threads"] == 2 and row["case"] != "recomputing")


def steps_of_two_threads(results):
    return (row for row in threads(results) if row["threads"] == 2)


def fastest_of_ours(results):
    """Ours with the most GPUs and tokens per second, in each table of gpus/scaling.py that has PyTorch's program."""
    for table in results["scaling"]:
        ours = [row for row in table["rows"] if row["side"] == "ours"]
        best = max(ours, key=lambda row: (row["ranks"], row["tokens_per_second"]))
        peer = next(row for row in table["rows"] if row["side"] != "ours" and row["ranks"] == best["ranks"])
        yield best | {"title": table["title"], "peer": peer, "ratio": best["times_as_fast"]}


def sharded(results):
    for row in results:
        peers = [each for each in results if each["name"].startswith("fully_shard")]
        if row["side"] == "ours" and row["zero"] == 3:
            peer = next(each for each in peers if ("checkpointed" in each["name"]) == ("recompute" in row["name"]))
            yield row | {"peer": peer, "ratio": row["times_as_fast"]}


def attention_pairs(results):
    """The shapes that were measured on both kinds of GPUs."""
    both = [1, 16, 16384, 64], [64, 12, 1024, 64], [4, 16, 4096, 128]
    ours = (row for row in attention_rows(results) if "best" in row and row["shape"] in both)
    return (row | {"ratio": row["best"]["both"]} for row in ours)


def collective_pairs(results):
    largest = max(row["bytes"] for row in results["all_reduce"])
    found = {row["name"]: row for row in results["all_reduce"] if row["bytes"] == largest}
    for row in (found["nccl, fp32"], found["canonical, fp32"]):
        yield row | {"peer": found["torch, fp32"], "ratio": row["times_as_fast_as_torch"]}


def fused_pairs(results):
    for ours in (row for row in fused_products(results) if row["name"] == "ours"):
        peers = [row for row in fused_products(results) if row["size"] == ours["size"] and row["name"] != "ours"]
        peer = min(peers, key=lambda row: row["ms"]["median"])
        yield ours | {"peer": peer, "ratio": {"median": peer["ms"]["median"] / ours["ms"]["median"]}}


def means(ours, peer):
    """A function of the results of a file with means: its row `ours` beside the row `peer`."""

    def rows(results):
        found = {row.get("way") or row["name"].removeprefix("leaderboard / "): row for row in results}
        ms = {name: (row.get("step") or row["both"])["mean"] for name, row in found.items() if name in (ours, peer)}
        ratio = {"median": ms[peer] / ms[ours]}
        yield {"name": ours, "ms": ms[ours], "peer": {"name": peer, "ms": ms[peer]}, "ratio": ratio}

    return rows


MS, STEP = "{x.seconds:ms} ms", "{preset}, {precision}, {batch_size} x {seq_len} tokens"
SUMMARY = (
    compared("step, `paper`, 2 threads", "cpu-training-step", ("cpu/train_step", "cpu/train_step_[iz]*"), MS,
             steps_of_two_threads, "products: {base.seconds:ms} ms", "{share_of_floor:percent 0}",
             "time per training step, preset `paper`, 2 threads, {file.machine}"),
    compared("step, GPT-2 124M, 4 x 64 tokens, 2 threads", "cpu-training-step", "cpu/train_step_gpt2", MS,
             steps_of_two_threads, "products: {base.seconds:ms} ms", "{share_of_floor:percent 0}"),
    compared("token, `paper`: {case}, 2 threads", "cpu-decode", ("cpu/decode", "cpu/decode_intel"),
             "{x.token:ms 3} ms", two_threads),
    compared("step, `paper`, 2 MPI ranks", "ranks", "ranks/ranks*", MS, beside_one_process, "2 x one process",
             '{times_as_fast["stage 0: 1 process, 1 thread"].median / 2:percent 0}',
             "the same with 2 MPI ranks, one thread each, {file.machine}"),
    compared(STEP, "gpu-step", ("gpu/step_gpt2*", "gpu/step_paper*"), MS, steps, "peak of the GPU", "{mfu:percent}",
             "time per training step, GPT-2 124M, {precision}, {batch_size} x {seq_len} tokens, one {file.machine}"),
    compared("attention, {' x '.join(map(str, shape))}", "attention",
             ("gpu/attention", "gpu/attention_h100", "gpu/attention_h100_*"), "{x.ms.both:number} ms",
             attention_pairs, "766 TFLOP/s", "{tflops.both / 766:percent 0}"),
    compared("token, {preset}, {precision}, {batch} x ({prompt} + {new})", "gpu-decode", "gpu/decode*",
             "{x.token:us} us", decoding,
             readme="time per generated token, GPT-2 124M, {precision}, one {file.machine}"),
    compared("GPT-2 124M, bf16, {ranks} GPUs, {title}", "several-gpus",
             ("gpus/scaling_strong", "gpus/scaling_16", "gpus/scaling_64"),
             "{x.tokens_per_second / 1e6:.2f} M tokens/s", fastest_of_ours, "{ranks} x one GPU", "{efficiency:percent}",
             "training speed, GPT-2 124M, bf16, {ranks} GPUs, {title}, {file.machine}"),
    compared("GPT-2 1.5B, `{name.partition('GPUs ')[2]}`", "several-gpus", "gpus/sharding", MS, sharded),
    compared("all-reduce of 1 GB, {name}, 4 GPUs", "several-gpus", "gpus/collectives", MS,
             collective_pairs),
    compared("attention in PyTorch, 16 x 16384 x 64", "pytorch-with-our-kernels", "torch/attention", "{x.ms:.3f} ms",
             means("ours", "sdpa cudnn")),
    compared("ReLU(A B + C), {size} rows", "pytorch-with-our-kernels", "torch/matmul_search",
             "{x.ms.median * 1e3:.1f} us", fused_pairs),
    compared("step of `xl`, `OverlapDDP`, 2 GPUs", "pytorch-with-our-kernels", "torch/ddp", "{x.ms:.1f} ms",
             means("overlap", "torch DDP")),
    compared("step of `xl`, `FSDP`, 2 GPUs", "pytorch-with-our-kernels", "torch/sharding", "{x.ms:.1f} ms",
             means("fsdp", "fully_shard")),
)  # fmt: skip

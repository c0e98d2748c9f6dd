"""What the page says about this machine: time by kernel, collectives, scaling, generated text, hardware."""

from benchmarks import paper
from benchmarks.harness.speedups import Speedup
from benchmarks.report import shipped
from benchmarks.report.charts import Chart, Line, Row
from benchmarks.report.measure import corpus_prompts
from benchmarks.report.runs import THIS_MACHINE
from benchmarks.report.trace import SEVERAL, collectives_of, time_by_op, waiting
from benchmarks.report.units import Table, amount, number, seconds, tiny
from gpt2core.errors import ConfigError, counted
from stage1_mpi.launch import choose

KINDS = {"threads": "stage 0, threads", "ranks": "stage 1, ranks"}
GPUS = "stage 3, GPUs (shipped)"
INSTRUCTIONS = {"SkylakeX": "AVX-512", "Haswell": "AVX2", "Zen": "AVX2"}  # names of CPUs are names of kernels
OPS = 14  # bars of a chart of ops; the other ops are one bar
TRACES = {  # {part: title}
    "trace0": "stage 0",
    "trace1-flat": "stage 1, 2 ranks, --dp flat",
    "trace1-bucket": "stage 1, 2 ranks, --dp bucket",
    "trace2": "stage 2",
    "trace3": "stage 3",
}
NO_MODULES = (
    ' The trace has no module names. "several modules": the sum of all kernels of one name (forward_kernel: '
    "attention, embedding, LayerNorm, GELU and cross-entropy; backward_kernel: the last three)."
)


# -- time by op, collectives, scaling ----------------------------------------------------------------------------------


def trace_title(runs, name):
    """The title of a trace in TRACES, with the bucket size of --dp bucket."""
    flags = runs.records[name]["options"].get("flags", [])
    size = flags[flags.index("--bucket-mb") + 1] if "--bucket-mb" in flags else ""
    return TRACES[name] + (f" --bucket-mb {size}" if size else "")


def ops(runs):
    """[(title of a stage, Chart, caption)]: the time of each kernel in one step."""
    found = []
    for name, title in TRACES.items():
        step = runs.results(name)
        if step and name != "trace1-bucket":
            times = time_by_op(step)
            found.append((title, op_chart(name, f"{title}, preset {runs.preset}", times), op_caption(runs, name, step)))
    if not runs.results("trace2"):
        chart = op_chart("trace2", "stage 2, preset paper, bf16", shipped.kernels())
        found.append(("stage 2", chart, f"Preset paper, bf16. Shipped result: {shipped.origin('gpu/profile_paper')}."))
    if not runs.results("trace3"):
        step = shipped.timelines()[-1]
        where = f"GPT-2 124M, bf16, {step['name']}, rank 0, without the kernels of NCCL"
        chart = op_chart("trace3", f"stage 3, {where}", time_by_op(step))
        found.append(("stage 3", chart, f"{where}. Shipped result: {shipped.origin('gpus/timeline')}.{NO_MODULES}"))
    return found


def op_caption(runs, name, step):
    """The caption of a chart of ops: what is summed, and the time of a step with and without the trace."""
    untraced = runs.results({"trace1-flat": "train1-2"}.get(name, name.replace("trace", "train")))
    text = "Sum over threads and ranks; the time of a kernel does not include the kernels that it calls. "
    text += f"The traced step takes {seconds(step['seconds'])}"
    if untraced and untraced["median_step"]:
        text += f", a step without a trace {seconds(untraced['median_step'])} (median without the first steps)"
    return f"{text}.{NO_MODULES}" if any(SEVERAL in op for op in time_by_op(step)) else f"{text}."


def op_chart(name, title, seconds_of):
    """Horizontal bars of {op: seconds}, largest first."""
    total, items = sum(seconds_of.values()), list(seconds_of.items())
    if len(items) > OPS:
        items = [*items[: OPS - 1], (f"{len(items) - OPS + 1} others", sum(time for _, time in items[OPS - 1 :]))]
    unit, scale = ("s", 1) if total > 10 else ("ms", 1e3)
    # in the unit of the axis, so that a reader can compare them
    texts = [f"{number(time * scale)} {unit}, {percent(time / total)}" for _, time in items]
    rows = [Row(op, [(t * scale, text, "c0", "")], True) for (op, t), text in zip(items, texts, strict=True)]
    alt = f"{title}: {', '.join(f'{op} {percent(time / total)}' for op, time in items[:3])} of the kernels' time."
    return Chart(f"{name}-ops", f"Kernels of one step, {title}", alt, f"time ({unit})", rows=rows)


def percent(share):
    return f"{100 * share:.0f} %" if share >= 0.01 else "below 1 %"


def collectives(runs):
    """A table of what the collectives of a traced step moved and cost on this machine; None without a trace."""
    rows = []
    for name in TRACES:
        step = runs.results(name)
        for row in collectives_of(step) if step else []:
            share = number(100 * row["seconds"] / step["seconds"])
            sizes = row["calls"], f"{row['bytes']:,}", number(1e3 * row["seconds"]), share
            rows.append([trace_title(runs, name), row["name"], *sizes, number(1e3 * waiting(step))])
    caption = (
        "Collectives of one traced step on this machine. One in progress may wait for a slower rank. The last column: "
        "how long the workers of rank 0 wait for all collectives of the step."
    )
    head = ["program", "collective", "calls", "arrays (bytes)", "in progress (ms)", "of the step (%)", "wait (ms)"]
    return Table(caption, head, rows, (2, 3, 4, 5, 6)) if rows else None


def all_reduce_chart(runs):
    """(Chart, caption) of the algorithms of an all-reduce; None if they were not measured."""
    if not (results := runs.results("collectives")):
        return None
    by_algorithm = {}
    for row in results["rows"]:
        by_algorithm.setdefault(row["algorithm"], []).append((row["bytes"], 1e3 * row["median"]))
    lines = [
        Line({"mpi": "MPI library"}.get(name, name), *map(list, zip(*sorted(points), strict=True)), colour, marker="o")
        for (name, points), colour in zip(
            by_algorithm.items(), ("ink", "c0", "c1", "c2", "c3", "c4"), strict=False
        )
    ]  # fmt: skip
    largest = max(row["bytes"] for row in results["rows"])
    ring = next(row for row in results["rows"] if row["bytes"] == largest and row["algorithm"] == "ring")
    chart = Chart(
        "all-reduce", f"All-reduce on {results['ranks']} ranks of this machine", "Time of an all-reduce over the size "
        "of the array, for the MPI library and the algorithms of stage 1, on logarithmic axes.", "bytes of the array",
        "time (ms)", lines, log_x=True, log_y=True,
    )  # fmt: skip
    return chart, (
        f"All-reduce on {results['ranks']} ranks of this machine. For {amount(largest)}, a rank of the ring sends "
        f"{amount(ring['bytes_sent'])} and takes {seconds(ring['median'])}."
    )


def scaling(runs):
    """(Chart, caption): the speed-up of threads, ranks and GPUs beside the ideal line."""
    lines, captions, found = [], [], {}  # found: {(what, count): Speedup}
    if measured := runs.scaling_speedups():
        one, ratios = measured
        found |= {(KINDS[kind], count): ratio for (kind, count), ratio in ratios.items()}
        captions.append(
            f"Stages 0 and 1: preset {runs.records['scaling']['options']['preset']}, the same batch for every count; "
            f"one process with one thread takes {seconds(one)} per step{runs.busy(['scaling'], ratios.values())}."
        )
    points, files = shipped.scaling_rows()
    found |= {(GPUS, count): Speedup(count * efficiency, count) for count, efficiency in points if count > 1}
    captions.append(f"Stage 3: GPT-2 124M, 64 sequences for each GPU; {'; '.join(map(shipped.origin, files))}.")
    for what, colour in zip((*KINDS.values(), GPUS), ("c0", "c1", "c2"), strict=True):
        points = [(count, each.times) for (kind, count), each in found.items() if kind == what and not each.disturbed]
        if points:
            lines.append(Line(what, *map(list, zip((1, 1.0), *points, strict=True)), colour, marker="o"))
    disturbed = {key: each for key, each in found.items() if each.disturbed}
    if disturbed:
        points = [(count, each.times) for (_, count), each in disturbed.items()]
        lines.append(Line("disturbed, no results", *map(list, zip(*points, strict=True)), "c3", "", marker="x"))
        texts = [f"{count} {what}: {each.reason}" for (what, count), each in disturbed.items()]
        text = "Crosses are no results: the run to which they are relative was disturbed"
        captions.append(f"{text} ({'; '.join(texts)}).")
    most = max(max(line.x) for line in lines)
    lines.insert(0, Line("ideal", [1, most], [1, most], "soft", "--"))
    chart = Chart(
        "scaling", "Speed-up of the training step",
        "Speed-up over the number of threads, ranks or GPUs, with the ideal line, on which twice as many workers are "
        "twice as fast.", "threads, ranks or GPUs", "times as fast as one", lines, whole_x=True,
    )  # fmt: skip
    return chart, " ".join(captions)


# -- samples, this machine ---------------------------------------------------------------------------------------------


def samples(runs):
    words = corpus_prompts(1)[0].split()
    rows = [
        [f"paper, {name} (its Figure {number})", "its training", text]
        for number, (name, text) in enumerate(paper.SAMPLES.items(), 6)
    ]
    ours = {"infer0": "stage 0", "infer1-replicate": "stage 1, replicate", "infer1-tensor": "stage 1, tensor"}
    ours |= {f"infer{n}": f"stage {n}" for n in (2, 3)}
    weights = dict.fromkeys(ours, "shipped, 1200 updates")
    trained = {"train0": "stage 0", "train1-2": "stage 1"}
    weights |= dict.fromkeys(trained, f"{runs.steps} updates, preset {runs.preset}")
    for name, title in (ours | trained).items():
        if results := runs.results(name):
            rows.append([f"ours, {title}", weights[name], results["sample"]])
    caption = (
        "Greedy continuations of the first 256 tokens of the corpus, or of as many as the model's block has. The "
        "paper's corpus and ours are different texts, so the continuations are about different things. Our 256 tokens "
        f"begin and end so: “{' '.join(words[:12])} … {' '.join(words[-12:])}”"
    )
    return Table(caption, ["program", "weights", "30 new tokens"], rows)


def machine(hardware, runs, titles):
    """[Table]: hardware and versions, and the parts that are missing. titles: {name of a part: its title}."""
    names = {
        "cpu": "CPU", "cores": "cores", "memory": "memory", "system": "system", "python": "Python", "numpy": "NumPy",
        "blas": "BLAS", "blas_kernels": "kernels of BLAS", "mkl": "MKL", "mpi4py": "mpi4py", "mpich": "MPICH (wheel)",
        "torch": "PyTorch", "mpi": "MPI", "gpu": "GPU", "gpus": "GPUs", "driver": "driver", "cupy": "CuPy",
        "triton": "Triton",
    }  # fmt: skip
    known = {"memory": f"{hardware['memory_bytes'] / 2**30:.1f} GiB", "mpi": mpi_name()} | hardware
    if extension := INSTRUCTIONS.get(known.get("blas_kernels")):
        known["blas_kernels"] += f" (OpenBLAS's kernels for {extension})"
    skipped = [[titles.get(name, name), reason] for name, reason in runs.missing.items()]
    if not hardware.get("gpu"):
        known["gpu"] = "none (nvidia-smi lists no GPU)"
        skipped.append(["stages 2 and 3 on GPUs", "nvidia-smi lists no GPU: shipped results are in grey or noted"])
    rows = [[title, known[key]] for key, title in names.items() if known.get(key)]
    tables = [Table("Hardware and versions.", ["", THIS_MACHINE], rows)]
    if skipped:
        tables.append(Table("What was not measured on this machine.", ["not measured", "reason"], skipped))
    return tables


def mpi_name():
    """The name of the MPI library that mpi4py loads, or why there is none."""
    try:
        return choose()[1].name
    except (ConfigError, ImportError) as error:
        return f"none: {error}"


def remarks(runs):
    """[sentence]: other programs that ran during a measurement, and the GPU kernels in Triton's interpreter."""
    found = []
    timed = [name for name, record in runs.records.items() if record.get("times", True)]
    if names := runs.busy_parts():
        cores = {name: runs.records[name].get("other_cores") for name in names}
        texts = {name: "" if used is None else f": {used:.1f}" for name, used in cores.items()}
        titles = "; ".join(f"{runs.records[name].get('title', name)}{text}" for name, text in texts.items())
        found.append(
            f"Other programs ran on this machine: {len(names)} of {counted(len(timed), 'part')} were measured "
            f"{runs.meanwhile(*names)}. They may have slowed the programs unequally. A speed-up above its ideal is "
            f"marked as disturbed. For exact times, run make report ARGS=--fresh on an idle machine. "
            f"The parts, with the number of cores: {titles}."
        )
    if results := runs.results("interpreter"):
        first, *_ = curves = results["losses"].values()
        largest = max(abs(a - b) / b for losses in curves for a, b in zip(losses, first, strict=True))
        found.append(
            f"Without a GPU, Triton's interpreter runs the GPU kernels on the CPU, too slowly to compare times. In "
            f"{len(first)} steps of preset {results['preset']}, the losses of stages 2 and 3 differ from those of "
            f"stage 0 by at most {tiny(largest)} of their value."
        )
    return found

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
COLOURS = "ink", "c0", "c1", "c2", "c3", "c4"
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
            chart = op_chart(name, f"{title}, preset {runs.preset}", time_by_op(step))
            found.append((title, chart, op_caption(runs, name, step)))
    if not runs.results("trace2"):
        where = "preset paper, bf16"
        chart, source = op_chart("trace2", f"stage 2, {where}", shipped.kernels()), shipped.origin("gpu/profile_paper")
        found.append(("stage 2", chart, f"{where.capitalize()}. Shipped result: {source}."))
    if not runs.results("trace3"):
        step, source = shipped.timelines()[-1], shipped.origin("gpus/timeline")
        where = f"GPT-2 124M, bf16, {step['name']}, rank 0, without the kernels of NCCL"
        chart = op_chart("trace3", f"stage 3, {where}", time_by_op(step))
        found.append(("stage 3", chart, f"{where}. Shipped result: {source}.{NO_MODULES}"))
    return found


def op_caption(runs, name, step):
    """The caption of a chart of ops: what is summed, and the time of a step with and without the trace."""
    untraced = runs.results({"trace1-flat": "train1-2"}.get(name, name.replace("trace", "train")))
    median = untraced and untraced["median_step"]
    without = f", a step without a trace {seconds(median)} (median without the first steps)" if median else ""
    return (
        "Sum over threads and ranks; the time of a kernel does not include the kernels that it calls. The traced step "
        f"takes {seconds(step['seconds'])}{without}.{NO_MODULES * any(SEVERAL in op for op in time_by_op(step))}"
    )


def op_chart(name, title, seconds_of):
    """Horizontal bars of {op: seconds}, largest first."""
    total, items = sum(seconds_of.values()), list(seconds_of.items())
    if len(items) > OPS:
        items = [*items[: OPS - 1], (f"{len(items) - OPS + 1} others", sum(time for _, time in items[OPS - 1 :]))]
    unit, scale = ("s", 1) if total > 10 else ("ms", 1e3)  # of all texts and of the axis, so that a reader can compare
    percent = {op: f"{100 * time / total:.0f} %" if time >= total / 100 else "below 1 %" for op, time in items}
    marks = {op: (time * scale, f"{number(time * scale)} {unit}, {percent[op]}", "c0", "") for op, time in items}
    alt = f"{title}: {', '.join(f'{op} {percent[op]}' for op, _ in items[:3])} of the kernels' time."
    rows = [Row(op, [mark], bar=True) for op, mark in marks.items()]
    return Chart(f"{name}-ops", f"Kernels of one step, {title}", alt, f"time ({unit})", rows=rows)


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
    lines, rows = [], sorted(results["rows"], key=lambda row: row["bytes"])
    for name, colour in zip({row["algorithm"]: 0 for row in results["rows"]}, COLOURS, strict=False):
        of_algorithm = [row for row in rows if row["algorithm"] == name]
        points = [row["bytes"] for row in of_algorithm], [1e3 * row["median"] for row in of_algorithm]
        lines.append(Line({"mpi": "MPI library"}.get(name, name), *points, colour, marker="o"))
    title = f"All-reduce on {results['ranks']} ranks of this machine"
    alt = "Time of an all-reduce over the size of the array, for the MPI library and the algorithms of stage 1, on "
    alt += "logarithmic axes."
    axes = "bytes of the array", "time (ms)"
    ring = [row for row in rows if row["algorithm"] == "ring"][-1]  # the largest array
    return Chart("all-reduce", title, alt, *axes, lines, log=True), (
        f"{title}. For {amount(ring['bytes'])}, a rank of the ring sends {amount(ring['bytes_sent'])} and takes "
        f"{seconds(ring['median'])}."
    )


def scaling(runs):
    """(Chart, caption): the speed-up of threads, ranks and GPUs beside the ideal line."""
    captions, found = [], {}  # found: {(what, count): Speedup}
    if measured := runs.scaling_speedups():
        one, ratios = measured
        found |= {(KINDS[kind], count): ratio for (kind, count), ratio in ratios.items()}
        captions.append(
            f"Stages 0 and 1: preset {runs.records['scaling']['options']['preset']}, the same batch for every count; "
            f"one process with one thread takes {seconds(one)} per step{runs.busy(['scaling'], ratios.values())}."
        )
    efficiencies, files = shipped.scaling_rows()
    found |= {(GPUS, count): Speedup(count * efficiency, count) for count, efficiency in efficiencies if count > 1}
    captions.append(f"Stage 3: GPT-2 124M, 64 sequences for each GPU; {'; '.join(map(shipped.origin, files))}.")
    good, bad = ({key: each for key, each in found.items() if each.disturbed == bad} for bad in (False, True))
    lines = []
    for what, colour in zip((*KINDS.values(), GPUS), COLOURS[1:], strict=False):
        if points := {count: each.times for (kind, count), each in good.items() if kind == what}:
            lines.append(Line(what, [1, *points], [1.0, *points.values()], colour, marker="o"))
    if bad:
        points = [count for _, count in bad], [each.times for each in bad.values()]
        lines.append(Line("disturbed, no results", *points, "c3", "", marker="x"))
        texts = "; ".join(f"{count} {what}: {each.reason}" for (what, count), each in bad.items())
        captions.append(f"Crosses are no results: the run to which they are relative was disturbed ({texts}).")
    most = max(max(line.x) for line in lines)
    lines.insert(0, Line("ideal", [1, most], [1, most], "soft", "--"))
    alt = "Speed-up over the number of threads, ranks or GPUs, with the ideal line, on which twice as many workers are "
    title, axes = "Speed-up of the training step", ("threads, ranks or GPUs", "times as fast as one")
    return Chart("scaling", title, f"{alt}twice as fast.", *axes, lines), " ".join(captions)


# -- samples, this machine ---------------------------------------------------------------------------------------------


def samples(runs):
    words, modes = corpus_prompts(1)[0].split(), {"infer1-replicate": "replicate", "infer1-tensor": "tensor"}
    rows = [
        [f"paper, {name} (its Figure {number})", "its training", text]
        for number, (name, text) in enumerate(paper.SAMPLES.items(), 6)
    ]
    for name in ("infer0", *modes, "infer2", "infer3", "train0", "train1-2"):
        if results := runs.results(name):
            weights = "shipped, 1200 updates" if "infer" in name else f"{runs.steps} updates, preset {runs.preset}"
            mode = f", {modes[name]}" if name in modes else ""
            rows.append([f"ours, stage {name[5]}{mode}", weights, results["sample"]])
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
    if names := runs.busy_parts():
        timed = [name for name, record in runs.records.items() if record.get("times", True)]
        busy = [runs.records[name] for name in names]
        cores = ("" if each.get("other_cores") is None else f": {each['other_cores']:.1f}" for each in busy)
        titles = (each.get("title", name) for name, each in zip(names, busy, strict=True))
        found.append(
            f"Other programs ran on this machine: {len(names)} of {counted(len(timed), 'part')} were measured "
            f"{runs.meanwhile(*names)}. They may have slowed the programs unequally. A speed-up above its ideal is "
            f"marked as disturbed. For exact times, run make report ARGS=--fresh on an idle machine. The parts, with "
            f"the number of cores: {'; '.join(map(''.join, zip(titles, cores, strict=True)))}."
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

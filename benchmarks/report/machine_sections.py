"""The sections of the report about this machine: hardware, time by op, collectives, scaling, timeline, step player."""

import json

from benchmarks.harness.speedups import Speedup
from benchmarks.harness.table_format import load
from benchmarks.report import shipped
from benchmarks.report.charts import Chart, Line
from benchmarks.report.markup import (
    Markup,
    amount,
    element,
    figure,
    paragraph,
    seconds,
    section,
    table,
)
from benchmarks.report.trace import MICROSECONDS, SEVERAL, collectives_of, time_by_op, waiting
from gpt2core.errors import ConfigError, counted
from stage1_mpi.launch import choose

KINDS = {"threads": "stage 0, threads, this machine", "ranks": "stage 1, ranks, this machine"}
GPUS = "stage 3, GPUs, shipped"
OPS = 14  # bars of a chart of ops; the other ops are one bar
TRACES = {  # {part: title}
    "trace0": "stage 0",
    "trace1-flat": "stage 1, 2 ranks, --dp flat",
    "trace1-bucket": "stage 1, 2 ranks, --dp bucket",
    "trace2": "stage 2",
    "trace3": "stage 3",
}
NO_MODULES = (
    ' The trace has no module names. A bar with "several modules" is the sum of all kernels of one name. Attention, '
    "embedding, LayerNorm, GELU and cross-entropy have a forward_kernel. LayerNorm, GELU and cross-entropy have a "
    "backward_kernel."
)
MAX_BARS = 4000  # bars of one view of the player; a phone stays fast with them


# -- hardware ----------------------------------------------------------------------------------------------------------


def machine(hardware, runs, titles):
    """Hardware and versions, and the parts that are missing. titles: {name of a part: its title}."""
    names = {
        "cpu": "CPU", "cores": "cores", "system": "system", "python": "Python", "numpy": "NumPy", "blas": "BLAS",
        "blas_kernels": "kernels of BLAS", "mkl": "MKL", "mpi4py": "mpi4py", "mpich": "MPICH (wheel)",
        "torch": "PyTorch", "gpu": "GPU", "gpus": "GPUs", "driver": "driver", "cupy": "CuPy", "triton": "Triton",
    }  # fmt: skip
    rows = [{"": title, "this machine": hardware[key]} for key, title in names.items() if hardware.get(key)]
    rows.insert(2, {"": "memory", "this machine": f"{hardware['memory_bytes'] / 2**30:.1f} GiB"})
    rows.append({"": "MPI", "this machine": mpi_name()})
    if not hardware.get("gpu"):
        rows.append({"": "GPU", "this machine": "none (nvidia-smi lists no GPU)"})
    skipped = [{"not measured": titles.get(name, name), "reason": reason} for name, reason in runs.missing.items()]
    if not hardware.get("gpu"):
        skipped.append(
            {
                "not measured": "stages 2 and 3 on GPUs",
                "reason": "nvidia-smi lists no GPU: shipped results are shown, in grey or with their hardware and date",
            }
        )
    parts = [table("Hardware and versions.", rows), *busy(runs)]
    if skipped:
        parts.append(table("What was not measured on this machine.", skipped, set(range(len(skipped)))))
    return section("machine", "This machine", *parts, *interpreted(runs))


def busy(runs):
    """A warning if other programs ran during a measurement."""
    names = [name for name, record in runs.records.items() if runs.is_busy(name) and record.get("times", True)]
    if not names:
        return []
    titles = "; ".join(runs.records[name].get("title", name) for name in names)
    return [
        paragraph(
            f"Other programs ran on this machine: {len(names)} of {counted(len(runs.records), 'part')} were measured "
            f"{runs.meanwhile(*names)}. They may have slowed the programs unequally. A speed-up above its ideal is "
            f"marked as disturbed. For exact times, run make report ARGS=--fresh on an idle machine. The parts: "
            f"{titles}."
        )
    ]


def mpi_name():
    """The name of the MPI library that mpi4py loads, or why there is none."""
    try:
        return choose()[1].name
    except (ConfigError, ImportError) as error:
        return f"none: {error}"


def interpreted(runs):
    """One sentence about the kernels of stages 2 and 3 in Triton's interpreter."""
    results = runs.results("interpreter")
    if not results:
        return []
    first = results["losses"]["stage 0"]
    largest = {
        name: max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
        for name, losses in results["losses"].items()
        if name != "stage 0"
    }
    text = ", ".join(f"{name} by at most {value:.1g}" for name, value in largest.items())
    return [
        paragraph(
            f"Without a GPU, Triton's interpreter runs the GPU kernels on the CPU, too slowly to compare times. "
            f"Relative differences from the losses of stage 0 in {len(first)} steps of preset {results['preset']}: "
            f"{text}."
        )
    ]


# -- time by op --------------------------------------------------------------------------------------------------------


def trace_title(runs, name):
    """The title of a trace in TRACES, with the bucket size of --dp bucket."""
    flags = runs.records[name]["options"].get("flags", [])
    size = flags[flags.index("--bucket-mb") + 1] if "--bucket-mb" in flags else ""
    return TRACES[name] + (f" --bucket-mb {size}" if size else "")


def ops(runs):
    """(section, charts): the time of each kernel in one step, for every stage."""
    found = []  # [(name of the chart, title, {op: seconds}, caption)]
    for name, title in TRACES.items():
        step = runs.results(name)
        if step and name != "trace1-bucket":
            found.append((name, f"{title}, preset {runs.preset}", time_by_op(step), op_caption(runs, name, step)))
    if not runs.results("trace2"):
        caption = f"Shipped result: {shipped.origin('gpu/profile_paper')}."
        found.append(("trace2", "stage 2, preset paper, bf16", shipped.kernels(), caption))
    if not runs.results("trace3"):
        title, step = shipped.timelines()[-1]
        caption = f"Rank 0, without the kernels of NCCL. Shipped result: {shipped.origin('gpus/timeline')}.{NO_MODULES}"
        found.append(("trace3", f"stage 3, GPT-2 124M, bf16, {title}", time_by_op(step), caption))
    charts = [op_chart(f"{name}-ops", f"Kernels of one step, {title}", times) for name, title, times, _ in found]
    pictures = [figure(chart.svg, caption) for chart, (*_, caption) in zip(charts, found, strict=True)]
    return section("ops", "Time by op", *pictures), charts


def op_caption(runs, name, step):
    """The caption of a chart of ops: what is summed, and the time of a step with and without the trace."""
    untraced = runs.results({"trace1-flat": "train1-2"}.get(name, name.replace("trace", "train")))
    text = "Sum over threads and ranks. The time of a kernel does not include the kernels that it calls. "
    text += f"The traced step takes {seconds(step['seconds'])}"
    if untraced and untraced["median_step"]:
        text += f", a step without a trace {seconds(untraced['median_step'])} (median without the first steps)"
    return f"{text}.{NO_MODULES}" if any(SEVERAL in op for op in time_by_op(step)) else f"{text}."


def op_chart(name, title, seconds_of):
    """Horizontal bars of {op: seconds}, largest first."""
    total, items = sum(seconds_of.values()), list(seconds_of.items())
    if len(items) > OPS:
        items = [*items[: OPS - 1], (f"{len(items) - OPS + 1} others", sum(time for _, time in items[OPS - 1 :]))]
    unit, scale = ("s", 1) if total > 1 else ("ms", 1e3)
    bars = [(short(op), time * scale, f"{brief(time)}, {percent(time / total)}") for op, time in items]
    top = ", ".join(f"{short(op)} {percent(time / total)}" for op, time in items[:3])
    return Chart(name, title, f"{title}: {top} of the kernels' time.", unit, bars=bars)


def brief(time):
    """Seconds as text for a bar; two significant digits below 0.1 ms: 5.0 us."""
    digits = 0 if time >= 1e-5 else 1
    return seconds(time) if time >= 1e-4 else f"{time / MICROSECONDS:.{digits}f} us"


def percent(share):
    return f"{100 * share:.0f} %" if share >= 0.01 else "below 1 %"


def short(op):
    return op if len(op) <= 31 else op[:28] + "..."


# -- collectives -------------------------------------------------------------------------------------------------------


def collectives(runs):
    """(section, charts): what the collectives of a step moved and cost, and the algorithms of an all-reduce."""
    rows = []
    for name in TRACES:
        step = runs.results(name)
        for row in collectives_of(step) if step else []:
            rows.append(
                {
                    "program": trace_title(runs, name),
                    "collective": row["name"],
                    "calls per step": row["calls"],
                    "arrays of rank 0": amount(row["bytes"]),
                    "in progress": seconds(row["seconds"]),
                    "share of the step": f"{100 * row['seconds'] / step['seconds']:.1f} %",
                    "workers waited (all collectives)": seconds(waiting(step)),
                }
            )
    parts, charts = [], []
    if rows:
        text = "Collectives of one traced step on this machine. A collective in progress may wait for a slower rank."
        parts.append(table(text, rows))
    if results := runs.results("collectives"):
        charts.append(all_reduce_chart(results))
        parts.append(figure(charts[-1].svg, all_reduce_caption(results)))
    parts.append(gpu_strategies())
    return section("collectives", "What each collective moved and cost", *parts), charts


def all_reduce_chart(results):
    by_algorithm = {}
    for row in results["rows"]:
        by_algorithm.setdefault(row["algorithm"], []).append((row["bytes"], 1e3 * row["median"]))
    names = {"mpi": "MPI library"}
    colours = ["ink", "c0", "c1", "c2", "c3", "c4"]
    lines = [
        Line(names.get(name, name), *map(list, zip(*sorted(points), strict=True)), colour, marker="o")
        for (name, points), colour in zip(by_algorithm.items(), colours, strict=False)
    ]
    return Chart(
        "all-reduce", f"All-reduce on {results['ranks']} ranks of this machine",
        "Time of an all-reduce over the size of the array, for the MPI library and the algorithms of stage 1, on "
        "logarithmic axes.", "bytes of the array", "ms", lines, log_x=True, log_y=True,
    )  # fmt: skip


def all_reduce_caption(results):
    largest = max(row["bytes"] for row in results["rows"])
    ring = next(row for row in results["rows"] if row["bytes"] == largest and row["algorithm"] == "ring")
    return (
        f"For an array of {amount(largest)}, a rank of the ring sends {amount(ring['bytes_sent'])} and takes "
        f"{seconds(ring['median'])}. Costs in theory: stage1_mpi/collectives.py."
    )


def gpu_strategies():
    """The shipped times of the strategies of stage 3."""
    rows = [
        {
            "program": row["name"].removeprefix("ours, "),
            "messages": row["messages"],
            "sent per rank and step": amount(row["bytes_sent"]),
            "added to the step": seconds(max(0.0, row["communication_share"] * row["seconds"]["median"])),
            "optimizer state per rank": amount(row["optimizer_bytes"]),
        }
        for row in load("gpus/strategies")["results"]
        if row.get("communicate", True) and "compress" not in row and not row.get("deterministic")
    ]
    caption = f"Stage 3, GPT-2 124M, bf16. Shipped result: {shipped.origin('gpus/strategies')}."
    return table(caption, rows, set(range(len(rows))))


# -- scaling -----------------------------------------------------------------------------------------------------------


def scaling(runs):
    """(section, charts): the speed-up of threads, ranks and GPUs beside the ideal line."""
    lines, captions, found = [], [], {}  # found: {(what, count): Speedup}
    if measured := runs.scaling_speedups():
        one, ratios = measured
        found |= {(KINDS[kind], count): ratio for (kind, count), ratio in ratios.items()}
        captions.append(
            f"Stages 0 and 1: preset {results_preset(runs)}, the same batch for every count; one process with one "
            f"thread takes {seconds(one)} per step{runs.busy(['scaling'], ratios.values())}."
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
        reasons = [f"{count} {what}: {each.reason}" for (what, count), each in disturbed.items()]
        text = "Crosses are no results: the run to which they are relative was disturbed"
        captions.append(f"{text} ({'; '.join(reasons)}).")
    most = max(max(line.x) for line in lines)
    lines.insert(0, Line("ideal", [1, most], [1, most], "soft", "--"))
    chart = Chart(
        "scaling", "Speed-up of the training step",
        "Speed-up over the number of threads, ranks or GPUs, with the ideal line, on which twice as many workers are "
        "twice as fast.", "threads, ranks or GPUs", "times as fast as one", lines, whole_x=True,
    )  # fmt: skip
    return section("scaling", "Scaling", figure(chart.svg, " ".join(captions))), [chart]


def results_preset(runs):
    return runs.records["scaling"]["options"]["preset"]


# -- timeline and player -----------------------------------------------------------------------------------------------


def views(runs):
    """The views of the player: {"traces": [...], "slices": [...]} as JSON data."""
    traces = []
    for name in TRACES:
        if step := runs.results(name):
            traces.append(
                {"title": f"training step, {trace_title(runs, name)}, preset {runs.preset}, this machine", **step}
            )
    if not runs.results("trace3"):
        for title, step in shipped.timelines():
            where = f"training step, stage 3, {title}, GPT-2 124M, kernels of rank 0; {shipped.origin('gpus/timeline')}"
            traces.append({"title": where, **step})
    recorded = runs.results("recordings") or {}
    return {"traces": [thinned(view) for view in traces], "slices": list(recorded.values())}


def thinned(view):
    """The view with at most MAX_BARS bars: the shortest are left out, and the title says how many."""
    bars = sorted((event[2] for lane in view["lanes"] for event in lane["events"]), reverse=True)
    if len(bars) <= MAX_BARS:
        return view
    least = bars[MAX_BARS - 1]
    lanes = [lane | {"events": [event for event in lane["events"] if event[2] > least]} for lane in view["lanes"]]
    return view | {"lanes": lanes, "title": f"{view['title']} (without bars below {seconds(least * MICROSECONDS)})"}


def timeline(runs):
    """(section, charts): a static picture of the traced step of stage 1."""
    found = [(name, runs.results(name)) for name in ("trace1-bucket", "trace1-flat", "trace0") if runs.results(name)]
    if found:
        name, step = found[0]
        title = f"One training step, {trace_title(runs, name)}, preset {runs.preset}"
        caption = f"The step takes {seconds(step['seconds'])}. The player below shows each bar with its name."
    else:
        title, step = shipped.timelines()[-1]
        caption = f"Shipped result: {shipped.origin('gpus/timeline')}."
    chart = Chart(
        "timeline", title, f"{title}: kernels and collectives of each lane over time.", "ms",
        lanes=[(f"rank {lane['rank']}, {lane['name']}", lane["events"]) for lane in step["lanes"]],
    )  # fmt: skip
    return section("timeline", "The timeline of a step", figure(chart.svg, caption)), [chart]


def player(data):
    """The section of the step player; player.js fills it."""
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return section(
        "player", "Step player",
        paragraph(
            "Choose a view. Then use the slider, the buttons, or these keys: right and left arrow for the next and the "
            "previous frame, Home and End for the first and the last, the space bar to play and pause. The keys work "
            "while the player is in view. In the list of views, up and down choose another view, and Enter opens the "
            "list."
        ),
        element("div", element("noscript", "The player needs JavaScript."), id="step-player"),
        Markup(f'<script type="application/json" id="player-data">{text}</script>'),
    )  # fmt: skip

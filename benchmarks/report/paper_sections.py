"""The sections of the report that repeat the paper: Tables 1 and 2, sections 9.1 to 9.3, samples, Figures 1 to 5."""

import math
import re

from benchmarks import paper
from benchmarks.harness.speedups import Speedup, speedups
from benchmarks.report import shipped
from benchmarks.report.charts import PAPER_STYLES, SERIES, Chart, Line
from benchmarks.report.diagrams import TITLES
from benchmarks.report.markup import (
    amount,
    details,
    element,
    figure,
    listing,
    paragraph,
    seconds,
    section,
    table,
    times_as_fast,
)
from benchmarks.report.runs import PAPER_NAMES, STAGE_NAMES
from benchmarks.report.trace import collectives_of, time_by_op
from gpt2core.errors import counted

PRODUCTS = "linear", "mlp", "unembed", "attention"  # names of kernels that contain matrix products begin with these
NOT_MEASURED = "not measured"


# -- Table 1 -----------------------------------------------------------------------------------------------------------


def table_1(runs):
    rows, grey = [], set()
    for stage, name in STAGE_NAMES.items():
        training, inference = paper.SECONDS[PAPER_NAMES[stage]]
        both = f"{training:,.2f} s (its Table 1), {paper.MPI_SECONDS_IN_TEXT:,.0f} s (its text)"
        ours = runs.training(stage), runs.inference(stage)
        cells = [f"{seconds(run.value)} ({run.precision})" if run else NOT_MEASURED for run in ours]
        reasons = runs.training_reason(stage), runs.inference_reason(stage)
        where = {run.where: None for run in ours if run}  # in this order, each text once
        if not any(ours) and reasons[0] == reasons[1]:
            where = {reasons[0]: None}
        else:
            for what, run, reason in zip(("training", "inference"), ours, reasons, strict=True):
                where |= {} if run else {f"{what} {NOT_MEASURED}: {reason}": None}
        rows.append(
            {
                "program": name,
                "training, paper": both if stage == 1 else f"{training:,.2f} s",
                "training, ours": cells[0],
                "inference, paper": f"{inference:.2f} s",
                "inference, ours": cells[1],
                "ours was measured on": "; ".join(where),
            }
        )
        if not any(ours) or any(run and run.shipped for run in ours):
            grey.add(stage)
    caption = (
        f"Table 1. Training ({runs.steps} steps of preset {runs.preset}) and inference (256 tokens of prompt, 30 new "
        f"tokens), both without the start of the program. The precision is in "
        f"parentheses. Grey rows have results of another machine. The paper: "
        f"{paper.CPU}; {paper.GPU}."
    )
    return section(
        "table1", "Table 1: training and inference time", table(caption, rows, grey),
        element("h3", "Two times for one run"), paragraph(contradiction()),
        element("h3", "Inference on several ranks"), inference_modes(runs),
        element("h3", "What each change gains"), listing(gains(runs)),
    )  # fmt: skip


def contradiction():
    serial, table_time, text_time = paper.SECONDS["serial"][0], paper.SECONDS["MPI"][0], paper.MPI_SECONDS_IN_TEXT
    fewer = 1 - text_time / serial
    return (
        f"The paper contradicts itself about the MPI program on CPUs. Its Table 1 has {table_time:,.2f} s, which is "
        f"{serial / table_time:.1f} times as fast as the serial program. Its sections 9.1 and 9.3 have "
        f'{text_time:,.0f} s and "15 % faster". {text_time:,.0f} s is {100 * fewer:.1f} % less than {serial:,.0f} s, '
        f'so "15 % faster" fits the second time. The slides have 1,287 s (21.5 minutes).'
    )


INFERENCE = {  # {part: (program, what is divided)}
    "infer0": ("stage 0, one process", "nothing: one prompt, the whole model"),
    "infer1-replicate": ("stage 1, --mode replicate", "nothing: each rank computes all logits; rank 0 uses their mean"),
    "infer1-batch": ("stage 1, --mode batch", "the prompts"),
    "infer1-tensor": ("stage 1, --mode tensor", "each layer"),
}


def inference_modes(runs):
    """A table of --mode replicate, batch and tensor, with stage 0 in the first row."""
    rows, grey, ratios = [], set(), runs.inference_speedups()
    for name, (program, divided) in INFERENCE.items():
        row = dict.fromkeys(("prompts", "seconds", "seconds per prompt", "times as fast per prompt"), "")
        row = {"program": program, "what is divided": divided} | row
        if results := runs.results(name):
            ranks, per_prompt = runs.records[name]["options"]["ranks"], results["seconds"] / results["prompts"]
            row["program"] += f", {ranks} ranks" if ranks and name != "infer0" else ""
            row |= {"prompts": results["prompts"], "seconds": seconds(results["seconds"])}
            row["seconds per prompt"] = seconds(per_prompt)
            if name == "infer0":
                row["times as fast per prompt"] = "1"
            elif name in ratios:
                row["times as fast per prompt"] = ratios[name].cell(f"{ratios[name].times:.3g}")
        else:
            grey.add(len(rows))
            row["seconds"] = runs.reason(name)
        rows.append(row)
    names = [name for name in INFERENCE if name in runs.records]
    count = len(runs.results("infer0")["samples"]) if "infer0" in names else 0
    caption = "Inference of stages 0 and 1 on this machine: 256 tokens of prompt and 30 new tokens for each prompt" + (
        f"; medians of {count} runs" if count > 1 else ""
    )
    caption += f"{runs.busy(names, ratios.values())}."
    return table(caption, rows, grey)


def gains(runs):
    """[(title, sentence)] for the gains that sections 9.1 to 9.3 of the paper explain."""
    return [
        ("9.1, serial to MPI, training", gain_mpi_training(runs)),
        ("9.1.1, why: the all-reduce is small", gain_all_reduce(runs)),
        ("9.1.2, serial to MPI, inference", gain_mpi_inference(runs)),
        ("9.2, serial to CUDA, training", gain_pair(runs, 0, 2, "training", "35")),
        ("9.2, serial to CUDA, inference", gain_pair(runs, 0, 2, "inference", "14")),
        ("9.2.1, why: matrix products dominate", gain_products(runs)),
        ("9.3, MPI to MPI and CUDA, training", gain_pair(runs, 1, 3, "training", "57")),
        ("9.3, CUDA to MPI and CUDA, training", gain_two_gpus(runs)),
        ("9.3, MPI to MPI and CUDA, inference", gain_pair(runs, 1, 3, "inference", "14")),
    ]


def gain_mpi_training(runs):
    one, ratios = runs.scaling_speedups() or (None, {})
    ratio = ratios.get(("ranks", 2))
    serial, table_time, text_time = paper.SECONDS["serial"][0], paper.SECONDS["MPI"][0], paper.MPI_SECONDS_IN_TEXT
    if not ratio:
        return f"{NOT_MEASURED}: {runs.reason('scaling')}."
    return (
        f"Two ranks of one thread take {seconds(one / ratio.times)} per step, and one process with one thread takes "
        f"{seconds(one)}{runs.busy(['scaling'], [ratio])}: {ratio}. The paper's times are {serial / text_time:.2f} "
        f"(text) and {serial / table_time:.1f} (Table 1) times as fast."
    )


def gain_all_reduce(runs):
    step = runs.results("trace1-flat")
    rows = [row for row in collectives_of(step) if row["name"] == "all_reduce"] if step else []
    if not rows:
        return f"{NOT_MEASURED}: {runs.reason('trace1-flat')}."
    (row,) = rows
    share = 100 * row["seconds"] / step["seconds"]
    return (
        f"In the traced step of stage 1 the all-reduce of {amount(row['bytes'])} is in progress for "
        f"{seconds(row['seconds'])} of {seconds(step['seconds'])}: {share:.1f} % of the step. This time includes the "
        f"wait for the slower rank."
    )


def gain_mpi_inference(runs):
    found = {name: runs.results(name) for name in ("infer0", "infer1-replicate", "infer1-batch")}
    if not all(found.values()):
        name = next(name for name, results in found.items() if not results)
        return f"{NOT_MEASURED}: {runs.reason(name)}."
    one, replicate, batch = found.values()
    ratios = runs.inference_speedups()
    return (
        f"Two ranks with --mode replicate take {seconds(replicate['seconds'])} and one process takes "
        f"{seconds(one['seconds'])}{runs.busy(found, ratios.values())}: {ratios['infer1-replicate']}. Every rank "
        f"computes all logits. With --mode batch a prompt takes {seconds(batch['seconds'] / batch['prompts'])}."
    )


def gain_pair(runs, slow, fast, what, paper_gain):
    """One sentence: how many times as fast the run of stage `fast` is as that of stage `slow`."""
    run_of = runs.training if what == "training" else runs.inference
    reason_of = runs.training_reason if what == "training" else runs.inference_reason
    a, b = run_of(slow), run_of(fast)
    paper_sentence = (
        f"The paper's {PAPER_NAMES[fast]} program is {paper_gain} times as fast as its {PAPER_NAMES[slow]} program."
    )
    if not a or not b:
        stage = fast if a else slow
        return f"{NOT_MEASURED}: there is no {what} of stage {stage}: {reason_of(stage)}. {paper_sentence}"
    ratio = f"{times_as_fast(a.value, b.value)} times as fast"
    if a.disturbed:
        ratio = f"no result, because other runs show that the run of stage {slow} was disturbed"
    return (
        f"Stage {fast} takes {seconds(b.value)} ({b.where}) and stage {slow} takes {seconds(a.value)} ({a.where}): "
        f"{ratio}. {paper_sentence}"
    )


def gain_two_gpus(runs):
    paper_gain = f"{paper.SECONDS['CUDA'][0] / paper.SECONDS['MPI and CUDA'][0]:.2f}"
    if not runs.results("train3"):
        (_, _), (ranks, efficiency), *_ = shipped.scaling_rows()[0]
        return (
            f"{ranks} GPUs beside one, GPT-2 124M: {Speedup(ranks * efficiency, ranks)}, with 64 sequences for each "
            f"GPU ({shipped.origin('gpus/scaling_two', ranks)}). The paper's two machines are {paper_gain} "
            f"times as fast as one."
        )
    one, many, ranks = runs.results("train2"), runs.results("train3"), runs.records["train3"]["options"]["ranks"]
    paper_sentence = f"The paper's two machines are {paper_gain} times as fast as one."
    if not one or not one["median_step"] or not many["median_step"]:
        return f"{NOT_MEASURED}: in so few steps, most of the time is that of compiling kernels. {paper_sentence}"
    (ratio,) = speedups(one["median_step"], {"train3": (many["median_step"], ranks)}).values()
    return (
        f"A step takes {seconds(many['median_step'])} on {counted(ranks, 'GPU')} and {seconds(one['median_step'])} on "
        f"one (medians without the first steps{runs.busy(['train2', 'train3'], [ratio])}): {ratio}. {paper_sentence}"
    )


def gain_products(runs):
    step = runs.results("trace0")
    if not step:
        return f"{NOT_MEASURED}: {runs.reason('trace0')}."
    ops = {name: time for name, time in time_by_op(step).items() if not name.startswith("wait")}
    share = sum(time for name, time in ops.items() if name.startswith(PRODUCTS)) / sum(ops.values())
    return (
        f"On this CPU, the kernels of stage 0 that contain matrix products (linear layers, attention, logits) take "
        f"{100 * share:.0f} % of the time of all kernels."
    )


# -- Table 2 -----------------------------------------------------------------------------------------------------------


def table_2(runs):
    """(section, charts): the paper's four curves and ours, and their differences."""
    curves, charts = runs.curves(), []
    lines = [
        Line(f"paper, {name}", list(range(50)), losses, "soft", style, width=1.2)
        for (name, losses), style in zip(paper.LOSSES.items(), PAPER_STYLES, strict=True)
    ]
    for number, (label, run) in enumerate(curves.items()):
        width = max(1.0, 6 - 4 * number / len(curves))  # curves that cover each other stay visible
        style = "--" if number and number == len(curves) - 1 else "-"
        colour = SERIES[number % len(SERIES)]
        lines.append(Line(f"ours, {label}", list(range(len(run.value))), run.value, colour, style, width=width))
    charts.append(
        Chart(
            "loss", f"Loss of {runs.steps} steps, preset {runs.preset}",
            "Loss curves of the paper's four programs and of ours over the steps. All fall from about 5.2; ours nearly "
            "cover each other.", "step (the paper: epoch)", "nats per token", lines, whole_x=True,
        )
    )  # fmt: skip
    pairs = differences(curves)
    shown = [line for line, largest in pairs if largest]
    equal = [line.label.removeprefix("ours, ") for line, largest in pairs if not largest]
    charts.append(
        Chart(
            "differences", "Relative differences of the losses",
            "Relative differences between loss curves on a logarithmic axis: those of the paper are between 0.01 and "
            "0.3, those between our stages are far smaller.", "step (the paper: epoch)", "relative difference", shown,
            log_y=True, whole_x=True,
        )
    )  # fmt: skip
    zero = "".join(
        f"The relative difference between {label} is 0 at every step, so it is not in the chart. " for label in equal
    )
    sources = "; ".join(f"{label}: {run.where}" for label, run in curves.items())
    content = section(
        "table2", "Table 2: the loss of every step",
        paragraph(
            "The paper's programs start with other random parameters and read another corpus of the same size, so its "
            "curves and ours cannot be equal. The curves of our stages can."
        ),
        figure(charts[0].svg, f"Our curves: {sources}."),
        figure(
            charts[1].svg,
            f"{zero}At the last step, the paper's programs differ by up to {100 * paper_spread():.0f} %.",
        ),
        details("Table 2: all losses", loss_table(curves)),
    )  # fmt: skip
    return content, charts


def paper_spread():
    """The largest relative difference between two of the paper's four last losses."""
    last = [losses[-1] for losses in paper.LOSSES.values()]
    return max(last) / min(last) - 1


def differences(curves):
    """[(Line, its largest value)] of relative differences: the paper's programs from its serial one, ours from ours."""
    serial = paper.LOSSES["serial"]
    found = []
    for (name, losses), style in zip(list(paper.LOSSES.items())[1:], PAPER_STYLES[1:], strict=True):
        found.append(difference(f"paper, {name} and serial", losses, serial, "soft", style))
    base = {"stage 3": "stage 2"}
    for number, (label, run) in enumerate(curves.items()):
        reference, colour = base.get(label, "stage 0"), SERIES[number % len(SERIES)]
        if label != reference and reference in curves:
            found.append(difference(f"ours, {label} and {reference}", run.value, curves[reference].value, colour, "-"))
    return found


def difference(label, losses, reference, colour, style):
    values = [abs(a - b) / b for a, b in zip(losses, reference, strict=False)]
    shown = [value or math.nan for value in values]  # a logarithmic axis has no 0
    return Line(label, list(range(len(values))), shown, colour, style), max(values)


def loss_table(curves):
    count = max([50, *(len(run.value) for run in curves.values())])
    rows = []
    for step in range(count):
        row = {"epoch or step": step}
        row |= {f"paper, {name}": f"{losses[step]:.6f}" if step < 50 else "" for name, losses in paper.LOSSES.items()}
        row |= {label: f"{run.value[step]:.6f}" if step < len(run.value) else "" for label, run in curves.items()}
        rows.append(row)
    return table("Table 2. Loss in nats per token: the four columns of the paper, then ours.", rows, cards=False)


# -- samples, processes, Figures 1 to 5 --------------------------------------------------------------------------------


def samples(runs):
    rows, grey = [], set()
    for number, (name, text) in enumerate(paper.SAMPLES.items(), 6):
        rows.append(
            {"program": f"paper, {name} (its Figure {number})", "weights": "of its training", "30 new tokens": text}
        )
    ours = {"infer0": "stage 0", "infer1-replicate": "stage 1, replicate", "infer1-tensor": "stage 1, tensor"}
    ours |= {f"infer{n}": f"stage {n}" for n in (2, 3)}
    for name, title in ours.items():
        if results := runs.results(name):
            rows.append(
                {"program": f"ours, {title}", "weights": "shipped, 1200 updates", "30 new tokens": results["sample"]}
            )
    for name, title in {"train0": "stage 0", "train1-2": "stage 1"}.items():
        if results := runs.results(name):
            weights = f"after {runs.steps} updates, preset {runs.preset}"
            rows.append({"program": f"ours, {title}", "weights": weights, "30 new tokens": results["sample"]})
    caption = (
        "Greedy continuations. The prompt is the first 256 tokens of the corpus, or as many as the model's block has. "
        "The paper's corpus and ours are different texts, so the continuations are about different things."
    )
    return section("samples", "Generated text", table(caption, rows, grey))


def processes():
    slides, command = paper.PROCESSES["slides"], paper.PROCESSES["command"]
    return section(
        "processes", "How many MPI processes",
        paragraph(
            f"The slides say that MPI ran with {slides} processes, because the CPU has 4 cores with 2 threads each. "
            f"The command in section 8 of the paper is mpirun -n {command} -f ../hostfile: {slides} processes on each "
            f"of the two machines. This report uses 2 ranks, and with --full also 1, 4 and 8. The losses do not depend "
            f"on this number."
        ),
    )  # fmt: skip


def figures(diagrams):
    """The section with Figures 1 to 5. diagrams: {name: SVG}."""
    notes = {
        "architecture": "B batch, T time, C channels, H heads, D = C / H, V vocabulary.",
        "stage0": "B sequences of T tokens in a step.",
        "stage1": "p ranks; each has all parameters.",
        "stage2": "After the first steps, one launch replays the whole graph.",
        "stage3": "p ranks, one GPU each. With --deterministic, the sum over ranks has a fixed order.",
    }
    found = [
        figure(svg, f"{TITLES[name]}. {notes[name]}", style=f"width: {re.search('width=.([0-9.]+)', svg)[1]}px")
        for name, svg in diagrams.items()
    ]
    return section("figures", "Figures 1 to 5: architecture and data flow", element("div", *found, class_="gallery"))

"""What the page says beside the paper: the first screen, Tables 1 and 2, and what each change gains."""

import math
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from benchmarks import paper
from benchmarks.harness.speedups import Speedup, speedups
from benchmarks.report import shipped
from benchmarks.report.charts import Chart, Line, Row
from benchmarks.report.runs import PAPER_NAMES, PAPER_STEPS, PARTS, STAGE_NAMES
from benchmarks.report.trace import collectives_of, time_by_op
from benchmarks.report.units import Cell, Table, amount, number, seconds, tiny
from gpt2core.errors import counted

PRODUCTS = "linear", "mlp", "unembed", "attention"  # names of kernels that contain matrix products begin with these
WHOSE = "paper", "ours"
SAME = 1e-3  # curves with smaller relative differences are one line of the chart
INFERENCE = {  # {part: (program, what is divided)}
    "infer0": ("stage 0, one process", "nothing: one prompt, the whole model"),
    "infer1-replicate": ("stage 1, --mode replicate", "nothing: each rank computes all logits; rank 0 uses their mean"),
    "infer1-batch": ("stage 1, --mode batch", "the prompts"),
    "infer1-tensor": ("stage 1, --mode tensor", "each layer"),
}


# -- the first screen --------------------------------------------------------------------------------------------------


def scope(runs):
    """Sentences: the stage of each program of the paper; which stages trained on this machine, and why others not."""
    found = "; ".join(f"{PAPER_NAMES[stage]} is {name}" for stage, name in STAGE_NAMES.items())
    sentences = [f"Its programs are our stages: {found}."]
    stages = {}  # {why they did not run, or "": [number]}
    for stage, name in enumerate(PARTS["training"]):
        reason = "" if runs.results(name) else runs.missing.get(name, "no GPU was found")
        stages.setdefault(reason, []).append(str(stage))
    ran = f"ran on this machine: {runs.steps} training steps of preset {runs.preset} (the paper: {PAPER_STEPS})."
    for reason, numbers in stages.items():
        did = f"did not run: {reason}; numbers of other machines are marked." if reason else ran
        sentences.append(f"Stage{'s' * (len(numbers) > 1)} {' and '.join(numbers)} {did}")
    return " ".join(sentences)


def warning(runs):
    """One line beside the first numbers if other programs ran, otherwise ""."""
    names = runs.busy_parts()
    return f"Measured {runs.meanwhile(*names)}: the times are not exact (see This machine)." if names else ""


def largest_differences(runs):
    """{label: the largest relative difference of a curve from that of stage 0, or of stage 2 without one}."""
    first, *others = runs.curves().items() or [None]
    return {name: max(abs(a - b) / b for a, b in zip(run.value, first[1].value, strict=False)) for name, run in others}


def equality(runs):
    """One sentence: how equal the curves of our stages are."""
    differences, first = largest_differences(runs), next(iter(runs.curves()), "no stage")
    same, other = ([name for name in differences if bool(differences[name]) == wanted] for wanted in (False, True))
    parts = [f"{first} and {', '.join(same)} have the same losses, bit for bit"] * bool(same)
    if other:
        largest = tiny(max(differences.values()))
        parts.append(f"those of {' and '.join(other)} differ from {first} by at most {largest} of their value")
    text = "; ".join(parts) or f"only the losses of {first} were measured"
    return f"{text[0].upper()}{text[1:]}."


def paper_spread():
    """The largest relative difference between two of the paper's four last losses, in percent, as text."""
    last = [losses[-1] for losses in paper.LOSSES.values()]
    return f"{100 * (max(last) / min(last) - 1):.0f} %"


def headline(runs):
    """[(number, unit, sentence, footnote)]: the three numbers of the first screen."""
    found = []
    if differences := largest_differences(runs):
        text = f"is the largest relative difference between our {len(differences) + 1} loss curves."
        text += f" The paper's four differ by {paper_spread()} at the last step."
        found.append((tiny(max(differences.values())), "", text, sources(runs)))
    for stage, where in ((0, "NumPy on one CPU"), (3, "several GPUs"), (2, "one GPU")):
        if run := runs.run("training", stage):
            name = PAPER_NAMES[stage]
            compared = f" The paper's {name} program: {paper.SECONDS[name][0]:,.0f} s." if runs.is_paper else ""
            text = f"for {runs.steps} training steps of preset {runs.preset} with stage {stage}, {where}.{compared}"
            found.append((*seconds(run.value).split(), text, run.note))
    if run := runs.run("inference", 0):
        text = "for 30 new tokens with stage 0, NumPy on one CPU. The paper's serial program: "
        found.append((*seconds(run.value).split(), f"{text}{paper.SECONDS['serial'][1]:.0f} s.", run.where))
    return found[:3]


def sources(runs):
    return "; ".join(f"{label}: {run.where}" for label, run in runs.curves().items())


def loss_chart(runs):
    """(Chart, caption) of the curves of the paper and of all stages; ours that cover each other are one line."""
    lines = [
        Line(f"paper, {name}", range(len(losses)), losses, "soft", style, width=1.1)
        for (name, losses), style in zip(paper.LOSSES.items(), paper.LINE_STYLES.values(), strict=True)
    ]
    groups = []  # ([label, ...], losses)
    for label, run in runs.curves().items():
        of_same_length = (group for group in groups if len(group[1]) == len(run.value))
        covered = next((labels for labels, losses in of_same_length if np.allclose(losses, run.value, SAME, 0)), None)
        if covered:
            covered.append(label)
        else:
            groups.append(([label], run.value))
    for (labels, losses), colour in zip(groups, ("c0", "c1", "c2", "c3", "c4", "ink"), strict=False):
        alone = len(groups) == 1 < len(labels)
        label = f"our {len(labels)} curves, one on the other" if alone else f"ours, {', '.join(labels)}"
        lines.append(Line(label, range(len(losses)), losses, colour, width=2.8))
    title = f"Loss of {runs.steps} steps, preset {runs.preset}"
    alt = f"Loss over the training step: the paper's four programs, and ours. {equality(runs)}"
    short = runs.steps < PAPER_STEPS and runs.results("train0")
    ends = f" Our runs on this machine have {runs.steps} steps, so their line ends early." if short else ""
    caption = f"{equality(runs)} Curves that lie on each other are one line.{ends}"
    caption += " The paper's programs start with other parameters and read another corpus."
    return Chart("loss", title, alt, "step", "loss (nats per token)", lines), caption


def loss_table(runs):
    curves = {f"paper, {name}": losses for name, losses in paper.LOSSES.items()}
    curves |= {f"ours, {name}": run.value for name, run in runs.curves().items()}
    columns = zip_longest(*([f"{loss:.6f}" for loss in losses] for losses in curves.values()), fillvalue="")
    rows = [[step, *losses] for step, losses in enumerate(columns)]
    caption = "Table 2. Loss in nats per token: the four columns of the paper, then ours."
    return Table(caption, ["step", *curves], rows, range(1, len(curves) + 1))


# -- Table 1 -----------------------------------------------------------------------------------------------------------


def table_1(runs):
    rows, grey, same = [], [], runs.steps == PAPER_STEPS
    for stage, name in STAGE_NAMES.items():
        row, ours = [name], {what: runs.run(what, stage) for what in PARTS}
        for (what, run), theirs in zip(ours.items(), paper.SECONDS[PAPER_NAMES[stage]], strict=True):
            per_step = what == "training" and not same  # the paper's seconds and ours, each of one step
            two = (stage, what) == (1, "training")
            times = [theirs, *[paper.MPI_SECONDS_IN_TEXT] * two]
            times = " or ".join(number(time / PAPER_STEPS if per_step else time) for time in times)
            row.append(Cell(times, contradiction() if two else ""))
            missing = Cell("–", f"{what} not measured: {runs.reason_of(what, stage)}")
            row.append(Cell(number(run.value / runs.steps if per_step else run.value), run.note) if run else missing)
        rows.append(row)
        if not any(run and not run.shipped for run in ours.values()):
            grey.append(stage)
    means = f"means of the paper's {PAPER_STEPS} and our {runs.steps} steps"
    long, short = f"the training ({PAPER_STEPS} steps", f"one step of training (preset {runs.preset}; {means})"
    caption = (
        f"Table 1. Seconds of {f'{long} of preset {runs.preset})' if same else short} and of the inference (256 "
        f"tokens of prompt, 30 new ones), without the start of the program. Grey: results of another machine, or none. "
        f"The paper: {paper.CPU}; {paper.GPU}."
    )
    titles = [f"{what}, {whose} (s)" for what in ("training" if same else "step", "inference") for whose in WHOSE]
    return Table(caption, ["program", *titles], rows, (1, 2, 3, 4), grey)


def contradiction():
    serial, table_time, text_time = paper.SECONDS["serial"][0], paper.SECONDS["MPI"][0], paper.MPI_SECONDS_IN_TEXT
    return (
        f"The paper contradicts itself: its Table 1 has {table_time:,.2f} s, {serial / table_time:.1f} times as fast "
        f'as the serial program; its sections 9.1 and 9.3 have {text_time:,.0f} s and "15 % faster", and this '
        f"time is {100 * (1 - text_time / serial):.1f} % less than {serial:,.0f} s. The slides have 1,287 s."
    )


def inference_modes(runs):
    """A table of --mode replicate, batch and tensor, with stage 0 in the first row."""
    rows, ratios = [], runs.inference_speedups()
    for name, (program, divided) in INFERENCE.items():
        row = ["", Cell("–", runs.reason(name)), "", "", ""]
        if results := runs.results(name):
            ranks, prompts, time = runs.records[name]["options"]["ranks"], results["prompts"], results["seconds"]
            program += f", {ranks} ranks" if ranks and name != "infer0" else ""
            row = [prompts, number(time), number(time / prompts), "1" if ratios else "", ""]
            if ratio := ratios.get(name):
                row[3:] = ratio.cell(number(ratio.times)), f"{ratio.ideal:g}"
        rows.append([program, *row, divided])
    names = [name for name in INFERENCE if name in runs.records]
    count = len(runs.results("infer0")["samples"]) if "infer0" in names else 0
    medians = f", medians of {count} runs" if count > 1 else ""
    caption = f"Inference of stages 0 and 1 on this machine{medians}{runs.busy(names, ratios.values())}. "
    caption += "Ideal: several prompts share each matrix product, so that of --mode batch is the number of prompts."
    head = ["program", "prompts", "all prompts (s)", "one prompt (s)", "times as fast", "ideal", "what is divided"]
    grey = [row for row, name in enumerate(INFERENCE) if name not in names]
    return Table(caption, head, rows, (1, 2, 3, 4, 5), grey)


# -- what each change gains --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """One change from a program to another. theirs: {where the paper says it: ratio}. ours: a Speedup, or None.

    note: what was compared, or why there is no ratio.
    """

    title: str
    theirs: dict
    ours: Speedup | None
    note: str

    @property
    def ideal(self):
        return self.ours.ideal if self.ours and math.isfinite(self.ours.ideal) else None

    @property
    def texts(self):
        """(the ratios of the paper, our ratio)."""
        return " or ".join(map(number, self.theirs.values())), number(self.ours.times) if self.ours else "–"


def gains(runs):
    """The Gains that sections 9.1 to 9.3 of the paper explain."""

    def gain(title, slow, fast, what, ours=None, text_seconds=None):  # text_seconds: of `slow` and `fast` in the text
        times = [paper.SECONDS[PAPER_NAMES[stage]][what == "inference"] for stage in (slow, fast)]
        theirs = {"Table 1" if text_seconds else "": times[0] / times[1]}
        if text_seconds:
            theirs["text"] = text_seconds[0] / text_seconds[1]
        return Gain(title, theirs, *(ours or gain_pair(runs, slow, fast, what)))

    (serial, _), _, _, (both, _) = paper.SECONDS.values()
    mpi = paper.MPI_SECONDS_IN_TEXT
    return [
        gain("serial to MPI, training (9.1)", 0, 1, "training", gain_ranks(runs), (serial, mpi)),
        gain("serial to MPI, inference (9.1.2)", 0, 1, "inference", gain_replicate(runs)),
        gain("serial to CUDA, training (9.2)", 0, 2, "training"),
        gain("serial to CUDA, inference (9.2)", 0, 2, "inference"),
        gain("one GPU to several, training (9.3)", 2, 3, "training", gain_gpus(runs)),
        gain("MPI to MPI and CUDA, training (9.3)", 1, 3, "training", text_seconds=(mpi, both)),
        gain("MPI to MPI and CUDA, inference (9.3)", 1, 3, "inference"),
    ]


def gain_ranks(runs):
    one, ratios = runs.scaling_speedups() or (None, {})
    if not (ratio := ratios.get(("ranks", 2))):
        return None, runs.reason("scaling")
    return ratio, (
        f"two ranks of one thread: {seconds(one / ratio.times)} per step; one process with one thread: {seconds(one)}"
        f"{runs.busy(['scaling'], [ratio])}"
    )


def gain_replicate(runs):
    found = {name: runs.results(name) for name in ("infer0", "infer1-replicate")}
    if missing := [name for name, results in found.items() if not results]:
        return None, runs.reason(missing[0])
    one, two = (results["seconds"] for results in found.values())
    ratios = runs.inference_speedups()
    text = f"two ranks with --mode replicate, where every rank computes all logits: {seconds(two)}; one process: "
    return ratios["infer1-replicate"], f"{text}{seconds(one)}{runs.busy(found, ratios.values())}"


def gain_pair(runs, slow, fast, what):
    """The times of the runs of two stages on different hardware: a ratio without an ideal."""
    a, b = runs.run(what, slow), runs.run(what, fast)
    if not a or not b:
        stage = fast if a else slow
        return None, f"there is no {what} of stage {stage}: {runs.reason_of(what, stage)}"
    text = f"stage {fast}: {seconds(b.value)} ({b.note}); stage {slow}: {seconds(a.value)} ({a.where})"
    return Speedup(a.value / b.value, math.inf, misled=a.disturbed), text


def gain_gpus(runs):
    if not runs.results("train3"):
        (_, _), (ranks, efficiency), *_ = shipped.scaling_rows()[0]
        text = f"{ranks} GPUs, 64 sequences for each, GPT-2 124M; {shipped.origin('gpus/scaling_two', ranks)}"
        return Speedup(ranks * efficiency, ranks), text
    one, many, ranks = runs.results("train2"), runs.results("train3"), runs.records["train3"]["options"]["ranks"]
    if not one or not one["median_step"] or not many["median_step"]:
        return None, "in so few steps, most of the time is that of compiling kernels"
    (ratio,) = speedups(one["median_step"], {"train3": (many["median_step"], ranks)}).values()
    return ratio, (
        f"a step: {seconds(many['median_step'])} on {counted(ranks, 'GPU')}, {seconds(one['median_step'])} on one "
        f"(medians without the first steps{runs.busy(['train2', 'train3'], [ratio])})"
    )


def gain_chart(found):
    rows = []
    for gain in found:
        marks = [
            (ratio, f"paper{', ' * bool(where)}{where}: {ratio:.3g} times as fast", "soft", "o")
            for where, ratio in gain.theirs.items()
        ]
        if gain.ideal:
            marks.append((gain.ideal, f"ideal: {gain.ideal:g}", "ink", "|"))
        if gain.ours:
            bad = gain.ours.disturbed
            text = f"disturbed: {gain.ours.reason}" if bad else f"ours: {gain.ours.times:.3g} times as fast"
            marks.append((gain.ours.times, text, "c1" if bad else "c0", "X" if bad else "o"))
        rows.append(Row(gain.title, marks, text=" → ".join(gain.texts)))
    alt = "How many times as fast each change makes the program, for the paper and for ours, on a logarithmic axis; "
    alt += "the table below has the numbers."
    return Chart("gains", "What each change gains", alt, "times as fast", rows=rows, log=True)


def gain_legend(chart):
    """The caption of gain_chart(): only the marks that are drawn."""
    drawn = {mark for row in chart.rows for *_, mark in row.marks}
    found = {"|": "vertical lines: the ideal", "X": "crosses: above the ideal, so disturbed and no result"}
    texts = [text for mark, text in found.items() if mark in drawn]
    return f"{'; '.join(['Circles: the paper; dots: ours', *texts])}. The numbers: paper → ours."


def gain_table(found):
    rows = []
    for gain in found:
        (theirs, ours), note = gain.texts, gain.note
        if gain.ours and gain.ours.disturbed:
            ours, note = f"disturbed ({ours})", f"{note}. Disturbed: {gain.ours.reason}"
        rows.append([gain.title, theirs, Cell(ours, note), f"{gain.ideal:g}" if gain.ideal else ""])
    head = ["change (section of the paper)", "paper", "ours", "ideal"]
    caption = (
        "How many times as fast. Training from serial to MPI: ours compares one thread with two ranks of one thread, "
        "in other runs than Table 1, where stage 0 uses all cores: the times there have another ratio. "
        f"Two values of the paper: training with MPI takes {number(paper.MPI_SECONDS_IN_TEXT)} s in its text and "
        f"{number(paper.SECONDS['MPI'][0])} s in its Table 1."
    )
    return Table(caption, head, rows, (1, 2, 3))


def reasons(runs):
    """[sentence] about the two causes that the paper names: the all-reduce is small, and products dominate."""
    found, step = [], runs.results("trace1-flat")
    for row in collectives_of(step) if step else []:
        if row["name"] == "all_reduce":
            found.append(
                f"9.1.1, the all-reduce is small: that of {amount(row['bytes'])} in stage 1 is in progress for "
                f"{seconds(row['seconds'])} of a step of {seconds(step['seconds'])}, "
                f"{100 * row['seconds'] / step['seconds']:.1f} %, with the wait for the slower rank."
            )
    if step := runs.results("trace0"):
        ops = {name: time for name, time in time_by_op(step).items() if not name.startswith("wait")}
        share = sum(time for name, time in ops.items() if name.startswith(PRODUCTS)) / sum(ops.values())
        found.append(
            f"9.2.1, matrix products dominate: the kernels of stage 0 that contain them (linear layers, attention, "
            f"logits) take {100 * share:.0f} % of the time of all kernels."
        )
    return found

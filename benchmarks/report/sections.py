"""What the page says beside the paper: numbers, sentences, charts and tables."""

import math
from itertools import zip_longest

from benchmarks import paper
from benchmarks.harness.speedups import Speedup, speedups
from benchmarks.report.charts import Chart, Line, Row
from benchmarks.report.parts import remark
from benchmarks.report.runs import PAPER_NAMES, PAPER_STEPS, PARTS, STAGE_NAMES, THIS_MACHINE, gain_gpus
from benchmarks.report.units import Cell, Table, number, seconds, tiny

SAME = 1e-3  # curves with smaller relative differences are one line of the chart
# -- the first screen --------------------------------------------------------------------------------------------------


def largest_differences(runs):
    """{label: the largest relative difference of a curve from that of stage 0, or of stage 2 without one}."""
    first, *others = runs.curves().items() or [None]
    return {name: max(abs(a - b) / b for a, b in zip(run.value, first[1].value, strict=False)) for name, run in others}


def equality(runs):
    """One sentence: how equal the curves of our stages are."""
    differences, first = largest_differences(runs), next(iter(runs.curves()), "no stage")
    same, largest = [name for name in differences if not differences[name]], max(differences.values(), default=0)
    parts = [f"{' and '.join([first, *same])} have the same losses, bit for bit"] * bool(same)
    parts += [f"the largest difference between our curves is {tiny(largest)} of their value"] * bool(largest)
    text = "; ".join(parts) or f"only the losses of {first} were measured"
    return f"{text[0].upper()}{text[1:]}."


def headline(runs):
    """[(number, sentence, footnote)]: the three numbers of the first screen."""
    found, last = [], [losses[-1] for losses in paper.LOSSES.values()]
    if differences := largest_differences(runs):
        text = f"is the largest relative difference between our {len(differences) + 1} loss curves."
        text += f" The paper's four differ by {100 * (max(last) / min(last) - 1):.0f} % at the last step."
        sources = "; ".join(f"{label}: {run.where}" for label, run in runs.curves().items())
        found.append((tiny(max(differences.values())), text, sources))
    for stage, what in ((0, "training"), (3, "training"), (2, "training"), (0, "inference")):
        if run := runs.run(what, stage):
            of_what = f"{runs.steps} training steps of preset {runs.preset}" if what == "training" else "30 new tokens"
            theirs = paper.SECONDS[PAPER_NAMES[stage]][what == "inference"]
            beside = f" The paper: {seconds(theirs)}." if runs.is_paper or what == "inference" else ""
            value = f"{number(run.value)}\N{NO-BREAK SPACE}s"
            found.append((value, f"for {of_what} with {STAGE_NAMES[stage]}.{beside}", run.where))
    return found[:3]


def loss_chart(runs):
    """(Chart, caption) of the curves of the paper and of our stages; ours are one line if they cover each other."""
    lines = [
        Line(f"paper, {name}", losses, "soft", style, width=1.1)
        for (name, losses), style in zip(paper.LOSSES.items(), paper.LINE_STYLES.values(), strict=True)
    ]
    ours = {f"ours, {label}": run.value for label, run in runs.curves().items()}
    if len(ours) > 1 and max(largest_differences(runs).values()) < SAME:
        ours = {f"our {len(ours)} programs: equal curves": max(ours.values(), key=len)}
    lines += [Line(label, losses, f"c{number}") for number, (label, losses) in enumerate(ours.items())]
    title = f"Loss of {runs.steps} steps, preset {runs.preset}"
    alt = f"Loss over the training step: the paper's four programs, and ours. {equality(runs)}"
    caption = f"{equality(runs)} The paper's programs start with other parameters and read another corpus."
    return Chart("loss", title, alt, "step", "loss (nats per token)", lines), caption


def loss_table(runs):
    curves = {f"paper, {name}": losses for name, losses in paper.LOSSES.items()}
    curves |= {f"ours, {name}": run.value for name, run in runs.curves().items()}
    columns = zip_longest(*([f"{loss:.6f}" for loss in losses] for losses in curves.values()), fillvalue="")
    rows = [[step, *losses] for step, losses in enumerate(columns)]
    return Table("Table 2. Loss in nats per token.", ["step", *curves], rows, range(1, len(curves) + 1))


# -- Figures 2 to 5 of the paper, for this program: the data flow of each stage, as one drawing ------------------------

ALL, RANKS, GPUS = (0, 1, 2, 3), (1, 3), (2, 3)  # stages: all, those with many ranks, those on GPUs
ADDS = {RANKS: "MPI", (1,): "MPI", GPUS: "CUDA", (3,): "MPI and CUDA"}  # what the rows of these stages need
ONCE = [  # (text, kind, stages); kind: "host", "host root" (only rank 0), "gpu" (in stages 2 and 3), "net" (collective)
    ("read the corpus and encode it as tokens", "host root", ALL),
    ("broadcast of the tokens", "net", RANKS),
    ("initial parameters from the seed", "host root", ALL),
    ("broadcast of the parameters", "net", RANKS),
]
EVERY_STEP = [
    ("batch: B × T tokens", "host", (0, 2)),
    ("own rows: B/p × T tokens", "host", RANKS),
    ("divide the batch into micro-batches", "host", (0, 1)),
    ("sort the tokens for the gradient of the embedding", "host", GPUS),
    ("copy to static input buffers of the CUDA graph", "gpu", GPUS),
    ("forward: losses; threads divide the micro-batches", "host", (0, 1)),
    ("backward: gradients, added in a fixed order", "host", (0, 1)),
    ("forward: loss", "gpu", GPUS),
    ("backward: gradients", "gpu", GPUS),
    ("all-reduce of the gradients by MPI messages, added in a fixed order", "net", (1,)),
    ("reduce-scatter of the gradients by NCCL: rank r receives slice r of the sum", "net", (3,)),
    ("norm, clipping, AdamW", "gpu", (0, 1, 2)),
    ("norm, clipping, AdamW on the own slice (ZeRO-1)", "gpu", (3,)),
    ("all-gather of the updated slices by NCCL", "net", (3,)),
    ("all-gather of losses and signals", "net", RANKS),
    ("print and log the loss, save checkpoints", "host root", ALL),
]


def flow(stage):
    """{"once" or "every step": [(text, kind, what it needs beside NumPy or "")]} of a stage."""
    return {
        when: [
            (text, "host" if kind == "gpu" and stage not in GPUS else kind, ADDS.get(stages, ""))
            for text, kind, stages in rows if stage in stages
        ]
        for when, rows in (("once", ONCE), ("every step", EVERY_STEP))
    }  # fmt: skip


def lanes(stage):
    return ["rank 0", "ranks 1 to p − 1"] if stage in RANKS else ["one process"]


# -- Table 1 -----------------------------------------------------------------------------------------------------------


def table_1(runs):
    rows, grey = [], []
    for stage, name in STAGE_NAMES.items():
        row, ours = [name], [runs.run(what, stage) for what in PARTS]
        for what, run, theirs in zip(PARTS, ours, paper.SECONDS[PAPER_NAMES[stage]], strict=True):
            missing = Cell("–", f"{what} not measured: {runs.reason(PARTS[what][stage])}")
            row += [number(theirs), Cell(number(run.value), run.where) if run else missing]
        rows.append(row)
        if not any(run and not run.shipped for run in ours):
            grey.append(stage)
    serial, table_time, text_time = paper.SECONDS["serial"][0], paper.SECONDS["MPI"][0], paper.MPI_SECONDS_IN_TEXT
    rows[1][1] = Cell(
        f"{number(table_time)} or {number(text_time)}",
        f"The paper contradicts itself: its Table 1 has {table_time:,.2f} s, {serial / table_time:.1f} times as fast "
        f'as the serial program; its text has {text_time:,.0f} s and "15 % faster": '
        f"{100 * (1 - text_time / serial):.1f} % less than {serial:,.0f} s.",
    )
    caption = (
        f"Table 1. Seconds of the training (preset {runs.preset}) and of the inference (256 tokens of prompt, 30 new "
        f"ones), without the start of the program. Grey: results of another machine, or none. The paper: {paper.CPU}; "
        f"{paper.GPU}."
    )
    programs = f"paper, {PAPER_STEPS} steps", f"ours, {runs.steps} steps", "paper, inference", "ours, inference"
    return Table(caption, ["program", *(f"{program} (s)" for program in programs)], rows, (1, 2, 3, 4), grey)


# -- what each change gains --------------------------------------------------------------------------------------------


def gain_chart(runs):
    """(Chart, caption, footnote): the gains that sections 9.1 to 9.3 of the paper explain."""
    mpi = paper.MPI_SECONDS_IN_TEXT
    changes = [  # title (section of the paper), slower and faster stage, [the paper's time of "MPI" in its text], ours
        ("serial to MPI, training (9.1)", 0, 1, [mpi], gain_ranks(runs)),
        ("serial to MPI, inference (9.1.2)", 0, 1, [], gain_pair(runs, 0, 1, "inference")),
        ("serial to CUDA, training (9.2)", 0, 2, [], gain_pair(runs, 0, 2, "training")),
        ("serial to CUDA, inference (9.2)", 0, 2, [], gain_pair(runs, 0, 2, "inference")),
        ("one GPU to several, training (9.3)", 2, 3, [], gain_gpus()),
        ("MPI to MPI and CUDA, training (9.3)", 1, 3, [mpi], gain_pair(runs, 1, 3, "training")),
        ("MPI to MPI and CUDA, inference (9.3)", 1, 3, [], gain_pair(runs, 1, 3, "inference")),
    ]
    rows, notes = [], []
    for title, slow, fast, in_text, (ours, note) in changes:
        a, b = (paper.SECONDS[PAPER_NAMES[stage]]["inference" in title] for stage in (slow, fast))
        theirs, text = [a / b, *(time / b if slow else a / time for time in in_text)], "–"
        marks = [(ratio, f"paper: {ratio:.3g} times as fast", "soft", "o") for ratio in theirs]
        if ours and math.isfinite(ours.ideal):
            marks.append((ours.ideal, f"ideal: {ours.ideal:g}", "ink", "|"))
        if ours and ours.disturbed:
            text = f"disturbed ({number(ours.times)})"
            marks.append((ours.times, f"disturbed: {ours.reason}", "c1", "X"))
        elif ours:
            text = number(ours.times)
            marks.append((ours.times, f"ours: {ours.times:.3g} times as fast", "c0", "o"))
        rows.append(Row(title, marks, f"{' or '.join(map(number, theirs))} → {text}"))
        notes.append(f"{title}: {note}")
    alt = f"How many times as fast, paper → ours. {'; '.join(f'{row.label}: {row.text}' for row in rows)}."
    caption = "Circles: the paper (Table 1 or text); dots: ours; lines: the ideal; crosses: disturbed, because "
    caption += "this ratio, or another ratio to the same time, is above its ideal."
    return Chart("gains", "What each change gains", alt, "times as fast", rows=rows), caption, "; ".join(notes)


def gain_ranks(runs):
    one, two = runs.results("ranks") or (None, None)
    if not one:
        return None, runs.reason("ranks")
    return Speedup(one / two, 2), f"two ranks of one thread, relative to one process with one thread ({seconds(one)})"


def gain_pair(runs, slow, fast, what):
    """The times of two stages in Table 1, which are marked if a ratio to the same time is above its ideal."""
    times = {stage: run.value for stage in STAGE_NAMES if (run := runs.run(what, stage))}
    for stage in (slow, fast):
        if stage not in times:
            return None, f"there is no {what} of stage {stage}: {runs.reason(PARTS[what][stage])}"
    ideals = {1: 1} if (slow, what) == (0, "inference") else {}  # each rank computes all, on the same machine
    ratios = speedups(times[slow], {stage: (time, ideals.get(stage, math.inf)) for stage, time in times.items()})
    return ratios[fast], f"stages {slow} and {fast} of Table 1"


# -- generated text, this machine --------------------------------------------------------------------------------------


def samples(runs):
    rows = [
        [f"paper, {name} (its Figure {number})", "its training", text]
        for number, (name, text) in enumerate(paper.SAMPLES.items(), 6)
    ]
    for name in (*PARTS["inference"], "train0", "train1"):
        if results := runs.results(name):
            weights = "shipped, 1200 updates" if "infer" in name else f"{runs.steps} updates, preset {runs.preset}"
            rows.append([f"ours, stage {name[5]}", weights, results["sample"]])
    caption = (
        "Greedy continuations of the first tokens of the corpus (256 or a block). The paper's corpus is another text."
    )
    return Table(caption, ["program", "weights", "30 new tokens"], rows)


def machine(hardware, runs):
    """[Table]: hardware and versions, and the parts that are missing or disturbed."""
    known = {"gpu": "none (nvidia-smi lists no GPU)"} | hardware | {"memory_bytes": f"{hardware['memory_bytes']:,}"}
    rows = [[name.replace("_", " "), value] for name, value in known.items() if value]
    remarks = [[each["title"], text] for each in runs.records.values() if (text := remark(each))]
    tables = [Table("Hardware and versions.", ["", THIS_MACHINE], rows)]
    return tables + [Table("What was not measured, or not exactly.", ["part", "remark"], remarks)] * bool(remarks)

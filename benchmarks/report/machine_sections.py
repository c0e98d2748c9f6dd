"""What the page says about this machine: time by kernel, collectives, scaling, generated text, hardware."""

from benchmarks import paper
from benchmarks.harness.speedups import Speedup
from benchmarks.report import shipped
from benchmarks.report.charts import Chart, Line, Row
from benchmarks.report.parts import BUSY
from benchmarks.report.runs import PAPER_STEPS, PARTS, THIS_MACHINE
from benchmarks.report.trace import collectives_of, time_by_op, waiting
from benchmarks.report.units import Table, amount, number, seconds

KINDS = {"threads": "stage 0, threads", "ranks": "stage 1, ranks"}
COLOURS = "ink", "c0", "c1", "c2", "c3", "c4"
GPUS = "stage 3, GPUs (shipped)"
OPS = 14  # bars of a chart of ops; the other ops are one bar
TRACES = {  # {part: title}
    "trace0": "stage 0",
    "trace1-flat": "stage 1, 2 ranks, --dp flat",
    "trace1-bucket": "stage 1, 2 ranks, --dp bucket",
    "trace2": "stage 2",
    "trace3": "stage 3",
}


def traces(runs):
    """[(name, title, step)] of the traces of this machine."""
    return [(name, title, step) for name, title in TRACES.items() if (step := runs.results(name))]


def ops(runs):
    """[(title of a stage, Chart, caption)]: the time of each kernel in one step."""
    found = []
    for name, title, step in traces(runs):
        if name != "trace1-bucket":
            chart = op_chart(name, f"{title}, preset {runs.preset}", time_by_op(step))
            text = f"Sum over threads and ranks, without nested kernels; the step takes {seconds(step['seconds'])}."
            found.append((title, chart, text))
    if not runs.results("trace2"):
        chart = op_chart("trace2", "stage 2, preset paper, bf16", shipped.kernels())
        found.append(("stage 2", chart, f"Preset paper, bf16. Shipped result: {shipped.origin('gpu/profile_paper')}."))
    if not runs.results("trace3"):
        step = shipped.timelines()[-1]
        where = f"GPT-2 124M, bf16, {step['name']}, rank 0, without the kernels of NCCL"
        chart = op_chart("trace3", f"stage 3, {where}", time_by_op(step))
        found.append(("stage 3", chart, f"{where}. Shipped result: {shipped.origin('gpus/timeline')}."))
    return found


def op_chart(name, title, seconds_of):
    """Horizontal bars of {op: seconds}, largest first."""
    total, items = sum(seconds_of.values()), list(seconds_of.items())
    if len(items) > OPS:
        items = [*items[: OPS - 1], (f"{len(items) - OPS + 1} others", sum(time for _, time in items[OPS - 1 :]))]
    unit, scale = ("s", 1) if total > 10 else ("ms", 1e3)  # of all texts and of the axis, so that a reader can compare
    percent = {op: f"{100 * time / total:.0f} %" if time >= total / 100 else "below 1 %" for op, time in items}
    rows = [Row(op, [(time * scale, f"{number(time * scale)} {unit}, {percent[op]}", "c0", "")]) for op, time in items]
    alt = f"{title}: {', '.join(f'{op} {percent[op]}' for op, _ in items[:3])} of the kernels' time."
    return Chart(f"{name}-ops", f"Kernels of one step, {title}", alt, f"time ({unit})", rows=rows)


def collectives(runs):
    """A table of what the collectives of a traced step moved and cost on this machine."""
    rows = []
    for _, title, step in traces(runs):
        for row in collectives_of(step):
            times = number(1e3 * row["seconds"]), number(100 * row["seconds"] / step["seconds"])
            rows.append([title, row["name"], row["calls"], f"{row['bytes']:,}", *times, number(1e3 * waiting(step))])
    caption = (
        "Collectives of one traced step. In progress: with the wait for a slower rank. Wait: of rank 0, in all of them."
    )
    head = ["program", "collective", "calls", "arrays (bytes)", "in progress (ms)", "of the step (%)", "wait (ms)"]
    return Table(caption, head, rows, (2, 3, 4, 5, 6))


def all_reduce_chart(runs):
    """(Chart, caption) of the algorithms of an all-reduce; None if they were not measured."""
    if not (results := runs.results("collectives")):
        return None
    lines, rows = [], sorted(results["rows"], key=lambda row: row["bytes"])
    for name, colour in zip({row["algorithm"]: 0 for row in results["rows"]}, COLOURS, strict=False):
        points = [(row["bytes"], 1e3 * row["median"]) for row in rows if row["algorithm"] == name]
        lines.append(Line({"mpi": "MPI library"}.get(name, name), *zip(*points, strict=True), colour, marker="o"))
    title = f"All-reduce on {results['ranks']} ranks of this machine"
    alt = "Time of an all-reduce over the size of the array, for the MPI library and the algorithms of stage 1, on "
    alt += "logarithmic axes."
    ring = [row for row in rows if row["algorithm"] == "ring"][-1]  # the largest array
    sent = f"For {amount(ring['bytes'])}, a rank of the ring sends {amount(ring['bytes_sent'])}"
    chart = Chart("all-reduce", title, alt, "bytes of the array", "time (ms)", lines, log=True)
    return chart, f"{title}. {sent} and takes {seconds(ring['median'])}."


def scaling(runs):
    """(Chart, caption): the speed-up of threads, ranks and GPUs beside the ideal line."""
    captions, found = [], {}  # found: {(what, count): Speedup}
    if measured := runs.scaling_speedups():
        one, ratios = measured
        found |= {(KINDS[kind], count): ratio for (kind, count), ratio in ratios.items()}
        preset = runs.results("scaling")["preset"]
        captions.append(f"Stages 0 and 1: preset {preset}, one batch size; one thread: {seconds(one)} per step.")
    efficiencies, files = shipped.scaling_rows()
    found |= {(GPUS, count): Speedup(count * efficiency, count) for count, efficiency in efficiencies if count > 1}
    captions.append(f"Stage 3: GPT-2 124M, 64 sequences for each GPU; {'; '.join(map(shipped.origin, files))}.")
    bad = {key: each for key, each in found.items() if each.disturbed}
    lines = []
    for what, colour in zip((*KINDS.values(), GPUS), COLOURS[1:], strict=False):
        if points := {key[1]: each.times for key, each in found.items() if key[0] == what and key not in bad}:
            lines.append(Line(what, [1, *points], [1.0, *points.values()], colour, marker="o"))
    if bad:
        points = [count for _, count in bad], [each.times for each in bad.values()]
        lines.append(Line("disturbed, no results", *points, "c3", "", marker="x"))
        captions += [f"Disturbed: {count} {what}, {each.reason}." for (what, count), each in bad.items()]
    most = max(max(line.x) for line in lines)
    lines.insert(0, Line("ideal", [1, most], [1, most], "soft", "--"))
    alt = "Speed-up over the number of threads, ranks or GPUs, with the ideal line, on which twice as many workers are "
    title, axes = "Speed-up of the training step", ("threads, ranks or GPUs", "times as fast as one")
    return Chart("scaling", title, f"{alt}twice as fast.", *axes, lines), " ".join(captions)


def samples(runs):
    modes = {"infer1-replicate": ", replicate", "infer1-tensor": ", tensor"}
    rows = [
        [f"paper, {name} (its Figure {number})", "its training", text]
        for number, (name, text) in enumerate(paper.SAMPLES.items(), 6)
    ]
    for name in ("infer0", *modes, "infer2", "infer3", "train0", "train1-2"):
        if results := runs.results(name):
            weights = "shipped, 1200 updates" if "infer" in name else f"{runs.steps} updates, preset {runs.preset}"
            rows.append([f"ours, stage {name[5]}{modes.get(name, '')}", weights, results["sample"]])
    caption = "Greedy continuations of the first 256 tokens of the corpus, or of as many as the model's block has. The "
    caption += "paper's corpus is another text."
    return Table(caption, ["program", "weights", "30 new tokens"], rows)


def machine(hardware, runs, titles):
    """[Table]: hardware and versions, and the parts that are missing. titles: {name of a part: its title}."""
    known = {"gpu": "none (nvidia-smi lists no GPU)"} | hardware
    known["memory_bytes"] = f"{hardware['memory_bytes']:,}"
    rows = [[name.replace("_", " "), value] for name, value in known.items() if value]
    missing = [[titles.get(name, name), reason] for name, reason in runs.missing.items()]
    tables = [Table("Hardware and versions.", ["", THIS_MACHINE], rows)]
    return tables + [Table("What was not measured on this machine.", ["part", "reason"], missing)] * bool(missing)


def scope(runs):
    """Sentences: which stages trained on this machine, why others not, and which other programs ran meanwhile."""
    sentences, reasons = [], {}  # reasons: {why, or "": [stage]}
    for stage, name in enumerate(PARTS["training"]):
        reason = "" if runs.results(name) else runs.missing.get(name, "no GPU was found")
        reasons.setdefault(reason, []).append(str(stage))
    ran = f"ran on this machine: {runs.steps} training steps of preset {runs.preset} (the paper: {PAPER_STEPS})."
    for reason, stages in reasons.items():
        did = f"did not run: {reason}; numbers of other machines are marked." if reason else ran
        sentences.append(f"Stage{'s' * (len(stages) > 1)} {' and '.join(stages)} {did}")
    if busy := {title: cores for title, cores in runs.other_cores.items() if (cores or 0) > BUSY}:
        texts = "; ".join(f"{title}: {cores:.1f}" for title, cores in busy.items())
        sentences.append(f"Other programs used cores, so the times are not exact. The parts and their cores: {texts}.")
    return " ".join(sentences)

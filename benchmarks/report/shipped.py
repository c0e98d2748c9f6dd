"""Results of GPUs from results/, for the sections that this machine cannot measure. Each is marked with its source."""

import json

from benchmarks.harness.speedups import Speedup
from benchmarks.harness.table_format import load
from benchmarks.report.trace import step_of
from testing.jobs import ROOT


def origin(name, used=None):
    """Where and when results/NAME.json was measured, for a caption. used: how many of several GPUs were used."""
    record = load(name)
    where = f"{used} of " * bool(used) + record["machine"]
    return f"{where}, {record['date'][:10]}, commit {record['commit']} (results/{name}.json)"


def curve(name, ranks):
    """The 50 losses of preset `paper` in fp32 of the first row with this name and number of ranks in gpus/parity."""
    rows = load("gpus/parity")["results"]["runs"]
    return next(r["losses"] for r in rows if r["precision"] == "fp32" and r["ranks"] == ranks and name in r["name"])


def runs():
    """{(what, stage): (seconds, precision and source)}; a training has 50 steps of `paper`."""
    step = next(r for r in load("gpu/step_paper_fp32")["results"] if r["name"] == "ours")
    paper = next(r for r in load("gpus/scaling")["results"]["paper"] if r["name"].endswith("--zero 1"))
    decode = next(r for r in load("gpu/decode_paper")["results"] if r["name"] == "ours" and r["precision"] == "fp32")
    how = "fp32, 50 times the median step"
    return {
        ("training", 2): (50 * step["seconds"]["median"], f"{how}; {origin('gpu/step_paper_fp32')}"),
        ("training", 3): (paper["totals"]["median"], f"bf16; {origin('gpus/scaling', paper['ranks'])}"),
        ("inference", 2): (decode["total"]["median"], f"fp32; {origin('gpu/decode_paper')}"),
    }


def gain_gpus():
    """(Speedup of two GPUs over one, its source): stage 3 on GPT-2 124M."""
    rows = load("gpus/scaling_two")["results"]["scaling"][0]["rows"]
    row = next(each for each in rows if each["name"].endswith("--zero 1") and each["ranks"] == 2)
    source = f"GPT-2 124M, 64 sequences a GPU; {origin('gpus/scaling_two', 2)}"
    return Speedup(2 * row["efficiency"]["median"], 2), source


def timelines():
    """[step of trace.py] of the shipped trace: a step of stage 3 on rank 0 of four GPUs, for each --dp."""
    events = json.loads((ROOT / "results" / "gpus" / "timeline_trace.json").read_text(encoding="utf-8"))["traceEvents"]
    steps = []
    for title in [event for event in events if event["name"] == "process_name"]:
        own = [event | {"pid": 0} for event in events if event["pid"] == title["pid"]]
        network = [event["tid"] for event in own if event.get("args", {}).get("name") == "communication"]
        # the kernel of the cross-entropy is the last of the forward pass, and those of the optimizer have its names
        loss = max(event["ts"] for event in own if event["name"].startswith("forward_backward_kernel"))
        update = min(event["ts"] for event in own if event["name"].startswith(("clip", "adamw")))
        for event in own:
            start = event.get("ts", 0)
            phase = "forward" if start <= loss else "backward" if start < update else "optimizer"
            event["cat"] = "collective" if event.get("tid") in network else phase
        end = max(event["ts"] + event["dur"] for event in own if event["ph"] == "X")
        step = {"ph": "X", "cat": "step", "name": title["args"]["name"], "pid": 0, "ts": 0, "dur": end}
        steps.append(step_of([*own, step]))
    return steps

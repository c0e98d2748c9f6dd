"""Results of GPUs from results/, for the sections that this machine cannot measure. Each is marked with its source."""

import json
from collections import defaultdict

from benchmarks.harness.table_format import load
from benchmarks.report.trace import MICROSECONDS, gpu_op
from testing.jobs import ROOT

TIMELINE = "gpus/timeline_trace"


def origin(name, used=None):
    """Where and when results/NAME.json was measured, for a caption. used: the number of GPUs used."""
    record = load(name)
    machine = record["hardware"]
    gpus = (
        f"{machine['gpus']} x {machine['gpu']}" if machine.get("gpu") else f"{machine['cpu']}, {machine['cores']} cores"
    )
    if used and used < int(machine.get("gpus") or 0):
        gpus = f"{used} of the machine's {machine['gpus']} GPUs ({machine['gpu']})"
    return f"{gpus}, {record['date'][:10]}, commit {record['commit']} (results/{name}.json)"


def curve(name, ranks):
    """The 50 losses of preset `paper` in fp32 of the first row with this name and number of ranks in gpus/parity."""
    rows = load("gpus/parity")["results"]
    return next(r["losses"] for r in rows if r["precision"] == "fp32" and r["ranks"] == ranks and name in r["name"])


def runs():
    """{(what, stage): (seconds, precision, GPUs, how it was computed, source)}; a training has 50 steps of `paper`."""
    step = next(r for r in load("gpu/step_paper_fp32")["results"] if r["name"] == "ours")
    paper = next(r for r in load("gpus/scaling")["results"]["paper"] if r["name"].endswith("--zero 1"))
    decode = next(r for r in load("gpu/decode_paper")["results"] if r["name"] == "ours" and r["precision"] == "fp32")
    how = ", 50 times the median step"
    return {
        ("training", 2): (50 * step["seconds"]["median"], "fp32", 1, how, "gpu/step_paper_fp32"),
        ("training", 3): (paper["totals"]["median"], "bf16", paper["ranks"], "", "gpus/scaling"),
        ("inference", 2): (decode["total"]["median"], "fp32", 1, "", "gpu/decode_paper"),
    }


def kernels():
    """{title of a kernel: seconds in one step of `paper`} of stage 2, largest first."""
    found = defaultdict(float)
    for row in load("gpu/profile_paper")["results"]["graph"]:
        found[gpu_op(row["title"])] += row["ms"] / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def scaling_rows():
    """[(GPUs, tokens per second, efficiency)] of stage 3 on GPT-2 124M with 64 sequences per GPU, and their sources."""
    rows = {1: (1, 1.0)}
    for name in ("gpus/scaling_two", "gpus/scaling"):
        for row in load(name)["results"]["scaling"][0]["rows"]:
            if row["name"].endswith("--zero 1"):
                rows[row["ranks"]] = row["ranks"], row["efficiency"]["median"]
    return sorted(rows.values()), ["gpus/scaling_two", "gpus/scaling"]


def timelines():
    """[(title, step of trace.py)] of the shipped trace: a step of stage 3 on rank 0 of four GPUs, for each --dp."""
    events = json.loads((ROOT / "results" / f"{TIMELINE}.json").read_text(encoding="utf-8"))["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = []
    for pid, title in titles.items():
        lanes = []
        for tid in sorted(tid for process, tid in names if process == pid):
            spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
            category = "collective" if names[pid, tid] == "communication" else "GPU"
            events_of = [[e["name"], round(e["ts"], 1), round(e["dur"], 1), category, "", 0] for e in spans]
            lanes.append({"rank": 0, "name": names[pid, tid], "events": events_of})
        end = max(event[1] + event[2] for lane in lanes for event in lane["events"])
        steps.append((title, {"name": title, "seconds": end * MICROSECONDS, "lanes": lanes}))
    return steps

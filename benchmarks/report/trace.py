"""Read training steps from traces, for the step player."""

import json
from collections import defaultdict
from pathlib import Path

from testing.jobs import ROOT

MICROSECONDS = 1e-6


def read_step(path):
    """The last step of a trace that `--trace` wrote: {"name", "seconds", "lanes": [{"rank", "name", "events"}]}.

    An event is [name, start, duration, category, module, bytes], in microseconds from the start of the step.
    """
    return step_of(json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"])


def step_of(events):
    """read_step() of a list of Chrome trace events."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    step = max((e for e in spans if e.get("cat") == "step" and e["pid"] == 0), key=lambda event: event["ts"])
    begin, length, lanes = step["ts"], step["dur"], defaultdict(list)
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):  # an outer one before those inside it
        start, duration, category = event["ts"] - begin, event["dur"], event.get("cat", "")
        if category != "step" and 0 <= start < length and start + duration <= 1.05 * length:
            details = {"module": "", "bytes": 0} | event.get("args", {})
            fields = round(start, 1), round(duration, 1), category, details["module"], details["bytes"]
            lanes[event["pid"], event["tid"]].append([event["name"], *fields])
    lanes = [{"rank": key[0], "name": names.get(key, ""), "events": found} for key, found in sorted(lanes.items())]
    return {"name": step["name"], "seconds": length * MICROSECONDS, "lanes": lanes}


def shipped_steps():
    """[step_of()] of the shipped trace of GPUs: a step of stage 3 on rank 0 of four GPUs, for each --dp."""
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

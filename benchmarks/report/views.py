"""The views of the step player, as JSON data: recorded collectives, pipeline schedules, steps read from traces."""

import json
from collections import defaultdict
from pathlib import Path

from benchmarks.report.runs import origin
from benchmarks.report.units import seconds
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.pipeline.simulator import LIVE, simulate, splits
from testing.jobs import ROOT

SHORTEST = 5000  # a bar that is shorter than this part of the step is not drawn; so a phone stays fast
MICROSECONDS = 1e-6
KINDS = {"F": "forward", "B": "backward", "W": "weights"}


def views(runs):
    """[view], in the order of the list."""
    found = [*(runs.results("recordings") or []), *(pipeline(name, 4, 8) for name in SCHEDULES)]
    for name, record in runs.records.items():
        if name.startswith("trace") and "results" in record:
            title = record["title"].removeprefix("trace of a step, ")
            found.append(training_step(f"{title}, preset {runs.preset}, this machine", record["results"]))
    if not runs.results("trace3"):
        for step in shipped_steps():
            text = f"stage 3, {step['name']}, GPT-2 124M, rank 0"
            found.append(training_step(text, step, f"Shipped result: {origin('gpus/timeline')}. "))
    return found


def pipeline(name, ranks, count):
    """A simulated schedule: a lane of actions for each rank, and its live activations after each action."""
    schedule = SCHEDULES[name](ranks, count)
    chunks, half = len({chunk for _, _, chunk in schedule[0]}), splits(schedule) / 2
    timeline, lanes = simulate(schedule, lambda kind, chunk: 1 / chunks), []
    changes = LIVE | {"B": half - 1, "W": -half}
    for rank, actions in enumerate(schedule):
        events, live = [], [[0, 0]]
        for kind, batch, chunk in actions:
            start, end = timeline.times[kind, batch, chunk]
            title = f"{KINDS[kind]} of micro-batch {batch}, chunk {chunk}"
            events.append([title, start, end - start, KINDS[kind], "", 0, str(batch)])
            live.append([start if kind == "F" else end, live[-1][1] + changes[kind] / chunks])
        lanes.append({"rank": rank, "name": "", "events": events, "live": [*live, [timeline.seconds, live[-1][1]]]})
    peaks = ", ".join(f"{peak / chunks:g}" for peak in timeline.peaks)
    text = (
        f"{ranks} ranks, {count} micro-batches (the numbers): {timeline.seconds:g} units of time, bubble "
        f"{100 * timeline.bubble:.0f} %, at most {peaks} live activations on the ranks (the curve below the bars). "
        f"For the layers of a rank, forward, backward and the gradients of the parameters take one unit each. "
        f"{'Half of an activation is live between the last two' if half else 'A backward bar includes the last two'}."
    )
    if chunks > 1:
        text += f" A bar is one of {chunks} chunks: 1/{chunks} of the layers, time and activations; so numbers repeat."
    trace = {"lanes": lanes, "length": timeline.seconds, "unit": "unit"}
    return {"group": "pipeline schedules", "title": f"pipeline {name}", "text": text} | trace


def training_step(title, step, origin=""):
    """The view of a step of read_step(), without the bars that are too short to be seen."""
    total, lanes = step["seconds"], []
    for lane in step["lanes"]:
        events = [event for event in lane["events"] if event[2] * MICROSECONDS > total / SHORTEST]
        name = lane["name"].replace("all ranks", "collectives of all ranks")
        lanes.append(lane | {"name": name, "events": events})
    text = f"{origin}The step takes {seconds(total)}; bars shorter than {seconds(total / SHORTEST)} are not drawn."
    return {"group": "training steps", "title": title, "text": text, "lanes": lanes, "length": total / MICROSECONDS}


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

"""Read one training step from a trace: the bars of the step player, the time by op, and the cost of the collectives."""

import json
import re
from collections import defaultdict
from pathlib import Path

NO_WORK = "step", "phase", "collective", "wait"  # categories of events that are no kernels
PRODUCT = re.compile("nvjet|gemm|cutlass|splitK|product", re.IGNORECASE)  # kernels of cuBLASLt
MICROSECONDS = 1e-6
ROUNDING = 0.05  # microseconds: a trace's times are rounded to 0.1
SEVERAL = "several modules"
KERNELS = {  # {name of a GPU kernel in a trace: its title}; a trace has no module names
    "forward_kernel": f"forward: {SEVERAL}",
    "backward_kernel": f"backward: {SEVERAL}",
    "forward_backward_kernel": "cross_entropy: forward_backward",
    "both_kernel": "attention: backward (dq, dkdv)",
    "attention: both": "attention: backward (dq, dkdv)",
    "dq_kernel": "attention: dq",
    "dkdv_kernel": "attention: dkdv",
    "column_sums_kernel": "column_sums: column_sums",
    "add_partials_kernel": "column_sums: add_partials",
    "adamw_kernel": "adamw: adamw",
    "squares_kernel": "adamw: squares",
    "clip_kernel": "adamw: clip",
    "tokens_kernel": "embedding: tokens",
    "positions_kernel": "embedding: positions",
    "pieces_kernel": "embedding: pieces",
    "loss_kernel": "losses: loss",
    "rescale_kernel": "losses: rescale",
    "segment_sum_kernel": "segment_sum: segment_sum",
    "totals_kernel": "totals: totals",  # the name of segment_sum_kernel in the shipped trace
}


def read_step(path):
    """The last step of a trace that `--trace` wrote: {"seconds", "lanes": [{"rank", "name", "events"}]}.

    An event is [name, start, duration, category, module, bytes], in microseconds from the start of the step.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return step_of(content["traceEvents"])


def step_of(events):
    """read_step() of a list of Chrome trace events."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    step = max((e for e in spans if e.get("cat") == "step" and e["pid"] == 0), key=lambda event: event["ts"])
    begin, end = step["ts"], step["ts"] + step["dur"]
    lanes = defaultdict(list)
    for event in spans:
        inside = begin <= event["ts"] < end and event["ts"] + event["dur"] <= end + 0.05 * step["dur"]
        if inside and event.get("cat") != "step":
            details = event.get("args", {})
            fields = event.get("cat", ""), details.get("module", ""), details.get("bytes", 0)
            lanes[event["pid"], event["tid"]].append(
                [event["name"], round(event["ts"] - begin, 1), round(event["dur"], 1), *fields]
            )
    return {
        "name": step["name"],
        "seconds": step["dur"] * MICROSECONDS,
        "lanes": [
            {"rank": rank, "name": names.get((rank, lane), ""), "events": sorted(lanes[rank, lane], key=lambda e: e[1])}
            for rank, lane in sorted(lanes)
        ],
    }


def own_times(events):
    """[(event, its duration without the events inside it)] of one lane, whose events are nested or disjoint."""
    times, containing = [], []  # containing: (entry of `times`, end) of the events that contain the next one
    for event in sorted(events, key=lambda event: (event[1], -event[2])):
        _, start, duration, *_ = event
        while containing and containing[-1][1] <= start + ROUNDING:
            containing.pop()
        if containing:
            containing[-1][0][1] -= duration
        times.append([event, duration])
        containing.append((times[-1], start + duration))
    return times


def time_by_op(step):
    """{name of an op: seconds}, over all lanes of all ranks, largest first; without collectives and waiting.

    If the trace has kernels of GPUs, only these count: the other events are their launches.
    """
    seconds = defaultdict(float)
    on_gpu = any(event[3] == "GPU" for lane in step["lanes"] for event in lane["events"])
    for lane in step["lanes"]:
        for event, own in own_times(lane["events"]):
            if event[3] == "GPU" or (not on_gpu and event[3] not in NO_WORK):
                seconds[gpu_op(event[0]) if on_gpu else event[0]] += max(0.0, own) * MICROSECONDS
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def gpu_op(kernel):
    """The title under which the time of a GPU kernel is counted: all matrix products have one title."""
    name = kernel.partition("<")[0]
    return "matrix products" if PRODUCT.search(kernel) else KERNELS.get(name, name)


def collectives_of(step, rank=0):
    """[{"name", "calls", "bytes", "seconds"}] of the collectives of one rank, largest time first."""
    found = defaultdict(lambda: {"calls": 0, "bytes": 0, "seconds": 0.0})
    for lane in step["lanes"]:
        for name, _, duration, category, _, size in lane["events"]:
            if category == "collective" and lane["rank"] == rank:
                row = found[name]
                row["calls"], row["bytes"] = row["calls"] + 1, row["bytes"] + size
                row["seconds"] += duration * MICROSECONDS
    return [{"name": name, **row} for name, row in sorted(found.items(), key=lambda item: -item[1]["seconds"])]


def waiting(step, rank=0):
    """The seconds for which the workers of a rank waited for a collective."""
    events = (event for lane in step["lanes"] if lane["rank"] == rank for event in lane["events"])
    return sum(event[2] for event in events if event[3] == "wait") * MICROSECONDS

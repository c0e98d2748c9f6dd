"""Read one training step from a trace: the bars of the step player, the time by op, and the cost of the collectives."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

NO_WORK = "step", "phase", "collective", "wait"  # categories of events that are no kernels
PRODUCT = re.compile("nvjet|gemm|cutlass|splitK|product", re.IGNORECASE)  # kernels of cuBLASLt
MICROSECONDS = 1e-6
ROUNDING = 0.05  # microseconds: a trace's times are rounded to 0.1
MODULES = {  # {module: its kernels on a GPU}; a trace of a GPU has no module names
    "attention": ("dq", "dkdv"), "column_sums": ("column_sums", "add_partials"), "adamw": ("adamw", "squares", "clip"),
    "embedding": ("tokens", "positions", "pieces"), "losses": ("loss", "rescale"), "segment_sum": ("segment_sum",),
    "totals": ("totals",),  # the name of segment_sum in the shipped trace
    "cross_entropy": ("forward_backward",),
}  # fmt: skip
KERNELS = {f"{kernel}_kernel": f"{module}: {kernel}" for module, kernels in MODULES.items() for kernel in kernels}
KERNELS |= {f"{name}_kernel": f"{name}: several modules" for name in ("forward", "backward")}
KERNELS |= dict.fromkeys(("both_kernel", "attention: both"), "attention: backward (dq, dkdv)")


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
    for event in sorted(spans, key=lambda event: event["ts"]):
        start, duration, category = event["ts"] - begin, event["dur"], event.get("cat", "")
        if category != "step" and 0 <= start < length and start + duration <= 1.05 * length:
            details = {"module": "", "bytes": 0} | event.get("args", {})
            fields = round(start, 1), round(duration, 1), category, details["module"], details["bytes"]
            lanes[event["pid"], event["tid"]].append([event["name"], *fields])
    lanes = [{"rank": key[0], "name": names.get(key, ""), "events": found} for key, found in sorted(lanes.items())]
    return {"name": step["name"], "seconds": length * MICROSECONDS, "lanes": lanes}


def events_of(step, *ranks):
    """All events of these ranks, or of all ranks."""
    return [event for lane in step["lanes"] if not ranks or lane["rank"] in ranks for event in lane["events"]]


def time_by_op(step):
    """{name of an op: seconds}, over all lanes of all ranks, largest first; without collectives and waiting.

    The time of an event does not include the events inside it. If the trace has kernels of GPUs, only these count: the
    other events are their launches.
    """
    found, on_gpu = Counter(), any(event[3] == "GPU" for event in events_of(step))
    for lane in step["lanes"]:
        outer = []  # [(end, op)] of the events that contain the next one
        for name, start, duration, category, *_ in sorted(lane["events"], key=lambda event: (event[1], -event[2])):
            while outer and outer[-1][0] <= start + ROUNDING:
                outer.pop()
            op = gpu_op(name)
            counts = category == "GPU" if on_gpu else category not in NO_WORK
            if outer and outer[-1][1]:
                found[outer[-1][1]] -= duration * MICROSECONDS
            if counts:
                found[op] += duration * MICROSECONDS
            outer.append((start + duration, op if counts else None))
    return dict(found.most_common())


def gpu_op(kernel):
    """The title under which the time of a kernel is counted: all matrix products of a GPU have one title."""
    name = kernel.partition("<")[0]
    return "matrix products" if PRODUCT.search(kernel) else KERNELS.get(name, name)


def collectives_of(step, rank=0):
    """[{"name", "calls", "bytes", "seconds"}] of the collectives of one rank, largest time first."""
    found = defaultdict(list)
    for name, _, duration, category, _, size in events_of(step, rank):
        if category == "collective":
            found[name].append((duration * MICROSECONDS, size))
    sums = [(name, len(calls), *map(sum, zip(*calls, strict=True))) for name, calls in found.items()]
    rows = [{"name": name, "calls": calls, "bytes": size, "seconds": time} for name, calls, time, size in sums]
    return sorted(rows, key=lambda row: -row["seconds"])


def waiting(step, rank=0):
    """The seconds for which the workers of a rank waited for a collective."""
    return sum(event[2] for event in events_of(step, rank) if event[3] == "wait") * MICROSECONDS

"""The kernels that a GPU has run, with their times: recorded by CUPTI, NVIDIA's library that torch.profiler uses.

CUPTI records every kernel of the process, including those of CuPy, Triton, cublasLt and NCCL, and the kernels of a
replayed CUDA graph. For a kernel of a graph it does not report the stream on which the kernel was captured.

cupti-python 13.0 was tried (H200): it records the same kernels, and opens in 0.1 s, where torch.profiler is imported in
1.8 s. It would replace 45 lines of this file, and PyTorch would not be needed to record kernels; this is not done.
"""

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gpt2core.errors import ConfigError

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of GPU activities in the trace of torch.profiler
ORIGIN = "origin of the clock"  # name of the mark by which KernelRecorder compares two clocks
COMMUNICATION = re.compile("nccl|tree_sum", re.IGNORECASE)  # in the names of the kernels of collectives
LANES = ("compute", "compute, concurrent", "communication")
COMPUTE, CONCURRENT, COMMUNICATE = range(3)  # indices into LANES


class Activity(NamedTuple):
    """One activity of the GPU (a kernel, copy or fill) that CUPTI recorded; start and duration in microseconds."""

    start: float
    duration: float
    name: str


def open_cupti(number=None):
    """Open CUPTI. Call this before a graph is captured, or CUPTI does not report the graph's kernels.

    number: the number of the GPU to use, or None for PyTorch's current GPU. Raises ConfigError if there is no PyTorch
    or no GPU.
    """
    os.environ["TEARDOWN_CUPTI"] = "0"  # torch.profiler: keep CUPTI open between two profiles
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the kernels of a GPU are recorded by PyTorch's CUPTI: install torch ({reason})") from error
    if not torch.cuda.is_available():
        raise ConfigError("PyTorch finds no GPU, and its CUPTI records the kernels: install a torch with CUDA")
    if number is not None:
        torch.cuda.set_device(number)
    one = torch.ones(1, device="cuda")
    return recorded(lambda: one + one, 1)


def recorded(function, times):
    """Call function() `times` times; return [Activity] of the GPU, in the order of their start."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            function()
        torch.cuda.synchronize()
    return activities_of(events_of(profiler))


def events_of(profiler):
    """The events of a torch.profiler, as dictionaries in Chrome's trace format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(errors="replace"))["traceEvents"]


def activities_of(events):
    """[Activity] of the GPU in the events of a profiler, in the order of their start."""
    return sorted(
        Activity(float(event["ts"]), float(event["dur"]), event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    )


class KernelRecorder:
    """Records the activities of the GPU from its construction to stop(). synchronize(): waits for the GPU.

    The profiler has another clock than time.perf_counter(). So the constructor records a mark, whose time is known in
    both clocks.
    """

    def __init__(self, synchronize):
        from torch.profiler import ProfilerActivity, profile, record_function

        self.synchronize = synchronize
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.profiler.start()
        for name in ("first mark, which takes longer", ORIGIN):
            self.origin = time.perf_counter()
            with record_function(name):
                pass

    def stop(self):
        """Stop recording; return {title of a lane: [(name, start, duration)]}.

        start: in seconds of time.perf_counter(); duration: in seconds.
        """
        self.synchronize()
        self.profiler.stop()
        events = events_of(self.profiler)
        mark = next(float(event["ts"]) for event in events if event.get("name") == ORIGIN)
        activities, lanes = activities_of(events), {}
        for number, activity in lanes_of(activities):
            start = self.origin + (activities[0].start + activity.start - mark) / 1e6
            lane = lanes.setdefault(f"GPU: {LANES[number]}", [])
            lane.append((short(activity.name), start, activity.duration / 1e6))
        return dict(sorted(lanes.items(), key=lambda item: LANES.index(item[0].removeprefix("GPU: "))))


def lanes_of(activities):
    """Assign each activity to a lane: [(index into LANES, Activity)]. Starts are relative to the first activity's.

    Kernels of NCCL and of the canonical sum are in the lane "communication". The other kernels are in the lane
    "compute", or in "compute, concurrent" if they start while a kernel of the lane "compute" runs.
    """
    placed, compute_end = [], 0.0
    for activity in activities:
        activity = activity._replace(start=activity.start - activities[0].start)
        if COMMUNICATION.search(activity.name):
            placed.append((COMMUNICATE, activity))
        elif activity.start < compute_end:
            placed.append((CONCURRENT, activity))
        else:
            placed.append((COMPUTE, activity))
            compute_end = activity.start + activity.duration
    return placed


def short(name):
    """A kernel's name without namespaces, template arguments and parameters, at most 60 characters."""
    if found := re.search(r"cutlass_?\w*_\w+|nvjet_\w+", name):
        return found[0][:60]
    name = re.sub(r"\(anonymous namespace\)", "", name.removeprefix("void "))
    return re.split(r"[<(]", name)[0].rpartition("::")[2].strip()[:60] or name[:60]

"""Every allocation of one pass: [(bytes, source)] in order, negative bytes for a free, "file:line function" as source.

allocated_by_torch() and allocated_by_ours() return (events, marks, before): marks is {range: the number of events
before it}, `before` the bytes that were allocated before the first event.
"""

import contextlib
import itertools
import sys
from collections import Counter
from pathlib import Path

import torch

from benchmarks.harness.assignment_tables import FORWARD
from stage2_cuda.runtime.cupti import events_of
from testing.jobs import ROOT

HELPERS = {"empty", "floats", "like", "product", "zeros"}  # functions whose caller says more
UNKNOWN = "PyTorch, without a Python stack"  # backward runs in a thread of C++


@contextlib.contextmanager
def marked(owner, count):
    """Replace owner.range(name), a context manager; yield {name: count() when the range of this name was entered}."""
    marks = {}

    @contextlib.contextmanager
    def mark(name):
        marks.setdefault(name, count())
        yield

    owner.range = mark
    try:
        yield marks
    finally:
        del owner.range  # restores the method of the class


def allocated_by_torch(passes, kind, path):
    """The events of a TorchPasses. On a GPU the memory snapshot is written to `path`."""
    if passes.device.type == "cpu":
        return allocated_on_cpu(passes, kind)
    memory = torch.cuda.memory
    torch.cuda.synchronize()
    before = memory.memory_allocated()

    def events():
        return events_of_trace(memory._snapshot()["device_traces"][torch.cuda.current_device()])

    memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        with marked(passes, lambda: len(events())) as marks:
            passes.run(kind)
        torch.cuda.synchronize()
        found = events()
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)
    return found, marks, before


def events_of_trace(entries):
    """The events from the entries of a snapshot."""
    found = []
    for entry in entries:
        if entry["action"] == "alloc":
            found.append((entry["size"], source_of_frames(entry.get("frames", ()))))
        elif entry["action"] == "free_completed":
            found.append((-entry["size"], ""))
    return found


def is_ours(file):
    """Whether a file belongs to this repository; .venv, with the installed packages, may be in the same directory."""
    return file.startswith(str(ROOT)) and "site-packages" not in file


def source_of_frames(frames):
    """The innermost frame in this repository as "file:line function"."""
    for frame in frames:
        if is_ours(frame["filename"]):
            return f"{Path(frame['filename']).relative_to(ROOT)}:{frame['line']} {frame['name']}"
    return UNKNOWN


def allocated_on_cpu(passes, kind):
    """The same on the CPU, for a trial, without sources: from the trace of torch.profiler."""
    parameters, states = list(passes.model.parameters()), passes.optimizer.state.values()
    tensors = [*parameters, *(p.grad for p in parameters), *(value for state in states for value in state.values())]
    before = sum(each.nbytes for each in tensors if torch.is_tensor(each))
    passes.range = torch.profiler.record_function
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        passes.run(kind)
    del passes.range
    trace = events_of(recorded)
    found = sorted((entry["ts"], entry["args"]["Bytes"]) for entry in trace if entry.get("name") == "[memory]")
    starts = {entry["name"]: entry["ts"] for entry in trace if entry.get("cat") == "user_annotation"}
    marks = {name: sum(time < starts[name] for time, _ in found) for name in passes.RANGES if name in starts}
    return [(size, UNKNOWN) for _, size in found], marks, before


def saved_by_block(passes, shape):
    """Counter {"file:line function": bytes} of what the first block of a TorchPasses saves for backward.

    shape: (B, T, C) of its input. Parameters are not counted, and an array that several operations save counts once.
    """
    block, found = passes.model.h[0], Counter()
    counted = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = []  # so that no address is used twice

    def pack(tensor):
        tensor = tensor.detach()  # with its graph, an output that its own operation saves would never be freed
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            kept.append(tensor)
            found[source_of_caller(skipped="memory_events")] += storage.nbytes()
        return tensor

    x = torch.randn(shape, device=passes.device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), passes.autocast():
        block(x)
    return found


def allocated_by_ours(passes, kind):
    """The events of a Passes of harness/ours.py on a GPU, launched from Python without a CUDA graph."""
    import cupy

    events = []

    class Hook(cupy.cuda.MemoryHook):
        name = "timeline"

        def malloc_postprocess(self, **allocation):
            events.append((allocation["mem_size"], source_of_caller()))

        def free_postprocess(self, **allocation):
            events.append((-allocation["mem_size"], ""))

    runtime, function = passes.backend.runtime, passes.eager_function(kind)
    pool = cupy.get_default_memory_pool()
    before = passes.trainer.compute_parameters.nbytes if kind == FORWARD else pool.used_bytes()
    with marked(runtime, lambda: len(events)) as marks, Hook():
        function()
        runtime.synchronize()
    return events, {"forward": 0} | marks, before


def source_of_caller(skipped="benchmarks"):
    """The innermost caller in this repository, as "file:line function", in a file without `skipped` in its path."""
    frame = sys._getframe(2)
    while frame:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if is_ours(file) and skipped not in file.removeprefix(str(ROOT)) and function not in HELPERS:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return "CuPy"


def allocated_after(events):
    """[bytes after each event], relative to the first; [0] without events."""
    return list(itertools.accumulate((size for size, _ in events), initial=0))


def thinned(values, marks, count):
    """(at most `count` values, each the largest of a group of neighbours; the marks as indices of these groups)."""
    group = max(1, -(-len(values) // count))
    points = [max(values[first : first + group]) for first in range(0, len(values), group)]
    return points, {name: index // group for name, index in marks.items()}


def largest_allocations(events, count):
    """[{"bytes", "times", "source"}] of the `count` largest sizes and sources of allocations."""
    found = Counter(event for event in events if event[0] > 0)
    ranked = sorted(found, reverse=True)[:count]
    return [{"bytes": size, "times": found[size, source], "source": source} for size, source in ranked]

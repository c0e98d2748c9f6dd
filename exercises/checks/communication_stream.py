"""Checks of exercise 3.4: simulated streams, which know what work is complete before each kernel."""

import contextlib
from types import SimpleNamespace

import numpy as np

from exercises.checks.canonical_all_reduce import on_gpus
from exercises.checks.canonical_sum import mixed
from exercises.compare import Mismatch, expect
from gpt2core.tree_sum import tree_sum as canonical_sum
from stage3_mpi_cuda.nccl_collectives import NcclCollectives


class Streams:
    """A simulation of CUDA streams: each stream knows which work is complete before its next kernel starts."""

    def __init__(self):
        self.caller, self.communication = Stream(self), Stream(self)
        self.current, self.host_waits = self.caller, 0
        self.cuda = SimpleNamespace(
            Event=lambda disable_timing=False: Event(self), get_current_stream=lambda: self.current
        )

    def collectives(self):
        """NcclCollectives of the student that has only what _enqueue() needs."""
        found = object.__new__(NcclCollectives)
        found._cuda, found._stream = self.cuda, self.communication
        return found


class Stream(contextlib.AbstractContextManager):
    def __init__(self, streams):
        self.streams, self.known, self.ptr = streams, set(), 0

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self
        return self

    def __exit__(self, *error):
        self.streams.current = self.before

    def kernel(self, name):
        """Enqueue a kernel; returns the names of the kernels that are complete when it starts."""
        before = set(self.known)
        self.known.add(name)
        return before

    def wait_event(self, event):
        if event.known is None:
            raise Mismatch("a stream waits for an event that was not recorded", "Record the event before the wait.")
        self.known |= event.known

    def record(self, event):
        event.record(self)
        return event

    def synchronize(self):
        self.streams.host_waits += 1


class Event:
    def __init__(self, streams):
        self.streams, self.known = streams, None

    def record(self, stream=None):
        self.known = set((stream or self.streams.current).known)

    def synchronize(self):
        self.streams.host_waits += 1


def enqueue(streams):
    """Enqueue a kernel of the caller, then a call of NCCL.

    Returns (handle, whether the call is on the communication stream, what is complete when it begins, the result).
    """
    seen = []
    streams.caller.kernel("gradient")
    array = np.ones(3)

    def run():
        seen.append((streams.current is streams.communication, streams.current.kernel("nccl")))

    handle = streams.collectives()._enqueue(run, array)
    if handle is None:
        raise Mismatch("_enqueue returns None", "Return _StreamOperation(self._cuda, done, arrays).")
    if len(seen) != 1:
        raise Mismatch(f"run() is called {len(seen)} times, but 1 time is expected", "Call run() once in _enqueue.")
    return handle, *seen[0], array


def stream_order():
    streams = Streams()
    _, on_stream, before, _ = enqueue(streams)
    if not on_stream:
        raise Mismatch(
            "run() is called with the caller's stream as current stream",
            "Call it inside `with stream`, where stream is self._stream if none is given.",
        )
    if "gradient" not in before:
        raise Mismatch(
            "NCCL's call may start before the caller's kernel has written the gradient",
            "Record the event `ready` on the caller's stream, and call stream.wait_event(ready) before run().",
        )
    if streams.host_waits:
        raise Mismatch("_enqueue waits on the host", "Use events between streams: do not call synchronize().")


def stream_join():
    streams = Streams()
    handle, *_ = enqueue(streams)
    if "nccl" in streams.caller.kernel("other work"):
        raise Mismatch(
            "the caller's stream waits for NCCL's call before wait()",
            "Only wait() makes the caller's stream wait: otherwise nothing overlaps.",
        )
    handle.wait()
    if "nccl" not in streams.caller.kernel("optimizer"):
        raise Mismatch(
            "after wait(), a kernel of the caller may start before NCCL's call is complete",
            "Record `done` on the stream after run(), and let wait() call wait_event(done) of the current stream.",
        )
    if streams.host_waits:
        raise Mismatch("wait() blocks the host", "Use wait_event(): do not call synchronize().")


def stream_result():
    streams = Streams()
    handle, *_, array = enqueue(streams)
    for time in ("first", "second"):
        if handle.wait() is not array:
            raise Mismatch(f"the {time} wait() does not return the result", "Return self._result in every case.")
    if getattr(handle, "_pending", 0) is not None:
        raise Mismatch(
            "the handle keeps the arrays after wait()", "Set self._pending to None, so that memory is reused."
        )


def stream_collectives():
    xs = mixed(3, 9)

    def run(comm):
        x = xs[comm.rank]
        first, second = comm.reduce_scatter_start(x), comm.all_gather_start(x)
        gathered = np.array(second.wait())
        return np.array(first.wait()), gathered

    for rank, (part, gathered) in enumerate(on_gpus(3, run)):
        want = canonical_sum(xs)[3 * rank : 3 * rank + 3]
        expect(f"the reduce-scatter on rank {rank}", part, want, 0, look="_enqueue")
        expect(f"the all-gather on rank {rank}", gathered, np.concatenate(xs), 0, look="_enqueue")

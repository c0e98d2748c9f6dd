"""A second CUDA stream, on which weight gradients are computed off the critical path of backward."""

import contextlib
from collections import deque

DEPTH = 4  # largest number of run() contexts in flight, whose operands stay allocated


class SideStream:
    """Runs work on a second stream, in the order of the calls; the operands stay allocated until the work is done."""

    def __init__(self, cupy):
        self.cupy, self.stream, self.in_flight = cupy, cupy.cuda.Stream(non_blocking=True), deque()
        self.forked = False  # whether there is work for which the current stream has not waited

    @contextlib.contextmanager
    def run(self, *operands):
        """A context whose kernels run on the side stream, after all work on the current stream so far."""
        main = self.cupy.cuda.get_current_stream()
        with self.after():
            yield
        self.in_flight.append((self.stream.record(self.event()), operands))
        if len(self.in_flight) > DEPTH:
            main.wait_event(self.in_flight.popleft()[0])

    @contextlib.contextmanager
    def after(self):
        """A context in which the side stream is the current one, after all work on both streams so far."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.event()))
        self.forked = True
        with self.stream:
            yield

    def join(self):
        """Let the current stream wait for all work on the side stream."""
        if self.forked:
            self.cupy.cuda.get_current_stream().wait_event(self.stream.record(self.event()))
            self.in_flight.clear()
            self.forked = False

    def event(self):
        return self.cupy.cuda.Event(disable_timing=True)


class NoStream:
    """The interpreter's side stream: all work is done when the call returns."""

    def run(self, *operands):
        return contextlib.nullcontext()

    def after(self):
        return contextlib.nullcontext()

    def join(self):
        pass

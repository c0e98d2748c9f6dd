"""A second CUDA stream, the side stream, on which backward computes weight gradients.

A layer's backward needs only the gradient of its output; no other layer waits for a weight gradient. So the side stream
computes weight gradients at the same time as the main stream computes the gradients of the activations.
"""

import contextlib
from collections import deque

DEPTH = 4  # largest number of run() contexts whose operands are kept, because their work may not be done yet


class NoStream:
    """The methods of SideStream for only one stream: for the interpreter, and for benchmarks that compare both."""

    def __init__(self):
        self.postponed = None  # a function that launches work, or None

    def postpone(self, launch):
        """Call launch() before other work on the side stream, or before a stream waits for it."""
        self.flush()
        self.postponed = launch

    def flush(self):
        launch, self.postponed = self.postponed, None
        if launch:
            launch()

    def record(self):
        return None

    def run(self, *operands, ready=None):
        return self.after()

    def after(self):
        self.flush()
        return contextlib.nullcontext()

    def ahead(self):
        """A context whose kernels run on the current stream, before all later work on the side stream."""
        return self.after()

    def join(self):
        self.flush()


class SideStream(NoStream):
    """Runs work on the side stream in the order of the calls, and keeps its operands allocated until it is done."""

    def __init__(self, cupy):
        super().__init__()
        self.cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
        self.in_flight = deque()  # (event after the work, its operands) of the latest run() contexts
        self.needs_join = False  # whether there is work for which no other stream has waited

    def record(self):
        """An event after all work on the current stream so far: an argument of run()."""
        return self.cupy.cuda.get_current_stream().record(self.event())

    @contextlib.contextmanager
    def run(self, *operands, ready=None):
        """A context whose kernels run on the side stream, after all work on the current stream so far.

        operands: the arrays that these kernels read, which stay allocated until the kernels are done. After DEPTH more
        contexts the current stream waits for this work, and then the operands are released. ready: an earlier event of
        the current stream, if the work need not wait for later ones.
        """
        main = self.cupy.cuda.get_current_stream()
        with self.after(ready):
            yield
        self.in_flight.append((self.stream.record(self.event()), operands))
        if len(self.in_flight) > DEPTH:
            main.wait_event(self.in_flight.popleft()[0])

    @contextlib.contextmanager
    def after(self, ready=None):
        """A context in which the side stream is the current stream.

        Work inside starts after all earlier work on the side stream, and on the stream of the caller or `ready`.
        """
        self.flush()
        self.stream.wait_event(ready or self.record())
        self.needs_join = True
        with self.stream:
            yield

    @contextlib.contextmanager
    def ahead(self):
        self.flush()
        yield
        self.stream.wait_event(self.record())
        self.needs_join = True  # a graph that is captured ends on the current stream

    def join(self):
        """Make later work on the current stream wait for all work on the side stream so far."""
        self.flush()
        if self.needs_join:
            self.cupy.cuda.get_current_stream().wait_event(self.stream.record(self.event()))
            self.in_flight.clear()
            self.needs_join = False

    def event(self):
        return self.cupy.cuda.Event(disable_timing=True)

"""A second stream for what nobody waits for: the gradients of weights run beside the chain that leads to them."""

import contextlib
from collections import deque

DEPTH = 4  # pieces of work that may be on their way: what they read stays allocated until they are done


class SideStream:
    """Work beside the current stream, in the same order every time, and its operands kept until it is done."""

    def __init__(self, cupy):
        self.cupy, self.stream, self.on_its_way = cupy, cupy.cuda.Stream(non_blocking=True), deque()
        self.forked = False  # whether there is something that the current stream has not waited for

    @contextlib.contextmanager
    def beside(self, *operands):
        """Inside, kernels go to the side stream, after all that the current one has been given so far."""
        main = self.cupy.cuda.get_current_stream()
        with self.behind():
            yield
        self.on_its_way.append((self.stream.record(self.event()), operands))
        if len(self.on_its_way) > DEPTH:
            main.wait_event(self.on_its_way.popleft()[0])

    @contextlib.contextmanager
    def behind(self):
        """Inside, the side stream is the current one, behind all that both have been given so far."""
        self.stream.wait_event(self.cupy.cuda.get_current_stream().record(self.event()))
        self.forked = True
        with self.stream:
            yield

    def settle(self):
        """Let the current stream wait for all of it."""
        if self.forked:
            self.cupy.cuda.get_current_stream().wait_event(self.stream.record(self.event()))
            self.on_its_way.clear()
            self.forked = False

    def event(self):
        return self.cupy.cuda.Event(disable_timing=True)


class NoStream:
    """Where all work is done by the time it is asked for: the interpreter."""

    def beside(self, *operands):
        return contextlib.nullcontext()

    def behind(self):
        return contextlib.nullcontext()

    def settle(self):
        pass

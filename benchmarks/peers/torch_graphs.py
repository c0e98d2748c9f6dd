"""Capture several calls of a PyTorch function in one CUDA graph, and measure the time of the graph by CUDA events.

The time of a single call of a short kernel would mostly be launch overhead.
"""

import torch

from benchmarks.harness.rounds import GraphTimer


def captured(call, stream, calls=1):
    """(a CUDA graph of `calls` calls, the result of the last one)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            result = call()
    return graph, result


def captured_step(step, restore=lambda: None):
    """(a CUDA graph of step(), its result). Warm-up steps on another stream come first; they compile and allocate.

    restore(): called after each of them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    return captured(step, None)


def milliseconds(call):
    """The milliseconds of call() on the current stream, measured by CUDA events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class Graphs(GraphTimer):
    """A GraphTimer of PyTorch. results: {kind: return value of the last captured call}."""

    def __init__(self):
        super().__init__()
        self.stream, self.results = torch.cuda.Stream(), {}

    def milliseconds(self, call):
        with torch.cuda.stream(self.stream):
            return milliseconds(call)

    def captured(self, kind, count):
        graph, self.results[kind] = captured(self.calls[kind], self.stream, count)
        return graph.replay

"""Capture several calls of a PyTorch function in one CUDA graph, and measure the time of the graph by CUDA events.

The time of a single call of a short kernel would mostly be launch overhead.
"""

import torch


def captured(call, stream, calls=1):
    """(a CUDA graph of `calls` calls, the result of the last one)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            result = call()
    return graph, result


def milliseconds(call):
    """The milliseconds of call() on the current stream, measured by CUDA events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class Graphs:
    """CUDA graphs of functions. A subclass sets `calls`: {kind: function}; there is one graph for each kind.

    results: {kind: return value of the last captured call}.
    """

    def __init__(self):
        self.stream, self.calls, self.graphs, self.results = torch.cuda.Stream(), {}, {}, {}

    def capture(self, kind, length):
        """Return how many calls the graph of `kind` contains.

        The first time, capture this graph, with so many calls that one replay takes about `length` milliseconds.
        """
        if kind not in self.graphs:
            call = self.calls[kind]
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    call()
                one_call = min(milliseconds(call) for _ in range(3))
                count = max(1, round(length / one_call))
                graph, self.results[kind] = captured(call, self.stream, count)
            self.graphs[kind] = graph, count
        return self.graphs[kind][1]

    def replay_milliseconds(self, kind):
        """Return the milliseconds of one replay. An untimed replay before it brings the GPU to its full clock rate."""
        graph, _ = self.graphs[kind]
        with torch.cuda.stream(self.stream):
            graph.replay()
            return milliseconds(graph.replay)

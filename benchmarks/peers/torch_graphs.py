"""PyTorch's side of a comparison of kernels: several calls of a kind in a CUDA graph, timed on the device."""

import torch


class Graphs:
    """calls: {kind: function}, which a subclass fills; results: what the last call of a kind has returned."""

    def __init__(self):
        self.stream, self.calls, self.graphs, self.results = torch.cuda.Stream(), {}, {}, {}

    def record(self, kind, milliseconds):
        """Make a graph of about as many milliseconds; returns how many calls it has."""
        if kind not in self.graphs:
            call = self.calls[kind]
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    call()
                once = min(self.timed(call) for _ in range(3))
                calls = max(1, round(milliseconds / once))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):
                    for _ in range(calls):
                        self.results[kind] = call()
            self.graphs[kind] = graph, calls
        return self.graphs[kind][1]

    def replay(self, kind):
        """Milliseconds of one replay, after another that wakes the GPU up."""
        graph, _ = self.graphs[kind]
        with torch.cuda.stream(self.stream):
            graph.replay()
            return self.timed(graph.replay)

    def timed(self, call):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

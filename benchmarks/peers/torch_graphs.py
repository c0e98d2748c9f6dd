"""PyTorch calls that are captured several times in a CUDA graph and timed by device events."""

import torch


class Graphs:
    """One CUDA graph for each kind of call. A subclass sets `calls`, {kind: function}.

    results: {kind: return value of the last captured call}.
    """

    def __init__(self):
        self.stream, self.calls, self.graphs, self.results = torch.cuda.Stream(), {}, {}, {}

    def capture(self, kind, milliseconds):
        """In the first call for `kind`, capture a graph of about `milliseconds`; return its number of calls."""
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

    def replay_milliseconds(self, kind):
        """Milliseconds of one replay. An untimed replay precedes it, so that the GPU runs at its full clock rate."""
        graph, _ = self.graphs[kind]
        with torch.cuda.stream(self.stream):
            graph.replay()
            return self.timed(graph.replay)

    def timed(self, call):
        """Milliseconds of one call on the current stream, by device events."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

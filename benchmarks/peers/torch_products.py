"""The peer of the matrix products: torch.matmul, which has cuBLAS choose, and autograd's types."""

import torch

from benchmarks.peers.torch_graphs import Graphs

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


class Linear(Graphs):
    """The three products of a layer. x (N, C), w (C, K), or (K, C) where it is turned, dy (N, K), on the host."""

    def __init__(self, x, w, dy, turned, precision, device="cuda"):
        super().__init__()
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        x, w, dy = (torch.from_numpy(array).to(device, TYPES[precision]) for array in (x, w, dy))
        self.calls = {
            "forward": lambda: x @ (w.T if turned else w),
            "input": lambda: dy @ (w if turned else w.T),
            "weight": lambda: dy.T @ x if turned else x.T @ dy,
        }
        torch.cuda.synchronize()

    def norms(self):
        return [float(torch.linalg.vector_norm(self.results[kind].float())) for kind in self.calls]

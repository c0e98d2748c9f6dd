"""PyTorch's side of gpu/products.py: torch.matmul, whose algorithm cuBLAS chooses, with autograd's dtypes."""

import math

import torch

from benchmarks.peers.torch_graphs import Graphs

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


class Linear(Graphs):
    """The three products of a layer. numbers: [(float32 numbers on the host, shape)] of x, w and dy.

    x (N, C), w (C, K), or (K, C) if transposed, dy (N, K).
    """

    def __init__(self, numbers, transposed, precision, device="cuda"):
        super().__init__()
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        x, w, dy = (self.repeated(some, shape, device).to(TYPES[precision]) for some, shape in numbers)
        self.calls = {
            "forward": lambda: x @ (w.T if transposed else w),
            "input": lambda: dy @ (w if transposed else w.T),
            "weight": lambda: dy.T @ x if transposed else x.T @ dy,
        }
        torch.cuda.synchronize()

    def repeated(self, some, shape, device):
        size = math.prod(shape)
        return torch.from_numpy(some).to(device).repeat(-(-size // some.size))[:size].view(shape)

    def norms(self):
        return [float(torch.linalg.vector_norm(self.results[kind].float())) for kind in self.calls]

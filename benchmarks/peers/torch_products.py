"""The PyTorch program of gpu/products.py: torch.matmul, with the algorithms that cuBLAS chooses.

The results have the dtypes that autograd would give them.
"""

import math

import torch

from benchmarks.peers.torch_graphs import Graphs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


class Linear(Graphs):
    """CUDA graphs of the three products of a linear layer: x w, dy w' and x' dy, where ' is the transpose.

    x is (N, C), dy (N, K), w (C, K), or (K, C) if `transposed`. The results are stored in the shape of w and x.
    inputs: [(float32 numbers on the host, shape)] of x, w and dy; the numbers are repeated until they fill the shape.
    """

    def __init__(self, inputs, transposed, precision, device="cuda"):
        super().__init__()
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        x, w, dy = (self.repeated(numbers, shape, device).to(DTYPES[precision]) for numbers, shape in inputs)
        self.calls = {
            "forward": lambda: x @ (w.T if transposed else w),
            "input": lambda: dy @ (w if transposed else w.T),
            "weight": lambda: dy.T @ x if transposed else x.T @ dy,
        }
        torch.cuda.synchronize()

    def repeated(self, numbers, shape, device):
        """A tensor of `shape` with the numbers, repeated as often as necessary."""
        size = math.prod(shape)
        return torch.from_numpy(numbers).to(device).repeat(-(-size // numbers.size))[:size].view(shape)

    def norms(self):
        """The Euclidean norms of the three results, computed in fp32."""
        return [float(torch.linalg.vector_norm(self.results[kind].float())) for kind in self.calls]

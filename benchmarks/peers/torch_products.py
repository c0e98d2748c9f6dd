"""The PyTorch program of gpu/products.py: torch.matmul, with the algorithms that cuBLAS chooses.

The results have the dtypes that autograd would give them.
"""

import torch

from benchmarks.peers.torch_graphs import Graphs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


class Linear(Graphs):
    """CUDA graphs of the three products of a linear layer: x w, dy w' and x' dy, where ' is the transpose.

    inputs: x (N, C), w (C, K), or (K, C) if `transposed`, dy (N, K), float32 on the host.
    """

    def __init__(self, inputs, transposed, precision, device="cuda"):
        super().__init__()
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        x, w, dy = (torch.from_numpy(array).to(device).to(DTYPES[precision]) for array in inputs)
        self.calls = {
            "forward": lambda: x @ (w.T if transposed else w),
            "input": lambda: dy @ (w if transposed else w.T),
            "weight": lambda: dy.T @ x if transposed else x.T @ dy,
        }
        torch.cuda.synchronize()

    def norms(self):
        """The Euclidean norms of the three results, computed in fp32."""
        return [float(torch.linalg.vector_norm(self.results[kind].float())) for kind in self.calls]

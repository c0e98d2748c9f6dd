"""The PyTorch program of gpu/attention.py: scaled_dot_product_attention by FlashAttention-2 or cuDNN."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.torch_graphs import Graphs

# B batch, T time, C channels, H heads, D = C // H

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class CausalAttention(Graphs):
    """CUDA graphs of causal attention in bf16: "forward", and "both" (forward and backward).

    qkv (B, T, 3C), dy (B, T, C): float32 on the host, converted to bf16.
    backend: "flash" or "cudnn"; PyTorch must use this implementation and may not use another. packed: whether q, k and
    v are views of one projection, as in the model, or separate arrays (B, H, T, D).
    """

    def __init__(self, qkv, dy, n_head, backend, packed, device="cuda"):
        super().__init__()
        B, T, C = dy.shape

        def heads(array, parts):  # (B, T, parts * C) -> a list of `parts` tensors (B, H, T, D)
            tensor = torch.from_numpy(array).to(device, torch.bfloat16).view(B, T, parts, n_head, C // n_head)
            views = [tensor[:, :, part].transpose(1, 2) for part in range(parts)]
            return views if packed else [view.contiguous() for view in views]

        self.inputs = [tensor.requires_grad_() for tensor in heads(qkv, 3)]
        (self.dy,) = heads(dy, 1)
        self.backend, self.calls = BACKENDS[backend], {"forward": self.forward, "both": self.both}
        torch.cuda.synchronize()

    def forward(self):
        with torch.no_grad(), sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*self.inputs, is_causal=True)

    def both(self):
        with sdpa_kernel(self.backend):
            y = F.scaled_dot_product_attention(*self.inputs, is_causal=True)
            return y.detach(), torch.autograd.grad(y, self.inputs, self.dy)

    def norms(self):
        """[norm of y, norm of the gradients of q, k and v as one vector]."""
        y, gradients = self.results["both"]
        norms = [float(torch.linalg.vector_norm(gradient.float())) for gradient in gradients]
        return [float(torch.linalg.vector_norm(y.float())), sum(norm**2 for norm in norms) ** 0.5]

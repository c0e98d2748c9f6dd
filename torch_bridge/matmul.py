"""D = ReLU(A B + C) in one Triton kernel, for PyTorch: `matmul_add_relu(a, b, c)`, with gradients.

PyTorch computes torch.relu(a @ b + c) with three kernels. Each writes its result to memory, and the next kernel reads
it. The fused kernel reads a, b and c and writes the result.
"""

# a (M, K), b (K, N), c (M, N), d (M, N)

import torch

from torch_bridge.attention_ops import DTYPES, float32_precision
from torch_bridge.kernels.fused_matmul import MatmulTile, StridedMatrix, matmul_launch
from torch_bridge.triton_launch import check_device, check_equal_kinds, launch


def matmul_add_relu(a, b, c, tile=None):
    """ReLU(a b + c) (M, N) of a (M, K), b (K, N) and c (M, N), in the dtype of a.

    Any strides and any M, N and K. float16, bfloat16 or float32, one dtype for all three; sums are float32. tile: a
    MatmulTile to use instead of the default. Raises TypeError or ValueError if shapes, dtypes or devices do not match.
    """
    if tile is None:
        return fused_product(a, b, c)
    check_inputs(a, b, c)
    return product(a, b, c, tile)


def check_inputs(a, b, c):
    """Raise TypeError or ValueError, naming both values, unless the kernel can compute ReLU(a b + c)."""
    check_equal_kinds(a=a, b=b, c=c)
    if a.dtype not in DTYPES:
        raise TypeError(f"a has dtype {a.dtype}: matmul_add_relu takes {', '.join(map(str, DTYPES))}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a has shape {tuple(a.shape)}, b has {tuple(b.shape)}: (M, K) and (K, N) are needed")
    if c.shape != (a.shape[0], b.shape[1]):
        shape = a.shape[0], b.shape[1]
        raise ValueError(
            f"c has shape {tuple(c.shape)}, a b has {shape}: use c.expand{shape} if c is a row or a column"
        )


def product(a, b, c, tile=None):
    """ReLU(a b + c) without gradients."""
    check_device(a, "matmul_add_relu", "torch.relu(a @ b + c)")
    d = a.new_empty(a.shape[0], b.shape[1])
    if d.numel():
        matrices = (StridedMatrix(x, tuple(x.shape), x.stride()) for x in (d, a, b, c))
        launch(*matmul_launch(*matrices, activation="relu", tile=tile, precision=float32_precision()), a.device)
    return d


# -- operator ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torch_bridge::matmul_add_relu", mutates_args=())
def fused_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    check_inputs(a, b, c)
    return product(a, b, c)


@fused_product.register_fake
def _(a, b, c):
    check_inputs(a, b, c)
    return a.new_empty(a.shape[0], b.shape[1])


def save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output)


def backward(ctx, dd):
    """(da, db, dc): dc = 0 where d <= 0, else dd, as PyTorch's for a d that is NaN; da = dc b', db = a' dc."""
    a, b, d = ctx.saved_tensors
    dc = torch.where(d <= 0, 0, dd)
    return dc @ b.mT, a.mT @ dc, dc


fused_product.register_autograd(backward, setup_context=save_for_backward)

__all__ = ["MatmulTile", "matmul_add_relu"]

"""FlashAttention-2 for PyTorch, forward and backward: `flash_attention(q, k, v, causal)` and three autograd functions.

The autograd functions differ in the code that they run. They are called as `.apply(q, k, v, is_causal)`; is_causal may
be omitted (False). They work under torch.compile.

    FlashAttention2Torch            forward: PyTorch, tile by tile; backward: a formula under torch.compile; any device
    FlashAttention2Triton           forward and backward: the Triton kernels of stage 2
    FlashAttention2TritonCompiled   forward: the Triton kernel; backward: the same formula under torch.compile

q (batch..., T_q, D), k and v (batch..., T_k, D): float32, float16 or bfloat16, any strides, D a multiple of 8 from 16
to 128. Causal: query i attends to the keys 0 to i, also if T_q and T_k differ. Each function saves q, k, v and the
logsumexp (batch..., T_q), those with a Triton forward also o. The Triton backward recomputes the attention weights from
the logsumexp; the compiled formula computes the softmax again. Inputs that do not match, or that the kernels cannot
process on their device, raise TypeError or ValueError.
"""

import torch

from torch_bridge.attention_ops import triton_backward, triton_forward
from torch_bridge.tiled_attention import compiled_backward, tiled_forward
from torch_bridge.triton_launch import interpreted


def flash_attention(q, k, v, causal=False):
    """o (batch..., T_q, D) = softmax(q k' / sqrt(D)) v, with gradients.

    The Triton kernels compute it if q is on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1); otherwise PyTorch.
    """
    function = FlashAttention2Triton if q.is_cuda or interpreted() else FlashAttention2Torch
    return function.apply(q, k, v, causal)


class FlashAttention2Torch(torch.autograd.Function):
    """o = FlashAttention2Torch.apply(q, k, v, is_causal), in PyTorch on any device."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = tiled_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, lse)  # backward does not read lse; the assignment's tests do
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        return *compiled_backward(do, *ctx.saved_tensors[:3], ctx.is_causal), None


class FlashAttention2Triton(torch.autograd.Function):
    """o = FlashAttention2Triton.apply(q, k, v, is_causal), by Triton kernels on a GPU or in the interpreter."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = triton_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        return *triton_backward(do, *ctx.saved_tensors, ctx.is_causal), None


class FlashAttention2TritonCompiled(FlashAttention2Triton):
    """FlashAttention2Triton with the backward pass of FlashAttention2Torch."""

    @staticmethod
    def backward(ctx, do):
        return *compiled_backward(do, *ctx.saved_tensors[:3], ctx.is_causal), None

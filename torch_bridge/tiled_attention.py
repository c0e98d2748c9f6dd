"""FlashAttention-2 in plain PyTorch: the forward pass tile by tile, the backward pass as a compiled formula.

It shows the algorithm of stage2_cuda/kernels/attention_forward.py in a few lines, and runs on any device. Both passes
are custom operators, so torch.compile does not unroll the loops over tiles.
"""

# T_q queries, T_k keys, D head size; q (batch..., T_q, D), k and v (batch..., T_k, D), any number of batch dimensions

import functools
import warnings

import torch

from torch_bridge.attention_ops import check_inputs

TILE = 64  # queries and keys of a tile


# -- forward -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torch_bridge::tiled_attention_forward", mutates_args=())
def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (batch..., T_q, D), logsumexp (batch..., T_q) float32) of attention, computed in float32."""
    check_inputs(q, k, v)
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    for start in range(0, q.shape[-2], TILE):
        rows = slice(start, start + TILE)
        o[..., rows, :], lse[..., rows] = query_tile(q[..., rows, :], k, v, start if is_causal else None)
    return o, lse


@tiled_forward.register_fake
def _(q, k, v, is_causal):
    check_inputs(q, k, v)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def query_tile(q, k, v, start):
    """(o (batch..., M, D), logsumexp (batch..., M)) of the M queries of one tile, by an online softmax over the keys.

    start: the position of the first query, or None if the attention is not causal.
    """
    q, scale, M = q.float(), q.shape[-1] ** -0.5, q.shape[-2]
    row_max, row_sum = q.new_full(q.shape[:-1], float("-inf")), q.new_zeros(q.shape[:-1])
    acc = torch.zeros_like(q)
    end = k.shape[-2] if start is None else min(start + M, k.shape[-2])
    for first_key in range(0, end, TILE):
        keys = slice(first_key, min(first_key + TILE, end))
        s = q @ k[..., keys, :].float().mT * scale  # (batch..., M, N)
        if start is not None:
            s = s.masked_fill(future(M, s.shape[-1], start - first_key, q.device), float("-inf"))
        new_max = torch.maximum(row_max, s.amax(-1))
        p, rescale = torch.exp(s - new_max[..., None]), torch.exp(row_max - new_max)
        row_max, row_sum = new_max, row_sum * rescale + p.sum(-1)
        acc = acc * rescale[..., None] + p @ v[..., keys, :].float()
    return acc / row_sum[..., None], row_max + torch.log(row_sum)


def future(M, N, shift, device):
    """Booleans (M, N): whether key j comes after query i. shift: the position of query 0 minus that of key 0."""
    return torch.arange(N, device=device) > torch.arange(M, device=device)[:, None] + shift


# -- backward ----------------------------------------------------------------------------------------------------------


def backward_formula(do, q, k, v, o, lse, is_causal):
    """(dq, dk, dv) of attention, with the T_q x T_k matrices in memory (equations 13 to 19 of the assignment).

    The dtype of a product is that of q; other operations are float32.
    """
    scale = q.shape[-1] ** -0.5
    p = torch.exp((q @ k.mT).float() * scale - lse[..., None])  # (batch..., T_q, T_k)
    if is_causal:
        p = p.masked_fill(future(q.shape[-2], k.shape[-2], 0, q.device), 0.0)
    dv = p.to(do.dtype).mT @ do
    dp = (do @ v.mT).float()
    delta = (o.float() * do.float()).sum(-1, keepdim=True)  # the D of the assignment
    ds = (p * (dp - delta) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, dv


@functools.cache
def compiled_formula():
    """backward_formula() under torch.compile. If a compilation fails, a warning says so, and eager mode is used.

    On the CPU, torch.compile needs a C++ compiler.
    """
    compiled, failed = torch.compile(backward_formula), []

    def formula(*arguments):
        if not failed:
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                failed.append(error)
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"torch.compile failed, attention's backward runs in eager mode: {reason}", stacklevel=2)
        return backward_formula(*arguments)

    return formula


@torch.library.custom_op("torch_bridge::compiled_attention_backward", mutates_args=())
def compiled_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """backward_formula(), compiled; its results are contiguous, as the fake kernel says."""
    gradients = compiled_formula()(do, q, k, v, o, lse, is_causal)
    return tuple(gradient.contiguous() for gradient in gradients)


@compiled_backward.register_fake
def _(do, q, k, v, o, lse, is_causal):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))

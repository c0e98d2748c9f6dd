"""FlashAttention-2 in plain PyTorch: the forward pass tile by tile, the backward pass as a compiled formula.

It shows the algorithm of stage2_cuda/attention/forward.py in a few lines, and runs on any device. Both passes
are custom operators, so torch.compile does not unroll the loops over tiles.
"""

# T_q queries, T_k keys, D head size; q (batch..., T_q, D), k and v (batch..., T_k, D), any number of batch dimensions

import functools
import math
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
    lowest = torch.finfo(q.dtype).min  # unlike -inf, lowest - lowest is 0: all scores of a tile may be -inf
    row_max, row_sum = q.new_full(q.shape[:-1], lowest), q.new_zeros(q.shape[:-1])
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


def backward_formula(do, q, k, v, is_causal):
    """(dq, dk, dv) of attention, with the T_q x T_k matrices in memory.

    Everything is float32; on a GPU, p and ds are rounded to the dtype of q, so that tensor cores multiply them. The
    formula computes the softmax again and takes delta, the D of the assignment, from p and dp, which are not rounded.
    With the saved logsumexp and o, the rounding errors of large scores, and of o in 16 bits, would not cancel in
    dp - delta.
    """
    scale, rounded = q.shape[-1] ** -0.5, q.dtype if q.is_cuda else torch.float32
    unread = max(k.shape[-2] - q.shape[-2], 0) if is_causal else 0  # keys after the last query
    k, v = k[..., : k.shape[-2] - unread, :], v[..., : v.shape[-2] - unread, :]
    s = product(q, k.mT) * scale  # (batch..., T_q, T_k)
    if is_causal:
        s = s.masked_fill(future(q.shape[-2], k.shape[-2], 0, q.device), float("-inf"))
    p, dp = s.softmax(-1), product(do, v.mT)
    ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).to(rounded)
    dq, dk, dv = product(ds, k) * scale, product(ds.mT, q) * scale, product(p.to(rounded).mT, do)
    dk, dv = (torch.nn.functional.pad(gradient, (0, 0, 0, unread)) for gradient in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def product(a, b):
    """a (batch..., M, K) times b (batch..., K, N) in float32. The products of two 16-bit numbers are exact."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:  # tensor cores; PyTorch has this dtype of the result on CUDA
        three = [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (a, b)]
        return torch.bmm(*three, out_dtype=torch.float32).view(*a.shape[:-1], b.shape[-1])
    return a.float() @ b.float()


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
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """backward_formula(), compiled; its results are contiguous, as the fake kernel says."""
    return tuple(gradient.contiguous() for gradient in compiled_formula()(do, q, k, v, is_causal))


@compiled_backward.register_fake
def _(do, q, k, v, is_causal):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))

"""Attention in float64, with gradients by PyTorch: the reference of the tests of torch_bridge.flash_attention."""

# T_q queries, T_k keys, D head size; q, o and do (batch..., T_q, D), k and v (batch..., T_k, D)

import torch

LARGEST = 2**26  # numbers: float64 scores of 512 MiB, several times, so that tests may share a GPU


def oracle(q, k, v, do, causal):
    """{"o", "lse", "dq", "dk", "dv"} in float64; lse (batch..., T_q): the natural logarithm of the row sums."""
    if q.ndim > 2 and q.shape[:-1].numel() * k.shape[-2] > LARGEST:  # one entry of the batch at a time
        entries = [oracle(*each, causal) for each in zip(q, k, v, do, strict=True)]
        return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    o = s.softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(o, leaves, do.double())
    return {"o": o.detach(), "lse": s.detach().logsumexp(-1), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def results(function, q, k, v, do, *causal):
    """The same of function.apply(q, k, v, *causal), one of the autograd functions; lse: what it saves for backward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = function.apply(*leaves, *causal)
    (lse,) = [saved for saved in o.grad_fn.saved_tensors if saved.shape == q.shape[:-1]]
    gradients = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def error_bounds(q, k, v, do, causal):
    """{"o", "dq", "dk", "dv"}: for each row the sum of the norms of its terms, which float32 rounds to 2^-24 of them.

    A score s_j has an error of some eps e_j, e_j = |q| |k_j|; then p_j has one of p_j (e_j - sum(p e)) eps. The
    difference in ds = p (dp - delta) may cancel; all implementations that compute delta from o have this error, as
    PyTorch's fused kernels.
    """
    scale, (q, k, v, do) = q.shape[-1] ** -0.5, (x.double() for x in (q, k, v, do))
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    q, k, v, do, p = *(x.norm(dim=-1, keepdim=True) for x in (q, k, v, do)), s.softmax(-1)
    e = (q @ k.mT) * scale
    weights = p + p * ((1 - p) * e + ((p * e).sum(-1, keepdim=True) - p * e))
    dp = do @ v.mT
    ds = weights * (dp + (weights * dp).sum(-1, keepdim=True)) * scale
    return {"o": weights @ v, "dq": ds @ k, "dk": ds.mT @ q, "dv": weights.mT @ do}


def assert_near(got, want, tolerance, lse_tolerance=1e-5):
    """Assert for each name: norm(got - want) <= tolerance * norm(want). NaN fails.

    Gradients are compared with at least half of the largest norm of a gradient, because dq and dk of a few positions
    nearly cancel. A logsumexp is compared with at least the norm of ones, because it may be near 0; lse_tolerance: its
    tolerance, if smaller.
    """
    scale = max(want[name].norm() for name in ("dq", "dk", "dv"))
    for name, x in want.items():
        least = scale / 2 if name.startswith("d") else x.numel() ** 0.5 if name == "lse" else 0.0
        assert got[name].shape == x.shape, name
        allowed = min(tolerance, lse_tolerance) if name == "lse" else tolerance  # float32, whatever the inputs
        error, bound = (got[name].double() - x).norm(), allowed * max(x.norm(), least)
        assert error <= bound, f"{name}: error {error:.2e} exceeds {bound:.2e}"

"""The operations of GPT-2 in PyTorch, a whole GPT-2 with rotary positions, and random models to compare with them."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary

import math

import numpy as np
import pytest

from gpt2core.architecture import parameter_shapes
from gpt2core.model import GPT2
from gpt2core.tensor import Tensor, no_grad

torch = pytest.importorskip("torch")


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def random_parameters(config, rng, dtype=np.float32):
    """Weights that matter: with deviation 0.02 the blocks are nearly the identity and many gradients nearly zero."""
    parameters = {}
    for name, shape in parameter_shapes(config):
        deviation = 0.5 / math.sqrt(shape[0]) if len(shape) == 2 and "wte" not in name and "head" not in name else 0.3
        value = rng.standard_normal(shape) * deviation
        parameters[name] = (value + (len(shape) == 1 and name.endswith("weight"))).astype(dtype)
    return parameters


def model_of(config, parameters, backend, **options):
    return GPT2(config, {name: Tensor(array, backend, True) for name, array in parameters.items()}, **options)


def check_finite_differences(model, ids, targets, rng):
    """Compare the gradient of each parameter of a float64 model with the slope of the loss in a random direction."""
    step = 1e-5
    model.loss(ids, targets).backward()
    for name, tensor in model.parameters.items():
        direction, losses = rng.standard_normal(tensor.shape), []
        direction /= np.linalg.norm(direction)
        with no_grad():
            for sign in (1, -1):
                tensor.data += sign * step * direction
                losses.append(model.loss(ids, targets).item())
                tensor.data -= sign * step * direction
        slope = (losses[0] - losses[1]) / (2 * step)
        # central differences: step^2 = 1e-10 times a third derivative, and 1e-16 / step = 1e-11 of rounding
        assert abs(slope - (tensor.grad * direction).sum()) <= 1e-7 * (1 + abs(slope)), name


def batch(rng, config, B, T):
    return rng.integers(0, config.vocab_size, (2, B, T))


def attention(qkv, H, width=None):
    """Causal attention of qkv (B, T, 3C), to the last `width` positions if it is given."""
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (part.reshape(B, T, H, C // H).transpose(1, 2) for part in qkv.split(C, 2))
    visible = torch.ones(T, T).tril().triu(1 - (width or T)).bool()
    s = (q @ k.transpose(2, 3) / (C // H) ** 0.5).masked_fill(~visible, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)


def rotary(qkv, H, position=0):
    """Each head's q and k as complex numbers, multiplied by exp(i angle): the formula in another form."""
    B, T, C3 = qkv.shape
    q, k, v = qkv.reshape(B, T, 3, H, -1).unbind(2)
    D = q.shape[-1]
    frequencies = 10000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angles = torch.outer(position + torch.arange(T, dtype=torch.float64), frequencies)[:, None]
    turn = torch.polar(torch.ones_like(angles), angles)  # (T, 1, D / 2)

    def rotated(x):
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    return torch.stack([rotated(q), rotated(k), v], 2).reshape(B, T, C3)


def rotary_logits(config, parameters, ids, width=None):
    """The logits (B, T, V) of a GPT-2 with rotary positions. parameters: {name of parameter_shapes: tensor}."""
    F = torch.nn.functional

    def module(name):
        return parameters[f"transformer.{name}.weight"], parameters[f"transformer.{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], *module(name), config.layer_norm_epsilon)

    def linear(x, name):
        w, b = module(name)
        return x @ w + b

    x = parameters["transformer.wte.weight"][torch.tensor(ids)]
    for h in (f"h.{layer}" for layer in range(config.n_layer)):
        qkv = rotary(linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn"), config.n_head)
        x = x + linear(attention(qkv, config.n_head, width), f"{h}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ parameters[config.head].T

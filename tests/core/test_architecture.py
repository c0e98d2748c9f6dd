"""The plan that the decoders follow describes the model, and it is read without tensors and operations."""

import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose

from gpt2core import architecture
from gpt2core.architecture import GPT2Config, forward_plan, parameter_shapes
from gpt2core.errors import ConfigError
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.sampler import generate
from stage0_serial.numpy_backend import NumpyBackend

pytestmark = pytest.mark.fast

OPERATIONS = "attention", "gelu"


def random_model(rng, tied=True):
    """A model of random parameters in float64; the biases and the weights of the norms too."""
    config = GPT2Config(vocab_size=17, block_size=9, n_layer=3, n_head=2, n_embd=8, tied=tied)
    return load_model(config, {n: rng.standard_normal(s) for n, s in parameter_shapes(config)}, NumpyBackend("fp64"))


def attention(qkv, n_head):
    """Causal attention of one sequence, qkv (T, 3C) -> (T, C)."""
    T, C = len(qkv), qkv.shape[1] // 3
    q, k, v = qkv.reshape(T, 3, n_head, -1).transpose(1, 2, 0, 3)  # each (H, T, D)
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(C // n_head), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(T, C)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_computes_the_logits_of_the_model(rng, tied):
    """The formula of Plan's docstring, written with NumPy: another parameter or another order gives other logits."""
    model, ids = random_model(rng, tied), rng.integers(0, 17, 7)
    config = model.config
    plan = forward_plan(config, model.without_autograd().arrays, OPERATIONS, "the test")
    operations = {"attention": lambda qkv: attention(qkv, config.n_head), "gelu": gelu}

    def norm(x, w, b):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.layer_norm_epsilon) * w + b

    x = plan.wte[ids] + plan.wpe[: len(ids)]
    for layer in plan.layers:
        for each in layer:
            (w, b), (w_out, b_out) = each.linear_in, each.linear_out
            x = x + operations[each.operation](norm(x, *each.norm) @ w + b) @ w_out + b_out
    want = norm(x, *plan.norm) @ plan.head.T
    assert_allclose(model.logits(ids[None]).numpy()[0], want, rtol=1e-10, atol=1e-10)  # float64; |logits| is about 10


def test_the_plan_reads_each_parameter_once(rng):
    model = random_model(rng, tied=False)
    plan = forward_plan(model.config, model.without_autograd().arrays, OPERATIONS, "the test")
    sublayers = [each for layer in plan.layers for each in layer]
    modules = [array for each in sublayers for pair in (each.norm, each.linear_in, each.linear_out) for array in pair]
    arrays = [plan.wte, plan.wpe, *modules, *plan.norm, plan.head]
    assert [id(array) for array in arrays] == [id(tensor.data) for tensor in model.parameters.values()]


def test_a_decoder_refuses_an_operation_that_it_does_not_implement(rng, monkeypatch):
    model, (first, second) = random_model(rng), architecture.SUBLAYERS
    monkeypatch.setattr(architecture, "SUBLAYERS", (first._replace(operation="rotary attention"), second))
    message = "NumPy's decoder does not implement the operation 'rotary attention' of the layers .*attention, gelu"
    with pytest.raises(ConfigError, match=message):
        next(generate(model, [1], 1))


@pytest.mark.parametrize("module", ["architecture", "sampler"])
def test_sizes_plan_and_sampler_import_neither_tensors_nor_operations(module):
    """Nor does a file that they import."""
    code = f"import sys, gpt2core.{module}; print([n for n in ('gpt2core.tensor', 'gpt2core.ops') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""Checks of case 1: attention of any length against its formula, and training on long sequences."""

import numpy as np

from exercises.checks.attention import heads_of, joined, probabilities
from exercises.checks.common import CURVE, random, real, trained
from exercises.compare import Mismatch, expect
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.errors import counted

FP64 = 1e-11  # relative norm: a few roundings of 1e-16 in each of some hundred terms
LONG = GPT2Config(vocab_size=36, block_size=128, n_layer=2, n_head=2, n_embd=16, tied=False)
CASES = [(T, H) for T in (1, 63, 64, 65, 127, 128, 200) for H in (1, 3)]  # lengths and numbers of heads


def sizes(T, H):
    return f"{counted(T, 'position')}, {counted(H, 'head')}"


def backend():
    from stage0_serial.numpy_backend import NumpyBackend

    return NumpyBackend("fp64")


def training_of_128_tokens():
    from stage0_serial.numpy_backend import NumpyBackend

    want, _ = trained(Solo(), [real("stage0_serial/numpy_backend.py").NumpyBackend()], config=LONG)
    got, _ = trained(Solo(), [NumpyBackend()], config=LONG)
    expect("the loss of step 0 to 2", got[:, 0], want[:, 0], CURVE)
    expect("the gradient norm of step 0 to 2", got[:, 1], want[:, 1], 10 * CURVE)


def no_position_depends_on_a_later_one():
    own = backend()
    for T, H in CASES:
        qkv = random(T).standard_normal((2, T, 3 * 4 * H))
        before = np.array(own.attention_forward(qkv, H)[0])
        for position in range(1, T, max(1, T // 9)):
            changed = qkv.copy()
            changed[:, position:] += 1
            after = own.attention_forward(changed, H)[0]
            name = f"{sizes(T, H)}: y before position {position}, after a change of it and the later ones"
            expect(name, after[:, :position], before[:, :position], FP64)
            if np.array_equal(after[:, position:], before[:, position:]):
                raise Mismatch(f"{counted(T, 'position')}: y does not depend on the positions from {position} on")


def length_does_not_change_the_formula():
    own = backend()
    for T, H in CASES:
        rng = random(T + H)
        qkv, dy = rng.standard_normal((2, T, 3 * 4 * H)), rng.standard_normal((2, T, 4 * H))
        y, aux = own.attention_forward(qkv, H)
        (q, k, v), (g,) = heads_of(qkv, 3, H), heads_of(dy, 1, H)
        p, scale = probabilities(q, k, 0.5), 0.5  # 1 / sqrt(D)
        dp = g @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        gradients = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g
        expect(f"{sizes(T, H)}: y", y, joined(p @ v), FP64)
        dqkv = own.attention_backward(dy, qkv, y, aux, H)
        expect(f"{sizes(T, H)}: dqkv", dqkv, np.concatenate([joined(each) for each in gradients], 2), FP64)

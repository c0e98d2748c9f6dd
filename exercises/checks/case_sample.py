"""Checks of case 6: each token of a generated text against the forward pass of the last tokens."""

from unittest import mock

import numpy as np

from exercises.checks.common import random
from exercises.compare import expect_equal
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.errors import counted
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.sampler import generate_batch
from stage0_serial.numpy_backend import NumpyBackend


def model_of(seed=5, **sizes):
    """A model whose logits differ much between tokens, so that rounding does not change the largest one."""
    config = GPT2Config(**(dict(vocab_size=36, block_size=12, n_layer=2, n_head=2, n_embd=16, tied=False) | sizes))
    rng = random(seed)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(config)}
    return load_model(config, arrays, NumpyBackend())


def text_of(model, prompts, count):
    """[the tokens after each prompt], with the decoder of the student."""
    return np.transpose(list(generate_batch(model, prompts, count, [greedy] * len(prompts)))).tolist()


def greedy(logits):
    return int(np.argmax(logits))


def expected(model, prompt, count):
    """The tokens after a prompt, each from the forward pass of the last block_size tokens."""
    tokens = list(prompt)
    for _ in range(count):
        window = np.array([tokens[-model.config.block_size :]])
        tokens.append(int(model.logits(window).numpy()[0, -1].argmax()))
    return tokens[len(prompt) :]


def expect_text(model, prompts, count):
    for prompt, got in zip(prompts, text_of(model, prompts, count), strict=True):
        block = model.config.block_size
        name = f"a prompt of {counted(len(prompt), 'token')}, a window of {block}: the {count} tokens after it"
        expect_equal(name, got, expected(model, prompt, count))


def text_is_that_of_the_whole_window():
    expect_text(model_of(), [[3, 1, 4]], 30)


def lengths_do_not_change_the_text():
    for sizes in ({}, dict(block_size=2), dict(block_size=7, n_layer=1), dict(block_size=20, n_head=4, tied=True)):
        model = model_of(**sizes)
        block = model.config.block_size
        for length in {1, block - 1, block, block + 3}:
            expect_text(model, [random(length).integers(0, 36, max(1, length)).tolist()[-block:]], 2 * block + 3)
    expect_text(model_of(), [[1, 2, 3, 4, 5, 6, 7], [8], [9] * 12], 20)


def a_token_is_still_one_position():
    from stage0_serial.generation.token_step import TokenStep

    model, lengths = model_of(), []
    step = TokenStep.__call__

    def recorded(self, ids, cache):
        lengths.append(len(ids))
        return step(self, ids, cache)

    with mock.patch.object(TokenStep, "__call__", recorded):
        text_of(model, [[3, 1, 4]], 8)
    expect_equal("the positions that each step computes after a prompt of 3 tokens", lengths, [3, *[1] * 7])

"""Small models trained on a group of ranks: `make_trainer`, `train`, and `assert_same` for two results of `train`."""

import numpy as np
from numpy.testing import assert_array_equal

from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.whole_parameters import named_moments, named_parameters, verify
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(vocab_size=36, block_size=16, n_layer=2, n_head=4, n_embd=16, tied=False)
TIED = GPT2Config(vocab_size=36, block_size=16, n_layer=1, n_head=4, n_embd=16, tied=True)
BUCKET_MB = 0.02  # small enough for several buckets in these models
OPTIMIZER = dict(weight_decay=0.1, beta2=0.95)


def make_trainer(
    comm, parallel, config=CONFIG, threads=1, precision="fp32", batch_size=16, micro_batches=8, backend=NumpyBackend,
    clip=0.5, dropout=0.0,
):  # fmt: skip
    """A Trainer of `config` on this rank of `comm`, with `threads` workers, each with a `backend` of its own."""
    return Trainer(
        config, [backend(precision) for _ in range(threads)], batch_size=batch_size, seq_len=16,
        micro_batches=micro_batches, world=comm, parallel=parallel, seed=3, optimizer=OPTIMIZER | dict(clip=clip),
        dropout=dropout,
    )  # fmt: skip


def train(comm, parallel, tokens, steps=4, **options):
    """-> ((loss, gradient norm) of each step, parameters, moments, trainer) of `steps` steps on this rank of `comm`."""
    trainer, windows = make_trainer(comm, parallel, **options), Windows(tokens, 16)
    reports = [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(steps)]
    verify(trainer)
    moments = {name: [np.array(m) for m in pair] for name, pair in named_moments(trainer).items()}
    parameters = {name: np.array(p) for name, p in named_parameters(trainer).items()}
    return [(step.loss, step.grad_norm) for step in reports], parameters, moments, trainer


def assert_same(got, want):
    """Assert that two results of `train` have equal losses, norms, parameters and moments, bit for bit."""
    assert got[0] == want[0]
    for name in want[1]:
        assert_array_equal(got[1][name], want[1][name], strict=True)
        for mine, theirs in zip(got[2][name], want[2][name], strict=True):
            assert_array_equal(mine, theirs, strict=True)

"""The one place where the benchmarks touch our own GPT-2."""

import time
from dataclasses import dataclass

import numpy as np

from gpt2core.model import GPT2, initial_parameters
from gpt2core.sampler import generate as continuation
from gpt2core.trainer import Trainer, plan
from stage0_serial.numpy_backend import NumpyBackend

LR = 3e-4


@dataclass
class Batch:
    """One global batch in the place of a data set."""

    inputs: np.ndarray
    targets: np.ndarray

    def batch(self, position, count):
        return self.inputs, self.targets


def make_trainer(config, batch_size, seq_len, threads, deterministic):
    """Return `step(inputs, targets) -> loss`: a full training step with AdamW; int64 arrays (batch_size, seq_len)."""
    micro_shards, threads = plan(batch_size, None, threads, 1, deterministic)
    backends = [NumpyBackend() for _ in range(threads)]
    trainer = Trainer(config, backends, batch_size=batch_size, seq_len=seq_len, micro_shards=micro_shards)
    return lambda inputs, targets: trainer.step(Batch(inputs, targets), LR).loss


def make_generator(config, threads):
    """Return `generate(prompt_ids, n, use_cache) -> (ids, seconds_to_first, seconds_total)`: n greedy new tokens.

    Without the cache every token is a call of its own.
    """
    backend = NumpyBackend()
    backend.use_threads(threads)
    model = GPT2.of_arrays(config, dict(initial_parameters(config, 0)), backend)

    def generate(prompt_ids, n, use_cache):
        started, ids = time.perf_counter(), []
        if use_cache:
            tokens = continuation(model, prompt_ids, n)
        else:
            tokens = (next(continuation(model, [*prompt_ids, *ids], 1)) for _ in range(n))
        for token in tokens:
            ids.append(token)
            if len(ids) == 1:
                first = time.perf_counter() - started
        return ids, first, time.perf_counter() - started

    return generate

"""The part of layouts.py that runs on the ranks: train each layout, and return a digest of its curve."""

import functools
import hashlib
from dataclasses import replace

import numpy as np

from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.model import initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.whole_parameters import fill, parameter_hash
from gpt2core.training_loop import read_batch

MICRO_BATCHES = 8


def train_all(host, stage, cases, sizes):
    """[the digest of the curve of each case, and whether all ranks of this job have it]; host: an MpiCommunicator."""
    found, world = [], host
    if stage == 3:
        from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

        world = NcclCommunicator(host)
        world.use_transport("nccl")
    world.use_collectives("canonical")
    for precision, tied, clip, threads, options in cases:
        backends = backends_of(stage, precision, threads)
        digest = train(world, backends, tied, clip, ParallelConfig(**options), *sizes)
        found.append((digest, host.all_gather_object(digest).count(digest) == host.size))
    return found


def backends_of(stage, precision, threads):
    if stage == 1:
        from stage0_serial.numpy_backend import NumpyBackend

        return [NumpyBackend(precision) for _ in range(threads)]
    from stage2_cuda.cuda_backend import CudaBackend

    return [CudaBackend(precision, deterministic=True)]


def train(world, backends, tied, clip, parallel, config, batch_size, seq_len, steps):
    """The digest of losses, norms and the hash of the parameters after `steps` steps."""
    config = replace(config, tied=tied)
    trainer = FastTrainer(
        config, backends, batch_size=batch_size, seq_len=seq_len, micro_batches=MICRO_BATCHES, world=world,
        optimizer=dict(clip=clip, weight_decay=0.1), parallel=parallel, seed=None,
    )  # fmt: skip
    fill(trainer, trainer.parameters, iter(initial(config)) if world.is_root else None)
    trainer.optimizer.refresh_copy(0)
    windows = Windows(np.random.default_rng(0).integers(0, config.vocab_size, 20_000), seq_len)
    reports = [trainer.step(read_batch(trainer, windows), 1e-3 / (1 + i)) for i in range(steps)]
    curve = [(step.loss.hex(), step.grad_norm.hex()) for step in reports]
    return hashlib.sha256(repr((curve, parameter_hash(trainer))).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def initial(config):
    """The initial parameters; those of the last model are kept for the next layout."""
    return list(initial_parameters(config, 0))

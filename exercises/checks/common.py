"""Helpers of the checks: random arrays, the repository's own version of a file, and short training runs."""

import functools
import importlib.util

import numpy as np

from exercises.catalog import ROOT
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Handle, Solo
from gpt2core.data import Windows
from gpt2core.errors import counted
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks

# Every size differs from the others, so that exchanged axes give an error or a wrong result.
CONFIG = GPT2Config(vocab_size=36, block_size=16, n_layer=2, n_head=4, n_embd=32, tied=False)
STEPS = 3
BUCKET_MB = 0.02  # small enough for several buckets
CURVE = 1e-5  # relative difference of a loss after 3 steps: float32 rounds to 6e-8, and the steps amplify it
RANK_SECONDS = 5  # a rank that waits longer is taken to wait forever


def random(seed=0):
    return np.random.default_rng(seed)


@functools.cache
def real(file):
    """The module of the repository's own file, also where the file of that name is the student's."""
    spec = importlib.util.spec_from_file_location(f"real_{file.replace('/', '_')[:-3]}", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arrays(gradients):
    """The gradients that a backward kernel returned as arrays: functions are called without a destination."""
    return [gradient(None) if callable(gradient) else gradient for gradient in gradients]


def expect_unchanged(function, name, got, want):
    """Raise Mismatch if `function` has overwritten the array `name`."""
    if not np.array_equal(got, want, equal_nan=True):
        raise Mismatch(
            f"{function} overwrites {name}",
            "Do not write to this array with `out=`, `-=`, `*=` or `[...] =`: other operations use it too.",
        )


class WatchedSends:
    """A communicator that keeps the sends that were started and not waited for; its other methods are those of `comm`.

    MPI reads the array of a send until wait(), so it must not change before. A copy would hide such a mistake.
    """

    def __init__(self, comm):
        self.comm, self.pending = comm, []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def send_start(self, x, to, tag=0):
        send = WatchedSend(self, self.comm.send_start(x, to, tag), x)
        self.pending.append(send)
        return send

    def expect_none_pending(self):
        """Raise Mismatch if a send was not waited for, or if its array was changed before."""
        for send in self.pending:
            send.expect_not_overwritten()
        if self.pending:
            raise Mismatch(
                f"rank {self.rank} returns before {len(self.pending)} of its sends are complete",
                "Wait for every send before you return: none of its handles may be lost.",
            )


class WatchedSend(Handle):
    """The handle of a send of WatchedSends."""

    def __init__(self, watched, handle, x):
        self.watched, self.handle, self.x, self.sent = watched, handle, x, np.array(x)

    def wait(self):
        if self in self.watched.pending:
            self.expect_not_overwritten()
            self.watched.pending.remove(self)
        return self.handle.wait()

    def expect_not_overwritten(self):
        if not np.array_equal(self.x, self.sent, equal_nan=True):
            raise Mismatch(
                f"rank {self.watched.rank} overwrites an array before its send is complete",
                "Before you write to an array again, wait for the handle of its send.",
            )


def on_ranks(p, function):
    """[function(comm) of each rank]; a rank that waits longer than RANK_SECONDS is an error."""
    return run_ranks(p, function, timeout=RANK_SECONDS)


def losses(world, backend, parallel=None):
    """The losses and norms of STEPS training steps of CONFIG on this rank of `world`: an array (STEPS, 2)."""
    return trained(world, [backend], parallel)[0]


def trained(world, backends, parallel=None, config=CONFIG, micro_batches=4, seed=3):
    """(losses and norms (STEPS, 2), hash of the parameters) of a training run on this rank of `world`.

    backends: one for each thread. Sequences have the block size of `config`.
    """
    from gpt2core.engine.fast_trainer import FastTrainer as Trainer
    from gpt2core.parallel.whole_parameters import parameter_hash
    from gpt2core.training_loop import read_batch

    options = dict(clip=0.5, weight_decay=0.1, beta2=0.95)
    T = config.block_size
    trainer = Trainer(
        config, backends, batch_size=8, seq_len=T, micro_batches=micro_batches, world=world,
        parallel=parallel or ParallelConfig(), seed=seed, optimizer=options,
    )  # fmt: skip
    windows = Windows(random(1).integers(0, config.vocab_size, 10 * T + 140).astype(np.uint16), T)
    steps = [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(STEPS)]
    return np.array([(step.loss, step.grad_norm) for step in steps], np.float64), parameter_hash(trainer)


def expect_same_bits(ranks, parallel=None, threads=1, **options):
    """Compare a run of the student's code on threads as ranks with one of the repository's NumpyBackend on one rank.

    threads: of each rank. options: of trained().
    """
    from stage0_serial.numpy_backend import NumpyBackend

    want, digest = trained(Solo(), [real("stage0_serial/numpy_backend.py").NumpyBackend()], **options)
    runs = on_ranks(ranks, lambda world: trained(world, [NumpyBackend() for _ in range(threads)], parallel, **options))
    for rank, (got, own) in enumerate(runs):
        where = f"with {counted(ranks, 'rank')}" + f" and {threads} threads" * (threads > 1)
        expect(f"{where}, the loss of step 0 to 2 on rank {rank}", got[:, 0], want[:, 0], 0)
        expect(f"{where}, the gradient norm of step 0 to 2 on rank {rank}", got[:, 1], want[:, 1], 0)
        expect_equal(f"{where}, the hash of the parameters on rank {rank}", own, digest)


def expect_curve(backend_class, look):
    """Compare a training run with the student's backend and one with the repository's NumpyBackend."""
    want = losses(Solo(), real("stage0_serial/numpy_backend.py").NumpyBackend())
    got = losses(Solo(), backend_class())
    expect("the loss of step 0 to 2", got[:, 0], want[:, 0], CURVE, look=look)
    expect("the gradient norm of step 0 to 2", got[:, 1], want[:, 1], 10 * CURVE, look=look)


def expect_same_training(parallel, look, ranks=2):
    """Compare a training run on threads as ranks with one on one rank, bit for bit."""
    from stage0_serial.numpy_backend import NumpyBackend

    want = losses(Solo(), NumpyBackend())
    runs = on_ranks(ranks, lambda world: losses(world, NumpyBackend(), parallel))
    for rank, got in enumerate(runs):
        expect(f"on rank {rank}, the loss of step 0 to 2", got[:, 0], want[:, 0], 0, look=look)
        expect(f"on rank {rank}, the gradient norm of step 0 to 2", got[:, 1], want[:, 1], 0, look=look)

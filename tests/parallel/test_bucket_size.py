"""The bucket size is computed from two timed all-reduces: with a simulated clock, the best size is found."""

from dataclasses import dataclass

import numpy as np
import pytest

from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.parallel.config import BUCKET_MB, ParallelConfig
from gpt2core.parallel.data.bucket_size import WARM_UP, BucketSize, best_bucket, measured_bucket, time_all_reduce
from gpt2core.parallel.parallel_trainer import ParallelTrainer as Trainer
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.collective_choice import chosen

CONFIG = GPT2Config(vocab_size=36, block_size=16, n_layer=2, n_head=4, n_embd=16, tied=False)


@dataclass
class Wire:
    """A group with a simulated clock: an all-reduce takes alpha + beta * bytes, four times that until it is warm."""

    alpha: float
    beta: float
    now: float = 0.0
    calls: int = 0

    def all_reduce(self, x, out):
        assert out is x and not x.any()
        self.calls += 1
        self.now += (self.alpha + self.beta * x.nbytes) * (4 if self.calls <= 4 else 1)

    def measure(self, size):
        gradients = np.zeros(size // 4, np.float32)
        found = measured_bucket(self, gradients, NumpyBackend(), capture=False, clock=lambda: self.now)
        assert not gradients.any()
        return found


@pytest.mark.parametrize("alpha, beta", [(1.5e-5, 4.5e-12), (2e-4, 1e-9), (3e-6, 2e-11)])
def test_alpha_beta_and_the_size_that_exposes_least_are_found(alpha, beta):
    size = 2 * 10**8
    found = Wire(alpha, beta).measure(size)
    assert (found.alpha, found.beta) == (pytest.approx(alpha, rel=1e-6), pytest.approx(beta, rel=1e-6))

    def exposed(bucket):
        return beta * bucket + size / bucket * alpha

    best = best_bucket(alpha, beta, size)
    assert exposed(best) < min(exposed(0.9 * best), exposed(1.1 * best))
    assert found.mb == max(1, round(best / 1e6))


@pytest.mark.parametrize(
    "alpha, beta, size, mb",
    [
        (0.0, 1e-9, 10**7, 1),  # messages cost nothing: the smallest size
        (1e-3, 0.0, 2 * 10**7, 20),  # bytes cost nothing: one bucket
        (1.0, 1e-12, 10**7, 10),  # at most the whole gradient
        (1e-5, 1e-9, 10**4, 1),  # a model smaller than one bucket
    ],
)
def test_the_size_stays_between_a_megabyte_and_the_gradient(alpha, beta, size, mb):
    assert Wire(alpha, beta).measure(size).mb == mb


def test_a_clock_that_goes_backwards_still_gives_a_size():
    """If the times are only noise, alpha or beta may be negative."""
    assert Wire(-1e-5, 1e-9).measure(10**7).mb == 1 and Wire(1e-5, -1e-9).measure(10**7).mb == 10


def test_the_rounds_of_the_warm_up_do_not_count():
    wire, now = Wire(0.0, 0.0), iter([0, 9, 9, 18, *(t for n in range(5) for t in (20 + 10 * n, 21 + 11 * n))])
    seconds = time_all_reduce(wire, np.zeros(8), NumpyBackend(), False, 1, lambda: next(now))
    assert WARM_UP == 2 and seconds == 3  # the median of 1, 2, 3, 4 and 5, without the two rounds of 9 seconds


def test_the_header_names_the_measured_values():
    words = "`bucket_mb=40`: 14.7 us per message and 4.56 ps per byte were measured"
    assert str(BucketSize(1.4655e-5, 4.5615e-12, 40)) == words


def test_the_root_s_measurement_is_everyone_s_and_changes_no_bits():
    """Each thread measures another time: the buckets are still equal on all ranks, and so are the sums."""
    tokens = np.random.default_rng(0).integers(0, 36, 500)

    def train(comm, **parallel):
        trainer = Trainer(
            CONFIG, [NumpyBackend()], batch_size=8, seq_len=16, micro_batches=4, world=comm,
            parallel=ParallelConfig(dp="bucket", **parallel),
        )  # fmt: skip
        steps = [trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3) for _ in range(2)]
        return [step.loss for step in steps], parameter_hash(trainer), trainer.bucket_size

    want = train(Solo())
    (*first, measured), (*second, other) = run_ranks(2, lambda comm: train(comm, bucket_mb=None))
    assert first == second == [*want[:2]] and measured == other and measured.mb >= 1 and want[2] is None


@pytest.mark.parametrize(
    "size, transport, asked, bucket_mb",
    [
        (4, "nccl", {}, None),  # to be measured
        (4, "nccl", dict(bucket_mb=7.0), 7.0),
        (4, "nccl", dict(deterministic=True), BUCKET_MB),
        (4, "nccl", dict(dp="flat"), BUCKET_MB),
        (4, "mpi", {}, BUCKET_MB),
        (1, "nccl", {}, BUCKET_MB),
        (4, "nccl", dict(tp=4), BUCKET_MB),
        (4, "nccl", dict(tp=2), None),
    ],
)
def test_a_bucket_is_measured_only_between_gpus_and_where_it_is_used(size, transport, asked, bucket_mb):
    assert chosen(size, asked, transport)[0].bucket_mb == bucket_mb

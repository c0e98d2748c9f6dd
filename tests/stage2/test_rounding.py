"""Stochastic rounding to bf16: equal bits to NumPy, unbiased, and independent of how the arena is divided."""

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core.app import cli  # noqa: E402
from gpt2core.architecture import GPT2Config  # noqa: E402
from gpt2core.communicator import Solo  # noqa: E402
from gpt2core.data import Windows  # noqa: E402
from gpt2core.engine.fast_trainer import FastTrainer as Trainer  # noqa: E402
from gpt2core.kernel_arguments import ParameterCopy  # noqa: E402
from gpt2core.optimizer import AdamW
from gpt2core.parallel.config import ParallelConfig  # noqa: E402
from gpt2core.parallel.divided.optimizer import DividedOptimizer  # noqa: E402
from gpt2core.parallel.divided.rounding import rounding_key  # noqa: E402
from gpt2core.parallel.tensor.shards import is_replicated  # noqa: E402
from gpt2core.parallel.thread_communicator import run_ranks  # noqa: E402
from gpt2core.parallel.whole_parameters import load, named_moments, named_parameters, verify
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend  # noqa: E402
from stage2_cuda.cuda_backend import CudaBackend  # noqa: E402
from stage2_cuda.kernels import adamw, rounding  # noqa: E402
from stage2_cuda.runtime.triton_launch import array_module, interpreted  # noqa: E402
from tests.support.rounding import Rounding, oracle_of_key, philox, value

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]
CONFIG = GPT2Config(38, 16, 2, 2, 16, tied=False)
SIGMAS = 6  # a sum of independent draws exceeds this many standard deviations once in 5 * 10^8 times


def device(array):
    return array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def rounded(x, seed=1, step=1, offset=0):
    """The bits (n) uint16 of x (n) float32 as bf16, rounded stochastically by the kernel."""
    out = device(np.full(x.size, 0x7FC0, np.uint16))  # NaN
    rounding.round_to_bf16(out, device(x), device(rounding_key(seed, step)), offset)
    return host(out)


def oracle(x, seed, step, offset=0):
    """rounded() computed by NumPy."""
    return oracle_of_key(x, rounding_key(seed, step), offset)


def test_philox_gives_the_published_numbers():
    ones = 0xFFFFFFFF  # "known answer tests" of Random123
    assert_array_equal(philox(0, np.zeros((1, 4)))[0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    want = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert_array_equal(philox(ones << 32 | ones, np.full((1, 4), ones))[0], want)


@pytest.mark.parametrize("offset", [0, 1024, (1 << 34) + 4096])
@pytest.mark.parametrize("n", [1, 1000, 4097])
@pytest.mark.parametrize("numbers", ["normal", "any bits"])
def test_the_kernel_gives_numpys_bits(rng, n, offset, numbers):
    seed, step = (int(number) for number in rng.integers(0, 1 << 40, 2))
    x = rng.standard_normal(n).astype(np.float32)
    if numbers == "any bits":  # with NaN, infinities and subnormal numbers
        x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    assert_array_equal(rounded(x, seed, step, offset), oracle(x, seed, step, offset))


def test_the_result_is_one_of_the_two_neighbours_and_bf16_numbers_are_unchanged(rng):
    bits = rng.integers(0, 1 << 32, 8192, np.uint32)
    bits[::4] &= 0xFFFF0000  # exactly representable
    bits[1::8] &= 0x807FFFFF  # subnormal, zero
    x = bits.view(np.float32)
    bits, x = bits[np.isfinite(x)], x[np.isfinite(x)]
    below, got = bits >> 16, rounded(x)
    exact = bits & 0xFFFF == 0
    assert_array_equal(got[exact], below[exact])
    assert set(np.unique(got - below)) == {0, 1}  # the same number or the next one away from zero
    assert_array_equal(np.signbit(value(got)), np.signbit(x))


def test_infinity_and_nan_are_unchanged_and_the_largest_numbers_are_rounded_to_nearest(rng):
    top = np.arange(0x7F7F0000, 0x7F800000, 257, dtype=np.uint32)  # from the largest bf16 to the largest float32
    for sign in (0, 1 << 31):
        got = value(rounded((top | np.uint32(sign)).view(np.float32)))
        assert_array_equal(np.isinf(got), top & 0xFFFF >= 0x8000)
        assert not np.isnan(got).any()
        infinity = np.array([0x7F800000 | sign], np.uint32).view(np.float32)
        assert_array_equal(value(rounded(np.repeat(infinity, 100))), infinity[0])
        payloads = rng.integers(1, 1 << 23, 1000, np.uint32)
        payloads[:3] = 1, 0xFFFF, 0x7FFFFF  # only in the low bits, and in all bits
        assert np.isnan(value(rounded((payloads | np.uint32(0x7F800000 | sign)).view(np.float32)))).all()


@pytest.mark.parametrize("low", [1 << 8, 1 << 12, 0x5555, 1 << 15, 0xFF00])
def test_the_mean_of_many_roundings_is_the_number(rng, low):
    """Of n roundings of x, a share p = low / 2^16 goes up; sigma is the binomial distribution's sqrt(n p (1 - p))."""
    n, p = 30_000, low / (1 << 16)
    x = np.full(n, 0x3F800000 | low, np.uint32).view(np.float32)  # above 1
    up = (rounded(x, int(rng.integers(1 << 32))) == 0x3F81).sum()
    assert abs(up - n * p) <= SIGMAS * np.sqrt(n * p * (1 - p))


def test_the_mean_of_many_numbers_is_kept_and_two_steps_are_independent(rng):
    """The variances of different numbers add up; two steps agree where both or neither rounded up."""
    x = np.abs(rng.standard_normal(30_000)).astype(np.float32)
    bits, seed = x.view(np.uint32), int(rng.integers(1 << 32))
    p = (bits & 0xFFFF) / 65536
    ups = [rounded(x, seed, step) - (bits >> 16) for step in (1, 2)]
    for up in ups:
        assert abs(up.sum() - p.sum()) <= SIGMAS * np.sqrt((p * (1 - p)).sum())
    agree = p * p + (1 - p) * (1 - p)
    assert abs((ups[0] == ups[1]).sum() - agree.sum()) <= SIGMAS * np.sqrt((agree * (1 - agree)).sum())
    assert (rounded(x, seed + 1, 1) != rounded(x, seed, 1)).any()


def test_adamw_rounds_its_copy_stochastically_and_changes_nothing_else(rng):
    n, philox_key = 3 * adamw.BLOCK + 5, device(rounding_key(7, 3))
    coefficients = device(AdamW(0.9, 0.999, 1e-8, 0.1).coefficients(3, 1e-3))
    g, start = rng.standard_normal(n).astype(np.float32), [rng.random(n).astype(np.float32) for _ in "pmv"]

    def step(part, *random):  # random: the key and the offset of `part` in the arena, or nothing
        arrays = [device(array[part].copy()) for array in start]
        copy = device(np.full(arrays[0].size, 0x7FC0, np.uint16)) if random else None
        adamw.adamw_step(*arrays, copy, device(g[part]), coefficients, None, None, 0.9, 0.999, *random)
        return [host(array) for array in (*arrays, copy) if array is not None]

    plain, whole = step(slice(0, n)), step(slice(0, n), philox_key, 4096)
    for got, want in zip(whole, plain, strict=False):
        assert_array_equal(got, want)
    assert_array_equal(whole[3], oracle(plain[0], 7, 3, 4096))
    edges = [0, adamw.BLOCK, 3 * adamw.BLOCK, n]  # as ranks divide the arena
    parts = [step(slice(*edge), philox_key, 4096 + edge[0]) for edge in zip(edges, edges[1:], strict=False)]
    assert_array_equal(np.concatenate([part[3] for part in parts]), whole[3])


def test_the_backend_rounds_the_copy_of_a_step_with_its_key_and_repeats_it(rng):
    backend, n = CudaBackend(), 2 * adamw.BLOCK
    p, m, v, g = (device(rng.random(n).astype(np.float32)) for _ in "pmvg")
    copy, again = (device(np.full(n, 0x7FC0, np.uint16)) for _ in range(2))
    key, decays = rounding_key(3, 5), device(np.ones(2, np.int8))
    coefficients = AdamW(0.9, 0.999, 1e-8, 0.1).coefficients(5, 1e-3)
    backend.adamw_step(p, m, v, g, coefficients, None, decays, (0.9, 0.999), ParameterCopy(copy, key, offset=0))
    assert_array_equal(host(copy), oracle(host(p), 3, 5))
    backend.cast(p, again, key)
    assert_array_equal(host(again), host(copy))


# -- in training ------------------------------------------------------------------------------------------------------


def trained(world, steps, before=None, threads=1, **parallel):
    """Losses, the bytes of parameters and copy, the state to resume from (`before`), the copy of replicated tensors."""
    backends, sizes = [Rounding() for _ in range(threads)], dict(batch_size=4, seq_len=16, micro_batches=4)
    options = dict(rounding="stochastic", seed=11, clip=0.5)
    trainer = Trainer(CONFIG, backends, **sizes, world=world, parallel=ParallelConfig(**parallel), optimizer=options)
    if before is not None:
        root = trainer.world.is_root
        load(trainer, *(before[:2] if root else (None, True)), steps=before[2], position=before[3])
    windows = Windows(np.random.default_rng(0).integers(0, 37, 500), 16)
    losses = [trainer.step(read_batch(trainer, windows), 1e-2).loss for _ in range(steps)]
    verify(trainer)
    state = {name: array.copy() for name, array in named_parameters(trainer).items()}, named_moments(trainer)
    replicas = {
        name: x.copy() for name, x in trainer.arena.views(trainer.compute_parameters).items() if is_replicated(name)
    }
    bits = trainer.parameters.tobytes(), trainer.compute_parameters.tobytes()
    return losses, *bits, (*state, trainer.steps, trainer.position), replicas


def test_any_number_of_ranks_and_threads_rounds_to_the_same_bits_also_after_a_resume():
    losses, *bits, _, _ = trained(Solo(), 3)
    for ranks, parallel in ((1, dict(threads=2)), (2, {}), (4, dict(zero=1)), (2, dict(zero=1, dp="bucket"))):
        for got in run_ranks(ranks, lambda world, parallel=parallel: trained(world, 3, **parallel)):
            assert got[0] == losses and list(got[1:3]) == bits
    first, *_, state, _ = trained(Solo(), 2)
    rest, *again, _, _ = trained(Solo(), 1, before=state)
    assert first + rest == losses and again == bits


def test_tensor_parallel_ranks_have_equal_copies_of_replicated_parameters():
    first, second = (rank[-1] for rank in run_ranks(2, lambda world: trained(world, 2, tp=2)))
    for name, array in first.items():
        assert_array_equal(second[name], array)


@pytest.mark.parametrize("backend", [NumpyBackend, CudaBackend])
def test_rounding_without_a_bf16_copy_is_a_one_line_error(command, corpus, backend):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 1, "--rounding", "stochastic")
    result = command(cli.train, *flags, backend=backend)
    assert result.code == 2 and result.err == (
        "error: --rounding stochastic applies to the bf16 copy of the parameters, and --precision fp32 has no such "
        "copy in this stage: use --precision bf16 in stage 2 or 3, or --rounding nearest\n"
    )
    if backend is CudaBackend:
        assert (
            "--precision fp16 has no such copy"
            in command(cli.train, *flags, "--precision", "fp16", backend=backend).err
        )


def test_a_resumed_run_uses_the_saved_rounding(command, corpus, tmp_path):
    flags = ("--preset", "nano", "--data", corpus, "--sample", 0, "--out", tmp_path / "run")
    assert command(cli.train, *flags, "--rounding", "stochastic", "--steps", 1, backend=Rounding).code == 0
    flags += ("--resume", tmp_path / "run", "--steps", 2)
    assert "--rounding nearest" in command(cli.train, *flags).err  # stage 0 has no copy to round
    done = command(cli.train, *flags, "--rounding", "nearest")
    assert (done.code, "note: --rounding was stochastic and is nearest from here on" in done.out) == (0, True)


@gpu
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_a_run_in_bf16_rounds_its_copy_as_numpy_would(capture):
    def run(steps, before=None):
        options = dict(rounding="stochastic", seed=3, weight_decay=0.1)
        sizes = dict(batch_size=4, seq_len=16, micro_batches=1, capture=capture)
        trainer = Trainer(CONFIG, [CudaBackend("bf16")], **sizes, optimizer=options)
        master, copy = host(trainer.parameters), host(trainer.compute_parameters.view(np.uint16))
        assert_array_equal(
            copy, master.astype(trainer.compute_parameters.dtype).view(np.uint16)
        )  # the initial copy is rounded to nearest
        if before:
            load(trainer, *before, steps=4, position=16)
        windows = Windows(np.random.default_rng(0).integers(0, 37, 500), 16)
        losses = [trainer.step(read_batch(trainer, windows), 1e-2).loss for _ in range(steps)]
        master, copy = host(trainer.parameters), host(trainer.compute_parameters.view(np.uint16))
        assert_array_equal(copy, oracle(master, 3, trainer.steps))
        return losses, master, (named_parameters(trainer), named_moments(trainer))

    losses, master, _ = run(6)
    again, same, _ = run(6)
    first, _, state = run(4)
    rest, resumed, _ = run(2, state)
    assert losses == again == first + rest
    assert_array_equal(same, master)
    assert_array_equal(resumed, master)


def test_the_copy_of_new_parameters_is_rounded_to_nearest_and_later_ones_with_the_key_of_their_step():
    keys = []
    backend = SimpleNamespace(cast=lambda parameters, copy, key, offset: keys.append(key), zeros=np.zeros)
    backend.asarray = np.asarray
    layout = SimpleNamespace(own=slice(0), runs=lambda share: [(share, 0)], decays=lambda: [])
    options = dict(compute_copy=np.zeros(0), rounding="stochastic", seed=7)
    optimizer = DividedOptimizer(layout, np.zeros(0), SimpleNamespace(backends=[backend]), AdamW(), **options)
    for steps in (0, 1, 5):
        optimizer.refresh_copy(steps)
    assert keys[0] is None and keys[1:] == [rounding_key(7, 1), rounding_key(7, 5)]

"""Stochastic rounding to bf16: as integers, against NumPy; without bias; and the same whoever rounds a part."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core.app import cli  # noqa: E402
from gpt2core.communicator import Solo  # noqa: E402
from gpt2core.data import Windows  # noqa: E402
from gpt2core.model import GPT2Config  # noqa: E402
from gpt2core.parallel.config import ParallelConfig  # noqa: E402
from gpt2core.parallel.tensor_parallel import is_replicated  # noqa: E402
from gpt2core.parallel.thread_communicator import run_ranks  # noqa: E402
from gpt2core.parallel.whole_parameters import load, named_moments, named_parameters, verify
from gpt2core.trainer import Trainer  # noqa: E402
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend  # noqa: E402
from stage2_cuda.cuda_backend import CudaBackend  # noqa: E402
from stage2_cuda.kernels import adamw, rounding  # noqa: E402
from stage2_cuda.runtime.triton_launch import array_module, interpreted  # noqa: E402

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]
CONFIG = GPT2Config(38, 16, 2, 2, 16, tied=False)
SIGMAS = 6  # what a sum of independent draws stays within, but for one time in 5 * 10^8


def device(array):
    return array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def rounded(x, seed=1, step=1, offset=0):
    """The bits of x (n) float32 as bf16, by the kernel."""
    out = device(np.full(x.size, 0x7FC0, np.uint16))  # NaN
    rounding.round_to_bf16(out, device(x), device(rounding.key_of(seed, step)), offset)
    return host(out)


def value(bits):
    """bf16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def philox(key, counters):
    """Philox 4x32-10 (Salmon et al. 2011): key, counters (n, 4) -> (n, 4), all of 32 bits in uint64."""
    low, high = key & 0xFFFFFFFF, key >> 32
    c = [column.astype(np.uint64) for column in counters.T]
    for number in range(10):
        k0, k1 = ((word + number * step) & 0xFFFFFFFF for word, step in ((low, 0x9E3779B9), (high, 0xBB67AE85)))
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> 32) ^ c[1] ^ np.uint64(k0), second, (first >> 32) ^ c[3] ^ np.uint64(k1), first]
        c = [word & np.uint64(0xFFFFFFFF) for word in c]
    return np.stack(c, 1)


def oracle(x, seed, step, offset=0):
    """rounded() in NumPy."""
    number = np.arange(offset // 4, (offset + x.size + 3) // 4, dtype=np.uint64)
    counters = np.stack([number & np.uint64(0xFFFFFFFF), number >> np.uint64(32), 0 * number, 0 * number], 1)
    r = philox(int(rounding.key_of(seed, step).view(np.uint64)[0]), counters).ravel()[: x.size] >> np.uint64(16)
    bits = x.view(np.uint32).astype(np.uint64)
    r = np.where((bits & np.uint64(0x7FFFFFFF)) < 0x7F7F0000, r, 0x8000)
    return np.where(np.isnan(x), bits | np.uint64(0x400000), bits + r).astype(np.uint32) >> 16


def test_philox_gives_the_numbers_of_its_authors():
    ones = 0xFFFFFFFF  # "known answer tests" of Random123
    assert_array_equal(philox(0, np.zeros((1, 4)))[0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    want = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert_array_equal(philox(ones << 32 | ones, np.full((1, 4), ones))[0], want)


@pytest.mark.parametrize("offset", [0, 1024, (1 << 34) + 4096])
@pytest.mark.parametrize("n", [1, 1000, 4097])
@pytest.mark.parametrize("numbers", ["normal", "any bits"])
def test_every_bit_is_numpys(rng, n, offset, numbers):
    seed, step = (int(number) for number in rng.integers(0, 1 << 40, 2))
    x = rng.standard_normal(n).astype(np.float32)
    if numbers == "any bits":  # NaN, infinities, subnormals: every exponent
        x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    assert_array_equal(rounded(x, seed, step, offset), oracle(x, seed, step, offset))


def test_the_result_is_one_of_the_two_neighbours_and_what_bf16_has_stays_as_it_is(rng):
    bits = rng.integers(0, 1 << 32, 8192, np.uint32)
    bits[::4] &= 0xFFFF0000  # exactly representable
    bits[1::8] &= 0x807FFFFF  # subnormal, zero
    x = bits.view(np.float32)
    bits, x = bits[np.isfinite(x)], x[np.isfinite(x)]
    below, got = bits >> 16, rounded(x)
    exact = bits & 0xFFFF == 0
    assert_array_equal(got[exact], below[exact])
    assert set(np.unique(got - below)) == {0, 1}  # the next number away from zero, of the same sign
    assert_array_equal(np.signbit(value(got)), np.signbit(x))


def test_what_is_not_finite_stays_so_and_the_largest_numbers_are_rounded_to_nearest(rng):
    top = np.arange(0x7F7F0000, 0x7F800000, 257, dtype=np.uint32)  # from the largest bf16 to the largest float32
    for sign in (0, 1 << 31):
        got = value(rounded((top | np.uint32(sign)).view(np.float32)))
        assert_array_equal(np.isinf(got), top & 0xFFFF >= 0x8000)
        assert not np.isnan(got).any()
        infinity = np.array([0x7F800000 | sign], np.uint32).view(np.float32)
        assert_array_equal(value(rounded(np.repeat(infinity, 100))), infinity[0])
        payloads = rng.integers(1, 1 << 23, 1000, np.uint32)
        payloads[:3] = 1, 0xFFFF, 0x7FFFFF  # in the bits that are cut off, and all of them
        assert np.isnan(value(rounded((payloads | np.uint32(0x7F800000 | sign)).view(np.float32)))).all()


@pytest.mark.parametrize("low", [1 << 8, 1 << 12, 0x5555, 1 << 15, 0xFF00])
def test_on_average_nothing_is_lost(rng, low):
    """n draws of x: low / 2^16 of them go up; sigma is that of a binomial distribution, sqrt(n p (1 - p))."""
    n, p = 30_000, low / (1 << 16)
    x = np.full(n, 0x3F800000 | low, np.uint32).view(np.float32)  # above 1
    up = (rounded(x, int(rng.integers(1 << 32))) == 0x3F81).sum()
    assert abs(up - n * p) <= SIGMAS * np.sqrt(n * p * (1 - p))


def test_the_mean_of_many_numbers_is_kept_and_the_next_step_draws_anew(rng):
    """Of different numbers the variances add up; two steps agree where both, or none, went up."""
    x = np.abs(rng.standard_normal(30_000)).astype(np.float32)
    bits, seed = x.view(np.uint32), int(rng.integers(1 << 32))
    p = (bits & 0xFFFF) / 65536
    ups = [rounded(x, seed, step) - (bits >> 16) for step in (1, 2)]
    for up in ups:
        assert abs(up.sum() - p.sum()) <= SIGMAS * np.sqrt((p * (1 - p)).sum())
    agree = p * p + (1 - p) * (1 - p)
    assert abs((ups[0] == ups[1]).sum() - agree.sum()) <= SIGMAS * np.sqrt((agree * (1 - agree)).sum())
    assert (rounded(x, seed + 1, 1) != rounded(x, seed, 1)).any()


def test_adamw_rounds_its_copy_so_and_changes_nothing_else(rng):
    n, key = 3 * adamw.BLOCK + 5, device(rounding.key_of(7, 3))
    scalars = device(adamw.adamw_scalars(3, 1e-3, 0.9, 0.999, 1e-8, 0.1))
    g, start = rng.standard_normal(n).astype(np.float32), [rng.random(n).astype(np.float32) for _ in "pmv"]

    def step(part, offset, *random):
        arrays = [device(array[part].copy()) for array in start]
        copy = device(np.full(arrays[0].size, 0x7FC0, np.uint16)) if random else None
        adamw.adamw_step(*arrays, copy, device(g[part]), scalars, None, None, 0.9, 0.999, *random)
        return [host(array) for array in (*arrays, copy) if array is not None]

    plain, whole = step(slice(0, n), 0), step(slice(0, n), 0, key, 4096)
    for got, want in zip(whole, plain, strict=False):
        assert_array_equal(got, want)
    assert_array_equal(whole[3], oracle(plain[0], 7, 3, 4096))
    edges = [0, adamw.BLOCK, 3 * adamw.BLOCK, n]  # as ranks divide the arena
    parts = [step(slice(*edge), 0, key, 4096 + edge[0]) for edge in zip(edges, edges[1:], strict=False)]
    assert_array_equal(np.concatenate([part[3] for part in parts]), whole[3])


def test_the_backend_brings_the_key_with_the_rates_and_makes_the_copy_of_a_step_again(rng):
    backend, n = CudaBackend(), 2 * adamw.BLOCK
    p, m, v, g = (device(rng.random(n).astype(np.float32)) for _ in "pmvg")
    copy, again = (device(np.full(n, 0x7FC0, np.uint16)) for _ in range(2))
    rates = backend.adamw_rates(5, 1e-3, 0.9, 0.999, 1e-8, 0.1, seed=3)
    backend.mailbox.send()
    backend.adamw_step(p, m, v, copy, g, rates, None, [(slice(0, n), True)], offset=0)
    assert_array_equal(host(copy), oracle(host(p), 3, 5))
    backend.refresh(again, p, (3, 5))
    assert_array_equal(host(again), host(copy))


# -- in training ------------------------------------------------------------------------------------------------------


class Rounding(NumpyBackend):
    """Stage 0 with a copy of bf16's numbers, rounded as the kernel does."""

    rounds_stochastically = True

    def compute_copy(self, parameters):
        return np.zeros_like(parameters)

    def adamw_rates(self, step, *rest, seed=None):
        return super().adamw_rates(step, *rest[:5]), seed if seed is not None else rest[5], step

    def adamw_step(self, p, m, v, copy, g, rates, scale, runs, offset=0):
        rates, seed, step = rates
        super().adamw_step(p, m, v, None, g, rates, scale, runs)
        copy[...] = value(oracle(p, seed, step, offset))

    def refresh(self, copy, parameters, drawn=None):
        bits = parameters.view(np.uint32)
        nearest = bits + (0x7FFF + (bits >> 16 & 1)) >> 16
        copy[...] = value(nearest if drawn is None else oracle(parameters, *drawn))


def trained(world, steps, before=None, threads=1, **parallel):
    """Losses, the bits of master and copy, what to go on from (`before`), and the copies that all ranks have alike."""
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
    replicas = {name: x.copy() for name, x in trainer.arena.views(trainer.compute).items() if is_replicated(name)}
    bits = trainer.parameters.tobytes(), trainer.compute.tobytes()
    return losses, *bits, (*state, trainer.steps, trainer.position), replicas


def test_any_ranks_and_threads_draw_the_same_bits_also_after_a_resume():
    losses, *bits, _, _ = trained(Solo(), 3)
    for ranks, parallel in ((1, dict(threads=2)), (2, {}), (4, dict(zero=1)), (2, dict(zero=1, dp="bucket"))):
        for got in run_ranks(ranks, lambda world, parallel=parallel: trained(world, 3, **parallel)):
            assert got[0] == losses and list(got[1:3]) == bits
    first, *_, state, _ = trained(Solo(), 2)
    rest, *again, _, _ = trained(Solo(), 1, before=state)
    assert first + rest == losses and again == bits


def test_tensor_parallel_ranks_have_the_same_copy_of_what_all_of_them_hold():
    first, second = (rank[-1] for rank in run_ranks(2, lambda world: trained(world, 2, tp=2)))
    for name, array in first.items():
        assert_array_equal(second[name], array)


@pytest.mark.parametrize("backend", [NumpyBackend, CudaBackend])
def test_without_a_copy_in_bf16_the_flag_is_one_line(command, corpus, backend):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 1, "--rounding", "stochastic")
    result = command(cli.train, *flags, backend=backend)
    assert result.code == 2 and result.err == (
        "error: --rounding stochastic is of the bf16 copy of the parameters, and --precision fp32 has none: "
        "use --precision bf16, on a GPU, or --rounding nearest\n"
    )
    if backend is CudaBackend:
        assert "--precision fp16 has none" in command(cli.train, *flags, "--precision", "fp16", backend=backend).err


def test_a_resume_goes_on_with_the_saved_rounding(command, corpus, tmp_path):
    flags = ("--preset", "nano", "--data", corpus, "--sample", 0, "--out", tmp_path / "run")
    assert command(cli.train, *flags, "--rounding", "stochastic", "--steps", 1, backend=Rounding).code == 0
    flags += ("--resume", tmp_path / "run", "--steps", 2)
    assert "--rounding nearest" in command(cli.train, *flags).err  # stage 0 has no copy to round
    done = command(cli.train, *flags, "--rounding", "nearest")
    assert (done.code, "note: --rounding was stochastic and is nearest from here on" in done.out) == (0, True)


@gpu
@pytest.mark.parametrize("record", [True, False], ids=["recorded", "eager"])
def test_a_run_in_bf16_rounds_its_copy_as_numpy_would(record):
    def run(steps, before=None):
        options = dict(rounding="stochastic", seed=3, weight_decay=0.1)
        sizes = dict(batch_size=4, seq_len=16, micro_batches=1, record=record)
        trainer = Trainer(CONFIG, [CudaBackend("bf16")], **sizes, optimizer=options)
        master, copy = host(trainer.parameters), host(trainer.compute.view(np.uint16))
        assert_array_equal(copy, master.astype(trainer.compute.dtype).view(np.uint16))  # at first to nearest
        if before:
            load(trainer, *before, steps=4, position=16)
        windows = Windows(np.random.default_rng(0).integers(0, 37, 500), 16)
        losses = [trainer.step(read_batch(trainer, windows), 1e-2).loss for _ in range(steps)]
        master, copy = host(trainer.parameters), host(trainer.compute.view(np.uint16))
        assert_array_equal(copy, oracle(master, 3, trainer.steps))
        return losses, master, (named_parameters(trainer), named_moments(trainer))

    losses, master, _ = run(6)
    again, same, _ = run(6)
    first, _, state = run(4)
    rest, resumed, _ = run(2, state)
    assert losses == again == first + rest
    assert_array_equal(same, master)
    assert_array_equal(resumed, master)

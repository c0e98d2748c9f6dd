"""Every data-parallel strategy gives the parameters of the serial run, bit for bit or within rounding."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.architecture import parameter_shapes
from gpt2core.codecs import CODECS, Codec
from gpt2core.communicator import Handle, Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError, Diverged
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data.compression import Compressed
from gpt2core.parallel.data.local_windows import LocalWindows
from gpt2core.parallel.data.strategies import STRATEGIES, buckets_of, data_parallel
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import load, parameter_hash, verify
from gpt2core.training_loop import read_batch
from tests.support.training import BUCKET_MB, CONFIG, TIED, assert_same, make_trainer, train


@pytest.fixture
def tokens():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    return np.random.default_rng(seed).integers(0, 36, 1000)


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dp", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_strategy_gives_the_serial_bits(tokens, ranks, dp, zero):
    """Losses, gradient norms, parameters and moments, with clipping and weight decay."""
    want = train(Solo(), None, tokens)
    for got in run_ranks(ranks, train, ParallelConfig(dp=dp, zero=zero, bucket_mb=BUCKET_MB), tokens):
        assert_same(got, want)


@pytest.mark.parametrize("dp", STRATEGIES)
def test_threads_inside_the_ranks_and_a_tied_head_change_nothing(tokens, dp):
    """Two workers complete each parameter at about the same time: the messages are still sent in one order."""
    want = train(Solo(), None, tokens, config=TIED)
    parallel = ParallelConfig(dp=dp, zero=1, bucket_mb=0.005)
    for got in run_ranks(2, lambda comm: train(comm, parallel, tokens, config=TIED, threads=2)):
        assert_same(got, want)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dp", STRATEGIES)
def test_three_ranks_differ_only_by_rounding(tokens, dp, zero):
    """float64, 12 micro-batches: the tree has another shape, so only the rounding may differ."""
    options = dict(precision="fp64", batch_size=12, micro_batches=12)
    want = train(Solo(), None, tokens, **options)
    parallel = ParallelConfig(dp=dp, zero=zero, bucket_mb=BUCKET_MB)
    for curve, parameters, _, _ in run_ranks(3, lambda comm: train(comm, parallel, tokens, **options)):
        assert np.allclose(curve, want[0], rtol=1e-12, atol=0)
        for name, value in want[1].items():
            # Adam turns the key bias's rounding noise into steps: only what has a gradient is compared
            if not name.endswith("c_attn.bias"):
                assert np.linalg.norm(parameters[name] - value) <= 1e-9 * np.linalg.norm(value), name


# -- what is packed, and when it leaves -------------------------------------------------------------------------------


class Recorder:
    """A reduce_start that records its arguments."""

    def __init__(self):
        self.parts = []

    def __call__(self, part):
        self.parts.append(part)
        return Handle()


@pytest.mark.parametrize("dp", STRATEGIES)
def test_every_element_is_sent_once_and_no_bucket_before_it_is_complete(dp):
    arena, sent = DividedArena(parameter_shapes(CONFIG)), Recorder()
    strategy = data_parallel(dp, arena, sent, 4, BUCKET_MB)
    packed, eager = STRATEGIES[dp]
    for _ in range(2):  # a second step starts afresh
        sent.parts.clear()
        complete = set()
        for name in reversed(arena.slices):
            complete.add(name)
            strategy.completed(name)
            for part in sent.parts:
                inside = [n for n, own in arena.slices.items() if part.start <= own.start < part.stop]
                assert inside and set(inside) <= complete
        assert bool(sent.parts) == eager
        strategy.finish()
        covered = sorted((part.start, part.stop) for part in sent.parts)
        assert covered[0][0] == 0 and covered[-1][1] == max(arena.padded(name).stop for name in arena.slices)
        assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))
        messages = {"naive": len(arena.slices), "overlap": len(arena.slices), "flat": 1}.get(dp, len(covered))
        assert len(covered) == messages and (dp != "bucket" or 2 < messages < len(arena.slices))


def test_buckets_reach_their_size_last_parameters_first():
    arena = DividedArena(parameter_shapes(CONFIG))
    buckets = buckets_of(arena, True, 20_000, 4)
    assert [name for names in buckets for name in names] == list(reversed(arena.slices))
    sizes = [sum(arena.padded(name).stop - arena.slices[name].start for name in names) * 4 for names in buckets]
    assert all(size >= 20_000 for size in sizes[:-1])


def test_messages_are_sent_in_the_same_order_on_every_rank_and_thread(tokens):
    """Overlap with two workers a rank: the order in which units complete depends only on the graph."""

    def order(comm):
        trainer, units = make_trainer(comm, ParallelConfig(dp="overlap"), threads=2), []
        sums, original = trainer.accumulator.sums, trainer.accumulator.sums.on_complete
        sums.on_complete = lambda unit: (units.append(unit), original(unit))
        trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3)
        return units

    first, second = run_ranks(2, order)
    assert first == second == ["head", *(f"h.{layer}" for layer in reversed(range(CONFIG.n_layer))), "embedding"]


@pytest.mark.parametrize("options", [{}, dict(zero=1, zero_gather="forward")], ids=["zero 0", "zero 1"])
@pytest.mark.parametrize("dp", STRATEGIES)
def test_the_steps_after_a_pass_that_has_failed_on_all_ranks_are_right(tokens, dp, options):
    """With overlap and bucket, the pass that fails has sent most gradients already."""
    parallel = ParallelConfig(dp=dp, bucket_mb=BUCKET_MB, **options)

    def run(comm, fails):
        trainer, windows = make_trainer(comm, parallel, threads=2), Windows(tokens, 16)
        trainer.step(read_batch(trainer, windows), 1e-3)
        if fails:
            backend = trainer.pool.backends[1]
            backend.embedding_backward, compute = fail, backend.embedding_backward
            with pytest.raises(MemoryError):
                trainer.step(read_batch(trainer, windows), 1e-3)
            backend.embedding_backward = compute
        steps = [trainer.step(read_batch(trainer, windows), 1e-3) for _ in range(2)]
        return [(step.loss, step.grad_norm) for step in steps], parameter_hash(trainer)

    def fail(*arguments, **options):
        raise MemoryError

    want, got = (run_ranks(2, lambda comm, fails=fails: run(comm, fails)) for fails in (False, True))
    assert got == want


def test_a_strategy_moves_the_textbook_volume(tokens):
    """An all-reduce of n gradient bytes sends 2 (p-1)/p n. ZeRO-1 sends as much with --dp flat, else 3 (p-1)/p n."""
    p = 4

    def sent(comm, parallel):
        trainer = make_trainer(comm, parallel)
        step = trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3)
        return step.bytes_sent, trainer.arena

    def expected(parts, arena_bytes, zero):
        reduced = {0: 2, 1: 1 if parts is None else 2}[zero]
        gradients = arena_bytes if parts is None else parts
        return reduced * (p - 1) * gradients // p + (zero * (p - 1) * arena_bytes // p)

    small = 3000  # losses, norms: a few numbers a rank
    for dp in STRATEGIES:
        for zero in (0, 1):
            got, arena = run_ranks(p, sent, ParallelConfig(dp=dp, zero=zero, bucket_mb=BUCKET_MB))[0]
            parts = max(arena.padded(name).stop for name in arena.slices) * 4
            want = expected(None if zero and dp == "flat" else parts, arena.size * 4, zero)
            assert want <= got < want + small, (dp, zero)


# -- ZeRO-1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zero_keeps_an_equal_part_of_the_optimizer_state(ranks):
    def nbytes(comm):
        trainer = make_trainer(comm, ParallelConfig(zero=1), batch_size=24, micro_batches=24)
        return trainer.optimizer.nbytes, trainer.arena.size

    for own, size in run_ranks(ranks, nbytes):
        assert own * ranks == 2 * 4 * size


@pytest.mark.parametrize("then", [ParallelConfig(), ParallelConfig(zero=1), ParallelConfig(tp=2, zero=1)])
def test_a_zero_run_goes_on_with_other_ranks(tokens, then):
    """Two steps on 4 ranks, gathered, then two on 2 ranks, equal four steps of the serial run (tp: within rounding)."""
    want = train(Solo(), None, tokens, precision="fp64")

    def second(comm, parameters, moments, position):
        trainer = make_trainer(comm, then, precision="fp64")
        load(trainer, parameters if comm.is_root else None, moments if comm.is_root else None, 2, position)
        return [trainer.step(read_batch(trainer, Windows(tokens, 16)), 3e-3).loss for _ in range(2)]

    def first(comm):
        return train(comm, ParallelConfig(zero=1), tokens, steps=2, precision="fp64")

    _, parameters, moments, trainer = run_ranks(4, first)[2]
    for losses in run_ranks(2, second, parameters, moments, trainer.position):
        assert np.allclose(losses, [loss for loss, _ in want[0][2:]], rtol=1e-12 if then.tp > 1 else 0, atol=0)


# -- data x tensor parallel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, tp", [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("zero", [0, 1])
def test_data_times_tensor_parallel_training_equals_serial(tokens, ranks, tp, zero):
    """float64: losses and clipped norms of four steps; every norm counts replicated parameters once."""
    want = train(Solo(), None, tokens, precision="fp64")
    parallel = ParallelConfig(tp=tp, zero=zero, dp="bucket", bucket_mb=0.01)
    for curve, parameters, _, _ in run_ranks(ranks, lambda comm: train(comm, parallel, tokens, precision="fp64")):
        assert np.allclose(curve, want[0], rtol=1e-11, atol=0)
        for name, value in want[1].items():
            if not name.endswith("c_attn.bias"):
                assert np.linalg.norm(parameters[name] - value) <= 1e-8 * np.linalg.norm(value), name


def test_two_workers_have_tensor_groups_of_their_own(tokens):
    want = train(Solo(), None, tokens, precision="fp64")[0]
    for curve, *_ in run_ranks(2, lambda comm: train(comm, ParallelConfig(tp=2), tokens, precision="fp64", threads=2)):
        assert np.allclose(curve, want, rtol=1e-11, atol=0)


# -- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, bound", [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 254)])
def test_a_codec_rounds_to_half_a_step(kind, bound):
    """fp16 and bf16 relative to each element (above fp16's smallest), int8 to the largest of its 256."""
    encode, decode = CODECS[kind]
    x = np.random.default_rng().standard_normal((3, 512)).astype(np.float32)
    error = np.abs(decode(encode(x)) - x)
    scale = np.abs(x).reshape(3, 2, 256).max(-1).repeat(256, -1) if kind == "int8" else np.abs(x)
    assert (error <= bound * 1.001 * scale + 2.0**-25).all() and error.max() > 0
    x[1, :256] = 0  # a group without a scale, beside groups that have one
    with np.errstate(divide="raise", invalid="raise"):  # a warning of NumPy in every step would hide others
        assert_array_equal(decode(encode(x))[1, :256], np.zeros(256))
        assert (np.abs(decode(encode(x)) - x) <= error).all()


def test_bf16_rounds_as_pytorch_does():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng().integers(0, 1 << 32, 4096, np.uint32).view(np.float32)  # any float32, NaN too
    # the last two are ties: to even is down, then up
    x[:9] = [0, -0.0, np.inf, -np.inf, 1e-40, 3.4e38, 65535.5, -1.00390625, 1.01171875]
    x.view(np.uint32)[9:11] = 0x7F800001, 0xFFFFFFFF  # NaN in the bits that bf16 drops only, and in all bits
    encode, decode = CODECS["bf16"]
    assert_array_equal(decode(encode(x)), torch.tensor(x).bfloat16().float().numpy())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", CODECS)
def test_what_is_not_finite_stays_not_finite(kind, value):
    """A diverged gradient must stay visible: the norm of the decoded gradient is not finite."""
    encode, decode = CODECS[kind]
    x = np.ones((1, 256), np.float32)
    x[0, 3] = value
    with np.errstate(all="ignore"):
        assert not np.isfinite(decode(encode(x))).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", CODECS)
def test_compressed_sums_are_the_same_on_all_ranks_and_feedback_makes_up_for_rounding(kind, ranks):
    """The mean of many compressed sums of one gradient approaches the true sum: feedback adds the error later."""
    xs = np.random.default_rng().standard_normal((ranks, 1000)).astype(np.float32)
    want, times = xs.sum(0, dtype=np.float64), 40

    def main(comm):
        gradients = np.empty(1000, np.float32)
        compressed, sums = Compressed(Codec(kind), gradients, comm), []
        for _ in range(times):
            gradients[:] = xs[comm.rank]
            compressed.reduce_start(slice(0, 1000)).wait()
            sums.append(gradients.astype(np.float64))
        return sums[0], np.mean(sums, axis=0)

    results = run_ranks(ranks, main)
    for first, mean in results:
        assert_array_equal(first, results[0][0])
        once, after = np.linalg.norm(first - want), np.linalg.norm(mean - want)
        assert 0 < once < 0.03 * np.linalg.norm(want)
        assert after < once / 10


@pytest.mark.parametrize("dp, kind, ratio", [  # each of both in make test
    pytest.param(dp, *kind, marks=[] if (i + j) % 3 == 0 else pytest.mark.long)
    for i, dp in enumerate(STRATEGIES) for j, kind in enumerate([("fp16", 2), ("bf16", 2), ("int8", 4 * 256 / 260)])
])  # fmt: skip
def test_compressed_training_stays_close_and_sends_less(tokens, kind, ratio, dp):
    """Ten steps: each loss within 2 % of the serial one (int8 rounds gradients by 0.4 % of their group's largest)."""
    want = [loss for loss, _ in train(Solo(), None, tokens, steps=10)[0]]

    def run(comm, compress):
        parallel = ParallelConfig(dp=dp, compress=compress, bucket_mb=BUCKET_MB)
        trainer, windows = make_trainer(comm, parallel), Windows(tokens, 16)
        steps = [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(10)]
        verify(trainer)
        return [step.loss for step in steps], steps[-1].bytes_sent

    (plain, sent), (losses, less) = run_ranks(4, run, "none")[0], run_ranks(4, run, kind)[0]
    assert plain == want and np.allclose(losses, want, rtol=2e-2, atol=0) and losses != want
    padding = 4 * 256 * 4 * (len(dict(parameter_shapes(CONFIG))) if dp in ("naive", "overlap") else 12)
    assert less < sent / ratio + padding


# -- what else ranks do -----------------------------------------------------------------------------------------------


def test_verify_names_the_rank_that_differs(tokens):
    def main(comm):
        trainer = make_trainer(comm, ParallelConfig())
        trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3)
        verify(trainer)
        kept = trainer.parameters[5]
        trainer.parameters[5] += comm.rank == 2
        with pytest.raises(Diverged, match="step 0: the parameters of rank 2 differ from those of rank 0"):
            verify(trainer)
        trainer.parameters[5] = kept
        trainer.compute_parameters = trainer.parameters.copy()  # the copy that kernels read in 16 bits
        verify(trainer)
        trainer.compute_parameters[5] += comm.rank == 3
        with pytest.raises(Diverged, match="step 0: the parameters of rank 3 differ from those of rank 0"):
            verify(trainer)
        return True

    assert all(run_ranks(4, main))


def test_a_signal_on_one_rank_stops_all_at_the_same_step(tokens):
    def main(comm):
        trainer = make_trainer(comm, ParallelConfig())
        stopped = []
        for _ in range(4):
            received = 15 * (comm.rank == 1 and trainer.steps == 2)
            step = trainer.begin(read_batch(trainer, Windows(tokens, 16)), 1e-3)
            step.result(received)
            stopped.append(step.request)
        return stopped

    assert run_ranks(2, main) == [[0, 0, 15, 0]] * 2


def test_local_windows_visit_every_window_once_an_epoch():
    """Each of 4 ranks reads its quarter of 20 windows in its own random order."""
    tokens = np.arange(20 * 8)
    firsts = []
    for rank in range(4):
        windows = LocalWindows(tokens, 8, seed=1, rank=rank, ranks=4)
        batches = [windows.batch(position * 4 + rank, 1)[0] for position in range(5)]
        mine = [int(batch[0, 0]) for batch in batches]
        offset = min(first % 8 for first in mine)
        assert sorted((first - offset) // 8 % 20 for first in mine) == list(range(rank * 5, rank * 5 + 5))
        firsts.append([(first - offset) // 8 % 20 - rank * 5 for first in mine])
    assert len({tuple(order) for order in firsts}) > 1  # not the same order everywhere


def test_local_windows_resume_anywhere():
    tokens = np.random.default_rng().integers(0, 99, 500)
    windows = [LocalWindows(tokens, 8, 7, rank=1, ranks=2) for _ in range(2)]
    straight = [windows[0].batch(step * 8 + 4, 4)[0] for step in range(20)]
    assert_array_equal(windows[1].batch(13 * 8 + 4, 4)[0], straight[13])
    assert (straight[0] != straight[8]).any()  # a second epoch has another order


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(dp="ring"), "`dp=ring` is unknown: choose from naive, flat, overlap, bucket"),
        (dict(bucket_mb=0), "`bucket_mb=0` must be above 0"),
        (dict(compress="zip"), "`compress=zip` is unknown: choose from none, fp16, bf16, int8"),
    ],
)
def test_unknown_choices_name_those_that_exist(options, words):
    with pytest.raises(ConfigError, match=words):
        make_trainer(Solo(), ParallelConfig(**options))

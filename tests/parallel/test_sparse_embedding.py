"""The rows of the embedding's gradient give the bits of the sum of all rows, and the bytes are those of a formula."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.architecture import GPT2Config
from gpt2core.arena import Arena
from gpt2core.communicator import Handle, Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import STRATEGIES, ParallelConfig
from gpt2core.parallel.data import sparse_embedding
from gpt2core.parallel.data.sparse_embedding import TABLE, SparseEmbedding
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.plain_backend import PlainBackend
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.training import BUCKET_MB, TIED, assert_same, make_trainer, train

WIDE = GPT2Config(vocab_size=300, block_size=16, n_layer=2, n_head=4, n_embd=16, tied=False)
LAYOUTS = [
    *((ranks, dict(dp=dp)) for ranks in (1, 2, 4, 8) for dp in STRATEGIES),
    *((4, dict(dp=dp, zero=1)) for dp in ("naive", "overlap", "bucket")),
    (2, dict(dp="bucket", zero=1, zero_gather="forward")), (4, dict(recompute="block", dp="overlap")),
    *((4, dict(pp=2, pp_schedule=name)) for name in ("gpipe", "1f1b", "zero-bubble")),
]  # fmt: skip


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    return np.random.default_rng(seed)


def text(rng):
    """Tokens of which each rank reads a few: most of the 300 are read by no rank or by some of the ranks only."""
    return np.repeat(rng.permutation(300), 16)[: 16 * 17 * 4] // rng.integers(1, 3, 16 * 17 * 4)


@pytest.mark.fast
@pytest.mark.parametrize("ranks, options", LAYOUTS, ids=str)
def test_the_bits_are_those_of_the_whole_sum(rng, ranks, options):
    """Losses, norms, parameters and moments of four steps with clipping, 8 micro-batches, from the serial run."""
    tokens = text(rng)
    want = train(Solo(), None, tokens, config=WIDE)
    parallel = ParallelConfig(sparse_embedding=True, bucket_mb=BUCKET_MB, **options)
    for got in run_ranks(ranks, lambda comm: train(comm, parallel, tokens, config=WIDE)):
        assert_same(got, want)


@pytest.mark.parametrize("options", [
    dict(threads=2), dict(batch_size=14, micro_batches=4), dict(backend=PlainBackend, precision="fp32"),
    dict(precision="fp64"),
], ids=str)  # fmt: skip
def test_threads_unequal_micro_batches_and_other_backends_change_nothing(rng, options):
    tokens, options = text(rng), dict(options, config=WIDE)
    dense, sparse = (ParallelConfig(dp="bucket", bucket_mb=BUCKET_MB, sparse_embedding=on) for on in (False, True))
    want = run_ranks(2, lambda comm: train(comm, dense, tokens, **options))[0]
    for got in run_ranks(2, lambda comm: train(comm, sparse, tokens, **options)):
        assert_same(got, want)


@pytest.mark.parametrize("ranks, tp", [(2, 2), (4, 2)])
def test_each_rank_of_a_tensor_group_sums_the_rows_of_its_own_tokens(rng, ranks, tp):
    """300 tokens on 2 ranks: the second one has the rows of 150 and above."""
    tokens = text(rng)
    dense, sparse = (ParallelConfig(tp=tp, sparse_embedding=on) for on in (False, True))
    want = run_ranks(ranks, lambda comm: train(comm, dense, tokens, config=WIDE))
    got = run_ranks(ranks, lambda comm: train(comm, sparse, tokens, config=WIDE))
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("at_once", [3, 1024])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_rows_that_some_ranks_do_not_have_count_as_zero(rng, monkeypatch, ranks, at_once):
    """Also the sign of zero: a row of -0 plus a row that another rank does not have is +0, as in the dense sum."""
    monkeypatch.setattr(sparse_embedding, "SUM_ROWS", at_once)
    arena = Arena([(TABLE, (40, 3)), ("transformer.wpe.weight", (4, 3))])
    ids = [rng.choice(40, rng.integers(1, 12)) for _ in range(ranks)]
    ids[0][:], ids[-1][:] = ids[0][0], ids[-1]  # the first rank has one row, however many tokens it reads
    flats = np.zeros((ranks, arena.size), np.float32)
    for flat, own in zip(flats, ids, strict=True):
        arena.views(flat)[TABLE][own] = rng.standard_normal((own.size, 3)) * 10.0 ** rng.integers(-9, 9, (own.size, 1))
        arena.views(flat)[TABLE][own[-1], 0] = -0.0

    def run(comm, sparse):
        flat = flats[comm.rank].copy()

        def all_reduce_start(part):
            return comm.all_reduce_start(flat[part], out=flat[part])

        reduce_start = all_reduce_start
        if sparse:
            rows = SparseEmbedding(arena, flat, comm, NumpyBackend(), all_reduce_start, 12, first=0)
            rows.begin([[(ids[comm.rank], None)]])
            reduce_start = rows.reduce_start
        handle = reduce_start(slice(0, arena.padded("transformer.wpe.weight").stop))
        handle.wait(), handle.wait()  # a second wait adds nothing
        return flat

    for got, want in zip(run_ranks(ranks, run, True), run_ranks(ranks, run, False), strict=True):
        assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_a_rank_of_a_pipeline_without_the_table_sums_everything_as_before():
    arena, sent = Arena([("lm_head.weight", (4, 3))]), []
    all_reduce_start = lambda part: sent.append(part) or Handle()  # noqa: E731
    rows = SparseEmbedding(arena, np.zeros(arena.size), Solo(), NumpyBackend(), all_reduce_start, 12, first=0)
    rows.begin([])
    rows.reduce_start(slice(0, 1024))
    assert sent == [slice(0, 1024)]


@pytest.mark.parametrize("dp", STRATEGIES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_rank_sends_its_rows_instead_of_the_table(rng, p, dp):
    """Without 2 (p-1)/p of the 5 pages of a table (300, 16), and with (p-1) (R rows, and the row indices)."""
    tokens, C, pages = text(rng), 16, 5 * 1024

    def sent(comm, on):
        trainer = make_trainer(comm, ParallelConfig(dp=dp, bucket_mb=BUCKET_MB, sparse_embedding=on), config=WIDE)
        batch = Windows(tokens, 16).batch(0, 16)[0].reshape(p, -1)  # of each rank
        trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3)
        return trainer.bytes_sent(), max(len(np.unique(own)) for own in batch)

    (dense, R), (sparse, _) = (run_ranks(p, sent, on)[0] for on in (False, True))
    assert 1 < R < 16 * 16 // p
    longest = min(300, 16 * 16 // p)
    assert dense - sparse == 4 * (2 * (p - 1) * pages // p - (p - 1) * (R * C + longest))


EXCLUDED = "`sparse_embedding=True` and `%s` exclude each other: use `%s` or `sparse_embedding=False`"


@pytest.mark.parametrize("parallel, config, message", [
    (dict(compress="int8"), WIDE, EXCLUDED % ("compress=int8", "compress=none")),
    (dict(canonical_tp=2), WIDE, EXCLUDED % ("canonical_tp=2", "canonical_tp=1")),
    (dict(zero=2), WIDE, "`zero=2` and `sparse_embedding=True` exclude each other: use `sparse_embedding=False` or"),
    (dict(zero=1), WIDE, "`sparse_embedding=True` and `zero=1` need `dp=bucket`, not `dp=flat`; or use `zero=0`"),
    ({}, TIED, "`sparse_embedding=True` and a model with tied=True exclude each other: .* `sparse_embedding=False`"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_with_both_values(parallel, config, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(Solo(), ParallelConfig(sparse_embedding=True, **parallel), config=config)

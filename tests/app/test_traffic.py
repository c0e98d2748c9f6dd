"""The predicted calls and bytes of a step are those that are counted, for every layout."""

import collections
from dataclasses import replace

import numpy as np
import pytest

from gpt2core.app.planning.layout import Layout
from gpt2core.app.planning.traffic import Call, by_collective, bytes_sent, gathers, traffic
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Communicator
from gpt2core.data import Windows
from gpt2core.parallel.config import ZERO, ParallelConfig
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.tracing.hooks import COLLECTIVES, Hooks
from gpt2core.training_loop import read_batch
from tests.support.training import make_trainer

TOKENS = np.random.default_rng(7).integers(0, 36, 1000)
BUCKETS = dict(bucket_mb=0.002)
DATA = [
    dict(dp="naive"), dict(dp="overlap"), dict(dp="bucket", **BUCKETS), dict(zero=1),
    dict(dp="bucket", zero=1, **BUCKETS), dict(zero=1, zero_gather="forward", **BUCKETS), dict(compress="int8"),
    dict(compress="fp16", dp="bucket", **BUCKETS),
    dict(compress="bf16", zero=1), dict(zero=2), dict(zero=3), dict(zero=3, recompute="block"),
]  # fmt: skip
PIPELINES = [dict(pp_schedule=name) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")]
LAYOUTS = [
    *((ranks, options) for ranks in (1, 2, 3, 4) for options in DATA),
    *((tp, dict(tp=tp, recompute=recompute)) for tp in (2, 4) for recompute in ("none", "block")),
    (2, dict(tp=2, canonical_tp=4)), (4, dict(tp=2, pp=2, canonical_tp=4)), (2, dict(zero=3, canonical_tp=2)),
    *((4, dict(tp=2, zero=zero)) for zero in (1, 2, 3)), (4, dict(tp=2, zero=3, canonical_tp=4, recompute="block")),
    (4, dict(tp=2, dp="bucket", compress="int8", **BUCKETS)),
    *((2, dict(pp=2, **options)) for options in PIPELINES),
    *((4, dict(pp=2, recompute="block", zero=zero, **options)) for options in PIPELINES for zero in ZERO),
    (4, dict(pp=2, tp=2)), *((8, dict(pp=2, tp=2, zero=zero, recompute="block")) for zero in (1, 3)), (4, dict(pp=4)),
]  # fmt: skip


def model(tied):
    return GPT2Config(vocab_size=37, block_size=16, n_layer=4, n_head=4, n_embd=16, tied=tied)


def counted_step(comm, parallel, options):
    """(the bytes of a step in the log, {name of a call: how often}, Layout), after a first step.

    A rank reads at least 64 tokens: the whole vocabulary of 37, if they are in order.
    """
    tokens = np.arange(1000) % 37 if parallel.sparse_embedding else TOKENS
    trainer, windows = make_trainer(comm, parallel, **options), Windows(tokens, 16)
    trainer.step(read_batch(trainer, windows), 1e-3)
    calls, hooks, mesh = collections.Counter(), Hooks(), trainer.mesh
    workers = [group for worker in trainer.accumulator.workers for group in worker.groups]
    groups = [comm, mesh.data, mesh.tensor, mesh.pipeline, mesh.replica, mesh.ends, *workers]
    for group in {id(group): group for group in groups if group}.values():
        if group.size > 1:
            record(hooks, group, calls)
    step = trainer.step(read_batch(trainer, windows), 1e-3)
    layout = Layout(
        trainer.config, parallel, trainer.batch_size, trainer.seq_len, trainer.micro_batches, mesh.data.size,
        trainer.accumulator.merged, trainer.pool.size,
    )  # fmt: skip
    return step.bytes_sent or 0, calls, layout


def record(hooks, group, calls):
    for name in COLLECTIVES:
        start = getattr(group, f"{name}_start")

        def counted(*arguments, name=name, start=start, **options):
            calls[name] += 1
            return start(*arguments, **options)

        hooks.set(group, f"{name}_start", counted)


def assert_predicted(ranks, parallel, **options):
    for rank, (sent, calls, layout) in enumerate(run_ranks(ranks, counted_step, parallel, options)):
        place = layout.places()[rank]
        assert layout.rank_of(place)["world"] == rank
        predicted = traffic(layout, place)
        assert bytes_sent(layout, place, predicted, Communicator().sent) == sent
        expected = collections.Counter()
        for call in predicted:
            expected[call.name] += call.times
        calls.pop("recv", None)
        assert +expected == calls
        rows = by_collective(layout, place, predicted, Communicator().sent)
        assert sum(row[-1] for row in rows) == sent and sum(row[-2] for row in rows) == calls.total()


@pytest.mark.parametrize("ranks, options, tied", [
    pytest.param(*layout, tied, marks=[] if (i + tied) % 2 else pytest.mark.long, id=f"{layout}-{tied}")
    for i, layout in enumerate(LAYOUTS) for tied in (False, True)
])  # fmt: skip
def test_the_predicted_calls_and_bytes_are_those_that_are_counted(ranks, options, tied):
    batch = dict(batch_size=24, micro_batches=12) if ranks == 3 else {}
    assert_predicted(ranks, ParallelConfig(**options), config=model(tied), **batch)


SPARSE = [
    *((ranks, dict(dp=dp, **BUCKETS)) for ranks in (1, 2, 3, 4) for dp in ("naive", "flat", "bucket")),
    (4, dict(dp="bucket", zero=1, **BUCKETS)), (4, dict(tp=2)), (4, dict(pp=2, dp="overlap")),
]  # fmt: skip


@pytest.mark.parametrize("ranks, options", SPARSE, ids=str)
def test_the_rows_of_an_embedding_are_predicted_exactly_if_a_rank_reads_all_tokens(ranks, options):
    batch = dict(batch_size=24, micro_batches=12) if ranks == 3 else {}
    assert_predicted(ranks, ParallelConfig(sparse_embedding=True, **options), config=model(False), **batch)


def test_the_predicted_rows_are_at_most_the_tokens_of_a_rank():
    """4 ranks with 4 sequences of 16 tokens each: 64 rows of 1,000."""
    config = GPT2Config(vocab_size=1000, block_size=16, n_layer=1, n_head=4, n_embd=16, tied=False)
    layout = Layout(config, ParallelConfig(sparse_embedding=True), 16, 16, 8, replicas=4)
    rows = {call.purpose: call for call in traffic(layout, layout.places()[0]) if "row" in call.purpose}
    assert [call.elements for call in rows.values()] == [64, 64 * 16]
    assert [call.on_host for call in rows.values()] == [True, False]


@pytest.mark.parametrize("options", [
    dict(tp=2), dict(zero=1), dict(dp="bucket", **BUCKETS), dict(pp=2), dict(pp=2, pp_schedule="zero-bubble"),
    dict(zero=2), dict(zero=3), dict(zero=3, pp=2), dict(zero=3, tp=2),
], ids=str)  # fmt: skip
def test_also_with_several_threads_and_unequal_micro_batches(options):
    assert_predicted(2, ParallelConfig(**options), config=model(True), threads=2)
    assert_predicted(2, ParallelConfig(**options), config=model(True), batch_size=14, micro_batches=4)


def test_a_passed_unit_is_gathered_again_with_zero_3_only():
    units = ["embedding", "h.0", "h.1", "h.2", "head"]

    def counts(zero):
        config = replace(model(False), n_layer=3)
        return gathers(Layout(config, ParallelConfig(zero=zero), 8, 16, micro_batches=2), Grid(), units)

    assert counts(2) == dict.fromkeys(units, 1)
    # the unit that is computed and the next one stay: h.2 while the head is computed, h.0 between two passes
    assert counts(3) == {"embedding": 3, "h.0": 3, "h.1": 4, "h.2": 2, "head": 2}


def test_zero_3_in_a_pipeline_gathers_the_units_of_a_rank_again_for_each_action():
    def counts(pipeline, units, **options):
        layout = Layout(model(True), ParallelConfig(zero=3, pp=2, **options), 8, 16, micro_batches=4)
        return gathers(layout, Grid(pipeline=pipeline), units)

    # gpipe on the first rank: embedding, h.0, h.1, four times; then back, four times; h.0 and h.1 stay between them
    assert counts(0, ["embedding", "h.0", "h.1"], pp_schedule="gpipe") == {"embedding": 8, "h.0": 7, "h.1": 7}
    assert counts(1, ["embedding", "h.2", "h.3", "head"])["embedding"] == 5  # once to send the table; with each head


def test_a_call_of_the_loss_is_on_the_host():
    assert Call("world", "loss", "all_gather", 1, 8).on_host and not Call("data", "norm", "all_gather", 1, 4).on_host

"""Checks of exercise 1.8: the copy of a tied table, its two gradients, and training over two ranks of a pipeline."""

# B batch, T time, C channels, V vocabulary

import numpy as np

from exercises.checks.common import CONFIG, on_ranks, random
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.parallel.config import ParallelConfig

V, C, B, T = 12, 8, 2, 5


def tables(function):
    """[function(TiedTable, its group) of each of the two ends]; the last one stores the table 0, 1, 2, ..."""
    from dataclasses import replace

    from gpt2core.parallel.parameter import Parameter
    from gpt2core.parallel.pipeline.tied_table import TiedTable
    from stage0_serial.numpy_backend import NumpyBackend

    config = replace(CONFIG, vocab_size=V, n_embd=C, tied=True)

    def run(ends):
        from gpt2core.communicator import SOLO

        backend = NumpyBackend("fp64")
        stored = Parameter(np.arange(V * C, dtype=np.float64).reshape(V, C), backend) if ends.rank else None
        return function(TiedTable(config, ends, SOLO, stored, backend), ends)

    return on_ranks(2, run)


def refresh_copies_the_table():
    def run(table, ends):
        table.refresh()
        first = np.array(table.tensor.data)
        if ends.rank:
            table.tensor.data[...] += 1  # the update of a step
            table.waiting.append("of a step that has failed")
        table.refresh()
        expect_equal("the gradients that wait after refresh()", table.waiting, [], (), "refresh(): empty self.waiting")
        return first, np.array(table.tensor.data)

    want = np.arange(V * C, dtype=np.float64).reshape(V, C)
    for rank, (first, second) in enumerate(tables(run)):
        wrong = [(0 * want, "The first rank has no copy: the last rank sends its table, the first one receives it.")]
        name = f"on {'the last' if rank else 'the first'} rank"
        expect(f"{name}, the table after refresh()", first, want, 0, wrong, "refresh()")
        wrong = [(want, "The second refresh() does not copy: the table changes in every step.")]
        expect(f"{name}, the table after an update and refresh()", second, want + 1, 0, wrong, "refresh()")


def two_gradients():
    """The sums of head and embedding of three micro-batches; the head's gradients are all computed first."""

    def run(table, ends):
        if not ends.rank:
            return None
        rng, results = random(1), []
        heads, ids = rng.standard_normal((3, V, C)), rng.integers(0, V, (3, B, T))
        dys = rng.standard_normal((3, B, T, C))
        for head in heads:
            table.set_destination()
            table.tensor.receive(head.copy())
        expect_equal("the gradients that wait after 3 micro-batches", len(table.waiting), 3, (), "set_destination()")
        for each, dy in zip(ids, dys, strict=True):
            results.append(np.array(table.add_embedding(each, dy)))
        return heads, ids, dys, results

    heads, ids, dys, results = tables(run)[1]
    for m, got in enumerate(results):
        rows = np.zeros((V, C))
        np.add.at(rows, ids[m], dys[m])
        wrong = [
            (rows, "The gradient of the head is lost: the embedding's is added to it, accumulate=True."),
            (heads[m], "The gradient of the embedding is missing: embedding_backward gives its rows."),
            (
                heads[-1 - m] + rows,
                "The gradients wait in the wrong order: the oldest micro-batch comes first, pop(0).",
            ),
            (heads[m - 1] + rows, "The gradient of another micro-batch is used: the oldest one comes first, pop(0)."),
            (heads[m] + 2 * rows, "The gradient of the embedding is added twice."),
        ]
        expect(f"the gradient of the table for micro-batch {m}", got, heads[m] + rows, 1e-12, wrong, "add_embedding()")


def destinations_are_separate():
    def run(table, ends):
        if ends.rank:
            for _ in range(2):
                table.set_destination()
                table.tensor.receive(np.ones((V, C)))
            if np.shares_memory(*table.waiting):
                raise Mismatch("two micro-batches write to one array", "set_destination() needs a new array each time.")
            expect_equal(
                "the shapes that wait", [np.shape(each) for each in table.waiting], [(V, C)] * 2, (), "empty()"
            )
            table.add_embedding(np.zeros((B, T), np.int64), np.zeros((B, T, C)))
            expect_equal("the gradients that wait after add_embedding()", len(table.waiting), 1, (), "add_embedding()")

    tables(run)


def tied_training():
    from dataclasses import replace

    from exercises.checks.common import expect_same_bits

    for schedule in ("1f1b", "gpipe"):
        expect_same_bits(2, ParallelConfig(pp=2, pp_schedule=schedule), config=replace(CONFIG, tied=True))

"""Checks of case 2: the order of a sum over micro-batches, and the bits of training on several ranks."""

import numpy as np

from exercises.checks.common import expect_same_bits, random
from exercises.compare import expect
from gpt2core.data import even_slices
from gpt2core.errors import counted
from gpt2core.tree_sum import tree_sum

ROWS = 12  # of a micro-batch


def summed(micro_batches, ranks, seed):
    """(a sum over the rows of all micro-batches as ranks compute it, the same on one rank); float32 of mixed sizes.

    Each rank has equally many of the micro-batches, in order; the sums of the ranks are added in the canonical order.
    """
    from stage0_serial.numpy_backend import NumpyBackend

    rng = random(seed)
    rows = rng.standard_normal((micro_batches * ROWS, 40)) * 10.0 ** rng.integers(-4, 4, (micro_batches * ROWS, 40))
    rows = rows.astype(np.float32)
    parts = even_slices(len(rows), micro_batches)
    backend = NumpyBackend()

    def write(part, out):
        np.sum(rows[part], axis=0, out=out)

    def sum_of(parts):
        return backend.canonical_sum(write, parts, np.empty(40, np.float32)).copy()

    own = [parts[each] for each in even_slices(micro_batches, ranks)]
    return tree_sum([sum_of(each) for each in own]), tree_sum([rows[part].sum(0) for part in parts])


def expect_bits(cases):
    for micro_batches, ranks in cases:
        for seed in range(3):
            got, want = summed(micro_batches, ranks, seed)
            where = f"{counted(micro_batches, 'micro-batch')} on {counted(ranks, 'rank')}"
            expect(f"the sum over {where}, in the last bits", got, want, 0)


def two_ranks_have_the_bits_of_one():
    expect_bits([(2, 1), (2, 2)])


def number_of_ranks_does_not_change_the_bits():
    expect_bits([(3, 1), (4, 1), (4, 2), (4, 4), (5, 1), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 8)])


def training_does_not_depend_on_the_ranks():
    for micro_batches in (4, 8):
        for ranks in (1, 2, 4):
            expect_same_bits(ranks, micro_batches=micro_batches, seed=5)
    expect_same_bits(2, threads=2, micro_batches=4)

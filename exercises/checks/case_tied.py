"""Checks of case 7: training with sharded gradients has the bits of one rank, for both kinds of model."""

from exercises.checks.common import expect_same_bits
from gpt2core.architecture import GPT2Config
from gpt2core.parallel.config import ParallelConfig


def config(**options):
    return GPT2Config(**(dict(vocab_size=36, block_size=16, n_layer=2, n_head=4, n_embd=32, tied=True) | options))


def two_ranks_have_the_bits_of_one():
    expect_same_bits(2, ParallelConfig(zero=2), config=config())


def model_and_ranks_do_not_change_the_bits():
    cases = (
        (2, 3, 8, {}), (4, 2, 8, {}), (4, 3, 4, dict(n_layer=1)), (2, 2, 2, dict(tied=False)),
        (2, 3, 4, dict(tied=False)),
    )  # fmt: skip
    for ranks, zero, micro_batches, options in cases:
        parallel, sizes = ParallelConfig(zero=zero), config(**options)
        expect_same_bits(ranks, parallel, config=sizes, micro_batches=micro_batches, seed=4)

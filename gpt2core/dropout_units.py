"""The units of a model with dropout (dropout.py): each has a unit without dropout, and drops numbers of what it adds.

The bias of a branch is inside the dropped number, so zeros take its place in the Branch.
"""

# B batch, T time, C channels

from gpt2core import ops
from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor


def with_dropout(unit):
    """The unit with dropout of an embedding, a block or the head; the head drops nothing."""
    if unit.name == "embedding":
        return DropoutEmbedding(unit)
    return unit if unit.name == "head" else DropoutBlock(unit)


class DropoutEmbedding:
    """An Embedding, or a SlicedEmbedding, that drops numbers of its output, at place 0."""

    def __init__(self, embedding):
        self.embedding, self.name = embedding, embedding.name

    def __call__(self, ids, arguments=FIRST_TOKENS):
        x, mask = self.embedding(ids, arguments), arguments.mask(0)
        return Stream(ops.dropout(x.tensor(), mask)) if mask else x


class DropoutBlock:
    """A Block, or a SlicedBlock, that drops numbers of its two branches."""

    def __init__(self, block):
        self.block, self.name = block, block.name
        _, bias = block.mlp_out
        self.zeros = Tensor(bias.backend.zeros(bias.shape, bias.backend.compute_dtype), bias.backend)  # (C)

    def __call__(self, x, arguments=FIRST_TOKENS):
        block, place = self.block, 2 * self.block.layer + 1
        x, y = block.ln_1(x)
        x = x + self.drop(block.attention(y, arguments), arguments.mask(place))
        x, y = block.ln_2(x)
        return x + self.drop(block.mlp(y, arguments), arguments.mask(place + 1))

    def drop(self, branch, mask):
        """The Branch after dropout by a Mask; the same one if `mask` is None."""
        return Branch(ops.dropout(branch.output, mask, branch.bias), self.zeros) if mask else branch

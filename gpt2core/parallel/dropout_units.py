"""The units of a model with dropout (dropout.py): each has a unit without dropout, and drops numbers of what it adds.

The bias of a branch is inside the dropped number, so zeros take its place in the Branch.
"""

# B batch, T time, C channels

from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.model import Block
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor


def dropout(x, mask, bias=None):
    """x (B, T, C) + bias (C) after dropout by a dropout.Mask -> (B, T, C); backward computes the mask again."""
    backend = x.backend
    y = backend.dropout(x.data, mask, None if bias is None else bias.data)

    def backward(dy):
        dx = backend.dropout(dy, mask)
        return (dx,) if bias is None else (backend.bias_backward(dx), dx)

    return Tensor.from_op(y, (x,) if bias is None else (bias, x), backward)


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
        return Stream(dropout(x.tensor(), mask)) if mask else x


class DropoutBlock(Block):
    """A Block, or a SlicedBlock, that drops numbers of its two branches."""

    def __init__(self, block):
        self.block, self.name, self.ln_1, self.ln_2 = block, block.name, block.ln_1, block.ln_2
        _, bias = block.mlp_out
        self.zeros = Tensor(bias.backend.zeros(bias.shape, bias.backend.compute_dtype), bias.backend)  # (C)

    def attention(self, y, arguments):
        return self.drop(self.block.attention(y, arguments), arguments.mask(2 * self.block.layer + 1))

    def mlp(self, y, arguments):
        return self.drop(self.block.mlp(y, arguments), arguments.mask(2 * self.block.layer + 2))

    def drop(self, branch, mask):
        """The Branch after dropout by a Mask; the same one if `mask` is None."""
        return Branch(dropout(branch.output, mask, branch.bias), self.zeros) if mask else branch

"""The units of a model with dropout (dropout.py): those of model.py, whose embedding and branches lose numbers.

The bias of a branch is inside the dropped number, so zeros take its place in the Branch.
"""

# B batch, T time, C channels

from gpt2core import model
from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.model import Block, Embedding
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


def make_unit(name, config, parameters, group):
    """model.make_unit() with dropout."""
    if name == "embedding":
        return DropoutEmbedding(config, parameters, group)
    if name.startswith("h."):
        return DropoutBlock(config, parameters, group, int(name.removeprefix("h.")))
    return model.make_unit(name, config, parameters, group)


class DropoutEmbedding(Embedding):
    """An embedding that drops numbers of its output, at place 0; a subclass may also be a SlicedEmbedding."""

    def __call__(self, ids, arguments=FIRST_TOKENS):
        x, mask = super().__call__(ids, arguments), arguments.mask(0)
        return Stream(dropout(x.tensor(), mask)) if mask else x


class DropoutBlock(Block):
    """A block that drops numbers of its branches; a subclass may also be a SlicedBlock."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        _, bias = self.mlp_out
        self.zeros = Tensor(bias.backend.zeros(bias.shape, bias.backend.compute_dtype), bias.backend)  # (C)

    def __call__(self, x, arguments=FIRST_TOKENS):
        first = 2 * self.layer + 1
        x = x + self.dropped(self.attention(self.ln_1(x), arguments), arguments.mask(first))
        return x + self.dropped(self.mlp(self.ln_2(x)), arguments.mask(first + 1))

    def dropped(self, branch, mask):
        """The Branch after dropout; without a mask the branch itself."""
        return Branch(dropout(branch.output, mask, branch.bias), self.zeros) if mask else branch

"""The units of a rank that has several slices of each layer: `canonical_tp` S has the bits of `tp` = S at every `tp`.

A layer has S slices, and each of the tp ranks computes S / tp of them, one after another, with the shapes of tp = S. A
slice is computed by the unit of model.py, which has a Slice in the place of its group; the slices are added here. With
one slice on each rank, S = tp, the units are those of model.py themselves.
"""

# B batch, T time, C channels

from gpt2core.dropout_units import with_dropout
from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.model import Block, Embedding, Head, make_unit
from gpt2core.parallel.tensor.shards import whole_name
from gpt2core.parallel.tensor.sliced_ops import copies, own_parts, sliced_cross_entropy, total
from gpt2core.stream import Branch, Stream


def make_units(names, work, parameters, group):
    """The units of a Workload with these names; parameters, group: see GPT2, with several slices see own_slices()."""
    if work.slices == 1:
        units = [make_unit(name, work.config, parameters, group) for name in names]
    else:
        slices = [parameters_of_slice(parameters, i) for i in range(work.slices)]
        classes = {"embedding": SlicedEmbedding, "head": SlicedHead}
        units = [classes.get(name, SlicedBlock)(name, work.config, slices, group) for name in names]
    return [with_dropout(unit) for unit in units] if work.dropout else units


def parameters_of_slice(parameters, number):
    """{name of a parameter: the Tensor of slice `number` of this rank, or the whole one if it is not divided}."""
    own = {whole_name(name): tensor for name, tensor in parameters.items() if name.endswith(f"/{number}")}
    return own | {name: tensor for name, tensor in parameters.items() if name == whole_name(name)}


class SlicedEmbedding(Embedding):
    """The embedding: each slice has some of the tokens, and their rows. slices: [the parameters of each slice]."""

    def __init__(self, name, config, slices, group):
        super().__init__(config, slices[0], group)
        self.group = group
        self.slices = [Embedding(config, *each) for each in zip(slices, own_parts(group, len(slices)), strict=True)]
        for each in self.slices[1:]:
            each.wpe = None  # one slice adds positions: otherwise their gradient would be added once for each slice

    def __call__(self, ids, arguments=FIRST_TOKENS):
        return Stream(total([each(ids, arguments).tensor() for each in self.slices], self.group))


class SlicedHead(Head):
    """The head: each slice computes the logits of some of the tokens. slices: [the parameters of each slice]."""

    def __init__(self, name, config, slices, group):
        super().__init__(config, slices[0], group)
        self.ws = [parameters[config.head] for parameters in slices]

    def __call__(self, x, arguments):
        targets, scale = arguments.targets, arguments.scale
        x, y = self.ln_f(x)
        ys = copies(y, len(self.ws), self.group)
        return sliced_cross_entropy(ys, self.ws, targets, scale, self.vocabulary, arguments.gradient)


class SlicedBlock(Block):
    """A block: each slice is a Block with some of the heads and hidden channels; the LayerNorms are computed once.

    slices: [the parameters of each slice].
    """

    def __init__(self, name, config, slices, group):
        layer = int(name.removeprefix("h."))
        super().__init__(config, slices[0], group, layer)
        parts = zip(slices, own_parts(group, len(slices)), strict=True)
        self.slices = [Block(config, parameters, part, layer) for parameters, part in parts]

    def attention(self, y, arguments):
        return self.sum(y, lambda block, y: block.attention(y, arguments))

    def mlp(self, y, arguments):
        return self.sum(y, lambda block, y: block.mlp(y, arguments))

    def sum(self, y, branch_of):
        """The Branch of all slices of all ranks; y (B, T, C). branch_of(block, y): that of a slice."""
        ys = copies(y, len(self.slices), self.group)
        branches = [branch_of(block, y) for block, y in zip(self.slices, ys, strict=True)]
        output = total([branch.output for branch in branches], self.group)
        return Branch(output, branches[0].bias)  # each slice has the same bias

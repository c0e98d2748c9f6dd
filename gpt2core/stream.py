"""The residual stream of a GPT-2, to which every block adds its branches."""

# B batch, T time, C channels

from typing import NamedTuple

from gpt2core import ops
from gpt2core.tensor import Tensor


class Branch(NamedTuple):
    """What a block adds to the stream: `output` (B, T, C) + `bias` (C).

    The bias is separate, because it is added after the all-reduce over the ranks that divide a layer: otherwise the sum
    would contain it once for each rank.
    """

    output: Tensor
    bias: Tensor


class Stream:
    """The residual stream (B, T, C): the sum x + branch, or x if branch is None. The sum is lazy: the LayerNorm that
    reads it computes it, and then replaces x by the sum and the branch by None.

    So one kernel reads x and the branch and writes their sum and its LayerNorm. In x = x + f(ln_1(x)), ln_1 stores the
    sum, an output of the LayerNorm's node, and `+` uses it: so the gradients of both meet in this node. The object
    changes, but the array that it stands for does not: LayerNorm reads the sum as it is stored, in the dtype of the
    stream, so it may also be computed first, as between two ranks of a pipeline. The arrays x and branch are replaced
    because no backward kernel reads them: their memory is used again.
    """

    def __init__(self, x, branch=None):
        self.x, self.branch = x, branch

    def __add__(self, branch):
        return Stream(self.tensor(), branch)

    def tensor(self):
        """The stream as a Tensor (B, T, C); computes and stores the sum if no LayerNorm has done so."""
        if self.branch is not None:
            s = ops.residual_add(self.x, *self.branch)
            self.x, self.branch = s, None  # the same value, now computed
        return self.x

    def layernorm(self, w, b, eps):
        """The LayerNorm of the stream; computes and stores the sum."""
        if self.branch is None:
            s, y = ops.stream_layernorm(self.x, w, b, eps)
        else:
            s, y = ops.residual_layernorm(self.x, *self.branch, w, b, eps)
        self.x, self.branch = s, None  # the same value, now computed
        return y

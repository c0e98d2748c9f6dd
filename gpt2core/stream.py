"""The residual stream of a GPT-2, to which every block adds its branches."""

# B batch, T time, C channels

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Stream:
    """The residual stream (B, T, C): the sum x + branch, or x if branch is None.

    The LayerNorm that reads the stream computes the sum: one kernel reads x and the branch, and writes both results.
    With separate kernels, layernorm() would be

        s = self.tensor()
        return Stream(s), ops.layernorm(s, w, b, eps)

    Then s has two uses, and the chain rule adds their gradients; the fused operation adds them in its backward pass.
    """

    x: Tensor
    branch: Branch | None = None

    def __add__(self, branch):
        return Stream(self.tensor(), branch)

    def tensor(self):
        """The stream as a Tensor (B, T, C)."""
        return self.x if self.branch is None else ops.residual_add(self.x, *self.branch)

    def layernorm(self, w, b, eps):
        """(the same Stream with its sum computed, its LayerNorm (B, T, C)); their gradients meet in one node."""
        if self.branch is None:
            s, y = ops.stream_layernorm(self.x, w, b, eps)
        else:
            s, y = ops.residual_layernorm(self.x, *self.branch, w, b, eps)
        return Stream(s), y

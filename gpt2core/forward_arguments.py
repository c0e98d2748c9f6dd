"""The arguments of a forward pass."""

# B batch, T time

from typing import NamedTuple

from gpt2core.dropout import Dropout, Mask


class ForwardArguments(NamedTuple):
    """What the units of a model get in a forward pass besides their input; each unit reads what it needs.

    position: of the first token. targets (B, T), scale: see GPT2.loss. gradient: a HeadGradient (kernel_arguments.py),
    with which a backend may compute the gradients of the loss in forward, while it has the logits; or None. dropout:
    None except in training.
    """

    position: int = 0
    targets: object = None
    scale: float | None = None
    gradient: object = None
    dropout: Dropout | None = None

    def mask(self, place):
        """The Mask of a place of the model, or None."""
        return self.dropout and Mask(self.dropout, place, self.position)


FIRST_TOKENS = ForwardArguments()  # without targets

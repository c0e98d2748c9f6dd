"""The arguments of a forward pass."""

# B batch, T time

from typing import NamedTuple

from gpt2core.dropout import Dropout, Mask


class ForwardArguments(NamedTuple):
    """What the units of a model get in a forward pass besides their input; each unit reads what it needs.

    position: of the first token. targets (B, T), scale: see GPT2.loss. dloss: the array of shape () with which
    backward() will be called, or None. It is 1, except in fp16, where it scales the loss: a kernel that computes
    gradients in forward multiplies by it before it rounds them to fp16. dropout: None except in training.
    """

    position: int = 0
    targets: object = None
    scale: float | None = None
    dloss: object = None
    dropout: Dropout | None = None

    def mask(self, place):
        """The Mask of a place of the model, or None."""
        return self.dropout and Mask(self.dropout, place, self.position)


FIRST_TOKENS = ForwardArguments()  # without targets

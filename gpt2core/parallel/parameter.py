"""A parameter whose gradient is computed where it belongs, for example in a flat buffer, and perhaps later."""

import functools
from typing import NamedTuple

from gpt2core.tensor import Tensor, check_shape


class Destination(NamedTuple):
    """Where a gradient belongs: it is written to `array`, or added to it if `accumulate`.

    A backward kernel may return a function of a Destination instead of an array: it computes the gradient there, or for
    None in a new array, and returns this array. Its contents are complete after Runtime.join().
    """

    array: object
    accumulate: bool


class Parameter(Tensor):
    """A leaf that has a `buffer` for its gradient: while `grad` is None, a gradient is written there.

    Then `grad` is this array, and later gradients are added to it. Without a buffer, `grad` is a new array, as of a
    Tensor.
    """

    def __init__(self, data, backend, requires_grad=True):
        super().__init__(data, backend, requires_grad)
        self.buffer = None

    def send_to(self, array, accumulate=False):
        """Set the buffer. The next gradient is written to it, or is added to what is there if `accumulate`.

        array: in the shape of the parameter, or (M, ...) for the gradients of M micro-batches.
        """
        self.buffer, self.grad = array, array if accumulate else None

    def forget(self):
        """Remove the buffer and the gradient."""
        self.buffer = self.grad = None

    def receive(self, gradient):
        if self.buffer is None:
            super().receive(gradient)
            return
        accumulate, is_function = self.grad is not None, callable(gradient)
        out = Destination(self.grad if accumulate else self.buffer, accumulate)
        gradient = gradient(out) if is_function else gradient
        if not (is_function and gradient is out.array):  # otherwise the function has put it there
            check_shape(gradient, out.array.shape)
            self.backend.put(gradient, out)
        self.grad = out.array


def call(function):
    function()


def deliver(when):
    """The argument `deliver` of Tensor.backward for which when(function) gets the functions that add the gradients.

    They may be called after the pass, in order: when=functions.append.
    """
    return lambda leaf, gradient: when(functools.partial(leaf.receive, gradient))

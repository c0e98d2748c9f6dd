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
    """A leaf that keeps its gradient in `buffer`: the first one of a pass is written there, later ones are added.

    The buffer may have one more axis, (M, ...), for the gradients of M micro-batches. None: `grad` is a new array, as
    of a Tensor. A gradient that was assigned to `grad` and is not the buffer is added to, and the buffer is not used.
    """

    def __init__(self, data, backend, requires_grad=True):
        super().__init__(data, backend, requires_grad)
        self.buffer = None

    def receive(self, gradient):
        if self.buffer is None or not (self.grad is None or self.grad is self.buffer):
            super().receive(gradient)
            return
        out, is_function = Destination(self.buffer, accumulate=self.grad is not None), callable(gradient)
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

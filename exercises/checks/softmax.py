"""Checks of exercise 0.1: softmax and its gradient in float64."""

from unittest import mock

import numpy as np

from exercises.checks.common import expect_unchanged, random
from exercises.compare import Mismatch, expect

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum


def softmax_with_gradient(x, axis, dy):
    """(softmax(x), gradient of x) of the student's function, for the gradient dy of the result."""
    from gpt2core import primitives
    from gpt2core.tensor import Tensor
    from stage0_serial.numpy_backend import NumpyBackend

    leaf = Tensor(x.copy(), NumpyBackend("fp64"), requires_grad=True)
    with mock.patch.object(Tensor, "from_op", checked(Tensor.from_op)):
        result = primitives.softmax(leaf, axis)
    expect_unchanged("softmax", "its input x.data", leaf.data, x)
    if not isinstance(result, Tensor):
        raise Mismatch("the result is not a Tensor", "Return Tensor.from_op(y, (x,), backward).")
    if not result.requires_grad:
        raise Mismatch("the result has no gradient", "Create the result by Tensor.from_op(y, (x,), backward).")
    y, dy_given = np.array(result.data), dy.copy()
    result.backward(dy_given)
    expect_unchanged("backward", "its argument dy", dy_given, dy)
    expect_unchanged("backward", "x.data", leaf.data, x)
    expect_unchanged("backward", "y", result.data, y)
    return y, leaf.grad


def checked(from_op):
    """Tensor.from_op, which raises Mismatch unless the parents are a tuple and backward returns a tuple."""

    def checked_from_op(y, parents, backward):
        if not isinstance(parents, tuple | list):
            raise Mismatch(
                f"the parents in Tensor.from_op are a {type(parents).__name__}", "The parents are a tuple: (x,)."
            )

        def checked_backward(*gradients):
            result = backward(*gradients)
            if not isinstance(result, tuple | list):
                kind = "None" if result is None else f"a {type(result).__name__}"
                raise Mismatch(f"backward returns {kind}", "backward must return a tuple: (dx,).")
            return result

        return from_op(y, parents, checked_backward)

    return checked_from_op


def softmax_rows():
    x, dy = random().standard_normal((3, 5)), np.ones((3, 5))
    for axis in (-1, 0):
        e, e2 = np.exp(x), np.exp(x - x.max(axis, keepdims=True))
        want = e / e.sum(axis, keepdims=True)
        wrong = [
            (e, "The result is exp(x): it is not divided by the sum of the exponentials along `axis`."),
            (e2, "The result is not divided by the sum along `axis`."),
            (e / e.sum(-1 - axis, keepdims=True), "The sum runs along the wrong axis: use the argument `axis`."),
            (e2 / e2.sum(-1 - axis, keepdims=True), "The sum runs along the wrong axis: use the argument `axis`."),
            (e / e.sum(), "The sum runs over the whole array: sum along `axis`, with keepdims=True."),
        ]
        got, _ = softmax_with_gradient(x, axis, dy)
        expect(f"softmax(x, axis={axis})", got, want, FP64, wrong, "y = e / e.sum(axis, keepdims=True) in softmax")


def softmax_large():
    x = random().standard_normal((3, 5)) + [[1000], [0], [-1000]]
    e = np.exp(x - x.max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        plain, whole = np.exp(x), np.exp(x - x.max())
        wrong = [
            (
                plain / plain.sum(-1, keepdims=True),
                "exp(1000) is infinite, exp(-1000) is 0: subtract the maximum along `axis` from x before exp.",
            ),
            (
                whole / whole.sum(-1, keepdims=True),
                "The maximum of the whole array is subtracted: take the maximum along `axis`, with keepdims=True.",
            ),
        ]
        got, _ = softmax_with_gradient(x, -1, np.ones((3, 5)))
    name = "softmax of rows near 1000, 0 and -1000"
    expect(name, got, want, 1e-10, wrong, "the subtraction of the maximum in softmax")


def softmax_gradient():
    x, dy = random().standard_normal((3, 5)), random(1).standard_normal((3, 5))
    for axis in (-1, 0):
        e = np.exp(x)
        y = e / e.sum(axis, keepdims=True)
        total = (dy * y).sum(axis, keepdims=True)
        wrong = [
            (y * dy, "The gradient lacks the term sum(dy * y): every element of y depends on every element of x."),
            (y * (1 - y) * dy, "y * (1 - y) is only the diagonal of the Jacobian: use dy - sum(dy * y)."),
            (y * (dy + total), "The sign of sum(dy * y) is wrong: it is subtracted from dy."),
            (y * (dy - dy.sum(axis, keepdims=True)), "The sum lacks y: it is sum(dy * y), not sum(dy)."),
            (dy - total, "The gradient lacks the factor y in front of (dy - sum(dy * y))."),
            (y * (dy - (dy * y).sum(-1 - axis, keepdims=True)), "sum(dy * y) runs along the wrong axis: use `axis`."),
        ]
        _, got = softmax_with_gradient(x, axis, dy)
        expect(f"the gradient of softmax(x, axis={axis})", got, y * (dy - total), FP64, wrong, "backward in softmax")

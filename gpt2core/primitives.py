"""Elementary operations (add, matmul, softmax, slices, ...): lessons and tests build reference models from them."""

# dy is the gradient of the result of an operation, dx that of x.

from gpt2core.tensor import ShapeError, Tensor


def add(a, b):
    """a + b with broadcasting."""
    a, b = operands(a, b)
    y = broadcasting(a, b, lambda x, y: x + y)
    return Tensor.from_op(y, (a, b), lambda dy: (unbroadcast(a, dy), unbroadcast(b, dy)))


def multiply(a, b):
    """a * b, elementwise with broadcasting."""
    a, b = operands(a, b)
    y = broadcasting(a, b, lambda x, y: x * y)
    return Tensor.from_op(y, (a, b), lambda dy: (unbroadcast(a, dy * b.data), unbroadcast(b, dy * a.data)))


def divide(a, b):
    """a / b, elementwise with broadcasting."""
    a, b = operands(a, b)
    y = broadcasting(a, b, lambda x, y: x / y)
    return Tensor.from_op(y, (a, b), lambda dy: (unbroadcast(a, dy / b.data), unbroadcast(b, -dy * y / b.data)))


def power(x, exponent):
    """x ** exponent for a constant number."""
    y = x.data**exponent
    reduced = exponent and exponent - 1  # exponent 0: the slope is 0 * x**0 = 0; x**-1 would be inf at x = 0
    return Tensor.from_op(y, (x,), lambda dy: (dy * exponent * x.data**reduced,))


def matmul(a, b):
    """a (..., n, k) @ b (..., k, m) -> (..., n, m), leading axes broadcast."""
    a, b = operands(a, b)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"matmul: {a.shape} @ {b.shape}: the inner sizes must be equal, and ndim at least 2")
    y = broadcasting(a, b, lambda x, y: x @ y)

    def backward(dy):
        return unbroadcast(a, dy @ b.data.swapaxes(-1, -2)), unbroadcast(b, a.data.swapaxes(-1, -2) @ dy)

    return Tensor.from_op(y, (a, b), backward)


def exp(x):
    """e ** x, elementwise."""
    y = x.backend.xp.exp(x.data)
    return Tensor.from_op(y, (x,), lambda dy: (dy * y,))


def log(x):
    """The natural logarithm, elementwise."""
    return Tensor.from_op(x.backend.xp.log(x.data), (x,), lambda dy: (dy / x.data,))


def tanh(x):
    """The hyperbolic tangent, elementwise."""
    y = x.backend.xp.tanh(x.data)
    return Tensor.from_op(y, (x,), lambda dy: (dy * (1 - y * y),))


def softmax(x, axis=-1):
    """exp(x) / sum(exp(x)) along one axis."""
    e = x.backend.xp.exp(x.data - x.data.max(axis, keepdims=True))
    y = e / e.sum(axis, keepdims=True)
    return Tensor.from_op(y, (x,), lambda dy: (y * (dy - (dy * y).sum(axis, keepdims=True)),))


def sum(x, axis=None, keepdims=False):
    """The sum over `axis`: an axis, a tuple of axes, or None for all axes."""
    xp = x.backend.xp
    y = xp.asarray(x.data.sum(axis, keepdims=keepdims))
    axes = range(x.ndim) if axis is None else [i % x.ndim for i in (axis if isinstance(axis, tuple) else (axis,))]
    kept = [1 if i in axes else extent for i, extent in enumerate(x.shape)]

    def backward(dy):
        return (xp.broadcast_to(dy.reshape(kept), x.shape),)

    return Tensor.from_op(y, (x,), backward)


def mean(x, axis=None, keepdims=False):
    """The mean over `axis`, which is given as for sum()."""
    total = sum(x, axis, keepdims)
    return multiply(total, total.data.size / x.data.size)


def reshape(x, *shape):
    """The same elements in another shape, as a view if possible, otherwise as a copy."""
    try:
        y = x.data.reshape(*shape)
    except ValueError:
        raise ShapeError(f"reshape: {x.data.size} elements of shape {x.shape} do not fit {shape}") from None
    return Tensor.from_op(y, (x,), lambda dy: (dy.reshape(x.shape),))


def transpose(x, *axes):
    """The axes in the order `axes` (reversed by default), as a view."""
    axes = axes or tuple(reversed(range(x.ndim)))
    if sorted(axis % x.ndim for axis in axes) != list(range(x.ndim)):
        raise ShapeError(f"transpose: axes {axes} are not a permutation of the {x.ndim} axes of shape {x.shape}")
    inverse = sorted(range(x.ndim), key=lambda i: axes[i] % x.ndim)
    return Tensor.from_op(x.data.transpose(axes), (x,), lambda dy: (dy.transpose(inverse),))


def getitem(x, index):
    """x[index] for integers, slices and integer arrays; a view for integers and slices."""

    def backward(dy):
        dx = x.backend.zeros(x.shape, x.dtype)
        x.backend.xp.add.at(dx, index, dy)  # not dx[index] += dy: an element may occur several times in `index`
        return (dx,)

    return Tensor.from_op(x.data[index], (x,), backward)


def where(condition, a, b):
    """The elements of a where the array `condition` is true, and of b where it is false, with broadcasting."""
    a, b = operands(a, b)
    xp = a.backend.xp
    y = broadcasting(a, b, lambda x, y: xp.where(condition, x, y))
    return Tensor.from_op(
        y, (a, b), lambda dy: (unbroadcast(a, xp.where(condition, dy, 0)), unbroadcast(b, xp.where(condition, 0, dy)))
    )


def concatenate(tensors, axis=0):
    """The tensors joined along one axis; all other axes must be equal."""
    xp, edges, end = tensors[0].backend.xp, [], 0
    for tensor in tensors[:-1]:
        edges.append(end := end + tensor.shape[axis])
    try:
        y = xp.concatenate([tensor.data for tensor in tensors], axis)
    except ValueError:
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        raise ShapeError(f"concatenate: shapes {shapes} must be equal except along axis {axis}") from None
    return Tensor.from_op(y, tuple(tensors), lambda dy: tuple(xp.split(dy, edges, axis)))


def operands(a, b):
    """a and b as tensors. At least one is a tensor; a number or an array gets the backend and dtype of this tensor."""
    tensor = a if isinstance(a, Tensor) else b
    return tuple(
        t if isinstance(t, Tensor) else Tensor(tensor.backend.asarray(t, tensor.dtype), tensor.backend) for t in (a, b)
    )


def broadcasting(a, b, function):
    """function(a.data, b.data); raises ShapeError if their shapes do not broadcast."""
    try:
        return function(a.data, b.data)
    except ValueError:
        raise ShapeError(f"shapes {a.shape} and {b.shape} do not broadcast together") from None


def unbroadcast(x, dy):
    """The gradient of x, which was broadcast to the shape of dy: dy summed over the axes along which x was repeated."""
    extra = dy.ndim - x.ndim
    axes = tuple(range(extra)) + tuple(i + extra for i in range(x.ndim) if x.shape[i] == 1 != dy.shape[i + extra])
    return dy.sum(axes, keepdims=True).reshape(x.shape) if axes else dy


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__mul__ = Tensor.__rmul__ = multiply
Tensor.__neg__ = lambda x: multiply(x, -1)
Tensor.__sub__ = lambda a, b: add(a, multiply(b, -1) if isinstance(b, Tensor) else -b)
Tensor.__rsub__ = lambda a, b: add(multiply(a, -1), b)
Tensor.__truediv__ = divide
Tensor.__rtruediv__ = lambda a, b: divide(b, a)
Tensor.__matmul__ = matmul
Tensor.__rmatmul__ = lambda a, b: matmul(b, a)
Tensor.__pow__ = power
Tensor.__getitem__ = getitem
Tensor.reshape, Tensor.transpose, Tensor.sum, Tensor.mean = reshape, transpose, sum, mean

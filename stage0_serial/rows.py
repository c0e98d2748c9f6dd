"""Views and slices of the rows of an array (..., C)."""

BLOCK = 1 << 16  # elements of one elementwise block: a few of them fit in a core's second-level cache


def rows(x):
    """(..., C) as (N, C), a view."""
    return x.reshape(-1, x.shape[-1])


def micro_batches(x):
    """The number M of micro-batches in activations x: (M, B, T, C), or (B, T, C) and other shapes for one."""
    return x.shape[0] if x.ndim == 4 else 1


def sequences(x):
    """The sequences (B, T, C) of activations x (B, T, C), or of all micro-batches of x (M, B, T, C)."""
    return x.reshape(-1, *x.shape[-2:])


def block_rows(x):
    """The number of rows of x (N, C) in a block: the smallest number with at least BLOCK elements."""
    return -(-BLOCK // x.shape[1])  # rounded up: 512 rows of 384 elements are three blocks, not three and two rows


def blocks(x, first=0):
    """Slices that divide the rows of x (N, C), numbered from `first`, into cache-sized blocks."""
    return slices(first, first + len(x), block_rows(x))


def slices(start, stop, length):
    """Slices of `length`, the last one shorter, that cover range(start, stop)."""
    return [slice(i, min(i + length, stop)) for i in range(start, stop, length)]

"""Divide n rows into contiguous parts whose lengths differ by at most one."""


def even_slices(n, parts):
    """`parts` contiguous slices that cover range(n); their lengths differ by at most one."""
    edges = [n * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

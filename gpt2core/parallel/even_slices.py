"""Dividing n rows into contiguous parts whose lengths differ by one at most."""


def even_slices(n, parts):
    """n rows in `parts` contiguous slices whose lengths differ by one at most."""
    edges = [n * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

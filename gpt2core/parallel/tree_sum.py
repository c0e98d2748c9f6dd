"""The canonical order of a sum: one fixed binary tree over micro-batches and ranks.

Floating-point addition is not associative, so the order must be fixed. The canonical order adds neighbours first, then
their sums, and so on. If the number of items is odd, the last item moves up one level:

    8 parts  ((0+1) + (2+3)) + ((4+5) + (6+7))          5 parts  ((0+1) + (2+3)) + 4

A thread or rank that owns a whole subtree can add it without the others; the sum over the owners completes the tree.
"""

import operator


def tree_reduce(items, add):
    """Combine `items` (any iterable, at least one item) by `add(left, right)` in the canonical order.

    Items are read one at a time, and at most log2(number of items) + 1 partial results are alive, so the items of
    a generator need not all be in memory. `add` may reuse its left operand: lambda a, b: np.add(a, b, out=a).
    A single item is returned unchanged. Raises ValueError for an empty iterable.
    """
    partials = []  # (height, result of 2**height items), heights strictly decrease: the digits of a binary counter
    for item in items:
        height = 0
        while partials and partials[-1][0] == height:
            item, height = add(partials.pop()[1], item), height + 1
        partials.append((height, item))
    if not partials:
        raise ValueError("a tree of 0 items has no result: give at least 1")
    total = partials.pop()[1]
    while partials:  # subtrees without a neighbour of their height, smallest first
        total = add(partials.pop()[1], total)
    return total


def tree_sum(arrays):
    """Sum of `arrays` (equal shape and dtype, or plain numbers) in the canonical order, in their own dtype."""
    return tree_reduce(arrays, operator.add)

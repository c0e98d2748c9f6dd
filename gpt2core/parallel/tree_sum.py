"""The canonical order of a sum: one fixed binary tree over micro-batches and ranks.

Floating-point addition is not associative: the bits of a sum depend on its order. The canonical order adds neighbours
first, then their sums, and so on. If the number of items of a level is odd, the last item moves up one level:

    8 items  ((0+1) + (2+3)) + ((4+5) + (6+7))          5 items  ((0+1) + (2+3)) + 4

A thread or rank that has all items of a subtree adds them first; the sum over threads and ranks completes the tree.
"""

import operator


def tree_reduce(items, add):
    """Combine `items` (any iterable, at least one item) by `add(left, right)` in the canonical order.

    Items are read one at a time, and at most log2(number of items) + 1 partial results are in memory, so `items` may be
    a generator of large arrays. `add` may write to its left operand: lambda a, b: np.add(a, b, out=a).
    A single item is returned unchanged. Raises ValueError for an empty iterable.
    """
    partials = []  # (height, result of 2**height items), with decreasing heights: the 1 digits of a binary counter
    for item in items:
        height = 0
        while partials and partials[-1][0] == height:
            item, height = add(partials.pop()[1], item), height + 1
        partials.append((height, item))
    if not partials:
        raise ValueError("a tree of 0 items has no result: give at least 1")
    total = partials.pop()[1]
    while partials:  # the remaining subtrees have different heights: add them, smallest first
        total = add(partials.pop()[1], total)
    return total


def tree_sum(arrays):
    """The sum of `arrays` (of one shape and dtype, or Python numbers) in the canonical order, in the same dtype."""
    return tree_reduce(arrays, operator.add)

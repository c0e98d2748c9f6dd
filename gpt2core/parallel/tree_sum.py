"""One order for every sum: a binary tree over micro-batches and ranks gives the same bits for any number of ranks.

Floating-point addition is not associative. Neighbours are added first, then those sums, and so on; the last of an odd
number is carried up:

    8 parts  ((0+1) + (2+3)) + ((4+5) + (6+7))          5 parts  ((0+1) + (2+3)) + 4

Whoever owns a whole subtree, a thread or a rank, may add it up alone: the tree over the owners is then the same tree.
"""

import operator


def tree_reduce(items, add):
    """Combine `items` (any iterable, at least one item) by `add(left, right)` in the order of the canonical tree.

    Items are drawn one at a time and at most log2(number of items) + 1 partial results are alive, so a generator of
    gradients needs no room for all of them. `add` may reuse its left operand: lambda a, b: np.add(a, b, out=a).
    A single item is returned as it is. Raises ValueError when there is none.
    """
    partials = []  # (height, result of 2**height items), heights strictly falling: the digits of a binary counter
    for item in items:
        height = 0
        while partials and partials[-1][0] == height:
            item, height = add(partials.pop()[1], item), height + 1
        partials.append((height, item))
    if not partials:
        raise ValueError("a tree of 0 items has no result: give at least 1")
    total = partials.pop()[1]
    while partials:  # the odd ones that were carried up
        total = add(partials.pop()[1], total)
    return total


def tree_sum(arrays):
    """Sum of `arrays` (equal shape and dtype, or plain numbers) in the canonical tree, in their own dtype."""
    return tree_reduce(arrays, operator.add)

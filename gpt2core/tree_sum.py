"""The canonical order of a sum: one fixed binary tree over micro-batches and ranks.

Floating-point addition is not associative: the bits of a sum depend on its order. The canonical order adds neighbours
first, then their sums, and so on. If the number of items of a level is odd, the last item moves up one level:

    8 items  ((0+1) + (2+3)) + ((4+5) + (6+7))          5 items  ((0+1) + (2+3)) + 4

A thread or rank that has all items of a subtree adds them first; the sum over threads and ranks completes the tree.
"""

import operator


def additions(number, last=False):
    """How many additions follow item `number` (from 0), which is put on a stack of partial results.

    Each addition replaces the two top entries by their sum. It is done when both are sums of equally many items, as in
    a binary counter with carry: once for each 1 at the end of `number`. After the last item all entries are added.
    """
    return number.bit_count() if last else (~number & (number + 1)).bit_length() - 1


def tree_reduce(items, add):
    """Combine `items` (any iterable, at least one item) by `add(left, right)` in the canonical order.

    Items are read one at a time, and at most log2(number of items) + 1 partial results are in memory, so `items` may be
    a generator of large arrays. `add` may write to its left operand: lambda a, b: np.add(a, b, out=a).
    A single item is returned unchanged. Raises ValueError for an empty iterable.
    """
    stack, number = [], 0
    for item in items:
        number += 1
        carry = number
        while carry % 2 == 0:  # two sums of equally many items: see additions()
            item, carry = add(stack.pop(), item), carry // 2
        stack.append(item)
        del item  # otherwise it would stay in memory while the next item is computed
    if not stack:
        raise ValueError("a tree of 0 items has no result: give at least 1")
    total = stack.pop()
    while stack:
        total = add(stack.pop(), total)
    return total


def tree_sum(arrays):
    """The sum of `arrays` (of one shape and dtype, or Python numbers) in the canonical order, in the same dtype."""
    return tree_reduce(arrays, operator.add)

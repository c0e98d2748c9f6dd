"""The number of micro-batches that a worker computes by one call of each kernel; no bit of the results may change.

A row of activations, or of their gradients, depends only on its own sequence. So the rows of several micro-batches can
share one matrix product. A gradient of a parameter is a sum over rows: if Backend.merges_micro_batches, a kernel
computes this sum for each micro-batch, and adds the sums in the canonical order (tree_sum.py).
"""

import numpy as np

from gpt2core.data import even_slices

ACTIVATIONS = 450e6  # bytes that the activations of merged micro-batches may take, over all workers of a process
MOST_PRODUCTS, FLOPS = 16, 200_000_000  # of the comparison of a matrix: FLOPS take a few milliseconds


def merged_micro_batches(work, threads, group):
    """The number of merged micro-batches of a Workload: a power of two that divides the micro-batches of one worker.

    threads: the number of workers. The result is the largest number whose activations fit in ACTIVATIONS, and that
    changes no bit of a matrix product with this BLAS. It is 1 if the backend does not merge, or if the micro-batches
    differ in size. All ranks of the group get the same number.
    """
    backend, (B, T), count, merged = work.backend, work.batch_shape, work.count, 1
    if backend.merges_micro_batches and B % count == 0:
        merged = most_merged(work.config, threads, count, (B, T), np.dtype(backend.dtype).itemsize)
        rows, shapes = B // count * T, work.arena.shapes
        matrices = {size for name, size in shapes.items() if len(size) == 2 and not name.endswith("wpe.weight")}
        while merged > 1 and not all(rows_are_independent(backend, rows, merged, *size) for size in matrices):
            merged //= 2
    return min(group.all_gather_object(merged))


def most_merged(config, threads, count, shape, itemsize):
    """The largest number of merged micro-batches whose activations fit in ACTIVATIONS.

    threads: of each rank; the other arguments are those of merged_micro_batches(). itemsize: bytes of a number.
    """
    (B, T), merged = shape, 1
    rows, per_worker = B // count * T, count // threads  # rows of a micro-batch, micro-batches of a worker
    limit = ACTIVATIONS / (threads * rows * config.n_layer * kept_numbers(config, T) * itemsize)
    while per_worker % (2 * merged) == 0 and 2 * merged <= limit:
        merged *= 2
    return merged


def kept_numbers(config, seq_len):
    """The numbers for each token that forward of a block keeps for backward on the host."""
    return 18 * config.n_embd + config.n_head * seq_len


def rows_are_independent(backend, rows, parts, C, K):
    """Whether (parts * rows, C) @ (C, K) has the bits of `parts` separate products; also for the input's gradient.

    Several products are compared if they are small, because a BLAS may add only a few of their elements in another
    order, and another order often gives the same bits.
    """
    products = max(1, min(MOST_PRODUCTS, FLOPS // (4 * parts * rows * C * K)))
    return all(has_bits_of_parts(backend, seed, rows, parts, C, K) for seed in range(products))


def has_bits_of_parts(backend, seed, rows, parts, C, K):
    """rows_are_independent() for the random numbers of one seed."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((C, K)).astype(backend.dtype)
    for matrix in (w, w.T):
        x = rng.standard_normal((parts * rows, len(matrix))).astype(backend.dtype)
        cancel_addends(rng, x, matrix)
        together = backend.linear_forward(x, matrix)
        for part in even_slices(len(x), parts):
            if not np.array_equal(together[part], backend.linear_forward(x[part], matrix)):
                return False
    return True


def cancel_addends(rng, x, w):
    """Change x (N, C) and w (C, K) so that x @ w is 0 up to rounding errors, and one addend if C is odd.

    Each addend also occurs with the opposite sign, in a random order. So the bits of the product are those of the
    rounding errors, which depend on the order of the additions more than the bits of a large sum.
    """
    C = len(w)
    one, other = rng.permutation(C)[: C // 2 * 2].reshape(2, -1)
    x[:, other], w[other] = -x[:, one], w[one]

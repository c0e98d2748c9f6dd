"""Only the matrix products of one training step: a lower bound for the time of a NumPy step with this BLAS.

train_step.py measures this module. Each Python thread uses one BLAS thread and has its own share of the batch. A linear
layer has three products: y = x w, dx = dy w^T, dw = x^T dy. Causal attention has six for each block of 64 queries; they
skip the blocks of scores above the diagonal, and read strided views of the q, k, v projection (T, 3, H, D), as in the
NumPy backend. The inputs are random numbers, because only the time is measured.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

QUERY_BLOCK = 64

# N rows of one thread, T time, C channels, H heads, D = C // H, V vocabulary


def make_trainer(config, batch_size, seq_len, threads):
    """Return `step(inputs, targets)`, which computes the products of one step, ignores the tokens and returns None."""
    sequences_per_thread = [batch_size * (i + 1) // threads - batch_size * i // threads for i in range(threads)]
    weights = make_weights(config, np.random.default_rng(0))
    work = [list(products(config, weights, sequences, seq_len)) for sequences in sequences_per_thread]
    pool = ThreadPoolExecutor(threads)

    def step(inputs, targets):
        list(pool.map(multiply_all, work))

    return step


def multiply_all(triples):
    """Compute out = a b for each triple (a, b, out)."""
    for a, b, out in triples:
        np.matmul(a, b, out=out)


def make_weights(config, rng):
    """The weight matrices (in, out) of all linear layers.

    These are, for each layer, the q, k, v projection, the output projection and the two of the MLP; then lm_head.
    """
    C, V = config.n_embd, config.vocab_size
    shapes = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] * config.n_layer + [(C, V)]
    return [0.02 * rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def products(config, weights, sequences, T):
    """Yield (a, b, out) of all products of one thread: `sequences` sequences of T tokens, forward and backward.

    All layers use the same activation buffers.
    """
    rng = np.random.default_rng(1)
    C, H, N = config.n_embd, config.n_head, sequences * T
    random = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    widths = {width for weight in weights for width in weight.shape}
    x, dy = ({width: random(N, width) for width in widths} for _ in range(2))
    y, dx = ({width: np.empty((N, width), np.float32) for width in widths} for _ in range(2))
    for w in weights:
        fan_in, fan_out = w.shape
        yield x[fan_in], w, y[fan_out]
        yield dy[fan_out], w.T, dx[fan_in]
        yield x[fan_in].T, dy[fan_out], np.empty_like(w)
    qkv, dqkv = (buffer[3 * C].reshape(sequences, T, 3, H, C // H) for buffer in (x, dx))
    heads, dheads = (buffer[C].reshape(sequences, T, H, C // H) for buffer in (y, dy))
    scores, dscores = random(H, T, T), np.empty((H, T, T), np.float32)
    attention = [
        list(attention_products(qkv[i], dqkv[i], heads[i], dheads[i], scores, dscores, T)) for i in range(sequences)
    ]
    yield from chain.from_iterable(attention * config.n_layer)


def attention_products(qkv, dqkv, heads, dheads, scores, dscores, T):
    """Yield the six products (a, b, out) of each query block of one sequence, all heads at once.

    qkv, dqkv (T, 3, H, D); heads, dheads (T, H, D): the attention output and its gradient; scores, dscores (H, T, T).
    """
    q, k, v = qkv.transpose(1, 2, 0, 3)  # each (H, T, D)
    dq, dk, dv = dqkv.transpose(1, 2, 0, 3)
    y, dy = heads.transpose(1, 0, 2), dheads.transpose(1, 0, 2)
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        # rows: the queries of this block; keys: those to which they attend; later: queries that attend to keys `rows`
        rows, keys, later = slice(start, end), slice(0, end), slice(start, T)
        s, ds = scores[:, rows, keys], dscores[:, rows, keys]
        yield q[:, rows], k[:, keys].transpose(0, 2, 1), ds
        yield s, v[:, keys], y[:, rows]
        yield dy[:, rows], v[:, keys].transpose(0, 2, 1), ds
        yield s, k[:, keys], dq[:, rows]
        yield scores[:, later, rows].transpose(0, 2, 1), dy[:, later], dv[:, rows]
        yield scores[:, later, rows].transpose(0, 2, 1), q[:, later], dk[:, rows]

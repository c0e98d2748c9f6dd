"""The token and position embeddings, and their gradients, which are sums in a fixed order without atomic additions.

    y[n] = wte[ids[n] - first] + wpe[position + n % T]
    dwte[v] = sum of dy[n] over all n with ids[n] - first = v;  dwpe[position + t] = sum of dy[b, t] over all b

`first` is the lowest token id in wte: not 0 if the vocabulary is divided into slices. `position` is the position of the
first token of each sequence: not 0 if keys and values of earlier tokens are in a cache.

The host sorts the row indices of dy by token (sort_tokens). The numbers of one token's rows are then adjacent, and one
program per token adds these rows. A frequent token may have a tenth of all rows. So separate programs first add the
rows of a token in chunks of CHUNK rows; no program then has a long loop.
"""

# B batch, T time, N = B*T rows, C channels, V tokens in wte: the vocabulary, or one slice of it

from collections import namedtuple

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK_ROWS, BLOCK_COLS = 8, 256  # the tile of forward_kernel and chunks_kernel
TOKEN_COLS = 1024  # most columns of a tile of tokens_kernel; such a tile has 4 rows: most tokens have one or two rows
POSITION_COLS = 128  # columns of the tile of positions_kernel
CHUNK = 64  # rows of one token that one program of chunks_kernel adds

SortedTokens = namedtuple("SortedTokens", "order starts chunk_starts chunk_tokens")  # see sort_tokens()


def sort_tokens(ids, count):
    """The SortedTokens of the token ids (B, T), a NumPy array, for the tokens below `count`, in all slices.

    order (N): the row indices, sorted by token. starts (count + 1): the rows of token v are
    order[starts[v] : starts[v + 1]]. A token with r rows has r // CHUNK chunks. The chunks of all tokens are numbered
    in the order of the tokens: chunk_starts (count + 1) has the number of each token's first chunk. chunk_tokens
    (N // CHUNK): element i is the token of chunk number i, or `count` if there are at most i chunks. All are int32.
    Their shapes depend only on N and `count`, so one CUDA graph serves all batches.
    """
    ids = ids.reshape(-1)
    keys = ids.astype(np.uint16) if ids.max() < 1 << 16 else ids  # NumPy sorts 16-bit integers faster (radix sort)
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=count))])[: count + 1]
    chunk_starts = np.concatenate([[0], np.cumsum(np.diff(starts) // CHUNK)])
    chunk_tokens = np.searchsorted(chunk_starts, np.arange(ids.size // CHUNK), side="right") - 1
    return SortedTokens(*(array.astype(np.int32) for array in (order, starts, chunk_starts, chunk_tokens)))


def chunk_sums_shape(n, channels):
    """The shape of the float32 scratch of token_gradient() for n rows."""
    return max(1, n // CHUNK), channels


def embedding_forward(y, ids, wte, wpe, position=0, first=0):
    """y (B, T, C) = wte[ids - first] + wpe[position : position + T].

    ids (B, T): integers. wte (V, C). wpe (block_size, C), or None to add no position embedding. For an id outside
    [first, first + V), 0 is used instead of a row of wte.
    """
    n, (count, channels) = ids.size, wte.shape
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(channels, BLOCK_COLS))
    arguments = y, ids, wte, wpe, n, ids.shape[1], count, channels, position, first
    launch(forward_kernel, grid, *arguments, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=4)


def token_gradient(dwte, chunk_sums, sorted_tokens, dy, accumulate=False, first=0):
    """Compute dwte (V, C) float32 of the tokens from `first` on, from dy (B, T, C) and the SortedTokens of the batch.

    chunk_sums: float32 scratch of chunk_sums_shape(N, C). accumulate: add to the contents of dwte instead of
    overwriting them: in a tied model, dwte already holds the gradient of lm_head.
    """
    channels, count, chunks = dy.shape[-1], dwte.shape[0], sorted_tokens.chunk_tokens.shape[0]
    options = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, CHUNK=CHUNK, num_warps=4)
    if chunks:
        grid = (chunks, triton.cdiv(channels, BLOCK_COLS))
        launch(chunks_kernel, grid, chunk_sums, *sorted_tokens, dy, first, count, channels, **options)
    width = min(TOKEN_COLS, triton.next_power_of_2(channels))
    grid = (count, triton.cdiv(channels, width))
    options = dict(BLOCK_ROWS=4 * TOKEN_COLS // width, BLOCK_COLS=width, CHUNK=CHUNK, num_warps=4)
    arguments = dwte, chunk_sums, *sorted_tokens[:3], dy, first, channels
    launch(tokens_kernel, grid, *arguments, ACCUMULATE=accumulate, **options)


def position_gradient(dwpe, dy, position=0):
    """Compute dwpe (block_size, C) float32 from dy (B, T, C): the sums over the sequences, 0 for other positions."""
    batch, time, channels = dy.shape
    grid = (dwpe.shape[0], triton.cdiv(channels, POSITION_COLS))
    arguments = dwpe, dy, batch, time, channels, position
    launch(positions_kernel, grid, *arguments, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=POSITION_COLS, num_warps=1)


@triton.jit
def forward_kernel(
    y_ptr, ids_ptr, wte_ptr, wpe_ptr, n, time, count, n_cols, position, first,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_ROWS, C / BLOCK_COLS): each program computes one tile of y (N, C). time: T; count: V."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
    tokens = tl.load(ids_ptr + rows, rows < n, -1).to(tl.int64) - first
    token_mask = (tokens >= 0) & (tokens < count)
    x = tl.load(wte_ptr + tokens[:, None] * n_cols + cols[None, :], mask & token_mask[:, None], 0).to(tl.float32)
    if wpe_ptr is not None:
        positions = (position + rows % time).to(tl.int64)
        x += tl.load(wpe_ptr + positions[:, None] * n_cols + cols[None, :], mask, 0).to(tl.float32)
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :], x, mask)


@triton.jit
def add_sorted_rows(acc, order_ptr, dy_ptr, begin, end, n_cols, cols, BLOCK_ROWS: tl.constexpr):
    """Add the rows order[begin:end] of dy to acc (BLOCK_ROWS, BLOCK_COLS), BLOCK_ROWS rows at a time; returns acc."""
    for start in tl.range(begin, end, BLOCK_ROWS):
        offs = start + tl.arange(0, BLOCK_ROWS)
        rows = tl.load(order_ptr + offs, offs < end, 0).to(tl.int64)
        mask = (offs < end)[:, None] & (cols < n_cols)[None, :]
        acc += tl.load(dy_ptr + rows[:, None] * n_cols + cols[None, :], mask, 0).to(tl.float32)
    return acc


@triton.jit
def chunks_kernel(
    chunk_sums_ptr, order_ptr, starts_ptr, chunk_starts_ptr, chunk_tokens_ptr, dy_ptr, first, count, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """chunk_sums[chunk] float32 = the sum of the CHUNK rows of dy that this chunk contains.

    Grid (N // CHUNK, C / BLOCK_COLS): each program adds BLOCK_COLS columns of one chunk, if there is such a chunk, and
    its token is one of the `count` tokens from `first` on.
    """
    chunk = tl.program_id(0)
    token = tl.load(chunk_tokens_ptr + chunk)
    if (token >= first) & (token < first + count):
        begin = tl.load(starts_ptr + token) + (chunk - tl.load(chunk_starts_ptr + token)) * CHUNK
        cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        acc = add_sorted_rows(acc, order_ptr, dy_ptr, begin, begin + CHUNK, n_cols, cols, BLOCK_ROWS)
        tl.store(chunk_sums_ptr + chunk * n_cols + cols, tl.sum(acc, 0), cols < n_cols)


@triton.jit
def tokens_kernel(
    dwte_ptr, chunk_sums_ptr, order_ptr, starts_ptr, chunk_starts_ptr, dy_ptr, first, n_cols,
    ACCUMULATE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (V, C / BLOCK_COLS): each program computes BLOCK_COLS columns of dwte[token - first].

    It adds the token's chunk sums, and then the rows of dy after its last chunk.
    """
    token = first + tl.program_id(0)
    begin, end = tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)
    if begin < end or not ACCUMULATE:  # with ACCUMULATE, dwte does not change for a token without rows
        cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        col_mask = cols < n_cols
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        chunk_begin, chunk_end = tl.load(chunk_starts_ptr + token), tl.load(chunk_starts_ptr + token + 1)
        for start in tl.range(chunk_begin, chunk_end, BLOCK_ROWS):
            chunks = start + tl.arange(0, BLOCK_ROWS)
            mask = (chunks < chunk_end)[:, None] & col_mask[None, :]
            acc += tl.load(chunk_sums_ptr + chunks[:, None] * n_cols + cols[None, :], mask, 0)
        after_chunks = begin + (chunk_end - chunk_begin) * CHUNK
        acc = add_sorted_rows(acc, order_ptr, dy_ptr, after_chunks, end, n_cols, cols, BLOCK_ROWS)
        dwte_ptrs = dwte_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols
        dwte = tl.sum(acc, 0)
        if ACCUMULATE:
            dwte += tl.load(dwte_ptrs, col_mask, 0)
        tl.store(dwte_ptrs, dwte, col_mask)


@triton.jit
def positions_kernel(
    dwpe_ptr, dy_ptr, batch, time, n_cols, position, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):  # fmt: skip
    """Grid (block_size, C / BLOCK_COLS): each program computes BLOCK_COLS columns of one row of dwpe.

    The row is the sum over the batch, or 0 if the batch does not use this position.
    """
    row = tl.program_id(0)  # of dwpe
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    t = row - position
    if (t >= 0) & (t < time):
        for start in tl.range(0, batch, BLOCK_ROWS):
            b = start + tl.arange(0, BLOCK_ROWS)
            mask = (b < batch)[:, None] & (cols < n_cols)[None, :]
            rows = b.to(tl.int64) * time + t
            acc += tl.load(dy_ptr + rows[:, None] * n_cols + cols[None, :], mask, 0).to(tl.float32)
    tl.store(dwpe_ptr + row.to(tl.int64) * n_cols + cols, tl.sum(acc, 0), cols < n_cols)

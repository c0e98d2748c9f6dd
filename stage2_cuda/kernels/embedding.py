"""The embedding and its gradient, which adds up the rows of each token in the order of the batch, without atomics.

    y[n] = wte[ids[n] - first] + wpe[position + n % T]
    dwte[v] = sum of dy[n] over the n with ids[n] - first = v;  dwpe[position + t] = sum of dy[b, t] over the batch

Sorting the rows by token turns dwte into sums over runs, one program a token. A corpus has tokens that are a tenth of
it: PIECE rows of such a run are added by a program of their own first, so that no token waits for a long loop.
"""

# B batch, T time, N = B*T rows, C channels, V tokens from `first` on: a vocabulary, or a rank's part of it

from collections import namedtuple

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

ROWS, COLUMNS = 8, 256  # of a tile
WIDE = 1024  # columns of a tile where there is one program for each token: few have more than a row or two
NARROW = 128  # columns of a tile where a program adds the rows of one position
PIECE = 64  # rows of a long run that one program adds

Runs = namedtuple("Runs", "order starts piece_starts piece_tokens")


def runs_of_tokens(ids, count, first=0):
    """What the gradient needs of a batch of token numbers ids (B, T), a host array: the rows, sorted by token.

    order (N) the rows; starts (V + 1) where the run of each token begins; piece_starts (V + 1) the same, counted in
    pieces; piece_tokens (N // PIECE) the token of a piece, V where there is none. int32, of fixed shape.
    """
    ids = ids.reshape(-1)
    narrow = ids.astype(np.uint16) if ids.max() < 1 << 16 else ids  # of 16 bits NumPy sorts the digits, far faster
    order = np.argsort(narrow, kind="stable")
    ends = np.cumsum(np.bincount(ids, minlength=first + count))
    starts = np.concatenate([[0], ends])[first : first + count + 1]
    piece_starts = np.concatenate([[0], np.cumsum(np.diff(starts) // PIECE)])
    piece_tokens = np.searchsorted(piece_starts, np.arange(ids.size // PIECE), side="right") - 1
    return Runs(*(array.astype(np.int32) for array in (order, starts, piece_starts, piece_tokens)))


def pieces_shape(n, channels):
    """The shape of the float32 scratch of embedding_backward."""
    return max(1, n // PIECE), channels


def embedding_forward(y, ids, wte, wpe, position=0, first=0):
    """y (B, T, C) = wte[ids - first] + wpe[position : position + T]; zero for tokens outside [first, first + V).

    ids (B, T), wte (V, C); no positions are added for wpe None.
    """
    n, (count, channels) = ids.size, wte.shape
    grid = (triton.cdiv(n, ROWS), triton.cdiv(channels, COLUMNS))
    arguments = y, ids, wte, wpe, n, ids.shape[1], count, channels, position, first
    launch(forward_kernel, grid, *arguments, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)


def embedding_backward(dwte, dwpe, pieces, runs, dy, position=0, accumulate=False):
    """dwte (V, C) and dwpe (block, C), or None, float32, of dy (B, T, C) and the runs_of_tokens of its ids.

    pieces: scratch of pieces_shape(N, C). accumulate: add to dwte, which then costs nothing for tokens that are not
    there; the embedding of a tied GPT-2 has a gradient from the logits too.
    """
    (batch, time, channels), count = dy.shape, dwte.shape[0]
    tiles, most = triton.cdiv(channels, COLUMNS), runs.piece_tokens.shape[0]
    options = dict(ROWS=ROWS, COLUMNS=COLUMNS, PIECE=PIECE, num_warps=4)
    if most:
        launch(pieces_kernel, (most, tiles), pieces, *runs, dy, count, channels, **options)
    width = min(WIDE, triton.next_power_of_2(channels))
    grid, arguments = (count, triton.cdiv(channels, width)), (dwte, pieces, *runs[:3], dy, channels)
    options = dict(ROWS=4 * WIDE // width, COLUMNS=width, PIECE=PIECE, num_warps=4)
    launch(tokens_kernel, grid, *arguments, ACCUMULATE=accumulate, **options)
    if dwpe is not None:
        grid, arguments = (dwpe.shape[0], triton.cdiv(channels, NARROW)), (dwpe, dy, batch, time, channels, position)
        launch(positions_kernel, grid, *arguments, ROWS=ROWS, COLUMNS=NARROW, num_warps=1)


@triton.jit
def forward_kernel(
    y, ids, wte, wpe, n, time, count, channels, position, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n)[:, None] & (column < channels)[None, :]
    token = tl.load(ids + row, row < n, -1).to(tl.int64) - first
    own = (token >= 0) & (token < count)
    x = tl.load(wte + token[:, None] * channels + column[None, :], mask & own[:, None], 0).to(tl.float32)
    if wpe is not None:
        place = (position + row % time).to(tl.int64)
        x += tl.load(wpe + place[:, None] * channels + column[None, :], mask, 0).to(tl.float32)
    tl.store(y + row.to(tl.int64)[:, None] * channels + column[None, :], x, mask)


@triton.jit
def rows_sum(total, order, dy, begin, end, channels, column, ROWS: tl.constexpr):
    """total (ROWS, COLUMNS) + the rows order[begin:end] of dy."""
    for start in tl.range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        row = tl.load(order + at, at < end, 0).to(tl.int64)
        mask = (at < end)[:, None] & (column < channels)[None, :]
        total += tl.load(dy + row[:, None] * channels + column[None, :], mask, 0).to(tl.float32)
    return total


@triton.jit
def pieces_kernel(
    pieces, order, starts, piece_starts, piece_tokens, dy, count, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    token = tl.load(piece_tokens + piece)
    if token < count:
        begin = tl.load(starts + token) + (piece - tl.load(piece_starts + token)) * PIECE
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total = rows_sum(total, order, dy, begin, begin + PIECE, channels, column, ROWS)
        tl.store(pieces + piece * channels + column, tl.sum(total, 0), column < channels)


@triton.jit
def tokens_kernel(
    dwte, pieces, order, starts, piece_starts, dy, channels,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    begin, end = tl.load(starts + token), tl.load(starts + token + 1)
    if begin < end or not ACCUMULATE:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < channels
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        first, last = tl.load(piece_starts + token), tl.load(piece_starts + token + 1)
        for start in tl.range(first, last, ROWS):
            piece = start + tl.arange(0, ROWS)
            mask = (piece < last)[:, None] & inside[None, :]
            total += tl.load(pieces + piece[:, None] * channels + column[None, :], mask, 0)
        total = rows_sum(total, order, dy, begin + (last - first) * PIECE, end, channels, column, ROWS)
        out = dwte + token.to(tl.int64) * channels + column
        total = tl.sum(total, 0)
        if ACCUMULATE:
            total += tl.load(out, inside, 0)
        tl.store(out, total, inside)


@triton.jit
def positions_kernel(dwpe, dy, batch, time, channels, position, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    t = place - position
    if (t >= 0) & (t < time):
        for start in tl.range(0, batch, ROWS):
            b = start + tl.arange(0, ROWS)
            mask = (b < batch)[:, None] & (column < channels)[None, :]
            row = b.to(tl.int64) * time + t
            total += tl.load(dy + row[:, None] * channels + column[None, :], mask, 0).to(tl.float32)
    tl.store(dwpe + place.to(tl.int64) * channels + column, tl.sum(total, 0), column < channels)

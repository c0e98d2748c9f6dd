"""The checks of stage 2: kernels in Triton's interpreter, in float32, against float64."""

# B batch, T time, H heads, D head size, N rows, K columns, V vocabulary, P programs

import numpy as np
import triton
import triton.language as tl

from exercises.checks.common import random
from exercises.compare import expect
from stage2_cuda.kernels import attention, column_sums, cross_entropy
from stage2_cuda.kernels.attention import AttentionTiles, TileConfig
from stage2_cuda.kernels.attention_forward import softmax_step
from stage2_cuda.runtime.triton_launch import launch

FP32 = 1e-5  # relative norm: a few roundings of 6e-8, more in a sum
GUARD = 64  # elements of NaN before and after an array


def guarded(array):
    """(a copy of a float32 array, contiguous, with NaN before and after it in memory; the flat memory)."""
    array = np.asarray(array, np.float32)
    flat = np.full(array.size + 2 * GUARD, np.nan, np.float32)
    inside = flat[GUARD : GUARD + array.size].reshape(array.shape)
    inside[...] = array
    return inside, flat


# -- 2.1 a sum that is split over programs -----------------------------------------------------------------------------

ROWS, COLS = 4, 8  # the tile


def split_sums(n, columns, programs):
    """(the student's partials (P, K), their flat memory, x (N, K) in float64)."""
    x = random().standard_normal((n, columns)).astype(np.float32)
    partials, memory = guarded(np.full((programs, columns), np.nan))
    grid = programs, triton.cdiv(columns, COLS)
    kernel = column_sums.column_sums_kernel
    launch(kernel, grid, partials, guarded(x)[0], n, columns, BLOCK_ROWS=ROWS, BLOCK_COLS=COLS, STAGES=1)
    return partials, memory, x.astype(np.float64)


def tile_sums(x):
    """The column sums of each tile of rows: (tiles, K)."""
    return np.array([x[start : start + ROWS].sum(0) for start in range(0, len(x), ROWS)])


def expect_split_sum(name, n, columns, programs):
    partials, _, x = split_sums(n, columns, programs)
    tiles = tile_sums(x)
    want = np.array([tiles[p::programs].sum(0) for p in range(programs)])
    all_tiles = np.broadcast_to(tiles.sum(0), want.shape)
    neighbours = np.array([part.sum(0) for part in np.array_split(tiles, programs)])
    late = np.array([tiles[p + programs :: programs].sum(0) for p in range(programs)])
    full = np.array([tiles[: n // ROWS][p::programs].sum(0) for p in range(programs)])
    unmasked = want.copy()
    unmasked[(len(tiles) - 1) % programs] = np.nan  # beyond x there is NaN
    wrong = [
        (unmasked, "Rows outside x are added: mask the loads with rows < n and cols < n_cols."),
        (np.full(want.shape, np.nan), "Elements outside x are added: mask the loads with rows < n and cols < n_cols."),
        (tiles[:programs], "Only the first tile of each program is added: program p adds the tiles p, p + P, p + 2P, ..."),
        (all_tiles, "Every program adds all tiles: program p begins with tile p and adds every P-th tile."),
        (neighbours, "Program p adds neighbouring tiles: it adds the tiles p, p + P, p + 2P, ..."),
        (late, "The first tile of each program is missing: the loop begins with tile p."),
        (full, "The last tile is missing: the number of tiles is n / BLOCK_ROWS, rounded up."),
    ]  # fmt: skip
    look = "column_sums_kernel: the rows of each tile, the mask, and the sum over the rows at the end"
    expect(name, partials, want, FP32, wrong, look)


def split_sum_one_tile():
    expect_split_sum("the column sums of x (4, 8)", 4, 8, 1)


def split_sum_tiles():
    expect_split_sum("the partial sums of x (24, 8) in 2 programs", 24, 8, 2)
    expect_split_sum("the partial sums of x (27, 13) in 3 programs", 27, 13, 3)


def split_sum_guards():
    partials, memory, _ = split_sums(27, 13, 3)
    outside = np.concatenate([memory[:GUARD], memory[-GUARD:]])
    look = "the mask of tl.store in column_sums_kernel: cols < n_cols"
    expect("the memory before and after partials is unchanged, which", np.isnan(outside), np.full(2 * GUARD, True), 0, look=look)
    expect("each element of partials is written, which", np.isfinite(partials), np.full((3, 13), True), 0, look=look)


# -- 2.2 the online softmax --------------------------------------------------------------------------------------------


@triton.jit
def step_kernel(p, new_max, new_sum, new_acc, s, row_max, row_sum, acc, scale, M: tl.constexpr, N: tl.constexpr):
    """Load the arguments of the student's softmax_step, call it, and store its four results; acc is (M, N) too."""
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    tile = rows[:, None] * N + cols[None, :]
    a, b, c, d = softmax_step(
        tl.load(s + tile), tl.load(row_max + rows), tl.load(row_sum + rows), tl.load(acc + tile), scale
    )
    tl.store(p + tile, a)
    tl.store(new_max + rows, b)
    tl.store(new_sum + rows, c)
    tl.store(new_acc + tile, d)


def online_softmax_step():
    rng, scale = random(), 0.7
    s, acc = rng.standard_normal((2, 4, 8)).astype(np.float32) * 2
    row_max, row_sum = np.float32([-3, 0.5, 5, -np.inf]), np.float32([2, 1, 3, 0])
    acc[3] = 0
    got = [np.full(shape, np.nan, np.float32) for shape in ((4, 8), 4, 4, (4, 8))]
    launch(step_kernel, (1,), *got, s, row_max, row_sum, acc, scale, M=4, N=8)
    s, old, total, acc = (array.astype(np.float64) for array in (s, row_max, row_sum, acc))
    top = np.maximum(old, scale * s.max(1))
    p, rescale = np.exp2(scale * s - top[:, None]), np.exp2(old - top)
    tile_max = scale * s.max(1)
    wrong_max = [
        (np.maximum(old, s.max(1)), "The maximum of s lacks the factor `scale`: the running maximum is that of scale s."),
        (tile_max, "The new maximum ignores the old one: take the larger of row_max and the maximum of the tile."),
    ]
    look = "softmax_step: the line that computes "
    expect("the new maximum", got[1], top, FP32, wrong_max, look + "the new maximum")
    wrong_p = [
        (np.exp2(s - top[:, None]), "p lacks the factor `scale`: p = exp2(scale s - new maximum)."),
        (np.exp2(scale * s), "p lacks the maximum: p = exp2(scale s - new maximum)."),
        (np.exp(scale * s - top[:, None]), "p is a power of e: the kernel computes in base 2, p = exp2(...)."),
        (np.exp2(scale * s - old[:, None]), "p uses the old maximum: subtract the new one."),
        (np.exp2(scale * s - tile_max[:, None]), "p uses the maximum of this tile: subtract the new maximum of the row."),
    ]
    expect("p", got[0], p, FP32, wrong_p, look + "p")
    with np.errstate(all="ignore"):
        inverse = np.exp2(top - old)
        wrong_sum = [
            (total + p.sum(1), "row_sum is not rescaled to the new maximum: multiply it by exp2(row_max - new maximum)."),
            (total * rescale, "The sum of p is not added to row_sum."),
            (p.sum(1), "The old row_sum is lost: the new one is row_sum * exp2(row_max - new maximum) + sum of p."),
            ((total + p.sum(1)) * rescale, "The sum of p is rescaled too: only the old row_sum is relative to the old maximum."),
            (total * inverse + p.sum(1), "The sign of the exponent is wrong: rescale by exp2(row_max - new maximum)."),
        ]
        expect("row_sum", got[2], total * rescale + p.sum(1), FP32, wrong_sum, look + "row_sum")
        wrong_acc = [
            (acc, "acc is not rescaled to the new maximum: multiply its rows by exp2(row_max - new maximum)."),
            (acc * inverse[:, None], "The sign of the exponent is wrong: rescale by exp2(row_max - new maximum)."),
            (acc + p, "p is added to acc: the caller adds p v; only rescale acc."),
        ]
        expect("acc", got[3], acc * rescale[:, None], FP32, wrong_acc, look + "acc")


TILE = TileConfig(16, 16, 4, 1)


class AttentionCase:
    """qkv (1, T, 3C), dy (1, T, C) in float32, and all results of attention in float64; H = 2, D = 8."""

    def __init__(self, T, size=1.0):
        rng, self.H, self.T = random(), 2, T
        self.qkv = (rng.standard_normal((1, T, 48)) * size).astype(np.float32)
        self.dy_packed = rng.standard_normal((1, T, 16)).astype(np.float32)
        self.q, self.k, self.v = self.qkv.astype(np.float64).reshape(T, 3, 2, 8).transpose(1, 2, 0, 3)  # (H, T, D)
        self.dy = self.dy_packed.astype(np.float64).reshape(T, 2, 8).transpose(1, 0, 2)
        self.scale = 8**-0.5
        self.mask = np.tri(T, dtype=bool)
        self.raw = self.scale * self.q @ self.k.swapaxes(1, 2)
        s = np.where(self.mask, self.raw, -np.inf)
        peak = s.max(-1, keepdims=True)
        self.lse = peak + np.log(np.exp(s - peak).sum(-1, keepdims=True))
        self.p = np.exp(s - self.lse)
        self.y = self.p @ self.v
        self.dp = self.dy @ self.v.swapaxes(1, 2)
        self.delta = (self.dy * self.y).sum(-1, keepdims=True)
        self.ds = self.p * (self.dp - self.delta)
        self.dq, self.dk = self.ds @ self.k * self.scale, self.ds.swapaxes(1, 2) @ self.q * self.scale
        self.dv = self.p.swapaxes(1, 2) @ self.dy

    def forward(self):
        """The student's (y (H, T, D), lse (H, T) as a natural logarithm)."""
        y, lse = np.full((1, self.T, 16), np.nan, np.float32), np.full((1, self.H, self.T), np.nan, np.float32)
        attention.attention_forward(y, lse, self.qkv, self.H, tiles=AttentionTiles(forward=TILE))
        return self.unpacked(y)[0], lse[0] * np.log(2)

    def backward(self, tiles, delta=None):
        """The student's (dq, dk, dv (H, T, D), delta (H, T)); delta: the given one, or NaN for the kernel to write."""
        dqkv = np.full((1, self.T, 48), np.nan, np.float32)
        delta = np.full((1, self.H, self.T), np.nan, np.float32) if delta is None else np.float32(delta)[None, ..., 0]
        y = np.ascontiguousarray(self.y.transpose(1, 0, 2).reshape(1, self.T, 16), np.float32)
        lse = np.ascontiguousarray(self.lse[None, ..., 0] / np.log(2), np.float32)
        delta = np.ascontiguousarray(delta)
        attention.attention_backward(dqkv, delta, self.dy_packed, self.qkv, y, lse, self.H, tiles=tiles)
        return *self.unpacked(dqkv), delta[0]

    def unpacked(self, array):
        """(1, T, parts C) as (parts, H, T, D)."""
        return array.reshape(self.T, -1, 2, 8).transpose(1, 2, 0, 3)


def expect_attention(T, size=1.0):
    case = AttentionCase(T, size)
    y, lse = case.forward()
    look = "softmax_step: are row_sum and acc rescaled when the maximum of a row rises?"
    expect(f"lse of {T} positions", lse, case.lse[..., 0], FP32, look=look)
    expect(f"y of {T} positions", y, case.y, FP32, look=look)


def online_softmax_tiles():
    expect_attention(40)


def online_softmax_large():
    expect_attention(40, size=12.0)


# -- 2.3 and 2.4 flash attention, backward -----------------------------------------------------------------------------

DS = "The line is ds = p * (dp - delta)."


def wrong_ds(case, gradient, name):
    """The typical mistakes that dq and dk share; gradient(ds, scale) is the expected product."""
    unmasked = np.exp(case.raw - case.lse)
    return [
        (gradient(case.ds, 1.0), f"{name} lacks the factor `scale` = 1/sqrt(D): multiply when it is stored."),
        (gradient(case.ds, case.scale**2), f"{name} has the factor `scale` twice."),
        (gradient(case.p * case.dp, case.scale), f"ds lacks delta. {DS}"),
        (gradient(case.dp - case.delta, case.scale), f"ds lacks the factor p. {DS}"),
        (gradient(case.p * (case.dp + case.delta), case.scale), f"The sign of delta is wrong. {DS}"),
        (gradient(case.p * case.delta, case.scale), f"ds lacks dp. {DS}"),
        (gradient(unmasked * (case.dp - case.delta), case.scale), "The causal mask is missing: p is 0 for later keys."),
        (
            gradient(np.where(np.tri(case.T, k=-1), case.p, 0) * (case.dp - case.delta), case.scale),
            "The causal mask is off by one: a query also attends to its own key.",
        ),
        (
            gradient(np.where(case.mask, np.exp2(case.raw - case.lse / np.log(2)), 0) * (case.dp - case.delta), case.scale),
            "p lacks LOG2E: the kernel computes exp2, so the scores are multiplied by scale * LOG2E.",
        ),
        (
            gradient(np.where(case.mask, np.exp(case.raw), 0) * (case.dp - case.delta), case.scale),
            "p lacks the logsumexp: p = exp2(s * (scale * LOG2E) - lse).",
        ),
    ]


def expect_dq(T):
    case = AttentionCase(T)
    dq, *_ = case.backward(AttentionTiles(dq=TILE))
    wrong = wrong_ds(case, lambda ds, scale: ds @ case.k * scale, "dq")
    wrong += [(case.ds.swapaxes(1, 2) @ case.k * case.scale, "ds is transposed: dq = ds k.")]
    wrong += [(case.ds @ case.q * case.scale, "dq uses q: dq = ds k.")]
    expect(f"dq of {T} positions", dq, case.dq, FP32, wrong, "dq_tile: the loop over the keys, and the sum dq += ds k")


def flash_dq():
    expect_dq(16)


def flash_dq_tiles():
    expect_dq(48)
    expect_dq(40)


def flash_delta():
    case = AttentionCase(40)
    *_, delta = case.backward(AttentionTiles(dq=TILE))
    wrong = [(np.full(delta.shape, np.nan), "delta is not stored: store it to delta_ptr unless delta_ptr is None.")]
    expect("delta", delta, case.delta[..., 0], FP32, wrong, "the tl.store to delta_ptr in dq_tile")


def expect_dkdv(T, names):
    case = AttentionCase(T)
    _, dk, dv, _ = case.backward(AttentionTiles(dkdv=TILE), case.delta)
    unmasked = np.exp(case.raw - case.lse)
    wrong_dv = [
        (case.p @ case.dy, "p is not transposed: dv = p' dy. In dkdv_tile p has one row for each key."),
        (case.dv * case.scale, "dv has the factor `scale`: only dq and dk have it."),
        (unmasked.swapaxes(1, 2) @ case.dy, "The causal mask is missing: p is 0 where the query is before the key."),
        (np.where(np.tri(T, k=-1), case.p, 0).swapaxes(1, 2) @ case.dy, "The causal mask is off by one: a query also attends to its own key."),
        (np.where(case.mask.T, unmasked, 0).swapaxes(1, 2) @ case.dy, "The causal mask is transposed: here the tile is (keys, queries)."),
        (case.ds.swapaxes(1, 2) @ case.dy, "dv uses ds: dv = p' dy."),
    ]  # fmt: skip
    wrong_dk = wrong_ds(case, lambda ds, scale: ds.swapaxes(1, 2) @ case.q * scale, "dk")
    wrong_dk += [
        (case.ds @ case.q * case.scale, "ds is not transposed: dk = ds' q. In dkdv_tile ds has one row for each key."),
        (case.ds.swapaxes(1, 2) @ case.k * case.scale, "dk uses k: dk = ds' q."),
    ]
    look = "dkdv_tile: the loop over the queries, and the sum "
    if "dv" in names:
        expect(f"dv of {T} positions", dv, case.dv, FP32, wrong_dv, look + "dv += p' dy")
    if "dk" in names:
        expect(f"dk of {T} positions", dk, case.dk, FP32, wrong_dk, look + "dk += ds' q")


def flash_dv():
    expect_dkdv(16, ["dv"])


def flash_dk():
    expect_dkdv(16, ["dk"])


def flash_dkdv_tiles():
    expect_dkdv(48, ["dv", "dk"])
    expect_dkdv(40, ["dv", "dk"])


def flash_both():
    case = AttentionCase(40)
    got = case.backward(AttentionTiles(both=TILE))
    look = "dkdv_tile, if delta_in is None: compute delta from y and dy with row_delta"
    for name, array, want in zip(("dq", "dk", "dv"), got, (case.dq, case.dk, case.dv), strict=False):
        expect(f"{name} of both_kernel", array, want, FP32, look=look)


# -- 2.5 fused cross-entropy -------------------------------------------------------------------------------------------


class EntropyCase:
    """Logits (3, width) whose first V columns are tokens, targets, and all results in float64; scale 0.5."""

    def __init__(self, vocab, width):
        rng = random()
        self.vocab, self.width, self.scale = vocab, width, 0.5
        # the maximum rises along a row, so that an online softmax must rescale its sum
        rows = rng.standard_normal((3, width)) + np.linspace(0, 8, width)
        self.logits, _ = guarded(rows)
        self.logits[:, vocab:] = 77  # padding, which must not change a result
        self.targets = np.array([0, vocab // 2, vocab - 1], np.int32)
        x = self.x = self.logits[:, :vocab].astype(np.float64)
        self.maxima, self.target_logits = x.max(1), x[range(3), self.targets]
        self.sums = np.exp(x - self.maxima[:, None]).sum(1)
        softmax = np.exp(x - self.maxima[:, None]) / self.sums[:, None]
        self.softmax, self.onehot = np.zeros((3, width)), np.zeros((3, width))
        self.softmax[:, :vocab] = softmax
        self.onehot[range(3), self.targets] = 1

    def empty(self, *shape):
        return guarded(np.full(shape, np.nan))[0]

    def statistics(self):
        got = self.empty(3), self.empty(3), self.empty(3)
        cross_entropy.cross_entropy_forward(*got, self.logits, self.targets, self.vocab)
        return got

    def online(self, rescale=True, combine=True):
        """The sums of the online softmax for tiles of 8192 columns in groups of 8, with or without its factors."""
        block = cross_entropy.tile_size(self.logits)[0]
        top, total = np.full((3, block // 8), -2e38), np.zeros((3, block // 8))
        for start in range(0, self.vocab // block * block, block):
            x = self.x[:, start : start + block].reshape(3, -1, 8)
            new = np.maximum(top, x.max(2))
            total = total * (np.exp(top - new) if rescale else 1) + np.exp(x - new[:, :, None]).sum(2)
            top = new
        tail = np.exp(self.x[:, self.vocab // block * block :] - self.maxima[:, None]).sum(1)
        return (total * np.exp(top - self.maxima[:, None])).sum(1) + tail

    def expect_statistics(self, got, place):
        maxima, sums, target_logits = got
        expect("maxima", maxima, self.maxima, FP32, look=f"the new maximum in online_update, and {place}")
        wrong = [(np.log(self.sums), "The sum is stored as its logarithm: store the sum itself.")]
        if self.vocab > 8192:
            hint = "The sum so far is not rescaled when the maximum rises: multiply it by exp(old - new maximum)."
            wrong.append((self.online(rescale=False), hint))
        expect("sums", sums, self.sums, FP32, wrong, f"the sum in online_update, and {place}")
        expect("target_logits", target_logits, self.target_logits, FP32, look=place)

    def expect_gradient(self, got, look):
        p, onehot, scale = self.softmax, self.onehot, self.scale
        padding = np.zeros_like(p)
        padding[:, self.vocab :] = 1
        wrong = [
            (scale * p, "The gradient lacks the term of the target: subtract scale in the target's column."),
            (scale * (p + onehot), "The sign of the target's term is wrong: it is subtracted."),
            (scale * p - onehot, "The target's term lacks the factor scale."),
            (p - scale * onehot, "The softmax lacks the factor scale: weight is scale / sum."),
            (p - onehot, "The gradient lacks the factor scale."),
            (scale * (p * self.sums[:, None] - onehot), "The exponentials are not divided by the sum: use `weight`."),
            (scale * (p - np.roll(onehot, 1, 1)), "The target's term is one column late: compare cols with target."),
            (scale * (p - onehot) + np.where(padding, np.nan, 0), "The padding is not written: columns >= vocab become 0."),
        ]
        expect("dlogits", got, scale * (p - onehot), FP32, wrong, look)

    def fused(self):
        dlogits, statistics = self.empty(3, self.width), (self.empty(3), self.empty(3), self.empty(3))
        cross_entropy.cross_entropy_forward_backward(
            dlogits, *statistics, self.logits, self.targets, self.scale, self.vocab
        )
        return dlogits, statistics


def cross_entropy_statistics():
    for vocab, width in ((20, 24), (2 * 8192 + 100, 2 * 8192 + 112)):
        case = EntropyCase(vocab, width)
        case.expect_statistics(case.statistics(), "row_statistics, which calls it for each tile")


def cross_entropy_gradient():
    case = EntropyCase(20, 24)
    dlogits = case.empty(3, 24)
    maxima, sums = (np.float32(array) for array in (case.maxima, case.sums))
    arguments = dlogits, case.logits, case.targets, maxima, sums, case.scale, case.vocab
    cross_entropy.cross_entropy_backward(*arguments)
    case.expect_gradient(dlogits, "write_gradient: weight exp(logits - maximum) - scale onehot(target), 0 in the padding")


def expect_fused(vocab, width):
    case = EntropyCase(vocab, width)
    dlogits, statistics = case.fused()
    case.expect_statistics(statistics, "the three tl.store of forward_backward_kernel")
    case.expect_gradient(dlogits, "forward_backward_kernel: the columns of each tile, and the column of the target")


def cross_entropy_fused():
    expect_fused(20, 24)


def cross_entropy_fused_tiles():
    expect_fused(8192 + 100, 8192 + 112)

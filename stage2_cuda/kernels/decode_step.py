"""One token of one text through the whole model in one launch, whose programs hand each other what they have computed.

With one row a product costs what reading its weights costs, a microsecond, and a launch for each costs more than that.
So one program a processor stays for the whole step, and a layer has five times when the next ones need what others do:

    q, k, v = LN(x) w + b          a program has some columns
    softmax(q k') v                a head and a span of its keys
    partial sums of y w            columns, over a share of the rows; it adds up the spans of these rows
    g = gelu(LN(x + sums) w + b)   columns
    partial sums of g w            columns, over a share of the rows

Nobody waits for all others at a barrier. A number travels as a word of 64 bits, which are written together: its own 32,
and 32 of the number of this step, its stamp. Who needs it looks at its place until the stamp is there, and meanwhile
its weights are on their way, because those depend on nothing. (NCCL sends short messages so, its protocol LL.) Every
number has a place of its own, so none is overwritten before the next launch. The residual stream is never sent: each
program adds all partial sums to its own, in the same order, and so they all have the same bits.

Programs that wait for each other must run at the same time: the launch is a cooperative one, which is refused if they
cannot. One program alone does everything in order and waits for nothing: so it is in the interpreter.
"""

# C channels, H heads, D = SIZE head size, V vocabulary, L layers; a weight is (K, N), lm_head (V, C)
# the cache of a layer is (block, 2C): k then v, heads side by side, as the projection gives them

import itertools
import math

import triton
import triton.language as tl

from stage2_cuda.kernels.decode import LOWEST, keys_and_values, normalised
from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.triton_driver import Pointer, launch, resident

# a layer's arrays, in the order in which step_kernel takes them and the arena has them
NAMES = [
    f"{module}.{kind}"
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]


def stride_of(layers):
    """Elements between one layer's arrays and the next one's, [[those of NAMES]]; None where it is not one number."""
    places = [[Pointer(array).address for array in layer] for layer in layers]
    if len(places) == 1:
        return 0
    strides = {there - here for pair in itertools.pairwise(places) for here, there in zip(*pair, strict=True)}
    return strides.pop() // layers[0][0].itemsize if len(strides) == 1 else None


class OneRow:
    """Logits of the newest position of one text.

    layers: [[arrays by NAMES]], stride_of() apart; final: weight and bias of the last LayerNorm; head (V, C); cache
    (L, 1, block, 2C); zeros(shape, dtype) makes scratch. programs: how many are launched, all at the same time.
    """

    def __init__(self, layers, final, head, cache, n_head, eps, tiles, zeros, programs=None):
        (L, _, block, _), (V, C), item = cache.shape, head.shape, head.dtype.itemsize
        self.programs, self.cache = programs or resident(), cache
        self.weights = *layers[0], *final, head
        width, size = triton.next_power_of_2(C), C // n_head
        spread = tiles.programs or self.programs

        def columns(N, depth):
            """Of a weight, that one program has at a time: a share of N, or what its registers hold."""
            most = max(8, tiles.bytes // (item * depth))
            return min(most, max(8, triton.next_power_of_2(triton.cdiv(N, spread))))

        proj, down = min(tiles.proj_rows, width), min(tiles.down_rows, triton.next_power_of_2(4 * C))
        parts = triton.cdiv(C, proj), triton.cdiv(4 * C, down)
        count = (7 + tiles.spans + sum(parts)) * C + tiles.spans * n_head  # words of a layer
        self.words, self.stamps = zeros((L, count), "int64"), zeros((self.programs,), "int32")
        self.best, self.index = zeros((1, self.programs), "float32"), zeros((1, self.programs), "int32")
        self.sizes = L, C, n_head, V, block, stride_of(layers), count, *parts
        self.sizes += 1 / C, float(eps), math.log2(math.e) / math.sqrt(size)
        self.options = dict(
            SIZE=size, D=triton.next_power_of_2(size), WIDTH=width, QKV=columns(3 * C, width),
            SPANS=tiles.spans, KEYS=tiles.span_keys, PROJ=columns(C * parts[0], proj), PROJ_ROWS=proj,
            PROJ_PARTS=triton.next_power_of_2(parts[0]), FC=columns(4 * C, width), DOWN=columns(C * parts[1], down),
            DOWN_ROWS=down, DOWN_PARTS=triton.next_power_of_2(parts[1]),
            HEAD=max(1, tiles.head_bytes // (item * width)), CHUNK=min(width, 256),
            LINE=tiles.line * (self.programs > 1), num_warps=tiles.warps,
        )  # fmt: skip
        if self.programs > 1:
            self.options["launch_cooperative_grid"] = True

    def __call__(self, logits, x, lengths):
        """logits (1, V) float32 from the stream x (1, C) float32 at the last of lengths (1) positions.

        Leaves the largest logit of each program's in `best`, and its first index in `index`.
        """
        scratch = self.stamps, self.words, self.cache
        launch(
            step_kernel, (self.programs,), logits, self.best, self.index, x, lengths, *scratch, *self.weights,
            *self.sizes, **self.options,
        )  # fmt: skip


# -- words -------------------------------------------------------------------------------------------------------------


@triton.jit
def put(words, at, value, inside, stamp):
    word = (stamp.to(tl.int64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(words + at, word, inside)


@triton.jit
def look(words, at, inside, stamp):
    return tl.load(words + at, inside, stamp.to(tl.int64) << 32, volatile=True)


@triton.jit
def late(word, stamp):
    return ((word >> 32).to(tl.int32) != stamp).to(tl.int32)


@triton.jit
def number(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def take(words, at, inside, stamp):
    """The numbers at these places, once all of them are there; 0 outside."""
    word = look(words, at, inside, stamp)
    while tl.max(late(word, stamp)) != 0:
        word = look(words, at, inside, stamp)
    return number(word)


# -- weights -----------------------------------------------------------------------------------------------------------


@triton.jit
def share(w, t, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile number t of w (K, N) in tiles (ROWS, COLUMNS), those of the same rows one after the other; 0 outside."""
    blocks = tl.cdiv(N, COLUMNS)
    k, n = t // blocks * ROWS + tl.arange(0, ROWS), t % blocks * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], 0)


@triton.jit
def columns(w, bias, t, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns number t of w (K, N) (ROWS, COLUMNS), ROWS >= K, and their bias."""
    k, n = tl.arange(0, ROWS), t * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], 0)
    return tile, tl.load(bias + n, n < N, 0)


@triton.jit
def vocabulary(head, t, C, V, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Rows number t of lm_head (WIDTH // CHUNK, ROWS, CHUNK): a warp has whole rows, so no sum of one leaves it."""
    v = t * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH // CHUNK)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    return tl.load(head + v.to(tl.int64)[None, :, None] * C + k, (v < V)[None, :, None] & (k < C), 0)


@triton.jit
def product(h, tile):
    return tl.sum(h[:, None] * tile.to(tl.float32), 0)


@triton.jit
def prefetch(array, count, LINE: tl.constexpr):
    """Bring `count` elements towards the L2 cache; each program asks for some of the lines."""
    lines = count.to(tl.int64) * (array.dtype.element_ty.primitive_bitwidth // 8) // LINE
    LINES: tl.constexpr = 1024
    for first in tl.range(tl.program_id(0) * LINES, lines, tl.num_programs(0) * LINES):
        line = tl.minimum(first + tl.arange(0, LINES), lines - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [array.to(tl.int64) + line * LINE],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


# -- the step ----------------------------------------------------------------------------------------------------------


@triton.jit
def step_kernel(
    logits, best, index, x, lengths, stamps, words, cache,
    ln_1_w, ln_1_b, qkv_w, qkv_b, proj_w, proj_b, ln_2_w, ln_2_b, fc_w, fc_b, down_w, down_b, ln_f_w, ln_f_b, head,
    L, C, H, V, block, stride, count, proj_parts, down_parts, inverse, eps, scale,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, QKV: tl.constexpr, SPANS: tl.constexpr,
    KEYS: tl.constexpr, PROJ: tl.constexpr, PROJ_ROWS: tl.constexpr, PROJ_PARTS: tl.constexpr, FC: tl.constexpr,
    DOWN: tl.constexpr, DOWN_ROWS: tl.constexpr, DOWN_PARTS: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    stamp = tl.load(stamps + program) + 1
    position = tl.minimum(tl.load(lengths), block) - 1  # of the newest token
    c, d, span = tl.arange(0, WIDTH), tl.arange(0, D), tl.arange(0, SPANS)
    s = tl.load(x + c, c < C, 0)  # the residual stream
    at = tl.full((), 0, tl.int64)  # of this layer's parameters behind those of the first
    y_at = 3 * C  # of words, as the ones below
    lse_at = y_at + SPANS * C
    a_at = lse_at + SPANS * H
    g_at = a_at + proj_parts * C
    m_at = g_at + 4 * C
    proj_blocks, down_blocks = tl.cdiv(C, PROJ), tl.cdiv(C, DOWN)
    if LINE:
        prefetch(ln_1_w, stride, LINE)
    for layer in tl.range(0, L):
        # q, k, v; the newest k and v go into the cache for later steps, and to those who need them now as words
        tile, shift = columns(qkv_w + at, qkv_b + at, program, C, 3 * C, WIDTH, QKV)
        ln_w, ln_b = tl.load(ln_1_w + at + c, c < C, 0), tl.load(ln_1_b + at + c, c < C, 0)
        if LINE:
            if layer + 1 < L:
                prefetch(ln_1_w + at + stride, stride, LINE)
                prefetch(cache + block * 2 * C, position * 2 * C, LINE)
            else:
                prefetch(head, tl.minimum(stride, V.to(tl.int64) * C), LINE)
        if layer > 0:
            s = plus_branch(s, down_b + at - stride, words - count + m_at, C, down_parts, stamp, DOWN_PARTS, WIDTH)
        h = normalised(s, ln_w, ln_b, C, inverse, eps, WIDTH)
        for t in tl.range(program, tl.cdiv(3 * C, QKV), programs):
            n = t * QKV + tl.arange(0, QKV)
            value = product(h, tile) + shift.to(tl.float32)
            put(words, n, value, n < 3 * C, stamp)
            tl.store(cache + position * 2 * C + n - C, value, (n >= C) & (n < 3 * C))
            if t + programs < tl.cdiv(3 * C, QKV):
                tile, shift = columns(qkv_w + at, qkv_b + at, t + programs, C, 3 * C, WIDTH, QKV)

        # attention; the newest key is span 0's, which therefore is never empty
        each = tl.cdiv(position, SPANS)
        for t in tl.range(program, H * SPANS, programs):
            first, own = t % SPANS * each, t // SPANS * SIZE + d
            end = tl.minimum(first + each, position)
            k, v = keys_and_values(cache + t // SPANS * SIZE, first, end, C, SIZE, D, KEYS)
            q_word = look(words, own, d < SIZE, stamp)
            k_word, v_word = look(words, C + own, d < SIZE, stamp), look(words, 2 * C + own, d < SIZE, stamp)
            while tl.max(late(q_word, stamp) | late(k_word, stamp) | late(v_word, stamp)) != 0:
                q_word = look(words, own, d < SIZE, stamp)
                k_word, v_word = look(words, C + own, d < SIZE, stamp), look(words, 2 * C + own, d < SIZE, stamp)
            q = number(q_word) * scale
            score = tl.sum(q * number(k_word).to(k.dtype).to(tl.float32), 0)
            newest = t % SPANS == 0
            peak, total = tl.where(newest, score, LOWEST), tl.where(newest, 1.0, 0.0)
            acc = tl.where(newest, number(v_word).to(v.dtype).to(tl.float32), 0.0)
            for start in tl.range(first, end, KEYS):
                inside = start + tl.arange(0, KEYS) < end
                scores = tl.where(inside, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
                higher = tl.maximum(peak, tl.max(scores, 0))
                p, shrink = tl.math.exp2(scores - higher), tl.math.exp2(peak - higher)
                acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
                peak, total = higher, total * shrink + tl.sum(p, 0)
                if start + KEYS < end:
                    k, v = keys_and_values(cache + t // SPANS * SIZE, start + KEYS, end, C, SIZE, D, KEYS)
            total = tl.maximum(total, 1e-37)  # of a span without keys, whose logsumexp gives it no weight
            put(words, y_at + t % SPANS * C + own, acc / total, d < SIZE, stamp)
            put(words, lse_at + t % SPANS * H + t // SPANS, peak + tl.math.log2(total), None, stamp)

        # its projection
        tile = share(proj_w + at, program, C, C, PROJ_ROWS, PROJ)
        for t in tl.range(program, proj_blocks * proj_parts, programs):
            k = t // proj_blocks * PROJ_ROWS + tl.arange(0, PROJ_ROWS)
            y_of, inside = y_at + span[:, None] * C + k[None, :], (span >= 0)[:, None] & (k < C)[None, :]
            lse_of = lse_at + span[:, None] * H + (k // SIZE)[None, :]  # (SPANS, PROJ_ROWS)
            y_word, lse_word = look(words, y_of, inside, stamp), look(words, lse_of, inside, stamp)
            while tl.max(late(y_word, stamp) | late(lse_word, stamp)) != 0:
                y_word, lse_word = look(words, y_of, inside, stamp), look(words, lse_of, inside, stamp)
            lse = number(lse_word)
            weight = tl.math.exp2(lse - tl.max(lse, 0)[None, :])
            y = tl.sum(weight * number(y_word), 0) / tl.sum(weight, 0)
            n = t % proj_blocks * PROJ + tl.arange(0, PROJ)
            put(words, a_at + t // proj_blocks * C + n, product(y, tile), n < C, stamp)
            if t + programs < proj_blocks * proj_parts:
                tile = share(proj_w + at, t + programs, C, C, PROJ_ROWS, PROJ)

        # the wide half of the MLP
        tile, shift = columns(fc_w + at, fc_b + at, program, C, 4 * C, WIDTH, FC)
        ln_w, ln_b = tl.load(ln_2_w + at + c, c < C, 0), tl.load(ln_2_b + at + c, c < C, 0)
        s = plus_branch(s, proj_b + at, words + a_at, C, proj_parts, stamp, PROJ_PARTS, WIDTH)
        h = normalised(s, ln_w, ln_b, C, inverse, eps, WIDTH)
        for t in tl.range(program, tl.cdiv(4 * C, FC), programs):
            n = t * FC + tl.arange(0, FC)
            value = product(h, tile) + shift.to(tl.float32)
            put(words, g_at + n, value * sigmoid_of_2u(value), n < 4 * C, stamp)
            if t + programs < tl.cdiv(4 * C, FC):
                tile, shift = columns(fc_w + at, fc_b + at, t + programs, C, 4 * C, WIDTH, FC)

        # and back
        tile = share(down_w + at, program, 4 * C, C, DOWN_ROWS, DOWN)
        for t in tl.range(program, down_blocks * down_parts, programs):
            k = t // down_blocks * DOWN_ROWS + tl.arange(0, DOWN_ROWS)
            n = t % down_blocks * DOWN + tl.arange(0, DOWN)
            g = take(words, g_at + k, k < 4 * C, stamp)
            put(words, m_at + t // down_blocks * C + n, product(g, tile), n < C, stamp)
            if t + programs < down_blocks * down_parts:
                tile = share(down_w + at, t + programs, 4 * C, C, DOWN_ROWS, DOWN)
        at += stride
        words += count
        cache += block * 2 * C

    tile = vocabulary(head, program, C, V, HEAD, WIDTH, CHUNK)
    following = vocabulary(head, program + programs, C, V, HEAD, WIDTH, CHUNK)
    ln_w, ln_b = tl.load(ln_f_w + c, c < C, 0), tl.load(ln_f_b + c, c < C, 0)
    s = plus_branch(s, down_b + at - stride, words - count + m_at, C, down_parts, stamp, DOWN_PARTS, WIDTH)
    h = tl.reshape(normalised(s, ln_w, ln_b, C, inverse, eps, WIDTH), (WIDTH // CHUNK, 1, CHUNK))
    top, top_at = tl.full((HEAD,), float("-inf"), tl.float32), tl.full((HEAD,), 0, tl.int32) + V
    for t in tl.range(program, tl.cdiv(V, HEAD), programs):
        v = t * HEAD + tl.arange(0, HEAD)
        value = tl.sum(tl.sum(tile.to(tl.float32) * h, 0), 1)
        tl.store(logits + v, value, v < V)
        above = (value > top) & (v < V)
        top, top_at = tl.where(above, value, top), tl.where(above, v, top_at)
        tile, following = following, vocabulary(head, t + 2 * programs, C, V, HEAD, WIDTH, CHUNK)
    highest = tl.max(top, 0)
    tl.store(best + program, highest)
    tl.store(index + program, tl.min(tl.where(top == highest, top_at, V), 0))
    tl.store(stamps + program, stamp)


@triton.jit
def plus_branch(s, bias, words, C, parts, stamp, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """s + (bias + the partial sums, as soon as they are there)."""
    c, part = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    before, inside = tl.load(bias + c, c < C, 0), (part < parts)[:, None] & (c < C)[None, :]
    branch = tl.sum(take(words, part[:, None] * C + c[None, :], inside, stamp), 0)
    return s + (before.to(tl.float32) + branch)

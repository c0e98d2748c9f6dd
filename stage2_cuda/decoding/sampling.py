"""The next token, chosen on the device by the rule of gpt2core/sampler.py: the likeliest, or a seeded draw.

A draw asks three times for a place in the order of the tokens, likeliest first and of equals the first: where top_k
tokens are reached, where the share top_p of those, and where the share u of what is left, u uniform in [0, 1). Nothing
is sorted for that. A logit's bits, as an integer, have its order (`key_of`), and

    M(t) = sum of the masses of the tokens with key >= t,  mass = round(2^44 exp((logit - maximum) / temperature))

falls as t grows. So the place where M reaches a goal is found by division: 64 thresholds cut the range of keys, all
programs add up the masses above each, and the part where the goal lies is cut again. After 6 cuts of 6 bits one key is
left. The first cut, of all keys, is the same for all three questions. Of tokens with the same key, whose masses are
equal, a division gives the number, in the order of the vocabulary.

Masses are integers: their sum has no order, so a draw has the same bits every time. 2^44 keeps the sum of 2^18 of them
in 63 bits; what rounding moves are borders, by less than one draw in 10^8 would notice.
"""

# B sequences, V vocabulary, tiles of the vocabulary that programs own, G thresholds

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from stage2_cuda.runtime.triton_launch import launch

G, CUTS = 64, 6  # G^CUTS >= 2^32 keys
TILE = 512  # tokens of one program
SOME = tl.constexpr(16)  # thresholds, or tiles, that a program looks at together
COUNT, NUCLEUS, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is looked for: top_k, top_p, u
UNIT = tl.constexpr(float(1 << 44))
LOWEST_KEY, KEYS_END = tl.constexpr(-(1 << 31)), tl.constexpr(1 << 31)
SENT = 1024  # tokens of a sequence that the host may not have read yet: more than engine.AHEAD + 1
FIELDS = 5  # of a state: the borders low and high, mass and count from high on, goal


class Sequences:
    """What the choice of a token moves on: the arrays of one group of sequences, which kernels read and write.

    lengths (B) int32; tokens (B) int32, the newest; ids (B, block) int32, token number i at i mod block; sent (B, SENT)
    int32, the same at i mod SENT, where the host can read it without a copy; and x (B, C) float32, the newest token's
    embedding, with which the next step begins.
    """

    def __init__(self, empty, B, C, block, wte, wpe, sent):
        self.lengths, self.tokens, self.ids = empty((B,), "int32"), empty((B,), "int32"), empty((B, block), "int32")
        self.x, self.sent, self.wte, self.wpe = empty((B, C), "float32"), sent, wte, wpe
        self.ids[...] = 0  # what stands behind a sequence is read too: it must be some token
        self.sizes = wte.shape[0], block, C
        self.options = dict(WIDTH=triton.next_power_of_2(C), SENT=SENT, num_warps=4)

    def arguments(self):
        return self.x, self.ids, self.sent, self.tokens, self.lengths, self.wte, self.wpe, *self.sizes


def take_given(sequences):
    """Go on with `sequences.tokens`, which somebody else has chosen."""
    launch(given_kernel, sequences.lengths.shape, *sequences.arguments(), **sequences.options)


def take_likeliest(sequences, best, index, overlap=False):
    """Go on with the likeliest token, from the largest logit of each tile and its index, both (B, tiles)."""
    tiles = best.shape[1]
    count = triton.next_power_of_2(tiles)
    options = dict(sequences.options, TILES=count, OVERLAP=overlap, num_warps=min(32, max(4, count // 256)))
    if overlap:
        options["launch_pdl"] = True
    launch(likeliest_kernel, sequences.lengths.shape, *sequences.arguments(), best, index, tiles, **options)


class Draw:
    """Scratch for draws from logits (B, V): which of the questions there are decides how many launches one takes.

    numbers (2) float64: top_p and the temperature; top_k (1) int64; uniforms (B, any) float64, of which a sequence of
    length n takes number n mod any. All are read on the device.
    """

    def __init__(self, empty, B, V, uniforms, narrow_k, narrow_p):
        self.tiles = triton.cdiv(V, TILE)
        shape = B, self.tiles, 2, G
        self.whole, *self.partials = (empty(shape, "int64") for _ in range(3))
        self.states = [empty((B, FIELDS), "int64") for _ in range(2)]
        self.numbers, self.top_k = empty((2,), "float64"), empty((1,), "int64")
        self.uniforms = empty(uniforms, "float64")
        self.questions = [COUNT.value] * narrow_k + [NUCLEUS.value] * narrow_p + [DRAW.value]

    def take(self, sequences, logits, best):
        """Go on with a drawn token; best (B, tiles of their own): the largest logit of each tile."""
        B, V = logits.shape
        grid, peaks = (B, self.tiles), best.shape[1]
        sizes = dict(G=G, TILE=TILE, PEAKS=triton.next_power_of_2(peaks), num_warps=8)
        rule = self.numbers, self.top_k, self.uniforms, self.uniforms.shape[1], sequences.lengths
        launch(whole_kernel, grid, self.whole, logits, best, self.numbers, V, self.tiles, peaks, **sizes)
        before, old, new = None, 0, 1
        for question in self.questions:
            for cut in range(1, CUTS):
                arguments = self.states[new], self.partials[new], self.states[old], self.partials[old], self.whole
                asked = dict(QUESTION=question, BEFORE=-1 if before is None else before, FIRST=cut == 1)
                launch(
                    cut_kernel, grid, *arguments, logits, best, *rule, V, self.tiles, peaks, **asked, **sizes
                )  # fmt: skip
                before, old, new = question, new, old
        arguments = self.states[old], self.partials[old], logits, self.tiles
        options = dict(sequences.options, G=G, BLOCK=min(4096, triton.next_power_of_2(V)))
        launch(drawn_kernel, (B,), *sequences.arguments(), *arguments, **options)


# -- the order of the tokens -------------------------------------------------------------------------------------------


@triton.jit
def key_of(x):
    """An int32 for each float32, in their order; equal where they are."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def add_masses(
    partials, logits, best, numbers, low, high, b, V, tiles, peaks,
    G: tl.constexpr, TILE: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """This tile's mass and count above each of the G thresholds that cut [low, high)."""
    p, v = tl.arange(0, PEAKS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    peak = tl.max(tl.load(best + b * peaks + p, p < peaks, float("-inf")), 0).to(tl.float64)
    x = tl.load(logits + b.to(tl.int64) * V + v, v < V, float("-inf"))
    mass = (tl.exp((x.to(tl.float64) - peak) / tl.load(numbers + 1)) * UNIT + 0.5).to(tl.int64)
    mass = tl.where(v < V, mass, 0)
    key = tl.where(v < V, key_of(x).to(tl.int64), LOWEST_KEY - 1)
    own = partials + (b * tiles + tl.program_id(1)) * 2 * G
    for first in tl.range(0, G, SOME):  # all at once do not fit the registers
        j = first + tl.arange(0, SOME)
        above = key[:, None] >= (low + (high - low) * j // G)[None, :]  # (TILE, SOME)
        tl.store(own + j, tl.sum(tl.where(above, mass[:, None], 0), 0))
        tl.store(own + G + j, tl.sum(above.to(tl.int32), 0).to(tl.int64))


@triton.jit
def totals_above(partials, b, tiles, G: tl.constexpr):
    """Of the whole vocabulary: masses (G) and counts (G) above the thresholds."""
    j, masses, counts = tl.arange(0, G), tl.zeros((SOME, G), tl.int64), tl.zeros((SOME, G), tl.int64)
    for first in tl.range(0, tiles, SOME):
        t = first + tl.arange(0, SOME)
        at = partials + (b * tiles + t)[:, None] * 2 * G + j[None, :]
        masses += tl.load(at, (t < tiles)[:, None], 0)
        counts += tl.load(at + G, (t < tiles)[:, None], 0)
    return tl.sum(masses, 0), tl.sum(counts, 0)


@triton.jit
def narrowed(low, high, mass_above, count_above, masses, counts, goal, counted, G: tl.constexpr):
    """The part of [low, high) where the goal is reached: its borders, masses and counts at them."""
    j = tl.arange(0, G)
    reached = tl.where(counted, counts, masses) >= goal  # for the first few: the sums fall
    last = tl.sum(reached.to(tl.int32), 0) - 1
    step = high - low
    if last < G - 1:
        high = low + step * (last + 1) // G
        mass_above = tl.sum(tl.where(j == last + 1, masses, 0), 0)
        count_above = tl.sum(tl.where(j == last + 1, counts, 0), 0)
    low += step * last // G
    mass, equals = tl.sum(tl.where(j == last, masses, 0), 0), tl.sum(tl.where(j == last, counts, 0), 0)
    return low, high, mass, mass_above, equals, count_above


@triton.jit
def from_state(state, b):
    s = state + b * 5
    return tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4)


@triton.jit
def whole_kernel(
    whole, logits, best, numbers, V, tiles, peaks,
    G: tl.constexpr, TILE: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """The first cut, of all keys."""
    low, high = tl.full((), LOWEST_KEY, tl.int64), tl.full((), KEYS_END, tl.int64)
    add_masses(whole, logits, best, numbers, low, high, tl.program_id(0), V, tiles, peaks, G, TILE, PEAKS)


@triton.jit
def cut_kernel(
    state_out, partials_out, state_in, partials_in, whole, logits, best, numbers, top_k, uniforms, count, lengths,
    V, tiles, peaks,
    QUESTION: tl.constexpr, BEFORE: tl.constexpr, FIRST: tl.constexpr,
    G: tl.constexpr, TILE: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Find the part where the goal lies, by the last cut, and cut it again; with FIRST the question is a new one."""
    b = tl.program_id(0)
    if FIRST:
        masses, counts = totals_above(whole, b, tiles, G)
        total = tl.max(masses, 0)
        if BEFORE >= 0:  # what the question before has left
            low, high, mass_above, count_above, goal = from_state(state_in, b)
            last_masses, last_counts = totals_above(partials_in, b, tiles, G)
            _, _, mass, mass_above, equals, count_above = narrowed(
                low, high, mass_above, count_above, last_masses, last_counts, goal, BEFORE == COUNT, G
            )
            each = (mass - mass_above) // (equals - count_above)
            if BEFORE == COUNT:
                total = mass_above + (goal - count_above) * each
            else:
                total = mass_above + (goal - mass_above + each - 1) // each * each
        if QUESTION == COUNT:
            goal = tl.load(top_k)
        elif QUESTION == NUCLEUS:
            share = tl.load(numbers) * total.to(tl.float64)
            goal = share.to(tl.int64)
            goal = tl.maximum(goal + (goal.to(tl.float64) < share).to(tl.int64), 1)
        else:
            u = tl.load(uniforms + b * count + tl.load(lengths + b) % count)
            goal = tl.minimum((u * total.to(tl.float64)).to(tl.int64) + 1, total)
        low, high = tl.full((), LOWEST_KEY, tl.int64), tl.full((), KEYS_END, tl.int64)
        mass_above, count_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    else:
        low, high, mass_above, count_above, goal = from_state(state_in, b)
        masses, counts = totals_above(partials_in, b, tiles, G)
    low, high, mass, mass_above, equals, count_above = narrowed(
        low, high, mass_above, count_above, masses, counts, goal, QUESTION == COUNT, G
    )
    if tl.program_id(1) == 0:
        s = state_out + b * 5
        tl.store(s, low)
        tl.store(s + 1, high)
        tl.store(s + 2, mass_above)
        tl.store(s + 3, count_above)
        tl.store(s + 4, goal)
    add_masses(partials_out, logits, best, numbers, low, high, b, V, tiles, peaks, G, TILE, PEAKS)


# -- the token ---------------------------------------------------------------------------------------------------------


@triton.jit
def go_on(x, ids, sent, tokens, lengths, wte, wpe, V, block, C, b, token, WIDTH: tl.constexpr, SENT: tl.constexpr):
    """Append `token` to sequence b."""
    length, c = tl.load(lengths + b), tl.arange(0, WIDTH)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # logits that are no numbers must not lead out of the vocabulary
    position = tl.minimum(length, block - 1)  # beyond it the window slides, and x is not read
    row = tl.load(wte + token.to(tl.int64) * C + c, c < C, 0).to(tl.float32)
    row += tl.load(wpe + position.to(tl.int64) * C + c, c < C, 0).to(tl.float32)
    tl.store(x + b * C + c, row, c < C)
    tl.store(ids + b * block + length % block, token)
    tl.store(sent + b * SENT + length % SENT, token)
    tl.store(tokens + b, token)
    tl.debug_barrier()  # all threads have read the length
    tl.store(lengths + b, length + 1)


@triton.jit
def given_kernel(x, ids, sent, tokens, lengths, wte, wpe, V, block, C, WIDTH: tl.constexpr, SENT: tl.constexpr):
    token = tl.load(tokens + tl.program_id(0))
    go_on(x, ids, sent, tokens, lengths, wte, wpe, V, block, C, tl.program_id(0), token, WIDTH, SENT)


@triton.jit
def likeliest_kernel(
    x, ids, sent, tokens, lengths, wte, wpe, V, block, C, best, index, tiles,
    WIDTH: tl.constexpr, SENT: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()  # and no more: the kernel behind it is of another step
    b, t = tl.program_id(0), tl.arange(0, TILES)
    values = tl.load(best + b * tiles + t, t < tiles, float("-inf"))
    first = tl.load(index + b * tiles + t, t < tiles, V)
    token = tl.min(tl.where(values == tl.max(values, 0), first, V), 0)
    go_on(x, ids, sent, tokens, lengths, wte, wpe, V, block, C, b, token, WIDTH, SENT)


@triton.jit
def drawn_kernel(
    x, ids, sent, tokens, lengths, wte, wpe, V, block, C, state, partials, logits, tiles,
    WIDTH: tl.constexpr, SENT: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    low, high, mass_above, count_above, goal = from_state(state, b)
    masses, counts = totals_above(partials, b, tiles, G)
    key, _, mass, mass_above, equals, count_above = narrowed(
        low, high, mass_above, count_above, masses, counts, goal, False, G
    )
    each = (mass - mass_above) // tl.maximum(equals - count_above, 1)
    number = ((goal - mass_above - 1) // tl.maximum(each, 1)).to(tl.int32)  # of the equals, from 0
    token, seen = V, 0
    for first in tl.range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + b.to(tl.int64) * V + v, v < V, float("-inf"))
        equal = ((key_of(logit).to(tl.int64) == key) & (v < V)).to(tl.int32)
        order = seen + tl.cumsum(equal, 0) - equal
        token = tl.minimum(token, tl.min(tl.where((equal == 1) & (order == number), v, V), 0))
        seen += tl.sum(equal, 0)
    go_on(x, ids, sent, tokens, lengths, wte, wpe, V, block, C, b, token, WIDTH, SENT)

"""Sample the next token on the GPU, by the rules of gpt2core/sampler.py: greedy, or a seeded top-k / top-p draw.

Order the tokens from the most to the least probable, equal logits by token id. A draw is then up to three searches for
a position in this order:

    TOP_K: where the number of tokens reaches top_k
    TOP_P: where the total probability reaches the share top_p of what TOP_K keeps
    DRAW:  where the total probability exceeds the share u of what TOP_P keeps; u is uniform in [0, 1)

No sort is needed. The keys of logits, integers that sort_key() makes from their bits, have the order of the logits, and

    M(t) = sum of the masses of the tokens with key >= t,  mass = round(2^44 exp((logit - maximum) / temperature))

falls as t grows. Therefore a 64-ary search finds the key at which M reaches a goal: 64 thresholds divide the range of
keys, all programs compute M at each threshold, and the next round divides the interval that contains the goal. After
6 rounds of 6 bits one key is left. The first round divides all keys, so the three searches share it. If several tokens
have this key, their masses are equal: a division gives the index among them, in the order of token ids.

Masses are integers, so their sum does not depend on the order of addition, and a draw has the same bits every time.
With 2^44 the sum of 2^18 masses fits in 63 bits; the rounding changes fewer than one draw in 10^8.
"""

# B sequences, V vocabulary, tiles of the vocabulary (one per program), G thresholds

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from stage2_cuda.runtime.triton_launch import launch

G, ROUNDS = 64, 6  # G^ROUNDS >= 2^32 keys
BLOCK_V = 512  # tokens per program
GROUP = tl.constexpr(16)  # thresholds, or tiles, that a program handles at a time
TOP_K, TOP_P, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the searches
MASS_UNIT = tl.constexpr(float(1 << 44))
MIN_KEY, END_KEY = tl.constexpr(-(1 << 31)), tl.constexpr(1 << 31)
READBACK = 1024  # tokens per sequence in the ring buffer for the host: more than decoder.STEPS_AHEAD + 1
STATE_FIELDS = 5  # of a search: interval [low, high), mass and count of the keys >= high, goal


class Sequences:
    """The device arrays of a batch of sequences, which the sampling kernels update.

    lengths (B) int32. tokens (B) int32: the newest ones. ids (B, block) int32: token number i at i % block. readback
    (B, READBACK) int32: token number i at i % READBACK, in memory that the host reads without a copy. x (B, C) float32:
    the embedding of the newest token, the input of the next decode step.
    """

    def __init__(self, empty, B, C, block, wte, wpe, readback):
        self.lengths, self.tokens, self.ids = empty((B,), "int32"), empty((B,), "int32"), empty((B, block), "int32")
        self.x, self.readback, self.wte, self.wpe = empty((B, C), "float32"), readback, wte, wpe
        self.ids[...] = 0  # elements beyond a sequence's end are read too and must be valid token ids
        self.sizes = wte.shape[0], block, C
        self.options = dict(BLOCK_C=triton.next_power_of_2(C), READBACK=READBACK, num_warps=4)

    def arguments(self):
        return self.x, self.ids, self.readback, self.tokens, self.lengths, self.wte, self.wpe, *self.sizes


def append_given(sequences):
    """Append the tokens that the host has written to `sequences.tokens`."""
    launch(append_given_kernel, sequences.lengths.shape, *sequences.arguments(), **sequences.options)


def append_greedy(sequences, maxima, indices, pdl=False):
    """Append the most probable token; maxima, indices (B, tiles): each tile's largest logit, from batched.unembed."""
    tiles = maxima.shape[1]
    padded = triton.next_power_of_2(tiles)
    options = dict(sequences.options, TILES=padded, PDL=pdl, num_warps=min(32, max(4, padded // 256)))
    if pdl:
        options["launch_pdl"] = True
    launch(append_greedy_kernel, sequences.lengths.shape, *sequences.arguments(), maxima, indices, tiles, **options)


class DeviceSampler:
    """Draws tokens from logits (B, V); top_k, top_p: whether to restrict the draw (5 more launches each).

    The kernels read the options from device arrays. numbers (2) float64: top_p and the temperature. top_k (1) int64.
    uniforms (B, n) float64: a step with sequence length L uses number L % n.
    """

    def __init__(self, empty, B, V, uniforms_shape, top_k, top_p):
        self.tiles = triton.cdiv(V, BLOCK_V)
        shape = B, self.tiles, 2, G
        self.first_partials, *self.partials = (empty(shape, "int64") for _ in range(3))
        self.states = [empty((B, STATE_FIELDS), "int64") for _ in range(2)]
        self.numbers, self.top_k = empty((2,), "float64"), empty((1,), "int64")
        self.uniforms = empty(uniforms_shape, "float64")
        self.searches = [TOP_K.value] * top_k + [TOP_P.value] * top_p + [DRAW.value]

    def append_sampled(self, sequences, logits, maxima):
        """Draw one token per sequence and append it; maxima (B, any): the largest logit of each tile of logits."""
        B, V = logits.shape
        grid, peaks = (B, self.tiles), maxima.shape[1]
        sizes = dict(G=G, BLOCK_V=BLOCK_V, PEAKS=triton.next_power_of_2(peaks), num_warps=8)
        values = self.numbers, self.top_k, self.uniforms, self.uniforms.shape[1], sequences.lengths
        scratch = self.first_partials, logits, maxima, self.numbers, V, self.tiles, peaks
        launch(first_round_kernel, grid, *scratch, **sizes)
        previous, old, new = None, 0, 1
        for search in self.searches:
            for number in range(1, ROUNDS):
                buffers = self.states[new], self.partials[new], self.states[old], self.partials[old]
                arguments = *buffers, self.first_partials, logits, maxima, *values, V, self.tiles, peaks
                constants = dict(SEARCH=search, PREVIOUS=-1 if previous is None else previous, FIRST=number == 1)
                launch(search_kernel, grid, *arguments, **constants, **sizes)
                previous, old, new = search, new, old
        arguments = self.states[old], self.partials[old], logits, self.tiles
        options = dict(sequences.options, G=G, BLOCK_V=min(4096, triton.next_power_of_2(V)))
        launch(append_sampled_kernel, (B,), *sequences.arguments(), *arguments, **options)


# -- the search --------------------------------------------------------------------------------------------------------


@triton.jit
def sort_key(x):
    """An int32 for each float32, in the same order; equal floats have equal keys."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def add_masses(
    partials_ptr, logits_ptr, maxima_ptr, numbers_ptr, low, high, b, V, tiles, peaks,
    G: tl.constexpr, BLOCK_V: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Store mass and count of this tile's tokens at or above each of the G thresholds that divide [low, high)."""
    p, v = tl.arange(0, PEAKS), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    maximum = tl.max(tl.load(maxima_ptr + b * peaks + p, p < peaks, float("-inf")), 0).to(tl.float64)
    x = tl.load(logits_ptr + b.to(tl.int64) * V + v, v < V, float("-inf"))
    mass = (tl.exp((x.to(tl.float64) - maximum) / tl.load(numbers_ptr + 1)) * MASS_UNIT + 0.5).to(tl.int64)
    mass = tl.where(v < V, mass, 0)
    key = tl.where(v < V, sort_key(x).to(tl.int64), MIN_KEY - 1)
    partials_ptr += (b * tiles + tl.program_id(1)) * 2 * G
    for start in tl.range(0, G, GROUP):  # all thresholds at once would not fit in registers
        j = start + tl.arange(0, GROUP)
        above = key[:, None] >= (low + (high - low) * j // G)[None, :]  # (BLOCK_V, GROUP)
        tl.store(partials_ptr + j, tl.sum(tl.where(above, mass[:, None], 0), 0))
        tl.store(partials_ptr + G + j, tl.sum(above.to(tl.int32), 0).to(tl.int64))


@triton.jit
def sum_tiles(partials_ptr, b, tiles, G: tl.constexpr):
    """Masses (G) and counts (G) at or above the thresholds, over the whole vocabulary."""
    j, masses, counts = tl.arange(0, G), tl.zeros((GROUP, G), tl.int64), tl.zeros((GROUP, G), tl.int64)
    for start in tl.range(0, tiles, GROUP):
        t = start + tl.arange(0, GROUP)
        offs = partials_ptr + (b * tiles + t)[:, None] * 2 * G + j[None, :]
        masses += tl.load(offs, (t < tiles)[:, None], 0)
        counts += tl.load(offs + G, (t < tiles)[:, None], 0)
    return tl.sum(masses, 0), tl.sum(counts, 0)


@triton.jit
def narrow_interval(low, high, mass_above, count_above, masses, counts, goal, by_count, G: tl.constexpr):
    """Find the interval between two thresholds that contains the goal: a count of tokens if by_count, else a mass.

    Returns its low and high; the mass of the keys >= low, and >= high; the count of the keys >= low, and >= high.
    """
    j = tl.arange(0, G)
    reached = tl.where(by_count, counts, masses) >= goal  # true for the first thresholds, because the sums fall
    last = tl.sum(reached.to(tl.int32), 0) - 1
    step = high - low
    if last < G - 1:
        high = low + step * (last + 1) // G
        mass_above = tl.sum(tl.where(j == last + 1, masses, 0), 0)
        count_above = tl.sum(tl.where(j == last + 1, counts, 0), 0)
    low += step * last // G
    mass, count = tl.sum(tl.where(j == last, masses, 0), 0), tl.sum(tl.where(j == last, counts, 0), 0)
    return low, high, mass, mass_above, count, count_above


@triton.jit
def load_state(state_ptr, b):
    state_ptr += b * 5
    low, high, mass_above = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    return low, high, mass_above, tl.load(state_ptr + 3), tl.load(state_ptr + 4)


@triton.jit
def first_round_kernel(
    partials_ptr, logits_ptr, maxima_ptr, numbers_ptr, V, tiles, peaks,
    G: tl.constexpr, BLOCK_V: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """The first round, which divides all keys."""
    low, high, b = tl.full((), MIN_KEY, tl.int64), tl.full((), END_KEY, tl.int64), tl.program_id(0)
    add_masses(
        partials_ptr, logits_ptr, maxima_ptr, numbers_ptr, low, high, b, V, tiles, peaks, G, BLOCK_V, PEAKS
    )  # fmt: skip


@triton.jit
def search_kernel(
    state_out_ptr, partials_out_ptr, state_in_ptr, partials_in_ptr, first_partials_ptr, logits_ptr, maxima_ptr,
    numbers_ptr, top_k_ptr, uniforms_ptr, uniforms_count, lengths_ptr, V, tiles, peaks,
    SEARCH: tl.constexpr, PREVIOUS: tl.constexpr, FIRST: tl.constexpr,
    G: tl.constexpr, BLOCK_V: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """One round: find the interval that contains the goal, from the sums of the last round, and divide it again.

    FIRST: this round starts a new search, whose goal follows from the result of the PREVIOUS search (-1: none).
    """
    b = tl.program_id(0)
    if FIRST:
        masses, counts = sum_tiles(first_partials_ptr, b, tiles, G)
        total = tl.max(masses, 0)
        if PREVIOUS >= 0:  # the mass that the previous search keeps
            low, high, mass_above, count_above, goal = load_state(state_in_ptr, b)
            last_masses, last_counts = sum_tiles(partials_in_ptr, b, tiles, G)
            _, _, mass, mass_above, count, count_above = narrow_interval(
                low, high, mass_above, count_above, last_masses, last_counts, goal, PREVIOUS == TOP_K, G
            )
            each = (mass - mass_above) // (count - count_above)
            if PREVIOUS == TOP_K:
                total = mass_above + (goal - count_above) * each
            else:
                total = mass_above + (goal - mass_above + each - 1) // each * each
        if SEARCH == TOP_K:
            goal = tl.load(top_k_ptr)
        elif SEARCH == TOP_P:
            share = tl.load(numbers_ptr) * total.to(tl.float64)
            goal = share.to(tl.int64)
            goal = tl.maximum(goal + (goal.to(tl.float64) < share).to(tl.int64), 1)
        else:
            u = tl.load(uniforms_ptr + b * uniforms_count + tl.load(lengths_ptr + b) % uniforms_count)
            goal = tl.minimum((u * total.to(tl.float64)).to(tl.int64) + 1, total)
        low, high = tl.full((), MIN_KEY, tl.int64), tl.full((), END_KEY, tl.int64)
        mass_above, count_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    else:
        low, high, mass_above, count_above, goal = load_state(state_in_ptr, b)
        masses, counts = sum_tiles(partials_in_ptr, b, tiles, G)
    low, high, mass, mass_above, count, count_above = narrow_interval(
        low, high, mass_above, count_above, masses, counts, goal, SEARCH == TOP_K, G
    )
    if tl.program_id(1) == 0:
        state_out_ptr += b * 5
        tl.store(state_out_ptr, low)
        tl.store(state_out_ptr + 1, high)
        tl.store(state_out_ptr + 2, mass_above)
        tl.store(state_out_ptr + 3, count_above)
        tl.store(state_out_ptr + 4, goal)
    add_masses(
        partials_out_ptr, logits_ptr, maxima_ptr, numbers_ptr, low, high, b, V, tiles, peaks, G, BLOCK_V, PEAKS
    )  # fmt: skip


# -- append the token --------------------------------------------------------------------------------------------------


@triton.jit
def append_token(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C, b, token,
    BLOCK_C: tl.constexpr, READBACK: tl.constexpr,
):  # fmt: skip
    """Append `token` to sequence b, and load its embedding into x."""
    length, cols = tl.load(lengths_ptr + b), tl.arange(0, BLOCK_C)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # NaN logits give any index: keep it within the vocabulary
    position = tl.minimum(length, block - 1)  # beyond the block the window slides, and x is not read
    x = tl.load(wte_ptr + token.to(tl.int64) * C + cols, cols < C, 0).to(tl.float32)
    x += tl.load(wpe_ptr + position.to(tl.int64) * C + cols, cols < C, 0).to(tl.float32)
    tl.store(x_ptr + b * C + cols, x, cols < C)
    tl.store(ids_ptr + b * block + length % block, token)
    tl.store(readback_ptr + b * READBACK + length % READBACK, token)
    tl.store(tokens_ptr + b, token)
    tl.debug_barrier()  # all threads must have read the length before it changes
    tl.store(lengths_ptr + b, length + 1)


@triton.jit
def append_given_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C,
    BLOCK_C: tl.constexpr, READBACK: tl.constexpr,
):  # fmt: skip
    b, token = tl.program_id(0), tl.load(tokens_ptr + tl.program_id(0))
    append_token(
        x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C, b, token,
        BLOCK_C, READBACK,
    )  # fmt: skip


@triton.jit
def append_greedy_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C,
    maxima_ptr, indices_ptr, tiles,
    BLOCK_C: tl.constexpr, READBACK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()  # the next kernel belongs to another step, so it is not allowed to start early
    b, t = tl.program_id(0), tl.arange(0, TILES)
    maxima = tl.load(maxima_ptr + b * tiles + t, t < tiles, float("-inf"))
    indices = tl.load(indices_ptr + b * tiles + t, t < tiles, V)
    token = tl.min(tl.where(maxima == tl.max(maxima, 0), indices, V), 0)
    append_token(
        x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C, b, token,
        BLOCK_C, READBACK,
    )  # fmt: skip


@triton.jit
def append_sampled_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C,
    state_ptr, partials_ptr, logits_ptr, tiles,
    BLOCK_C: tl.constexpr, READBACK: tl.constexpr, G: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    low, high, mass_above, count_above, goal = load_state(state_ptr, b)
    masses, counts = sum_tiles(partials_ptr, b, tiles, G)
    key, _, mass, mass_above, count, count_above = narrow_interval(
        low, high, mass_above, count_above, masses, counts, goal, False, G
    )
    each = (mass - mass_above) // tl.maximum(count - count_above, 1)  # the mass of one token with this key
    index = ((goal - mass_above - 1) // tl.maximum(each, 1)).to(tl.int32)  # among the tokens with this key
    token, seen = V, 0
    for start in tl.range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        logits = tl.load(logits_ptr + b.to(tl.int64) * V + v, v < V, float("-inf"))
        equal = ((sort_key(logits).to(tl.int64) == key) & (v < V)).to(tl.int32)
        order = seen + tl.cumsum(equal, 0) - equal
        token = tl.minimum(token, tl.min(tl.where((equal == 1) & (order == index), v, V), 0))
        seen += tl.sum(equal, 0)
    append_token(
        x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, V, block, C, b, token,
        BLOCK_C, READBACK,
    )  # fmt: skip

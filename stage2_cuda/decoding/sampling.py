"""Sample the next token on the GPU, by the rules of gpt2core/sampler.py: greedy, or a seeded top-k / top-p draw.

Consider the tokens in the order from the most to the least probable; tokens with equal logits are in the order of their
ids. A draw consists of up to three searches. Each search computes a sum over the tokens in this order, and ends at the
token at which the sum reaches a goal:

    TOP_K: the sum of 1 per token reaches top_k. The tokens after this one are removed.
    TOP_P: the sum of the probabilities reaches top_p * P. The tokens after this one are removed.
    DRAW:  the sum of the probabilities exceeds u * P. This token is drawn.

P is the sum of the probabilities of all tokens that earlier searches have not removed; u is a random number, uniform in
[0, 1).

The tokens are not sorted. Each logit has a key, an integer made from its bits by sort_key(); keys have the order of the
logits. The unnormalised probability of a token is its mass, an integer:

    mass = round(2^44 exp((logit - maximum) / temperature))
    M(t) = sum of the masses of all tokens whose key is at least t

Here maximum is the largest logit. M(t) falls as t grows. Therefore a 64-ary search finds the key at which M reaches the
goal (TOP_K uses the number of tokens instead of M). In a round, 64 thresholds divide an interval of keys, and the
programs compute M at each threshold; the next round divides the part in which M reaches the goal. After 6 rounds of 6
bits one key is left. The first round is the same for all three searches, because it divides the interval of all keys;
so it is computed only once. If several tokens have the final key, their masses are equal, and a division gives the
index of the drawn token among them.

Masses are integers, so their sum does not depend on the order of addition, and a draw has the same bits every time.
With 2^44 the sum of 2^18 masses fits in 63 bits; the rounding changes fewer than one draw in 10^8.
"""

# B sequences, V vocabulary, G thresholds; the vocabulary is divided into tiles, one per program

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from stage2_cuda.kernels.rotary import cosines_and_sines
from stage2_cuda.runtime.triton_launch import launch

G, ROUNDS = 64, 6  # G^ROUNDS >= 2^32 keys
BLOCK_V = 512  # tokens per program
GROUP = tl.constexpr(16)  # thresholds (add_masses) or tiles (sum_tiles) per loop iteration
TOP_K, TOP_P, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the searches
MASS_UNIT = tl.constexpr(float(1 << 44))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the smallest finite float32
MIN_KEY, END_KEY = tl.constexpr(-(1 << 31)), tl.constexpr(1 << 31)  # all keys are in [MIN_KEY, END_KEY)
READBACK = 1024  # tokens per sequence in the ring buffer that the host reads: more than decoder.STEPS_AHEAD + 1
STATE_FIELDS = 5  # the state of a search: low, high (interval [low, high)), mass and count of the keys >= high, goal


class Sequences:
    """The device arrays of a batch of sequences, which the sampling kernels update.

    lengths (B) int32: number of tokens. tokens (B) int32: the newest token. ids (B, block) int32: token number i is at
    index i % block. readback (B, READBACK) int32, in memory that the host reads without a copy: token number i is at
    index i % READBACK. x (B, C) float32: the embedding of the newest token, the input of the next decode step.
    wte (V, C), wpe (block, C): the embeddings. With rotary positions, wpe is None and `pairs` is half the head size;
    rotation (B, 2, pairs) float32 then has the cosines and the sines of the angles at the position of the newest token.
    """

    def __init__(self, empty, B, C, block, wte, wpe, readback, pairs=0):
        self.lengths, self.tokens, self.ids = empty((B,), "int32"), empty((B,), "int32"), empty((B, block), "int32")
        self.x, self.readback, self.wte, self.wpe = empty((B, C), "float32"), readback, wte, wpe
        self.ids[...] = 0  # elements beyond a sequence's end are read too and must be valid token ids
        self.rotation = empty((B, 2, pairs), "float32") if pairs else None
        self.sizes = wte.shape[0], block, C
        self.options = dict(BLOCK_C=triton.next_power_of_2(C), PAIRS=pairs, READBACK=READBACK, num_warps=4)

    def arguments(self):
        """The first arguments of the append kernels."""
        arrays = self.x, self.ids, self.readback, self.tokens, self.lengths, self.wte, self.wpe, self.rotation
        return *arrays, *self.sizes


def append_given(sequences):
    """Append the tokens that the host has written to `sequences.tokens`."""
    launch(append_given_kernel, sequences.lengths.shape, *sequences.arguments(), **sequences.options)


def append_greedy(sequences, maxima, indices, pdl=False):
    """Append the most probable token to each sequence.

    maxima, indices (B, tiles): the largest logit of each vocabulary tile and its token id, from batched.unembed.
    """
    tiles = maxima.shape[1]
    padded = triton.next_power_of_2(tiles)
    options = dict(sequences.options, TILES=padded, PDL=pdl, num_warps=min(32, max(4, padded // 256)))
    if pdl:
        options["launch_pdl"] = True
    launch(append_greedy_kernel, sequences.lengths.shape, *sequences.arguments(), maxima, indices, tiles, **options)


class TokenMask:
    """Excludes ids without a token, such as the padding of a vocabulary, from logits (B, V).

    valid (V) int8, which the caller fills: 1 for an id that has a token.
    """

    def __init__(self, empty, B, V):
        self.valid, self.tiles = empty((V,), "int8"), triton.cdiv(V, BLOCK_V)
        self.maxima, self.indices = empty((B, self.tiles), "float32"), empty((B, self.tiles), "int32")

    def exclude(self, logits):
        """Set the logits of excluded ids to -infinity, in place; returns (maxima, indices) of the others.

        These are as from batched.unembed, but the tiles are those of this object.
        """
        arguments = logits, self.maxima, self.indices, self.valid, logits.shape[1], self.tiles
        launch(exclude_kernel, self.maxima.shape, *arguments, BLOCK_V=BLOCK_V, num_warps=4)
        return self.maxima, self.indices


class DeviceSampler:
    """Draws tokens from logits (B, V).

    restrict_k, restrict_p: whether the draw uses top-k and top-p; each costs 5 more launches. uniforms_shape: (B, n).
    The kernels read the options from device arrays, which the caller fills: top_p_and_temperature (2) float64; top_k
    (1) int64; uniforms (B, n) float64, n random numbers for each sequence. A sequence of L tokens uses its number L % n
    to draw its next token.
    """

    def __init__(self, empty, B, V, uniforms_shape, restrict_k, restrict_p):
        self.tiles = triton.cdiv(V, BLOCK_V)
        shape = B, self.tiles, 2, G  # of each tile: G masses and G counts, one for each threshold
        # the sums of the first round; two buffers for the later rounds, each of which reads one and writes the other
        self.first_partials, *self.partials = (empty(shape, "int64") for _ in range(3))
        self.states = [empty((B, STATE_FIELDS), "int64") for _ in range(2)]
        self.top_p_and_temperature, self.top_k = empty((2,), "float64"), empty((1,), "int64")
        self.uniforms = empty(uniforms_shape, "float64")
        self.searches = [TOP_K.value] * restrict_k + [TOP_P.value] * restrict_p + [DRAW.value]

    def append_sampled(self, sequences, logits, maxima):
        """Draw one token for each sequence and append it.

        maxima (B, n_maxima): the largest logit of each of n_maxima parts of the vocabulary, from batched.unembed.
        """
        B, V = logits.shape
        grid, n_maxima = (B, self.tiles), maxima.shape[1]
        sizes = dict(G=G, BLOCK_V=BLOCK_V, MAXIMA=triton.next_power_of_2(n_maxima), num_warps=8)
        values = self.top_p_and_temperature, self.top_k, self.uniforms, self.uniforms.shape[1], sequences.lengths
        first_arguments = self.first_partials, logits, maxima, self.top_p_and_temperature, V, self.tiles, n_maxima
        launch(first_round_kernel, grid, *first_arguments, **sizes)
        # previous: the search of the previous launch, -1 if there is none; old, new: the buffers that a round reads and
        # writes
        previous, old, new = -1, 0, 1
        for search in self.searches:
            for round_number in range(1, ROUNDS):  # round 0 is that of first_round_kernel
                buffers = self.states[new], self.partials[new], self.states[old], self.partials[old]
                arguments = *buffers, self.first_partials, logits, maxima, *values, V, self.tiles, n_maxima
                constants = dict(SEARCH=search, PREVIOUS=previous, FIRST=round_number == 1)
                launch(search_kernel, grid, *arguments, **constants, **sizes)
                previous, old, new = search, new, old
        arguments = self.states[old], self.partials[old], logits, self.tiles
        options = dict(sequences.options, G=G, BLOCK_V=min(4096, triton.next_power_of_2(V)))
        launch(append_sampled_kernel, (B,), *sequences.arguments(), *arguments, **options)


# -- the search --------------------------------------------------------------------------------------------------------


@triton.jit
def sort_key(x):
    """The int32 key of each float32: a < b gives key(a) < key(b), and a == b gives key(a) == key(b)."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def add_masses(
    partials_ptr, logits_ptr, maxima_ptr, options_ptr, low, high, b, V, tiles, n_maxima,
    G: tl.constexpr, BLOCK_V: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Store the mass and the count of this tile's tokens with key >= t, for each threshold t.

    The G thresholds divide [low, high) into G equal parts; the first threshold is low. options_ptr: top_p and then the
    temperature.
    """
    m, v = tl.arange(0, MAXIMA), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    maximum = tl.max(tl.load(maxima_ptr + b * n_maxima + m, m < n_maxima, float("-inf")), 0).to(tl.float64)
    x = tl.load(logits_ptr + b.to(tl.int64) * V + v, v < V, float("-inf"))
    mass = (tl.exp((x.to(tl.float64) - maximum) / tl.load(options_ptr + 1)) * MASS_UNIT + 0.5).to(tl.int64)
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
    """Add the partial sums of all tiles: (masses (G), counts (G)) of the tokens with key >= each threshold."""
    j, masses, counts = tl.arange(0, G), tl.zeros((GROUP, G), tl.int64), tl.zeros((GROUP, G), tl.int64)
    for start in tl.range(0, tiles, GROUP):
        t = start + tl.arange(0, GROUP)
        offs = partials_ptr + (b * tiles + t)[:, None] * 2 * G + j[None, :]
        masses += tl.load(offs, (t < tiles)[:, None], 0)
        counts += tl.load(offs + G, (t < tiles)[:, None], 0)
    return tl.sum(masses, 0), tl.sum(counts, 0)


@triton.jit
def narrow_interval(low, high, mass_above, count_above, masses, counts, goal, by_count, G: tl.constexpr):
    """Find the part of [low, high), between two thresholds, in which the sum reaches the goal.

    The sum and the goal are counts of tokens if by_count, else masses. mass_above, count_above: of the tokens with
    key >= high. Returns low and high of the found part; the mass of the tokens with key >= this low, and of those with
    key >= this high; and the same for the count.
    """
    j = tl.arange(0, G)
    # true for the thresholds 0 to `last` and false for higher ones, because the sums fall as the threshold grows
    reached = tl.where(by_count, counts, masses) >= goal
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
    """The STATE_FIELDS of sequence b: low, high, mass_above, count_above, goal."""
    state_ptr += b * 5
    low, high, mass_above = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    return low, high, mass_above, tl.load(state_ptr + 3), tl.load(state_ptr + 4)


@triton.jit
def first_round_kernel(
    partials_ptr, logits_ptr, maxima_ptr, options_ptr, V, tiles, n_maxima,
    G: tl.constexpr, BLOCK_V: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """The first round, which divides the interval of all keys."""
    low, high, b = tl.full((), MIN_KEY, tl.int64), tl.full((), END_KEY, tl.int64), tl.program_id(0)
    add_masses(
        partials_ptr, logits_ptr, maxima_ptr, options_ptr, low, high, b, V, tiles, n_maxima, G, BLOCK_V, MAXIMA
    )  # fmt: skip


@triton.jit
def search_kernel(
    state_out_ptr, partials_out_ptr, state_in_ptr, partials_in_ptr, first_partials_ptr, logits_ptr, maxima_ptr,
    options_ptr, top_k_ptr, uniforms_ptr, uniforms_count, lengths_ptr, V, tiles, n_maxima,
    SEARCH: tl.constexpr, PREVIOUS: tl.constexpr, FIRST: tl.constexpr,
    G: tl.constexpr, BLOCK_V: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """One round of a search: find the part in which the sum reaches the goal, from the previous round, and divide it.

    SEARCH, PREVIOUS: this search and the one before it, TOP_K, TOP_P or DRAW; PREVIOUS is -1 if there is none. FIRST:
    whether this is the search's first launch, which computes the goal from the result of the previous search.
    """
    b = tl.program_id(0)
    if FIRST:
        masses, counts = sum_tiles(first_partials_ptr, b, tiles, G)
        total = tl.max(masses, 0)  # the mass of all tokens; changed below to that of the tokens not removed so far
        if PREVIOUS >= 0:
            low, high, mass_above, count_above, goal = load_state(state_in_ptr, b)
            final_masses, final_counts = sum_tiles(partials_in_ptr, b, tiles, G)  # of the previous search's last round
            _, _, mass, mass_above, count, count_above = narrow_interval(
                low, high, mass_above, count_above, final_masses, final_counts, goal, PREVIOUS == TOP_K, G
            )
            token_mass = (mass - mass_above) // (count - count_above)  # of one token with the final key
            if PREVIOUS == TOP_K:
                total = mass_above + (goal - count_above) * token_mass
            else:
                # the goal rounded up to whole tokens
                total = mass_above + (goal - mass_above + token_mass - 1) // token_mass * token_mass
        if SEARCH == TOP_K:
            goal = tl.load(top_k_ptr)
        elif SEARCH == TOP_P:
            share = tl.load(options_ptr) * total.to(tl.float64)
            goal = share.to(tl.int64)
            goal = tl.maximum(goal + (goal.to(tl.float64) < share).to(tl.int64), 1)  # `share` rounded up, at least 1
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
        partials_out_ptr, logits_ptr, maxima_ptr, options_ptr, low, high, b, V, tiles, n_maxima, G, BLOCK_V, MAXIMA
    )  # fmt: skip


@triton.jit
def exclude_kernel(logits_ptr, maxima_ptr, indices_ptr, valid_ptr, V, tiles, BLOCK_V: tl.constexpr):
    b, v = tl.program_id(0), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits_ptr += b.to(tl.int64) * V
    x, valid = tl.load(logits_ptr + v, v < V, 0), tl.load(valid_ptr + v, v < V, 0) != 0
    x = tl.where(x > float("-inf"), x, LOWEST)  # also NaN: so every token is larger than an excluded id
    x = tl.where(valid, x, float("-inf"))
    tl.store(logits_ptr + v, x, v < V)
    maximum = tl.max(x, 0)
    first_index = tl.min(tl.where(x == maximum, v, V - 1), 0)
    tl.store(maxima_ptr + b * tiles + tl.program_id(1), maximum)
    tl.store(indices_ptr + b * tiles + tl.program_id(1), first_index)


# -- append the token --------------------------------------------------------------------------------------------------


@triton.jit
def append_token(
    arrays, V, block, C, b, length, token, BLOCK_C: tl.constexpr, PAIRS: tl.constexpr, READBACK: tl.constexpr
):  # fmt: skip
    """Append `token` to sequence b, which has `length` tokens; store its embedding in x, and its rotation."""
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr = arrays
    cols = tl.arange(0, BLOCK_C)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # NaN logits give any index: keep it within the vocabulary
    # first the store to the memory of the host, which takes longest
    tl.store(readback_ptr + b * READBACK + length % READBACK, token)
    x = tl.load(wte_ptr + token.to(tl.int64) * C + cols, cols < C, 0).to(tl.float32)
    if rotation_ptr is not None:
        i = tl.arange(0, triton.next_power_of_2(PAIRS))
        cos, sin = cosines_and_sines(length, i, PAIRS)
        tl.store(rotation_ptr + b * 2 * PAIRS + i, cos, i < PAIRS)
        tl.store(rotation_ptr + b * 2 * PAIRS + PAIRS + i, sin, i < PAIRS)
    else:
        position = tl.minimum(length, block - 1)  # a longer sequence is continued by window steps, which do not read x
        x += tl.load(wpe_ptr + position.to(tl.int64) * C + cols, cols < C, 0).to(tl.float32)
    tl.store(x_ptr + b * C + cols, x, cols < C)
    tl.store(ids_ptr + b * block + length % block, token)
    tl.store(tokens_ptr + b, token)
    tl.debug_barrier()  # all threads must have read the length before it changes
    tl.store(lengths_ptr + b, length + 1)


@triton.jit
def append_given_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr, V, block, C,
    BLOCK_C: tl.constexpr, PAIRS: tl.constexpr, READBACK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length, token = tl.load(lengths_ptr + b), tl.load(tokens_ptr + b)
    arrays = (x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr)
    append_token(arrays, V, block, C, b, length, token, BLOCK_C, PAIRS, READBACK)


@triton.jit
def append_greedy_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr, V, block, C,
    maxima_ptr, indices_ptr, tiles,
    BLOCK_C: tl.constexpr, PAIRS: tl.constexpr, READBACK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, t = tl.program_id(0), tl.arange(0, TILES)
    length = tl.load(lengths_ptr + b)
    if PDL:
        gdc_wait()  # without gdc_launch_dependents: the next kernel belongs to the next step and must not start early
    maxima = tl.load(maxima_ptr + b * tiles + t, t < tiles, float("-inf"))
    indices = tl.load(indices_ptr + b * tiles + t, t < tiles, V)
    token = tl.min(tl.where(maxima == tl.max(maxima, 0), indices, V), 0)
    arrays = (x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr)
    append_token(arrays, V, block, C, b, length, token, BLOCK_C, PAIRS, READBACK)


@triton.jit
def append_sampled_kernel(
    x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr, V, block, C,
    state_ptr, partials_ptr, logits_ptr, tiles,
    BLOCK_C: tl.constexpr, PAIRS: tl.constexpr, READBACK: tl.constexpr, G: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length = tl.load(lengths_ptr + b)
    low, high, mass_above, count_above, goal = load_state(state_ptr, b)
    masses, counts = sum_tiles(partials_ptr, b, tiles, G)
    key, _, mass, mass_above, count, count_above = narrow_interval(
        low, high, mass_above, count_above, masses, counts, goal, False, G
    )
    token_mass = (mass - mass_above) // tl.maximum(count - count_above, 1)  # of one token with this key
    # The drawn token is number `index` of the tokens with this key, in the order of token ids.
    index = ((goal - mass_above - 1) // tl.maximum(token_mass, 1)).to(tl.int32)
    token, earlier = V, 0  # earlier: number of tokens with this key in the blocks before this one
    for start in tl.range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        logits = tl.load(logits_ptr + b.to(tl.int64) * V + v, v < V, float("-inf"))
        equal = ((sort_key(logits).to(tl.int64) == key) & (v < V)).to(tl.int32)
        index_here = earlier + tl.cumsum(equal, 0) - equal
        token = tl.minimum(token, tl.min(tl.where((equal == 1) & (index_here == index), v, V), 0))
        earlier += tl.sum(equal, 0)
    arrays = (x_ptr, ids_ptr, readback_ptr, tokens_ptr, lengths_ptr, wte_ptr, wpe_ptr, rotation_ptr)
    append_token(arrays, V, block, C, b, length, token, BLOCK_C, PAIRS, READBACK)

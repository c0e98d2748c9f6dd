"""Generation without autograd: the cache, the step and the choice of a token stay on the GPU; the host reads along.

A step is one CUDA graph. Its length, its tokens and its random numbers are read from device memory, so the graph that
was recorded once serves every step, and the next one may be launched before anybody has read the token of this one.
In Triton's interpreter the same launches are made one by one.

There are three kinds of step. `prefill` computes all positions of the prompts with the kernels of training, and fills
a cache with their keys and values, not recorded where they are many; `cached` computes one more position of each
sequence, over that cache. Once the longest sequence fills the block, the window slides, and `whole` computes the last
block_size positions of all sequences again, as stage 0 does.
"""

# B sequences, T positions, C channels, H heads, V vocabulary; k and v of a layer are cached as (B, block, 2C)

import contextlib
from collections import deque

import numpy as np

from gpt2core.arena import round_up
from gpt2core.sampler import Greedy, Sampling
from gpt2core.tensor import Tensor, no_grad
from stage2_cuda.decoding import batched as decode
from stage2_cuda.decoding import last_token as ends
from stage2_cuda.decoding import sampling
from stage2_cuda.decoding.decode_step import ManyRows, OneRow
from stage2_cuda.runtime.cuda_graph import RecordedStep, Workspace

SHORT = 4096  # tokens of all prompts, up to which Python takes longer to launch prefill than the GPU: it is recorded
AHEAD = 4  # steps under way beyond the one whose tokens are read next
UNIFORMS = 256  # random numbers that are brought to the device at once, for each sequence


class Engine:
    """Continues `batch` sequences by one model: what sampler.Decoder does, with its methods.

    model: a whole GPT2 on CudaBackend, whose parameters are read where they are; of one text, most only when it begins.
    queue: a Queue or Eager; tiles: decode.Tiles. Sequences may be of different lengths. Rules that are all Greedy(), or
    all Sampling() of the same options, choose on the device; any other rule gets its logits on the host, and the host
    waits.
    """

    def __init__(self, model, batch, queue, tiles):
        config, backend = model.config, model.head.backend
        self.model, self.queue, self.backend, self.batch, self.tiles = model, queue, backend, batch, tiles
        self.steps, self.pending = {}, deque()  # {what a step does: the function, or its graph}; tokens on their way
        with queue:
            self.allocate(config, backend.empty)

    def allocate(self, config, empty):
        B, C, V, block = self.batch, config.n_embd, config.vocab_size, config.block_size
        wte, wpe = (self.model.parameters[f"transformer.{name}.weight"].data for name in ("wte", "wpe"))
        sent, self.sent = self.queue.shared((B, sampling.SENT), "int32")
        self.sequences = sampling.Sequences(empty, B, C, block, wte, wpe, sent)
        self.cache = [empty((B, block, 2 * C), wte.dtype) for _ in range(config.n_layer)]
        self.cache_of_prefill, self.h = Filling(self.cache), empty((B, C), wte.dtype)
        kind = OneRow if B == 1 else ManyRows
        self.rows = kind(self.model, self.sequences, self.cache, self.h, self.tiles, empty)
        self.logits, count = empty((B, V), "float32"), decode.logits_tiles(V, self.tiles)
        self.best, self.index = empty((B, count), "float32"), empty((B, count), "int32")
        self.window = empty((B, block), "int32")
        self.draws = {}

    # -- what generate() calls -----------------------------------------------------------------------------------------

    def begin(self, prompts, rules):
        block = self.model.config.block_size
        while self.pending:  # of a text that nobody has read to its end
            self.tokens()
        self.lengths, self.count = [len(prompt) for prompt in prompts], 0
        self.sliding = max(self.lengths) >= block  # after the next token at the latest, so nothing is worth caching
        self.rules, self.ahead = rules, AHEAD
        ids = np.zeros((self.batch, block), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        with self.queue:
            self.queue.upload(self.sequences.ids, ids)
            self.queue.upload(self.sequences.lengths, np.array(self.lengths, np.int32))
            self.choose = self.choice(rules)

    def step(self):
        with self.queue:
            if max(self.lengths) > self.model.config.block_size:
                self.sliding = True
            if self.sliding:
                self.perform(self.whole, min(self.lengths) < self.model.config.block_size)
            elif self.count == 0:
                self.prefill()
            else:
                if self.count == 1 and self.rows.refresh:  # behind the first token, which need not wait for it
                    self.recorded(self.rows.refresh)
                self.perform(self.cached)
            self.pending.append((self.queue.reached(), self.lengths))
        self.lengths = [length + 1 for length in self.lengths]
        self.count += 1

    def tokens(self):
        wait, lengths = self.pending.popleft()
        wait()
        return self.sent[np.arange(self.batch), np.array(lengths) % sampling.SENT].tolist()

    # -- which token ---------------------------------------------------------------------------------------------------

    def choice(self, rules):
        """The function that follows the logits of a step, for these rules."""
        if all(type(rule) is Greedy for rule in rules):
            return self.likeliest
        options = {(rule.temperature, rule.top_k, rule.top_p) for rule in rules if type(rule) is Sampling}
        if len(options) != 1 or not all(type(rule) is Sampling for rule in rules):
            self.ahead = 0
            return self.given
        temperature, top_k, top_p = options.pop()
        B, V = self.logits.shape
        narrowing = 0 < top_k < V, top_p < 1
        if narrowing not in self.draws:
            draw = sampling.Draw(self.backend.empty, B, V, (B, UNIFORMS), *narrowing)
            self.draws[narrowing] = lambda: draw.take(self.sequences, self.logits, self.best), draw
        drawn, self.draw = self.draws[narrowing]
        self.queue.upload(self.draw.numbers, np.array([top_p, temperature]))
        self.queue.upload(self.draw.top_k, np.array([min(top_k, V)]))
        return drawn

    def likeliest(self):
        sampling.take_likeliest(self.sequences, self.best, self.index, self.tiles.overlap)

    def given(self):
        sampling.take_given(self.sequences)

    def perform(self, compute, *arguments):
        """Logits by compute(*arguments), then a token each: recorded together where the device chooses."""
        if self.choose == self.given:
            self.recorded(compute, *arguments)
            tokens = [rule(logits) for rule, logits in zip(self.rules, self.backend.to_host(self.logits), strict=True)]
            self.queue.upload(self.sequences.tokens, np.array(tokens, np.int32))
            self.given()
            return
        if self.choose != self.likeliest and self.count % UNIFORMS == 0:
            self.bring_uniforms()
        self.recorded(compute, *arguments, then=self.choose)

    def recorded(self, compute, *arguments, then=None):
        key = compute, arguments, then
        if key not in self.steps:

            def step():
                compute(*arguments)
                if then is not None:
                    then()

            self.steps[key] = self.queue.record(step)
        self.steps[key]()

    def bring_uniforms(self):
        """The next UNIFORMS numbers of each rule's generator, where a sequence of its length looks for them."""
        uniforms = np.empty((self.batch, UNIFORMS))
        for row, rule, length in zip(uniforms, self.rules, self.lengths, strict=True):
            row[(length + np.arange(UNIFORMS)) % UNIFORMS] = [rule.random.random() for _ in range(UNIFORMS)]
        self.queue.upload(self.draw.uniforms, uniforms)

    # -- logits of the next token --------------------------------------------------------------------------------------

    def prefill(self):
        """The prompts: where they are short, in a step that is recorded for all lengths of its bucket."""
        longest = max(self.lengths)
        T = min(round_up(longest, self.queue.bucket), self.model.config.block_size)
        if self.batch * T <= SHORT:
            self.perform(self.short_prompts, T)
        else:
            self.fill_cache(longest, min(self.lengths) == longest)
            self.perform(self.unembed)

    def short_prompts(self, T):
        self.fill_cache(T, False)
        self.unembed()

    @no_grad()
    def fill_cache(self, T, full):
        """The first T positions of every sequence; not `full`, some end earlier, and look at nothing behind them."""
        ids = self.backend.xp.ascontiguousarray(self.sequences.ids[:, :T])
        self.keep_last(self.model.trunk(ids, self.cache_of_prefill, last_only=full))

    @no_grad()
    def whole(self, mixed):
        """The last block_size positions of every sequence; with `mixed` some have fewer yet."""
        ends.windows(self.window, self.sequences.ids, self.sequences.lengths)
        self.keep_last(self.model.trunk(self.window, last_only=not mixed))
        self.unembed()

    def keep_last(self, y):
        """h = the last position of each sequence in y (B, T, C), or of y (B, 1, C)."""
        ends.last_rows(self.h, y.data, self.sequences.lengths)

    def unembed(self):
        head = self.model.head.data
        decode.unembed(self.logits, self.best, self.index, self.h, head, self.tiles, self.backend.dot)

    def cached(self):
        """The newest position of every sequence, whose embedding the choice of its token has left in sequences.x."""
        self.rows.step()
        self.unembed()


class Filling:
    """In the place of a KVCache: flash attention over the prompts, whose keys and values are kept."""

    length = 0  # positions held before

    def __init__(self, cache):
        self.cache = cache

    def attend(self, qkv, layer, n_head):
        _, T, columns = qkv.shape
        self.cache[layer][:, :T] = qkv.data[:, :, columns // 3 :]
        y, _ = qkv.backend.attention_forward(qkv.data, n_head)
        return Tensor(y, qkv.backend)


# -- in which order ----------------------------------------------------------------------------------------------------


class Eager(contextlib.nullcontext):
    """The interpreter's queue: everything at once."""

    bucket = 1  # prefill takes prompts of a multiple of so many tokens, others filled up

    def record(self, function):
        return function

    def upload(self, array, values):
        array[...] = values

    def shared(self, shape, dtype):
        array = np.empty(shape, dtype)
        return array, array

    def reached(self):
        return lambda: None


class Queue:
    """A CUDA stream on which everything happens in order; the host waits for nothing but what it reads.

    `with queue:` puts launches, copies and memory on it.
    """

    bucket = 64  # as above: one recorded prefill is for all prompts of so many lengths

    def __init__(self, cupy):
        self.cupy, self.stream, self.workspace = cupy, cupy.cuda.Stream(non_blocking=True), Workspace(cupy)

    def __enter__(self):
        self.cupy.cuda.get_current_stream().synchronize()  # what the caller has computed is there
        self.outer = self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)

    def record(self, function):
        return RecordedStep(function, stream=self.stream, workspace=self.workspace)

    def upload(self, array, values):
        array.set(np.ascontiguousarray(values, array.dtype), stream=self.stream)

    def shared(self, shape, dtype):
        """Memory of the host that kernels write to, as an array of theirs and one of the host's."""
        import cupyx

        here = cupyx.empty_pinned(shape, dtype)
        memory = self.cupy.cuda.UnownedMemory(here.ctypes.data, here.nbytes, here)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0)), here

    def reached(self):
        """-> a function that waits until all that is on the stream now has been done."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event.synchronize


def fits(model, batch):
    """Whether an Engine can continue so many texts by this model: its weights must be whole, not a rank's shard."""
    return model.head.shape[0] == model.config.vocab_size and batch <= decode.ROWS

"""Generation without autograd: the cache, the step and the choice of a token stay on the GPU; the host reads along.

A step is one CUDA graph. Its length, its tokens and its random numbers are read from device memory, so the graph that
was recorded once serves every step, and the next one may be launched before anybody has read the token of this one.
In Triton's interpreter the same launches are made one by one.

There are two kinds of step. The first computes one position of each sequence, over a cache of keys and values that
prefill has filled with the kernels of training: `cached` launches some kernels for each layer, `one_row` one kernel
for all, where there is a single sequence. Once the longest sequence fills the block, the window slides, and `whole`
computes the last block_size positions of all sequences again, as stage 0 does.
"""

# B sequences, T positions, C channels, H heads, V vocabulary; k and v of a layer are cached as (B, block, 2C)

import contextlib
from collections import deque

import numpy as np

from gpt2core.sampler import Greedy, Sampling
from gpt2core.tensor import Tensor, no_grad
from stage2_cuda.graph import Recorded
from stage2_cuda.kernels import decode, decode_step, sampling

AHEAD = 4  # steps under way beyond the one whose tokens are read next
UNIFORMS = 256  # random numbers that are brought to the device at once, for each sequence


class Engine:
    """Continues `batch` sequences by one model: what sampler.Decoder does, with its methods.

    model: a whole GPT2 on CudaBackend, whose parameters are read where they are; queue: a Queue or Eager; tiles:
    decode.Tiles. Sequences may be of different lengths. Rules that are all Greedy(), or all Sampling() of the same
    options, choose on the device; any other rule gets its logits on the host, and the host waits.
    """

    def __init__(self, model, batch, queue, tiles):
        config, backend = model.config, model.head.backend
        self.model, self.queue, self.backend, self.batch, self.tiles = model, queue, backend, batch, tiles
        self.layers = [Layer(model.parameters, f"transformer.h.{layer}.") for layer in range(config.n_layer)]
        self.final = [model.parameters[f"transformer.ln_f.{name}"].data for name in ("weight", "bias")]
        self.steps, self.pending = {}, deque()  # {what a step does: the function, or its graph}; tokens on their way
        with queue:
            self.allocate(config, backend.empty)

    def allocate(self, config, empty):
        B, C, L, V, block = self.batch, config.n_embd, config.n_layer, config.vocab_size, config.block_size
        wte, wpe = (self.model.parameters[f"transformer.{name}.weight"].data for name in ("wte", "wpe"))
        kind, tiles = wte.dtype, self.tiles
        self.sequences = sampling.Sequences(empty, B, C, block, wte, wpe)
        self.cache = empty((L, B, block, 2 * C), kind)
        self.cache_of_prefill = Filling(self.cache)
        self.stream, self.h = empty((B, C), "float32"), empty((B, C), kind)
        self.logits, count = empty((B, V), "float32"), decode.logits_tiles(V, tiles)
        self.best, self.index = empty((B, count), "float32"), empty((B, count), "int32")
        self.window = empty((B, block), "int32")
        self.draws = {}
        self.next_position = self.cached
        layers = [layer.arrays for layer in self.layers]
        if B == 1 and decode_step.stride_of(layers) is not None:
            rest = config.n_head, config.layer_norm_epsilon, tiles, self.backend.zeros
            self.row = decode_step.OneRow(layers, self.final, self.model.head.data, self.cache, *rest)
            self.next_position = self.one_row
            return
        self.q, self.y, self.g = empty((B, C), kind), empty((B, C), kind), empty((B, 4 * C), kind)
        self.after_attention, self.after_mlp = (
            empty((decode.split(K, tiles).parts, B, C), "float32") for K in (C, 4 * C)
        )

    # -- what generate() calls -----------------------------------------------------------------------------------------

    def begin(self, prompts, rules):
        block = self.model.config.block_size
        while self.pending:  # of a text that nobody has read to its end
            self.tokens()
        self.lengths, self.prompts, self.count = [len(prompt) for prompt in prompts], prompts, 0
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
                self.perform(self.unembed)
            else:
                self.perform(self.next_position)
            self.pending.append(self.queue.download(self.sequences.tokens))
        self.lengths = [length + 1 for length in self.lengths]
        self.count += 1

    def tokens(self):
        return self.pending.popleft()().tolist()

    # -- which token ---------------------------------------------------------------------------------------------------

    def choice(self, rules):
        """The function that follows the logits of a step, for these rules; it is given unembed's best and index."""
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
            self.draws[narrowing] = lambda best, _: draw.take(self.sequences, self.logits, best), draw
        drawn, self.draw = self.draws[narrowing]
        self.queue.upload(self.draw.numbers, np.array([top_p, temperature]))
        self.queue.upload(self.draw.top_k, np.array([min(top_k, V)]))
        return drawn

    def likeliest(self, best, index):
        sampling.take_likeliest(self.sequences, best, index)

    def given(self, best=None, index=None):
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
                leaders = compute(*arguments)
                if then is not None:
                    then(*leaders)

            self.steps[key] = self.queue.record(step)
        self.steps[key]()

    def bring_uniforms(self):
        """The next UNIFORMS numbers of each rule's generator, where a sequence of its length looks for them."""
        uniforms = np.empty((self.batch, UNIFORMS))
        for row, rule, length in zip(uniforms, self.rules, self.lengths, strict=True):
            row[(length + np.arange(UNIFORMS)) % UNIFORMS] = [rule.random.random() for _ in range(UNIFORMS)]
        self.queue.upload(self.draw.uniforms, uniforms)

    # -- logits of the next token --------------------------------------------------------------------------------------

    @no_grad()
    def prefill(self):
        """All positions of the prompts, shorter ones filled up behind their end, where no earlier position looks."""
        ids = np.zeros((self.batch, max(self.lengths)), np.int32)
        for row, prompt in zip(ids, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        equal = min(self.lengths) == max(self.lengths)
        self.keep_last(self.model.trunk(self.backend.asarray(ids), self.cache_of_prefill, last_only=equal))

    @no_grad()
    def whole(self, mixed):
        """The last block_size positions of every sequence; with `mixed` some have fewer yet."""
        decode.windows(self.window, self.sequences.ids, self.sequences.lengths)
        self.keep_last(self.model.trunk(self.window, last_only=not mixed))
        return self.unembed()

    def keep_last(self, y):
        """h = the last position of each sequence in y (B, T, C), or of y (B, 1, C)."""
        decode.last_rows(self.h, y.data, self.sequences.lengths)

    def unembed(self):
        head = self.model.head.data
        decode.unembed(self.logits, self.best, self.index, self.h, head, self.tiles, self.backend.dot)
        return self.best, self.index

    def one_row(self):
        """The newest position of the only sequence, whose embedding the choice of its token has left in sequences.x."""
        self.row(self.logits, self.sequences.x, self.sequences.lengths)
        return self.row.best, self.row.index

    def cached(self):
        """The newest position of every sequence, whose embedding the choice of its token has left in sequences.x."""
        config, backend, lengths, tiles = self.model.config, self.backend, self.sequences.lengths, self.tiles
        stream, s = (self.sequences.x, None, None), self.stream
        for layer, cache in zip(self.layers, self.cache, strict=True):
            decode.norm(self.h, s, stream, *layer.ln_1, config.layer_norm_epsilon)
            rest = lengths, config.block_size, decode.QKV.value, tiles, backend.dot
            decode.columns(self.q, cache, self.h, *layer.qkv, *rest)
            decode.attend(self.y, self.q, cache, lengths, config.n_head, tiles)
            w, bias = layer.proj
            decode.partial_product(self.after_attention, self.y, w, tiles, backend.dot)
            decode.norm(self.h, s, (s, self.after_attention, bias), *layer.ln_2, config.layer_norm_epsilon)
            rest = lengths, config.block_size, decode.GELU.value, tiles, backend.dot
            decode.columns(self.g, None, self.h, *layer.fc, *rest)
            w, bias = layer.fc_proj
            decode.partial_product(self.after_mlp, self.g, w, tiles, backend.dot)
            stream = s, self.after_mlp, bias
        decode.norm(self.h, None, stream, *self.final, config.layer_norm_epsilon)
        return self.unembed()


class Layer:
    """The arrays of one layer, as the kernels take them."""

    def __init__(self, parameters, name):
        self.arrays = [parameters[name + each].data for each in decode_step.NAMES]
        self.ln_1, self.qkv, self.proj, self.ln_2, self.fc, self.fc_proj = zip(
            self.arrays[::2], self.arrays[1::2], strict=True
        )


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

    def record(self, function):
        return function

    def upload(self, array, values):
        array[...] = values

    def download(self, array):
        """-> a function that returns what `array` holds now, as a NumPy array."""
        values = array.copy()
        return lambda: values


class Queue:
    """A CUDA stream on which everything happens in order; the host waits for nothing but what it reads.

    `with queue:` puts launches, copies and memory on it.
    """

    def __init__(self, cupy):
        self.cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
        self.slots = {}  # pinned memory that nobody reads, by its size

    def __enter__(self):
        self.cupy.cuda.get_current_stream().synchronize()  # what the caller has computed is there
        self.outer = self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)

    def record(self, function):
        return Recorded(function, stream=self.stream)

    def upload(self, array, values):
        array.set(np.ascontiguousarray(values, array.dtype), stream=self.stream)

    def download(self, array):
        """-> a function that returns what `array` holds now, as a NumPy array, once it is here."""
        idle = self.slots.setdefault(array.nbytes, [])
        slot = idle.pop() if idle else self.cupy.cuda.alloc_pinned_memory(array.nbytes)
        to_host = self.cupy.cuda.runtime.memcpyDeviceToHost
        self.cupy.cuda.runtime.memcpyAsync(slot.ptr, array.data.ptr, array.nbytes, to_host, self.stream.ptr)
        arrived = self.stream.record()

        def wait():
            arrived.synchronize()
            values = np.frombuffer(slot, array.dtype, array.size).reshape(array.shape).copy()
            idle.append(slot)
            return values

        return wait


def fits(model, batch):
    """Whether an Engine can continue so many texts by this model: its weights must be whole, not a rank's shard."""
    return model.head.shape[0] == model.config.vocab_size and batch <= decode.ROWS

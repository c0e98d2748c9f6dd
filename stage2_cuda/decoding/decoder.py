"""Text generation on the GPU: one CUDA graph computes the logits and samples the next token of every sequence.

If all rules are Greedy(), or all are Sampling() with the same options, the device samples and the host only reads the
tokens. For any other rules the host copies the logits of each step and samples.

A step is normally one captured CUDA graph. Its lengths, tokens and random numbers are in device memory, so the same
graph serves every step, and the host can launch the next step before it reads the tokens of this one. Under Triton's
interpreter the same kernels are launched one by one.

There are three kinds of step:

- The prefill computes all positions of the prompts with the training kernels and fills the KV cache. The prefill is
  captured only if it has few positions.
- A decode step computes one more position of each sequence with the KV cache.
- A window step recomputes the last block_size tokens of every sequence, as stage 0 does. It replaces the decode step
  as soon as the block has no room for another position of the longest sequence.
"""

# B sequences, T positions, C channels, H heads, V vocabulary; block = block_size; the cache of a layer: (B, block, 2C)

from collections import deque

import numpy as np

from gpt2core.arena import round_up
from gpt2core.sampler import Greedy, Sampling
from gpt2core.tensor import Tensor, no_grad
from stage2_cuda.decoding import batched, last_token, sampling
from stage2_cuda.decoding.decode_step import BatchedStep, SingleRowStep

CAPTURED_PREFILL = 4096  # largest B*T of a captured prefill; a larger prefill takes longer to compute than to launch
STEPS_AHEAD = 4  # steps that may be launched after the step whose tokens the host reads next
UNIFORMS = 256  # random numbers per sequence in one upload


class GpuDecoder:
    """Generates tokens for `batch` sequences, with the methods of gpt2core.sampler.Decoder.

    model: a GPT2 on CudaBackend that is not split over ranks. Its parameters are read in place, except that
    with batch 1 most weights are copied before the first decode step of a generation. stream: a DecodeStream or
    EagerStream. tiling: a batched.DecodeTiling. Sequences may have different lengths.
    """

    def __init__(self, model, batch, stream, tiling):
        config, backend = model.config, model.head.backend
        self.model, self.stream, self.backend, self.batch, self.tiling = model, stream, backend, batch, tiling
        self.captured = {}  # {(compute, arguments, sample): a captured step, or under the interpreter a function}
        self.unread = deque()  # per unread step: (function that waits for it, the sequences' lengths before it)
        with stream:
            self.allocate(config, backend.empty)

    def allocate(self, config, empty):
        B, C, V, block = self.batch, config.n_embd, config.vocab_size, config.block_size
        wte, wpe = (self.model.parameters[f"transformer.{name}.weight"].data for name in ("wte", "wpe"))
        readback, self.readback = self.stream.mapped_array((B, sampling.READBACK), "int32")
        self.sequences = sampling.Sequences(empty, B, C, block, wte, wpe, readback)
        self.cache = [empty((B, block, 2 * C), wte.dtype) for _ in range(config.n_layer)]
        self.prefill_cache, self.h = PrefillCache(self.cache), empty((B, C), wte.dtype)
        kind = SingleRowStep if B == 1 else BatchedStep
        self.decode_step = kind(self.model, self.sequences, self.cache, self.h, self.tiling, empty)
        self.logits, tiles = empty((B, V), "float32"), batched.vocab_tiles(V, self.tiling)
        self.maxima, self.indices = empty((B, tiles), "float32"), empty((B, tiles), "int32")
        self.window = empty((B, block), "int32")
        self.samplers = {}  # {(restrict to top-k, restrict to top-p): (function, DeviceSampler)}

    # -- the methods of gpt2core.sampler.Decoder -----------------------------------------------------------------------

    def start(self, prompts, rules):
        block = self.model.config.block_size
        while self.unread:  # the previous generation may have ended with unread steps
            self.read_tokens()
        self.lengths, self.count = [len(prompt) for prompt in prompts], 0
        self.sliding = max(self.lengths) >= block  # a prompt fills the block: no decode step would read the cache
        self.rules, self.steps_ahead = rules, STEPS_AHEAD
        ids = np.zeros((self.batch, block), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        with self.stream:
            self.stream.upload(self.sequences.ids, ids)
            self.stream.upload(self.sequences.lengths, np.array(self.lengths, np.int32))
            self.sample = self.choose_sampling(rules)

    def step(self):
        with self.stream:
            if max(self.lengths) > self.model.config.block_size:
                self.sliding = True
            if self.sliding:
                self.compute_and_sample(self.recompute_window, min(self.lengths) < self.model.config.block_size)
            elif self.count == 0:
                self.prefill()
            else:
                if self.count == 1 and self.decode_step.prepare:  # once per generation, before its first decode step
                    self.run(self.decode_step.prepare)
                self.compute_and_sample(self.decode_position)
            self.unread.append((self.stream.record_event(), self.lengths))
        self.lengths = [length + 1 for length in self.lengths]
        self.count += 1

    def read_tokens(self):
        wait, lengths = self.unread.popleft()
        wait()
        return self.readback[np.arange(self.batch), np.array(lengths) % sampling.READBACK].tolist()

    # -- sampling ------------------------------------------------------------------------------------------------------

    def choose_sampling(self, rules):
        """The function that appends the next tokens in each step: append_greedy, append_given, or one that samples."""
        if all(type(rule) is Greedy for rule in rules):
            return self.append_greedy
        options = {(rule.temperature, rule.top_k, rule.top_p) for rule in rules if type(rule) is Sampling}
        if len(options) != 1 or not all(type(rule) is Sampling for rule in rules):
            self.steps_ahead = 0
            return self.append_given
        temperature, top_k, top_p = options.pop()
        B, V = self.logits.shape
        restricted = 0 < top_k < V, top_p < 1
        if restricted not in self.samplers:
            sampler = sampling.DeviceSampler(self.backend.empty, B, V, (B, UNIFORMS), *restricted)
            append_sampled = lambda: sampler.append_sampled(self.sequences, self.logits, self.maxima)  # noqa: E731
            self.samplers[restricted] = append_sampled, sampler
        append_sampled, self.sampler = self.samplers[restricted]
        self.stream.upload(self.sampler.numbers, np.array([top_p, temperature]))
        self.stream.upload(self.sampler.top_k, np.array([min(top_k, V)]))
        return append_sampled

    def append_greedy(self):
        sampling.append_greedy(self.sequences, self.maxima, self.indices, self.tiling.pdl)

    def append_given(self):
        sampling.append_given(self.sequences)

    def compute_and_sample(self, compute, *arguments):
        """Compute the logits and append a token to each sequence, in one captured step if the device samples."""
        if self.sample == self.append_given:
            self.run(compute, *arguments)
            tokens = [rule(logits) for rule, logits in zip(self.rules, self.backend.to_host(self.logits), strict=True)]
            self.stream.upload(self.sequences.tokens, np.array(tokens, np.int32))
            self.append_given()
            return
        if self.sample != self.append_greedy and self.count % UNIFORMS == 0:
            self.upload_uniforms()
        self.run(compute, *arguments, sample=self.sample)

    def run(self, compute, *arguments, sample=None):
        """Launch compute(*arguments), then sample(), captured as one step."""
        key = compute, arguments, sample
        if key not in self.captured:

            def step():
                compute(*arguments)
                if sample is not None:
                    sample()

            self.captured[key] = self.stream.capture(step)
        self.captured[key]()

    def upload_uniforms(self):
        """Upload UNIFORMS random numbers from each rule; a step with sequence length L reads number L % UNIFORMS."""
        uniforms = np.empty((self.batch, UNIFORMS))
        for row, rule, length in zip(uniforms, self.rules, self.lengths, strict=True):
            row[(length + np.arange(UNIFORMS)) % UNIFORMS] = [rule.random.random() for _ in range(UNIFORMS)]
        self.stream.upload(self.sampler.uniforms, uniforms)

    # -- logits of the next token --------------------------------------------------------------------------------------

    def prefill(self):
        """Run the first step. Short prompts are padded, so that one captured step serves a range of prompt lengths."""
        longest = max(self.lengths)
        T = min(round_up(longest, self.stream.prefill_multiple), self.model.config.block_size)
        if self.batch * T <= CAPTURED_PREFILL:
            self.compute_and_sample(self.padded_prefill, T)
        else:
            self.fill_cache(longest, min(self.lengths) == longest)
            self.compute_and_sample(self.unembed)

    def padded_prefill(self, T):
        self.fill_cache(T, False)
        self.unembed()

    @no_grad()
    def fill_cache(self, T, equal_lengths):
        """Compute the first T positions of every sequence; positions after a sequence's end do not affect earlier ones.

        equal_lengths: all sequences have T tokens, so only the last position's hidden state is needed.
        """
        ids = self.backend.xp.ascontiguousarray(self.sequences.ids[:, :T])
        self.keep_last_rows(self.model.trunk(ids, self.prefill_cache, last_only=equal_lengths))

    @no_grad()
    def recompute_window(self, mixed_lengths):
        """Logits from the last block_size tokens of every sequence; mixed_lengths: some sequences are still shorter."""
        last_token.gather_windows(self.window, self.sequences.ids, self.sequences.lengths)
        self.keep_last_rows(self.model.trunk(self.window, last_only=not mixed_lengths))
        self.unembed()

    def keep_last_rows(self, y):
        """h = the last position of each sequence in y (B, T, C) or (B, 1, C)."""
        last_token.gather_last_rows(self.h, y.data, self.sequences.lengths)

    def unembed(self):
        head = self.model.head.data
        batched.unembed(self.logits, self.maxima, self.indices, self.h, head, self.tiling, self.backend.dot_precision)

    def decode_position(self):
        """Logits at the newest position of every sequence, whose embedding is already in sequences.x."""
        self.decode_step.run()
        self.unembed()


class PrefillCache:
    """Replaces a KVCache in prefill: attend() computes flash attention over the prompts, and stores keys and values."""

    length = 0  # cached positions before the prompts

    def __init__(self, cache):
        self.cache = cache

    def attend(self, qkv, layer, n_head):
        _, T, columns = qkv.shape
        self.cache[layer][:, :T] = qkv.data[:, :, columns // 3 :]
        y, _ = qkv.backend.attention_forward(qkv.data, n_head)
        return Tensor(y, qkv.backend)


def supports(model, batch):
    """Whether GpuDecoder supports this model and batch size: a whole model (not split over ranks), a small batch."""
    return model.head.shape[0] == model.config.vocab_size and batch <= batched.MAX_BATCH

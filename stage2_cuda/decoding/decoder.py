"""Text generation on the GPU: one CUDA graph computes the logits and samples the next token of every sequence.

Each sequence has a sampling rule (gpt2core/sampler.py). If all rules are Greedy(), or all are Sampling() with the same
options, the device samples and the host only reads the tokens. It also does so if all are limited to the same tokens
by OnlyTokens(). With any other rules the host copies the logits of each step and samples.

A step is normally one captured CUDA graph. The sequence lengths, tokens and random numbers are in device memory, so the
same graph serves every step, and the host can launch the next step before it reads the tokens of this one. Under
Triton's interpreter the same kernels are launched one by one.

There are three kinds of step:

- The prefill computes all positions of the prompts with the training kernels and fills the KV cache. The prefill is
  captured only if it has few positions.
- A decode step computes one more position of each sequence with the KV cache.
- A window step recomputes the last block_size tokens of every sequence, as stage 0 does. The first step at which the
  longest sequence has more than block_size tokens is a window step, and so are all later steps. If a prompt has
  block_size tokens, all steps are window steps. With rotary positions there are no window steps: the cache slides.
"""

# B sequences, T positions, C channels, H heads, V vocabulary; block = block_size
# the cache of a layer: (B, block, 2C), with position number i at index i % block

import functools
from collections import deque

import numpy as np

from gpt2core.architecture import forward_plan
from gpt2core.arena import round_up
from gpt2core.inference_model import InferenceModel
from gpt2core.recording import no_grad
from gpt2core.sampler import Greedy, Sampling
from gpt2core.text.only_tokens import OnlyTokens
from stage2_cuda.decoding import batched, cluster_step, gather, sampling
from stage2_cuda.decoding.decode_step import OPERATIONS, BatchedStep, ClusterStep, SingleRowStep

# The largest B*T of a captured prefill. The kernels of a larger prefill take longer to run than to launch, so a graph
# would not make it faster.
CAPTURED_PREFILL = 16384
STEPS_AHEAD = 4  # steps that may be launched after the step whose tokens the host reads next
UNIFORMS = 256  # uniform random numbers per sequence in one upload


class GpuDecoder:
    """Generates tokens for `batch` sequences, with the methods of gpt2core.sampler.Decoder.

    The sequences may have different lengths. model: a GPT2 or InferenceModel on CudaBackend that is not split over
    ranks. The decoder reads the model's own parameter arrays, and copies most weights once for each generation:
    transposed if the step is a SingleRowStep or a ClusterStep, and as fp16 numbers for window steps in fp32. stream: a
    DecodeStream or EagerStream. tiling: a batched.DecodeTiling.
    """

    def __init__(self, model, batch, stream, tiling):
        config, backend = model.config, model.backend
        self.model = model.without_autograd()
        self.stream, self.backend, self.batch, self.tiling = stream, backend, batch, tiling
        self.captured = {}  # {(compute, arguments, sample): captured step; under the interpreter, a plain function}
        self.unread = deque()  # per unread step: (function that waits for the step, sequence lengths before the step)
        with stream:
            self.allocate(config, backend.empty)

    def allocate(self, config, empty):
        B, C, V, block = self.batch, config.n_embd, config.vocab_size, config.block_size
        self.plan = forward_plan(config, self.model.arrays, OPERATIONS, "the decoder of the GPU")
        wte = self.plan.wte
        readback, self.readback = self.stream.mapped_array((B, sampling.READBACK), "int32")
        pairs = C // config.n_head // 2 if self.plan.rotates else 0
        self.sequences = sampling.Sequences(empty, B, C, block, wte, self.plan.wpe, readback, pairs)
        self.cache = [empty((B, block, 2 * C), wte.dtype) for _ in range(config.n_layer)]
        self.prefill_cache, self.h = PrefillCache(self.cache, self.backend), empty((B, C), wte.dtype)
        self.logits = empty((B, V), "float32")
        clusters = cluster_step.supports(config, wte.dtype, self.tiling, B)
        step_class = ClusterStep if clusters else SingleRowStep if B == 1 else BatchedStep
        buffers = self.sequences, self.cache, self.h, self.logits
        self.decode_step = step_class(config, self.plan, *buffers, self.tiling, self.backend.dot_precision, empty)
        tiles = batched.vocab_tiles(V, self.tiling)
        self.maxima, self.indices = empty((B, tiles), "float32"), empty((B, tiles), "int32")
        self.window = empty((B, block), "int32")
        self.samplers = {}  # {(restrict to top-k, restrict to top-p): (function, DeviceSampler)}
        self.sampler = None  # the DeviceSampler of this generation, or None
        self.mask, self.masked = None, {}  # the TokenMask; {a function that samples: the same with the TokenMask}

    # -- the methods of gpt2core.sampler.Decoder -----------------------------------------------------------------------

    def start(self, prompts, rules):
        block = self.model.config.block_size
        while self.unread:  # the previous generation may have ended with unread steps
            self.read_tokens()
        self.lengths, self.step_count = [len(prompt) for prompt in prompts], 0
        # Whether the next steps are window steps. With a prompt of block_size tokens all steps are window steps: step 0
        # computes the same positions as a prefill, and later steps need no KV cache.
        self.uses_windows = max(self.lengths) >= block and not self.plan.rotates
        self.window_is_prepared = self.backend.products.precision != "fp32"
        self.steps_ahead = STEPS_AHEAD
        ids = np.zeros((self.batch, block), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        with self.stream:
            self.stream.upload(self.sequences.ids, ids)
            self.stream.upload(self.sequences.lengths, np.array(self.lengths, np.int32))
            self.sample = self.choose_sampling(rules)
            if not self.captured:  # the first generation
                self.compile_ahead()

    def step(self):
        with self.stream:
            if max(self.lengths) > self.model.config.block_size and not self.plan.rotates:
                self.uses_windows = True
            if self.uses_windows:
                if not self.window_is_prepared:  # the first window step of a generation
                    self.run(self.split_weights)
                    self.window_is_prepared = True
                self.compute_and_sample(self.recompute_window, min(self.lengths) < self.model.config.block_size)
            elif self.step_count == 0:
                self.prefill()
            else:
                if self.step_count == 1 and self.decode_step.prepare:  # before the first decode step of a generation
                    self.run(self.decode_step.prepare)
                self.compute_and_sample(self.decode_position)
            self.unread.append((self.stream.record_event(), self.lengths))
        self.lengths = [length + 1 for length in self.lengths]
        self.step_count += 1

    def compile_ahead(self):
        """Start to compile the kernels of the first steps in threads: first those of step 0, then those of step 1.

        Without this call a step would start to compile its kernels when it is launched, so step 1 would not be compiled
        while step 0 is computed. Nothing is done for a window step, because all steps are then equal, nor if step 0 is
        not captured.
        """
        T, sample = self.padded_length(), None if self.sample == self.append_given else self.sample
        if self.uses_windows or self.batch * T > CAPTURED_PREFILL:
            return
        self.stream.compile_ahead(self.captured_step(self.padded_prefill, T, sample=sample))
        if self.decode_step.prepare:
            self.stream.compile_ahead(self.captured_step(self.decode_step.prepare))
        self.stream.compile_ahead(self.captured_step(self.decode_position, sample=sample))

    def read_tokens(self):
        wait, lengths = self.unread.popleft()
        wait()
        return self.readback[np.arange(self.batch), np.array(lengths) % sampling.READBACK].tolist()

    # -- sampling ------------------------------------------------------------------------------------------------------

    def choose_sampling(self, rules):
        """The function that appends the next tokens in each step; sets self.rules, the rules that it uses.

        append_given appends tokens that the host has chosen. The others choose the tokens on the device and have the
        arguments maxima and indices, which unembed() returns.
        """
        ids = [rule.ids for rule in rules if type(rule) is OnlyTokens]
        masked = len(ids) == len(rules) and all(each is ids[0] for each in ids)
        self.rules, self.sampler = [rule.choose for rule in rules] if masked else rules, None
        if all(type(rule) is Greedy for rule in self.rules):
            return self.with_mask(self.append_greedy, ids[0]) if masked else self.append_greedy
        options = {(rule.temperature, rule.top_k, rule.top_p) for rule in self.rules if type(rule) is Sampling}
        if len(options) != 1 or not all(type(rule) is Sampling for rule in self.rules):
            # the host must choose the tokens of a step before it launches the next step
            self.rules, self.steps_ahead = rules, 0
            return self.append_given
        append_sampled = self.append_sampled(*options.pop())
        return self.with_mask(append_sampled, ids[0]) if masked else append_sampled

    def append_sampled(self, temperature, top_k, top_p):
        """A function that draws the next tokens with these options and appends them; it uses self.sampler."""
        B, V = self.logits.shape
        restricted = 0 < top_k < V, top_p < 1
        if restricted not in self.samplers:
            sampler = sampling.DeviceSampler(self.backend.empty, B, V, (B, UNIFORMS), *restricted)

            def append_sampled(maxima, indices):
                sampler.append_sampled(self.sequences, self.logits, maxima)

            self.samplers[restricted] = append_sampled, sampler
        append_sampled, self.sampler = self.samplers[restricted]
        self.stream.upload(self.sampler.top_p_and_temperature, np.array([top_p, temperature]))
        self.stream.upload(self.sampler.top_k, np.array([min(top_k, V)]))
        return append_sampled

    def with_mask(self, sample, ids):
        """The function `sample`, limited to the tokens `ids`."""
        B, V = self.logits.shape
        self.mask = self.mask or sampling.TokenMask(self.backend.empty, B, V)
        valid = np.zeros(V, np.int8)  # np.isin() takes ten times as long
        valid[ids] = 1
        self.stream.upload(self.mask.valid, valid)

        def masked_sample(maxima, indices):
            sample(*self.mask.exclude(self.logits))

        return self.masked.setdefault(sample, masked_sample)  # one function for each `sample`: see captured_step()

    def append_greedy(self, maxima, indices):
        sampling.append_greedy(self.sequences, maxima, indices, self.tiling.pdl)

    def append_given(self):
        sampling.append_given(self.sequences)

    def compute_and_sample(self, compute, *arguments):
        """Call compute(*arguments), which computes the logits as unembed() does, and append a token to each sequence.

        If the device samples, both are one captured step.
        """
        if self.sample == self.append_given:
            self.run(compute, *arguments)
            tokens = [rule(logits) for rule, logits in zip(self.rules, self.backend.to_host(self.logits), strict=True)]
            self.stream.upload(self.sequences.tokens, np.array(tokens, np.int32))
            self.append_given()
            return
        if self.sampler and self.step_count % UNIFORMS == 0:
            self.upload_uniforms()
        self.run(compute, *arguments, sample=self.sample)

    def run(self, compute, *arguments, sample=None):
        """Launch compute(*arguments), then sample() of its results unless it is None, as one captured step."""
        self.captured_step(compute, *arguments, sample=sample)()

    def captured_step(self, compute, *arguments, sample=None):
        """The captured step that run() with these arguments launches; it is created if there is none."""
        key = compute, arguments, sample
        if key not in self.captured:

            def step():
                results = compute(*arguments)
                if sample is not None:
                    sample(*results)

            self.captured[key] = self.stream.capture(step)
        return self.captured[key]

    def upload_uniforms(self):
        """Upload the next UNIFORMS random numbers of each rule.

        A step reads number L % UNIFORMS of a sequence, where L is the length of this sequence before the step.
        """
        uniforms = np.empty((self.batch, UNIFORMS))
        for row, rule, length in zip(uniforms, self.rules, self.lengths, strict=True):
            row[(length + np.arange(UNIFORMS)) % UNIFORMS] = rule.random.random(UNIFORMS)
        self.stream.upload(self.sampler.uniforms, uniforms)

    # -- logits of the next token --------------------------------------------------------------------------------------

    def prefill(self):
        """Run the first step. For a captured prefill the prompts are padded, so that one graph serves many lengths."""
        longest, T = max(self.lengths), self.padded_length()
        if self.batch * T <= CAPTURED_PREFILL:
            self.compute_and_sample(self.padded_prefill, T)
        else:
            self.fill_cache(longest, min(self.lengths) == longest)
            self.compute_and_sample(self.unembed)

    def padded_length(self):
        """The number of positions of a captured prefill."""
        return min(round_up(max(self.lengths), self.stream.prefill_multiple), self.model.config.block_size)

    def padded_prefill(self, T):
        self.fill_cache(T, False)
        return self.unembed()

    @no_grad()
    def fill_cache(self, T, equal_lengths):
        """Compute the first T positions of every sequence, and keep the row of each sequence's last position in h.

        Shorter sequences are padded; attention is causal, so the padding does not affect earlier positions.
        equal_lengths: whether all sequences have T tokens; then the last layer computes only the last position.
        """
        ids = self.backend.xp.ascontiguousarray(self.sequences.ids[:, :T])
        self.keep_last_rows(self.model.normed(ids, self.prefill_cache, last_only=equal_lengths))

    @no_grad()
    def recompute_window(self, mixed_lengths):
        """Compute the logits from the last block_size tokens of every sequence.

        mixed_lengths: whether some sequences have fewer than block_size tokens.
        """
        gather.gather_windows(self.window, self.sequences.ids, self.sequences.lengths)
        self.keep_last_rows(self.window_model.normed(self.window, None, last_only=not mixed_lengths))
        return self.unembed()

    @functools.cached_property
    def window_model(self):
        """The model of the window steps, whose weights are operands of products (Products.operand): in fp32, split."""

        def prepared(linear):
            w, bias = linear
            return [self.backend.products.operand(w), bias]

        model = InferenceModel(self.model.config, self.model.arrays, self.backend)
        layers = [
            [each._replace(linear_in=prepared(each.linear_in), linear_out=prepared(each.linear_out)) for each in layer]
            for layer in self.plan.layers
        ]
        model.plan = self.plan._replace(layers=layers)
        return model

    def split_weights(self):
        """Split the weights of the window steps again: training may have changed them since the last generation."""
        for layer, prepared in zip(self.plan.layers, self.window_model.plan.layers, strict=True):
            for sublayer, its in zip(layer, prepared, strict=True):
                self.backend.products.refresh(its.linear_in[0], sublayer.linear_in[0])
                self.backend.products.refresh(its.linear_out[0], sublayer.linear_out[0])

    def keep_last_rows(self, y):
        """h = the row of each sequence's last position; y: (B, T, C), or (B, 1, C) with only these rows."""
        gather.gather_last_rows(self.h, y, self.sequences.lengths)

    def unembed(self):
        """Compute the logits from h. Returns (maxima, indices): the largest logits of parts of the vocabulary."""
        results = self.logits, self.maxima, self.indices
        batched.unembed(*results, self.h, self.plan.head, self.tiling, self.backend.dot_precision)
        return self.maxima, self.indices

    def decode_position(self):
        """Compute the logits at the newest position of every sequence; sequences.x already has its embedding."""
        return self.decode_step.run() or self.unembed()


class PrefillCache:
    """The KV cache of InferenceModel in a prefill: attend() stores keys and values and computes causal attention.

    cache: an array (B, block, 2C) for each layer. The attention kernel is that of training.
    """

    length = 0  # number of cached positions before the prompts

    def __init__(self, cache, backend):
        self.cache, self.backend = cache, backend

    def attend(self, qkv, layer, n_head):
        # CuPy copies words of 8 bytes three times as fast as numbers of 2 bytes
        cache, words = self.cache[layer].view(np.uint64), qkv.view(np.uint64)
        cache[:, : qkv.shape[1]] = words[:, :, words.shape[2] // 3 :]
        return self.backend.attention_forward(qkv, n_head)[0]


def supports(model, batch):
    """Whether GpuDecoder supports this model and batch size.

    The model must not be split over ranks, and the batch may have at most batched.MAX_BATCH sequences.
    """
    return model.is_whole and batch <= batched.MAX_BATCH

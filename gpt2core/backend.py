"""The Backend protocol: the array kernels of a device, in pairs of forward and backward."""

# Shapes: B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows, block: the largest T;
# (..., C) has any leading axes. x, a inputs, w, w2 weights, b biases, y output, LN layernorm; w' is w transposed.

from abc import ABC, abstractmethod

import numpy as np

from gpt2core import checks
from gpt2core.errors import ConfigError
from gpt2core.runtime import Runtime


class Backend(ABC):
    """Array kernels for one device. Docstrings read "arguments -> results"; dx is the gradient of x, dy that of y.

    Weights are (in, out), except the matrix of the logits (V, C). aux: data that forward saves for backward. A kernel
    writes only to new arrays; rotary_attention_forward, attention_cached, clip and adamw_step also write to arguments
    that their docstrings name.
    A gradient that a backward kernel returns is an array, or a function of a Destination (parallel/parameter.py). `aux`
    keeps no array of a parameter, because ZeRO-3 frees it between forward and backward.

    Micro-batches: if `merges_micro_batches`, activations may be (M, B, T, C), and the N targets of a loss those of M
    micro-batches of equal size. Each row has the bits that it would have in a call of its own, and the gradient of a
    weight is the sum of those of the M micro-batches in the canonical order. A destination with one more axis,
    (M, ...), gets the gradient of each micro-batch.
    """

    deterministic = True  # the default; False on GPUs, where many small micro-batches are slower
    uses_threads = False  # whether the batch is divided over worker threads, each with a backend of its own
    merges_micro_batches = False  # whether one call may compute several micro-batches
    scales_loss = False  # whether the loss must be scaled: small gradients underflow in fp16 (engine/loss_scale.py)
    rounds_stochastically = False  # whether `cast` and `adamw_step` can round stochastically
    decoder_batch = 1  # maximum number of prompts that one decoder continues at the same time

    name: str
    precision: str  # fp32, tf32, bf16, fp16 or fp64
    dtype: object  # of the parameters, of their gradients, and of AdamW's moments
    compute_dtype: object  # of the activations and of the parameters that kernels read: a copy, unless it equals dtype
    xp: object  # the array module (numpy, cupy)
    runtime: Runtime  # what the device provides in addition to kernels

    @classmethod
    def planned(cls, precision, deterministic):
        """A backend of this class that makes no array and calls no kernel, so that it needs no device."""
        return cls(precision, deterministic)

    @property
    def on_host(self):
        """Whether the arrays are NumPy arrays, in the memory of the host."""
        return self.xp is np

    @abstractmethod
    def empty(self, shape, dtype):
        """An uninitialised C-contiguous array on this device."""

    @abstractmethod
    def asarray(self, array, dtype=None):
        """A host array as an array on this device, copied only if necessary."""

    @abstractmethod
    def to_host(self, array):
        """An array of this device as a NumPy array, copied only if necessary; waits for the device."""

    def zeros(self, shape, dtype):
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def ones(self, shape, dtype):
        array = self.empty(shape, dtype)
        array[...] = 1
        return array

    def add(self, a, b):
        """a + b as a new array, for a and b of equal shapes: autograd adds two gradients of one tensor with it."""
        return a + b

    def put(self, gradient, out):
        """Write an array to the Destination `out`, or add it; a Parameter and the sum over micro-batches call this."""
        array, accumulate = out
        if accumulate:
            array += gradient
        else:
            array[...] = gradient

    def cast(self, x, out, key=None, offset=0):
        """Copy x to `out` in its dtype, rounded to nearest, or stochastically with a key: see ParameterCopy."""
        if key is not None:
            raise NotImplementedError(f"the {self.name} backend cannot round stochastically")
        out[...] = x

    def prepare_tokens(self, ids, vocabulary=None):
        """Token ids (B, T) on the host -> host arrays in the form that this backend's kernels read.

        vocabulary: the number of all tokens; if it is given, the result is also for embedding_backward.
        """
        return ids

    def token_ids(self, tokens):
        """The ids in the result of prepare_tokens() for embedding_backward, on the host."""
        return tokens

    def check_tokens(self, operation, tokens, vocabulary):
        """Raise ShapeError unless `tokens` are integers below `vocabulary`; prepared tokens have been checked."""
        checks.tokens(operation, tokens, vocabulary)

    def check_model(self, config):  # noqa: B027 - by default every model is accepted
        """Raise ConfigError for a model that the kernels cannot compute."""

    def decoder(self, model, batch):
        """A faster replacement of sampler.Decoder for `batch` prompts, with the same methods; None if there is none."""
        return None

    def codec(self, kind):
        """The Codec (codecs.py) of the name `kind` for this device. Raises ConfigError if there is none."""
        raise ConfigError(f"`compress={kind}`: this backend has no codecs")

    # -- kernel pairs ------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_forward(self, x, w, b=None):
        """x (..., C), w (C, K), b (K) or None -> x @ w + b (..., K)."""

    @abstractmethod
    def linear_backward(self, dy, x, w, bias=True):
        """dy (..., K) -> dx (..., C), dw (C, K), db (K); db is None if `bias` is False."""

    @abstractmethod
    def gelu_forward(self, x):
        """x (any shape) -> y = x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016)."""

    @abstractmethod
    def gelu_backward(self, dy, x):
        """dy, x of one shape -> dx of the same shape."""

    @abstractmethod
    def linear_gelu_forward(self, x, w, b):
        """x (..., C), w (C, K), b (K) -> y = gelu(x @ w + b) (..., K), aux."""

    @abstractmethod
    def linear_gelu_backward(self, dy, x, w, b, aux):
        """dy (..., K) -> dx (..., C), dw (C, K), db (K)."""

    @abstractmethod
    def mlp_forward(self, x, w, b, w2):
        """x (..., C), w (C, K), b (K), w2 (K, C) -> y = gelu(x @ w + b) @ w2 (..., C), aux."""

    @abstractmethod
    def mlp_backward(self, dy, x, w, b, w2, aux):
        """dy (..., C) -> dx (..., C), dw (C, K), db (K), dw2 (K, C)."""

    @abstractmethod
    def layernorm_forward(self, x, w, b, eps):
        """x (..., C), w (C), b (C) -> y = (x - mean) / sqrt(variance + eps) * w + b (..., C), aux (Ba et al. 2016)."""

    @abstractmethod
    def layernorm_backward(self, dy, w, aux):
        """dy (..., C) -> dx (..., C), dw (C), db (C)."""

    @abstractmethod
    def residual_add_forward(self, x, a, a_bias):
        """x (..., C), output a (..., C) of a branch, its bias a_bias (C) -> s = x + (a + a_bias) (..., C)."""

    @abstractmethod
    def dropout(self, x, mask, bias=None):
        """x (..., T, C), bias (C) or None -> (x + bias) / (1 - p) where the dropout.Mask keeps a number, otherwise 0.

        Without a bias it is its own derivative: dy -> dx.
        """

    @abstractmethod
    def bias_backward(self, dy):
        """dy (..., C) of a sum x + bias -> the gradient of the bias (C)."""

    @abstractmethod
    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        """x, a (..., C), a_bias, w, b (C) -> s = x + (a + a_bias), LN(s), aux. LN reads s in the dtype of s."""

    @abstractmethod
    def residual_layernorm_backward(self, ds, dy, w, aux):  # aux: also of layernorm_forward
        """ds (..., C) or None, dy (..., C) of LN(s) -> dx (..., C), which is also da; da_bias (C), dw (C), db (C)."""

    @abstractmethod
    def rotary_forward(self, qkv, n_head, position=0):
        """qkv (B, T, 3C): columns of q, k, v -> the same shape; q and k of row t are rotated by position + t.

        D is even. Channel i < D / 2 of each head and channel i + D / 2 are a point (a, b) of the plane, rotated by the
        angle (position + t) 10000^(-2i / D): (a cos - b sin, b cos + a sin) (Su et al. 2021; GPT-NeoX's channels).
        """

    @abstractmethod
    def rotary_backward(self, dy, n_head, position=0):
        """dy (B, T, 3C) -> dqkv (B, T, 3C): the rotation by the opposite angles, which is the transposed matrix."""

    @abstractmethod
    def attention_forward(self, qkv, n_head):
        """qkv (B, T, 3C): columns of q, k, v -> y (B, T, C): for each head causal softmax(q k' / sqrt(D)) v; aux."""

    @abstractmethod
    def attention_backward(self, dy, qkv, y, aux, n_head):
        """dy (B, T, C) -> dqkv (B, T, 3C)."""

    @abstractmethod
    def rotary_attention_forward(self, qkv, n_head, position):
        """qkv (B, T, 3C) -> attention_forward of rotary_forward(qkv, n_head, position): y, aux. May overwrite qkv."""

    @abstractmethod
    def rotary_attention_backward(self, dy, y, aux, n_head, position):
        """dy (B, T, C) -> dqkv (B, T, 3C)."""

    @abstractmethod
    def attention_cached(self, qkv, keys, values, position, n_head):
        """qkv (B, t, 3C) of positions [position, position + t) -> attention over all positions so far (B, t, C).

        For inference. Writes the new k and v to the caches, keys (B, H, D, block) and values (B, H, block, D).
        """

    @abstractmethod
    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        """ids (B, T), wte (V, C), wpe (block, C) -> wte[ids - first] + wpe[position:position + T] (B, T, C).

        ids: integers, or the result of prepare_tokens. wte holds the tokens [first, first + V); for any other token,
        wte[...] counts as zero. If wpe is None, no position embedding is added.
        """

    @abstractmethod
    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        """dy (B, T, C) -> dwte (V, C), dwpe (block, C), summed in a fixed order; dwpe is None if wpe is None.

        Tokens outside [first, first + V) add nothing to dwte; dwpe includes all tokens.
        """

    @abstractmethod
    def unembed_forward(self, x, w):
        """x (..., C), w (V, C) -> logits x @ w' (..., V)."""

    @abstractmethod
    def unembed_backward(self, dy, x, w):
        """dy (..., V) -> dx (..., C), dw (V, C)."""

    @abstractmethod
    def cross_entropy_forward(self, logits, targets, first=0):
        """logits (N, V), targets (N) -> maxima, sums, target_logits, each (N), and aux.

        The logits are those of the tokens [first, first + V). For each row, maxima: the largest logit; sums: the sum of
        exp(logit - maximum); target_logits: the target's logit, or 0 for a target that is not one of these tokens. With
        the whole vocabulary, a row's loss is log(sum) - (target_logit - maximum); else see ops.loss_of_rows.
        """

    @abstractmethod
    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        """dy: array of one element -> dlogits (N, V) = dy * scale * (exp(logits - maxima) / sums - onehot(targets)).

        maxima, sums (N): over the whole vocabulary: from forward, or combined over ranks by ops.loss_of_rows.
        """

    @abstractmethod
    def unembed_cross_entropy_forward(self, x, w, targets, first=0, gradient=None):
        """cross_entropy_forward of the logits x @ w', which may be computed in chunks; x (..., C), w (V, C).

        gradient: a HeadGradient (kernel_arguments.py), or None. If it is given, and if w has the whole vocabulary,
        forward may compute the gradients and keep them in aux.
        """

    @abstractmethod
    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        """dy: array of one element -> dx (..., C), which may be a function too; dw (V, C)."""

    @abstractmethod
    def loss_rows(self, maxima, sums, target_logits, row_maxima):
        """row_maxima (N): the maxima over all ranks -> (2, N): [sums * exp(maxima - row_maxima), target_logits]."""

    @abstractmethod
    def loss(self, row_maxima, sums, target_logits, scale):
        """Arrays (N) -> scale * the sum over rows of log(sums) + row_maxima - target_logits, float64 of shape ()."""

    @abstractmethod
    def page_sums(self, flat):
        """flat (n) -> (n / 1024): the sum of squares of each page of the arena, 1024 elements, in the dtype of flat.

        In float32 it is infinite if the root of the mean square of a page is above 5.8e17, also for finite elements.
        Then the norm is infinite, and the trainer raises Diverged.
        """

    @abstractmethod
    def clip(self, sums, clip, guard=None):
        """sums: from page_sums() -> norm = sqrt(their sum), factor = min(1, clip / (norm + 1e-6)).

        Both have one element. The number of sums is a multiple of 64; they are added in float64 and in a fixed order.
        clip 0: factor is 1. If the norm is not finite, factor is NaN, so adamw_step does nothing.
        guard: a Guard (kernel_arguments.py), for the gradient of a step of engine/fast_trainer.py. A backend
        reads it if it scales the loss, or if its steps overlap.
        """

    @abstractmethod
    def adamw_step(self, p, m, v, g, coefficients, factor, decays, betas, copy=None):
        """Update p, m, v (n) from the gradient g (n) * factor: one step of AdamW (optimizer.py).

        m, v: the moments. coefficients: from AdamW.coefficients(). factor: from clip(); if it is NaN, nothing changes.
        decays (n / 1024): 1 for a page with weight decay, else 0. betas: (beta1, beta2). copy: a ParameterCopy
        (kernel_arguments.py) that receives the new p; None if compute_dtype is dtype.
        """

"""The Backend protocol: the array kernels of a device, in pairs of forward and backward."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows; ... leading axes; ' transpose

from abc import ABC, abstractmethod

import numpy as np

from gpt2core.runtime import Runtime


class Backend(ABC):
    """Array kernels for one device. Docstrings read "arguments -> results"; weights are (in, out); `d` is gradient.

    A kernel returns new arrays and changes no argument except `out`; only `cast`, `attention_cached`, `clip` and
    `adamw_step` change others. `aux` is what forward saves for backward; only the backend reads it. `out` of a backward
    kernel has one entry per weight gradient, in the order of the results: an array to write (complete after
    `runtime.join()`) and return, or None for a new one; in unembed_* `out` is the entry itself.
    """

    deterministic = True  # the default of --deterministic; False on GPUs, where many small micro-batches are slower
    uses_threads = True  # whether worker threads, one backend each, divide the batch
    merges_micro_batches = False  # whether `micro_batches` may be more than 1
    micro_batches = 1  # in one kernel call, which adds their gradients of a parameter in the canonical order
    many_ranks = "stage 1 or 3"  # for error messages: the stage that runs several processes
    scales_loss = False  # True: small gradients underflow in `compute_dtype`; see parallel/loss_scale.py
    rounds_stochastically = False  # whether `cast` and `adamw_step` take a rounding key
    decoder_batch = 1  # number of prompts that one decoder should continue at the same time

    name: str
    precision: str  # the value of --precision
    dtype: object  # of the parameters, their gradients and moments
    compute_dtype: object  # of the activations, and of the copy of the parameters that kernels read
    xp: object  # the array module (numpy, cupy)
    runtime: Runtime  # what the device provides in addition to kernels

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
        """a + b of equal shapes, as a new array: the sum of two gradients of one tensor."""
        return a + b

    def cast(self, x, out, key=None):
        """Copy x to `out` in out's dtype, rounded to nearest, or stochastically with a `key` from rounding_key()."""
        out[...] = x

    def prepare_tokens(self, ids, rows=None, first=0):
        """Token ids (B, T) on the host -> NumPy arrays in the form that kernels read.

        rows, first: add what embedding_backward needs if wte holds only the token ids [first, first + rows).
        """
        return ids

    def check_model(self, config):  # noqa: B027 - any model will do
        """Raise ConfigError for a model that the kernels cannot compute."""

    def decoder(self, model, batch):
        """A faster decoder for `batch` prompts with the methods of sampler.Decoder, or None."""
        return None

    @abstractmethod
    def codec(self, kind):
        """The Codec of --compress `kind` for arrays of this device; raises ConfigError for an unknown kind."""

    # -- kernel pairs ------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_forward(self, x, w, b=None):
        """x (..., C), w (C, K), b (K) or None -> x @ w + b (..., K)."""

    @abstractmethod
    def linear_backward(self, dy, x, w, bias=True, out=(None, None)):
        """dy (..., K) -> dx (..., C), dw (C, K), db (K); db is None without a bias."""

    @abstractmethod
    def gelu_forward(self, x):
        """x of any shape -> y = x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016)."""

    @abstractmethod
    def gelu_backward(self, dy, x):
        """-> dx, which has the shape of x."""

    def linear_gelu_forward(self, x, w, b):
        """-> y = gelu(x @ w + b) (..., K), aux."""
        h = self.linear_forward(x, w, b)
        return self.gelu_forward(h), h

    def linear_gelu_backward(self, dy, x, w, aux, out=(None, None)):
        """-> dx (..., C), dw (C, K), db (K)."""
        return self.linear_backward(self.gelu_backward(dy, aux), x, w, out=out)

    def mlp_forward(self, x, w, b, w2):
        """-> y = gelu(x @ w + b) @ w2 (..., C), aux; w (C, K), b (K), w2 (K, C)."""
        h, aux = self.linear_gelu_forward(x, w, b)
        return self.linear_forward(h, w2), (h, aux)

    def mlp_backward(self, dy, x, w, w2, aux, out=(None, None, None)):
        """-> dx (..., C), dw (C, K), db (K), dw2 (K, C)."""
        h, aux = aux
        dh, dw2, _ = self.linear_backward(dy, h, w2, bias=False, out=(out[2], None))
        return *self.linear_gelu_backward(dh, x, w, aux, out[:2]), dw2

    @abstractmethod
    def layernorm_forward(self, x, w, b, eps):
        """x (..., C), w (C), b (C) -> y = (x - mean) / sqrt(var + eps) * w + b, aux (Ba et al. 2016).

        residual_layernorm_backward also accepts this aux.
        """

    @abstractmethod
    def layernorm_backward(self, dy, w, aux, out=(None, None)):
        """-> dx (..., C), dw (C), db (C)."""

    @abstractmethod
    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        """x (..., C) the residual stream, a (..., C) and a_bias (C) a branch -> s = x + a + a_bias, LN(s), aux."""

    @abstractmethod
    def residual_layernorm_backward(self, ds, dy, w, aux, out=(None, None, None)):
        """ds (..., C) or None, dy (..., C) for LN(s) -> dx (which is also da), da_bias (C), dw (C), db (C)."""

    @abstractmethod
    def attention_forward(self, qkv, n_head):
        """qkv (B, T, 3C): q, k, v of (H, D) columns each -> y = causal softmax(q k' / sqrt(D)) v (B, T, C), aux."""

    @abstractmethod
    def attention_backward(self, dy, qkv, y, aux, n_head):
        """dy (B, T, C) -> dqkv (B, T, 3C)."""

    @abstractmethod
    def attention_cached(self, qkv, keys, values, position, n_head):
        """qkv (B, t, 3C) of positions [position, position + t) -> attention over all positions so far (B, t, C).

        For inference only. Writes k and v to the caches, keys (B, H, D, block) and values (B, H, block, D).
        """

    @abstractmethod
    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        """ids (B, T), wte (V, C), wpe (block, C) -> wte[ids - first] + wpe[position:position + T] (B, T, C).

        ids: integers, or what prepare_tokens returns. wte holds the token ids [first, first + V); the row of any other
        id is zero. If wpe is None, no position embedding is added.
        """

    @abstractmethod
    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0, out=(None, None), accumulate=False):
        """dy (B, T, C) -> dwte (V, C), dwpe (block, C), summed in a fixed order.

        Tokens outside [first, first + V) add nothing to dwte; dwpe includes all tokens. accumulate: add dwte to the
        contents of out[0].
        """

    @abstractmethod
    def unembed_forward(self, x, w):
        """x (..., C), w (V, C) -> logits x @ w' (..., V)."""

    @abstractmethod
    def unembed_backward(self, dy, x, w, out=None):
        """-> dx (..., C), dw (V, C)."""

    @abstractmethod
    def cross_entropy_forward(self, logits, targets, first=0):
        """logits (N, V), targets (N) -> maxima, sums, picked, each (N), and aux.

        The logits are the columns [first, first + V) of a vocabulary. For each row, maxima: the largest logit; sums:
        the sum of exp(logit - maximum); picked: the target's logit, or 0 for a target outside these columns. The loss
        of a whole row is log(sum) - (picked - maximum): see ops.loss_of_rows.
        """

    @abstractmethod
    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        """dy a scalar array -> dlogits (N, V) = dy scale (exp(logits - maxima) / sums - onehot).

        maxima, sums (N): of whole rows, from forward or combined over the ranks by ops.loss_of_rows.
        """

    @abstractmethod
    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, dloss=None, out=None):
        """cross_entropy_forward(unembed(x)) for x (N, C), w (V, C), targets (N); the logits need not all exist at once.

        scale: the `scale` of backward if forward may already compute the gradient, because w is the whole vocabulary
        and backward follows; else None. dloss: the `dy` of backward, or None if not known yet. out: an array for dw.
        """

    @abstractmethod
    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0, out=None):
        """-> dx (N, C), dw (V, C)."""

    def loss_rows(self, maxima, sums, picked, highest):
        """-> (2, N): sums * exp(maxima - highest), then picked. highest (N): the maxima over all ranks."""
        return self.xp.stack([sums * self.xp.exp(maxima - highest), picked])

    def loss(self, highest, sums, picked, scale):
        """-> scale * sum over the rows of (log(sums) - (picked - highest)), a float64 scalar array."""
        losses = self.xp.log(sums) - (picked - highest)
        return self.xp.asarray(losses.sum(dtype=np.float64) * scale)

    @abstractmethod
    def sum_of_squares(self, flat, segments):
        """flat (n) -> (segments) float64: the sum of each of `segments` equal parts, independent of other parts."""

    @abstractmethod
    def clip(self, squares, bound, loss_scale=None, interval=0, stop=None):
        """squares (segments) float64 -> norm = sqrt(sum of squares), scale = min(1, bound / (norm + 1e-6)).

        Both have one element. bound 0: no clipping, scale is 1. If the norm is not finite, scale is NaN, and adamw_step
        then does nothing. loss_scale, interval: `state` and `interval` of a LossScale; norm is divided by the loss
        scale, then scale = min(...) / loss scale, and the state is updated. stop: an array (1), initially 0; the first
        norm that is not finite sets it to NaN, and then every later scale is NaN.
        """

    @abstractmethod
    def adamw_step(self, p, m, v, copy, g, hyper, scale, decays, betas, offset=0):
        """Update p, m, v (n) in place from g (n) * scale, and write p to `copy` (n) unless copy is None.

        hyper: the step's Hyperparameters (optimizer.py), arrays of the host or device; with hyper.key, copy is rounded
        stochastically. scale: from clip; NaN: do nothing. decays (n / 1024): 1 for a block with weight decay, else 0.
        betas: (beta1, beta2). offset: the arena index of p[0], from which the random numbers are computed.
        """

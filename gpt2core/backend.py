"""The Backend protocol: the array kernels a device provides, in pairs, forward and backward next to each other."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows; `...` any leading axes.

from abc import ABC, abstractmethod

import numpy as np

from gpt2core.runtime import Runtime


class Backend(ABC):
    """Array kernels for one device. Weights are stored (in, out); `d` means gradient; `aux` is opaque to the core.

    A kernel returns new arrays and never writes to its inputs; only `adamw_step` and `clip` update arrays in place.
    `out` of a backward kernel lists arrays for the gradients of its parameters, in the order of the results: such a
    gradient is written there and returned, and is complete after `runtime.join()`; None asks for a new array. The
    default of a fused pair is composed of the plain pairs; a device with a faster kernel overrides it.
    """

    deterministic = True  # the default of --deterministic; a GPU is faster with the whole batch in one piece
    uses_threads = True  # whether worker threads, one backend each, divide the batch
    many_ranks = "stage 1 or 3"  # the stages that run many processes with these arrays
    scales_loss = False  # whether small gradients underflow in `compute`: see parallel/loss_scale.py
    rounds_stochastically = False  # whether `cast` and `adamw_step` take a rounding key
    decoder_batch = 1  # prompts that one decoder should continue at the same time

    name: str
    precision: str  # the --precision it was made for
    dtype: object  # of the parameters, their gradients and moments
    compute: object  # of the activations, and of the copy of the parameters that kernels read
    xp: object  # the array module (numpy, cupy) that composed operations call
    runtime: Runtime  # what the device offers beside kernels

    @abstractmethod
    def empty(self, shape, dtype):
        """An uninitialised C-contiguous array on this device."""

    @abstractmethod
    def asarray(self, array, dtype=None):
        """A host array as an array on this device, copied only where necessary."""

    @abstractmethod
    def to_host(self, array):
        """An array of this device as a NumPy array, copied only where necessary; waits for the device."""

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
        """out = x in the dtype of `out`, rounded to nearest; or stochastically with a key of `rounding_key`."""
        out[...] = x

    def prepare_tokens(self, ids, rows=None, first=0):
        """Token ids (B, T) of the host as NumPy arrays in the form that kernels read.

        rows, first: also what embedding_backward needs for a table of the tokens [first, first + rows).
        """
        return ids

    def check_model(self, config):  # noqa: B027 - any model will do
        """Raise ConfigError for a model that the kernels cannot compute."""

    def decoder(self, model, batch):
        """A decoder for `batch` prompts that is faster than sampler.Decoder, with its methods, or None."""
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
        """-> dx, the shape of x."""

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

        residual_layernorm_backward takes the same aux.
        """

    @abstractmethod
    def layernorm_backward(self, dy, w, aux, out=(None, None)):
        """-> dx (..., C), dw (C), db (C)."""

    @abstractmethod
    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        """x (..., C) the residual stream, a (..., C) a branch, its bias (C) -> s = x + a + a_bias, LN(s), aux."""

    @abstractmethod
    def residual_layernorm_backward(self, ds, dy, w, aux, out=(None, None, None)):
        """ds (..., C) or None, dy (..., C) -> dx (and da, the same array), da_bias (C), dw (C), db (C)."""

    @abstractmethod
    def attention_forward(self, qkv, n_head):
        """qkv (B, T, 3C), q then k then v, heads side by side -> causal softmax(q k' / sqrt(D)) v (B, T, C), aux."""

    @abstractmethod
    def attention_backward(self, dy, qkv, y, aux, n_head):
        """dy (B, T, C) -> dqkv (B, T, 3C)."""

    @abstractmethod
    def attention_cached(self, qkv, keys, values, position, n_head):
        """qkv (B, t, 3C) of positions [position, position + t) -> attention over all positions so far (B, t, C).

        Inference. Writes k and v into the caches, keys (B, H, D, block) and values (B, H, block, D).
        """

    @abstractmethod
    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        """ids (B, T), wte (V, C), wpe (block, C) -> wte[ids - first] + wpe[position:position + T] (B, T, C).

        ids: integers, or what prepare_tokens returns. wte holds the tokens [first, first + V): the row of any other
        token is zero. No positions are added for wpe None.
        """

    @abstractmethod
    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0, out=(None, None), accumulate=False):
        """dy (B, T, C) -> dwte (V, C), dwpe (block, C), summed in a fixed order.

        Tokens outside [first, first + V) add nothing to dwte; dwpe is that of all rows. accumulate: add dwte to what
        out[0] holds.
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

        maxima of the rows; sums of exp(logit - maximum); picked, the target's logit. The logits are the columns
        [first, first + V) of a vocabulary; picked is 0 for a target outside them. ops.py computes the loss from these
        three, over the columns of one rank or of all: log(sum) - (picked - maximum).
        """

    @abstractmethod
    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        """dy a scalar array -> dlogits (N, V) = dy scale (exp(logits - maxima) / sums - onehot).

        maxima, sums (N) are those of whole rows: forward's own, or combined over the ranks.
        """

    @abstractmethod
    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, seed=None, out=None):
        """cross_entropy_forward(unembed(x)) for x (N, C), w (V, C), targets (N); not all logits need exist at once.

        scale: that of backward, given where these are whole rows and a gradient is wanted, so that it may be computed
        here. seed: the dy that backward will get, a scalar array, or None where it is not known yet. out: for dw.
        """

    @abstractmethod
    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0, out=None):
        """-> dx (N, C), dw (V, C)."""

    def loss_rows(self, maxima, sums, picked, highest):
        """Of one rank's columns: sums exp(maxima - highest) and picked as one array (2, N), to be added over ranks."""
        return self.xp.stack([sums * self.xp.exp(maxima - highest), picked])

    def loss(self, highest, sums, picked, scale):
        """-> scale * sum over the rows of log(sums) - (picked - highest), a float64 scalar array."""
        losses = self.xp.log(sums) - (picked - highest)
        return self.xp.asarray(losses.sum(dtype=np.float64) * scale)

    @abstractmethod
    def sum_of_squares(self, flat, segments):
        """flat (n) -> (segments) float64, one for each of `segments` equal parts; the bits depend on the part only."""

    @abstractmethod
    def clip(self, squares, bound, loss_scale=None, interval=0, stop=None):
        """squares (segments) float64 -> norm, the root of their canonical sum, and min(1, bound / (norm + 1e-6)).

        Both are arrays of one element. bound 0: no clipping, the factor is 1. Where the norm is not finite the factor
        is NaN, for which adamw_step does nothing. loss_scale, interval: the state of a LossScale, which is updated;
        both results are divided by its factor. stop: an array (1) of 0; the first norm that is not finite makes it
        NaN, and then every later factor is NaN too.
        """

    @abstractmethod
    def adamw_step(self, p, m, v, copy, g, hyper, scale, decays, betas, offset=0):
        """Update p, m, v (n) in place from g * scale, g (n) (Loshchilov and Hutter 2019); copy (n) = p, or None.

        hyper: the Hyperparameters of this step (optimizer.py), whose arrays may be on the device. scale: of clip.
        decays (n / 1024): 1 for a block to which weight decay applies, else 0. betas: (beta1, beta2). offset: the
        number of p's first element in the arena, a counter of the random numbers of stochastic rounding.
        """

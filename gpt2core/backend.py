"""The Backend protocol: the array kernels a runtime must bring, in pairs, forward and backward next to each other."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows; `...` any leading axes.

from abc import ABC, abstractmethod

import numpy as np


class Backend(ABC):
    """Array kernels for one device. Weights are stored (in, out); `d` means gradient; `aux` is opaque to the core.

    A kernel never writes into its inputs (only `*_step` functions update in place) and returns arrays it gives away.
    A fused kernel is one more method pair: here its default is composed of the plain pairs, and a runtime that can
    do better overrides it.
    """

    deterministic = True  # whether --deterministic is the default: a GPU would rather have its batch whole
    uses_threads = True  # whether worker threads, a backend each, divide the batch among them
    decoder_batch = 1  # texts that are best continued together

    name: str
    precision: str  # the --precision it was made for
    dtype: object  # of the parameters, their gradients and moments
    compute: object  # of the activations, and of the copy of the parameters that kernels read
    xp: object  # the array module (numpy, cupy) that composed operations call

    # -- arrays ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape, dtype):
        """An uninitialised C-contiguous array on this device."""

    @abstractmethod
    def asarray(self, array, dtype=None):
        """A host array as an array on this device, copied only where it must be."""

    @abstractmethod
    def to_host(self, array):
        """An array of this device as a NumPy array, copied only where it must be."""

    def number(self, x):
        """An array of one element, or a number, as a Python float: the one place that waits for the device."""
        return float(np.asarray(self.to_host(x)).item())

    def zeros(self, shape, dtype):
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def ones(self, shape, dtype):
        array = self.empty(shape, dtype)
        array[...] = 1
        return array

    def add(self, a, b):
        """a + b of one shape, as a new array: the sum of two gradients of one tensor."""
        return a + b

    def use_threads(self, count):  # noqa: B027 - optional: a GPU has none to use
        """Let one kernel use `count` host threads: for generation, where no batch is there to divide."""

    def compile_step(self, function):
        """`function()`, possibly recorded once and replayed (CUDA graph). The identity where nothing is gained.

        What it reads must stay where it is: tokens() and adamw_rates() see to that. It returns arrays of this device,
        which the next call may overwrite.
        """
        return function

    def tokens(self, array, slot):
        """A host array of token numbers as kernels take it; the next call with this `slot` may overwrite it."""
        return array

    def compute_copy(self, parameters):
        """The array of parameters' size that kernels read: itself, or one in the precision of the kernels."""
        return parameters

    def refresh(self, copy, parameters):  # noqa: B027 - nothing to do where they are the same
        """copy = parameters, rounded."""

    def decoder(self, model, batch):
        """What continues `batch` texts by `model` faster than sampler.Decoder, and has its methods; None: nothing."""
        return None

    def peak_flops(self, precision):
        """Peak floating-point operations per second of this device, or None where it is not known."""
        return None

    # -- kernel pairs ------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_forward(self, x, w, b=None):
        """x (..., C), w (C, K), b (K) or None -> x @ w + b (..., K)."""

    @abstractmethod
    def linear_backward(self, dy, x, w, bias=True):
        """dy (..., K) -> dx (..., C), dw (C, K), and with `bias` db (K)."""

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

    def linear_gelu_backward(self, dy, x, w, aux):
        """-> dx (..., C), dw (C, K), db (K)."""
        return self.linear_backward(self.gelu_backward(dy, aux), x, w)

    @abstractmethod
    def layernorm_forward(self, x, w, b, eps):
        """x (..., C), w (C), b (C) -> y = (x - mean) / sqrt(var + eps) * w + b, aux (Ba et al. 2016)."""

    @abstractmethod
    def layernorm_backward(self, dy, w, aux):
        """-> dx (..., C), dw (C), db (C)."""

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        """x (..., C) the residual stream, a (..., C) a branch, its bias (C) -> s = x + a + a_bias, LN(s), aux."""
        s = x + (a + a_bias)
        y, aux = self.layernorm_forward(s, w, b, eps)
        return s, y, aux

    def residual_layernorm_backward(self, ds, dy, w, aux):
        """ds (..., C) or None, dy (..., C) -> dx (and da, the same array), da_bias (C), dw (C), db (C)."""
        dx, dw, db = self.layernorm_backward(dy, w, aux)
        dx = dx if ds is None else self.add(dx, ds)
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0), dw, db

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
        """ids (B, T) integers, wte (V, C), wpe (block, C) -> wte[ids - first] + wpe[position:position + T] (B, T, C).

        wte holds the tokens [first, first + V): any other token's row is zero. No positions are added for wpe None.
        """

    @abstractmethod
    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        """dy (B, T, C) -> dwte (V, C), dwpe (block, C), summed in an order that does not vary.

        Tokens outside [first, first + V) give nothing to dwte; dwpe is that of all rows.
        """

    @abstractmethod
    def unembed_forward(self, x, w):
        """x (..., C), w (V, C) -> logits x @ w' (..., V)."""

    @abstractmethod
    def unembed_backward(self, dy, x, w):
        """-> dx (..., C), dw (V, C)."""

    @abstractmethod
    def cross_entropy_forward(self, logits, targets, first=0):
        """logits (N, V), targets (N) -> maxima, sums, picked, each (N), and aux: all that a row's loss needs of them.

        maxima of the rows; sums of exp(logit - maximum); picked, the target's logit. The logits are the columns
        [first, first + V) of a vocabulary, and picked is 0 where the target is none of them. From these three ops.py
        makes loss = log(sum) - (picked - maximum), over one rank's columns or those of all.
        """

    @abstractmethod
    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        """dy a scalar array -> dlogits (N, V) = dy scale (exp(logits - maxima) / sums - onehot).

        maxima, sums (N) are those of the whole rows: forward's own, or what all ranks' amount to.
        """

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None):
        """cross_entropy_forward(unembed(x)) for x (N, C), w (V, C), targets (N); logits need not all exist.

        `scale` is backward's, given where these are whole rows and a gradient is wanted: it may be computed at once.
        """
        logits = self.unembed_forward(x, w)
        *rows, aux = self.cross_entropy_forward(logits, targets, first)
        return *rows, (logits, aux)

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        """-> dx (N, C), dw (V, C)."""
        logits, aux = aux
        dlogits = self.cross_entropy_backward(dy, logits, targets, scale, maxima, sums, aux, first)
        return self.unembed_backward(dlogits, x, w)

    # -- flat buffers ------------------------------------------------------------------------------------------------

    @abstractmethod
    def sum_of_squares(self, flat, segments):
        """flat (n) -> (segments) float64, one for each of `segments` equal parts; the same bits whoever computes it."""

    @abstractmethod
    def clip(self, squares, bound):
        """squares (segments) float64 -> the norm, the root of their canonical sum, and min(1, bound / (norm + 1e-6)).

        Both as numbers of this device, of one element. A bound of 0 clips nothing: the second is 1; and NaN where the
        norm is not finite, for which adamw_step does nothing.
        """

    @abstractmethod
    def adamw_rates(self, step, lr, beta1, beta2, eps, weight_decay):
        """What adamw_step needs to know of one step, from numbers of the host; `step` counts from 1.

        The next call may overwrite it: a recorded step reads it where it was.
        """

    @abstractmethod
    def adamw_step(self, p, m, v, copy, g, rates, scale, runs):
        """Update p, m, v (n) in place from g * scale, g (n) (Loshchilov and Hutter 2019); copy (n) = p, or None.

        rates: of adamw_rates; scale: of clip. runs: [(slice, whether weight decay applies)], which make up [0, n).
        """

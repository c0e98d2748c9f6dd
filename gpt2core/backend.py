"""The Backend protocol: the array kernels a runtime must bring, in pairs, forward and backward next to each other."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows; `...` any leading axes.

import contextlib
import sys
from abc import ABC, abstractmethod

import numpy as np

from gpt2core.errors import ConfigError


class Immediate:
    """A call begins function(), and returns finish(), which waits for its end and returns its list of arrays.

    Here it has ended when the call does.
    """

    ahead = False  # whether a call may be made before the finish() of the one before it

    def __init__(self, function):
        self.function = function

    def __call__(self):
        results = self.function()
        return lambda: results


class Backend(ABC):
    """Array kernels for one device. Weights are stored (in, out); `d` means gradient; `aux` is opaque to the core.

    A kernel never writes into its inputs (only `*_step` functions update in place) and returns arrays it gives away.
    A fused kernel is one more method pair: here its default is composed of the plain pairs, and a runtime that can
    do better overrides it.
    """

    deterministic = True  # whether --deterministic is the default: a GPU would rather have its batch whole
    uses_threads = True  # whether worker threads, a backend each, divide the batch among them
    scales_loss = False  # whether small gradients would vanish in `compute`: see optimizer.LossScale
    rounds_stochastically = False  # whether adamw_step can round `copy` up or down at random
    records = False  # whether compile_step() records: a step can then be run without, for debugging
    decoder_batch = 1  # texts that are best continued together
    many_ranks = "stage 1 or 3"  # where many processes compute with it

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

    def numbers(self, arrays):
        """number() of each, waiting once."""
        return [self.number(array) for array in arrays]

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

    def place_gradients(self, places):  # noqa: B027 - only saves a copy
        """places [(parameter, array)]: a kernel may write a parameter's gradient there, and backward then returns it.

        It may be complete only after settle(). Each is written anew by every backward pass.
        """

    def settle(self):  # noqa: B027 - nothing to do where kernels run one after another
        """Let what follows see all gradients that backward kernels have returned."""

    def behind_gradients(self):
        """A context whose work alone sees all of them: what follows it need not wait."""
        return contextlib.nullcontext()

    def compile_step(self, function, record=True):
        """Immediate(function), or with `record` what is called like it: recorded once and then replayed (CUDA graph).

        What function() reads must stay where it is: tokens() and adamw_rates() see to that. It returns a list of arrays
        of this device.
        """
        return Immediate(function)

    choices = {}  # what was chosen by timing and so may differ between ranks: {what: choice}, all of it text
    chosen_for = None  # the device and libraries for which they are good, as text; None: nothing is chosen by timing

    def adopt(self, choices, final=False):  # noqa: B027 - nothing is chosen by timing
        """Choose as `choices`, another rank's or an earlier run's, have it, and know of no others.

        final: add them to what is known, and time nothing more.
        """

    def choose_anew(self):
        """Time all again that was chosen by timing before; raises ConfigError where nothing is."""
        raise ConfigError(f"--autotune has no meaning here: {self.name} times nothing, so leave the flag away")

    def say(self, text):
        """Tell the user why something takes long."""
        print(text, file=sys.stderr)

    def tokens(self, array, slot):
        """A host array of token numbers as kernels take it; the next call with this `slot` may overwrite it."""
        return array

    def compute_copy(self, parameters):
        """The array of parameters' size that kernels read: itself, or one in the precision of the kernels."""
        return parameters

    def refresh(self, copy, parameters, drawn=None):  # noqa: B027 - nothing to do where they are the same
        """copy = parameters, rounded to nearest; for drawn (seed, step) as adamw_step has rounded them in that step."""

    def trim(self):  # noqa: B027 - only for what keeps memory that nobody uses
        """Give back to the device what loading has used and let go: a step would cut it up for other sizes."""

    def span(self, name):
        """A context manager around a part of a step, by which a profiler may name it."""
        return contextlib.nullcontext()

    def annotate(self):
        """Name spans and kernels on a profiler's time line from now on; raises ConfigError where there is none."""
        raise ConfigError(f"--nvtx has no meaning here: there is no time line of {self.name}, so leave the flag away")

    def decoder(self, model, batch):
        """What continues `batch` texts by `model` faster than sampler.Decoder, and has its methods; None: nothing."""
        return None

    def peak_flops(self, precision):
        """Peak floating-point operations per second of this device, or None where it is not known."""
        return None

    def peak_memory(self):
        """The most bytes of device memory that were held so far, or None where nobody counts them."""
        return None

    def out_of_memory(
        self, error, config, batch_size=None, seq_len=None, micro_batches=1, ranks=1, parallel=None, in_order=False
    ):
        """One sentence with the way out where `error` says that the device has no room for such a training step.

        Or for a generation, without a batch. None where it says something else, or where nothing better is known.
        ranks: that are data parallel; parallel: a ParallelConfig, or None for its defaults; in_order: whether the
        devices add gradients up in the canonical tree.
        """
        return None

    @abstractmethod
    def codec(self, kind):
        """The Codec of --compress `kind` for this device's arrays; raises ConfigError for an unknown kind."""

    def check_model(self, config):  # noqa: B027 - any will do
        """Raise ConfigError for a model that the kernels cannot compute."""

    def remarks(self, config):
        """Sentences for whoever is about to compute this model here; [] where nobody would be surprised."""
        return []

    # -- kernel pairs ------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_forward(self, x, w, b=None):
        """x (..., C), w (C, K), b (K) or None -> x @ w + b (..., K)."""

    @abstractmethod
    def linear_backward(self, dy, x, w, bias=True):
        """dy (..., K) -> dx (..., C), dw (C, K), and db (K) unless bias is False.

        The bias itself may be given too: its gradient may have a place (place_gradients).
        """

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

    def mlp_forward(self, x, w, b, w2):
        """-> y = gelu(x @ w + b) @ w2 (..., C), aux; w (C, K), b (K), w2 (K, C)."""
        h, aux = self.linear_gelu_forward(x, w, b)
        return self.linear_forward(h, w2), (h, aux)

    def mlp_backward(self, dy, x, w, w2, aux):
        """-> dx (..., C), dw (C, K), db (K), dw2 (K, C)."""
        h, aux = aux
        dh, dw2 = self.linear_backward(dy, h, w2, bias=False)
        return *self.linear_gelu_backward(dh, x, w, aux), dw2

    @abstractmethod
    def layernorm_forward(self, x, w, b, eps):
        """x (..., C), w (C), b (C) -> y = (x - mean) / sqrt(var + eps) * w + b, aux (Ba et al. 2016).

        aux is good for residual_layernorm_backward too.
        """

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

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, seed=None):
        """cross_entropy_forward(unembed(x)) for x (N, C), w (V, C), targets (N); logits need not all exist.

        `scale` is backward's, given where these are whole rows and a gradient is wanted: it may be computed at once.
        `seed`: what backward's dy will be, an array of one element, where that is known and not 1.
        """
        logits = self.unembed_forward(x, w)
        *rows, aux = self.cross_entropy_forward(logits, targets, first)
        return *rows, (logits, aux)

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        """-> dx (N, C), dw (V, C)."""
        logits, aux = aux
        dlogits = self.cross_entropy_backward(dy, logits, targets, scale, maxima, sums, aux, first)
        return self.unembed_backward(dlogits, x, w)

    def loss_rows(self, maxima, sums, picked, highest):
        """Of one rank's columns: sums exp(maxima - highest) and picked as one array (2, N), to be added over ranks."""
        return self.xp.stack([sums * self.xp.exp(maxima - highest), picked])

    def loss(self, highest, sums, picked, scale):
        """-> scale * sum over the rows of log(sums) - (picked - highest), a float64 scalar array."""
        losses = self.xp.log(sums) - (picked - highest)
        return self.xp.asarray(losses.sum(dtype=np.float64) * scale)

    # -- flat buffers ------------------------------------------------------------------------------------------------

    @abstractmethod
    def sum_of_squares(self, flat, segments):
        """flat (n) -> (segments) float64, one for each of `segments` equal parts; the same bits whoever computes it."""

    @abstractmethod
    def clip(self, squares, bound, loss_scale=None, interval=0, stop=None):
        """squares (segments) float64 -> the norm, the root of their canonical sum, and min(1, bound / (norm + 1e-6)).

        Both as numbers of this device, of one element. A bound of 0 clips nothing: the second is 1; and NaN where the
        norm is not finite, for which adamw_step does nothing. loss_scale: the state of a LossScale, whose factor both
        are divided by, and which is brought up to date; only where `scales_loss`. stop: an array (1) of 0, which the
        first norm that is not finite makes NaN, and with which the second is NaN from then on.
        """

    @abstractmethod
    def adamw_rates(self, step, lr, beta1, beta2, eps, weight_decay, seed=None):
        """What adamw_step needs to know of one step, from numbers of the host; `step` counts from 1.

        seed: of stochastic rounding, only where the backend `rounds_stochastically`; None: to nearest. The next call
        may overwrite it: a recorded step reads it where it was.
        """

    @abstractmethod
    def adamw_step(self, p, m, v, copy, g, rates, scale, runs, offset=0):
        """Update p, m, v (n) in place from g * scale, g (n) (Loshchilov and Hutter 2019); copy (n) = p, or None.

        rates: of adamw_rates; scale: of clip. runs: [(slice, whether weight decay applies)], which make up [0, n).
        offset: the number of p's first element in the arena, with which random numbers are drawn.
        """

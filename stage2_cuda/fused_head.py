"""lm_head fused with the cross-entropy: logits are computed in chunks, and only one chunk is in memory at a time."""

# N rows, C channels, V vocabulary (or one rank's part of it); w (V, C) is the weight matrix of lm_head

import numpy as np

from gpt2core.arena import round_up
from gpt2core.parallel.gpu_sizes import CHUNK_LOGITS, LOGITS_ALIGNMENT
from gpt2core.recording import AutogradError, is_recording
from stage2_cuda.kernels import cross_entropy, losses
from stage2_cuda.kernels.cast import scale_in_place


class FusedHead:
    """The methods of CudaBackend for lm_head and the loss. The docstrings of the public ones are in Backend."""

    logits_alignment = LOGITS_ALIGNMENT

    def unembed_forward(self, x, w):
        return self.product(rows(x), w, trans_b=True).reshape(*x.shape[:-1], w.shape[0])

    def unembed_backward(self, dy, x, w):
        dy, x2 = rows(dy), rows(x)
        return lambda out: self.product(dy, w).reshape(x.shape), self.weight_gradient(dy, x2)

    def cross_entropy_forward(self, logits, targets, first=0):
        maxima, sums, target_logits = (self.floats(len(logits)) for _ in range(3))
        targets = self.asarray(targets, np.int32)
        cross_entropy.cross_entropy_forward(maxima, sums, target_logits, logits, targets, logits.shape[1], first)
        return maxima, sums, target_logits, None

    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        dlogits, dy = self.like(logits), self.asarray(dy, np.float32).reshape(1)
        targets = self.asarray(targets, np.int32)
        cross_entropy.cross_entropy_backward(
            dlogits, logits, targets, maxima, sums, scale, logits.shape[1], first, dy
        )  # fmt: skip
        return dlogits

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, vocabulary=None, dloss=None):
        targets, V, x = self.asarray(targets, np.int32), len(w), rows(x)
        statistics = self.floats(3, len(x))  # maxima, sums, target_logits
        with_gradients = is_recording() and V == vocabulary  # they need the maximum and the sum of a whole row
        if with_gradients:
            dx, dw = self.like(x), self.empty_head_gradient(w)
        for number, chunk in enumerate(logit_chunks(x, w)):
            logits = self.padded_logits(x[chunk], w)
            if not with_gradients:
                cross_entropy.cross_entropy_forward(*statistics[:, chunk], logits, targets[chunk], V, first)
            else:  # backward may follow. The gradient of the logits overwrites the logits
                arguments = targets[chunk], scale, V, first, dloss
                cross_entropy.cross_entropy_forward_backward(logits, *statistics[:, chunk], logits, *arguments)
                self.head_gradients(logits, x[chunk], w, dx[chunk], dw, accumulate=number > 0)
                del logits  # frees the memory before the logits of the next chunk are allocated
        return *statistics, (dx, dw, dloss) if with_gradients else None

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        if aux is not None:  # forward has computed the gradients, for dy if it was known, otherwise for dy = 1
            dx, dw, dloss = aux
            if dloss is None:
                dx, dw = self.times(dx, dy), self.times(dw, dy)
            elif dy is not dloss:
                raise AutogradError("unembed_cross_entropy: call backward() with the dloss that forward was given")
            return dx.reshape(x.shape), dw
        targets, dy, V = self.asarray(targets, np.int32), self.asarray(dy, np.float32).reshape(1), len(w)
        shape, x = x.shape, rows(x)
        dx, dw = self.like(x), self.empty_head_gradient(w)
        for number, chunk in enumerate(logit_chunks(x, w)):
            logits = self.padded_logits(x[chunk], w)  # again, because forward did not keep them
            arguments = targets[chunk], maxima[chunk], sums[chunk], scale, V, first, dy
            cross_entropy.cross_entropy_backward(logits, logits, *arguments)
            self.head_gradients(logits, x[chunk], w, dx[chunk], dw, accumulate=number > 0)
            del logits
        return dx.reshape(shape), dw

    def times(self, gradient, dy):
        """gradient * dy as a new array: a second backward through the same graph needs `gradient` again."""
        product = gradient.copy()
        scale_in_place(product, self.asarray(dy, np.float32).reshape(1))
        return product

    def empty_head_gradient(self, w):
        """An array for dw (V, C), float32: a part of a larger flat one, so that with_padding_rows() can extend it."""
        return self.floats(len(self.with_padding_rows(w)) * w.shape[1])[: w.size].reshape(w.shape)

    def loss_rows(self, maxima, sums, target_logits, row_maxima):
        rescaled = self.floats(2, len(sums))
        losses.rescale(rescaled, maxima, sums, target_logits, row_maxima)
        return rescaled

    def loss(self, row_maxima, sums, target_logits, scale):
        loss, partials = self.xp.empty((), np.float64), self.xp.empty(losses.partials_shape(len(sums)), np.float64)
        losses.loss(loss, partials, sums, target_logits, row_maxima, scale)
        return loss

    def padded_logits(self, x, w):
        """An array of N rows whose first V columns are x @ w' and whose other columns are padding.

        The number of columns is a multiple of LOGITS_ALIGNMENT. If with_padding_rows() can extend w, the product also
        writes the padding.
        """
        w = self.with_padding_rows(w)
        logits = self.xp.empty((len(x), round_up(len(w), LOGITS_ALIGNMENT)), x.dtype)
        self.products.multiply(logits[:, : len(w)], x, w, trans_b=True)
        return logits

    def head_gradients(self, dlogits, x, w, dx, dw, accumulate):
        """dx = dlogits w, dw = dlogits' x. dlogits: padded as by padded_logits(). accumulate: add to the old dw."""
        w, dw = self.with_padding_rows(w), self.with_padding_rows(dw)
        operand = self.products.operand(dlogits[:, : len(w)])
        self.products.multiply(dx, operand, w)
        if len(dw) != len(w):  # only one of the two could be extended: dw needs other columns of dlogits
            operand = dlogits[:, : len(dw)]
        self.products.multiply(dw, operand, x, trans_a=True, accumulate=accumulate)

    def with_padding_rows(self, w):
        """A view of w (V, C) and of the memory after w, with V rounded up to a multiple of LOGITS_ALIGNMENT.

        With an odd V the rows of the logits are not aligned, and a product takes five times as long for V = 50257. The
        logits of the additional rows are padding: they do not count in the loss, and their gradient is 0. If w is a
        gradient, the additional rows are padding too. w itself is returned if it is not contiguous, or not part of a
        flat buffer, as in an arena, with memory for the additional rows. Other arrays may have NaN there, and 0 * NaN
        is not 0.
        """
        padded_rows, base = round_up(len(w), LOGITS_ALIGNMENT), w.base
        if isinstance(w, np.ndarray) or base is None or base.ndim > 1 or not w.flags.c_contiguous:
            return w
        if w.data.ptr + padded_rows * w.strides[0] > base.data.ptr + base.nbytes:
            return w
        return self.xp.ndarray((padded_rows, w.shape[1]), w.dtype, w.data)


def rows(x):
    """x (..., C) as a contiguous matrix (N, C): a view, or a copy of an array that is not contiguous."""
    x = x if x.flags.c_contiguous else x.copy()
    return x.reshape(-1, x.shape[-1])


def logit_chunks(x, w):
    """Slices that divide the rows of x (N, C) into chunks of at most CHUNK_LOGITS logits.

    A chunk of more than 1024 rows has a multiple of 1024 rows, except for the last one.
    """
    step = max(1, CHUNK_LOGITS // w.shape[0])
    step -= step % 1024 if step > 1024 else 0
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]

"""lm_head fused with the cross-entropy: logits are computed in chunks, and only one chunk is in memory at a time."""

# N rows, C channels, V vocabulary

import numpy as np

from stage2_cuda.kernels import cross_entropy, losses
from stage2_cuda.kernels.cast import scale_in_place
from stage2_cuda.memory_model import ALIGNED, LOGITS


class FusedHead:
    """The methods of CudaBackend for the last layer and the loss; gpt2core/backend.py documents them."""

    def unembed_forward(self, x, w):
        return self.product(rows(self.xp.ascontiguousarray(x)), w, trans_b=True).reshape(*x.shape[:-1], w.shape[0])

    def unembed_backward(self, dy, x, w, out=None):
        dy, x2 = rows(dy), rows(self.xp.ascontiguousarray(x))
        dw = self.floats(*w.shape) if out is None else out
        self.products.multiply(dw, dy, x2, trans_a=True)
        return self.product(dy, w).reshape(x.shape), dw

    def cross_entropy_forward(self, logits, targets, first=0):
        maxima, sums, picked = (self.floats(len(logits)) for _ in range(3))
        cross_entropy.cross_entropy_forward(
            maxima, sums, picked, logits, self.asarray(targets, np.int32), logits.shape[1], first
        )
        return maxima, sums, picked, None

    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        dlogits, dy = self.like(logits), self.asarray(dy, np.float32).reshape(1)
        targets = self.asarray(targets, np.int32)
        cross_entropy.cross_entropy_backward(
            dlogits, logits, targets, maxima, sums, scale, logits.shape[1], first, dy
        )  # fmt: skip
        return dlogits

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, dloss=None, out=None):
        targets, statistics, V = self.asarray(targets, np.int32), self.floats(3, len(x)), len(w)
        dx, dw = (None, None) if scale is None else (self.like(x), self.head_gradient(w, out))
        for number, chunk in enumerate(logit_chunks(x, w)):
            logits = self.padded_logits(x[chunk], w)
            if scale is None:
                cross_entropy.cross_entropy_forward(*statistics[:, chunk], logits, targets[chunk], V, first)
            else:  # compute the gradient too; it overwrites the logits
                own = targets[chunk], scale, V, first, dloss
                cross_entropy.cross_entropy_forward_backward(logits, *statistics[:, chunk], logits, *own)
                self.add_gradients(logits, x[chunk], w, dx[chunk], dw, number > 0)
                del logits  # frees the logits before the next chunk's are allocated
        return *statistics, None if scale is None else (dx, dw, dloss is not None)

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0, out=None):
        if aux is not None:
            dx, dw, contains_dloss = aux
            return (dx, dw) if contains_dloss else self.scaled(dx, dw, dy, out)
        targets, dy, V = self.asarray(targets, np.int32), self.asarray(dy, np.float32).reshape(1), len(w)
        dx, dw = self.like(x), self.head_gradient(w, out)
        for number, chunk in enumerate(logit_chunks(x, w)):  # computed again: forward did not keep the logits
            logits = self.padded_logits(x[chunk], w)
            own = targets[chunk], maxima[chunk], sums[chunk], scale, V, first, dy
            cross_entropy.cross_entropy_backward(logits, logits, *own)
            self.add_gradients(logits, x[chunk], w, dx[chunk], dw, number > 0)
            del logits
        return dx, dw

    def scaled(self, dx, dw, dy, out):
        """(dy dx, dy dw). Copies, except for dw in `out`: another backward through a retained graph needs dx and dw."""
        factor = self.asarray(dy, np.float32).reshape(1)
        dx, dw = dx.copy(), dw.copy() if out is None else dw
        for gradient in (dx, dw):
            scale_in_place(gradient, factor)
        return dx, dw

    def head_gradient(self, w, out):
        """The array for dw: `out`, or a new array followed by the padding rows of whole_rows()."""
        return self.floats(len(self.whole_rows(w)), w.shape[1])[: len(w)] if out is None else out

    def loss_rows(self, maxima, sums, picked, highest):
        rows = self.floats(2, len(sums))
        losses.rescale(rows, maxima, sums, picked, highest)
        return rows

    def loss(self, highest, sums, picked, scale):
        loss = self.xp.empty((), np.float64)
        losses.loss(loss, self.xp.empty(losses.partials_shape(len(sums)), np.float64), sums, picked, highest, scale)
        return loss

    def padded_logits(self, x, w):
        """x @ w' in the first columns of an array (N, multiple of ALIGNED)."""
        w = self.whole_rows(w)
        logits = self.xp.empty((len(x), -(-len(w) // ALIGNED) * ALIGNED), x.dtype)
        self.products.multiply(logits[:, : len(w)], x, w, trans_b=True)
        return logits

    def add_gradients(self, dlogits, x, w, dx, dw, accumulate):
        w, dw = self.whole_rows(w), self.whole_rows(dw)
        operand = self.products.operand(dlogits[:, : len(w)])
        self.products.multiply(dx, operand, w)
        operand = operand if len(dw) == len(w) else dlogits[:, : len(dw)]
        self.products.multiply(dw, operand, x, trans_a=True, accumulate=accumulate)

    def whole_rows(self, w):
        """w (V, C) extended to a multiple of ALIGNED rows by the memory after w; w itself if there is too little.

        With an odd V the product is not aligned: for V = 50257 it takes five times as long. The logits of the
        additional rows are padding: they do not count in the loss, and their gradient is 0. If w is a gradient,
        the additional rows are padding too, or gradients that backward writes later.
        """
        rows, base = -(-len(w) // ALIGNED) * ALIGNED, w.base
        if isinstance(w, np.ndarray) or base is None:
            return w
        if w.data.ptr + rows * w.strides[0] > base.data.ptr + base.nbytes:
            return w
        return self.xp.ndarray((rows, w.shape[1]), w.dtype, w.data)


def rows(x):
    """(..., C) as (N, C), a view."""
    return x.reshape(-1, x.shape[-1])


def logit_chunks(x, w):
    """Slices of rows of x (N, C) with at most LOGITS logits; lengths above 1024 are multiples of 1024."""
    step = max(1, LOGITS // w.shape[0])
    step -= step % 1024 if step > 1024 else 0
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]

"""lm_head fused with the cross-entropy: logits are computed in chunks, and only one chunk is in memory at a time."""

# N rows, C channels, V vocabulary (or one rank's part of it); w (V, C) is the weight matrix of lm_head

import numpy as np

from gpt2core.memory.gpu_sizes import CHUNK_LOGITS, LOGITS_ALIGNMENT
from gpt2core.recording import AutogradError
from stage2_cuda.kernels import cross_entropy, losses


class FusedHead:
    """The methods of CudaBackend for lm_head and the loss. The docstrings of the public ones are in Backend."""

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

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, gradient=None):
        targets, V, x = self.asarray(targets, np.int32), len(w), rows(x)
        chunks, w = self.logit_chunks(x, w), self.padded_operand(w)
        statistics = self.floats(3, len(x))  # maxima, sums, target_logits
        # they need the maximum and the sum of a whole row
        with_gradients = gradient is not None and V == gradient.vocabulary
        if with_gradients:
            dx, dw = self.like(x), self.floats(*w.shape)
        for number, (chunk, logits) in enumerate(chunks):
            self.products.multiply(logits, x[chunk], w, trans_b=True)
            if not with_gradients:
                cross_entropy.cross_entropy_forward(*statistics[:, chunk], logits, targets[chunk], V, first)
            else:  # backward may follow. The gradient of the logits overwrites the logits
                arguments = targets[chunk], gradient.scale, V, first, gradient.dloss
                cross_entropy.cross_entropy_forward_backward(logits, *statistics[:, chunk], logits, *arguments)
                self.head_gradients(logits, x[chunk], w, dx[chunk], dw, accumulate=number > 0)
        return *statistics, (dx, dw[:V], gradient.dloss) if with_gradients else None

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        if aux is not None:  # forward has computed the gradients for dloss
            dx, dw, dloss = aux
            if dy is not dloss:
                raise AutogradError("unembed_cross_entropy: call backward() with the dloss that forward was given")
            return dx.reshape(x.shape), dw
        targets, dy, V = self.asarray(targets, np.int32), self.asarray(dy, np.float32).reshape(1), len(w)
        shape, x = x.shape, rows(x)
        chunks, w = self.logit_chunks(x, w), self.padded_operand(w)
        dx, dw = self.like(x), self.floats(*w.shape)
        for number, (chunk, logits) in enumerate(chunks):
            self.products.multiply(logits, x[chunk], w, trans_b=True)  # again, because forward did not keep them
            arguments = targets[chunk], maxima[chunk], sums[chunk], scale, V, first, dy
            cross_entropy.cross_entropy_backward(logits, logits, *arguments)
            self.head_gradients(logits, x[chunk], w, dx[chunk], dw, accumulate=number > 0)
        return dx.reshape(shape), dw[:V]

    def loss_rows(self, maxima, sums, target_logits, row_maxima):
        rescaled = self.floats(2, len(sums))
        losses.rescale(rescaled, maxima, sums, target_logits, row_maxima)
        return rescaled

    def loss(self, row_maxima, sums, target_logits, scale):
        loss, partials = self.xp.empty((), np.float64), self.xp.empty(losses.partials_shape(len(sums)), np.float64)
        losses.loss(loss, partials, sums, target_logits, row_maxima, scale)
        return loss

    def head_gradients(self, dlogits, x, w, dx, dw, accumulate):
        """dx = dlogits w, dw = dlogits' x. accumulate: add to the old dw. w, dw: with the rows of padded_operand()."""
        operand = self.products.operand(dlogits)  # both products use it
        self.products.multiply(dx, operand, w)
        self.products.multiply(dw, operand, x, trans_a=True, accumulate=accumulate)

    def logit_chunks(self, x, w):
        """[(the slice of the rows of each chunk of x (N, C), an array for its logits)]; the arrays share their memory.

        A chunk has at most CHUNK_LOGITS logits. If it has more than 1024 rows, and is not the last one, it has a
        multiple of 1024 rows. Call this method before other arrays are allocated: smaller ones would divide the block
        of memory that held the logits of an earlier call, and that these logits need.
        """
        step = max(1, CHUNK_LOGITS // len(w))
        step -= step % 1024 if step > 1024 else 0
        chunks = [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]
        logits = self.xp.empty((min(step, len(x)), len(w) + -len(w) % LOGITS_ALIGNMENT), x.dtype)
        return [(chunk, logits[: chunk.stop - chunk.start]) for chunk in chunks]

    def padded_operand(self, w):
        """w (V, C) as an operand of products, with rows of zeros up to a multiple of LOGITS_ALIGNMENT rows.

        With an odd V the rows of the logits are not aligned, and a product takes five times as long for V = 50257. The
        logits of the additional rows are padding: they do not count in the loss, and their gradient is 0. The zeros are
        in a copy of w. If the products read the rows after w in memory where there are some, as in an arena, the bits
        would depend on the arena: a sum over more rows is divided differently, and in fp32 128 rows have one scale.
        """
        if padding := -len(w) % LOGITS_ALIGNMENT:
            w, whole = self.xp.empty((len(w) + padding, w.shape[1]), w.dtype), w
            w[:-padding] = whole
            w[-padding:] = 0
        return self.products.operand(w)


def rows(x):
    """x (..., C) as a contiguous matrix (N, C): a view, or a copy of an array that is not contiguous."""
    x = x if x.flags.c_contiguous else x.copy()
    return x.reshape(-1, x.shape[-1])

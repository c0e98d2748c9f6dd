"""The kernels whose size depends on the vocabulary: embedding, logits and cross-entropy."""

# B batch, T time, C channels, V vocabulary, N = B*T rows

import numpy as np

from gpt2core.data import even_slices
from gpt2core.plain_backend import PlainBackend
from gpt2core.tree_sum import tree_sum
from stage0_serial.rows import micro_batches, rows, slices

LOGITS = 1 << 23  # elements of the logits of a micro-batch; if it has more, they are computed in chunks of rows
KEPT_LOGITS = 4 * LOGITS  # of merged micro-batches that forward keeps for backward; more are computed again


class VocabularyKernels(PlainBackend):
    """The part of NumpyBackend that works with token ids."""

    # -- embedding ---------------------------------------------------------------------------------------------------

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        x, ids = self.empty((*ids.shape, wte.shape[1]), wte.dtype), ids.astype(np.intp) - first
        np.take(wte, ids, axis=0, out=x, mode="clip")  # mode="raise" would copy `out`; ops.embedding checks ids
        x[(ids < 0) | (ids >= len(wte))] = 0
        return x if wpe is None else np.add(x, wpe[position : position + ids.shape[-1]], out=x)

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        count, T, V = len(ids) if ids.ndim == 3 else 1, ids.shape[-1], len(wte)
        ids, dy = ids.reshape(-1, T), dy.reshape(-1, T, dy.shape[-1])  # the sequences of all micro-batches

        def sums_of_tokens(part):  # part: a slice of sequences
            local, dy2 = ids[part].reshape(-1).astype(np.intp) - first, rows(dy[part])
            order = np.argsort(local, kind="stable")
            order = order[slice(*np.searchsorted(local[order], (0, V)))]  # rows with a token in this part of wte
            starts = np.flatnonzero(np.diff(local[order], prepend=-1))  # where the rows of each token begin in `order`
            return local[order[starts]], np.add.reduceat(dy2[order], starts, axis=0)

        def write(part, dwte):
            tokens, sums = sums_of_tokens(part)
            dwte[...] = 0
            dwte[tokens] = sums

        def add(part, dwte):
            tokens, sums = sums_of_tokens(part)
            dwte[tokens] += sums

        def write_positions(part, dwpe):
            dwpe[...] = 0
            np.add.reduce(dy[part], axis=0, out=dwpe[position : position + T])

        dwte = self.weight_gradient(write, len(dy), wte.shape, wte.dtype, count, add)
        if wpe is None:
            return dwte, None
        return dwte, self.weight_gradient(write_positions, len(dy), wpe.shape, wpe.dtype, count)

    # -- unembedding and cross-entropy: dlogits = scale (softmax - onehot) ---------------------------------------------

    def unembed_forward(self, x, w):
        return self.matmul(rows(x), w.T).reshape(*x.shape[:-1], w.shape[0])

    def unembed_backward(self, dy, x, w):
        dy = self.runtime.rounded(rows(dy))
        return self.matmul(dy, w).reshape(x.shape), self.head_gradient(dy, rows(x), micro_batches(x))

    def head_gradient(self, dy, x, count):
        """dy' x (V, C) for dy (N, V) and x (N, C), as weight_gradient()."""

        def write(part, dw):
            self.matmul(dy[part].T, x[part], dw)

        def add(part, dw):
            self.add_product(dy[part].T, x[part], dw)

        return self.weight_gradient(write, len(dy), (dy.shape[1], x.shape[1]), x.dtype, count, add)

    def cross_entropy_forward(self, logits, targets, first=0):
        maxima, target_logits = np.maximum.reduce(logits, axis=1), np.zeros(len(logits), logits.dtype)
        own = own_targets(targets, first, logits.shape[1])
        target_logits[own[0]] = logits[own]
        exps = np.subtract(logits, maxima[:, None], out=self.like(logits))
        np.exp(exps, out=exps)
        return maxima, exps.sum(axis=1), target_logits, (exps, maxima)

    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        exps, subtracted = aux  # exp(logits - maxima) = exps * exp(subtracted - maxima)
        factor = logits.dtype.type(float(dy) * scale)
        weights = np.exp(subtracted - maxima) * (factor / sums)
        dlogits = np.multiply(exps, weights[:, None], out=self.like(logits))
        dlogits[own_targets(targets, first, logits.shape[1])] -= factor
        return dlogits

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, gradient=None):
        count, shape, x = micro_batches(x), (len(x), -1) if x.ndim == 4 else (-1,), rows(x)
        statistics, chunks = np.empty((3, len(x)), x.dtype), [slice(0, len(x))]
        if len(x) * len(w) > min(KEPT_LOGITS, count * LOGITS):
            chunks = [each for part in even_slices(len(x), count) for each in logit_chunks(part, w)]
        for chunk in chunks:
            logits = self.unembed_forward(x[chunk], w)
            *statistics[:, chunk], aux = self.cross_entropy_forward(logits, targets[chunk], first)
        return *statistics.reshape(3, *shape), aux if len(chunks) == 1 else None

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        count, shape = micro_batches(x), x.shape
        x, maxima, sums = rows(x), maxima.reshape(-1), sums.reshape(-1)
        if aux is not None:
            dlogits = self.runtime.rounded(
                self.cross_entropy_backward(dy, aux[0], targets, scale, maxima, sums, aux, first)
            )
            return self.matmul(dlogits, w).reshape(shape), self.head_gradient(dlogits, x, count)
        dx, kept = self.like(x), {}
        left = {part.start: part for part in even_slices(len(x), count)}  # micro-batches that are not computed yet

        def write(part, dw):
            """Write dw of a micro-batch, and its rows of dx: both come from the same chunks of logits."""
            if kept:
                return np.copyto(dw, kept[part.start])
            left.pop(part.start, None)
            dw[...] = 0
            for chunk in logit_chunks(part, w):  # forward kept no logits: compute each chunk again
                exps = self.unembed_forward(x[chunk], w)
                np.exp(np.subtract(exps, maxima[chunk, None], out=exps), out=exps)
                rows_of_chunk = targets[chunk], scale, maxima[chunk], sums[chunk], (exps, maxima[chunk]), first
                dlogits = self.runtime.rounded(self.cross_entropy_backward(dy, exps, *rows_of_chunk))
                self.matmul(dlogits, w, dx[chunk])
                self.add_product(dlogits.T, x[chunk], dw)

        def dx_of_chunks(out):
            nonlocal x, w
            if left:  # dw is computed later: keep it for each micro-batch, instead of w and x
                arrays = {start: self.empty(w.shape, w.dtype) for start in left}
                for start, part in list(left.items()):
                    write(part, arrays[start])
                kept.update(arrays)
                x = w = None
            return dx.reshape(shape)

        return dx_of_chunks, self.weight_gradient(write, len(x), w.shape, w.dtype, count)

    def loss(self, row_maxima, sums, target_logits, scale):
        losses = np.log(sums) - (target_logits - row_maxima)
        parts = losses if losses.ndim == 2 else [losses]  # one row for each micro-batch
        return np.asarray(tree_sum([part.sum(dtype=np.float64) * scale for part in parts]))


def own_targets(targets, first, count):
    """The index (rows, local columns) of the targets (N) that lie in [first, first + count)."""
    columns = targets.astype(np.intp) - first
    own = np.flatnonzero((columns >= 0) & (columns < count))
    return own, columns[own]


def logit_chunks(part, w):
    """Slices that cover a slice of rows; the logits (rows, V) of each have at most LOGITS elements."""
    return slices(part.start, part.stop, max(1, LOGITS // w.shape[0]))

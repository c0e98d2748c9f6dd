"""The kernels whose size depends on the vocabulary: embedding, logits and cross-entropy."""

# B batch, T time, C channels, V vocabulary, N = B*T rows

import numpy as np

from gpt2core.backend import Backend
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.tree_sum import tree_sum
from stage0_serial.rows import rows, slices

LOGITS = 1 << 23  # elements of an array of logits; more logits are computed in chunks of rows


class VocabularyKernels(Backend):
    """The part of NumpyBackend that works with token ids."""

    # -- embedding ---------------------------------------------------------------------------------------------------

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        x, ids = self.empty((*ids.shape, wte.shape[1]), wte.dtype), ids.astype(np.intp) - first
        np.take(wte, ids, axis=0, out=x, mode="clip")  # mode="raise" would copy `out`; ops.embedding checks ids
        x[(ids < 0) | (ids >= len(wte))] = 0
        return x if wpe is None else np.add(x, wpe[position : position + ids.shape[1]], out=x)

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0, out=(None, None), accumulate=False):
        def sum_of_tokens(part, dwte):  # part: a slice of sequences
            local, dy2 = ids[part].reshape(-1).astype(np.intp) - first, rows(dy[part])
            order = np.argsort(local, kind="stable")
            order = order[slice(*np.searchsorted(local[order], (0, len(wte))))]  # rows with a token in this part of wte
            starts = np.flatnonzero(np.diff(local[order], prepend=-1))  # where the rows of each token begin in `order`
            sums = np.add.reduceat(dy2[order], starts, axis=0)
            if accumulate:
                dwte[local[order[starts]]] += sums
            else:
                dwte[...] = 0
                dwte[local[order[starts]]] = sums

        def sum_of_positions(part, dwpe):
            dwpe[...] = 0
            np.add.reduce(dy[part], axis=0, out=dwpe[position : position + dy.shape[1]])

        dwte = self.sum_over_rows(sum_of_tokens, len(dy), wte, out[0])
        return dwte, self.sum_over_rows(sum_of_positions, len(dy), wpe, out[1])

    # -- unembedding and cross-entropy: dlogits = scale (softmax - onehot) ---------------------------------------------

    def unembed_forward(self, x, w):
        return self.matmul(rows(x), w.T).reshape(*x.shape[:-1], w.shape[0])

    def unembed_backward(self, dy, x, w, out=None):
        dy, x2 = self.runtime.rounded(rows(dy)), rows(x)
        dw = self.sum_for_head(lambda part, total: self.matmul(dy[part].T, x2[part], total), len(dy), w, out)
        return self.matmul(dy, w).reshape(x.shape), dw

    def sum_for_head(self, sum_of, n, w, out):
        """sum_over_rows() for the matrix of the logits; if `out` is (micro-batches, V, C), the sums are not added.

        Then w is also the token embedding: embedding_backward adds its sum of each micro-batch, and returns the total.
        """
        if out is None or out.ndim == w.ndim:
            return self.sum_over_rows(sum_of, n, w, out)
        for part, total in zip(even_slices(n, len(out)), out, strict=True):
            sum_of(part, total)
        return out[0]

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

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None, dloss=None, out=None):
        statistics, chunks = np.empty((3, len(x)), x.dtype), [slice(0, len(x))]
        if len(x) * len(w) > LOGITS:
            chunks = [each for part in even_slices(len(x), self.micro_batches) for each in logit_chunks(part, w)]
        for chunk in chunks:
            logits = self.unembed_forward(x[chunk], w)
            *statistics[:, chunk], aux = self.cross_entropy_forward(logits, targets[chunk], first)
        return *statistics, aux if len(chunks) == 1 else None

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0, out=None):
        if aux is not None:
            dlogits = self.cross_entropy_backward(dy, aux[0], targets, scale, maxima, sums, aux, first)
            return self.unembed_backward(dlogits, x, w, out)
        dx = self.like(x)

        def sum_of(part, dw):  # also writes the rows of dx
            dw[...] = 0
            for chunk in logit_chunks(part, w):  # forward kept no logits: compute each chunk again
                exps = self.unembed_forward(x[chunk], w)
                np.exp(np.subtract(exps, maxima[chunk, None], out=exps), out=exps)
                rows_of_chunk = targets[chunk], scale, maxima[chunk], sums[chunk], (exps, maxima[chunk]), first
                dlogits = self.runtime.rounded(self.cross_entropy_backward(dy, exps, *rows_of_chunk))
                self.matmul(dlogits, w, dx[chunk])
                np.add(dw, self.matmul(dlogits.T, x[chunk]), out=dw)

        return dx, self.sum_for_head(sum_of, len(x), w, out)

    def loss(self, row_maxima, sums, target_logits, scale):
        losses = np.log(sums) - (target_logits - row_maxima)
        parts = even_slices(len(losses), self.micro_batches)
        return np.asarray(tree_sum([losses[part].sum(dtype=np.float64) * scale for part in parts]))


def own_targets(targets, first, count):
    """The index (rows, local columns) of the targets (N) that lie in [first, first + count)."""
    columns = targets.astype(np.intp) - first
    own = np.flatnonzero((columns >= 0) & (columns < count))
    return own, columns[own]


def logit_chunks(part, w):
    """Slices that cover a slice of rows; the logits (rows, V) of each have at most LOGITS elements."""
    return slices(part.start, part.stop, max(1, LOGITS // w.shape[0]))

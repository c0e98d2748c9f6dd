"""Attention and rotary positions on one GPU: the T x T matrices of scores are never in memory."""

# B batch, T time (t: of new tokens), C channels, D = C / heads; qkv (B, T, 3C) has the rows of the packed projection

from stage2_cuda.attention import launches as flash
from stage2_cuda.attention import tuned_tiles
from stage2_cuda.decoding.cached_attention import attention_cached
from stage2_cuda.kernels import rotary


class FusedAttention:
    """The methods of CudaBackend for attention. The docstrings of the public ones are in Backend."""

    def attention_forward(self, qkv, n_head):
        B, T, C3 = qkv.shape
        y, lse = self.xp.empty((B, T, C3 // 3), qkv.dtype), self.floats(B, n_head, T)

        def run(tiles):
            flash.attention_forward(y, lse, qkv, n_head, self.dot_precision, tiles)

        run(tuned_tiles.tuned_forward(self.runtime.tuner, run, y, lse, qkv, n_head, self.dot_precision))
        return y, lse

    def attention_backward(self, dy, qkv, y, aux, n_head):
        return self.attention_gradient(dy, qkv, y, aux, n_head)

    def attention_gradient(self, dy, qkv, y, lse, n_head, rotation=None):
        """dqkv (B, T, 3C). rotation: that of rows of qkv that were rotated; dqkv is that of the rows before."""
        dqkv, delta, dy = self.like(qkv), self.like(lse), self.xp.ascontiguousarray(dy)

        def run(tiles, dy):
            flash.attention_backward(dqkv, delta, dy, qkv, y, lse, n_head, self.dot_precision, tiles, rotation)

        def run_candidate(tiles):  # with y in place of dy: y has the same shape, and is finite for any loss scale
            run(tiles, y)

        options = qkv, n_head, self.dot_precision, rotation is not None
        run(tuned_tiles.tuned_backward(self.runtime.tuner, run_candidate, dqkv, delta, *options), dy)
        return dqkv

    def attention_cached(self, qkv, keys, values, position, n_head):
        B, t, C3 = qkv.shape
        y = self.xp.empty((B, t, C3 // 3), qkv.dtype)
        attention_cached(y, qkv, keys, values, position, n_head)
        return y

    def rotary_forward(self, qkv, n_head, position=0):
        y, rotation = self.like(qkv), self.rotation(qkv, n_head, position)
        rotary.rotate(y, qkv, rotation, n_head, 1)
        return y

    def rotary_backward(self, dy, n_head, position=0):  # for the parity check: rotary_attention_backward needs no pass
        dqkv, dy, rotation = self.like(dy), self.xp.ascontiguousarray(dy), self.rotation(dy, n_head, position)
        rotary.rotate(dqkv, dy, rotation, n_head, -1)
        return dqkv

    def rotation(self, qkv, n_head, position):
        """The cosines and sines (T, 2, D / 2) of the positions of the rows of qkv (B, T, 3C), from `position` on."""
        rotation = self.floats(qkv.shape[1], 2, qkv.shape[2] // (6 * n_head))
        rotary.compute_rotation(rotation, position)
        return rotation

    def rotary_attention_forward(self, qkv, n_head, position):
        rotation = self.rotation(qkv, n_head, position)
        rotary.rotate(qkv, qkv, rotation, n_head, 1)
        y, lse = self.attention_forward(qkv, n_head)
        return y, (qkv, lse, rotation)

    def rotary_attention_backward(self, dy, y, aux, n_head, position):
        qkv, lse, rotation = aux
        return self.attention_gradient(dy, qkv, y, lse, n_head, rotation)

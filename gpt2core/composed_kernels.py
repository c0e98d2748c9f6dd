"""The kernels that the model calls, composed of smaller kernels: forward calls them in order, backward in reverse."""

# C channels, V vocabulary, N rows

from gpt2core.backend import Backend


class ComposedKernels(Backend):
    """Attention of rotated q and k, MLP, residual stream with LayerNorm, logits with loss.

    A subclass has their parts, and may replace the whole.
    """

    # -- attention with rotary positions -------------------------------------------------------------------------------

    def rotary_attention_forward(self, qkv, n_head, position):
        qkv = self.rotary_forward(qkv, n_head, position)
        y, aux = self.attention_forward(qkv, n_head)
        return y, (qkv, aux)

    def rotary_attention_backward(self, dy, y, aux, n_head, position):
        return self.rotary_backward(self.attention_backward(dy, aux[0], y, aux[1], n_head), n_head, position)

    # -- mlp: y = gelu(x w + b) w2, three operations; backward goes through them in the reverse order -----------------

    def linear_gelu_forward(self, x, w, b):
        h = self.linear_forward(x, w, b)
        return self.gelu_forward(h), h

    def linear_gelu_backward(self, dy, x, w, b, aux):
        return self.linear_backward(self.gelu_backward(dy, aux), x, w)

    def mlp_forward(self, x, w, b, w2):
        h, aux = self.linear_gelu_forward(x, w, b)
        return self.linear_forward(h, w2), (h, aux)

    def mlp_backward(self, dy, x, w, b, w2, aux):
        h, aux = aux
        dh, dw2, _ = self.linear_backward(dy, h, w2, bias=False)
        return *self.linear_gelu_backward(dh, x, w, b, aux), dw2

    # -- the residual stream and its layernorm: s = x + (a + bias), y = LN(s); s has two uses, so their gradients are
    #    added:  dx = da = ds + LN's dx,  dbias = sum of dx over the rows

    def residual_add_forward(self, x, a, a_bias):
        return x + (a + a_bias)

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        s = self.residual_add_forward(x, a, a_bias)
        return s, *self.layernorm_forward(s, w, b, eps)

    def residual_layernorm_backward(self, ds, dy, w, aux):
        dx, dw, db = self.layernorm_backward(dy, w, aux)
        dx = dx if ds is None else dx + ds
        return dx, self.bias_backward(dx), dw, db

    # -- the logits x w' and their cross-entropy -----------------------------------------------------------------------

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, gradient=None):
        logits = self.unembed_forward(x, w).reshape(-1, len(w))  # (N, V)
        *statistics, aux = self.cross_entropy_forward(logits, targets, first)
        return *statistics, (logits, aux)

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        logits, aux = aux
        dlogits = self.cross_entropy_backward(dy, logits, targets, scale, maxima, sums, aux, first)
        return self.unembed_backward(dlogits.reshape(*x.shape[:-1], -1), x, w)

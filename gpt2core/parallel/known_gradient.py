"""The loss of the model if the gradient with which backward() will begin is known before: fp16 scales the loss with it.

A backend may then compute the gradients in forward, while it has the logits, and multiply no gradient afterwards.
"""

from gpt2core import checks, ops
from gpt2core.tensor import AutogradError, Tensor


def unembed_cross_entropy(x, w, targets, scale, group, dloss=None):
    """ops.unembed_cross_entropy, whose backward() will be called with the array `dloss` of shape ().

    backward() raises AutogradError for any other array. dloss None: it is not known.
    """
    V = w.shape[0] * group.size
    scale = checks.unembed_cross_entropy(x, w, targets, scale, V)
    backend, first, targets = x.backend, group.rank * w.shape[0], targets.reshape(-1)
    *statistics, aux = backend.unembed_cross_entropy_forward(x.data, w.data, targets, first, scale, V, dloss)
    loss, maxima, sums = ops.loss_of_rows(*statistics, scale, group, backend)

    def backward(dy):
        if dloss is not None and dy is not dloss:
            raise AutogradError("unembed_cross_entropy: call backward() with the dloss array that forward was given")
        return backend.unembed_cross_entropy_backward(dy, x.data, w.data, targets, scale, maxima, sums, aux, first)

    return Tensor.from_op(loss, (x, w), backward)

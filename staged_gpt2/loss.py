"""The loss that GPT2.loss() returns."""

from gpt2core.tensor import Tensor


class Loss(Tensor):
    """A loss whose backward() returns when a device has begun to compute all gradients, in order."""

    def __init__(self, loss: Tensor):
        super().__init__(loss.data, loss.backend, loss.requires_grad)
        self.node, self.index = loss.node, loss.index

    def backward(self, *arguments, **options) -> None:
        super().backward(*arguments, **options)
        self.backend.runtime.join()

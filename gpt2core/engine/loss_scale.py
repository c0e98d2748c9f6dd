"""The loss scale of fp16 training, which is doubled and halved as by PyTorch's GradScaler."""

import math

import numpy as np

from gpt2core.errors import ConfigError


class LossScale:
    """The factor of the loss that brings small gradients into the range of fp16 (Micikevicius et al. 2018).

    The factor is doubled after `interval` finite gradients in a row. It is halved after a gradient that is not finite;
    then the device skips the update, and the step is repeated. The default values are those of PyTorch.

    state: (2) float32 on the device, updated by Backend.clip: the factor, and the number of finite gradients since the
    factor changed. In all precisions except fp16 no loss is scaled: state is None, and `factor` is 1.
    """

    SMALLEST = 1.0  # at factor 1 an overflow is not caused by scaling, so training ends if the factor falls below 1

    def __init__(self, backend, factor=2.0**16, interval=2000):
        self.backend, self.interval = backend, interval
        self.skipped = 0  # updates skipped since the start of training
        self.state = backend.asarray(np.array([factor, 0], np.float32)) if backend.scales_loss else None
        # the gradient with which backward() of the loss begins, an array of shape (): a view of `state`, which
        # Backend.clip changes
        self.factor = backend.ones((), np.float64) if self.state is None else self.state[0:1].reshape(())

    @property
    def value(self):
        """The factor as a Python float, or None if no loss is scaled."""
        return None if self.state is None else self.backend.to_host(self.state)[0].item()

    def skips(self, loss, norm):
        """Whether the step was skipped: loss is finite, but norm is not (Python floats). Counts the skipped steps."""
        skipped = self.state is not None and math.isfinite(loss) and not math.isfinite(norm)
        self.skipped += skipped
        return skipped

    def to_json(self):
        """The state for a checkpoint; None if no loss is scaled."""
        if self.state is None:
            return None
        factor, finite = self.backend.to_host(self.state).tolist()
        return {"factor": factor, "finite": int(finite), "skipped": self.skipped}

    def load(self, saved):
        """Restore the result of to_json(); do nothing if no loss is scaled. Raises ConfigError for invalid values."""
        if saved is None or self.state is None:
            return
        kinds = {"factor": (int, float), "finite": int, "skipped": int}
        if not isinstance(saved, dict) or any(
            not isinstance(saved.get(name), kind) or saved[name] < 0 for name, kind in kinds.items()
        ):
            raise ConfigError(f"loss_scale is {saved!r}, but it must hold numbers factor, finite and skipped")
        if not self.SMALLEST <= saved["factor"] < math.inf:
            raise ConfigError(f"loss_scale has the factor {saved['factor']}, but it must be finite and at least 1")
        self.state[...] = self.backend.asarray(np.array([saved["factor"], saved["finite"]], np.float32))
        self.skipped = saved["skipped"]

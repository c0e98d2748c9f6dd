"""The loss scale of fp16 training, which doubles and halves as PyTorch's GradScaler does."""

import math

import numpy as np

from gpt2core.errors import ConfigError


class LossScale:
    """The factor that lifts small gradients into the range of fp16 (Micikevicius et al. 2018); 1 in other precisions.

    It doubles after `interval` finite gradients in a row. It halves after a gradient that is not finite; the
    device skips that update, and the step is repeated. Growth, backoff and defaults are PyTorch's (GradScaler). `state`
    holds the factor and the number of finite gradients since its last change, on the device, where Backend.clip
    updates both; None: no loss is scaled.
    """

    SMALLEST = 1.0  # training ends if an overflow halves the factor below this: at 1 no gradient was scaled

    def __init__(self, backend, factor=2.0**16, interval=2000):
        self.backend, self.interval = backend, interval
        self.skipped = 0  # updates skipped since the start of training
        self.state = backend.asarray(np.array([factor, 0], np.float32)) if backend.scales_loss else None
        # the gradient with which backward() of the loss begins: an array of shape () on the device
        self.factor = backend.ones((), np.float64) if self.state is None else self.state[0:1].reshape(())

    @property
    def value(self):
        """The factor as a Python float, or None if no loss is scaled."""
        return None if self.state is None else self.backend.to_host(self.state)[0].item()

    def skips(self, loss, norm):
        """Whether the loss is finite but the gradient norm is not (Python floats); if so, count a skipped update."""
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
        """Restore what to_json() returned; without a loss scale do nothing. Raises ConfigError for invalid values."""
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

"""The loss scale of fp16 training, which doubles and halves as PyTorch's GradScaler does."""

import math

import numpy as np

from gpt2core.errors import ConfigError


class LossScale:
    """The factor that lifts small gradients into the range of fp16 (Micikevicius et al. 2018); None elsewhere.

    It doubles after `interval` finite gradients in a row and halves at one that is not finite, whose step the device
    skips: PyTorch's GradScaler, with its numbers. The state, (factor, finite gradients since it changed), stays on the
    device, so that a recorded step renews it too; Backend.clip does.
    """

    SMALLEST = 1.0  # below, what overflows is not the factor's fault

    def __init__(self, backend, factor=2.0**16, interval=2000):
        self.backend, self.interval = backend, interval
        self.skipped = 0  # steps that overflowed, since the start of training
        self.state = backend.asarray(np.array([factor, 0], np.float32)) if backend.scales_loss else None

    @property
    def factor(self):
        """An array of shape () on the device, or None for 1."""
        return None if self.state is None else self.state[0:1].reshape(())

    @property
    def value(self):
        """The factor as a Python float, or None."""
        return None if self.state is None else self.backend.number(self.factor)

    def skips(self, loss, norm):
        """Whether a step of this loss and this norm, Python floats, overflowed in backward alone; if so, counts it."""
        skipped = self.state is not None and math.isfinite(loss) and not math.isfinite(norm)
        self.skipped += skipped
        return skipped

    def to_json(self):
        """What a checkpoint keeps; None where nothing is scaled."""
        if self.state is None:
            return None
        factor, finite = self.backend.to_host(self.state).tolist()
        return {"factor": factor, "finite": int(finite), "skipped": self.skipped}

    def load(self, saved):
        """Go on from to_json()'s, where there is one and it is wanted; raises ConfigError for what it cannot be."""
        if saved is None or self.state is None:
            return
        kinds = {"factor": (int, float), "finite": int, "skipped": int}
        if not isinstance(saved, dict) or any(
            not isinstance(saved.get(name), kind) or saved[name] < 0 for name, kind in kinds.items()
        ):
            raise ConfigError(f"loss_scale is {saved!r}, not a factor, and numbers of finite and skipped steps")
        if not self.SMALLEST <= saved["factor"] < math.inf:
            raise ConfigError(f"loss_scale has the factor {saved['factor']}, which is not a finite one of at least 1")
        self.state[...] = self.backend.asarray(np.array([saved["factor"], saved["finite"]], np.float32))
        self.skipped = saved["skipped"]

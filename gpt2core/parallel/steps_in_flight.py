"""PendingStep: a launched training step. Its result() reads the loss, or raises Diverged.

If the device replays a captured step (a CUDA graph), the host launches step n + 1 before it reads the loss of step n.
Then the device does not wait for the host between two steps:

    device   | step n      | step n + 1               | step n + 2
    host     | begin n + 1 | result of n, begin n + 2 | ...
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.errors import Diverged, counted
from gpt2core.parallel.tree_sum import tree_sum


@dataclass(frozen=True)
class Step:
    """The report of one training step; its fields are those of one line of the log."""

    step: int
    loss: float  # mean cross-entropy of the global batch before the update, in nats per token
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    loss_scale: float | None = None  # fp16: the factor of the loss after the step
    skipped: int | None = None  # fp16: how many times the gradient of this step overflowed and was computed again
    mfu: float | None = None  # model FLOPs / peak FLOPs of the device; None if the peak is not known
    bytes_sent: int | None = None  # by this rank, in all groups; None if it sends nothing


class PendingStep:
    """A launched training step; result() waits for it. number: the number of the update, from 1. lr: learning rate."""

    def __init__(self, trainer, batch, lr, number):
        self.trainer, self.batch, self.lr, self.number = trainer, batch, lr, number
        self.began, self.sent, self.repeats = time.perf_counter(), 0, 0
        self.results = self.launch()

    def launch(self):
        """Launch the step on the device, and return its runtime.Results."""
        trainer = self.trainer
        results = trainer.compiled(self.batch, trainer.optimizer.hyperparameters(self.number, self.lr))
        if trainer.tuned is None:  # the first step has timed kernels: all ranks use rank 0's choices
            trainer.tuned = trainer.world.broadcast_object(trainer.backend.runtime.tuned)
            trainer.load_tuned(trainer.tuned, final=True)
        return results

    def read(self, signal):
        """Wait for the step; return (loss, gradient norm), which are equal on all ranks. Sets trainer.stopped_by."""
        trainer = self.trainer
        *losses, norm = (array.item() for array in self.results.wait())
        sent_before = trainer.bytes_sent()
        loss, trainer.stopped_by = total_loss(trainer, losses, signal)
        self.sent += trainer.bytes_sent() - sent_before + trainer.sent_by_update
        return loss, norm

    def result(self, signal=0):
        """Return the Step. signal: the number of a signal that this rank has received, or 0; see Trainer.stopped_by.

        If a gradient overflows in fp16, the step is repeated with the same batch and half the loss scale, so no batch
        is lost. Raises Diverged if the loss or the norm is not finite; in fp16, for the norm only if the loss scale is
        below its minimum. Then neither this step nor a later step in flight has changed a parameter.
        """
        trainer = self.trainer
        if trainer.in_flight[0] is not self:
            raise ValueError("read the result() of the earlier step first")
        loss, norm = self.read(signal)
        while trainer.loss_scale.skips(loss, norm):
            self.repeats += 1
            self.check_scale()
            self.results = self.launch()
            loss, norm = self.read(signal)
        trainer.in_flight.pop(0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.stop_all()
            advice = "" if trainer.optimizer.eps else ", or raise --eps (now 0)"
            raise Diverged(
                f"step {trainer.steps}: the loss is {loss} and the gradient norm is {norm}: training cannot continue. "
                f"Lower --lr (now {self.lr:g}) or set --clip{advice}; "
                f"the parameters are those after {counted(trainer.steps, 'step')}"
            )
        trainer.steps += 1
        trainer.position += trainer.batch_size
        start, trainer.finished = max(self.began, trainer.finished), time.perf_counter()
        seconds = trainer.finished - start
        scale = trainer.loss_scale.value
        return Step(
            trainer.steps - 1, loss, self.lr, norm, trainer.batch_size * trainer.seq_len / seconds, seconds, scale,
            None if scale is None else self.repeats, None, self.sent or None,
        )  # fmt: skip

    def check_scale(self):
        """Raise Diverged if the loss scale is below its minimum."""
        factor, steps = self.trainer.loss_scale.value, self.trainer.steps
        if factor < self.trainer.loss_scale.SMALLEST:
            self.trainer.in_flight.clear()
            raise Diverged(
                f"step {steps}: the loss scale has been reduced to {factor:g}, and the gradient still overflows: "
                f"use --precision bf16, or lower --lr (now {self.lr:g}); "
                f"the parameters are those after {counted(steps, 'step')}"
            )

    def stop_all(self):
        """Wait for the steps in flight, which change no parameter because optimizer.stop is NaN; then set stop to 0."""
        for pending in self.trainer.in_flight:
            pending.results.wait()
        self.trainer.in_flight.clear()
        self.trainer.optimizer.stop[...] = 0


def total_loss(trainer, losses, signal=0):
    """Return (the sum of all ranks' losses in the canonical order, the largest signal number), as Python numbers.

    The ranks of a tensor-parallel group have equal losses, so only the losses of its first rank are added.
    """
    own = np.array([signal, *losses], np.float64)
    gathered = trainer.world.all_gather(own).reshape(-1, trainer.mesh.tensor.size, len(own))  # (data, tensor, 1 + n)
    return tree_sum([float(loss) for loss in gathered[:, 0, 1:].ravel()]), int(gathered[:, :, 0].max())

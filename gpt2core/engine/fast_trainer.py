"""A ParallelTrainer whose steps are captured, launched ahead and, in fp16, scaled; its bits are those of Trainer."""

import math
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.architecture import flops_per_token
from gpt2core.engine.loss_scale import LossScale
from gpt2core.engine.steps_in_flight import PendingStep
from gpt2core.errors import Diverged, counted
from gpt2core.kernel_arguments import Guard
from gpt2core.parallel.parallel_trainer import ParallelTrainer, list_of_backends
from gpt2core.trainer import Step


@dataclass(frozen=True)
class FastStep(Step):
    """The Step of a FastTrainer; its fields are those of one line of the log."""

    loss_scale: float | None = None  # fp16: the factor of the loss after the step
    skipped: int | None = None  # fp16: how many times the gradient of this step overflowed and was computed again
    mfu: float | None = None  # model FLOPs / peak FLOPs of the device; None if the peak is not known
    bytes_sent: int | None = None  # by this rank, in all groups; None if it sends nothing


class FastTrainer(ParallelTrainer):
    """The Trainer of the command line. Its steps return a FastStep.

    capture: whether the device may capture a step and replay it. loss_scale: a dict of keyword arguments of LossScale.
    Kernels are timed during the first step, and all ranks use rank 0's choices.
    """

    def __init__(self, config, backends, *, capture=True, loss_scale=None, **options):
        backend = list_of_backends(backends)[0]
        self.loss_scale = LossScale(backend, **(loss_scale or {}))
        self.stop = backend.zeros((1,), np.float32)  # NaN after a norm that is not finite: no more updates
        guard = Guard(stop=self.stop)
        if self.loss_scale.state is not None:  # fp16 repeats a step whose norm is not finite
            guard = Guard(loss_scale=self.loss_scale.state, interval=self.loss_scale.interval)
        super().__init__(config, backends, dloss=self.loss_scale.factor, guard=guard, **options)
        self.in_flight, self.finished = [], 0.0  # PendingSteps, oldest first; time when the last result was read
        self.backend.runtime.release_cached_memory()  # of initial parameters, before small arrays occupy a part of it
        self.compiled = self.compile_update(capture)
        self.sent_by_update = 0  # bytes that this rank sends in an update
        self.tuned = None  # rank 0's choices by timing (of tiles, for example); set after the first step
        self.load_tuned(self.world.broadcast_object(self.backend.runtime.tuned))  # rank 0's choices of an earlier run

    def check_idle(self):
        if self.in_flight:
            raise ValueError(f"{counted(len(self.in_flight), 'step')} in flight: read the result() of each step first")

    def step(self, batch, lr):
        return self.begin(batch, lr).result()

    def begin(self, batch, lr):
        """Start the update from the result of prepare(), and return its PendingStep (steps_in_flight.py).

        Its result() counts the step. If `overlaps`, one more step may begin before this result is read. Results are
        read in the order in which the steps began. Raises ValueError for a step that begins too early.
        """
        self.check_interrupted()
        if len(self.in_flight) > self.overlaps:  # the results of a captured step are valid until the call after next
            raise ValueError(
                f"{counted(len(self.in_flight), 'step')} in flight, and this device can overlap "
                f"{'two steps' if self.overlaps else 'none'}: read the result() of the previous step first"
            )
        step = PendingStep(self, batch, lr, self.steps + len(self.in_flight) + 1)
        self.launch(step)
        self.in_flight.append(step)
        return step

    def launch(self, step):
        """Launch a PendingStep on the device."""
        step.results = self.compiled(step.batch, self.optimizer.coefficients(step.number, step.lr))
        if self.tuned is None:  # the first step has timed kernels: all ranks use rank 0's choices
            self.tuned = self.world.broadcast_object(self.backend.runtime.tuned)
            self.load_tuned(self.tuned, final=True)

    def finish_step(self, step, request=0):
        """Wait for the oldest PendingStep, count it and return its Step. request: see PendingStep.result().

        If a gradient overflows in fp16, the step is repeated with the same batch and half the loss scale, so no batch
        is lost. Raises Diverged if the loss or the norm is not finite; in fp16, for the norm only if the loss scale is
        below its minimum. If the norm is not finite, neither this step nor a later step in flight has changed a
        parameter.
        """
        if not self.in_flight or self.in_flight[0] is not step:
            raise ValueError("read the result() of each step once, and that of the earlier step first")
        loss, norm = self.read(step, request)
        while self.loss_scale.skips(loss, norm):
            step.repeats += 1
            self.check_scale(step.lr)
            self.launch(step)
            loss, norm = self.read(step, request)
        self.in_flight.pop(0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.stop_all()
        start, self.finished = max(step.began, self.finished), time.perf_counter()
        counted_step, scale = self.count_step(loss, norm, step.lr, self.finished - start), self.loss_scale.value
        skipped = None if scale is None else step.repeats
        return FastStep(
            **vars(counted_step), loss_scale=scale, skipped=skipped, bytes_sent=step.sent or None,
            mfu=self.utilisation(counted_step.tokens_per_second),
        )  # fmt: skip

    def utilisation(self, tokens_per_second):
        """The model-FLOPs utilisation: the model's FLOPs/s / peak FLOPs/s of all devices; None if that is not known."""
        peak = self.backend.runtime.peak_flops(self.backend.precision)
        if not peak:
            return None
        return tokens_per_second * flops_per_token(self.config, self.seq_len) / (peak * self.world.size)

    def read(self, step, request):
        """Wait for a PendingStep; return (loss, gradient norm). Both are equal on all ranks, and so is step.request."""
        *losses, norm = (array.item() for array in step.results.wait())
        sent_before = self.bytes_sent()
        loss, step.request = self.mesh.total_loss(losses, request)
        step.sent += self.bytes_sent() - sent_before + self.sent_by_update
        return loss, norm

    def check_scale(self, lr):
        """Raise Diverged if the loss scale is below its minimum."""
        factor = self.loss_scale.value
        if factor < self.loss_scale.SMALLEST:
            self.in_flight.clear()
            raise Diverged(
                f"step {self.steps}: the loss scale has been reduced to {factor:g}, and the gradient still overflows: "
                f"use `precision=bf16`, or lower `lr` (now {lr:g}); "
                f"the parameters are those after {counted(self.steps, 'step')}"
            )

    def stop_all(self):
        """Wait for the steps in flight, which change no parameter if self.stop is NaN; then set stop to 0."""
        for pending in self.in_flight:
            pending.results.wait()
        self.in_flight.clear()
        self.stop[...] = 0

    def compile_update(self, capture):
        """Runtime.compile_step(compute_update)."""
        # the rows of a sparse embedding differ in number between steps, and the host reads them
        capture = capture and self.world.capturable and not self.parallel.sparse_embedding
        return self.backend.runtime.compile_step(self.compute_update, capture, collectives=self.world.size > 1)

    @property
    def overlaps(self):
        """Whether a step may begin before the previous result is read: not in fp16, where a step may be repeated."""
        return self.compiled.can_overlap and self.loss_scale.state is None

    def compute_update(self, batch, coefficients):
        """Trainer.update -> [*this rank's losses, norm]; counts the bytes that it sends."""
        sent_before = self.bytes_sent()
        losses, norm = self.update(batch, coefficients)
        self.optimizer.end_update()  # result() counts the step
        self.sent_by_update = self.bytes_sent() - sent_before  # a replay sends the same, but Python counts no bytes
        return [*losses, norm]

    def load_tuned(self, tuned, final=False):
        """Call Runtime.load_tuned(tuned, final) for all backends of this rank."""
        for backend in self.pool.backends:
            backend.runtime.load_tuned(tuned, final)

    def bytes_sent(self):
        """The bytes that this rank has sent so far, in all groups."""
        groups = [*self.mesh.groups().values()]
        groups += [group for worker in self.accumulator.workers for group in worker.groups]
        return sum(group.bytes_sent for group in {id(group): group for group in groups}.values())

"""One training step, for any number of threads, ranks and devices: gradients, their sum, clipping, AdamW, loss."""

# The global batch: B sequences of T tokens. A data-parallel rank reads B / (number of data-parallel ranks) of them.

import math
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.errors import Diverged, UserError, counted
from gpt2core.ops import require_tokens
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.losses import total_loss
from gpt2core.parallel.setup import Setup
from gpt2core.parallel.whole_parameters import fill, initial_parameters
from gpt2core.tensor import ShapeError


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


class Trainer(Setup):
    """A model, its optimizer, and the threads and ranks that share the work (parallel/setup.py).

    config: GPT2Config. backends: a list, one for each worker thread of this rank. world: the Communicator of all ranks.
    parallel: ParallelConfig. optimizer: a dict of keyword arguments of AdamW. seed: seed of the initial parameters;
    None leaves them zero. micro_batches: their number in the global batch, which has batch_size (B) sequences of
    seq_len (T) tokens. Raises ConfigError for sizes that do not fit.

    On one rank and one thread there is only this: parameters and gradients, two flat arrays; a model whose tensors are
    views of them; and AdamW.
    """

    def __init__(
        self, config, backends, *, batch_size, seq_len, micro_batches, optimizer=None, world=None, parallel=None, seed=0
    ):  # fmt: skip
        self.batch_size, self.seq_len, self.micro_batches = batch_size, seq_len, micro_batches
        super().__init__(config, backends, world or Solo(), parallel or ParallelConfig(), optimizer or {})
        self.steps, self.position, self.seed = 0, 0, seed  # updates made; windows read by all ranks so far
        self.updating = False  # whether an update has begun that is not counted in `steps`
        self.one = self.backend.ones((), np.float64)  # the gradient of the loss with respect to itself
        if seed is not None:
            fill(self, self.parameters, initial_parameters(config, seed) if self.world.is_root else None)
        self.optimizer.refresh_copy(self.steps)

    def step(self, batch, lr):
        """Make one update from the result of prepare(); return a Step.

        Raises Diverged if the loss or the gradient norm is not finite; if the norm is not, no parameter has changed.
        """
        self.check_interrupted()
        start = time.perf_counter()
        losses, norm = self.update(batch, self.optimizer.hyperparameters(self.steps + 1, lr), self.one)
        loss, norm = total_loss(self, [loss.item() for loss in losses])[0], norm.item()
        return self.report(loss, norm, lr, time.perf_counter() - start)

    def update(self, batch, hyperparameters, dloss, **state):
        """The formula of a step -> (this rank's losses, gradient norm). If the norm is not finite, nothing changes.

        hyperparameters: the numbers of AdamW. dloss: the gradient with which backward begins. state: see Backend.clip.
        The host reads no device value here, so that a device can capture this method once and replay it.
        """
        scale = 1 / (self.batch_size * self.seq_len)  # the loss is the mean over all tokens: the sum, times scale
        # forward and backward of this rank's micro-batches: their losses; the sum of their gradients is self.gradients
        losses = self.accumulator.backward(batch, scale, dloss)
        self.data_parallel.finish()  # now self.gradients is the sum over all ranks
        norm, factor = self.optimizer.clip(self.gradients, **state)
        self.updating = True  # until report(): a step that was interrupted here is not continued
        self.optimizer.update(self.gradients, factor, hyperparameters)
        return losses, norm

    def report(self, loss, norm, lr, seconds, **more):
        """Count a step whose update is complete, and return its Step. more: other fields of Step.

        Raises Diverged if the loss or the gradient norm is not finite.
        """
        self.updating = False
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self.diverged(loss, norm, lr)
        self.steps, self.position = self.steps + 1, self.position + self.batch_size
        return Step(self.steps - 1, loss, lr, norm, self.batch_size * self.seq_len / seconds, seconds, **more)

    def check_interrupted(self):
        """Raise UserError if an update was interrupted: then some parameters are those before it, others after it."""
        if self.updating:
            raise UserError(
                f"step {self.steps} was interrupted while it changed the parameters: load a checkpoint, or make a new "
                f"{type(self).__name__}"
            )

    def diverged(self, loss, norm, lr):
        """The error of a step whose loss or norm is not finite."""
        advice = "" if self.optimizer.eps else ", or raise `eps` (now 0)"
        return Diverged(
            f"step {self.steps}: the loss is {loss} and the gradient norm is {norm}: training cannot continue. "
            f"Lower `lr` (now {lr:g}) or set `clip`{advice}; "
            f"the parameters are those after {counted(self.steps, 'step')}"
        )

    def prepare(self, inputs, targets):
        """The argument `batch` of step(): inputs and targets, (rows, T) integers on the host, in micro-batches.

        The rows are those of this rank in the global batch, self.rows. Raises ShapeError for another shape, for another
        dtype than integers, and for a token outside the vocabulary.
        """
        inputs, targets = np.asarray(inputs), np.asarray(targets)
        for tokens in (inputs, targets):
            if tokens.shape != (shape := (self.rows.stop - self.rows.start, self.seq_len)):
                raise ShapeError(f"batch: tokens {tokens.shape}, but the rows of this rank are (rows, T) = {shape}")
            require_tokens("batch", tokens, self.config.vocab_size)
        tensor, prepare = self.mesh.tensor, self.backend.prepare_tokens
        wte_rows = self.config.vocab_size // tensor.size  # rows of the token embedding on each rank
        return [
            [(prepare(x, wte_rows, tensor.rank * wte_rows), prepare(y)) for x, y in worker_batch]
            for worker_batch in self.accumulator.deal(inputs, targets, len(inputs), self.accumulator.merged)
        ]

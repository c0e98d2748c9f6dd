"""One training step from top to bottom: the gradient of a batch, its norm, clipping, AdamW, and the loss."""

# B sequences in a batch, T tokens in a sequence

import math
import time
from dataclasses import dataclass

from gpt2core import checks
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.data import even_slices
from gpt2core.errors import diverged, require_known
from gpt2core.model import GPT2, initial_parameters
from gpt2core.optimizer import AdamW, Optimizer
from gpt2core.tensor import Tensor
from gpt2core.tree_sum import tree_reduce, tree_sum


@dataclass(frozen=True)
class Step:
    """The report of one training step."""

    step: int
    loss: float  # mean cross-entropy of the batch before the update, in nats per token
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float


class Trainer:
    """A model and AdamW in one process: flat arrays of parameters and of gradients, and tensors that are views of them.

    batch_size (B), seq_len (T): the sizes of a batch, which is computed in `micro_batches` parts, one after another;
    their sizes differ by at most one sequence. optimizer: a dict of `clip` and AdamW.OPTIONS. seed: of the initial
    parameters. Raises ConfigError for sizes that do not fit, and for a backend that rounds the parameters that kernels
    read.

    parallel.parallel_trainer.ParallelTrainer divides the same step over threads and ranks; the bits are the same if
    their numbers are powers of two. engine.fast_trainer.FastTrainer also makes it faster.
    """

    def __init__(self, config, backend, *, batch_size, seq_len, micro_batches=1, optimizer=None, seed=0):
        self.set_sizes(config, batch_size, seq_len, micro_batches)
        checks.whole_precision(backend)
        backend.check_model(config)
        options = dict(optimizer or {})
        require_known("optimizer", options, (*AdamW.OPTIONS, "clip"))
        clip = options.pop("clip", 0.0)
        self.backend, self.rows = backend, slice(0, batch_size)  # the rows of the batch that this process reads
        self.arena = Arena(parameter_shapes(config))
        self.parameters, self.gradients = (backend.zeros((self.arena.size,), backend.dtype) for _ in range(2))
        views = self.arena.views(self.parameters)
        self.tensors = {name: Tensor(view, backend, requires_grad=True) for name, view in views.items()}
        for name, array in initial_parameters(config, seed):
            views[name][...] = backend.asarray(array, backend.dtype)
        self.model = GPT2(config, self.tensors)
        self.optimizer = Optimizer(self.arena, self.parameters, backend, AdamW(**options), clip)

    def set_sizes(self, config, batch_size, seq_len, micro_batches):
        checks.sizes(config, batch_size, seq_len, micro_batches)
        self.config, self.batch_size, self.seq_len, self.micro_batches = config, batch_size, seq_len, micro_batches
        self.scale = 1 / (batch_size * seq_len)  # the loss is the mean over all tokens: their sum, times scale
        self.steps, self.position = 0, 0  # updates made; windows read so far

    def step(self, batch, lr):
        """Make one update from the result of prepare(); return a Step.

        Raises Diverged if the loss or the gradient norm is not finite. If the norm is not, no parameter has changed; if
        only the loss is not, the update was made: it does not read the loss.
        """
        start = time.perf_counter()
        losses, norm = self.update(batch, self.optimizer.coefficients(self.steps + 1, lr))
        loss, norm = self.total_loss([loss.item() for loss in losses]), norm.item()
        return self.count_step(loss, norm, lr, time.perf_counter() - start)

    def update(self, batch, coefficients):
        """The formula of a step -> (losses of the micro-batches, gradient norm).

        coefficients: the numbers of AdamW. The host reads no value of the device here.
        """
        losses = self.compute_gradients(batch)
        norm, factor = self.optimizer.norm_and_factor(self.gradients)
        self.optimizer.update(self.gradients, factor, coefficients)
        return losses, norm

    def compute_gradients(self, batch):
        """The losses of the micro-batches, arrays of shape (); the sum of their gradients is in self.gradients.

        Gradients are added in pairs, ((0 + 1) + (2 + 3)) + ... (tree_sum.py), so that 2, 4, 8, ... threads or ranks can
        divide the sum and compute the same bits.
        """
        each = (self.micro_batch_gradient(ids, targets) for ids, targets in batch)  # computed one by one
        gradient, losses = tree_reduce(each, add_pairs)
        self.gradients[...] = gradient
        return losses

    def micro_batch_gradient(self, ids, targets):
        """(the flat gradient of one micro-batch, [its loss])."""
        for tensor in self.tensors.values():
            tensor.grad = None
        loss = self.model.loss(ids, targets, self.scale)
        loss.backward()
        flat = self.backend.zeros((self.arena.size,), self.backend.dtype)
        for name, view in self.arena.views(flat).items():
            view[...] = self.tensors[name].grad
        return flat, [loss.data]

    def total_loss(self, losses):
        """The loss of the batch, from those of its micro-batches (Python numbers)."""
        return tree_sum(losses)

    def count_step(self, loss, norm, lr, seconds):
        """Count a step whose update is complete, and return its Step; raises Diverged: see step()."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise diverged(self.steps, loss, norm, lr, self.optimizer.rule.keeps_zeros)
        self.steps, self.position = self.steps + 1, self.position + self.batch_size
        return Step(self.steps - 1, loss, lr, norm, self.batch_size * self.seq_len / seconds, seconds)

    def prepare(self, inputs, targets):
        """The argument `batch` of step(): [(ids, targets) of each micro-batch].

        inputs, targets: (B, T) integers on the host. Raises ShapeError for another shape, for another dtype than
        integers, and for a token outside the vocabulary.
        """
        shape = self.batch_size, self.seq_len
        inputs, targets = checks.batch((inputs, targets), shape, self.config.vocab_size)
        return [(inputs[part], targets[part]) for part in even_slices(self.batch_size, self.micro_batches)]


def add_pairs(a, b):
    """(gradient, [losses]) of two groups of micro-batches -> those of both."""
    return a[0] + b[0], a[1] + b[1]

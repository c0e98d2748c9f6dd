"""The micro-batches of one rank, and what a ParallelTrainer needs of the object that computes their gradients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from gpt2core.architecture import GPT2Config
from gpt2core.backend import Backend
from gpt2core.data import even_slices
from gpt2core.dropout import Dropout
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.kernel_arguments import HeadGradient
from gpt2core.parallel.part import backward_pass, forward_pass
from gpt2core.parallel.tensor.shards import whole_name


@dataclass(frozen=True)
class Workload:
    """The `count` micro-batches of one rank, or of one of its workers, and the arrays of parameters and gradients.

    layout: that of the flat arrays `parameters`, which kernels read, and `gradients`, which receives the sum.
    batch_shape: (B, T) of all micro-batches of the rank. dloss: the array of shape () with which backward begins.
    recompute: see parts_of(). merged: the micro-batches of one pass, which is one call of each kernel. slices: those of
    each layer that the rank has (ParallelConfig.slices). dropout: the probability with which a number is dropped.
    first_rows: the row of the first sequence of each micro-batch in the global batch.
    """

    config: GPT2Config
    layout: object
    parameters: object
    gradients: object
    backend: Backend
    count: int
    batch_shape: tuple
    dloss: object
    recompute: str = "none"
    merged: int = 1
    slices: int = 1
    dropout: float = 0.0
    first_rows: tuple = ()

    @property
    def arena(self):
        """The arena of the whole parameters of this rank."""
        return self.layout.arena

    @property
    def passes(self):
        return self.count // self.merged

    def training_arguments(self, number, targets, scale, key=None):
        """The ForwardArguments of pass `number` of a training step, which has these targets.

        key: that of the Dropout of the step; None drops nothing. Merged micro-batches have equal sizes, so the rows of
        one follow those of the one before it.
        """
        dropout = None if key is None else Dropout(self.dropout, key, self.first_rows[number * self.merged])
        gradient = HeadGradient(scale, self.config.vocab_size, self.dloss)
        return ForwardArguments(targets=targets, scale=scale, gradient=gradient, dropout=dropout)

    @property
    def used_twice(self):
        """The names of parameters with two uses. Their gradient has two parts, which are added for each micro-batch.

        With one micro-batch nothing is added after them, so none is named.
        """
        if not self.config.tied or self.count == 1:
            return []
        return [name for name in self.arena.shapes if whole_name(name) == self.config.head]


class Accumulator(ABC):
    """Computes the sum of the gradients of a Workload in the canonical order (tree_sum.py), times its `dloss`.

    loss_arrays: for each micro-batch an array of shape () for its loss, the same ones in each step. workers: the
    objects that compute passes, each with `tensors` ({name: Tensor}) and `groups` (in which it sends activations).
    """

    def __init__(self, work):
        self.work, self.backend, self.gradients, self.merged = work, work.backend, work.gradients, work.merged
        zeros = work.backend.zeros((work.count,), np.float64)
        self.loss_arrays = [zeros[i : i + 1].reshape(()) for i in range(work.count)]
        self.workers = []

    def deal(self, inputs, targets, rows, merged=1):
        """Divide inputs, targets (B, T) in order -> [[(inputs, targets) of each pass] of each worker].

        A pass has `merged` micro-batches, sized as for `rows` sequences; if B < rows, the last are short or empty. The
        arrays of merged micro-batches are (merged, B, T).
        """
        shape = (merged, -1, inputs.shape[1]) if merged > 1 else (-1, inputs.shape[1])
        parts = even_slices(rows, self.work.count // merged)
        passes = [(inputs[part].reshape(shape), targets[part].reshape(shape)) for part in parts]
        return [passes[part] for part in even_slices(len(passes), len(self.workers))]

    @abstractmethod
    def compute_gradients(self, batch, scale, key=None):
        """batch: from deal() -> loss_arrays, the losses of the micro-batches in order. key: of dropout, or None.

        Call data_parallel.begin() before. Starts to sum the gradients over the ranks; they are complete after
        data_parallel.finish(). With merged micro-batches, the sum of their losses is that of the first one, and the
        others are 0. The losses are 0 on a rank of a pipeline without the head.
        """

    @abstractmethod
    def losses(self, inputs, targets, scale, rows):
        """The losses of the micro-batches from deal(), as numbers, without gradients or dropout; 0 for an empty one."""


def compute_passes(work, parts, batch, scale, key, losses, begin_pass):
    """Compute forward and backward of each pass of a worker's `batch`, and write their losses to the arrays `losses`.

    parts: of the whole model. A loss is `scale` times a sum over tokens. key: see Workload.training_arguments().
    begin_pass() is called before each pass.
    """
    runtime = work.backend.runtime
    for number, (ids, targets) in enumerate(batch):
        begin_pass()
        with runtime.range("forward"):
            graphs, loss = forward_pass(parts, ids, work.training_arguments(number, targets, scale, key))
        losses[number * work.merged][...] = loss
        with runtime.range("backward"):
            backward_pass(graphs, work.dloss)
        del loss
        runtime.join()  # frees all arrays of the pass: the next one can reuse their memory

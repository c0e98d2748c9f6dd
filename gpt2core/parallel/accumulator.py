"""What a ParallelTrainer needs of the object that computes the gradients of one rank's micro-batches."""

from abc import ABC, abstractmethod

import numpy as np


class Accumulator(ABC):
    """Computes the sum of the gradients of this rank's `count` micro-batches in the canonical order (tree_sum.py).

    dloss: the array of shape () with which backward begins; None: 1. loss_arrays: for each micro-batch an array of
    shape () for its loss, the same ones in each step. merged: the micro-batches of one pass, which is one call of each
    kernel. workers: the objects that compute passes, each with `tensors` ({name: Tensor}) and `group` (the ranks that
    divide each layer).
    """

    merged = 1

    def __init__(self, backend, count, dloss=None):
        self.count = count
        self.dloss = backend.ones((), np.float64) if dloss is None else dloss
        self.loss_arrays = loss_arrays(backend, count)
        self.workers = [self]

    @abstractmethod
    def deal(self, inputs, targets, rows, merged=1):
        """Divide inputs, targets (B, T) in order -> [[(inputs, targets) of each pass] of each worker].

        A pass has `merged` micro-batches, sized as for `rows` sequences; if B < rows, the last are short or empty. The
        arrays of merged micro-batches are (merged, B, T).
        """

    @abstractmethod
    def backward(self, batch, scale):
        """batch: from deal() -> the losses of the micro-batches in order, arrays of shape () that the next step reuses.

        Call data_parallel.begin() before. Starts to sum the gradients, times dloss, over the ranks; they are complete
        after data_parallel.finish(). The losses are 0 on a rank of a pipeline without the head.
        """

    @abstractmethod
    def losses(self, inputs, targets, scale, rows):
        """The losses of the micro-batches from deal(), as numbers, without gradients; 0 for an empty micro-batch."""


def loss_arrays(backend, count):
    """`count` zeros, arrays of shape ()."""
    zeros = backend.zeros((count,), np.float64)
    return [zeros[i : i + 1].reshape(()) for i in range(count)]

"""The gradients of the worker threads of a rank: unit by unit, their sums are added in the canonical order."""

import collections
import threading
from abc import ABC, abstractmethod
from dataclasses import replace

from gpt2core.parallel.micro_batches.gradient_sums import ArenaGradients
from gpt2core.tree_sum import tree_reduce

SUM_BLOCK = 1 << 15  # elements that are summed at a time, so that they stay in the cache


class WorkerSums(ABC):
    """Adds the sums of all workers of a rank.

    workers: the gradients of each worker, an ArenaGradients or UnitGradients, which calls worker_completed(unit) when
    its sum of a unit is complete.
    """

    def __init__(self):
        self.workers, self.lock, self.counts = [], threading.Lock(), collections.Counter()

    def begin(self, batch=()):
        """Called before the passes of a step: forget a step that has failed."""
        self.counts.clear()

    def worker_completed(self, unit):
        """Count that a worker has completed a unit; the call of the last worker completes the sum of the rank."""
        # All workers complete the units in the same order, and a worker enters this method only after its call for the
        # previous unit has returned. So complete() is called in the same order on every rank.
        with self.lock:
            self.counts[unit] += 1
            if self.counts[unit] < len(self.workers):
                return
        self.complete(unit)

    @abstractmethod
    def of_worker(self, work, parameters, used_twice=()):
        """The gradients of one more worker, whose Workload is `work`. parameters: an object with its `tensors`."""

    @abstractmethod
    def complete(self, unit):
        """Add the sums of all workers, and start the sum over the ranks: one call at a time, in any worker's thread."""


class ArenaSums(WorkerSums):
    """The sums of workers that have an array of the whole arena each; that of the first worker receives the sum.

    on_complete(unit) is called during backward when this rank's gradient of a unit is complete.
    """

    def __init__(self, work, on_complete):
        super().__init__()
        self.arena, self.xp, self.on_complete = work.arena, work.backend.xp, on_complete

    def of_worker(self, work, parameters=None, used_twice=()):
        """See WorkerSums.of_worker; an ArenaGradients, which makes its own Parameters."""
        if self.workers:
            work = replace(work, gradients=work.backend.zeros((work.layout.size,), work.backend.dtype))
        self.workers.append(ArenaGradients(work, self.worker_completed, used_twice))
        return self.workers[-1]

    def complete(self, unit):
        part = self.arena.unit_slice(unit)
        for start in range(part.start, part.stop, SUM_BLOCK):
            block = slice(start, min(start + SUM_BLOCK, part.stop))
            tree_reduce([each.work.gradients[block] for each in self.workers], lambda a, b: self.xp.add(a, b, out=a))
        self.on_complete(unit)

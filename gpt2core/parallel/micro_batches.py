"""The gradient of a global batch: the sum over its micro-batches in the canonical order, for any number of workers.

A worker is a thread that runs consecutive micro-batches one after another, or `merged` of them in one call of each
kernel (merged_micro_batches.py). The canonical order adds numbers in a fixed binary tree (tree_sum.py), and a worker
adds one subtree. When backward has passed a unit (a block, for example), its gradients are added to the worker's
partial sums. The worker that is last to complete a unit adds the sums of all workers, and calls on_complete(unit) to
start the sum over the ranks. If the numbers of workers and ranks are powers of two, the bits of the sum do not depend
on them.
"""

import math
import threading

from gpt2core.data import even_slices
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.parallel.accumulator import Accumulator, loss_arrays
from gpt2core.parallel.async_all_gather import NoGather
from gpt2core.parallel.gradient_sums import arena_sums, tensors_of
from gpt2core.parallel.merged_micro_batches import merged_micro_batches
from gpt2core.parallel.part import backward_pass, forward_pass, parts_of
from gpt2core.tensor import no_grad
from gpt2core.tree_sum import tree_reduce

SUM_BLOCK = 1 << 15  # elements that are summed at a time, so that they stay in the cache


class Worker:
    """One thread's model, with shared parameters, its own backend, and its gradients: the sum over `count` passes.

    A pass is forward and backward of `merged` micro-batches. gradients: the flat array that receives the sum. sums:
    {unit: UnitSum}: where kernels write the gradients of a pass; in every second pass they add them. Each pass must
    reach every parameter: one without a gradient would keep that of an earlier step. wait(unit) is called before the
    forward pass of a unit, completed(unit) when its sum is complete. dloss: see Accumulator. recompute: see parts_of().
    """

    def __init__(
        self, config, arena, parameters, gradients, backend, count, group, wait, completed, dloss, merged=1,
        recompute="none",
    ):  # fmt: skip
        self.arena, self.backend, self.group, self.completed = arena, backend, group, completed
        self.dloss, self.gradients = dloss, gradients
        # A tied matrix has two uses. It needs the gradient of each micro-batch, because its two parts are added first.
        twice = [config.head] if config.tied and merged * count > 1 else []
        self.sums = arena_sums(arena, parameters, gradients, backend, count, merged, twice)
        self.tensors = tensors_of(self.sums)
        # of each pass: its loss, then merged - 1 zeros
        self.losses, self.merged = loss_arrays(backend, count * merged), merged
        self.model = GPT2(config, self.tensors, group)
        self.parts = parts_of(self.model.units, backend, recompute, before=wait, completed=self.add_unit)

    def run(self, batch, scale):
        """batch: [(ids, targets) of each pass] -> their losses; the sum of their gradients is in `gradients`.

        A loss is `scale` times a sum over tokens.
        """
        for each in self.sums.values():
            each.begin()
        for number, (ids, targets) in enumerate(batch):
            for each in self.sums.values():
                each.set_destinations()
            with self.backend.runtime.range("forward"):
                graphs, loss = forward_pass(self.parts, ids, targets, scale, self.dloss)
            self.losses[number * self.merged][...] = loss
            with self.backend.runtime.range("backward"):
                backward_pass(graphs, self.dloss)
            del loss
            self.backend.runtime.join()  # frees all arrays of the pass: the next one can reuse their memory
        return self.losses

    def add_unit(self, unit):
        """Complete the sum of a unit's gradients over the passes so far, when backward of a pass has computed them."""
        if self.sums[unit].complete():
            self.completed(unit)


class MicroBatches(Accumulator):
    """One rank's `count` micro-batches, divided over its workers; the first worker's sum becomes the rank's gradient.

    parameters: the flat buffer that all workers read. data_parallel: sums `gradients` over the ranks. pool: the
    WorkerPool. tensor_group: the ranks that divide each layer; each worker gets a communicator of its own, because
    workers call collectives at the same time. shape: (B, T) of this rank's batch; None: no micro-batches are merged.
    all_gather: the AsyncAllGather of `parameters`, if workers must wait for a unit before they read it. dloss: see
    Accumulator; recompute: see Worker. on_complete is data_parallel.unit_completed. It is called during backward when
    this rank's gradient of a unit is complete: by any worker's thread, one call at a time, in the same order on every
    rank. Raises ConfigError unless pool.size divides `count`.
    """

    def __init__(
        self, config, arena, parameters, gradients, data_parallel, pool, count, tensor_group, shape=None,
        all_gather=None, dloss=None, recompute="none",
    ):  # fmt: skip
        if count % pool.size:
            raise ConfigError(
                f"{count} micro-batches per rank are not divisible by {pool.size} threads: "
                f"use `threads={math.gcd(count, pool.size)}` or another `micro_batches`"
            )
        super().__init__(pool.backends[0], count, dloss)
        self.arena, self.pool, self.gradients = arena, pool, gradients
        self.data_parallel, self.all_gather = data_parallel, all_gather or NoGather()
        self.on_complete = data_parallel.unit_completed
        self.lock, self.completed = threading.Lock(), dict.fromkeys(arena.units, 0)
        self.merged = merged_micro_batches(config, arena.shapes, pool, count, shape, tensor_group) if shape else 1
        passes, hooks = count // pool.size // self.merged, (self.all_gather.wait_for_unit, self.worker_completed)
        sums = [gradients, *(backend.zeros((arena.size,), backend.dtype) for backend in pool.backends[1:])]
        options = dict(dloss=self.dloss, merged=self.merged, recompute=recompute)
        self.workers = [
            Worker(config, arena, parameters, flat, backend, passes, tensor_group.split(0), *hooks, **options)
            for backend, flat in zip(pool.backends, sums, strict=True)
        ]

    def deal(self, inputs, targets, rows, merged=1):
        batches = passes_of(inputs, targets, rows, self.count, merged)
        return [batches[part] for part in even_slices(len(batches), self.pool.size)]

    def backward(self, batch, scale):
        self.completed = dict.fromkeys(self.arena.units, 0)
        with self.all_gather:  # the previous update may still be sending parameters
            losses = self.pool.map(lambda worker, part: worker.run(part, scale), self.workers, batch)
        return [loss for worker in losses for loss in worker]

    def worker_completed(self, unit):
        """Count that a worker has completed a unit; the call of the last worker adds the sums of all workers."""
        # All workers complete the units in the same order, and a worker enters this method only after its call for the
        # previous unit has returned. So on_complete is called in the same order on every rank.
        with self.lock:
            self.completed[unit] += 1
            if self.completed[unit] < len(self.workers):
                return
        xp, part = self.pool.backends[0].xp, self.arena.unit_slice(unit)
        for start in range(part.start, part.stop, SUM_BLOCK):
            block = slice(start, min(start + SUM_BLOCK, part.stop))
            tree_reduce([worker.gradients[block] for worker in self.workers], lambda a, b: xp.add(a, b, out=a))
        self.on_complete(unit)

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        def run(worker, part):
            return [forward_pass(worker.parts, x, y, scale)[1].item() if len(x) else 0.0 for x, y in part]

        losses = self.pool.map(run, self.workers, self.deal(inputs, targets, rows))  # map() keeps no_grad()
        return [loss for worker in losses for loss in worker]


def passes_of(inputs, targets, rows, count, merged=1):
    """[(inputs, targets) of each pass] of one rank's `count` micro-batches: see MicroBatches.deal."""
    shape = (merged, -1, inputs.shape[1]) if merged > 1 else (-1, inputs.shape[1])
    parts = even_slices(rows, count // merged)
    return [(inputs[part].reshape(shape), targets[part].reshape(shape)) for part in parts]

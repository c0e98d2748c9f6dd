"""The gradient of a global batch: the sum over its micro-batches in the canonical order, for any number of workers.

A worker is a thread that runs consecutive micro-batches one after another, or `merged` of them in one call of each
kernel (merged_micro_batches.py). The canonical order adds numbers in a fixed binary tree (tree_sum.py), and a worker
adds one subtree. As soon as backward completes a gradient, the worker adds it to a partial sum. The worker that is last
to complete a parameter adds the sums of all workers, and calls on_complete(name) to start the sum over the ranks. If
the numbers of workers and ranks are powers of two, the bits of the sum do not depend on these numbers.
"""

import math
import threading

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.merged_micro_batches import merged_micro_batches
from gpt2core.parallel.tree_sum import tree_reduce
from gpt2core.tensor import Tensor, no_grad

SUM_BLOCK = 1 << 15  # elements that are summed at a time, so that they stay in the cache


class Worker:
    """One thread's model, with shared parameters, its own backend, and the partial sums of gradients of `count` passes.

    A pass is forward and backward of `merged` micro-batches. The last pass calls completed(name) for each finished sum.
    """

    def __init__(self, config, arena, parameters, backend, count, group, completed, merged=1):
        self.count, self.merged, self.backend, self.completed = count, merged, backend, completed
        levels = max(1, (count - 1).bit_length())  # one partial sum per binary digit of count - 1
        self.partial_sums = [backend.zeros((arena.size,), backend.dtype) for _ in range(levels)]
        self.views = [arena.views(flat) for flat in self.partial_sums]
        losses = backend.zeros((count * merged,), np.float64)  # of each pass: its loss, then merged - 1 zeros
        self.losses = [losses[number : number + 1].reshape(()) for number in range(count * merged)]
        self.tensors = {}
        for name, array in arena.views(parameters).items():
            tensor = self.tensors[name] = Tensor(array, backend, requires_grad=True)
            tensor.on_gradient = lambda gradient, name=name: self.collect(name, gradient)
            if count == 1:  # there is nothing to add: kernels write the gradient directly to the sum
                tensor.grad_buffer = self.views[0][name]
            if merged > 1 and config.tied and "wte" in name:  # its two uses add to one gradient per micro-batch
                tensor.grad_buffer = backend.empty((merged, *array.shape), backend.dtype)
        self.done = 0  # number of passes of this step whose gradients have been added
        self.model = GPT2(config, self.tensors, group)

    @property
    def gradients(self):
        """The flat sum over this worker's micro-batches, after run()."""
        return self.partial_sums[-1]

    def collect(self, name, gradient):
        """Add one parameter's gradient of the current pass to the partial sums; sum i is over 2**i passes."""
        levels, buffer = levels_to_add(self.done, self.count), self.tensors[name].grad_buffer
        if not levels and (buffer is None or buffer.ndim > gradient.ndim):  # no kernel wrote it to views[0]
            self.views[0][name][...] = gradient
        for level in levels:
            # as in a binary counter with carry: the last addition writes to the next level, others to their own level
            target = min(level + 1, len(self.views) - 1) if level == levels[-1] else level
            total = self.views[target][name]
            self.backend.xp.add(self.views[level][name], gradient, out=total)
            gradient = total
        if self.done == self.count - 1:
            self.completed(name)

    def run(self, batch, scale, dloss):
        """batch: [(ids, targets) of each pass] -> their losses; the sum of their gradients is in `gradients`.

        A loss is `scale` times a sum over tokens. dloss: array of shape (), the gradient with which backward begins.
        """
        self.done, self.backend.micro_batches = 0, self.merged
        for ids, targets in batch:
            with self.backend.runtime.range("forward"):
                loss = self.model.loss(ids, targets, scale, dloss)
            self.losses[self.done * self.merged][...] = loss.data
            with self.backend.runtime.range("backward"):
                loss.backward(dloss)
            del loss  # free it now: it may occupy part of the memory block that the next logits can reuse
            self.done += 1
        self.backend.micro_batches = 1
        return self.losses


def levels_to_add(done, count):
    """The numbers of the partial sums to add in pass `done`: its trailing 1 bits; in the last pass, all its 1 bits."""
    levels = [level for level in range(done.bit_length()) if done >> level & 1]
    if done < count - 1:
        levels = [level for i, level in enumerate(levels) if level == i]  # bits 0, 1, 2, ... without a gap
    return levels


class MicroBatches:
    """One rank's `count` micro-batches, divided over its workers; the first worker's sum becomes the rank's gradient.

    parameters: the flat buffer that all workers read. pool: the WorkerPool. tensor_group: the ranks that divide each
    layer; each worker gets a communicator of its own, because workers call collectives at the same time. shape: (B, T)
    of this rank's batch; None: no micro-batches are merged. on_complete(name) is called during backward when this
    rank's gradient of a parameter is complete: by any worker's thread, one call at a time, in the same order on every
    rank. Raises ConfigError unless pool.size divides `count`.
    """

    def __init__(self, config, arena, parameters, pool, count, tensor_group, shape=None):
        if count % pool.size:
            raise ConfigError(
                f"{count} micro-batches per rank are not divisible by {pool.size} threads: "
                f"use --threads {math.gcd(count, pool.size)} or another --micro-batches"
            )
        self.arena, self.pool, self.count = arena, pool, count
        self.on_complete = lambda name: None
        self.lock, self.completed = threading.Lock(), dict.fromkeys(arena.slices, 0)
        self.merged = merged_micro_batches(config, arena.shapes, pool, count, shape, tensor_group) if shape else 1
        passes, completed = count // pool.size // self.merged, self.worker_completed
        self.workers = [
            Worker(config, arena, parameters, backend, passes, tensor_group.split(0), completed, self.merged)
            for backend in pool.backends
        ]
        self.gradients = self.workers[0].gradients  # the flat sum of this rank's gradients, after backward()

    def deal(self, inputs, targets, rows, merged=1):
        """Divide inputs, targets (B, T) in order -> [[(inputs, targets) of each pass] of each worker].

        A pass has `merged` micro-batches, sized as for `rows` sequences; if B < rows, the last are short or empty.
        """
        batches = [(inputs[part], targets[part]) for part in even_slices(rows, self.count // merged)]
        return [batches[part] for part in even_slices(len(batches), self.pool.size)]

    def backward(self, batch, scale, dloss):
        """batch: from deal() -> the losses of the micro-batches in order, arrays of shape () that the next step reuses.

        Writes the flat sum of all gradients, times `dloss`, to `gradients`; read it after `runtime.join()`.
        """
        losses = self.pool.map(lambda worker, part: worker.run(part, scale, dloss), self.workers, batch)
        return [loss for worker in losses for loss in worker]

    def worker_completed(self, name):
        """Count that a worker has completed `name`; the call of the last worker adds the sums of all workers."""
        # All workers complete the parameters in the same order, and a worker enters this method only after its call
        # for the previous parameter has returned. So on_complete is called in the same order on every rank.
        with self.lock:
            self.completed[name] += 1
            if self.completed[name] < len(self.workers):
                return
            self.completed[name] = 0
        xp, part = self.pool.backends[0].xp, self.arena.slices[name]
        for start in range(part.start, part.stop, SUM_BLOCK):
            block = slice(start, min(start + SUM_BLOCK, part.stop))
            tree_reduce([worker.gradients[block] for worker in self.workers], lambda a, b: xp.add(a, b, out=a))
        self.on_complete(name)

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        """The losses of the micro-batches from deal(), without gradients; 0 for an empty micro-batch."""

        def run(worker, part):
            return [worker.model.loss(x, y, scale).item() if len(x) else 0.0 for x, y in part]

        losses = self.pool.map(run, self.workers, self.deal(inputs, targets, rows))  # map() keeps no_grad()
        return [loss for worker in losses for loss in worker]

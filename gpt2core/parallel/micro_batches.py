"""The gradient of a global batch: the sum over its micro-batches in the canonical order, for any number of workers.

A worker is a thread that owns a subtree of micro-batches and runs them one after another. As soon as backward completes
a gradient, the worker adds it to a partial sum, because the gradient is still in the cache. The last worker that
completes a parameter adds the sums of all workers, and calls on_complete(name) to start the sum over the ranks. The
bits of the sum therefore do not depend on the numbers of workers and ranks, if all these numbers are powers of two. A
worker holds the activations of only one call of the kernels at a time, so this is gradient accumulation too. One call
has one micro-batch, or `merged` micro-batches (merged_micro_batches.py).
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
    """One thread's model: shared parameters, its own backend, and the partial sums of its subtree.

    completed(name) is called when the sum of that parameter's gradient over this worker's micro-batches is complete.
    They are computed in `count` calls of forward and backward, with `merged` micro-batches in each.
    """

    def __init__(self, config, arena, parameters, backend, count, group, completed, merged=1):
        self.count, self.merged, self.backend, self.completed = count, merged, backend, completed
        levels = max(1, (count - 1).bit_length())  # one partial sum per binary digit of count - 1
        self.partial = [backend.zeros((arena.size,), backend.dtype) for _ in range(levels)]
        self.views = [arena.views(flat) for flat in self.partial]
        losses = backend.zeros((count * merged,), np.float64)  # the loss of a call, then merged - 1 zeros
        self.losses = [losses[number : number + 1].reshape(()) for number in range(count * merged)]
        self.tensors = {}
        for name, array in arena.views(parameters).items():
            tensor = self.tensors[name] = Tensor(array, backend, requires_grad=True)
            tensor.on_gradient = lambda gradient, name=name: self.collect(name, gradient)
            if count == 1:  # there is nothing to add: kernels write the gradient directly to the sum
                tensor.grad_buffer = self.views[0][name]
        if merged > 1 and config.tied:  # logits and embedding add to the gradient of each micro-batch
            wte = self.tensors["transformer.wte.weight"]
            wte.grad_buffer = backend.empty((merged, *wte.shape), backend.dtype)
        self.done = 0  # calls of this step whose gradients are in the sum
        self.model = GPT2(config, self.tensors, group)

    @property
    def gradients(self):
        """The flat sum over this worker's micro-batches, after run()."""
        return self.partial[-1]

    def collect(self, name, gradient):
        """Add the current call's gradient of one parameter; the partial sums work like a binary counter."""
        levels, buffer = merged_levels(self.done, self.count), self.tensors[name].grad_buffer
        if not levels and (buffer is None or buffer.ndim > gradient.ndim):  # it is not in views[0] yet
            self.views[0][name][...] = gradient
        for level in levels:
            # the last addition writes to the next level, the others to their own level
            target = min(level + 1, len(self.views) - 1) if level == levels[-1] else level
            total = self.views[target][name]
            self.backend.xp.add(self.views[level][name], gradient, out=total)
            gradient = total
        if self.done == self.count - 1:
            self.completed(name)

    def run(self, batch, scale, dloss):
        """batch: [(ids, targets) of each call] -> their losses; the sum of their gradients is in `gradients`.

        scale: factor of each summed loss. dloss: an array of shape () that multiplies the gradients.
        """
        self.done, self.backend.micro_batches = 0, self.merged
        for ids, targets in batch:
            with self.backend.runtime.range("forward"):
                loss = self.model.loss(ids, targets, scale, dloss)
            self.losses[self.done * self.merged][...] = loss.data
            with self.backend.runtime.range("backward"):
                loss.backward(dloss)
            del loss  # its memory may be part of a block that the next logits need whole
            self.done += 1
        self.backend.micro_batches = 1
        return self.losses


def merged_levels(done, count):
    """Levels to add to the gradient of call number `done`: its trailing 1 bits, or all 1 bits for the last call."""
    levels = [level for level in range(done.bit_length()) if done >> level & 1]
    if done < count - 1:
        levels = [level for i, level in enumerate(levels) if level == i]
    return levels


class MicroBatches:
    """One rank's `count` micro-batches, divided over its workers; the first worker's sum becomes the rank's gradient.

    parameters: the flat arena buffer that all workers share. tensor_group: the ranks that share each layer. Each worker
    gets a group of its own, because the workers call collectives at the same time. on_complete(name) is called during
    backward when this rank's gradient of a parameter is complete: from any worker's thread, one call at a time, in the
    same order on every rank. Raises ConfigError if `count` is not divisible by the number of workers.

    shape: (B, T) of this rank's batch, by which micro-batches are merged; None: none are merged.
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
        calls, done = count // pool.size // self.merged, self.worker_completed
        self.workers = [
            Worker(config, arena, parameters, backend, calls, tensor_group.split(0), done, self.merged)
            for backend in pool.backends
        ]
        self.gradients = self.workers[0].gradients  # the flat sum of this rank's gradients, after backward()

    def deal(self, inputs, targets, rows, merged=1):
        """Divide inputs, targets (B, T): for each worker a list of (inputs, targets) of its calls, in order.

        A call has `merged` micro-batches. Their sizes are those for a batch of `rows`; if B is smaller, the last
        micro-batches are short or empty.
        """
        calls = self.count // merged
        batches = [(inputs[part], targets[part]) for part in even_slices(rows, calls)]
        return [batches[part] for part in even_slices(calls, self.pool.size)]

    def backward(self, batch, scale, dloss):
        """batch: from deal() -> the losses of the micro-batches in order, arrays of shape () that the next call reuses.

        Writes the flat sum of all gradients, times `dloss`, to `gradients`; read it after `runtime.join()`.
        """
        losses = self.pool.map(lambda worker, own: worker.run(own, scale, dloss), self.workers, batch)
        return [loss for worker in losses for loss in worker]

    def worker_completed(self, name):
        """When the last worker has completed `name`: add the sums of all workers, in blocks that fit in the cache."""
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
        """The losses of the micro-batches of a batch of `rows`, without gradients; 0 for an empty micro-batch."""

        def run(worker, own):
            return [worker.model.loss(x, y, scale).item() if len(x) else 0.0 for x, y in own]

        each = self.pool.map(run, self.workers, self.deal(inputs, targets, rows))  # map() keeps no_grad()
        return [loss for worker in each for loss in worker]

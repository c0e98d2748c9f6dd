"""The gradient of a global batch: the sum over its micro-batches in the canonical order, for any number of workers.

A worker is a thread that runs consecutive micro-batches one after another, or `merged` of them in one call of each
kernel (merged.py). The canonical order adds numbers in a fixed binary tree (tree_sum.py), and a worker
adds one subtree. When backward has passed a unit (a block, for example), its gradients are added to the worker's
partial sums. The worker that is last to complete a unit adds the sums of all workers, and starts the sum over the ranks
(worker_sums.py). If the numbers of workers and ranks are powers of two, the bits of the sum do not depend on them.
"""

import math
from dataclasses import replace

from gpt2core.architecture import unit_names
from gpt2core.data import even_slices
from gpt2core.errors import ConfigError
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.parallel.divided.async_all_gather import NoGather
from gpt2core.parallel.micro_batches.accumulator import Accumulator, compute_passes
from gpt2core.parallel.micro_batches.merged import merged_micro_batches
from gpt2core.parallel.micro_batches.worker_sums import ArenaSums
from gpt2core.parallel.part import forward_pass, parts_of
from gpt2core.parallel.tensor.sliced_units import make_units
from gpt2core.tensor import no_grad


class Worker:
    """One thread's model, with shared parameters, its own backend, and its gradients.

    unit_gradients: the ArenaGradients: where kernels write the gradients of a pass; in every second pass they add them.
    Each pass must reach every parameter: one without a gradient would keep that of an earlier step. Its `work` is the
    Workload of this worker, whose `gradients` receive the sum. group: the ranks that divide each layer. wait(unit) is
    called before the forward pass of a unit.
    """

    def __init__(self, unit_gradients, group, wait):
        work = unit_gradients.work
        self.work, self.backend, self.gradients, self.groups = work, work.backend, work.gradients, [group]
        self.unit_gradients, self.tensors = unit_gradients, unit_gradients.tensors
        units = make_units(unit_names(work.config), work, self.tensors, group)
        hooks = dict(before=wait, completed=self.unit_gradients.completed)
        self.parts = parts_of(units, work.backend, work.recompute, **hooks)

    def run(self, batch, scale, key, losses):
        """batch: [(ids, targets) of each pass]; the sum of their gradients is in `gradients`.

        key, losses: see compute_passes().
        """
        self.unit_gradients.begin()
        compute_passes(self.work, self.parts, batch, scale, key, losses, self.unit_gradients.begin_pass)

    def losses(self, batch, scale):
        """See Accumulator.losses; batch: [(ids, targets) of each micro-batch]."""

        def loss(ids, targets):
            return forward_pass(self.parts, ids, ForwardArguments(targets=targets, scale=scale))[1].item()

        return [loss(ids, targets) if len(ids) else 0.0 for ids, targets in batch]


class ThreadedMicroBatches(Accumulator):
    """One rank's micro-batches, divided over its workers.

    work: a Workload. pool: the WorkerPool, whose first backend is that of `work`. make_worker(number, work) returns a
    worker, with the methods and attributes of Worker. sums: the WorkerSums. barrier: the threading.Barrier at which the
    workers wait for each other, or None. Raises ConfigError unless pool.size divides the number of micro-batches.
    """

    def __init__(self, work, pool, make_worker, sums, barrier=None):
        if work.count % pool.size:
            raise ConfigError(
                f"{work.count} micro-batches per rank are not divisible by {pool.size} threads: "
                f"use `threads={math.gcd(work.count, pool.size)}` or another `micro_batches`"
            )
        super().__init__(work)
        self.pool, self.sums, self.barrier = pool, sums, barrier
        parts = even_slices(work.count, pool.size)
        for number, (backend, part) in enumerate(zip(pool.backends, parts, strict=True)):
            own = replace(work, backend=backend, count=work.count // pool.size, first_rows=work.first_rows[part])
            self.workers.append(make_worker(number, own))
        self.losses_of_workers = [self.loss_arrays[part] for part in parts]

    def compute_gradients(self, batch, scale, key=None):
        def run(worker, part, losses):
            worker.run(part, scale, key, losses)

        self.sums.begin()
        self.pool.map(run, self.workers, batch, self.losses_of_workers, barrier=self.barrier)
        return self.loss_arrays

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        def run(worker, part):
            return worker.losses(part, scale)

        parts = self.deal(inputs, targets, rows)
        losses = self.pool.map(run, self.workers, parts, barrier=self.barrier)  # map() keeps no_grad()
        return [loss for worker in losses for loss in worker]


class MicroBatches(ThreadedMicroBatches):
    """The micro-batches of a rank that has all units.

    tensor_group: the ranks that divide each layer; each worker gets a communicator of its own, because workers call
    collectives at the same time. all_gather: the AsyncAllGather of the parameters, if workers must wait for a unit
    before they read it. on_complete: see ArenaSums. The other arguments are those of ThreadedMicroBatches.
    """

    def __init__(self, work, pool, tensor_group, on_complete, all_gather=None):
        self.all_gather, sums = all_gather or NoGather(), ArenaSums(work, on_complete)

        def make_worker(number, own):
            gradients = sums.of_worker(own, used_twice=own.used_twice)
            return Worker(gradients, tensor_group.split(0), self.all_gather.wait_for_unit)

        merged = merged_micro_batches(work, pool.size, tensor_group)
        super().__init__(replace(work, merged=merged), pool, make_worker, sums)

    def compute_gradients(self, batch, scale, key=None):
        with self.all_gather:  # the previous update may still be sending parameters
            return super().compute_gradients(batch, scale, key)

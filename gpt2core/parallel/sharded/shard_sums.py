"""The gradient of a unit is summed over workers and ranks when it is complete, and a rank keeps its shard."""

from gpt2core.parallel.micro_batches.worker_sums import WorkerSums
from gpt2core.parallel.sharded.unit_gradients import UnitGradients
from gpt2core.tree_sum import tree_reduce


class ShardSums(WorkerSums):
    """The sums of workers that have an array of each unit that they compute; those of the first worker are sent.

    work: the Workload of the rank. Its layout is a UnitShards, and its `gradients` receive this rank's shards of the
    sum over workers and ranks.

    On a GPU, kernels write the gradients on a side stream. send() starts after all of them, on both streams. The main
    stream allocates the arrays and reuses their memory; before that, wait() lets it wait for the reduce-scatter. A
    group of one only copies, on the side stream, so finish() also lets the main stream wait for that stream.
    """

    def __init__(self, work):
        super().__init__()
        self.gradients, self.shards, self.backend = work.gradients, work.layout, work.backend
        self.sending = []  # (Handle of a reduce-scatter, the array that it reads)

    def of_worker(self, work, parameters, used_twice=()):
        """See WorkerSums.of_worker; a UnitGradients. parameters: the WorkerParameters."""
        each = UnitGradients(work, parameters.tensors, parameters.reads, self.worker_completed, used_twice)
        self.workers.append(each)
        return each

    def begin(self, batch=()):
        """Called before the passes of a step: forget a step that has failed, and wait for what it has sent."""
        super().begin()
        self.finish()

    def complete(self, unit):
        arrays = [each.take(unit) for each in self.workers]
        self.send(unit, tree_reduce(arrays, lambda a, b: self.backend.xp.add(a, b, out=a)))

    def send(self, unit, array):
        """Start the reduce-scatter of a unit's gradients, after that of the unit before it has ended."""
        self.wait()
        out = self.gradients[self.shards.parts[unit]]
        with self.backend.runtime.after(array):
            self.sending.append((self.shards.group.reduce_scatter_start(array, out=out), array))

    def wait(self):
        """Wait for the sums over the ranks that were started."""
        while self.sending:
            self.sending.pop()[0].wait()

    def finish(self):
        """Return when the shards of all units that were sent are in `gradients`."""
        self.wait()
        self.backend.runtime.join()

"""The parameters of a unit are gathered once for all worker threads of a rank, which compute the same unit together."""

import threading

from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.sharded.unit_parameters import UnitParameters


class SharedParameters:
    """The UnitParameters `whole` of a rank, for `threads` workers that read the same units in the same order.

    Before each unit all workers meet at `barrier`: then none of them reads a unit that is freed. The last one gathers,
    while the others wait. work: the Workload of the rank, whose layout is a UnitShards. reads, keeps: see
    UnitParameters.
    """

    def __init__(self, work, reads, keeps, threads):
        self.tensors = {name: SharedTensor() for name in work.arena.shapes}
        self.whole = UnitParameters(work.layout, work.parameters, self.tensors, reads, keeps)
        self.workers, self.barrier = [], threading.Barrier(threads, self.need)

    def of_worker(self, backend):
        """The WorkerParameters of one more worker."""
        tensors = {name: tensor.of_worker(backend) for name, tensor in self.tensors.items()}
        self.workers.append(WorkerParameters(self.barrier, tensors, self.whole.reads))
        return self.workers[-1]

    def reading(self, order):
        """See UnitParameters.reading(). Called while no worker runs."""
        self.barrier.reset()  # an error may have broken it
        for each in self.workers:
            each.unit = None
        return self.whole.reading(order)

    def gather(self, unit):
        """See UnitParameters.gather(). Called while no worker runs."""
        self.whole.gather(unit)

    def need(self):
        """Called by the last worker that enters the barrier."""
        unit, *others = {each.unit for each in self.workers}
        if others:
            raise ValueError(f"the workers of a rank must read the same unit, not {unit} and {others[0]}")
        self.whole.need(unit)


class WorkerParameters:
    """The parameters as one worker reads them: `tensors` {name: Parameter}, with its own backend and gradients."""

    def __init__(self, barrier, tensors, reads):
        self.barrier, self.tensors, self.reads, self.unit = barrier, tensors, reads, None

    def need(self, unit):
        """Return when the parameters of a unit are whole. A second call for the same unit does nothing."""
        if unit != self.unit:
            self.unit = unit
            self.barrier.wait()


class SharedTensor:
    """A parameter whose `data` is that of the Parameters of all workers."""

    def __init__(self):
        self.array, self.parameters = None, []

    def of_worker(self, backend):
        """The Parameter of one more worker."""
        self.parameters.append(Parameter(self.array, backend))
        return self.parameters[-1]

    @property
    def data(self):
        return self.array

    @data.setter
    def data(self, array):
        self.array = array
        for each in self.parameters:
            each.data = array

"""The parameters of a unit are gathered before the unit is computed, and freed after it, or after the step (ZeRO-2)."""

import contextlib
from dataclasses import dataclass


class WholeParameters:
    """The parameters of a rank that keeps them whole: nothing is gathered, and no worker waits.

    It has the methods of SharedParameters, and for each worker those of WorkerParameters.
    """

    barrier = None

    def of_worker(self, backend):
        return self

    def reading(self, order):
        return contextlib.nullcontext()

    def need(self, unit):
        """Return at once."""

    def gather(self, unit):
        """Return at once."""


class UnitParameters:
    """The whole parameters of a few units, gathered from the shards of all ranks.

    shards: a UnitShards. flat: this rank's shards. tensors: {name: Tensor}; the data of a tensor of a unit that is not
    gathered is NotInMemory. reads: {unit: the units whose parameters it reads}: itself, and for the head of a tied
    model also the embedding. keeps: whether a unit that was gathered stays until the end of reading() (ZeRO-2).

    On a GPU, the communication stream writes to an array, and only the main stream reads it: start() allocates it on
    the main stream, so it is written after all earlier readers of its memory; wait() lets the main stream wait for it;
    when it is freed, all kernels that read it are launched on the main stream, the only one that reuses its memory.
    """

    def __init__(self, shards, flat, tensors, reads, keeps):
        self.shards, self.flat, self.tensors, self.reads, self.keeps = shards, flat, tensors, reads, keeps
        self.current, self.next, self.following = None, None, iter([])  # units: read now, the next one, those after it
        self.gathered = {}  # {unit: (the array of its parameters, Handle of the all-gather)}
        for unit in shards.parts:
            self.clear(unit)

    @contextlib.contextmanager
    def reading(self, order):
        """In this context, need() may be called for the units in `order`, a list. All ranks must have the same list."""
        self.free(list(self.gathered))  # of a pass that has failed
        self.current, self.following = None, iter([*order, None])
        self.next = next(self.following)
        yield
        self.free(list(self.gathered))

    def need(self, unit):
        """Return when the parameters of a unit are whole; start to gather those of the next one in the order.

        Unless `keeps`, the other units are freed first. A second call for the same unit does nothing.
        """
        if unit == self.current:
            return
        if unit != self.next:
            raise ValueError(f"unit {unit} is read before {self.next}, which is next in the order of reading()")
        self.current, self.next = unit, next(self.following)
        while self.next == unit:
            self.next = next(self.following)
        soon = self.reads.get(self.next, [])
        if not self.keeps:
            self.free([each for each in self.gathered if each not in (*self.reads[unit], *soon)])
        for each in self.reads[unit]:
            self.start(each)
            self.gathered[each][1].wait()
        for each in soon:
            self.start(each)

    def gather(self, unit):
        """Return when the parameters of a unit are whole; they are freed as in need()."""
        self.start(unit)
        self.gathered[unit][1].wait()

    def start(self, unit):
        """Start to gather a unit, unless that was done."""
        if unit not in self.gathered:
            array = self.shards.allocate(unit, self.flat.dtype)
            handle = self.shards.group.all_gather_start(self.flat[self.shards.parts[unit]], out=array)
            self.gathered[unit] = array, handle
            for name, view in self.shards.views(unit, array).items():
                self.tensors[name].data = view

    def free(self, units):
        for unit in units:
            self.gathered.pop(unit)[1].wait()
            self.clear(unit)

    def clear(self, unit):
        for name in self.shards.arena.units[unit]:
            self.tensors[name].data = NotInMemory(self.shards.arena.shapes[name], self.flat.dtype)


@dataclass(frozen=True)
class NotInMemory:
    """The shape and the dtype of an array that is not in memory. A kernel that reads it raises an error."""

    shape: tuple
    dtype: object

    def __len__(self):
        return self.shape[0]

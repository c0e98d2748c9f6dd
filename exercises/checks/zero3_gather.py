"""Checks of exercise 1.7: which units are gathered and freed when, and training with ZeRO-3 and ZeRO-2."""

from types import SimpleNamespace

import numpy as np

from exercises.checks.common import expect_same_training
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.communicator import Handle
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.sharded.unit_parameters import NotInMemory

UNITS = "embedding", "h.0", "h.1", "head"
LENGTH, RANKS = 6, 2  # of a shard


class Shards:
    """What UnitParameters reads of a UnitShards: units of one parameter "UNIT.w", whose array is UnitShards.allocate's.

    events: ("start", unit), ("wait", unit) of the all-gathers.
    """

    def __init__(self):
        self.parts = {unit: slice(i * LENGTH, (i + 1) * LENGTH) for i, unit in enumerate(UNITS)}
        shapes = {f"{unit}.w": (3, 4) for unit in UNITS}
        self.arena = SimpleNamespace(units={unit: [f"{unit}.w"] for unit in UNITS}, shapes=shapes)
        self.group, self.events, self.owner = self, [], {}

    def allocate(self, unit, dtype):
        array = np.full(RANKS * LENGTH, np.nan, dtype)
        self.owner[id(array)] = unit, array  # kept, so that no id is used twice
        return array

    def views(self, unit, array):
        return {f"{unit}.w": array.reshape(3, 4)}

    def all_gather_start(self, x, out=None):
        unit = UNITS[int(x[0]) // LENGTH]
        if out is None or id(out) not in self.owner or self.owner[id(out)][0] != unit:
            raise Mismatch(f"the all-gather of {unit} does not write to the array that was allocated for it",
                           "Use out=array, with array = self.shards.allocate(unit, self.flat.dtype).")  # fmt: skip
        if not np.array_equal(x, np.arange(len(UNITS) * LENGTH)[self.parts[unit]]):
            raise Mismatch(
                f"the all-gather of {unit} does not send its shard", "Send self.flat[self.shards.parts[unit]]."
            )
        self.events.append(("start", unit))
        return Arrival(self, unit, x, out)


class Arrival(Handle):
    """The handle of an all-gather, which writes its result in wait()."""

    def __init__(self, shards, unit, x, out):
        super().__init__(out)
        self.pending = shards, unit, x, out

    def wait(self):
        if self.pending:
            (shards, unit, x, out), self.pending = self.pending, None
            out[...] = np.concatenate([x, 100 + x])
            shards.events.append(("wait", unit))
        return self._result


class Recorded:
    """The student's UnitParameters, with the events of its all-gathers."""

    def __init__(self, keeps=False, tied=False):
        from gpt2core.parallel.sharded.unit_parameters import UnitParameters

        self.shards = Shards()
        flat = np.arange(len(UNITS) * LENGTH, dtype=np.float64)
        self.tensors = {f"{unit}.w": SimpleNamespace(data=None) for unit in UNITS}
        reads = {unit: [unit] for unit in UNITS} | ({"head": ["head", "embedding"]} if tied else {})
        self.parameters = UnitParameters(self.shards, flat, self.tensors, reads, keeps)

    def in_memory(self):
        return [unit for unit in UNITS if isinstance(self.tensors[f"{unit}.w"].data, np.ndarray)]

    def need(self, unit):
        """The events of need(unit), after a check that the parameters of the unit are whole."""
        before = len(self.shards.events)
        self.parameters.need(unit)
        data, first = self.tensors[f"{unit}.w"].data, UNITS.index(unit) * LENGTH
        if not isinstance(data, np.ndarray):
            raise Mismatch(
                f"after need({unit!r}), its tensor has no array", "Set tensor.data to the view of the array."
            )
        x = np.arange(first, first + LENGTH)
        wrong = [(np.full((3, 4), np.nan), "need() returns before the all-gather is complete: wait for its handle.")]
        want = np.concatenate([x, 100.0 + x]).reshape(3, 4)
        expect(f"after need({unit!r}), its parameters", data, want, 0, wrong, "start() and need()")
        return self.shards.events[before:]


PASS = [*UNITS, *reversed(UNITS)]
CALLS = [*UNITS, *reversed(UNITS[:-1])]  # the head's backward pass follows its forward pass


def gather_before_use():
    recorded = Recorded()
    with recorded.parameters.reading(PASS):
        first = recorded.need("embedding")
        wrong = [
            (
                [("start", "embedding"), ("wait", "embedding")],
                "The next unit is not gathered ahead: start it in need().",
            ),
            (
                [("start", "embedding"), ("wait", "embedding"), ("start", "h.0"), ("wait", "h.0")],
                "need() waits for the next unit: only start it, so that it is sent while this unit is computed.",
            ),
        ]
        want = [("start", "embedding"), ("wait", "embedding"), ("start", "h.0")]
        expect_equal("the all-gathers of need('embedding')", first, want, wrong, "need()")
        second = recorded.need("h.0")
        wrong = [
            (
                [("start", "h.0"), ("wait", "h.0"), ("start", "h.1")],
                "A unit that was started is gathered twice: see start().",
            ),
            ([], "need() does not wait for a unit that was started ahead."),
        ]
        waits = [event for event in second if event != ("wait", "embedding")]  # free() may wait again
        expect_equal("the all-gathers of need('h.0')", waits, [("wait", "h.0"), ("start", "h.1")], wrong, "need()")
        again = recorded.need("h.0")
        expect_equal("the all-gathers of a second need('h.0')", again, [], (), "the first lines of need()")


def free_after_use():
    recorded = Recorded()
    with recorded.parameters.reading(PASS):
        for unit, following in zip(CALLS, [*CALLS[1:], None], strict=True):
            recorded.need(unit)
            want, kept = [each for each in UNITS if each in (unit, following)], list(UNITS[: UNITS.index(unit) + 2])
            wrong = [
                ([unit], "The next unit is freed or not yet started: it stays."),
                (kept, "No unit is freed: the units that neither this unit nor the next one reads are freed."),
            ]
            expect_equal(
                f"the units in memory after need({unit!r})", recorded.in_memory(), want, wrong, "need(), free()"
            )
    expect_equal("the units in memory after the pass", recorded.in_memory(), [], (), "free()")
    absent = recorded.tensors["h.0.w"].data
    expect_equal(
        "the data of a tensor that was freed", absent, NotInMemory((3, 4), np.dtype(np.float64)), (), "clear()"
    )
    counts = {unit: recorded.shards.events.count(("start", unit)) for unit in UNITS}
    want = {"embedding": 2, "h.0": 2, "h.1": 1, "head": 1}
    expect_equal("how often each unit is gathered in forward and backward", counts, want, (), "need() and free()")


def tied_and_kept_units():
    recorded = Recorded(tied=True)
    with recorded.parameters.reading(PASS):
        for unit in PASS[:3]:
            recorded.need(unit)
        ahead = recorded.in_memory()
        hint = "A tied head reads the embedding too: self.reads[unit] is a list, and each of its units is gathered."
        expect_equal("the units in memory before a tied head", ahead, ["embedding", "h.1", "head"],
                     [(["h.1", "head"], hint)], "need()")  # fmt: skip
        recorded.need("head")
        recorded.need("head")
    recorded = Recorded(keeps=True)
    with recorded.parameters.reading(PASS):
        for unit in PASS:
            recorded.need(unit)
        hint = "With `keeps` (ZeRO-2) no unit is freed before the end of the pass."
        expect_equal(
            "with keeps, the units in memory", recorded.in_memory(), list(UNITS), [(["embedding"], hint)], "need()"
        )
    starts = [event for event in recorded.shards.events if event[0] == "start"]
    expect_equal("with keeps, the number of all-gathers", len(starts), len(UNITS), (), "start()")


def sharded_training():
    look = "need, start and free: is each unit gathered before it is read, and only then?"
    expect_same_training(ParallelConfig(zero=3), look)
    expect_same_training(ParallelConfig(zero=2), look)

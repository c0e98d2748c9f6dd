"""Record the collectives of stage 1: which slice of an array is on which rank after each message, in bytes.

The functions of stage1_mpi/collectives.py run on the ranks of a ThreadCommunicator. A Recorder stands between the two.
It notes each message and, at each call, the content of the rank's arrays. The content names its origin: rank r of p
fills slice j with 2^(p j + r). So bit r of a sum's element says whether rank r is included, and the position of the
group of p bits is the number of the slice.

Frames are logical times (Lamport, 1978): a message that is sent at time t arrives at time t + 1 or later. In the ring,
all messages of a round have the same time, so a frame is a round.
"""

import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from gpt2core.app.presets import PRESETS
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.communicator import Handle
from gpt2core.data import Windows, even_slices
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided_arena import DividedArena
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi import collectives

BUFFERS = "temporary buffers"
FOUR_BUFFERS = (
    "A rank has at most four temporary buffers of one slice: two alternate for its partial sums, and into two others "
    "it receives messages."
)
MOMENTS = 2  # AdamW has two moments for each parameter
MAX_RANKS = 4  # fp32 holds integers below 2^24, and p ranks need p^2 bits


class Messages:
    """The messages of all ranks. sent: [{"time", "from", "to", "bytes", "slice", "ranks"}]."""

    def __init__(self):
        self.sent, self.lock = [], threading.Lock()
        self.times = defaultdict(deque)  # {(source, to): times of the messages that were not received}

    def send(self, message):
        with self.lock:
            self.sent.append(message)
            self.times[message["from"], message["to"]].append(message["time"])

    def receive(self, source, to):
        """The time at which the oldest message from `source` to `to` was sent."""
        with self.lock:
            return self.times[source, to].popleft()


class Recorder:
    """A Communicator with only send_start and recv_start, which notes every call.

    arrays: {name: (array of this rank, number of slices in it)}. Other arrays in messages are temporary buffers.
    """

    def __init__(self, comm, messages, arrays):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.messages, self.arrays, self.time = messages, arrays, 0
        self.buffers, self.states = {}, {}  # {id: weak reference of a temporary buffer}; {time: state of this rank}
        self.note()

    def send_start(self, x, to, tag=0):
        self.keep(x)
        self.note()
        number, ranks = decoded(x, self.size)
        message = {"from": self.rank, "to": to, "bytes": x.nbytes, "slice": number, "ranks": ranks}
        self.messages.send(message | {"time": self.time})
        return Recorded(self, self.comm.send_start(x, to, tag), None)

    def recv_start(self, out, source, tag=0):
        self.keep(out)
        self.note()
        return Recorded(self, self.comm.recv_start(out, source, tag), source)

    def keep(self, x):
        """Note the temporary buffer that contains x, if x is not in one of the named arrays."""
        whole = x if x.base is None else x.base
        if not any(np.may_share_memory(x, array) for array, _ in self.arrays.values()):
            self.buffers[id(whole)] = weakref.ref(whole)

    def note(self):
        """Save the content of the arrays at the present time, and the largest size of the buffers at this time."""
        buffers = sum(array.nbytes for reference in self.buffers.values() if (array := reference()) is not None)
        before = self.states.get(self.time, {"buffers": 0})
        cells = {name: cells_of(array, count, self.size) for name, (array, count) in self.arrays.items()}
        self.states[self.time] = {"cells": cells, "buffers": max(buffers, before["buffers"])}

    def advance(self):
        """Begin a new frame."""
        self.note()
        self.time += 1


class Recorded(Handle):
    """The handle of a recorded message. source: the sender, or None for a send."""

    def __init__(self, recorder, handle, source):
        self.recorder, self.handle, self.source = recorder, handle, source

    def wait(self):
        recorder = self.recorder
        recorder.note()
        self.handle.wait()
        if self.source is not None:
            sent = recorder.messages.receive(self.source, recorder.rank)
            recorder.time = max(recorder.time, sent + 1)
            self.source = None


def marked(size, rank, ranks):
    """An array (size) of this rank whose slice j has the elements 2^(ranks * j + rank)."""
    array = np.empty(size, np.float32)
    for number, part in enumerate(even_slices(size, ranks)):
        array[part] = 2.0 ** (ranks * number + rank)
    return array


def decoded(x, ranks):
    """(number of the slice, [the ranks that x contains]) of marked elements; (None, []) for zeros.

    Raises ValueError if the elements of x differ.
    """
    value = int(x.flat[0])
    if not np.all(x == value):
        raise ValueError("a message or a slice has elements of several slices")
    if not value:
        return None, []
    number = (value.bit_length() - 1) // ranks
    return number, [rank for rank in range(ranks) if value >> (ranks * number + rank) & 1]


def cells_of(array, count, ranks):
    """[(number of the slice, ranks) of each of `count` slices of the array]."""
    return [decoded(array[part], ranks) for part in even_slices(array.size, count)]


# -- the recorded algorithms -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneRank:
    """What one rank recorded. phases: [(first frame, name)]; fixed: {name: bytes of an array without slices}."""

    states: dict
    phases: list
    sizes: dict  # {name of an array: bytes}
    fixed: dict


def finished(recorder, phases, fixed=None):
    recorder.note()
    sizes = {name: array.nbytes for name, (array, _) in recorder.arrays.items()}
    return OneRank(recorder.states, phases, sizes, fixed or {})


def ring_all_reduce(comm, messages, size):
    """The ring all-reduce of the gradients, in place, as with `--collectives ring`."""
    gradients = marked(size, comm.rank, comm.size)
    recorder = Recorder(comm, messages, {"gradients": (gradients, comm.size)})
    collectives.all_reduce(recorder, gradients, out=gradients, algorithm="ring")
    return finished(recorder, [(0, "reduce-scatter phase"), (comm.size - 1, "all-gather phase")])


def ring_reduce_scatter(comm, messages, size):
    """The reduce-scatter of the ring: rank r ends with slice r of the sum."""
    gradients, own = marked(size, comm.rank, comm.size), np.zeros(size // comm.size, np.float32)
    recorder = Recorder(comm, messages, {"gradients": (gradients, comm.size), "own slice of the sum": (own, 1)})
    collectives.reduce_scatter(recorder, gradients, out=own, algorithm="ring")
    return finished(recorder, [(0, "reduce-scatter")])


def zero_1(comm, messages, size):
    """A step of ZeRO-1: reduce-scatter the gradients, update the own slice of the parameters, all-gather the slices.

    The parameters are zeros before the update; the update of rank r writes its mark into slice r.
    """
    own = even_slices(size, comm.size)[comm.rank]
    parameters, gradients = np.zeros(size, np.float32), marked(size, comm.rank, comm.size)
    arrays = {"gradients": (gradients, comm.size), "parameters": (parameters, comm.size)}
    recorder = Recorder(comm, messages, arrays)
    collectives.reduce_scatter(recorder, gradients, out=gradients[own], algorithm="ring")
    recorder.advance()
    phases = [(0, "reduce-scatter of the gradients"), (recorder.time, "AdamW on the own slice")]
    parameters[own] = marked(size, comm.rank, comm.size)[own]
    recorder.advance()
    phases.append((recorder.time, "all-gather of the parameters"))
    collectives.all_gather(recorder, parameters[own], out=parameters)
    return finished(recorder, phases, {"AdamW moments of the own slice": MOMENTS * parameters[own].nbytes})


RECORDINGS = {  # {name: (title, function, what the reader sees)}
    "ring": (
        "ring all-reduce",
        ring_all_reduce,
        "In every round each rank sends one slice to its right neighbour. In the first p - 1 rounds the receiver adds "
        "its own slice; in the last p - 1 rounds the finished slices are copied.",
    ),
    "reduce-scatter": (
        "reduce-scatter",
        ring_reduce_scatter,
        "The first phase of the ring. After p - 1 rounds, rank r has slice r of the sum. " + FOUR_BUFFERS,
    ),
    "zero-1": (
        "ZeRO-1",
        zero_1,
        "Each rank has the AdamW moments of one slice. It receives the summed gradient of this slice and updates this "
        "slice of the parameters. An all-gather copies all updated slices to all ranks. " + FOUR_BUFFERS,
    ),
}


def record(name, ranks=MAX_RANKS, preset="nano"):
    """Run one of RECORDINGS on `ranks` threads; return its title, sizes and frames as JSON data.

    A frame has the messages that are sent at its time and, for each rank, the state at this time: "cells" {array:
    [(slice, ranks that it contains)]} and "bytes" {array: bytes}.
    """
    title, function, text = RECORDINGS[name]
    size, messages = DividedArena(parameter_shapes(PRESETS[preset]), ranks).size, Messages()
    results = run_ranks(ranks, lambda comm: function(comm, messages, size))
    times = range(max(max(result.states) for result in results) + 1)
    frames = [
        {
            "phase": [name for start, name in results[0].phases if start <= time][-1],
            "messages": sorted((m for m in messages.sent if m["time"] == time), key=lambda message: message["from"]),
            "ranks": [state_at(result, time) for result in results],
        }
        for time in times
    ]
    return {"title": title, "text": text, "preset": preset, "bytes": 4 * size, "ranks": ranks, "frames": frames}


def state_at(result, time):
    """The last state of a rank that is not later than `time`, with the bytes of its arrays."""
    state = result.states[max(each for each in result.states if each <= time)]
    return {"cells": state["cells"], "bytes": result.sizes | result.fixed | {BUFFERS: state["buffers"]}}


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------

ZERO_3 = (
    "One training step. A rank stores its shard of each unit of the model: a quarter of the parameters, gradients and "
    "moments. An all-gather makes a unit whole while the unit before it is computed, and it is freed after its use. In "
    "backward, a reduce-scatter leaves each rank its shard of the summed gradients."
)


class UnitRecorder:
    """Notes what a rank of ShardedMicroBatches holds after each call of its Parts; all ranks hold the same units.

    frames: as those of record(). A slice is a unit of the model, and a cell is (unit, ranks that it contains, None or
    the rank whose shard it is).
    """

    def __init__(self, accumulator, ranks):
        self.parameters, self.gradients = accumulator.parameters, accumulator.unit_gradients
        self.shards, self.everyone, self.frames, self.summed = accumulator.shards, list(range(ranks)), [], []
        for part in accumulator.parts:
            part.before = self.after(part.before, "forward")
            part.before_backward = self.after(part.before_backward, "backward")
            part.completed = self.complete(part.completed)
        self.note("before the step")

    def after(self, call, phase):
        return lambda unit: (call(unit), self.note(f"{phase} of {unit}"))

    def complete(self, call):
        def completed(unit):
            self.note(f"reduce-scatter of the gradients of {unit}", [(unit, "gradients")])
            call(unit)
            self.summed.append(unit)

        return completed

    def note(self, phase, moving=None):
        """Append a frame. moving: the (unit, array) that are sent; without them, the units that are being gathered."""
        ranks, read = self.everyone, self.parameters.reads.get(self.parameters.current, ())
        whole = [unit for unit in self.parameters.gathered if unit in read]
        moving = moving or [(unit, "parameters") for unit in self.parameters.gathered if unit not in whole]
        sizes = {unit: 4 * self.shards.whole_size(unit) for unit in self.shards.parts}
        messages = [
            {"from": a, "to": b, "slice": unit, "ranks": [a], "array": array, "bytes": sizes[unit] // len(ranks)}
            for unit, array in moving for a in ranks for b in ranks if a != b
        ]  # fmt: skip
        sent = sum(array.nbytes for _, array in self.gradients.sending)
        held = {
            "shards of parameters, gradients and moments": 4 * (2 + MOMENTS) * self.shards.size,
            "whole parameters": sum(sizes[unit] for unit in self.parameters.gathered),
            "whole gradients": sum(sizes[unit] for unit in self.gradients.sums) + sent,
        }
        states = [{"cells": self.cells(rank, whole), "bytes": held} for rank in ranks]
        self.frames.append({"phase": phase, "messages": messages, "ranks": states})

    def cells(self, rank, whole):
        def gradient(unit):
            own = (self.everyone, rank) if unit in self.summed else ([], None)
            return ([rank], None) if unit in self.gradients.sums else own

        units = self.shards.parts
        return {
            "parameters": [(unit, *((self.everyone, None) if unit in whole else ([rank], rank))) for unit in units],
            "gradients": [(unit, *gradient(unit)) for unit in units],
        }


def zero_3(ranks=MAX_RANKS, preset="nano"):
    """One step of a Trainer with ZeRO-3 on `ranks` threads, as record() returns it; see UnitRecorder."""
    config = PRESETS[preset]
    sizes = {"batch_size": ranks, "seq_len": config.block_size, "micro_batches": ranks}

    def step(comm):
        trainer = Trainer(config, [NumpyBackend()], world=comm, parallel=ParallelConfig(zero=3), **sizes)
        recorder = UnitRecorder(trainer.accumulator, ranks)
        tokens = np.arange(ranks * config.block_size + 1, dtype=np.int32) % config.vocab_size
        trainer.step(read_batch(trainer, Windows(tokens, config.block_size)), 1e-3)
        recorder.note("AdamW on the own shards")
        return recorder.frames

    frames, *_ = run_ranks(ranks, step)
    size = 4 * Arena(parameter_shapes(config)).size
    return {"title": "ZeRO-3", "text": ZERO_3, "preset": preset, "bytes": size, "ranks": ranks, "frames": frames}


def record_all(ranks=MAX_RANKS, preset="nano"):
    """{name: record(name)} of all recordings, and zero_3()."""
    return {name: record(name, ranks, preset) for name in RECORDINGS} | {"zero-3": zero_3(ranks, preset)}

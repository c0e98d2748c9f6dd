"""Record the collectives of stage 1 and a step of ZeRO-3: which slice of an array is on which rank, in bytes.

The functions of stage1_mpi/collectives.py run on the ranks of a ThreadCommunicator. A Recorder stands between the two.
It notes each message and the content of the rank's arrays. The content names its origin: rank r of p fills slice j with
2^(p j + r). So bit r of a sum's element says whether rank r is included, and the position of the group of p bits is the
number of the slice.

A rank's time is the number of messages that it has received. In the ring, each rank receives one message per round, so
a frame is a round: {"phase", "messages": [{"from", "to", "bytes", "slice", "ranks"}], "ranks": [{"cells": {array:
[(slice, ranks that it contains)]}, "bytes": {array: bytes}} for each rank]}.
"""

import weakref
from types import SimpleNamespace

import numpy as np

from benchmarks.report.units import amount
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.data import Windows, even_slices
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi import collectives

BUFFERS = "temporary buffers"
MOMENTS = 2  # AdamW has two moments for each parameter
MAX_RANKS = 4  # fp32 holds integers below 2^24, and p ranks need p^2 bits


class Recorder:
    """A Communicator with only send_start and recv_start, which notes what a rank sends and has at each time.

    arrays: {name: (array of this rank, number of slices in it)}; the first one has a slice for each rank. Other arrays
    in messages are temporary buffers. sizes: {name: bytes}. phases: {first time: name}.
    """

    def __init__(self, comm, arrays):
        self.comm, self.rank, self.size, self.arrays = comm, comm.rank, comm.size, arrays
        self.sizes = {name: array.nbytes for name, (array, _) in arrays.items()}
        self.time, self.sent, self.states, self.phases = 0, [[]], [], {}  # sent, states: of each time
        self.buffers = weakref.WeakValueDictionary()  # {id: temporary buffer}

    def begin(self, phase):
        """Begin a phase, at a new time if it is not the first."""
        if self.phases:
            self.next_time()
        self.phases[self.time] = phase

    def send_start(self, x, to, tag=0):
        self.find_buffer(x)
        number, ranks = decoded(x, self.size)
        self.sent[-1].append({"from": self.rank, "to": to, "bytes": x.nbytes, "slice": number, "ranks": ranks})
        return self.comm.send_start(x, to, tag)

    def recv_start(self, out, source, tag=0):
        self.find_buffer(out)
        started = self.comm.recv_start(out, source, tag)
        return SimpleNamespace(wait=lambda: (self.next_time(), started.wait()))

    def find_buffer(self, message):
        """Remember the array of a message if it is not in one of the named arrays."""
        if not any(np.may_share_memory(message, array) for array, _ in self.arrays.values()):
            whole = message if message.base is None else message.base
            self.buffers[id(whole)] = whole

    def next_time(self):
        """Save the state of the rank at the present time; the next time begins."""
        cells = {
            name: [decoded(array[part], self.size) for part in even_slices(array.size, count)]
            for name, (array, count) in self.arrays.items()
        }
        named, sent = sum(cells.values(), []), [(each["slice"], each["ranks"]) for each in self.sent[-1]]
        inside = [cell for cell in sent if cell not in named]  # what is sent from no named array is in a buffer
        size = sum(array.nbytes for array in self.buffers.values())
        array, count = next(iter(self.arrays.values()))
        cells[BUFFERS] = inside + [(None, [])] * (size * count // array.nbytes - len(inside))
        self.states.append({"cells": cells, "bytes": self.sizes | {BUFFERS: size}})
        self.sent.append([])
        self.time += 1


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


# -- the recorded algorithms: each takes a communicator and the gradients of a rank, and returns its Recorder ----------
# The docstring is the explanation that the page shows.


def ring_all_reduce(comm, gradients):
    """In every round each rank sends one slice to its right neighbour. In the first p − 1 rounds the receiver adds its
    own slice; in the last p − 1 rounds the finished slices are copied."""
    recorder = Recorder(comm, {"gradients": (gradients, comm.size)})
    recorder.phases = {0: "reduce-scatter phase", comm.size - 1: "all-gather phase"}
    collectives.all_reduce(recorder, gradients, out=gradients, algorithm="ring")
    return recorder


def reduce_scatter(comm, gradients):
    """The first phase of the ring. After p − 1 rounds, rank r has slice r of the sum. A rank has at most four temporary
    buffers: two alternate for its partial sums, and into two others it receives messages."""
    own = np.zeros(gradients.size // comm.size, np.float32)
    recorder = Recorder(comm, {"gradients": (gradients, comm.size), "own slice of the sum": (own, 1)})
    recorder.begin("reduce-scatter")
    collectives.reduce_scatter(recorder, gradients, out=own, algorithm="ring")
    return recorder


def zero_1(comm, gradients):
    """Each rank has the AdamW moments of one slice. It receives the summed gradient of this slice and updates this
    slice of the parameters. An all-gather copies all updated slices to all ranks."""
    own, parameters = even_slices(gradients.size, comm.size)[comm.rank], np.zeros_like(gradients)
    arrays = {"gradients": (gradients, comm.size), "parameters": (parameters, comm.size)}
    recorder = Recorder(comm, arrays)
    recorder.sizes["AdamW moments of the own slice"] = MOMENTS * parameters[own].nbytes
    mark = gradients[own].copy()
    recorder.begin("reduce-scatter of the gradients")
    collectives.reduce_scatter(recorder, gradients, out=gradients[own], algorithm="ring")
    recorder.begin("AdamW on the own slice")
    parameters[own] = mark  # the update of rank r writes its mark into slice r, which had zeros
    recorder.begin("all-gather of the parameters")
    collectives.all_gather(recorder, parameters[own], out=parameters)
    return recorder


RECORDINGS = {"ring all-reduce": ring_all_reduce, "reduce-scatter": reduce_scatter, "ZeRO-1": zero_1}


def record(title, ranks=MAX_RANKS, preset="nano"):
    """Run one of RECORDINGS on `ranks` threads; return its title, sizes and frames as JSON data."""
    size = DividedArena(parameter_shapes(PRESETS[preset]), ranks).size

    def run(comm):
        marks = 2.0 ** (ranks * np.arange(ranks) + comm.rank)
        recorder = RECORDINGS[title](comm, np.repeat(marks, size // ranks).astype(np.float32))
        recorder.next_time()
        return recorder

    recorders, frames, phase = run_ranks(ranks, run), [], ""
    for time in range(recorders[0].time):
        phase = recorders[0].phases.get(time, phase)
        messages = [message for each in recorders for message in each.sent[time]]
        frames.append({"phase": phase, "messages": messages, "ranks": [each.states[time] for each in recorders]})
    return recorded(title, RECORDINGS[title].__doc__, preset, 4 * size, frames)


def recorded(title, text, preset, size, frames):
    """A view of the step player. size: bytes of all parameters."""
    text = (
        f"{' '.join(text.split())} Recorded from arrays of {amount(size)} (preset {preset}). A slice has the colour of "
        "the rank that it comes from; a sum has the stripes of all its ranks."
    )
    return {"group": "collectives and ZeRO", "title": title, "text": text, "bytes": size, "frames": frames}


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------


class UnitRecorder:
    """Notes what a rank of ShardedMicroBatches holds after each call of its Parts; all ranks hold the same units.

    frames: as above. A slice is a unit of the model. A cell is (unit, ranks that it contains, None or the rank whose
    shard it is).
    """

    def __init__(self, accumulator, ranks):
        (worker,) = accumulator.workers
        self.parameters, self.gradients = accumulator.parameters.whole, worker.unit_gradients
        self.sending, self.shards = accumulator.sums.sending, accumulator.work.layout
        self.ranks, self.frames, self.summed = list(range(ranks)), [], []
        for part in worker.parts:
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
        ranks, read = self.ranks, self.parameters.reads.get(self.parameters.current, ())
        whole = [unit for unit in self.parameters.gathered if unit in read]
        moving = moving or [(unit, "parameters") for unit in self.parameters.gathered if unit not in whole]
        sizes = {unit: 4 * self.shards.whole_size(unit) for unit in self.shards.parts}
        messages = [
            {"from": a, "to": b, "slice": unit, "ranks": [a], "array": array, "bytes": sizes[unit] // len(ranks)}
            for unit, array in moving for a in ranks for b in ranks if a != b
        ]  # fmt: skip
        held = {
            "shards of parameters, gradients and moments": 4 * (2 + MOMENTS) * self.shards.size,
            "whole parameters": sum(sizes[unit] for unit in self.parameters.gathered),
            "whole gradients": sum(sizes[unit] for unit in self.gradients.sums)
            + sum(x.nbytes for _, x in self.sending),
        }
        states = []
        for rank in ranks:
            sums = dict.fromkeys(self.summed, (ranks, rank)) | dict.fromkeys(self.gradients.sums, ([rank], None))
            parameters = [(unit, *((ranks, None) if unit in whole else ([rank], rank))) for unit in sizes]
            gradients = [(unit, *sums.get(unit, ([], None))) for unit in sizes]
            states.append({"cells": {"parameters": parameters, "gradients": gradients}, "bytes": held})
        self.frames.append({"phase": phase, "messages": messages, "ranks": states})


def zero_3(ranks=MAX_RANKS, preset="nano"):
    """One step of a Trainer with ZeRO-3 on `ranks` threads, as record() returns it; see UnitRecorder."""
    config = PRESETS[preset]
    sizes = {"batch_size": ranks, "seq_len": config.block_size, "micro_batches": ranks}

    def step(comm):
        """One training step. A rank stores its shard of each unit of the model: a quarter of the parameters, gradients
        and moments. An all-gather makes a unit whole while the unit before it is computed, and it is freed after its
        use. In backward, a reduce-scatter leaves each rank its shard of the summed gradients."""
        trainer = Trainer(config, [NumpyBackend()], world=comm, parallel=ParallelConfig(zero=3), **sizes)
        recorder = UnitRecorder(trainer.accumulator, ranks)
        tokens = np.arange(ranks * config.block_size + 1, dtype=np.int32) % config.vocab_size
        trainer.step(read_batch(trainer, Windows(tokens, config.block_size)), 1e-3)
        recorder.note("AdamW on the own shards")
        return recorder.frames

    frames, *_ = run_ranks(ranks, step)
    return recorded("ZeRO-3", step.__doc__, preset, 4 * Arena(parameter_shapes(config)).size, frames)


def record_all(ranks=MAX_RANKS, preset="nano"):
    """All recordings: those of RECORDINGS, and zero_3()."""
    return [*(record(title, ranks, preset) for title in RECORDINGS), zero_3(ranks, preset)]

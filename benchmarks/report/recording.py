"""Record the collectives of stage 1: which slice of an array is on which rank after each message, in bytes.

The functions of stage1_mpi/collectives.py run on the ranks of a ThreadCommunicator. A Recorder stands between the two.
It notes each message and, at each call, the content of the rank's arrays. The content names its origin: rank r of p
fills slice j with 2^(p j + r). So bit r of a sum's element says whether rank r is included, and the position of the
group of p bits is the number of the slice.

A rank's time is the number of messages that it has received. In the ring, each rank receives one message per round, so
a frame is a round.
"""

import weakref
from types import SimpleNamespace

import numpy as np

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
    """A Communicator with only send_start and recv_start, which notes every call.

    arrays: {name: (array of this rank, number of slices in it)}. Other arrays in messages are temporary buffers.
    fixed: {name: bytes of an array without slices}.

    sent: [{"time", "from", "to", "bytes", "slice", "ranks"}]. states: {time: {"cells": {array: [(slice, ranks that it
    contains)]}, "bytes": {array: bytes}}}. phases: [(first time, name)].
    """

    def __init__(self, comm, arrays, fixed=None):
        self.comm, self.rank, self.size, self.arrays = comm, comm.rank, comm.size, arrays
        self.sizes = {name: array.nbytes for name, (array, _) in arrays.items()} | (fixed or {})
        self.time, self.sent, self.states, self.phases = 0, [], {}, []
        self.buffers = weakref.WeakValueDictionary()  # {id: temporary buffer}

    def begin(self, phase):
        """Begin a phase, at a new time if it is not the first."""
        self.note()
        self.time += bool(self.phases)
        self.phases.append((self.time, phase))

    def send_start(self, x, to, tag=0):
        self.note(x)
        number, ranks = decoded(x, self.size)
        message = {"time": self.time, "from": self.rank, "to": to, "bytes": x.nbytes, "slice": number, "ranks": ranks}
        self.sent.append(message)
        return self.handle(self.comm.send_start(x, to, tag), received=0)

    def recv_start(self, out, source, tag=0):
        self.note(out)
        return self.handle(self.comm.recv_start(out, source, tag), received=1)

    def handle(self, started, received):
        """The handle of a message. received: the number of messages that the rank has received after wait()."""

        def wait():
            self.note()
            started.wait()
            self.time += received

        return SimpleNamespace(wait=wait)

    def note(self, message=None):
        """Save the content of the arrays at the present time, and the largest size of the buffers at this time.

        message: the array of a message. It is in a temporary buffer if it is not in one of the named arrays.
        """
        if message is not None and not any(np.may_share_memory(message, array) for array, _ in self.arrays.values()):
            whole = message if message.base is None else message.base
            self.buffers[id(whole)] = whole
        before = self.states[self.time]["bytes"][BUFFERS] if self.time in self.states else 0
        buffers = max(before, sum(array.nbytes for array in self.buffers.values()))
        cells = {
            name: [decoded(array[part], self.size) for part in even_slices(array.size, count)]
            for name, (array, count) in self.arrays.items()
        }
        self.states[self.time] = {"cells": cells, "bytes": self.sizes | {BUFFERS: buffers}}


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


# -- the recorded algorithms: each takes a communicator and the gradients of a rank, and returns its Recorder ----------
# The docstring is the explanation that the page shows.


def ring_all_reduce(comm, gradients):
    """In every round each rank sends one slice to its right neighbour. In the first p − 1 rounds the receiver adds its
    own slice; in the last p − 1 rounds the finished slices are copied."""
    recorder = Recorder(comm, {"gradients": (gradients, comm.size)})
    recorder.begin("reduce-scatter phase")
    collectives.all_reduce(recorder, gradients, out=gradients, algorithm="ring")
    recorder.phases.append((comm.size - 1, "all-gather phase"))
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
    recorder = Recorder(comm, arrays, {"AdamW moments of the own slice": MOMENTS * parameters[own].nbytes})
    mark = gradients[own].copy()
    recorder.begin("reduce-scatter of the gradients")
    collectives.reduce_scatter(recorder, gradients, out=gradients[own], algorithm="ring")
    recorder.begin("AdamW on the own slice")
    parameters[own] = mark  # the update of rank r writes its mark into slice r, which had zeros
    recorder.begin("all-gather of the parameters")
    collectives.all_gather(recorder, parameters[own], out=parameters)
    return recorder


RECORDINGS = {  # {name: (title, function)}
    "ring": ("ring all-reduce", ring_all_reduce),
    "reduce-scatter": ("reduce-scatter", reduce_scatter),
    "zero-1": ("ZeRO-1", zero_1),
}


def record(name, ranks=MAX_RANKS, preset="nano"):
    """Run one of RECORDINGS on `ranks` threads; return its title, sizes and frames as JSON data.

    A frame has the messages that are sent at its time and the state of each rank.
    """
    title, function = RECORDINGS[name]
    size = DividedArena(parameter_shapes(PRESETS[preset]), ranks).size

    def run(comm):
        recorder = function(comm, marked(size, comm.rank, ranks))
        recorder.note()
        return recorder

    recorders, frames = run_ranks(ranks, run), []
    for time in recorders[0].states:
        messages, states = [], [each.states[time] for each in recorders]
        for recorder, state in zip(recorders, states, strict=True):
            sent = [message for message in recorder.sent if message["time"] == time]
            messages += sent
            # a slice that is sent from no named array is in a buffer
            arrays = [cell for cells in state["cells"].values() for cell in cells]
            cells = [cell for message in sent if (cell := (message["slice"], message["ranks"])) not in arrays]
            count = state["bytes"][BUFFERS] * ranks // (4 * size)
            state["cells"][BUFFERS] = cells + [(None, [])] * (count - len(cells))
        phase = [name for start, name in recorders[0].phases if start <= time][-1]
        frames.append({"phase": phase, "messages": messages, "ranks": states})
    return recorded(title, function.__doc__, preset, 4 * size, frames)


def recorded(title, text, preset, size, frames):
    """The JSON data of a recording. size: bytes of all parameters."""
    sizes = {"bytes": size, "ranks": len(frames[0]["ranks"])}
    return {"title": title, "text": " ".join(text.split()), "preset": preset, "frames": frames} | sizes


# -- ZeRO-3 ------------------------------------------------------------------------------------------------------------


class UnitRecorder:
    """Notes what a rank of ShardedMicroBatches holds after each call of its Parts; all ranks hold the same units.

    frames: as those of record(). A slice is a unit of the model, and a cell is (unit, ranks that it contains, None or
    the rank whose shard it is).
    """

    def __init__(self, accumulator, ranks):
        (worker,) = accumulator.workers
        self.parameters, self.gradients = accumulator.parameters.whole, worker.unit_gradients
        self.sending, self.shards = accumulator.sums.sending, accumulator.work.layout
        self.everyone, self.frames, self.summed = list(range(ranks)), [], []
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
        ranks, read = self.everyone, self.parameters.reads.get(self.parameters.current, ())
        whole = [unit for unit in self.parameters.gathered if unit in read]
        moving = moving or [(unit, "parameters") for unit in self.parameters.gathered if unit not in whole]
        sizes = {unit: 4 * self.shards.whole_size(unit) for unit in self.shards.parts}
        messages = [
            {"from": a, "to": b, "slice": unit, "ranks": [a], "array": array, "bytes": sizes[unit] // len(ranks)}
            for unit, array in moving for a in ranks for b in ranks if a != b
        ]  # fmt: skip
        sent, sums = sum(array.nbytes for _, array in self.sending), self.gradients.sums
        held = {
            "shards of parameters, gradients and moments": 4 * (2 + MOMENTS) * self.shards.size,
            "whole parameters": sum(sizes[unit] for unit in self.parameters.gathered),
            "whole gradients": sum(sizes[unit] for unit in sums) + sent,
        }
        states = [{"cells": self.cells(rank, whole, sums), "bytes": held} for rank in ranks]
        self.frames.append({"phase": phase, "messages": messages, "ranks": states})

    def cells(self, rank, whole, sums):
        everyone, shard = self.everyone, ([rank], rank)
        summed = dict.fromkeys(self.summed, (everyone, rank)) | dict.fromkeys(sums, ([rank], None))
        return {
            "parameters": [(unit, *((everyone, None) if unit in whole else shard)) for unit in self.shards.parts],
            "gradients": [(unit, *summed.get(unit, ([], None))) for unit in self.shards.parts],
        }


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
    """{name: record(name)} of all recordings, and zero_3()."""
    return {name: record(name, ranks, preset) for name in RECORDINGS} | {"zero-3": zero_3(ranks, preset)}

"""Record the collectives of stage 1 and a step of ZeRO-3: which slice of an array is on which rank, in bytes.

The functions of stage1_mpi/collectives.py run on the ranks of a ThreadCommunicator. A Recorder stands between the two.
It notes each message and the content of the rank's arrays. The content names its origin: rank r of p fills slice j with
2^(p j + r). So bit r of a sum's element says whether rank r is included, and the position of the group of p bits is the
number of the slice.

A rank's time is the number of messages that it has received. In the ring, each rank receives one message per round, so
a frame is a round: {"phase", "messages": [{"from", "to", "bytes", "slice", "ranks"}], "ranks": [{"cells": {array:
[(slice, ranks that it contains)]}, "bytes": {array: bytes}} for each rank]}. A step is the part of a frame of one rank:
(phase, messages that it sends, its state).
"""

import weakref
from types import SimpleNamespace

import numpy as np

from benchmarks.report.units import amount
from gpt2core.architecture import parameter_shapes
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

    def __init__(self, comm, arrays, phases):
        self.comm, self.rank, self.size, self.arrays, self.phases = comm, comm.rank, comm.size, arrays, phases
        self.sizes = {name: array.nbytes for name, (array, _) in arrays.items()}
        self.steps, self.sent, self.phase = [], [], ""
        self.buffers = weakref.WeakValueDictionary()  # {id: temporary buffer}

    def begin(self, phase):
        """Begin a phase at a new time."""
        self.next_time()
        self.phases[len(self.steps)] = phase

    def send_start(self, x, to, tag=0):
        self.find_buffer(x)
        number, ranks = decoded(x, self.size)
        self.sent.append({"from": self.rank, "to": to, "bytes": x.nbytes, "slice": number, "ranks": ranks})
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
        """Save the step of the present time, and begin the next one. Returns all steps."""
        cells = {
            name: [decoded(array[part], self.size) for part in even_slices(array.size, count)]
            for name, (array, count) in self.arrays.items()
        }
        named, sent = sum(cells.values(), []), [(each["slice"], each["ranks"]) for each in self.sent]
        inside = [cell for cell in sent if cell not in named]  # what is sent from no named array is in a buffer
        size = sum(array.nbytes for array in self.buffers.values())
        array, count = next(iter(self.arrays.values()))
        cells[BUFFERS] = inside + [(None, [])] * (size * count // array.nbytes - len(inside))
        self.phase = self.phases.get(len(self.steps), self.phase)
        self.steps.append((self.phase, self.sent, {"cells": cells, "bytes": self.sizes | {BUFFERS: size}}))
        self.sent = []
        return self.steps


def marked(comm, config):
    """The gradients of a rank, padded so that ranks divide them: slice j has the elements 2^(p j + r)."""
    marks = 2.0 ** (comm.size * np.arange(comm.size) + comm.rank)
    return np.repeat(marks, size_of(comm.size, config) // comm.size).astype(np.float32)


def size_of(ranks, config):
    return DividedArena(parameter_shapes(config), ranks).size


def decoded(x, ranks):
    """(number of the slice, [ranks that x contains]) of marked elements; (None, []) for zeros. They must not differ."""
    value = int(x.flat[0])
    if not np.all(x == value):
        raise ValueError("a message or a slice has elements of several slices")
    if not value:
        return None, []
    number = (value.bit_length() - 1) // ranks
    return number, [rank for rank in range(ranks) if value >> (ranks * number + rank) & 1]


# -- the recorded algorithms: each takes a communicator and a configuration, and returns the steps of a rank -----------
# The docstring is the explanation that the page shows.


def ring_all_reduce(comm, config):
    """In every round each rank sends one slice to its right neighbour. In the first p − 1 rounds the receiver adds its
    own slice; in the last p − 1 rounds the finished slices are copied."""
    gradients, phases = marked(comm, config), {0: "reduce-scatter phase", comm.size - 1: "all-gather phase"}
    recorder = Recorder(comm, {"gradients": (gradients, comm.size)}, phases)
    collectives.all_reduce(recorder, gradients, out=gradients, algorithm="ring")
    return recorder.next_time()


def reduce_scatter(comm, config):
    """The first phase of the ring. After p − 1 rounds, rank r has slice r of the sum. A rank has at most four temporary
    buffers: two alternate for its partial sums, and into two others it receives messages."""
    gradients = marked(comm, config)
    own = np.zeros(gradients.size // comm.size, np.float32)
    arrays = {"gradients": (gradients, comm.size), "own slice of the sum": (own, 1)}
    recorder = Recorder(comm, arrays, {0: "reduce-scatter"})
    collectives.reduce_scatter(recorder, gradients, out=own, algorithm="ring")
    return recorder.next_time()


def zero_1(comm, config):
    """Each rank has the AdamW moments of one slice. It receives the summed gradient of this slice and updates this
    slice of the parameters. An all-gather copies all updated slices to all ranks."""
    gradients = marked(comm, config)
    own, parameters = even_slices(gradients.size, comm.size)[comm.rank], np.zeros_like(gradients)
    arrays = {"gradients": (gradients, comm.size), "parameters": (parameters, comm.size)}
    recorder = Recorder(comm, arrays, {0: "reduce-scatter of the gradients"})
    recorder.sizes["AdamW moments of the own slice"] = MOMENTS * parameters[own].nbytes
    mark = gradients[own].copy()
    collectives.reduce_scatter(recorder, gradients, out=gradients[own], algorithm="ring")
    recorder.begin("AdamW on the own slice")
    parameters[own] = mark  # the update of rank r writes its mark into slice r, which had zeros
    recorder.begin("all-gather of the parameters")
    collectives.all_gather(recorder, parameters[own], out=parameters)
    return recorder.next_time()


def zero_3(comm, config):
    """One training step. A rank stores its shard of each unit of the model: a quarter of the parameters, gradients and
    moments. An all-gather makes a unit whole while the unit before it is computed, and it is freed after its use. In
    backward, a reduce-scatter leaves each rank its shard of the summed gradients."""
    sizes = {"batch_size": comm.size, "seq_len": config.block_size, "micro_batches": comm.size}
    trainer = Trainer(config, [NumpyBackend()], world=comm, parallel=ParallelConfig(zero=3), **sizes)
    recorder = UnitRecorder(trainer.accumulator, comm)
    tokens = np.arange(comm.size * config.block_size + 1, dtype=np.int32) % config.vocab_size
    trainer.step(read_batch(trainer, Windows(tokens, config.block_size)), 1e-3)
    return recorder.note("AdamW on the own shards")


class UnitRecorder:
    """Notes what a rank of ShardedMicroBatches sends and holds after each call of its Parts; all hold the same units.

    A slice is a unit of the model. A cell is (unit, ranks that it contains, None or the rank whose shard it is).
    """

    def __init__(self, accumulator, comm):
        (worker,) = accumulator.workers
        self.parameters, self.gradients = accumulator.parameters.whole, worker.unit_gradients
        self.sending, self.shards = accumulator.sums.sending, accumulator.work.layout
        self.rank, self.everyone, self.steps, self.summed = comm.rank, list(range(comm.size)), [], []
        for part in worker.parts:
            part.before = self.after(part.before, "forward")
            part.before_backward = self.after(part.before_backward, "backward")
            part.completed = self.complete(part.completed)
        self.note("before the step")

    def after(self, call, phase):
        return lambda unit: (call(unit), self.note(f"{phase} of {unit}"))

    def complete(self, call):
        phase = "reduce-scatter of the gradients of"
        return lambda unit: (self.note(f"{phase} {unit}", [(unit, "gradients")]), call(unit), self.summed.append(unit))

    def note(self, phase, moving=None):
        """Append a step, return all. moving: the (unit, array) that are sent; by default, units that are gathered."""
        rank, ranks, read = self.rank, self.everyone, self.parameters.reads.get(self.parameters.current, ())
        whole = [unit for unit in self.parameters.gathered if unit in read]
        moving = moving or [(unit, "parameters") for unit in self.parameters.gathered if unit not in whole]
        sizes = {unit: 4 * self.shards.whole_size(unit) for unit in self.shards.parts}
        messages = [
            {"from": rank, "to": to, "slice": unit, "ranks": [rank], "array": array, "bytes": sizes[unit] // len(ranks)}
            for unit, array in moving for to in ranks if to != rank
        ]  # fmt: skip
        held = {
            "shards of parameters, gradients and moments": 4 * (2 + MOMENTS) * self.shards.size,
            "whole parameters": sum(sizes[unit] for unit in self.parameters.gathered),
            "whole gradients": sum(sizes[unit] for unit in self.gradients.sums)
            + sum(x.nbytes for _, x in self.sending),
        }
        sums = dict.fromkeys(self.summed, (ranks, rank)) | dict.fromkeys(self.gradients.sums, ([rank], None))
        parameters = [(unit, *((ranks, None) if unit in whole else ([rank], rank))) for unit in sizes]
        gradients = [(unit, *sums.get(unit, ([], None))) for unit in sizes]
        state = {"cells": {"parameters": parameters, "gradients": gradients}, "bytes": held}
        self.steps.append((phase, messages, state))
        return self.steps


RECORDINGS = {"ring all-reduce": ring_all_reduce, "reduce-scatter": reduce_scatter, "ZeRO-1": zero_1, "ZeRO-3": zero_3}


def record(title, ranks=MAX_RANKS, preset="nano"):
    """Run one of RECORDINGS on `ranks` threads; return a view of the step player as JSON data."""
    config, size, frames = PRESETS[preset], 4 * size_of(ranks, PRESETS[preset]), []
    for steps in zip(*run_ranks(ranks, lambda comm: RECORDINGS[title](comm, config)), strict=True):
        messages = [message for _, sent, _ in steps for message in sent]
        frames.append({"phase": steps[0][0], "messages": messages, "ranks": [state for _, _, state in steps]})
    text = f"{' '.join(RECORDINGS[title].__doc__.split())} Recorded from arrays of {amount(size)} (preset {preset})."
    return {"group": "collectives and ZeRO", "title": title, "text": text, "bytes": size, "frames": frames}


def record_all():
    return list(map(record, RECORDINGS))

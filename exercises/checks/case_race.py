"""Checks of case 4: threads wait for parameters that are still on their way, in an order that the check decides."""

import threading
from types import SimpleNamespace

import numpy as np

from exercises.checks.common import CONFIG, expect_same_bits
from exercises.compare import Mismatch
from gpt2core.architecture import parameter_shapes
from gpt2core.communicator import Handle
from gpt2core.errors import counted
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena

NOW = 0.2  # seconds in which a thread that does not wait returns
SECONDS = 2  # a thread that waits longer is taken to wait forever


class Arrival(Handle):
    """The handle of a broadcast that arrives when `gate` is set."""

    def __init__(self, gate, awaited):
        super().__init__()
        self.gate, self.awaited, self.arrived = gate, awaited, False

    def wait(self):
        self.awaited.set()
        if not self.gate.wait(SECONDS):
            raise Mismatch("a thread waits for parameters that were never sent")
        self.arrived = True


class Gather:
    """An AsyncAllGather of the student, between `owners` ranks, whose broadcasts arrive when `gate` is set."""

    def __init__(self, owners, piece_mb):
        from gpt2core.parallel.divided.async_all_gather import AsyncAllGather

        self.gate, self.awaited, self.handles = threading.Event(), threading.Event(), []
        arena = DividedArena(parameter_shapes(CONFIG), owners)
        group = SimpleNamespace(size=owners, rank=0, broadcast_start=self.start)
        self.units = list(arena.units)
        self.gather = AsyncAllGather(arena, np.zeros(arena.size, np.float32), group, piece_mb)

    def start(self, array, owner, out):
        self.handles.append(Arrival(self.gate, self.awaited))
        return self.handles[-1]


def started(function, *arguments):
    """(a thread that runs function(*arguments), the list that gets its exception)."""
    errors = []

    def run():
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def expect_all_wait(threads, owners, piece_mb):
    """Several threads read one unit: all must wait until its parameters have arrived, and then go on."""
    made = Gather(owners, piece_mb)
    name = f"{counted(threads, 'thread')}, {owners} ranks"
    with made.gather:
        for unit in made.units:
            made.gate.clear()
            made.awaited.clear()
            pending = sum(not handle.arrived for handle in made.handles)
            readers = [started(made.gather.wait_for_unit, unit) for _ in range(threads)]
            made.awaited.wait(NOW)
            for thread, _ in readers:
                thread.join(NOW / threads)
            here = sum(not thread.is_alive() for thread, _ in readers)
            needed = made.awaited.is_set() and pending
            made.gate.set()
            for thread, errors in readers:
                thread.join(SECONDS)
                if errors:
                    raise errors[0]
                if thread.is_alive():
                    raise Mismatch(f"{name}: a thread still waits for {unit} after its parameters have arrived")
            if needed and here:
                text = f"{counted(here, 'thread')} went on before the parameters of {unit} had arrived"
                raise Mismatch(f"{name}: {text}")
    if missing := sum(not handle.arrived for handle in made.handles):
        raise Mismatch(f"{name}: after the step, {missing} of {counted(len(made.handles), 'broadcast')} not waited for")


def no_thread_reads_before_the_data_is_there():
    expect_all_wait(2, 2, 1e9)


def number_of_threads_does_not_matter():
    for threads, owners, piece_mb in ((3, 2, 0.02), (4, 3, 0.02), (2, 3, 1e-6), (1, 2, 0.02)):
        expect_all_wait(threads, owners, piece_mb)


def nothing_stays_pending():
    made = Gather(2, 0.02)
    made.gate.set()
    for step in range(2):
        with made.gather:
            made.gather.wait_for_unit(made.units[0])
        if missing := sum(not handle.arrived for handle in made.handles):
            raise Mismatch(f"step {step}: {missing} of {counted(len(made.handles), 'broadcast')} not waited for")
    if len(made.handles) % 2:
        raise Mismatch("the second step starts another number of broadcasts than the first")


def training_does_not_depend_on_the_threads():
    parallel = ParallelConfig(zero=1, zero_gather="forward", bucket_mb=0.02)
    for threads in (1, 2):
        expect_same_bits(2, parallel, threads=threads)

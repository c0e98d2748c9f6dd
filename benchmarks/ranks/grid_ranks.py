"""The part of grid.py that runs on the ranks: train a few steps of each layout, and measure them."""

import time
import tracemalloc

import numpy as np

from gpt2core.app.planning.dry_run import layout_of
from gpt2core.app.planning.traffic import bytes_sent, traffic
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.parallel.pipeline.measured import measured
from gpt2core.tracing.hooks import Hooks
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

MICRO_BATCHES, LR = 8, 3e-4


def train_all(world, configs, model, batch_size, steps, rounds=1):
    """[(Layout, measurements of this rank)] of each ParallelConfig.

    "seconds" are the steps of all rounds, because the speed of a machine can change for longer than a few steps; CPU
    time and bubble are the smallest ones.
    """
    found = [sizes_of(world, each, model, batch_size) for each in configs]
    times = [[times_of(world, each, model, batch_size, steps) for each in configs] for _ in range(rounds)]
    for (_, sizes), each in zip(found, zip(*times, strict=True), strict=True):
        sizes |= {name: min(times[name] for times in each) for name in ("cpu", "bubble")}
        sizes["seconds"] = [second for times in each for second in times["seconds"]]
    return found


def make_trainer(world, parallel, model, batch_size):
    """(trainer, batch of a step)."""
    trainer = FastTrainer(
        model, [NumpyBackend()], batch_size=batch_size, seq_len=model.block_size, micro_batches=MICRO_BATCHES,
        world=world, parallel=parallel,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 4096)
    return trainer, read_batch(trainer, Windows(tokens, model.block_size))


def sizes_of(world, parallel, model, batch_size):
    """(Layout, the memory, calls and bytes of this rank and those predicted)."""
    tracemalloc.start()
    trainer, batch = make_trainer(world, parallel, model, batch_size)
    trainer.step(batch, LR)
    calls, sent = count_calls(trainer, batch)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    layout = layout_of(trainer)
    place = layout.places()[world.rank]
    expected = traffic(layout, place)
    predicted = {"predicted_calls": sum(call.times for call in expected)}
    predicted["predicted_bytes"] = bytes_sent(layout, place, expected, world.sent)
    return layout, {"memory": memory, "calls": calls, "bytes": sent} | predicted


def times_of(world, parallel, model, batch_size, steps):
    """The seconds of so many steps after the first one, the least CPU time of a step, the bubble of the last one."""
    trainer, batch = make_trainer(world, parallel, model, batch_size)
    if parallel.pp > 1:
        trainer.accumulator.executor.record_times()
    trainer.step(batch, LR)
    seconds, cpu = [], []
    for _ in range(steps):
        world.barrier()
        start = time.process_time()
        seconds.append(trainer.step(batch, LR).seconds)
        cpu.append(time.process_time() - start)
    bubble = measured(trainer.accumulator, trainer.mesh.pipeline)[0].bubble if parallel.pp > 1 else 0.0
    return {"seconds": seconds, "cpu": min(cpu), "bubble": bubble}


def count_calls(trainer, batch):
    """(number of collectives and messages that this rank starts in a step, their bytes)."""
    counts, hooks, mesh = [], Hooks(), trainer.mesh

    def around(name, call, x, blocking):
        counts.append(name)
        return call()

    workers = [group for worker in trainer.accumulator.workers for group in worker.groups]
    groups = [mesh.world, mesh.data, mesh.tensor, mesh.pipeline, mesh.replica, *workers]
    for group in {id(group): group for group in groups}.values():
        if isinstance(group, MpiCommunicator):
            hooks.around_collectives(group, around)
    sent = trainer.step(batch, LR).bytes_sent or 0
    hooks.remove()
    return len([name for name in counts if name != "recv"]), sent

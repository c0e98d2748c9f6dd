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

    All are trained `rounds` times, because the speed of a machine can change for longer than a few steps.
    """
    found = [[train_one(world, each, model, batch_size, steps) for each in configs] for _ in range(rounds)]
    return [joined(each) for each in zip(*found, strict=True)]


def joined(results):
    """One result of train_one() from those of all rounds: all steps, the least CPU time, the smallest bubble."""
    (layout, first), *_ = results
    seconds = [second for _, found in results for second in found["seconds"]]
    least = {name: min(found[name] for _, found in results) for name in ("cpu", "bubble")}
    return layout, first | least | {"seconds": seconds}


def train_one(world, parallel, model, batch_size, steps):
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 4096)
    windows = Windows(tokens, model.block_size)
    tracemalloc.start()
    trainer = FastTrainer(
        model, [NumpyBackend()], batch_size=batch_size, seq_len=model.block_size, micro_batches=MICRO_BATCHES,
        world=world, parallel=parallel,
    )  # fmt: skip
    if parallel.pp > 1:
        trainer.accumulator.executor.record_times()
    batch = read_batch(trainer, windows)
    for _ in range(2):
        trainer.step(batch, LR)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    calls = count_calls(trainer, batch)
    seconds, cpu, sent = [], [], 0
    for _ in range(steps):
        world.barrier()
        start = time.process_time()
        step = trainer.step(batch, LR)
        cpu.append(time.process_time() - start)
        seconds.append(step.seconds)
        sent = step.bytes_sent or 0
    bubble = measured(trainer.accumulator, trainer.mesh.pipeline)[0].bubble if parallel.pp > 1 else 0.0
    layout = layout_of(trainer)
    place = layout.places()[world.rank]
    expected = traffic(layout, place)
    predicted = sum(call.times for call in expected), bytes_sent(layout, place, expected, world.sent)
    found = {"memory": memory, "calls": calls, "bytes": sent, "bubble": bubble, "seconds": seconds, "cpu": min(cpu)}
    return layout, found | dict(zip(("predicted_calls", "predicted_bytes"), predicted, strict=True))


def count_calls(trainer, batch):
    """The number of collectives and messages that this rank starts in a step."""
    counts, hooks, mesh = [], Hooks(), trainer.mesh

    def around(name, call, x, blocking):
        counts.append(name)
        return call()

    workers = [group for worker in trainer.accumulator.workers for group in worker.groups]
    groups = [mesh.world, mesh.data, mesh.tensor, mesh.pipeline, mesh.replica, *workers]
    for group in {id(group): group for group in groups}.values():
        if isinstance(group, MpiCommunicator):
            hooks.around_collectives(group, around)
    trainer.step(batch, LR)
    hooks.remove()
    return len([name for name in counts if name != "recv"])

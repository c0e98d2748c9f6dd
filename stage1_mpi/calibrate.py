"""Measure the constants of the planner on two ranks of this machine: `python -m gpt2core.app.plan --calibrate`.

Both ranks measure at the same time, as in training. Rank 0 prints one line: a JSON object {name: numbers}.
"""

import json
import time

import numpy as np

from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.part import parts_of
from gpt2core.threads import limit_blas
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

CONFIG = GPT2Config(172, 64, 2, 4, 64, tied=False)  # the preset tiny
SEQUENCES = (1, 8)  # of a pass: a small and a large number
REPEATS = 30
SIZES = (1 << 10, 1 << 20)  # numbers of a small and a large array
STEPS = 20


def main():
    limit_blas(1)
    world = MpiCommunicator()
    numbers = {**unit_rates(world), **links(world)}
    numbers |= update_rates(world, numbers)
    if world.is_root:
        print(json.dumps(numbers), flush=True)


def fastest(world, function, repeats=REPEATS, clock=time.thread_time):
    """The seconds of the fastest of some calls of function(), on the slower rank.

    clock: by default the time that this thread computes, without that of other programs on its core.
    """
    samples = []
    for _ in range(repeats):
        world.barrier()
        start = clock()
        function()
        samples.append(clock() - start)
    return max(world.all_gather_object(min(samples)))


def line(sizes, seconds):
    """(seconds at size 0, not below 0; seconds per size) of the line through two points."""
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return max(0.0, seconds[0] - slope * sizes[0]), slope


# -- computation -------------------------------------------------------------------------------------------------------


def unit_rates(world):
    """The Rates of a block, and of embedding and head together, as [overhead, operations per second]."""
    T, C, V = CONFIG.block_size, CONFIG.n_embd, CONFIG.vocab_size
    times = [unit_times(world, sequences) for sequences in SEQUENCES]
    operations = {"block": 24 * C * C + 4 * C * T, "ends": 2 * V * C}  # per token, in forward
    rates = {}
    for number, direction in enumerate(("forward", "backward")):
        for kind, count in operations.items():
            overhead, slope = line([n * T for n in SEQUENCES], [each[kind][number] for each in times])
            rates[f"{kind}_{direction}"] = [overhead, count * (1 + number) / slope]
    return rates


def unit_times(world, sequences):
    """{"block", "ends": (forward, backward) seconds} for a pass of so many sequences."""
    backend, rng = NumpyBackend(), np.random.default_rng(0)
    parameters = {name: Parameter(array, backend) for name, array in initial_parameters(CONFIG, 0)}
    buffers = {name: backend.zeros(shape, backend.dtype) for name, shape in parameter_shapes(CONFIG)}
    parts = parts_of(GPT2(CONFIG, parameters).units, backend, separate=True)
    ids = rng.integers(0, CONFIG.vocab_size, (sequences, CONFIG.block_size))
    dloss, samples = backend.ones((), np.float64), []
    arguments = ForwardArguments(targets=ids, scale=1 / ids.size)
    for _ in range(REPEATS):
        for name, tensor in parameters.items():
            tensor.send_to(buffers[name])
        world.barrier()
        x, dy, graphs, forward, backward = backend.prepare_tokens(ids, CONFIG.vocab_size), dloss, [], [], []
        for part in parts:
            start = time.thread_time()
            graphs.append(part.forward(x, arguments))
            x = graphs[-1].y.data
            forward.append(time.thread_time() - start)
        while graphs:
            start = time.thread_time()
            dy = graphs.pop().backward(dy)
            backward.append(time.thread_time() - start)
        backward.reverse()
        samples.append([forward[1], backward[1], forward[0] + forward[-1], backward[0] + backward[-1]])
    best = [min(column) for column in zip(*samples, strict=True)]
    slowest = np.max(world.all_gather_object(best), axis=0).tolist()
    return {"block": slowest[:2], "ends": slowest[2:]}


# -- messages ----------------------------------------------------------------------------------------------------------


def links(world):
    """The Links of an all-reduce, an all-gather and a message, as [alpha, beta]; alpha is that of one round."""
    arrays = [np.zeros(size, np.float32) for size in SIZES]
    p, rounds = world.size, (world.size - 1).bit_length()
    calls = {
        "collective": (lambda x: world.all_reduce(x, out=x), 2 * rounds, lambda n: 2 * (p - 1) * n / p),
        "gather": (lambda x: world.all_gather(x[: len(x) // p]), rounds, lambda n: (p - 1) * n / p),
        "message": (lambda x: ping_pong(world, x), 2, lambda n: 2 * n),
    }
    found = {}
    for name, (call, alphas, sent) in calls.items():
        seconds = [fastest(world, lambda x=x, call=call: call(x), clock=time.perf_counter) for x in arrays]
        start, beta = line([sent(x.nbytes) for x in arrays], seconds)
        found[name] = [start / alphas, beta]
    return found


def ping_pong(world, x):
    """Send x from rank 0 to rank 1 and back, in a world of two ranks."""
    other = 1 - world.rank
    for sender in (0, 1):
        if world.rank == sender:
            world.send(x, other)
        else:
            world.recv(x, other)


# -- the update --------------------------------------------------------------------------------------------------------


def update_rates(world, rates):
    """The bandwidth of the update and the seconds of a step besides, from a few steps on each rank by itself."""
    size, backend = 1 << 20, NumpyBackend()
    p, m, v, g = (np.zeros(size, np.float32) for _ in range(4))
    decays, coefficients = np.zeros(size // 1024, np.int32), np.array([1e-3, 1e-8, 1.0])

    def update():
        backend.page_sums(g)
        backend.adamw_step(p, m, v, g, coefficients, np.float64(1.0), decays, (0.9, 0.999))

    bandwidth = 8 * p.nbytes / fastest(world, update, 10)
    trainer = FastTrainer(CONFIG, [backend], batch_size=8, seq_len=CONFIG.block_size, micro_batches=1, world=Solo())
    windows = Windows(np.random.default_rng(0).integers(0, CONFIG.vocab_size, 2000), CONFIG.block_size)
    batch = read_batch(trainer, windows)
    step = fastest(world, lambda: trainer.step(batch, 1e-3), STEPS)
    tokens, T, C = 8 * CONFIG.block_size, CONFIG.block_size, CONFIG.n_embd
    counts = {"block": CONFIG.n_layer * (24 * C * C + 4 * C * T), "ends": 2 * CONFIG.vocab_size * C}
    for kind, count in counts.items():
        for number, direction in enumerate(("forward", "backward")):
            overhead, flops = rates[f"{kind}_{direction}"]
            step -= overhead * (CONFIG.n_layer if kind == "block" else 1) + (1 + number) * count * tokens / flops
    step -= 32 * trainer.arena.size / bandwidth
    return {"bandwidth": [bandwidth], "step": [max(0.0, step)]}


if __name__ == "__main__":
    main()

"""Measure the constants of the planner on two ranks of this machine: `python -m gpt2core.app.plan --calibrate`.

Both ranks measure at the same time, as in training. Rank 0 prints one line: a JSON object {name: numbers}. Each time is
a median. Of a computation, it is that in which the thread computes, without that of other programs on its core.
"""

import json
import statistics
import time

import numpy as np

from gpt2core.architecture import GPT2Config, unit_names
from gpt2core.arena import PAGE
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.memory.gpu import FP32
from gpt2core.memory.kernel_sizes import GELU, NORMS, UPDATE
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.tensor.shards import shard
from gpt2core.parallel.tensor.sliced_ops import Slice
from gpt2core.threads import limit_blas
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

CONFIG = GPT2Config(172, 64, 4, 4, 64, tied=False)  # the preset tiny with 4 layers
SEQUENCES = (1, 8)  # of a pass: a small and a large number
MERGED, SLICES = 4, 2  # micro-batches of a merged pass; ranks that divide a layer
REPEATS = 40
SIZES = (1 << 10, 1 << 18)  # numbers of a small and a large array
CALLS = 8  # of a collective in a row
LARGER_THAN_CACHE = 1 << 23  # numbers


def main():
    limit_blas(1)
    world = MpiCommunicator()
    numbers = measure(world)
    if world.is_root:
        print(json.dumps(numbers), flush=True)


def measure(world):
    """{name of a field of Machine: [its numbers]}; the group `world` has two ranks."""
    bandwidth = update_bandwidth(world)
    return {**unit_rates(world), **links(world), **overheads(world, bandwidth), "bandwidth": [bandwidth]}


def line(sizes, seconds):
    """(seconds at size 0; seconds per size) of the line through two points; neither is below 0."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return max(0.0, seconds[0] - slope * sizes[0]), slope


# -- computation -------------------------------------------------------------------------------------------------------


def unit_rates(world):
    """The Rates of a block, and of embedding and head together, as [overhead, operations per second].

    And from a merged and from a divided pass `micro_batch` and `activations`: see Machine.
    """
    T, C, V = CONFIG.block_size, CONFIG.n_embd, CONFIG.vocab_size
    few, many = SEQUENCES
    shapes = [(few, 1, 1), (many, 1, 1), (many, MERGED, 1), (many, 1, SLICES)]
    *times, one_part = pass_times(world, [make_pass(*shape) for shape in shapes] + [make_pass(few, 1, 1, False)])
    ends = [each[:, 0] + each[:, -1] for each in times[:2]]
    small, large, merged, divided = (each[:, 1:-1].mean(axis=1) for each in times)  # of a block
    # a block that is a part of its own takes longer than one in the middle of a part
    extra = np.clip((times[0].sum(axis=1) - one_part[:, 0]) / (len(times[0][0]) - 1), 0, small / 2)
    lines = {
        "block": rising_lines([few * T, many * T], small - extra, large - extra),
        "ends": rising_lines([few * T, many * T], *ends),
    }
    slopes = np.array([slope for _, slope in lines["block"]])  # seconds per token, forward and backward
    saved = (large - divided) / (1 - 1 / SLICES) / (many * T)  # the part of them that a group divides
    # what every rank computes: the LayerNorms of forward, and twice as much in backward; products take most of the time
    norms = np.clip((slopes - saved).sum(), 0.01 * slopes.sum(), slopes.sum() / 3).item()
    activations = 3 * NORMS * C * FP32 / norms
    stream = {"block": (NORMS + GELU) * C * FP32 / activations, "ends": 0.0}
    operations = {"block": 24 * C * C + 4 * C * T, "ends": 2 * V * C}  # per token, in forward
    rates = {"micro_batch": [max(0.0, (merged - large)[1]) / (MERGED - 1)], "activations": [activations]}
    for kind, count in operations.items():
        for (overhead, slope), direction, passes in zip(lines[kind], ("forward", "backward"), (1, 2), strict=True):
            rates[f"{kind}_{direction}"] = [overhead, count / max(slope / passes - stream[kind], 0.1 * slope)]
    return rates


def rising_lines(sizes, *seconds):
    """[line() of forward, of backward], whose slopes are not 0. seconds: (forward, backward) at each of two sizes."""
    pairs = np.transpose(seconds).tolist()
    lines = [line(sizes, pair) for pair in pairs]
    return [(start, max(slope, 0.01 * pair[1] / sizes[1])) for (start, slope), pair in zip(lines, pairs, strict=True)]


def pass_times(world, passes):
    """[(2, parts) seconds] of the results of make_pass(), on the slower rank.

    The passes alternate, because the speed of a machine changes.
    """
    samples = [[] for _ in passes]
    for _ in range(REPEATS):
        for each, run in zip(samples, passes, strict=True):
            world.barrier()
            each.append(run())
    ranks = world.all_gather_object([np.median(each, axis=0) for each in samples])
    return [np.max(each, axis=0) for each in zip(*ranks, strict=True)]


def make_pass(sequences, micro_batches, slices, separate=True):
    """A function -> [[forward seconds of each part], [backward seconds of each part]] of a pass.

    The pass has `micro_batches` merged micro-batches, and is that of the first of `slices` ranks that divide each
    layer. separate: whether each unit is a part; otherwise the model is one part.
    """
    backend, rng, group = NumpyBackend(), np.random.default_rng(0), Slice(0, slices)
    own = {name: shard(name, array, 0, slices) for name, array in initial_parameters(CONFIG, 0)}
    parameters = {name: Parameter(array, backend) for name, array in own.items()}
    buffers = {name: backend.zeros(parameter.shape, backend.dtype) for name, parameter in parameters.items()}
    parts = parts_of(GPT2(CONFIG, parameters, group).units, backend, separate=separate)
    shape = (micro_batches, sequences // micro_batches) if micro_batches > 1 else (sequences,)
    ids = rng.integers(0, CONFIG.vocab_size, (*shape, CONFIG.block_size))
    arguments, dloss = ForwardArguments(targets=ids, scale=1 / ids.size), backend.ones((), np.float64)

    def run():
        for name, tensor in parameters.items():
            tensor.send_to(buffers[name])
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
        return forward, backward[::-1]

    return run


# -- messages ----------------------------------------------------------------------------------------------------------


def links(world):
    """The Links of Machine that are measured, as [alpha, beta]; alpha is that of one round.

    Before an all-reduce, and while a reduce-scatter runs, each rank computes: then a call takes longer, because the
    ranks are not ready at the same time, and the caches have other data.
    """
    p, rounds = world.size, (world.size - 1).bit_length()
    part, compute = (p - 1) / p, make_computation()

    def all_reduce(x):
        compute()
        world.all_reduce(x)

    def reduce_scatter(x):
        handle = world.reduce_scatter_start(x)
        compute()
        handle.wait()

    calls = {
        "collective": (all_reduce, compute, 2 * rounds, 2 * part),
        "gather": (lambda x: world.all_gather(x[: len(x) // p]), None, rounds, part),
        "message": (lambda x: ping_pong(world, x), None, 2, 2),
        "background": (reduce_scatter, compute, rounds, part),
    }
    arrays = [np.zeros(size, np.float32) for size in SIZES]
    functions = {
        (name, size): lambda call=call, x=x: call(x)
        for name, (call, *_) in calls.items()
        for size, x in zip(SIZES, arrays, strict=True)
    }
    seconds = call_seconds(world, functions | {None: compute})
    found = {}
    for name, (_, besides, alphas, sent) in calls.items():
        times = [seconds[name, size] - (seconds[None] if besides else 0.0) for size in SIZES]
        start, beta = line([sent * x.nbytes for x in arrays], times)
        found[name] = [start / alphas, beta]
    return found


def call_seconds(world, functions):
    """{key: seconds of a call} of these {key: function}, on the slower rank. They alternate: see pass_times()."""
    samples = {key: [] for key in functions}
    for _ in range(REPEATS):
        for key, function in functions.items():
            world.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            samples[key].append((time.perf_counter() - start) / CALLS)
    ranks = world.all_gather_object({key: statistics.median(each) for key, each in samples.items()})
    return {key: max(each[key] for each in ranks) for key in functions}


def make_computation():
    """A function that computes for less than a millisecond."""
    backend, C, rows = NumpyBackend(), CONFIG.n_embd, SEQUENCES[1] * CONFIG.block_size
    arguments = [np.ones(shape, np.float32) for shape in ((rows, C), (C, 4 * C), 4 * C)]
    return lambda: backend.linear_gelu_forward(*arguments)


def ping_pong(world, x):
    """Send x from rank 0 to rank 1 and back, in a world of two ranks."""
    for sender in (0, 1):
        if world.rank == sender:
            world.send(x, 1 - sender)
        else:
            world.recv(x, 1 - world.rank)


# -- the update --------------------------------------------------------------------------------------------------------


def update_bandwidth(world):
    """Bytes per second of the update of arrays that are not in the cache."""
    size, backend, other = 1 << 20, NumpyBackend(), np.zeros(LARGER_THAN_CACHE, np.float32)
    p, m, v, g = (np.zeros(size, np.float32) for _ in range(4))
    decays, coefficients = np.zeros(size // PAGE, np.int32), np.array([1e-3, 1e-8, 1.0])

    def update():
        backend.page_sums(g)
        backend.adamw_step(p, m, v, g, coefficients, np.float64(1.0), decays, (0.9, 0.999))

    samples = []
    for _ in range(REPEATS):
        np.add(other, 1, out=other)
        world.barrier()
        start = time.thread_time()
        update()
        samples.append(time.thread_time() - start)
    return UPDATE * p.nbytes / max(world.all_gather_object(statistics.median(samples)))


def overheads(world, bandwidth):
    """`step` and `started` of Machine, from steps of each rank by itself, with ZeRO-0 and ZeRO-2.

    Passes and steps alternate: see pass_times().
    """
    sizes, trainers = dict(batch_size=SEQUENCES[1], seq_len=CONFIG.block_size, micro_batches=1), []
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 2000)
    for zero in (0, 2):
        trainer = FastTrainer(CONFIG, [NumpyBackend()], world=Solo(), parallel=ParallelConfig(zero=zero), **sizes)
        trainers.append((trainer, read_batch(trainer, Windows(tokens, CONFIG.block_size))))
    compute, samples = make_pass(SEQUENCES[1], 1, 1, separate=False), []
    for _ in range(REPEATS):
        world.barrier()
        seconds = [np.sum(compute())]
        for trainer, batch in trainers:
            start = time.thread_time()
            trainer.step(batch, 1e-3)
            seconds.append(time.thread_time() - start)
        samples.append(seconds)
    passes, whole, divided = np.max(world.all_gather_object(np.median(samples, axis=0)), axis=0).tolist()
    step = whole - passes - UPDATE * FP32 * trainers[0][0].arena.size / bandwidth
    calls = 2 * len(unit_names(CONFIG))  # an all-gather and a reduce-scatter of each unit
    return {"step": [max(0.0, step)], "started": [max(0.0, divided - whole) / calls]}


if __name__ == "__main__":
    main()

"""Measure the constants of the planner on 2 or 4 ranks of this machine: `python -m gpt2core.app.plan --calibrate`.

All ranks measure at the same time, as in training. Rank 0 prints one line: a JSON object {name: list of floats}. Each
time is the shortest of a few, because other programs can only make it longer. Of a computation, it is that in which the
thread computes, without that of other programs on its core. Three small models are measured, none of them a preset: in
each, something else takes most of the time.
"""

import functools
import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np

from gpt2core.app.planning.dry_run import layout_of
from gpt2core.app.planning.flops import unit_work
from gpt2core.app.planning.machine import machine_of
from gpt2core.app.planning.step_time import pipeline_timeline, rounds
from gpt2core.app.planning.traffic import arena_of, traffic
from gpt2core.architecture import GPT2Config, parameter_count, unit_names
from gpt2core.arena import PAGE
from gpt2core.communicator import Solo, textbook_bytes
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.memory.gpu import FP32
from gpt2core.memory.kernel_sizes import ADD, UPDATE
from gpt2core.model import initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.divided.arena_layout import ArenaLayout
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.micro_batches.accumulator import Workload
from gpt2core.parallel.micro_batches.gradient_sums import ArenaGradients
from gpt2core.parallel.micro_batches.threaded import Worker
from gpt2core.parallel.part import backward_pass, forward_pass, recomputed_units
from gpt2core.parallel.tensor.shards import shard
from gpt2core.parallel.tensor.sliced_ops import Slice
from gpt2core.threads import limit_blas
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import QUERIES, NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

SHORT = GPT2Config(172, 16, 9, 4, 48, tied=False)  # calls of kernels take most of the time
NARROW = GPT2Config(172, 64, 3, 6, 96, tied=False)  # other kernels than products do
WIDE = GPT2Config(172, 64, 3, 4, 256, tied=False)  # products do
FEW, MANY = 1, 8  # sequences of a pass
MERGED = 4  # micro-batches of a merged pass, with one sequence each
MORE = 4  # micro-batches of each rank of a pipeline
LENGTHS = (16, 64)  # tokens of short and long sequences
REPEATS, SAMPLE = 20, 0.02  # samples; seconds
WAITS = 1e-3, 5e-3  # seconds for which a rank waits for a message: then it sleeps between two polls, as in a pipeline
PHASES = 8  # messages of ping_pong(), which arrive at different times of a sleep
SIZES = (1 << 10, 1 << 18)  # numbers of a small and a large array
LARGER_THAN_CACHE = 1 << 23  # numbers


def main():
    limit_blas(1)
    world = MpiCommunicator()
    constants = measure(world)
    if world.is_root:
        print(json.dumps(constants), flush=True)


def measure(world):
    """{name of a field of Machine: [its constants]}; the number of ranks of the group `world` is a power of two."""
    rates = unit_rates(world)  # at first: then the memory of later arrays is reused, as in training
    bandwidth, messages = update_bandwidth(world), links(world)
    steps = overheads(world, bandwidth)
    background = in_background(world, bandwidth, messages["collective"], *steps["update"])
    found = {**rates, **messages, **steps, "background": background, "bandwidth": [bandwidth], "queries": [QUERIES]}
    return found | {"action": [action(world, machine_of(found | {"action": [0.0]}, world.size))]}


def shortest(world, functions, seconds):
    """[the shortest sample of seconds(function)] of each function, an array, on the slowest rank.

    A sample is the mean of so many calls that they take SAMPLE seconds, as a short step does. The functions alternate,
    because the speed of a machine changes.
    """
    first = world.all_gather_object([np.sum(seconds(function)) for function in functions])
    counts = [math.ceil(SAMPLE / each) for each in np.max(first, axis=0)]  # every rank makes the same calls
    samples = [[] for _ in functions]
    for _ in range(REPEATS):
        for each, function, count in zip(samples, functions, counts, strict=True):
            world.barrier()
            each.append(np.mean([seconds(function) for _ in range(count)], axis=0))
    return np.max(world.all_gather_object([np.min(each, axis=0) for each in samples]), axis=0)


def line(sizes, seconds):
    """(seconds at size 0; seconds per size) of the line through two points; neither is below 0."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return max(0.0, seconds[0] - slope * sizes[0]), slope


# -- computation -------------------------------------------------------------------------------------------------------


def unit_rates(world):
    """The Rates of a block, and of embedding and head together; and other times of a unit: the last line.

    Seven times determine five constants of a block: those of passes of three models, and of one score of attention.
    Embedding and head have the same rate of products.
    """
    shapes = [(config, count) for config in (SHORT, NARROW, WIDE) for count in (FEW, MANY)]
    passes = [make_pass(replace(config, n_layer=n), count) for config, count in shapes for n in (1, config.n_layer)]
    others = [make_pass(SHORT, MERGED), make_pass(SHORT, MERGED, merged=True)]
    others += [make_pass(SHORT, 1, of_embedding=True), make_pass(SHORT, 1, recompute="block")]
    others += [make_pass(SHORT, 1, splits=True)]
    *times, plain, merged, embedding, block, split = shortest(world, [*passes, *others], lambda run: run())
    times = np.reshape(times, (len(shapes), 2, 2))  # shape, layers, direction
    blocks = (times[:, 1] - times[:, 0]) / [[config.n_layer - 1] for config, _ in shapes]
    ends, attention, rates = times[:, 0] - blocks, attention_times(world), {}
    heads, width = NARROW.n_head, NARROW.n_embd
    for i, (direction, products) in enumerate((("forward", 1), ("backward", 2))):
        sequence, score = line([heads * length**2 for length in LENGTHS], attention[:, i])
        # of each measured time: how often it has each of the five constants
        of_score = [0.0, 0.0, products * 4 * width / heads, 0.0, 1.0]
        of_blocks = [row_of("h.0", *shape, products) for shape in shapes]
        without_sequences = blocks[:, i] - [count * sequence for _, count in shapes]
        scales = [score, *blocks[:, i]]
        overhead, parameter, flop, byte, score = solve([of_score, *of_blocks], [score, *without_sequences], scales)
        rates[f"block_{direction}"] = [overhead, 1 / flop, 1 / byte, sequence, score, parameter]
        of_ends = np.array([row_of("head", *shape, products) for shape in shapes])
        overhead, byte = solve(of_ends[:, [0, 3]], ends[:, i] - of_ends[:, 2] * flop, ends[:, i])
        rates[f"ends_{direction}"] = [overhead, 1 / flop, 1 / byte]
    micro_batch = (merged - plain).sum().item() / (MERGED - 1) / (SHORT.n_layer + 1)
    work = unit_work(SHORT, SHORT.block_size, "h.0", 1, QUERIES)
    gradients = work.parameters * rates["block_backward"][-1]
    micro_batch -= gradients
    weights = split[1].item() / (SHORT.n_layer + 1) - gradients
    weights -= 2 * SHORT.block_size * work.parameters / rates["block_backward"][1]
    part = min(1.0, (embedding.sum() / ends[0].sum()).item())
    count = len(recomputed_units(unit_names(SHORT), "block"))
    again = ((block.sum() - times[0, 1].sum()) / count - blocks[0, 0]).item()
    found = {"micro_batch": micro_batch, "again": again, "weights": weights}
    return rates | {"embedding": [part]} | {name: [max(0.0, value)] for name, value in found.items()}


def solve(rows, seconds, scales):
    """The constants of which each time has as many as its row says, with the least squares of errors / scales.

    Constants that would be below 0 are 1e-15, and the others are those of the best solution without them. Of equally
    good solutions the one without the first constant is taken.
    """
    scales = np.maximum(np.abs(scales), 1e-9)  # noise may make the difference of two times 0
    rows, seconds = np.array(rows) / scales[:, None], np.divide(seconds, scales)
    found, best = None, np.inf
    for used in itertools.product((False, True), repeat=rows.shape[1]):
        some, used = np.zeros(len(used)), np.array(used)
        some[used] = np.linalg.lstsq(rows[:, used], seconds, rcond=None)[0]
        error = np.sum((rows @ some - seconds) ** 2)
        if np.all(some >= 0) and error < best - 1e-12:
            found, best = some, error
    return np.maximum(found, 1e-15).tolist()


def row_of(unit, config, count, products):
    """[calls, parameters, operations, bytes, scores] of `count` sequences; products: 1 in forward, 2 in backward."""
    work = unit_work(config, config.block_size, unit, 1, QUERIES)
    products *= count
    return [1.0, work.parameters, products * work.flops, products * FP32 * work.numbers, count * work.scores]


def attention_times(world):
    """(2, 2) seconds of attention for one sequence, of each of LENGTHS, forward and backward."""
    backend, heads, rng = NumpyBackend(), NARROW.n_head, np.random.default_rng(0)

    def make(length):
        qkv, dy = (rng.standard_normal((MANY, length, n * NARROW.n_embd), np.float32) for n in (3, 1))

        def run():
            start = time.thread_time()
            y, aux = backend.attention_forward(qkv, heads)
            middle = time.thread_time()
            backend.attention_backward(dy, qkv, y, aux, heads)
            return middle - start, time.thread_time() - middle

        return run

    return shortest(world, [make(length) for length in LENGTHS], lambda run: run()) / MANY


def make_pass(config, sequences, group=None, merged=False, of_embedding=False, recompute="none", splits=False):
    """A function -> (forward seconds, backward seconds) of a pass of this model, or only of its embedding.

    group: the ranks that divide each layer; None: one rank. merged: whether each sequence is a micro-batch. splits:
    whether the function returns the seconds of B and W actions.
    """
    backend, group, nothing = NumpyBackend(), group or Solo(), lambda unit: None
    own = {name: shard(name, array, group.rank, group.size) for name, array in initial_parameters(config, 0)}
    arena = DividedArena({name: array.shape for name, array in own.items()})
    flats = [backend.zeros((arena.size,), backend.dtype) for _ in range(2)]  # parameters and gradients
    for name, view in arena.views(flats[0]).items():
        view[...] = own[name]
    shape, count = (sequences, config.block_size), sequences if merged else 1
    layout, dloss = ArenaLayout(arena, backend), backend.ones((), np.float64)
    recompute = "block" if of_embedding else recompute  # then the embedding is a part of its own
    work = Workload(config, layout, *flats, backend, count, shape, dloss, recompute, count)
    worker = Worker(ArenaGradients(work, nothing), group, nothing)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (count, 1, shape[1]) if merged else shape)
    ids = backend.prepare_tokens(ids, config.vocab_size)
    arguments = work.training_arguments(0, ids, 1 / ids.size)
    parts = worker.parts[:1] if of_embedding else worker.parts
    dy = backend.zeros((*shape, config.n_embd), backend.dtype) if of_embedding else dloss

    def run():
        start = time.thread_time()
        worker.unit_gradients.begin()
        worker.unit_gradients.begin_pass()
        graphs, _ = forward_pass(parts, ids, arguments)
        middle, later = time.thread_time(), []
        if splits:
            start, dx = middle, dy
            while graphs:
                dx = graphs.pop().backward(dx, later.append)
            middle = time.thread_time()
            for compute in later:
                compute()
        else:
            backward_pass(graphs, dy)
        return middle - start, time.thread_time() - middle

    return run


# -- messages ----------------------------------------------------------------------------------------------------------


def links(world):
    """{name: [alpha, beta]}, the Links of blocking calls, alpha of a round; `inside` has `call` too; and `reaction`."""
    p, part, out = world.size, (world.size - 1) / world.size, np.empty(max(SIZES), np.float32)
    calls = {
        "collective": (lambda x: world.all_reduce(x, out=out[: len(x)]), rounds("all_reduce", p), 2 * part),
        "gather": (lambda x: world.all_gather(x[: len(x) // p]), rounds("all_gather", p), part),
    }
    arrays = [np.zeros(size, np.float32) for size in SIZES]
    functions = [lambda call=call, x=x: call(x) for call, *_ in calls.values() for x in arrays]
    messages = [(arrays[0], WAITS[0]), (arrays[1], WAITS[0]), (arrays[0], WAITS[1])]
    functions += [lambda x=x, wait=wait: ping_pong(world, x, wait) for x, wait in messages]
    seconds = shortest(world, functions, wall_seconds).tolist()
    found = {"inside": inside_layers(world)}
    for (name, (_, alphas, sent)), *times in zip(calls.items(), seconds[:-3:2], seconds[1:-3:2], strict=True):
        start, beta = line([sent * x.nbytes for x in arrays], times)
        found[name] = [start / alphas, beta]
    small, large, later = (time / (2 * PHASES) - wait for time, (_, wait) in zip(seconds[-3:], messages, strict=True))
    alpha, reaction = line(WAITS, [small, later])
    return found | {"message": [alpha, line([x.nbytes for x in arrays], [small, large])[1]], "reaction": [reaction]}


def inside_layers(world):
    """`inside` of Machine: by how much a pass of ranks that divide each layer is longer than without their sums.

    It is measured in groups of 2 ranks, all at the same time, and in larger groups.
    """
    groups = [world.split(world.rank // 2**i, world.rank) for i in range(1, int(math.log2(world.size)) + 1)]
    cases = list(itertools.product(groups, ((SHORT, 1), (WIDE, MANY))))
    parts = [(shape, each) for group, shape in cases for each in (Slice(group.rank, group.size), group)]
    times = shortest(world, [make_pass(*shape, group=each) for shape, each in parts], wall_seconds)
    rows, longer, least = [], [], []  # least: 1 % of the pass, because a difference of two times may be only noise
    for (group, (config, count)), (without, complete) in zip(cases, times.reshape(-1, 2), strict=True):
        size = count * config.block_size * config.n_embd * FP32
        rows.append([1.0, rounds("all_reduce", group.size), textbook_bytes("all_reduce", size, group.size)])
        # four of a block, one of the embedding, one of the head, two of the cross-entropy
        calls = 4 * config.n_layer + 4
        longer.append((complete - without) / calls)
        least.append(complete / calls / 100)
    call, alpha, beta = solve(rows, longer, np.maximum(longer, least))
    return [alpha, beta, call]


def thread_seconds(function):
    """The seconds in which the thread computes function()."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def wall_seconds(function):
    """The seconds of function()."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ping_pong(world, x, wait):
    """Send x from each even rank to the next rank and back, PHASES times, each time after `wait` seconds in the mean.

    All pairs send at the same time.
    """
    for phase, sender in itertools.product(range(PHASES), (0, 1)):
        if world.rank % 2 == sender:
            end = time.perf_counter() + wait * (0.5 + (phase + 0.5) / PHASES)
            while time.perf_counter() < end:
                pass
            world.send(x, world.rank ^ 1)
        else:
            world.recv(x, world.rank ^ 1)


# -- the update --------------------------------------------------------------------------------------------------------


def update_bandwidth(world):
    """Bytes per second of the update of arrays that are not in the cache."""
    size, backend, other = 1 << 20, NumpyBackend(), np.zeros(LARGER_THAN_CACHE, np.float32)
    p, m, v, g = (np.zeros(size, np.float32) for _ in range(4))
    decays, coefficients = np.zeros(size // PAGE, np.int32), np.array([1e-3, 1e-8, 1.0])

    def update():
        backend.page_sums(g)
        backend.adamw_step(p, m, v, g, coefficients, np.float64(1.0), decays, (0.9, 0.999))

    def seconds(update):
        np.add(other, 1, out=other)
        return thread_seconds(update)

    (found,) = shortest(world, [update], seconds).tolist()
    return UPDATE * p.nbytes / found


def overheads(world, bandwidth):
    """`update` and `step` of Machine: what a step of one rank takes besides its pass and the update of its numbers."""
    models = [replace(SHORT, n_layer=layers) for layers in (1, SHORT.n_layer)]
    passes = [make_pass(config, 1) for config in models]
    steps = [make_step(make_trainer(config, Solo(), ParallelConfig(), 1)) for config in models]
    seconds = shortest(world, [*passes, *steps], thread_seconds).reshape(2, 2)
    updates = np.array([UPDATE * FP32 * parameter_count(config) / bandwidth for config in models])
    step, update = line([len(unit_names(config)) for config in models], (seconds[1] - seconds[0] - updates).tolist())
    return {"step": [step], "update": [update]}


def in_background(world, bandwidth, collective, update):
    """`background` of Machine: by how much a step is longer with ZeRO-3 than with ZeRO-0, for each collective.

    collective: the Link of the all-reduce of ZeRO-0. update: that of Machine; with ZeRO-3 each rank updates its part.
    """
    p = world.size
    models = SHORT, WIDE
    trainers = [make_trainer(config, world, ParallelConfig(zero=zero), p) for config in models for zero in (0, 3)]
    seconds = shortest(world, list(map(make_step, trainers)), wall_seconds).reshape(2, 2)
    sent, times = [], []
    for config, trainer, longer in zip(models, trainers[1::2], seconds[:, 1] - seconds[:, 0], strict=True):
        calls = [call for call in traffic(layout_of(trainer), Grid()) if call.eager]
        count, size = sum(call.times for call in calls), FP32 * parameter_count(config)
        longer += (UPDATE * size / bandwidth + update * len(unit_names(config))) * (p - 1) / p
        longer += rounds("all_reduce", p) * collective[0] + textbook_bytes("all_reduce", size, p) * collective[1]
        each = [call.times * textbook_bytes(call.name, call.elements * FP32, p) for call in calls]
        sent.append(sum(each) / count)
        times.append(longer.item() / count)
    start, beta = line(sent, times)
    return [start / rounds("all_gather", p), beta]  # a reduce-scatter has as many rounds


def action(world, machine):
    """`action` of Machine: by how much longer a rank computes than `machine`, without it, predicts; mean of the ranks.

    The time between two actions counts too, if no message is waited for.
    """
    trainer = make_trainer(SHORT, world, ParallelConfig(pp=world.size, pp_schedule="gpipe"), MORE * world.size)
    layout, executor = layout_of(trainer), trainer.accumulator.executor
    executor.record_times()
    sums = FP32 * ADD * arena_of(layout, world.rank).size * (layout.count - 1)  # of gradients, which actions compute
    predicted = pipeline_timeline(layout, machine).busy[world.rank] + sums / machine.bandwidth

    def seconds(step):
        wall, times = wall_seconds(step), list(executor.times.values())
        between = min(following[0] - end for (_, end), following in itertools.pairwise(times))
        longer = (sum(end - start for start, end in times) - predicted) / len(times) + between
        return wall, np.mean(world.all_gather_object(longer))

    ((_, found),) = shortest(world, [make_step(trainer)], seconds).tolist()
    return max(0.0, found)


def make_trainer(config, group, parallel, micro_batches):
    """The trainer of a model with one sequence in each micro-batch."""
    sizes = dict(batch_size=micro_batches, seq_len=config.block_size, micro_batches=micro_batches)
    return FastTrainer(config, [NumpyBackend()], world=group, parallel=parallel, **sizes)


def make_step(trainer):
    """A function that trains a step."""
    tokens = np.random.default_rng(0).integers(0, trainer.config.vocab_size, 2000)
    return functools.partial(trainer.step, read_batch(trainer, Windows(tokens, trainer.config.block_size)), 1e-3)


if __name__ == "__main__":
    main()

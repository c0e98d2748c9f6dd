"""What does each choice in the NumPy backend gain?

First, choices that concern all kernels: memory, and which library multiplies. Then, each kernel that NumpyBackend
overrides, beside its formula in PlainBackend, in training steps of preset `paper`: the time of all its calls in a step.
Both sides compute the same values, and are timed alternately. `loss` and `clip` are not overridden to be faster: they
add in the canonical order, which gives every number of ranks the same bits. Their rows show what this order costs.

    python -m benchmarks.cpu.choices             # every choice, 15 rounds
    python -m benchmarks.cpu.choices --rounds 3  # a quick trial
"""

import time
from collections import Counter
from functools import partial

import numpy as np

from benchmarks.harness.ours import build_trainer, train_step
from benchmarks.harness.report import paired_ratio
from benchmarks.harness.rounds import SEED, interleaved, mean_seconds, random_batch
from benchmarks.harness.script import benchmark
from gpt2core.plain_backend import PlainBackend
from gpt2core.presets import PRESETS
from gpt2core.threads import limit_blas
from gpt2core.tracing.hooks import Hooks, around_gradients
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.numpy_backend import NumpyBackend

ORDERED = "loss", "clip"  # kernels that are overridden for the order of their sums
B, T = 2, 256  # a micro-batch: 2 sequences of 256 tokens


def choices():
    """Yield (name, naive, ours) of each choice; naive() and ours() compute the same values."""
    config, rng, backend = PRESETS["paper"], np.random.default_rng(), NumpyBackend()
    C = config.n_embd
    wide = rng.standard_normal((B * T, 4 * C), np.float32)  # the widest activations of a layer, those of the MLP
    out, pool = np.empty_like(wide), BufferPool()
    activations = range(24)  # 24 arrays of 3 MB are allocated, then all are freed
    yield "cube: x**3 -> x*x*x", lambda: wide**3, lambda: np.multiply(np.multiply(wide, wide, out=out), wide, out=out)
    yield (
        "activations: np.empty -> BufferPool",
        lambda: [np.add(wide, 1, out=np.empty_like(wide)) for _ in activations],
        lambda: [np.add(wide, 1, out=pool.empty(wide.shape, wide.dtype)) for _ in activations],
    )
    weights = [rng.standard_normal((4 * C, C), np.float32) for _ in range(24)]  # together larger than the cache
    row = wide[:1]
    product = np.empty((1, C), np.float32)
    backend.one_row(row, weights[0], product)
    (chosen,) = backend.row_products.names.values()
    for way, naive in backend.row_products.candidates(weights[0]).items():
        if way != chosen:
            yield (
                f"one row @ w: {way} -> {chosen}, which RowProducts chose here",
                lambda naive=naive: [naive(row, w, product) for w in weights],
                lambda: [backend.one_row(row, w, product) for w in weights],
            )
    if backend.runtime.blas == "mkl":
        square = wide[:, :C].copy()
        yield (
            "products: OpenBLAS -> MKL",
            lambda: [np.matmul(wide, w, out=square) for w in weights],
            lambda: [backend.matmul(wide, w, square) for w in weights],
        )


def kernel_timer(backend):
    """Return a function that runs a training step and returns {kernel: seconds of its calls, forward and backward}."""
    config, spent, running = PRESETS["paper"], Counter(), []
    trainer = build_trainer(config, B, T, 1, True, backends=[backend])
    batch = random_batch(np.random.default_rng(SEED), config.vocab_size, B, T)

    def timed(name, call):
        running.append(name)
        began = time.perf_counter()
        result = call()
        running.pop()
        if not running:  # a kernel may call other kernels
            spent[name.removesuffix("_forward").removesuffix("_backward")] += time.perf_counter() - began
        return result

    def around(name, kernel, arguments, options):
        result = timed(name, partial(kernel, *arguments, **options))
        return around_gradients(result, lambda gradient, out: timed(name, partial(gradient, out)))

    def step():
        spent.clear()
        train_step(trainer, *batch)
        return dict(spent)

    Hooks().around_kernels(backend, around)
    return step


def kernel_choices(rounds):
    """Yield (name, {"naive_seconds", "our_seconds": of each round}) of each kernel that NumpyBackend overrides."""
    timers = {"naive_seconds": kernel_timer(PlainBackend()), "our_seconds": kernel_timer(NumpyBackend())}
    for step in timers.values():
        step()  # allocates memory
    measured = interleaved(timers, rounds)
    for kernel in measured["our_seconds"][0]:
        names = kernel, f"{kernel}_forward", f"{kernel}_backward"
        if any(getattr(NumpyBackend, name, None) is not getattr(PlainBackend, name, None) for name in names):
            seconds = {side: [each[kernel] for each in steps] for side, steps in measured.items()}
            override = "sums in the canonical order" if kernel in ORDERED else "override"
            yield f"{kernel}, all calls in a step: formula -> {override}", seconds


@benchmark("cpu-choices", rounds=15)
def main(args):
    limit_blas(1)
    measured = []
    for name, naive, ours in choices():
        repeat = max(1, int(0.02 / mean_seconds(ours, 2)))  # as many calls as our code makes in 20 ms
        functions = {"naive_seconds": naive, "our_seconds": ours}
        timers = {side: partial(mean_seconds, function, repeat) for side, function in functions.items()}
        measured.append((name, interleaved(timers, args.rounds)))
    measured += kernel_choices(args.rounds)
    return [{"choice": name, **sides, "gain": paired_ratio(*sides.values())} for name, sides in measured]

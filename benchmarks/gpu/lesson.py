"""What does each section of stage 2's lesson gain? Compares plain code with this project's, section by section.

The lesson is stage2_cuda/README.md. Kernels are timed by device events; launches, training steps and generated tokens
are timed by the host's clock.

    python -m benchmarks.gpu.lesson             # 7 rounds
    python -m benchmarks.gpu.lesson --rounds 1  # a quick trial
"""

import functools

import numpy as np
import triton
import triton.language as tl

from benchmarks.gpu.plain_kernels import GPT2, KERNEL_PAIRS, SEED, Comparison, check_close
from benchmarks.gpu.timing import device_seconds, step_timer
from benchmarks.harness.ours import CudaGenerator, CudaSteps, check_gpu, seconds_per_step
from benchmarks.harness.processes import progress
from benchmarks.harness.report import paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved, mean_seconds
from benchmarks.harness.script import benchmark
from gpt2core.presets import PRESETS

BATCH_SIZE = 16  # sequences of a training step, as in the paper


@triton.jit
def add_kernel(out_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """out (n) = x + y."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask) + tl.load(y_ptr + offs, mask), mask)


def launches(xp):
    """Section 3: the time that Python takes to launch a kernel, by Triton's launcher (plain) and by launch() (ours)."""
    from stage2_cuda.runtime.triton_launch import Pointer, launch

    arrays = [xp.ones(1024, np.float32) for _ in range(3)]
    functions = (
        lambda: add_kernel[(1,)](*map(Pointer, arrays), 1024, BLOCK=1024, enable_fp_fusion=True),
        lambda: launch(add_kernel, (1,), *arrays, 1024, BLOCK=1024),
    )
    timed = (functools.partial(host_seconds, xp, function, calls=500) for function in functions)
    return Comparison(3, "a launch", *timed)


def host_seconds(xp, function, calls):
    """mean_seconds() of calls that need not wait for the GPU."""
    xp.cuda.Device().synchronize()
    seconds = mean_seconds(function, calls)
    xp.cuda.Device().synchronize()
    return seconds


def training():
    """Yield the Comparisons of sections 11 and 12: whole training steps of preset paper."""
    config = PRESETS["paper"]

    def timer(precision="bf16", captured=True, overlap=True, count=100):
        program = CudaSteps(config, BATCH_SIZE, config.block_size, precision, captured=captured)
        return step_timer(program, config, BATCH_SIZE, count, overlap)

    full_step = timer()  # with all optimisations
    yield Comparison(11, "a step of preset paper, fp32 and bf16", timer("fp32"), full_step)
    yield Comparison(12, "the same in bf16, as a graph", timer(captured=False, count=10), full_step)
    yield Comparison(12, "the same, begun before the previous loss is read", timer(overlap=False), full_step)


def generation():
    """Yield the Comparisons of section 15: one generated token of GPT-2 124M, one sequence."""
    generator, prompts = CudaGenerator(PRESETS["gpt2"], 1), [np.arange(256)]

    def timer(decoder, steps):
        return functools.partial(seconds_per_step, decoder, prompts, steps)

    uncaptured = timer(generator.decoder(1, captured=False), 50)
    captured = timer(generator.decoder(1), 200)
    yield Comparison(15, "a token, as a graph", uncaptured, captured)
    # pdl: programmatic dependent launch. A kernel prefetches its weights while the previous kernel still runs.
    yield Comparison(15, "a token, weights prefetched", timer(generator.decoder(1, pdl=False), 200), captured)


def measure(comparison, rounds):
    """Measure both versions in `rounds` rounds, after one call of each that is not counted.

    Returns {"section", "name", "plain" and "ours": [seconds of each round], "times_as_fast": their ratio}.
    """
    functions = {"plain": comparison.plain, "ours": comparison.ours}
    for function in functions.values():
        function()
    seconds = interleaved(functions, rounds)
    ratio = paired_ratio(seconds["plain"], seconds["ours"])
    return {"section": comparison.section, "name": comparison.name, **seconds, "times_as_fast": ratio}


def comparisons(xp):
    """Yield all Comparisons, one at a time, so that the GPU memory of one is freed before the next is allocated."""
    rng = np.random.default_rng(SEED)
    yield launches(xp)
    for make_pair in KERNEL_PAIRS:
        pair = make_pair(xp, lambda *shape: xp.asarray(rng.standard_normal(shape, np.float32)), GPT2)
        check_close(pair)
        functions = (functools.partial(device_seconds, xp, function) for function in (pair.plain, pair.ours))
        yield Comparison(pair.section, pair.name, *functions)
        del pair, functions
        xp.get_default_memory_pool().free_all_blocks()
    yield from training()
    yield from generation()


@benchmark(rounds=7)
def main(args):
    xp, results = check_gpu(), []
    for comparison in comparisons(xp):
        progress(comparison.name)
        results.append(measure(comparison, args.rounds))
        # after each comparison, so that an interrupted run keeps its finished ones
        save(results, args)
        del comparison  # frees its arrays before the next comparison allocates
    progress("")
    TABLES["gpu-lesson"].print(results)

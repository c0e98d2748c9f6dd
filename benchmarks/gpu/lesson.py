"""What does each step of stage 2's lesson gain? The plain way against ours, in the order of stage2_cuda/README.md.

Both ways compute the same numbers, which is asserted first, and then take turns, A B, B A. Kernels are timed by the
GPU's clock, against CuPy's functions; launches, steps and tokens by the host's.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from benchmarks.gpu.decode import seconds_a_step
from benchmarks.gpu.plain_kernels import GPT2, KERNELS, SEED, compare
from benchmarks.harness import ours as our_own
from benchmarks.harness.contenders import add_saving, paired_ratio, print_table, progress, run, save
from gpt2core.app.presets import PRESETS
from gpt2core.errors import ConfigError

BENCHMARK = "benchmarks.gpu.lesson"
BATCH = 16  # sequences of a training step, as the paper has it


# -- what the host waits for ------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """plain() and ours() take a turn each, and return the seconds of one launch, step or token."""

    section: int
    what: str
    plain: Callable
    ours: Callable


@triton.jit
def add_kernel(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


def launches(xp):
    """Section 1: microseconds of Python until a kernel is on its way."""
    from stage2_cuda.runtime.triton_launch import Pointer, launch

    arrays = [xp.ones(1024, np.float32) for _ in range(3)]
    ways = (
        lambda: add_kernel[(1,)](*map(Pointer, arrays), 1024, BLOCK=1024, enable_fp_fusion=True),
        lambda: launch(add_kernel, (1,), *arrays, 1024, BLOCK=1024),
    )
    return Turn(1, "a launch", *(functools.partial(host_seconds, xp, way, calls=500) for way in ways))


def host_seconds(xp, function, calls):
    """Of one call, not waiting for the GPU."""
    xp.cuda.Device().synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = (time.perf_counter() - started) / calls
    xp.cuda.Device().synchronize()
    return seconds


class Steps:
    """Training steps of preset paper: a call takes some and returns the seconds of one."""

    def __init__(self, precision="bf16", recorded=True, ahead=True, count=100):
        self.config, self.count, self.ahead, self.rng = PRESETS["paper"], count, ahead, np.random.default_rng(SEED)
        self.steps = our_own.CudaSteps(self.config, BATCH, self.config.block_size, precision, recorded=recorded)

    def __call__(self):
        shape = BATCH, self.config.block_size + 1
        tokens = [self.rng.integers(0, self.config.vocab_size, shape) for _ in range(self.count)]
        batches = [(each[:, :-1].copy(), each[:, 1:].copy()) for each in tokens]
        if self.ahead:
            self.steps.announce(batches)
        started = time.perf_counter()
        for batch in batches:
            self.steps(*batch)
        return (time.perf_counter() - started) / self.count


def training():
    """Sections 8 and 9: whole steps."""
    best = Steps()
    yield Turn(8, "a step of preset paper, fp32 and bf16", Steps("fp32"), best)
    yield Turn(9, "the same in bf16, as a graph", Steps(recorded=False, count=10), best)
    yield Turn(9, "the same, begun before the loss before it is read", Steps(ahead=False), best)


def generation():
    """Section 10: a token of GPT-2 124M, one text."""
    from stage2_cuda.decoding.decode_stream import DecodeStream
    from stage2_cuda.decoding.decoder import GpuDecoder

    class Unrecorded(DecodeStream):
        def record(self, function):
            return function

    texts = our_own.CudaTexts(PRESETS["gpt2"], 1)
    tiles, prompt = texts.backend.decode_tiling(1), [list(range(256))]
    unrecorded = GpuDecoder(texts.model, 1, Unrecorded(texts.backend.xp), tiles)
    turn = lambda engine, steps: functools.partial(seconds_a_step, engine, prompt, steps)  # noqa: E731
    best = turn(texts.engine(1), 200)
    yield Turn(10, "a token, recorded", turn(unrecorded, 50), best)
    yield Turn(10, "a token, each kernel's weights fetched ahead", turn(texts.engine(1, pdl=False), 200), best)


# -- measuring --------------------------------------------------------------------------------------------------------


def device_seconds(xp, function, least=0.02):
    """Of one call, by the GPU's clock; calls are repeated until they take `least` seconds together."""
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    calls, seconds = 1, 0.0
    while seconds < least:
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        seconds, calls = 1e-3 * xp.cuda.get_elapsed_time(begin, end), 2 * calls
    return seconds / (calls // 2)


def measure(turn, rounds):
    """{"section", "what", "plain", "ours": seconds of each turn}; each way has had a turn before."""
    ways = {"plain": turn.plain, "ours": turn.ours}
    for way in ways.values():
        way()
    seconds = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(ways[name]())
    return {"section": turn.section, "what": turn.what, **seconds}


def row_of(result):
    plain, ours = (1e6 * statistics.median(result[name]) for name in ("plain", "ours"))
    return {
        "section": result["section"],
        "what": result["what"],
        "the plain way, us": f"{plain:,.1f}",
        "ours, us": f"{ours:,.1f}",
        "times as fast": f"{paired_ratio(result['plain'], result['ours']):.2f}",
    }


def turns(xp):
    """All rows, as Turns, one at a time: what one holds on the GPU is gone when the next is made."""
    generator = np.random.default_rng(SEED)
    yield launches(xp)
    for kernel in KERNELS:
        row = kernel(xp, lambda *shape: xp.asarray(generator.standard_normal(shape, np.float32)), GPT2)
        compare(row, xp)
        ways = (functools.partial(device_seconds, xp, way) for way in (row.plain, row.ours))
        yield Turn(row.section, row.what, *ways)
        del row, ways
        xp.get_default_memory_pool().free_all_blocks()
    yield from training()
    yield from generation()


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="turns of each way (default 7)")
    add_saving(add)
    args = parser.parse_args()
    from stage2_cuda.runtime.triton_launch import array_module

    xp, results = array_module(), []
    if xp is np:
        raise ConfigError("TRITON_INTERPRET is set: there is nothing to time on the CPU")
    for turn in turns(xp):
        progress(turn.what)
        results.append(measure(turn, args.rounds))
        if not args.no_save:  # after each: what cuts a run off must not take all of it along
            save(BENCHMARK, results, args.commit, "lesson")
        del turn  # or its arrays would be there beside the next one's
    progress("")
    print_table([row_of(result) for result in results])


if __name__ == "__main__":
    run(main)

"""Times functions on one GPU: calls in a row, training steps, and kernels that compute the same."""

import contextlib
import statistics
import time

import numpy as np

from benchmarks.harness.rounds import SEED, random_batch
from stage2_cuda.runtime.triton_launch import array_module, compile_ahead, first_line, launcher
from stage2_cuda.tuning.tuner import capture_calls, difference, medians, milliseconds

LEAD_IN = 3  # calls that are not timed, because the GPU was idle or ran another process before


def random_arrays(*shapes):
    """A float32 array of each shape, the same in every process: one million normal random numbers, repeated."""
    numbers = np.random.default_rng(SEED).standard_normal(1_000_003, np.float32)
    return [np.resize(numbers[offset:], shape) for offset, shape in enumerate(shapes)]


def time_calls(function, arguments):
    """The seconds of each call of `function` with one of the `arguments`, without the first LEAD_IN calls."""
    seconds = []
    for argument in arguments:
        started = time.perf_counter()
        function(argument)
        seconds.append(time.perf_counter() - started)
    return seconds[LEAD_IN:]


def step_timer(program, config, batch_size, steps, overlap=True):
    """Return a function without arguments: the median seconds of `steps` steps of a CudaSteps on random tokens.

    overlap: begin each step before the loss of the previous step is read.
    """
    rng = np.random.default_rng(SEED)

    def run_round():
        batches = [random_batch(rng, config.vocab_size, batch_size, config.block_size) for _ in range(LEAD_IN + steps)]
        if overlap:
            program.announce(batches)
        return statistics.median(time_calls(lambda batch: program(*batch), batches))

    return run_round


def device_seconds(xp, function, min_total=0.02):
    """Seconds of one call of function(), by device events: the mean of calls that take at least `min_total` s."""
    stream, calls, seconds = xp.cuda.get_current_stream(), 1, 0.0
    while seconds < min_total:
        seconds = 1e-3 * milliseconds(xp, stream, lambda calls=calls: [function() for _ in range(calls)])
        calls *= 2
    return seconds / (calls // 2)


def time_functions(functions, rounds, calls=20, outputs=(), tolerance=np.inf):
    """{name: {"ms": the median of a call, "error": see below} or {"failed": text}} of functions {name: function}.

    Kernels are compiled in threads. Each round times a CUDA graph of `calls` calls of each function. outputs: arrays
    that all functions write; "error" is their largest relative difference from those of the first function. A function
    fails if it raises an exception, for example because a tile needs more registers than the GPU has, or if its error
    is `tolerance` or more. An exception of the first function is raised.
    """
    xp, graphs, results, expected = array_module(), {}, {}, None
    for function in functions.values():
        with contextlib.suppress(Exception):
            compile_ahead(function)
    launcher().wait_for_threads()
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.runtime.deviceSynchronize()  # the arrays were filled on another stream
    with stream:
        for name, function in functions.items():
            try:
                for array in outputs:
                    array[...] = np.nan  # so that an element that is not written is detected
                function()
                found = [array.copy() for array in outputs]
                expected = expected or found
                error = float(np.max([difference(*pair) for pair in zip(found, expected, strict=True)], initial=0.0))
                if not error < tolerance:  # also if it is not a number
                    raise ArithmeticError(f"wrong results, relative difference {error:.3g}")
                graph = capture_calls(stream, function, calls)
                stream.synchronize()
            except Exception as problem:
                if not results:
                    raise
                results[name] = {"failed": first_line(problem)}
                print(f"{name}: {first_line(problem)}", flush=True)
            else:
                graphs[name], results[name] = graph, {"error": error}
        for name, ms in zip(graphs, medians(xp, stream, list(graphs.values()), rounds) / calls, strict=True):
            results[name]["ms"] = float(ms)
    return results

"""Times several functions that compute the same on one GPU, for example a kernel with other tiles."""

import contextlib

import numpy as np

from stage2_cuda.runtime.triton_launch import array_module, compile_ahead, launcher
from stage2_cuda.tuning.tuner import capture_calls, difference, medians


def first_line(error):
    """The first line of an error, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


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

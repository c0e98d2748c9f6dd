"""The time at which a stream of a GPU reaches a point, also in a replay of a CUDA graph, where CUDA's events give none.

A kernel of one thread writes the GPU's clock (the register %globaltimer, in nanoseconds) to memory.
"""

import functools
import time

import numpy as np

SOURCE = """
extern "C" __global__ void read_clock(long long* out) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*out) : : "memory");
}
"""


def timestamp(cupy):
    """A device array (1) int64, which receives the time when the current stream reaches this point."""
    out = cupy.empty(1, np.int64)
    kernel(cupy)((1,), (1,), (out,))
    return out


def seconds(cupy, timestamps):
    """The values of arrays of timestamp() in seconds of time.perf_counter(). Waits for all work of the device."""
    cupy.cuda.runtime.deviceSynchronize()
    now = timestamp(cupy).item()  # waits for the kernel
    host_now = time.perf_counter()
    return [host_now - 1e-9 * (now - each.item()) for each in timestamps]


@functools.cache
def kernel(cupy):
    return cupy.RawKernel(SOURCE, "read_clock")

"""The best bucket size for the strategy bucket (strategies.py), from the measured time of all-reduces.

An all-reduce of s bytes takes alpha + beta s seconds: alpha per message, beta per byte. A gradient of n bytes has n / s
buckets of s bytes. Each bucket delays the computation by alpha. The beta s seconds of the last bucket overlap with no
computation, because backward has ended. Together, these delays make a step longer by

    exposed time = beta s + alpha n / s,  smallest at  s = sqrt(n alpha / beta)
"""

import math
import statistics
import time
from dataclasses import dataclass

# Two sizes of all-reduce are measured: a large one of at most LARGE bytes, and a small one of 1 / PARTS of its bytes.
LARGE, PARTS = 10**8, 64
REPEATS = (4, 32)  # all-reduces per round, of the large and of the small size
WARM_UP = 2  # rounds before the measurement; during these, the ranks connect, and the device captures the calls
ROUNDS = 5  # measured rounds
SMALLEST = 10**6  # bytes of a bucket: the time of a smaller message is mostly that of the host, not of the transfer


@dataclass(frozen=True)
class BucketSize:
    """One rank's measurement: alpha in seconds, beta in seconds per byte; and `mb`, the best bucket in 10^6 bytes."""

    alpha: float
    beta: float
    mb: int

    def __str__(self):
        measured = f"{1e6 * self.alpha:.1f} us per message and {1e12 * self.beta:.2f} ps per byte were measured"
        return f"`bucket_mb={self.mb}`: {measured}"


def best_bucket(alpha, beta, size):
    """The bucket size, in bytes, with the smallest exposed time for a gradient of `size` bytes; `size` if beta <= 0."""
    return math.sqrt(size * max(alpha, 0) / beta) if beta > 0 else size


def measured_bucket(group, gradients, backend, capture, clock=time.perf_counter):
    """The BucketSize for flat `gradients`, from in-place all-reduces over the group. All ranks must call this function.

    The gradients must be zero, so that the sums leave them zero. capture: whether training replays a captured step; if
    so, alpha does not include Python's time. Ranks measure different values: the caller broadcasts one rank's result.
    """
    sizes = [min(gradients.nbytes, LARGE) // parts for parts in (1, PARTS)]
    arrays = [gradients[: size // gradients.itemsize] for size in sizes]
    large, small = (
        time_all_reduce(group, x, backend, capture, repeats, clock) for x, repeats in zip(arrays, REPEATS, strict=True)
    )
    beta = (large - small) / (arrays[0].nbytes - arrays[1].nbytes)
    alpha = small - beta * arrays[1].nbytes
    best = min(max(best_bucket(alpha, beta, gradients.nbytes), SMALLEST), max(gradients.nbytes, SMALLEST))
    return BucketSize(alpha, beta, round(best / 1e6))


def time_all_reduce(group, x, backend, capture, repeats, clock):
    """Seconds per all-reduce of x: the median over rounds of the mean of `repeats` calls."""

    def all_reduces():
        for _ in range(repeats):
            group.all_reduce(x, out=x)
        return []

    step, rounds = backend.runtime.compile_step(all_reduces, capture, collectives=True), []
    for _ in range(WARM_UP + ROUNDS):
        began = clock()
        step()
        backend.to_host(x[:1])  # waits for the device
        rounds.append((clock() - began) / repeats)
    return statistics.median(rounds[WARM_UP:])

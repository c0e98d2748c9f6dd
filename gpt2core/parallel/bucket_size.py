"""The best bucket size for data_parallel.buckets_of, from measured costs: alpha per message and beta per byte.

A message of s bytes takes alpha + beta s seconds. No computation overlaps the beta s seconds of the last bucket, and
each of the n / s buckets of a gradient of n bytes delays the computation by alpha seconds:

    exposed time = beta s + alpha n / s,  smallest at  s = sqrt(n alpha / beta)
"""

import math
import statistics
import time
from dataclasses import dataclass

# Two all-reduces are measured: a large one of at most LARGE bytes, and one that is PARTS times smaller.
LARGE, PARTS = 10**8, 64
REPEATS = (4, 32)  # all-reduces per round, of the large and of the small size
WARM_UP, ROUNDS = 2, 5  # rounds before the measurement (connect the ranks, then capture), and measured rounds
LEAST = 10**6  # minimum bytes of a bucket: the host, not the transfer, determines the time of a smaller message


@dataclass(frozen=True)
class BucketSize:
    """One rank's measurement (alpha in seconds, beta in seconds per byte), and its best bucket size in 10^6 bytes."""

    alpha: float
    beta: float
    mb: int

    def __str__(self):
        measured = f"{1e6 * self.alpha:.1f} us per message and {1e12 * self.beta:.2f} ps per byte were measured"
        return f"--bucket-mb {self.mb}: {measured}"


def best_bucket(alpha, beta, size):
    """The bucket size in bytes with the smallest exposed time for a gradient of `size` bytes; `size` if beta <= 0."""
    return math.sqrt(size * max(alpha, 0) / beta) if beta > 0 else size


def measured_bucket(group, gradients, backend, capture, clock=time.perf_counter):
    """The BucketSize for flat `gradients`, from in-place all-reduces over the group; all ranks must call this.

    The gradients must be zero; the sums leave them zero. capture: whether the step will be replayed from a graph; then
    alpha does not include the time of Python. Ranks measure different values: broadcast one rank's result.
    """
    sizes = [min(gradients.nbytes, LARGE) // parts for parts in (1, PARTS)]
    arrays = [gradients[: size // gradients.itemsize] for size in sizes]
    large, small = (
        seconds(group, x, backend, capture, repeats, clock) for x, repeats in zip(arrays, REPEATS, strict=True)
    )
    beta = (large - small) / (arrays[0].nbytes - arrays[1].nbytes)
    alpha = small - beta * arrays[1].nbytes
    best = min(max(best_bucket(alpha, beta, gradients.nbytes), LEAST), max(gradients.nbytes, LEAST))
    return BucketSize(alpha, beta, round(best / 1e6))


def seconds(group, x, backend, capture, repeats, clock):
    """Seconds per all-reduce of x: the median over rounds of the mean of `repeats` calls."""

    def sums():
        for _ in range(repeats):
            group.all_reduce(x, out=x)
        return []

    step, rounds = backend.runtime.compile_step(sums, capture), []
    for _ in range(WARM_UP + ROUNDS):
        began = clock()
        step()
        backend.to_host(x[:1])  # waits for the device
        rounds.append((clock() - began) / repeats)
    return statistics.median(rounds[WARM_UP:])

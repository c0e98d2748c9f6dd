"""The best size of a bucket, from the measured cost of a message (alpha) and of each of its bytes (beta).

A message of s bytes takes alpha + beta s seconds. Nothing overlaps the last bucket, and a gradient of n bytes makes
n / s buckets, each of which costs alpha of the time of the computation:

    exposed time = beta s + alpha n / s,  smallest at  s = sqrt(n alpha / beta)
"""

import math
import statistics
import time
from dataclasses import dataclass

LARGE, PARTS = 10**8, 64  # most bytes of the larger message; its size over that of the smaller one
REPEATS = (4, 32)  # calls in one round, for the larger and for the smaller message
WARM_UP, ROUNDS = 2, 5  # the first round connects the ranks, the second may record; the others are measured
LEAST = 10**6  # bytes: the host, not the transfer, takes the time of a smaller message


@dataclass(frozen=True)
class BucketSize:
    """What rank 0 measured (alpha in seconds, beta in seconds a byte), and the bucket size from it, in 10^6 bytes."""

    alpha: float
    beta: float
    mb: int

    def __str__(self):
        taken = f"{1e6 * self.alpha:.1f} us a message and {1e12 * self.beta:.2f} ps a byte were measured"
        return f"--bucket-mb {self.mb}: {taken}"


def best_bucket(alpha, beta, size):
    """The bytes of the bucket with the smallest exposed time for a gradient of `size` bytes; all of it for beta 0."""
    return math.sqrt(size * max(alpha, 0) / beta) if beta > 0 else size


def measured_bucket(group, gradients, backend, record, clock=time.perf_counter):
    """The BucketSize for the flat `gradients`, from all-reduces over the group, in place; all ranks must call it.

    The gradients must be zero, and stay zero. record: whether the step will be replayed from a graph; alpha then leaves
    out the time of Python. Ranks measure different values: broadcast one rank's result.
    """
    sizes = [min(gradients.nbytes, LARGE) // parts for parts in (1, PARTS)]
    arrays = [gradients[: size // gradients.itemsize] for size in sizes]
    large, small = (
        seconds(group, x, backend, record, repeats, clock) for x, repeats in zip(arrays, REPEATS, strict=True)
    )
    beta = (large - small) / (arrays[0].nbytes - arrays[1].nbytes)
    alpha = small - beta * arrays[1].nbytes
    best = min(max(best_bucket(alpha, beta, gradients.nbytes), LEAST), max(gradients.nbytes, LEAST))
    return BucketSize(alpha, beta, round(best / 1e6))


def seconds(group, x, backend, record, repeats, clock):
    """The median time of one of `repeats` all-reduces of x, over several rounds."""

    def sums():
        for _ in range(repeats):
            group.all_reduce(x, out=x)
        return []

    step, rounds = backend.runtime.compile_step(sums, record), []
    for _ in range(WARM_UP + ROUNDS):
        began = clock()
        step()
        backend.to_host(x[:1])  # waits for the device
        rounds.append((clock() - began) / repeats)
    return statistics.median(rounds[WARM_UP:])

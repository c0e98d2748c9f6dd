"""How large is the best bucket? From what each message costs, alpha, and each of its bytes, beta, measured on the spot.

A message of s bytes takes alpha + beta s seconds. The last bucket is hidden by nothing, and of a gradient of n bytes
there are n / s buckets, each of which takes its alpha from somebody:

    exposed = beta s + alpha n / s,  which is least at  s = sqrt(n alpha / beta)
"""

import math
import statistics
import time
from dataclasses import dataclass

LARGE, PARTS = 10**8, 64  # bytes of the larger message at most; how many times as long as the smaller one it is
REPEATS = (4, 32)  # of the larger and of the smaller message, one behind the other, in one turn
WARM_UP, TURNS = 2, 5  # the first turn connects the ranks, the second one may be recorded; the others count
LEAST = 10**6  # bytes: below it the host is what takes time


@dataclass(frozen=True)
class BucketSize:
    """What rank 0 measured (seconds, seconds a byte), and the least size of a bucket that follows, in 10^6 bytes."""

    alpha: float
    beta: float
    mb: int

    def __str__(self):
        taken = f"{1e6 * self.alpha:.1f} us a message and {1e12 * self.beta:.2f} ps a byte were measured"
        return f"--bucket-mb {self.mb}: {taken}"


def best_bucket(alpha, beta, size):
    """The bytes of the bucket that exposes least of the sum of a gradient of `size` bytes; all of it for no beta."""
    return math.sqrt(size * max(alpha, 0) / beta) if beta > 0 else size


def measured_bucket(group, gradients, backend, record, clock=time.perf_counter):
    """The BucketSize for the flat `gradients`, from all-reduces over the group, in place; all ranks must call it.

    The gradients must be zero, and stay so. record: whether the step will be replayed from a graph: what Python takes
    to start a message is no part of alpha then. Each rank has its own result: let one rank's count.
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
    """The median over turns of what one of `repeats` all-reduces of x takes; each turn leaves the ranks in step."""

    def sums():
        for _ in range(repeats):
            group.all_reduce(x, out=x)
        return ()

    step, turns = backend.compile_step(sums, record), []
    for _ in range(WARM_UP + TURNS):
        began = clock()
        step()
        backend.number(x[:1])  # waits for the device
        turns.append((clock() - began) / repeats)
    return statistics.median(turns[WARM_UP:])

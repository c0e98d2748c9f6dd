"""Data parallelism is one sum over ranks: what is packed into a message, and when it leaves, is all there is to choose.

                            after backward     while backward goes on
    a message a parameter       naive                 overlap
    packed                      flat                  bucket

Every choice gives the same bits, because the canonical sum over ranks is taken element by element. The update waits for
the last message in any case: before, nobody knows whether the gradient is finite, and else it must change nothing.
"""

from gpt2core.errors import ConfigError

STRATEGIES = {  # name: (packed, whether a message leaves during backward)
    "naive": (False, False),
    "flat": (True, False),
    "overlap": (False, True),
    "bucket": (True, True),
}
BUCKET_MB = 25.0  # as PyTorch's DistributedDataParallel, whose buckets are 25 MB


class DataParallel:
    """Sums the flat gradient buffer over a group, in buckets of neighbouring parameters (Li et al. 2020).

    reduce_start(part) starts the sum of one slice of the buffer and returns its handle; `buckets` are lists of
    parameter names, contiguous in the arena, in the order in which backward completes them.
    """

    def __init__(self, arena, buckets, reduce_start, eager):
        self.reduce_start, self.eager = reduce_start, eager
        self.parts = [slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop) for names in buckets]
        self.index = {name: number for number, names in enumerate(buckets) for name in names}
        self.sizes = [len(names) for names in buckets]
        self.missing, self.handles = list(self.sizes), []

    def completed(self, name):
        """This rank's gradient of `name` is complete; the last of a bucket sends it on its way."""
        number = self.index[name]
        self.missing[number] -= 1
        if self.eager and not self.missing[number]:
            self.handles.append(self.reduce_start(self.parts[number]))

    def finish(self):
        """After backward: return when the sum over all ranks is in the buffer."""
        for handle in self.handles:
            handle.wait()
        for part in () if self.eager else self.parts:
            self.reduce_start(part).wait()
        self.missing, self.handles = list(self.sizes), []


def buckets_of(arena, packed, bucket_bytes, itemsize):
    """The parameters, last first as backward completes them, in lists of at least `bucket_bytes`; unpacked: of one."""
    buckets, held = [[]], 0
    for name in reversed(arena.slices):
        buckets[-1].append(name)
        held += (arena.padded(name).stop - arena.slices[name].start) * itemsize
        if not packed or held >= bucket_bytes:
            buckets.append([])
            held = 0
    return [names for names in buckets if names]


def data_parallel(strategy, arena, reduce_start, itemsize, bucket_mb=BUCKET_MB):
    """The DataParallel that `strategy` names; `bucket_mb` (10^6 bytes) bounds the buckets of "bucket" from below."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"--dp {strategy} is unknown: choose from {', '.join(STRATEGIES)}")
    if not 0 < bucket_mb < float("inf"):
        raise ConfigError(f"--bucket-mb {bucket_mb:g} must be above 0 and finite")
    packed, eager = STRATEGIES[strategy]
    buckets = buckets_of(arena, packed, bucket_mb * 1e6 if eager else float("inf"), itemsize)
    return DataParallel(arena, buckets, reduce_start, eager)

"""Data parallelism: gradients are summed over ranks. The strategies differ in when and in what parts they send:

                                        sent after backward     sent during backward
    a message has one parameter             naive                   overlap
    a message has several parameters        flat (all)              bucket

With canonical collectives, the default, all strategies give the same bits, because each element is summed over the
ranks in the same order: ((0 + 1) + (2 + 3)) + ... A rank has consecutive micro-batches, so its sum is a part of this
tree. In every strategy the update waits for the last message, because it needs the norm of the whole gradient.
"""

from gpt2core.errors import ConfigError
from gpt2core.parallel.config import BUCKET_MB, STRATEGIES
from gpt2core.parallel.data.compression import Compressed
from gpt2core.parallel.data.sparse_embedding import SparseEmbedding


class DataParallel:
    """Sums the flat gradient buffer over a group, in buckets of neighbouring parameters (Li et al. 2020).

    buckets: lists of parameter names, contiguous in the arena, in the order in which backward completes them.
    reduce_start(part) starts the sum of one slice of the buffer and returns its handle. eager: whether the sum of a
    bucket starts during backward. join(): waits until the device has computed the gradients. before(batch): called
    before backward.
    """

    def __init__(self, arena, buckets, reduce_start, eager, join=lambda: None, before=lambda batch: None):
        self.arena, self.reduce_start, self.eager, self.join, self.before = arena, reduce_start, eager, join, before
        self.parts = [slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop) for names in buckets]
        self.bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
        self.sizes = [len(names) for names in buckets]
        self.missing, self.handles = list(self.sizes), []  # missing: number of incomplete gradients of each bucket

    def begin(self, batch=()):
        """Called before backward: forget a backward pass that has failed, and wait for the sums that it has started.

        batch: the result of prepare(). If the pass has failed on only some of the ranks, their next collectives do not
        match: then the job must end.
        """
        while self.handles:
            self.handles.pop(0).wait()
        self.missing = list(self.sizes)
        self.before(batch)

    def completed(self, name):
        """Called when this rank's gradient of `name` is complete. If eager, it starts the sum of a complete bucket."""
        number = self.bucket_of[name]
        self.missing[number] -= 1
        if self.eager and not self.missing[number]:
            self.handles.append(self.reduce_start(self.parts[number]))

    def unit_completed(self, unit):
        """Called when this rank's gradient of a unit is complete."""
        for name in reversed(self.arena.units[unit]):
            self.completed(name)

    def finish(self):
        """Complete all sums over the ranks; called after backward."""
        for handle in self.handles:
            handle.wait()
        for part in () if self.eager else self.parts:
            self.reduce_start(part).wait()
        self.missing, self.handles = list(self.sizes), []
        self.join()


def plan_buckets(sizes, least=0, most=float("inf")):
    """Lists of the names of `sizes` {name: bytes}, from the last name to the first: one list per bucket.

    A bucket is closed when it has at least `least` bytes, so 0 gives one name per bucket. It is also closed before a
    name that would bring it above `most` bytes, so a larger parameter has a bucket of its own.
    """
    buckets, held = [[]], 0
    for name in reversed(sizes):
        if held + sizes[name] > most:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += sizes[name]
        if held >= least:
            buckets.append([])
            held = 0
    return [names for names in buckets if names]


def buckets_of(arena, packed, bucket_bytes, itemsize):
    """A list of parameter names for each bucket, from the last parameter of the arena to the first.

    If packed, each bucket except the last has at least `bucket_bytes`; otherwise each bucket has one parameter.
    """
    sizes = {name: (arena.padded(name).stop - part.start) * itemsize for name, part in arena.slices.items()}
    return plan_buckets(sizes, least=bucket_bytes if packed else 0)


def make_data_parallel(parallel, arena, gradients, group, owners, backend, bucket_mb, tokens=0, first=0):
    """The DataParallel that sums the flat `gradients` over `group`, with the options of a ParallelConfig.

    group: the data-parallel ranks. owners: the ranks that divide the arena (ZeRO-1), or a group of one. bucket_mb: the
    minimum bucket in 10^6 bytes. tokens, first: see SparseEmbedding. Raises ConfigError for invalid options.
    """
    if parallel.compress != "none" and backend.scales_loss:
        raise ConfigError(
            f"`compress={parallel.compress}` would keep an overflow of fp16 in the residual and send it again: use "
            f"`precision=bf16`, or omit `compress`"
        )
    if parallel.compress != "none":
        start = Compressed(backend.codec(parallel.compress), gradients, group, backend.xp).reduce_start
    elif parallel.dp == "flat" and parallel.zero:
        own = arena.share(owners.rank, owners.size)  # a rank needs only its own share of the sum

        def start(_):  # flat: there is only one slice, the whole buffer
            return group.reduce_scatter_start(gradients, out=gradients[own])
    else:

        def start(part):
            return group.all_reduce_start(gradients[part], out=gradients[part])

    options = dict(join=backend.runtime.join)
    if parallel.sparse_embedding:
        sparse = SparseEmbedding(arena, gradients, group, backend, start, tokens, first)
        start, options["before"] = sparse.reduce_start, sparse.begin

    def reduce_start(part):
        with backend.runtime.after():
            return start(part)

    return data_parallel(parallel.dp, arena, reduce_start, gradients.itemsize, bucket_mb, **options)


def data_parallel(strategy, arena, reduce_start, itemsize, bucket_mb=BUCKET_MB, **options):
    """The DataParallel of this strategy. bucket_mb (10^6 bytes): minimum size of a bucket, for strategy "bucket".

    options: the last arguments of DataParallel.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"`dp={strategy}` is unknown: choose from {', '.join(STRATEGIES)}")
    if not 0 < bucket_mb < float("inf"):
        raise ConfigError(f"`bucket_mb={bucket_mb:g}` must be above 0 and finite")
    packed, eager = STRATEGIES[strategy]
    buckets = buckets_of(arena, packed, bucket_mb * 1e6 if eager else float("inf"), itemsize)
    return DataParallel(arena, buckets, reduce_start, eager, **options)

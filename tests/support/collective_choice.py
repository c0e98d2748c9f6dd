"""The flags and notes that `choose_collectives` returns for a communicator of a given size and ability."""

from types import SimpleNamespace

from gpt2core.app.rank_agreement import choose_collectives

ASKED = dict(dp="bucket", bucket_mb=None, compress="none", zero=0, zero_gather="end", tp=1)
ASKED |= dict(deterministic=False, local_shuffle=False, collectives=None, transport=None)


def chosen(size, asked, measures_buckets=True, prefers_zero=False):
    """-> (flags after `choose_collectives`, its notes) for `size` ranks whose communicator has these two attributes."""
    world = SimpleNamespace(
        size=size, measures_buckets=measures_buckets, prefers_zero=prefers_zero, native_collectives="nccl"
    )
    world.use_transport, world.use_collectives = lambda name: "nccl", lambda name: None
    args = SimpleNamespace(**ASKED | asked)
    return args, choose_collectives(world, args)

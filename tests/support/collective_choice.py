"""The flags and notes that `resolve_rank_flags` returns for a communicator of a given size and transport."""

from types import SimpleNamespace

from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.app.settings.final_values import resolve_rank_flags

ASKED = dict(dp="bucket", bucket_mb=None, compress="none", zero=0, zero_gather="end", tp=1, pp=1)
ASKED |= dict(deterministic=False, local_shuffle=False, collectives=None, pp_schedule="1f1b")
ASKED |= dict(schedule_picture=False)


def chosen(size, asked, transport="nccl"):
    """-> (the resolved flags, the notes) for `size` ranks with this transport."""
    world = SimpleNamespace(size=size, native_algorithm=transport)
    return resolve_rank_flags(TrainSettings(**ASKED | asked | dict(transport=transport)), world)

"""Failing collectively: an error on one rank is raised by every rank, at the same place."""

from gpt2core.errors import UserError


def shared_error(error):
    """`error`, marked as one that every rank raises at the same place: the root tells it, and all just end."""
    error.shared = True
    return error


def all_or_raise(world, body):
    """body() of every rank; where it fails on any of them, all raise the error of the first of these.

    A body may call collectives if it fails on all ranks or none; else it is local, and any one of them may fail.
    """
    result = error = None
    try:
        result = body()
    except (UserError, OSError) as caught:
        error = caught
    failures = world.all_gather_object(error and str(error))
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise shared_error(error if rank == world.rank else UserError(f"rank {rank}: {failure}"))
    return result


def on_root(world, body):
    """body() on the root alone, None elsewhere; its failure is everyone's."""
    return all_or_raise(world, body if world.is_root else lambda: None)

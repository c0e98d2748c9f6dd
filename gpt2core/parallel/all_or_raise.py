"""Collective failure: if a local operation fails on one rank, every rank raises the error at the same place.

If only the rank that failed raised the error, the other ranks would wait forever in their next collective.
"""

from gpt2core.errors import UserError


def shared_error(error):
    """Mark `error` as raised by every rank at the same place: then only the root prints it, and no rank aborts."""
    error.shared = True
    return error


def all_or_raise(world, body):
    """Call body() and return its result. If it fails on one or more ranks, all ranks raise the error of the first one.

    A failure is a UserError or an OSError; another exception is raised only on its rank. body() must not call
    collectives, unless it fails on all ranks or on no rank. All ranks must call all_or_raise().
    """
    result, error = attempt(body)
    raise_first(world, error, world.all_gather_object(error and str(error)))
    return result


def gather_or_raise(world, body):
    """The list of the results of body() on all ranks, in rank order. Errors are raised as by all_or_raise()."""
    result, error = attempt(body)
    outcomes = world.all_gather_object((error and str(error), result))
    raise_first(world, error, [text for text, _ in outcomes])
    return [result for _, result in outcomes]


def on_root(world, body):
    """Return body() on the root, None on the other ranks, which do not call it. If it fails, every rank raises."""
    return all_or_raise(world, body if world.is_root else lambda: None)


def attempt(body):
    """(result, None) of body(), or (None, error) if it raises UserError or OSError."""
    try:
        return body(), None
    except (UserError, OSError) as error:
        return None, error


def raise_first(world, error, texts):
    """Raise the first error of `texts`, which has each rank's message or None; `error` is this rank's error or None."""
    for rank, text in enumerate(texts):
        if text is not None:
            raise shared_error(error if rank == world.rank else UserError(f"rank {rank}: {text}"))

"""Collective failure: when a local operation fails on one rank, every rank raises the error at the same place.

Without this, the other ranks would wait forever in their next collective.
"""

from gpt2core.errors import UserError


def shared_error(error):
    """`error`, marked as raised by every rank at the same place; then only the root prints it, and no rank aborts."""
    error.shared = True
    return error


def all_or_raise(world, body):
    """body()'s result on this rank; if body() fails on any rank, all raise the error of the lowest rank that failed.

    Only UserError and OSError are shared. body() may call collectives if it fails on all ranks or on none; otherwise
    body() must be local. All ranks must call all_or_raise().
    """
    result, error = attempt(body)
    raise_first(world, error, world.all_gather_object(error and str(error)))
    return result


def gather_or_raise(world, body):
    """[body()'s result on every rank], in rank order, by one gather; fails like all_or_raise."""
    result, error = attempt(body)
    outcomes = world.all_gather_object((error and str(error), result))
    raise_first(world, error, [text for text, _ in outcomes])
    return [result for _, result in outcomes]


def on_root(world, body):
    """body()'s result on the root, None on the other ranks; if body() fails, every rank raises the error."""
    return all_or_raise(world, body if world.is_root else lambda: None)


def attempt(body):
    """(result, None) of body(), or (None, error) if it raises UserError or OSError."""
    try:
        return body(), None
    except (UserError, OSError) as error:
        return None, error


def raise_first(world, error, texts):
    """Raise the first error of `texts` (one for each rank, None: no error); `error` is this rank's own."""
    for rank, text in enumerate(texts):
        if text is not None:
            raise shared_error(error if rank == world.rank else UserError(f"rank {rank}: {text}"))

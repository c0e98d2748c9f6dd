"""The number of micro-batches of a global batch, and of threads, that fit together."""

from gpt2core.errors import ConfigError, counted


def plan_micro_batches(batch_size, micro_batches, threads, ranks, deterministic):
    """Return (number of micro-batches of the global batch, threads per rank: `threads` or fewer).

    micro_batches: the number to use, or None for the default. deterministic: the number must be a power of two and
    divisible by `ranks`; the default is 8, or less if the batch size is not divisible by 8. Not deterministic: the
    default is one micro-batch per thread. Raises ConfigError, with advice, for numbers that are not possible.
    """
    if batch_size < 1:
        raise ConfigError(f"`batch_size={batch_size}` must be at least 1")
    if batch_size % ranks:
        nearest = max(ranks, round(batch_size / ranks) * ranks)
        flag = " and `deterministic=False`" if deterministic and ranks & (ranks - 1) else ""
        raise ConfigError(
            f"`batch_size={batch_size}` is not divisible by {ranks} ranks: use `batch_size={nearest}`{flag}"
        )
    if threads < 1:
        raise ConfigError(f"`threads={threads}` must be at least 1")
    plan = plan_deterministic if deterministic else plan_not_deterministic
    return plan(batch_size, micro_batches, threads, ranks)


def possible_ranks(batch_size, micro_batches, deterministic):
    """The list of all numbers of data-parallel ranks for which plan_micro_batches() raises no error.

    micro_batches: the number that it has returned, or None: not deterministic, and no number was given.
    """
    numbers = range(1, batch_size + 1)
    if micro_batches is not None:
        numbers = [ranks for ranks in numbers if micro_batches % ranks == 0]
    return [ranks for ranks in numbers if batch_size % ranks == 0 and not (deterministic and ranks & (ranks - 1))]


def plan_not_deterministic(batch_size, micro_batches, threads, ranks):
    """plan_micro_batches() without `deterministic`."""
    if micro_batches is None:
        threads = min(threads, batch_size // ranks)
        return threads * ranks, threads
    if not 0 < micro_batches <= batch_size or micro_batches % ranks:
        nearest = ranks * max(1, min(micro_batches, batch_size) // ranks)
        raise ConfigError(
            f"`micro_batches={micro_batches}` must be from 1 to `batch_size={batch_size}` "
            f"and divisible by {counted(ranks, 'rank')}: use `micro_batches={nearest}`"
        )
    return micro_batches, max(n for n in range(1, threads + 1) if micro_batches // ranks % n == 0)


def plan_deterministic(batch_size, micro_batches, threads, ranks):
    """plan_micro_batches() with `deterministic`."""
    if micro_batches is None:
        micro_batches = min(8, batch_size & -batch_size)
        if micro_batches % ranks:
            advice = f"`micro_batches={ranks}`" if ranks & (ranks - 1) == 0 else "a number of ranks that is 2^n"
            raise ConfigError(
                f"`batch_size={batch_size}` makes {counted(micro_batches, 'micro-batch')}, not a multiple of {ranks} "
                f"ranks: use {advice}, or `deterministic=False`"
            )
    if micro_batches < 1 or micro_batches & (micro_batches - 1):
        below = 1 << max(0, micro_batches.bit_length() - 1)
        raise ConfigError(
            f"`micro_batches={micro_batches}` is not a power of two: use {max(1, below)} or {2 * below}, "
            f"or `deterministic=False`"
        )
    if batch_size % micro_batches:
        raise ConfigError(
            f"`batch_size={batch_size}` is not divisible by `micro_batches={micro_batches}`: "
            f"use `micro_batches={min(micro_batches, batch_size & -batch_size)}` or "
            f"`batch_size={max(1, round(batch_size / micro_batches)) * micro_batches}`"
        )
    if micro_batches % ranks:
        advice = f"`micro_batches={ranks}`" if ranks & (ranks - 1) == 0 else "a number of ranks that is 2^n"
        raise ConfigError(f"`micro_batches={micro_batches}` is not divisible by {ranks} ranks: use {advice}")
    threads = min(threads, micro_batches // ranks)
    return micro_batches, 1 << threads.bit_length() - 1  # a power of two: each thread sums a whole subtree

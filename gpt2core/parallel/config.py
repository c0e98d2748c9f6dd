"""How the ranks and threads share one training step, as the flags ask for it."""

from dataclasses import dataclass

from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.data_parallel import BUCKET_MB


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work. The defaults are right for any number of them, one included."""

    tp: int = 1  # ranks that share each layer; the others are data parallel
    dp: str = "flat"  # how gradients travel: see data_parallel.STRATEGIES
    bucket_mb: float | None = BUCKET_MB  # None: measured
    compress: str = "none"  # or fp16, bf16, int8
    zero: int = 0  # 1: each data-parallel rank keeps the optimizer state of its part of the arena alone
    zero_gather: str = "end"  # of the step, or beside the next "forward": when everyone gets what kernels read


def plan_micro_batches(batch_size, micro_batches, threads, ranks, deterministic):
    """(micro-batches of the global batch, threads a rank) from what was asked for; None: not asked.

    Deterministic: a power of two of micro-batches, 8 where the batch allows it, that threads and ranks divide. Else one
    for each thread. Raises ConfigError, naming the nearest number that works.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} must be at least 1")
    if batch_size % ranks:
        near = max(ranks, round(batch_size / ranks) * ranks)
        also = " and --no-deterministic" if deterministic and ranks & (ranks - 1) else ""
        raise ConfigError(f"--batch-size {batch_size} is not divisible by {ranks} ranks: use --batch-size {near}{also}")
    if threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if not deterministic:
        if micro_batches is None:
            threads = min(threads, batch_size // ranks)
            return threads * ranks, threads
        if not 0 < micro_batches <= batch_size or micro_batches % ranks:
            raise ConfigError(
                f"--micro-batches {micro_batches} must be from 1 to --batch-size {batch_size} "
                f"and divisible by {counted(ranks, 'rank')}"
            )
        return micro_batches, max(n for n in range(1, threads + 1) if micro_batches // ranks % n == 0)
    if micro_batches is None:
        micro_batches = min(8, batch_size & -batch_size)
        if micro_batches % ranks:
            ask = f"--micro-batches {ranks}" if ranks & (ranks - 1) == 0 else "a power of two of ranks"
            raise ConfigError(
                f"--batch-size {batch_size} makes {counted(micro_batches, 'micro-batch')}, which {ranks} ranks do not "
                f"divide: use {ask}, or --no-deterministic"
            )
    if micro_batches < 1 or micro_batches & (micro_batches - 1):
        below = 1 << max(0, micro_batches.bit_length() - 1)
        raise ConfigError(
            f"--micro-batches {micro_batches} is not a power of two: use {max(1, below)} or {2 * below}, "
            f"or --no-deterministic"
        )
    if batch_size % micro_batches:
        raise ConfigError(
            f"--batch-size {batch_size} is not divisible by --micro-batches {micro_batches}: "
            f"use --micro-batches {min(micro_batches, batch_size & -batch_size)} or "
            f"--batch-size {max(1, round(batch_size / micro_batches)) * micro_batches}"
        )
    if micro_batches % ranks:
        raise ConfigError(
            f"--micro-batches {micro_batches} is not divisible by {ranks} ranks: use a power of two of ranks, "
            f"or --no-deterministic"
        )
    each = min(threads, micro_batches // ranks)
    return micro_batches, 1 << each.bit_length() - 1  # a thread owns a whole subtree

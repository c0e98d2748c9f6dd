"""What to do if the memory of a GPU is too small: options that fit, by the memory model of gpt2core."""

from dataclasses import replace

from gpt2core.errors import ConfigError, counted
from gpt2core.memory.gpu import BYTES, FP32, MARGIN, generation_memory, training_memory
from gpt2core.parallel.config import ParallelConfig


def largest_batch(fits, batch_size, step):
    """The largest multiple n of `step`, n < batch_size, for which fits(n) is true; 0 if there is none.

    If fits(n) is false, it must be false for all larger n: this is a binary search.
    """
    low, high = 0, -(-batch_size // step)  # multiples of step: low * step fits (or is 0), high * step does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def explain_training_oom(
    config, batch_size, seq_len, precision, micro_batches, ranks, free, parallel=None, in_order=False
):  # fmt: skip
    """One sentence: the memory that the training step needs, the free memory, and options that fit.

    free: bytes of this rank's GPU. batch_size and micro_batches are totals over all ranks; the other arguments are
    those of training_memory().
    """
    parallel = parallel or ParallelConfig()

    def needed(sequences, micro_batches, parallel=parallel):
        sizes = sequences // ranks, seq_len, precision, micro_batches // ranks
        return sum(training_memory(config, *sizes, ranks, parallel, in_order).values())

    def fits(sequences, micro_batches=micro_batches, parallel=parallel):
        return MARGIN * needed(sequences, micro_batches, parallel) <= free

    options, more_micro_batches = [], 2 * micro_batches
    if smaller_batch := largest_batch(fits, batch_size, micro_batches):
        options.append(f"--batch-size {smaller_batch}")
    while batch_size % more_micro_batches == 0 and not fits(batch_size, more_micro_batches):
        more_micro_batches *= 2
    if batch_size % more_micro_batches == 0:
        options.append(f"--micro-batches {more_micro_batches}")
    if parallel.recompute == "none" and fits(batch_size, parallel=replace(parallel, recompute="block")):
        options.append("--recompute block")
    divided = (with_zero(parallel, zero) for zero in (1, 2, 3) if zero > parallel.zero)
    if more := next((other for other in divided if other and fits(batch_size, parallel=other)), None):
        options.append(f"--zero {more.zero}")
    if parallel.compress != "none" and fits(batch_size, parallel=replace(parallel, compress="none")):
        options.append("--compress none")
    given = {name: getattr(parallel, name) for name in ("tp", "pp", "zero", "compress", "recompute")}
    flags = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(ParallelConfig(), name))
    return (
        f"--batch-size {batch_size} of {seq_len} tokens in {counted(micro_batches, 'micro-batch')}"
        f"{' with' * bool(flags)}{flags} needs "
        f"about {gib(needed(batch_size, micro_batches))} in {precision}, but only {gib(free)} are free; "
        f"use {join_options(options) or 'a smaller --seq-len, or a smaller model'}"
    )


def with_zero(parallel, zero):
    """The ParallelConfig with another `zero`, or None if its other options exclude that."""
    try:
        return replace(parallel, zero=zero)
    except ConfigError:
        return None


def join_options(options):
    """The options as text, "a, b or c"; the empty string for an empty list."""
    *most, last = options or [""]
    return f"{', '.join(most)} or {last}" if most else last


def explain_generation_oom(config, precision, free, tp=1):
    """One sentence: the memory that generation needs on one of `tp` ranks, the free memory, and what to do."""
    needed = sum(generation_memory(config, precision, tp=tp).values())
    advice = "use --precision bf16, or a smaller model" if BYTES[precision] == FP32 else "use a smaller model"
    return f"generation needs about {gib(needed)} in {precision}, but only {gib(free)} are free; {advice}"


def is_out_of_memory(error):
    """Whether this is an out-of-memory error of CuPy, CUDA, Triton or cublasLt."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "alloc_failed" in words


def gib(count):
    """A number of bytes as text in GiB."""
    return f"{count / 2**30:.1f} GiB"

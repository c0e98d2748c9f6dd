"""Parallel training: micro-batches on threads, data and tensor parallelism, ZeRO-1, and sums in a fixed order."""

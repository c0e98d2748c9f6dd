"""Parallel training: micro-batches on threads, data and tensor parallelism, ZeRO-1, and the sums that they need."""

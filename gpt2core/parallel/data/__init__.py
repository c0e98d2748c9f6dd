"""Data parallelism: the sum of the gradients over ranks, and the windows that a rank reads by itself."""

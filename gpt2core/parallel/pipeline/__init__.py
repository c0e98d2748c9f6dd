"""Pipeline parallelism: which rank has which layers, in which order it computes them, and how it sends arrays."""

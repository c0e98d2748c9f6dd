"""A step divided over threads and ranks: data, tensor and pipeline parallelism, ZeRO, recomputation, canonical sums."""

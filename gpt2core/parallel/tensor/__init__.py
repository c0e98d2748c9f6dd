"""Tensor parallelism: layers divided over ranks, and several slices of a layer on one rank."""

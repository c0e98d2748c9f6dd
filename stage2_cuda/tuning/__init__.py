"""Choosing kernels and tiles by timing them."""

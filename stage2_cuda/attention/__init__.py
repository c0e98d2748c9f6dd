"""Attention: plain Triton kernels, those in Gluon for Hopper GPUs (hopper_*), their launches and tiles."""

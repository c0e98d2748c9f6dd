"""The Triton kernels, one file a pair: forward and backward next to each other, outputs first, nothing allocated."""

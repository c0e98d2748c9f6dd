"""The Triton kernels, one file per pair: forward next to backward, outputs come first, the caller allocates."""

"""The Triton kernels that only the bridge launches; the others are those of stage 2."""

"""The Triton kernels: forward next to backward; the first arguments are the outputs, which the caller allocates."""

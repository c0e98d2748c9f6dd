"""Generation on the GPU: the decode step, its kernels, and sampling."""

"""Stage 2: GPT-2 on one GPU, CuPy arrays and Triton kernels."""

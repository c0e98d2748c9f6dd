"""Stage 2: GPT-2 on one GPU, with CuPy arrays and Triton kernels."""

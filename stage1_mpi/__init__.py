"""Stage 1: GPT-2 on many CPU processes, with NumPy and MPI."""

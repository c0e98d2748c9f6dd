"""Stage 0: GPT-2 on one CPU, with NumPy."""

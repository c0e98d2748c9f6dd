"""The project's kernels and schedules for PyTorch programs."""

"""The project's kernels and schedules for users of PyTorch."""

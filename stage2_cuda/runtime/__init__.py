"""What stage 2 needs from the GPU besides kernels: kernel launches, CUDA graphs, streams, names in a profiler."""

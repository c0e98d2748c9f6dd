"""What the GPU offers beside kernels: launches, CUDA graphs, streams, profiling."""

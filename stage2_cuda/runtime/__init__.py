"""The GPU's runtime: kernel launches, CUDA graphs, streams, profiling."""

"""Sizes that stage 2 uses and that gpu.py counts."""

CHUNK_LOGITS = 1 << 29  # the most logits that are computed at a time
LOGITS_ALIGNMENT = 64  # the rows of the logits are padded to a multiple of this many columns, so that rows are aligned
WORKSPACE = 64 << 20  # bytes of cublasLt's workspaces, for two streams
MIN_FUSED_GELU = 1 << 25  # elements of GELU's input; from this size cublasLt's GELU epilogue is faster than a kernel
CONTEXT = 550 << 20  # bytes of the CUDA context and the loaded kernels on an H200, which CuPy's pools do not count

"""Matrix products on the GPU: by cublasLt, or for float32 as three fp16 products in a Triton kernel."""

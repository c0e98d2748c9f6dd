"""Matrix products: cublasLt, and float32 products computed as three fp16 products."""

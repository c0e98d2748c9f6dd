"""Matrix products: cublasLt, and fp32 products made of three fp16 products."""

"""Libraries of matrix products besides NumPy's: MKL, and products in bf16."""

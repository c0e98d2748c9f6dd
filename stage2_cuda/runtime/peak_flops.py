"""The peak FLOP/s (floating-point operations per second) of a GPU, from which the log computes the utilisation."""

import re

# FLOP/s of tensor cores without sparsity, from the data sheets. fp32 needs three fp16 products (gemm/fp16x3.py).
HOPPER = {"fp32": 989e12 / 3, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
AMPERE = {"fp32": 312e12 / 3, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
PEAKS = {r"\bH[12]00\b": HOPPER, r"\bA100\b": AMPERE}
# These models have fewer processors or a lower clock than the table says; a MIG device is only a part of a GPU.
SLOWER = re.compile(r"\bH[12]00\b.*\b(PCIe|NVL|MIG)\b|\bMIG\b")


def peak_flops(name, precision):
    """The FLOP/s of the GPU `name`, such as "NVIDIA H200", in a --precision; None if the table does not have it."""
    for pattern, peaks in PEAKS.items():
        if re.search(pattern, name) and not SLOWER.search(name):
            return peaks.get(precision)
    return None

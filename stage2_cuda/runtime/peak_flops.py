"""The peak FLOP/s of a GPU, by its name and the precision; the log reports utilisation as a share of it."""

import re

# Dense FLOP/s from the data sheets. An fp32 product takes three fp16 products (gemm/fp16x3.py).
HOPPER = {"fp32": 989e12 / 3, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
AMPERE = {"fp32": 312e12 / 3, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
PEAKS = {r"\bH[12]00\b": HOPPER, r"\bA100\b": AMPERE}
SLOWER = re.compile(r"\bH[12]00\b.*\b(PCIe|NVL|MIG)\b|\bMIG\b")  # fewer processors, a lower clock, or part of a GPU


def peak_flops(name, precision):
    """FLOP/s of the GPU that the driver names `name`, such as "NVIDIA H200"; None if it is not in the table."""
    for pattern, peaks in PEAKS.items():
        if re.search(pattern, name) and not SLOWER.search(name):
            return peaks.get(precision)
    return None

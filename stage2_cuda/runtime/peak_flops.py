"""What a GPU can compute at most, by its name and the precision: what the utilisation in the log is a share of."""

import re

# Floating-point operations a second, dense, of the data sheets. An fp32 product is made of three in fp16: fp16x3.py.
HOPPER = {"fp32": 989e12 / 3, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
AMPERE = {"fp32": 312e12 / 3, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
PEAKS = {r"\bH[12]00\b": HOPPER, r"\bA100\b": AMPERE}
SLOWER = re.compile(r"\bH[12]00\b.*\b(PCIe|NVL|MIG)\b|\bMIG\b")  # fewer processors, a lower clock, or a part of one


def peak_flops(name, precision):
    """Of the GPU that the driver calls `name`, as "NVIDIA H200"; None where it is not in the table."""
    for pattern, peaks in PEAKS.items():
        if re.search(pattern, name) and not SLOWER.search(name):
            return peaks.get(precision)
    return None

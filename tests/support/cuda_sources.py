"""Compile kernels in CUDA C: for the CPU, with the emulator of cuda_emulator.h, and for a Hopper GPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

SUPPORT = Path(__file__).parent


def on_cpu(file, macros, library):
    """The functions of tests/support/`file`, compiled to `library` (a path) with the macros: pairs (name, value)."""
    command = [tool("g++"), "-std=c++17", "-O1", "-shared", "-fPIC", *flags(macros)]
    subprocess.run([*command, "-o", library, SUPPORT / file], check=True)
    return ctypes.CDLL(str(library))


def spills(paths, macros, folder):
    """[bytes that a kernel spills, of each kernel in these files], compiled for a Hopper GPU without a warning."""
    source = folder / "kernels.cu"
    source.write_text("\n".join(path.read_text() for path in paths))
    command = [tool("nvcc"), "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas", "-v", *flags(macros)]
    log = subprocess.run([*command, "-o", folder / "out", source], check=True, capture_output=True, text=True).stderr
    assert "warning" not in log
    return [
        int(line.split(" bytes spill stores")[0].split()[-1]) for line in log.splitlines() if "spill stores" in line
    ]


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def flags(macros):
    return [f"-D{name}={value}" for name, value in macros]


def pointers(*arrays):
    """The addresses of NumPy arrays, for void**; None is a null pointer."""
    return (ctypes.c_void_p * len(arrays))(*(None if array is None else array.ctypes.data for array in arrays))


def aligned(array):
    """A copy of a NumPy array whose address is a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy

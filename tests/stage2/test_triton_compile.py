"""Every kernel compiles for a real GPU, within its shared memory and its registers; none has to be there for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")

from tests.tools.sanitize import all_kernels

ROOT = Path(__file__).resolve().parents[2]
SHARED = {
    "a100": 163 << 10,
    "h200": 227 << 10,
}  # bytes that a program may ask for: CUDA C programming guide, its table of compute capabilities

# Who keeps some of its numbers in memory, for want of registers, and why that is borne. No bytes are asked for: the
# next release of the compiler may need some more or less.
SPILLS = {
    (
        "h200",
        "attention.dq_kernel",
        "tf32x3",
    ): "144 bytes: for three products an operand of 64 x 64 is in registers twice",
    ("h200", "attention.dkdv_kernel", "tf32x3"): "496 bytes, for the same reason",
    ("h200", "batched.unembed_kernel", "tf32"): "16 bytes, and not in its loop",
    ("h200", "batched.unembed_kernel", "ieee"): "16 bytes, and not in its loop",
    ("h200", "layernorm.backward_kernel", None): "8 bytes, with rows of 2048",
    (
        "a100",
        "attention.both_kernel",
        "ieee",
    ): "960 bytes: without a TMA unit each element of a tile has its own address",
    ("a100", "attention.forward_kernel", "ieee"): "56 bytes, for the same reason, by Triton 3.6",
    ("a100", "fp16x3.product_kernel", None): "up to 408 bytes, for the same reason",
}


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """What tests/support/compiled.py --suite prints; in another process, because ours uses the interpreter."""
    kept = getattr(request.config, "cache", None)  # not there with -p no:cacheprovider
    cache = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")
    words = [sys.executable, ROOT / "tests" / "compiled.py", "--suite"]
    done = subprocess.run(words, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled):
    assert [row for row in compiled["rows"] if "error" in row] == []


def test_no_kernel_is_left_out(compiled):
    assert {row["kernel"] for row in compiled["rows"] if row["gpu"] == "h200"} == set(all_kernels())


def test_the_sanitizer_leaves_no_kernel_out(compiled):
    assert compiled["unsanitized"] == []


def test_shared_memory_is_within_the_gpu_s(compiled):
    for row in compiled["rows"]:
        assert row["shared"] <= SHARED[row["gpu"]], row


def test_no_kernel_spills_but_those_that_are_known_to(compiled):
    spilled = {
        (row["gpu"], row["kernel"], row["constants"].get("PRECISION")) for row in compiled["rows"] if row["local"]
    }
    assert spilled <= SPILLS.keys()

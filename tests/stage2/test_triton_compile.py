"""Every kernel compiles for real GPUs within their shared memory and registers; the test needs no GPU.

`make test` compiles one variant of most kernels, in most cases that of preset gpt2 on an H200; `make test-long` all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")

from tests.tools.sanitize import all_kernels

pytestmark = pytest.mark.xdist_group("compile")  # all tests read one result, which takes half a minute, and all minutes

ROOT = Path(__file__).resolve().parents[2]
# Bytes of shared memory per program: CUDA C programming guide, table of compute capabilities.
SHARED = {"a100": 163 << 10, "h200": 227 << 10}

# The kernels that may spill registers to memory, and why that is acceptable. The number of bytes is not asserted: it
# changes with the release of the compiler.
SPILLS = {
    ("h200", "attention.backward.dq_kernel", "tf32x3"): "144 bytes: three products keep an operand of 64 x 64 twice",
    ("h200", "attention.backward.dkdv_kernel", "tf32x3"): "496 bytes, for the same reason",
    (
        "h200",
        "kernels.attention_fp16x3.backward_kernel",
        None,
    ): "up to 664 bytes with heads of 128: dk, dv and a product of a tile; up to 32 with heads of 64 that are uneven",
    ("h200", "kernels.attention_fp16x3.forward_kernel", None): "24 bytes, with uneven heads of 128 in parts",
    ("h200", "attention.hopper_forward.specialized_kernel", None): "16 bytes with Triton 3.9: 160 registers per thread",
    ("h200", "attention.hopper_dq.specialized_kernel", None): "up to 144 bytes with Triton 3.9, for the same reason",
    ("h200", "attention.hopper_dkdv.pipelined_kernel", None): "up to 56 bytes: 168 registers let three programs fit",
    (
        "h200",
        "attention.hopper_dkdv.specialized_kernel",
        None,
    ): "64 bytes with heads of 128: dk and dv take 128 registers",
    (
        "h200",
        "gemm.gluon_gelu.gelu_kernel",
        None,
    ): "up to 16 bytes with Triton 3.9: the result of a tile takes 128 registers",
    ("h200", "decoding.batched.unembed_kernel", "tf32"): "16 bytes, outside its loop",
    ("h200", "decoding.batched.unembed_kernel", "ieee"): "16 bytes, outside its loop",
    ("h200", "kernels.rotary.rotation_kernel", None): "32 bytes: cos and sin of angles that are much larger than these",
    **{
        ("h200", f"decoding.sampling.append_{each}_kernel", None): "32 bytes with rotary positions, for the same reason"
        for each in ("given", "greedy", "sampled")
    },
    ("h200", "kernels.layernorm.backward_kernel", None): "8 bytes, with rows of 2048",
    ("a100", "attention.backward.both_kernel", "ieee"): "960 bytes: without a TMA unit each element has an address",
    ("a100", "attention.forward.forward_kernel", "ieee"): "56 bytes, for the same reason, by Triton 3.6",
    (
        "a100",
        "kernels.fused_matmul.matmul_kernel",
        "ieee",
    ): "up to 1176 bytes, for the same reason: its tiles are those of an H200",
    ("a100", "gemm.fp16x3.product_kernel", None): "up to 408 bytes, for the same reason",
}


@pytest.fixture(scope="module", params=["one", pytest.param("all", marks=pytest.mark.long)])
def compiled(request, tmp_path_factory):
    """The output of tests/tools/compiled.py --suite, in a child process, because this one uses the interpreter."""
    kept = getattr(request.config, "cache", None)  # None with -p no:cacheprovider
    cache = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")
    words = [sys.executable, ROOT / "tests" / "tools" / "compiled.py", "--suite", request.param]
    done = subprocess.run(words, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled):
    assert [row for row in compiled["rows"] if "error" in row] == []


def test_the_suite_compiles_every_kernel_of_the_repository(compiled):
    found = [row["kernel"] for row in compiled["rows"] if row["gpu"] == "h200"]
    assert {*found, *compiled["slow"]} == set(all_kernels())


@pytest.mark.parametrize("kind", ["*fp32", "*bf16"])
def test_the_separate_gradient_of_a_bias_adds_rows_in_the_order_of_the_fused_layernorm(compiled, kind):
    """Tiles of four rows, those of C = 384. The order of several rows is that of their layout, which Triton chooses."""
    layouts = {"kernels.layernorm.backward_kernel": [], "kernels.column_sums.column_sums_kernel": []}
    for row in compiled["rows"]:
        constants = row["constants"]
        tile = constants.get("BLOCK_ROWS"), constants.get("BLOCK_COLS")
        own_kind = next((each for each in row["types"] if each in ("*bf16", "*fp16")), "*fp32")
        if row["kernel"] in layouts and tile == (4, 512) and own_kind == kind and row["gpu"] == "h200":
            layouts[row["kernel"]].append(row["row_sums"])
    assert all(layouts.values())
    fused, separate = layouts.values()
    assert len(separate[0]) == 1 and all(each == separate[0] for each in fused + separate)


def test_the_sanitizer_launches_every_kernel(compiled):
    assert compiled["unsanitized"] == []


def test_no_kernel_needs_more_shared_memory_than_the_gpu_has(compiled):
    for row in compiled["rows"]:
        assert row["shared"] <= SHARED[row["gpu"]], row


def test_only_the_listed_kernels_spill_registers(compiled):
    spilled = {
        (row["gpu"], row["kernel"], row["constants"].get("PRECISION")) for row in compiled["rows"] if row["local"]
    }
    assert spilled <= SPILLS.keys()

"""The lesson's benchmark: both versions of a kernel compute the same, and its table shows the measured times."""

import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.gpu import lesson as gpu_lesson
from benchmarks.gpu import plain_kernels
from benchmarks.gpu.plain_kernels import KERNEL_PAIRS, Comparison, Sizes, check_close
from benchmarks.harness.report import summarised
from benchmarks.harness.result_tables import TABLES
from stage2_cuda.runtime.triton_launch import array_module, interpreted

pytestmark = [] if interpreted() else [pytest.mark.gpu]  # with a GPU, these tests run on it
FEW = Sizes(N=24, C=48, V=50, B=2, H=3, T=12, N_loss=5, parameters="nano")


@pytest.mark.parametrize("kernel", KERNEL_PAIRS, ids=lambda kernel: kernel.__name__)
def test_both_versions_compute_the_same(rng, kernel):
    xp = array_module()
    row = kernel(xp, lambda *shape: xp.asarray(rng.standard_normal(shape, np.float32)), FEW)
    check_close(row)
    assert kernel.__doc__.startswith(f"Section {row.section}: ")


def test_versions_that_differ_are_not_timed():
    one = np.ones(3, np.float32)
    row = Comparison(2, "a kernel", lambda: (one,), lambda: (1.1 * one,), 1e-2)
    with pytest.raises(ArithmeticError, match="a kernel: the two versions differ by 1.0e-01"):
        check_close(row)
    check_close(row._replace(tolerance=0.2))


def test_the_versions_alternate_and_the_gain_is_computed_within_rounds():
    order, times = [], iter(range(1, 100))

    def version(name, factor):
        return lambda: order.append(name) or factor * next(times)

    result = gpu_lesson.measure(Comparison(9, "a step", version("plain", 4.0), version("ours", 1.0)), 3)
    assert order == ["plain", "ours"] + ["plain", "ours", "ours", "plain", "plain", "ours"]
    assert (result["plain"], result["ours"]) == ([12, 24, 28], [4, 5, 8])
    (row,) = TABLES["gpu-lesson"].cells([{"results": summarised([result])}])
    assert (row["times as fast"], row["ours, us"], result["section"]) == ("3.50", "5,000,000", 9)


def test_the_sizes_of_the_benchmark_are_gpt_2_s():
    of = plain_kernels.GPT2
    assert of.B * of.T <= of.N and of.N % of.T == 0 and of.C % of.H == 0

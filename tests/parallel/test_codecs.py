"""The fused codecs of --compress give NumPy's bits, residuals included; on the GPU if there is one."""

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.codecs import CODECS, GROUP, Codec
from gpt2core.parallel.data.compression import Compressed
from gpt2core.parallel.thread_communicator import run_ranks
from stage2_cuda.kernels.codecs import GROUPS_PER_PROGRAM, FusedCodec
from stage2_cuda.runtime.triton_launch import array_module, interpreted
from testing.fake_gpu import OnFakeGpu

pytestmark = [] if interpreted() else [pytest.mark.gpu]  # with a GPU every test needs it


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


class Poisoned(FusedCodec):
    """Fills every code with 0xFF, which is NaN as 16 bits and as a scale, before a kernel writes it."""

    def empty_code(self, *shape):
        code = super().empty_code(*shape)
        code[...] = 0xFF
        return code


def same(got, want):
    np.testing.assert_array_equal(host(got), want)


# one group; a program and part of another; rows that end inside a program; a padded end; an odd number of ranks
SIZES = [
    (1, GROUP, GROUP),
    (1, 9 * GROUP, 9 * GROUP - 5),
    (3, 5 * GROUP, 13 * GROUP + 1),
    (8, GROUPS_PER_PROGRAM * GROUP, 2**14),
]


@pytest.mark.parametrize("p, m, n", SIZES, ids=str)
@pytest.mark.parametrize("kind", CODECS)
def test_pack_add_and_unpack_give_numpys_bits(rng, kind, p, m, n):
    xp = array_module()
    wanted, fused = Codec(kind), Poisoned(kind, xp)
    residual, sum_residual = (rng.standard_normal(shape, np.float32) * 1e-2 for shape in ((p, m), m))
    scale = 10.0 ** rng.uniform(-9, 5, (p * m, 1))[:n, 0]  # beyond the range of fp16 at both ends
    gradient = (rng.standard_normal(n) * scale).astype(np.float32)
    fused_residual, fused_sum_residual = xp.array(residual), xp.array(sum_residual)
    if n > GROUP:
        gradient[GROUP - 3 : 2 * GROUP - 3] = 0  # a group whose scale depends on the residual only
    code, want = fused.pack(fused_residual, xp.asarray(gradient)), wanted.pack(residual, gradient)
    same(code, want)
    same(fused_residual, residual)
    codes = np.stack([wanted.encode(rng.standard_normal(m).astype(np.float32)) for _ in range(p)])
    code, want = fused.add(fused_sum_residual, xp.asarray(codes)), wanted.add(sum_residual, codes)
    same(code, want)
    same(fused_sum_residual, sum_residual)
    got, want = xp.full(n + 1, np.nan, np.float32), np.empty(n, np.float32)
    fused.unpack(got[:n], xp.asarray(codes))
    wanted.unpack(want, codes)
    same(got[:n], want)
    assert np.isnan(host(got)[n])  # nothing is written after the end


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", CODECS)
def test_the_code_of_an_infinite_or_nan_gradient_is_not_finite_as_in_numpy(kind, bad):
    xp = array_module()
    gradient = np.ones(GROUP, np.float32)
    gradient[7] = bad
    residual, fused_residual = np.zeros((1, GROUP), np.float32), xp.zeros((1, GROUP), np.float32)
    with np.errstate(all="ignore"):
        code = FusedCodec(kind, xp).pack(fused_residual, xp.asarray(gradient))
        want = Codec(kind).pack(residual, gradient)
        got, want = Codec(kind).decode(host(code)), Codec(kind).decode(want)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isfinite(host(fused_residual)), np.isfinite(residual))
    assert not np.isfinite(got).all()


@pytest.mark.skipif(not interpreted(), reason="runs in the interpreter")
@pytest.mark.parametrize("kind", CODECS)
def test_three_successive_sums_by_kernels_and_nccl_equal_numpys(rng, kind):
    """The residuals of one sum are added to the next, those of the gradients and those of the sums."""
    xs = rng.standard_normal((3, 3, 1000)).astype(np.float32)

    def sums(world, codec):
        gradients, results = np.empty(1000, np.float32), []
        compressed = Compressed(codec, gradients, world)
        for x in xs:
            gradients[:] = x[world.rank]
            compressed.reduce_start(slice(0, 1000)).wait()
            results.append(gradients.copy())
        return results

    wanted = run_ranks(3, sums, Codec(kind))
    for got in run_ranks(3, lambda threads: sums(OnFakeGpu(threads), FusedCodec(kind, np))):
        np.testing.assert_array_equal(got, wanted[0])

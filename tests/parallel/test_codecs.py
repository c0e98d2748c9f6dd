"""The fused kernels of --compress equal NumPy's arithmetic, residual included; on the GPU where there is one."""

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.parallel.codecs import CODECS, GROUP, Codec
from gpt2core.parallel.compression import Compressed
from gpt2core.parallel.thread_communicator import run_ranks
from stage2_cuda.kernels.codecs import GROUPS, FusedCodec
from stage2_cuda.runtime.triton_launch import array_module, interpreted
from tests.support.fake_gpu import OnFakeGpu

pytestmark = [] if interpreted() else [pytest.mark.gpu]  # where there is a GPU, all of this is about it


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


class Poisoned(FusedCodec):
    """A code is full of 0xFF, which is NaN in 16 bits and in a scale, before a kernel writes it."""

    def empty(self, *shape):
        code = super().empty(*shape)
        code[...] = 0xFF
        return code


def same(got, want):
    np.testing.assert_array_equal(host(got), want)


# one group; a program and a part of one; rows that end inside a program; a padded end; many ranks, and an odd number
SIZES = [(1, GROUP, GROUP), (1, 9 * GROUP, 9 * GROUP - 5), (3, 5 * GROUP, 13 * GROUP + 1), (8, GROUPS * GROUP, 2**14)]


@pytest.mark.parametrize("p, m, n", SIZES, ids=str)
@pytest.mark.parametrize("kind", CODECS)
def test_packing_adding_and_unpacking_are_numpy_s(rng, kind, p, m, n):
    xp = array_module()
    wanted, fused = Codec(kind), Poisoned(kind, xp)
    lost, sums = rng.standard_normal((p, m), np.float32) * 1e-2, rng.standard_normal(m, np.float32) * 1e-2
    scale = 10.0 ** rng.uniform(-9, 5, (p * m, 1))[:n, 0]  # beyond what fp16 holds, at both ends
    gradient = (rng.standard_normal(n) * scale).astype(np.float32)
    mine, own = xp.array(lost), xp.array(sums)
    if n > GROUP:
        gradient[GROUP - 3 : 2 * GROUP - 3] = 0  # a group whose scale comes only from the residual
    code, want = fused.pack(mine, xp.asarray(gradient)), wanted.pack(lost, gradient)
    same(code, want)
    same(mine, lost)
    codes = np.stack([wanted.encode(rng.standard_normal(m).astype(np.float32)) for _ in range(p)])
    code, want = fused.add(own, xp.asarray(codes)), wanted.add(sums, codes)
    same(code, want)
    same(own, sums)
    got, want = xp.full(n + 1, np.nan, np.float32), np.empty(n, np.float32)
    fused.unpack(got[:n], xp.asarray(codes))
    wanted.unpack(want, codes)
    same(got[:n], want)
    assert np.isnan(host(got)[n])  # nothing is written behind the end


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", CODECS)
def test_values_that_are_not_finite_stay_so_or_remain_in_the_residual(kind, what):
    """As NumPy's: NaN stays, and so do infinities but in fp16, which bounds them and keeps the infinite rest."""
    xp = array_module()
    gradient = np.ones(GROUP, np.float32)
    gradient[7] = what
    lost, mine = np.zeros((1, GROUP), np.float32), xp.zeros((1, GROUP), np.float32)
    with np.errstate(all="ignore"):
        code, want = FusedCodec(kind, xp).pack(mine, xp.asarray(gradient)), Codec(kind).pack(lost, gradient)
        got, want = Codec(kind).decode(host(code)), Codec(kind).decode(want)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isfinite(host(mine)), np.isfinite(lost))
    assert not (np.isfinite(got).all() and np.isfinite(host(mine)).all())


@pytest.mark.skipif(not interpreted(), reason="runs in the interpreter")
@pytest.mark.parametrize("kind", CODECS)
def test_three_sums_in_a_row_are_the_same_by_kernels_and_nccl(rng, kind):
    """The residual of one sum is added to the next, for sent and for received values."""
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

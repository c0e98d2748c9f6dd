"""Checks of exercise 2.3: dq and delta, in Triton's interpreter."""

import numpy as np

from exercises.checks.flash import FP32, TILE, AttentionCase, wrong_ds
from exercises.compare import expect
from stage2_cuda.attention.launches import AttentionTiles


def expect_dq(T):
    case = AttentionCase(T)
    dq, *_ = case.backward(AttentionTiles(dq=TILE))
    wrong = wrong_ds(case, lambda ds, scale: ds @ case.k * scale, "dq")
    wrong += [(case.ds.swapaxes(1, 2) @ case.k * case.scale, "ds is transposed: dq = ds k.")]
    wrong += [(case.ds @ case.q * case.scale, "dq uses q: dq = ds k.")]
    expect(f"dq of {T} positions", dq, case.dq, FP32, wrong, "dq_tile: the loop over the keys, and the sum dq += ds k")


def flash_dq():
    expect_dq(16)


def flash_dq_tiles():
    expect_dq(48)
    expect_dq(40)


def flash_delta():
    case = AttentionCase(40)
    *_, delta = case.backward(AttentionTiles(dq=TILE))
    wrong = [(np.full(delta.shape, np.nan), "delta is not stored: store it to delta_ptr unless delta_ptr is None.")]
    expect("delta", delta, case.delta[..., 0], FP32, wrong, "the tl.store to delta_ptr in dq_tile")

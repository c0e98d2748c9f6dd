"""Checks of exercise 2.4: dk and dv, in Triton's interpreter."""

import numpy as np

from exercises.checks.flash import FP32, TILE, AttentionCase, wrong_ds
from exercises.compare import expect
from stage2_cuda.attention.launches import AttentionTiles


def expect_dkdv(T, names):
    case = AttentionCase(T)
    _, dk, dv, _ = case.backward(AttentionTiles(dkdv=TILE), case.delta)
    unmasked = np.exp(case.raw - case.lse)
    wrong_dv = [
        (case.p @ case.dy, "p is not transposed: dv = p' dy. In dkdv_tile p has one row for each key."),
        (case.dv * case.scale, "dv has the factor `scale`: only dq and dk have it."),
        (unmasked.swapaxes(1, 2) @ case.dy, "The causal mask is missing: p is 0 where the query is before the key."),
        (
            np.where(np.tri(T, k=-1), case.p, 0).swapaxes(1, 2) @ case.dy,
            "The causal mask is off by one: a query also attends to its own key.",
        ),
        (
            np.where(case.mask.T, unmasked, 0).swapaxes(1, 2) @ case.dy,
            "The causal mask is transposed: here the tile is (keys, queries).",
        ),
        (case.ds.swapaxes(1, 2) @ case.dy, "dv uses ds: dv = p' dy."),
    ]
    wrong_dk = wrong_ds(case, lambda ds, scale: ds.swapaxes(1, 2) @ case.q * scale, "dk")
    wrong_dk += [
        (case.ds @ case.q * case.scale, "ds is not transposed: dk = ds' q. In dkdv_tile ds has one row for each key."),
        (case.ds.swapaxes(1, 2) @ case.k * case.scale, "dk uses k: dk = ds' q."),
    ]
    look = "dkdv_tile: the loop over the queries, and the sum "
    if "dv" in names:
        expect(f"dv of {T} positions", dv, case.dv, FP32, wrong_dv, look + "dv += p' dy")
    if "dk" in names:
        expect(f"dk of {T} positions", dk, case.dk, FP32, wrong_dk, look + "dk += ds' q")


def flash_dv():
    expect_dkdv(16, ["dv"])


def flash_dk():
    expect_dkdv(16, ["dk"])


def flash_dkdv_tiles():
    expect_dkdv(48, ["dv", "dk"])
    expect_dkdv(40, ["dv", "dk"])


def flash_both():
    case = AttentionCase(40)
    got = case.backward(AttentionTiles(both=TILE))
    look = "dkdv_tile, if delta_in is None: compute delta from y and dy with row_delta"
    for name, array, want in zip(("dq", "dk", "dv"), got, (case.dq, case.dk, case.dv), strict=False):
        expect(f"{name} of both_kernel", array, want, FP32, look=look)

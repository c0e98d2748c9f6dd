"""The attention tiles that a Tuner times, in addition to those of the tables of launches.py.

Three kernels are timed separately: forward, dq, and dk with dv. Then the whole backward pass is timed: with the default
tiles, with the fastest dq and dk-dv tiles, and, unless T is long, in one launch. For long T the forward pass uses the
default tile, because at T = 16384 the order of the candidates changed with the temperature of the GPU. Compiled for an
H200 (Triton 3.6 and 3.9) no tile spills registers, except for the backward tiles of tf32x3, which spill less than the
default tiles. On a Hopper GPU the Gluon kernels are timed too. Every tile of the plain kernels remains a candidate,
because a tuning cache that an earlier version wrote may name it.
"""

# B batch, T time, C channels, H heads, D = C // H

from stage2_cuda.attention.hopper_launches import GluonTile, designs
from stage2_cuda.attention.launches import (
    AttentionTiles,
    TileConfig,
    default_tiles,
    gluon_table,
    head_shape,
    select_tiles,
)

LONG = 4096  # tokens; for a longer T: the default forward tile, and no backward pass in one launch
TRIED = {  # (kind of products, largest D): {kernel: tiles in addition to DEFAULT_TILES}
    ("16 bits", 64): {
        "forward": [
            TileConfig(128, 64, 8, 3, loops=2), TileConfig(128, 64, 8, 3), TileConfig(128, 64, 4, 3),
            TileConfig(128, 128, 8, 2), TileConfig(64, 64, 4, 3), TileConfig(64, 128, 4, 2),
        ],
        "dq": [
            TileConfig(128, 64, 4, 3), TileConfig(128, 64, 4, 2, loops=2), TileConfig(128, 32, 4, 3),
            TileConfig(64, 64, 4, 3),
        ],
        "dkdv": [
            TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 3, loops=2), TileConfig(64, 128, 8, 3),
            TileConfig(32, 64, 4, 3), TileConfig(128, 64, 4, 2),
        ],
        "both": [TileConfig(64, 64, 4, 2), TileConfig(64, 64, 8, 2)],
    },
    ("16 bits", 128): {
        "forward": [TileConfig(64, 64, 4, 3, loops=2), TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2, loops=2)],
        "dq": [TileConfig(64, 64, 4, 2), TileConfig(64, 64, 8, 2), TileConfig(128, 64, 8, 2)],
        "dkdv": [TileConfig(64, 64, 4, 2), TileConfig(64, 64, 8, 3), TileConfig(32, 128, 8, 3)],
    },
    ("tf32", 64): {
        "forward": [TileConfig(128, 64, 8, 2), TileConfig(64, 64, 8, 2)],
        "dq": [TileConfig(128, 64, 8, 2), TileConfig(64, 32, 4, 3)],
        "dkdv": [TileConfig(32, 64, 4, 3), TileConfig(64, 64, 8, 2)],
        "both": [TileConfig(64, 64, 8, 2)],
    },
    ("tf32x3", 64): {
        "forward": [TileConfig(128, 32, 8, 2), TileConfig(64, 64, 4, 2)],
        "dq": [TileConfig(128, 32, 8, 2)],
        "dkdv": [TileConfig(32, 128, 8, 2), TileConfig(16, 64, 4, 2)],
    },
}  # fmt: skip


def tuned_forward(tuner, run, y, lse, qkv, n_head, precision):
    """The fastest AttentionTiles for forward. run(tiles) launches forward, which writes y and lse.

    Shapes and dtypes of the arrays: as for attention_forward() in launches.py.
    """
    table, tried, about = tiles_for(qkv, n_head, precision)
    first = AttentionTiles(forward=table.forward)
    rest = others(first, "forward", tried) if qkv.shape[1] <= LONG else []
    return tuner.choose(f"attention forward {about}", [first, *rest], run, [y, lse])


def tuned_backward(tuner, run, dqkv, delta, qkv, n_head, precision, rotates=False):
    """The fastest AttentionTiles for backward. run(tiles) launches its kernels, which write dqkv and delta.

    rotates: whether they also rotate dq and dk (rotary positions). Shapes and dtypes of the arrays: as for
    attention_backward() in launches.py.
    """
    table, tried, about = tiles_for(qkv, n_head, precision)
    about += ", rotary" * rotates
    C, first, rest = qkv.shape[2] // 3, table._replace(forward=None), []
    if not table.both:
        only_dq, only_dkdv = AttentionTiles(dq=table.dq), AttentionTiles(dkdv=table.dkdv)
        candidates, outputs = [only_dq, *others(only_dq, "dq", tried)], [dqkv[:, :, :C], delta]
        only_dq = tuner.choose(f"attention dq {about}", candidates, run, outputs)
        candidates, outputs = [only_dkdv, *others(only_dkdv, "dkdv", tried)], [dqkv[:, :, C:]]
        run_dq = lambda: run(only_dq)  # noqa: E731  before the timing: the kernel for dk and dv reads delta
        only_dkdv = tuner.choose(f"attention dk and dv {about}", candidates, run, outputs, run_dq)
        best = AttentionTiles(dq=only_dq.dq, dkdv=only_dkdv.dkdv)
        plain = default_tiles(qkv.dtype.itemsize, qkv.shape[1], C // n_head, precision)._replace(forward=None)
        rest += [tiles for tiles in dict.fromkeys((best, plain)) if tiles != first]
    if qkv.shape[1] <= LONG:
        rest += others(first, "both", tried)
    if table.both and tried:  # the default is one launch: also time two launches
        rest.append(AttentionTiles(dq=tried["dq"][0], dkdv=tried["dkdv"][0]))
    return tuner.choose(f"attention backward {about}", [first, *rest], run, [dqkv])


def tiles_for(qkv, n_head, precision):
    """(default AttentionTiles, {kernel: other tiles to time}, a description for the name of the choice)."""
    (B, T, D), table = head_shape(qkv, n_head), select_tiles(qkv, n_head, precision)
    kind = "16 bits" if qkv.dtype.itemsize == 2 else precision
    tried = next((tiles for (name, largest), tiles in TRIED.items() if name == kind and D <= largest), {})
    if gluon_table(qkv.dtype.itemsize, B * n_head, T, D):
        plain = default_tiles(qkv.dtype.itemsize, T, D, precision)._asdict()
        gluon = {part: [GluonTile(design) for design in designs(part, D)] for part in plain}
        tried = {part: [*tried.get(part, ()), *filter(None, [plain[part]]), *gluon[part]] for part in plain}
    return table, tried, f"{qkv.dtype} {B} x {T}, {n_head} heads of {D}, {precision}"


def others(first, part, tried):
    """AttentionTiles for each tile of this kernel (`part`) in `tried`, once each and without `first`."""
    configs = [AttentionTiles(**{part: tile}) for tile in dict.fromkeys(tried.get(part, ()))]
    return [config for config in configs if config != first]

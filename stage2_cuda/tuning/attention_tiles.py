"""The tile sizes that a Tuner times for attention, besides the defaults of kernels/attention.py.

The forward kernel, dq, and dk with dv are timed separately. Then the whole backward pass is timed: with the default
tiles, with the best two, and, unless T is long, in one launch. For long T the default forward stays, because at
T = 16384 the order of the candidates changed with the temperature of the GPU. Compiled for an H200 by Triton 3.6 and
3.9, only the tiles of tf32x3's backward spill registers, and they spill less than the defaults.
"""

# B batch, T time, C channels, H heads, D = C // H

from stage2_cuda.kernels.attention import AttentionTiles, TileConfig, shapes_and_tiles

LONG = 4096  # tokens; beyond, forward is the table's, and no launch does all of backward
TRIED = {  # (what is multiplied, largest D): {part: tiles beside the table's}
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
    """-> the AttentionTiles for forward. run(config) launches it, and writes y and lse."""
    table, tried, about = tiles_for(qkv, n_head, precision)
    first = AttentionTiles(forward=table.forward)
    rest = others(first, "forward", tried) if qkv.shape[1] <= LONG else []
    return tuner.choose(f"attention forward {about}", [first, *rest], run, [y, lse])


def tuned_backward(tuner, run, dqkv, delta, qkv, n_head, precision):
    """-> the AttentionTiles for backward. run(config) launches it, and writes its part of dqkv (B, T, 3C) and delta."""
    table, tried, about = tiles_for(qkv, n_head, precision)
    C, first, rest = qkv.shape[2] // 3, table._replace(forward=None), []
    if not table.both:
        dq, dkdv = AttentionTiles(dq=table.dq), AttentionTiles(dkdv=table.dkdv)
        rows, columns = [dqkv[:, :, :C], delta], [dqkv[:, :, C:]]
        dq = tuner.choose(f"attention dq {about}", [dq, *others(dq, "dq", tried)], run, rows)
        dkdv = tuner.choose(
            f"attention dk and dv {about}", [dkdv, *others(dkdv, "dkdv", tried)], run, columns, lambda: run(dq)
        )  # fmt: skip
        best = AttentionTiles(dq=dq.dq, dkdv=dkdv.dkdv)
        rest += [best] * (best != first)
    if qkv.shape[1] <= LONG:
        rest += others(first, "both", tried)
    if table.both and tried:
        rest.append(AttentionTiles(dq=tried["dq"][0], dkdv=tried["dkdv"][0]))
    return tuner.choose(f"attention backward {about}", [first, *rest], run, [dqkv])


def tiles_for(qkv, n_head, precision):
    """-> the table's AttentionTiles, what is tried beside it, and in words for what."""
    B, T, D, table = shapes_and_tiles(qkv, n_head, precision)
    kind = "16 bits" if qkv.dtype.itemsize == 2 else precision
    tried = next((tiles for (name, largest), tiles in TRIED.items() if name == kind and D <= largest), {})
    return table, tried, f"{qkv.dtype} {B} x {T}, {n_head} heads of {D}, {precision}"


def others(first, part, tried):
    """AttentionTiles for each other tile of this part."""
    configs = [AttentionTiles(**{part: tile}) for tile in tried.get(part, ())]
    return [config for config in configs if config != first]

"""Figures of the notebooks: what collectives move, who owns the arena, bars on a time axis, the roofline.

Each function shows the figure; alt is the text for readers who do not see it.
"""

import matplotlib.pyplot as plt
import numpy as np

from gpt2core.parallel.thread_communicator import run_ranks
from walkthrough.setup import show

RANK_NAMES = "ABCDEFGH"


# -- what a collective moves -------------------------------------------------------------------------------------------


def draw_moves(p, collectives, alt):
    """Draw each rank's array before and after some collectives; collectives: {title: (rows of x, function)}.

    The function is called on each rank as function(comm, x), where x (rows) holds the parts of this rank. A1 is part 1
    of rank A (rank 0); S1 is the sum of part 1 over all ranks.
    """
    figure, axes = plt.subplots(2, len(collectives), figsize=(2.5 * len(collectives), 4.6), squeeze=False)
    for column, (title, (rows, function)) in enumerate(collectives.items()):
        before = [labels(rank, rows, p) for rank in range(p)]
        after = run_ranks(p, lambda comm, before=before, function=function: function(comm, before[comm.rank]))
        for axis, arrays, name in zip(axes[:, column], (before, after), (title, "after"), strict=True):
            draw_cells(axis, arrays, p)
            axis.set_title(name if name != "after" else "after it", fontsize=10)
    show(alt)


def labels(rank, rows, p):
    """x (rows) of a rank: the number of part j of rank r has only bit j p + r set, so a sum shows what was added."""
    return np.array([1 << (part * p + rank) for part in range(rows)], np.int64)


def draw_cells(axis, arrays, p):
    for rank, array in enumerate(arrays):
        for place, number in enumerate(np.atleast_1d(array)):
            bits = [bit for bit in range(63) if int(number) >> bit & 1]
            part, ranks = bits[0] // p, [bit % p for bit in bits]
            is_sum = len(ranks) > 1
            text = f"S{part}" if is_sum else f"{RANK_NAMES[ranks[0]]}{part}"
            colour = "#444444" if is_sum else f"C{ranks[0]}"
            axis.add_patch(plt.Rectangle((place, rank), 0.94, 0.9, facecolor=colour))
            axis.text(place + 0.47, rank + 0.45, text, ha="center", va="center", color="white", fontsize=9)
    axis.set_xlim(-0.1, p)
    axis.set_ylim(p, -0.1)
    axis.set_aspect("equal")
    axis.set_yticks([rank + 0.45 for rank in range(p)], [f"rank {rank}" for rank in range(p)], fontsize=8)
    axis.set_xticks([])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


# -- the arena ---------------------------------------------------------------------------------------------------------


def draw_arena(arena, owners, alt):
    """Draw the parameters in the flat buffer, the layers in two colours in turn, and the parts of its owners."""
    _, axis = plt.subplots(figsize=(10, 1.8))
    megabyte = 4 / 1e6
    layers = {name: name.split(".")[2] if ".h." in name else name for name in arena.slices}
    order = list(dict.fromkeys(layers.values()))
    for name, part in arena.slices.items():
        start, length = megabyte * part.start, megabyte * (part.stop - part.start)
        colour = ["#9ec5e8", "#dbe8f6"][order.index(layers[name]) % 2]
        axis.broken_barh([(start, length)], (0, 1), facecolors=colour, edgecolor="white", linewidth=0.4)
        if length > 0.035 * megabyte * arena.size:
            short_name = name.removeprefix("transformer.").removesuffix(".weight")
            axis.text(start + length / 2, 0.5, short_name, rotation=90, ha="center", va="center", fontsize=7)
    for owner in range(owners):
        part = arena.share(owner, owners)
        start, stop = megabyte * part.start, megabyte * part.stop
        axis.broken_barh([(start, stop - start)], (-0.5, 0.4), facecolors=f"C{owner}", edgecolor="white")
        style = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
        axis.text((start + stop) / 2, -0.3, f"owned by rank {owner}", **style)
        axis.axvline(stop, color="black", linewidth=0.8, ymin=0.05)
    axis.set_xlim(0, megabyte * arena.size)
    axis.set_yticks([])
    axis.set_xlabel("MB of the flat fp32 buffer")
    show(alt)


# -- bars on a time axis -----------------------------------------------------------------------------------------------


def draw_lanes(panels, alt, unit="ms"):
    """Draw timelines below each other; panels: {title: {lane: [(begin, length, colour or None)]}}, times in `unit`."""
    heights = [len(lanes) + 1 for lanes in panels.values()]
    _, axes = plt.subplots(
        len(panels), 1, figsize=(10, 0.42 * sum(heights) + 0.4), height_ratios=heights, sharex=True, squeeze=False
    )
    for axis, (title, lanes) in zip(axes[:, 0], panels.items(), strict=True):
        for row, bars in enumerate(lanes.values()):
            colours = [colour or f"C{row}" for _, _, colour in bars]
            spans = [(begin, length) for begin, length, _ in bars]
            edge = {"edgecolor": "white", "linewidth": 0.5} if len(bars) < 60 else {"linewidth": 0}
            axis.broken_barh(spans, (row - 0.35, 0.7), facecolors=colours, **edge)
        axis.set_yticks(range(len(lanes)), list(lanes))
        axis.set_ylim(len(lanes) - 0.4, -0.6)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel(unit)
    show(alt)


# -- the roofline ------------------------------------------------------------------------------------------------------


def draw_roofline(roofs, bandwidth, points, alt):
    """Draw performance over arithmetic intensity (Williams et al. 2009), both logarithmic.

    roofs: {label: FLOP/s}; bandwidth: bytes per second; points: {label: (FLOPs per byte, FLOP/s)}.
    """
    _, axis = plt.subplots(figsize=(9, 5.2))
    intensities = np.geomspace(0.05, 5000, 200)
    for label, roof in roofs.items():
        line = axis.loglog(intensities, np.minimum(roof, bandwidth * intensities) / 1e12, linewidth=1.5)[0]
        axis.text(5000, 0.7 * roof / 1e12, label, ha="right", fontsize=9, color=line.get_color())
    axis.text(0.06, 1.35 * bandwidth * 0.06 / 1e12, f"{bandwidth / 1e12:.2f} TB/s", rotation=34, fontsize=9)
    for number, (label, (intensity, rate)) in enumerate(points.items()):
        axis.plot(intensity, rate / 1e12, "o", color=f"C{number + 1}", markeredgecolor="black")
        above = rate > 0.7 * min(max(roofs.values()), bandwidth * intensity)  # near the roof: the label is above it
        place = {"xytext": (-8, 5), "ha": "right"} if above else {"xytext": (8, -4), "ha": "left"}
        axis.annotate(label, (intensity, rate / 1e12), fontsize=9, textcoords="offset points", **place)
    axis.set_xlabel("FLOPs per byte that is read or written")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3)
    show(alt)


# -- the ladder of a kernel --------------------------------------------------------------------------------------------


def draw_ladder(results, bandwidth, alt):
    """Draw the time of each rung of benchmarks/gpu/ladder.py; bandwidth: bytes per second of the memory, or None."""
    _, axis = plt.subplots(figsize=(9, 0.6 * len(results) + 1))
    medians = {result["name"]: 1e6 * median(result["seconds"]) for result in results}
    bars = axis.barh(list(medians), list(medians.values()), color="tab:blue")
    fastest = min(result["bytes"] for result in results)
    texts = [f" {us:.0f} us, {medians[results[0]['name']] / us:.1f} times as fast" for us in medians.values()]
    axis.bar_label(bars, texts, fontsize=9)
    if bandwidth:
        least = 1e6 * fastest / bandwidth
        axis.axvline(least, color="tab:red", linestyle="--")
        axis.set_xlabel(f"us; dashed: {fastest / 1e6:.0f} MB at {bandwidth / 1e12:.2f} TB/s take {least:.0f} us")
    axis.set_xlim(right=1.35 * max(medians.values()))
    axis.invert_yaxis()
    show(alt)


def median(seconds):
    """The median of measured samples: of a list, or of the summary in a results file."""
    return seconds["median"] if isinstance(seconds, dict) else float(np.median(seconds))

"""The colours and the style of figures: of loss plots, of the report and of the notebooks."""

# {name: (light, dark)}. Text on each of `host`, `gpu`, `net` and `page` has a contrast of 4.5 or more (WCAG AA).
COLOURS = {
    "page": ("#ffffff", "#14171c"),
    "ink": ("#1b1f24", "#e6e8eb"),
    "soft": ("#57606a", "#a3abb5"),  # captions, axes, the paper's curves
    "line": ("#d0d7de", "#3a424d"),
    "panel": ("#f6f8fa", "#1d2229"),
    "host": ("#dbe9ff", "#1f3a5f"),  # work of the CPU
    "gpu": ("#d7f0dc", "#1d4a2d"),  # work of a GPU
    "net": ("#ffe2c2", "#5e3a12"),  # messages between ranks
    "c0": ("#0b62c4", "#6cb2ff"),
    "c1": ("#c2410c", "#ff9d5c"),
    "c2": ("#1a7f37", "#57c777"),
    "c3": ("#8250df", "#c297ff"),
    "c4": ("#9a6700", "#e0b040"),
}
LIGHT, DARK = 0, 1


def figure_style(theme=LIGHT):
    """The rcParams of matplotlib; theme: LIGHT or DARK."""
    from matplotlib import cycler  # imported only if needed: the import takes longer than a step of preset tiny

    colour = {name: pair[theme] for name, pair in COLOURS.items()}
    soft = ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(soft, colour["soft"]),
        **dict.fromkeys(("text.color", "axes.titlecolor"), colour["ink"]),
        "figure.facecolor": colour["page"],
        "axes.facecolor": colour["page"],
        "grid.color": colour["line"],
        "axes.prop_cycle": cycler(color=[colour[f"c{number}"] for number in range(5)]),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }

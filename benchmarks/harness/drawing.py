"""Pictures of results: panels on one figure, written to a PNG file without a display."""

from contextlib import contextmanager


@contextmanager
def panels(path, rows=1, columns=1, dpi=120, **options):
    """Yield (figure, array (rows, columns) of panels), and write the figure to `path`. options: of plt.subplots()."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, squeeze=False, **{"layout": "constrained", **options})
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def draw_timeline(path, lanes, spans):
    """Draw a panel for each title of `spans`, {title: {lane: [(start, duration) in ms]}}; lanes: {lane: colour}."""
    size = (11, 0.7 + 0.5 * len(lanes) * len(spans))
    with panels(path, len(spans), figsize=size, sharex=True) as (_, axes):
        for (title, found), panel in zip(spans.items(), axes[:, 0], strict=True):
            for place, (lane, colour) in enumerate(reversed(lanes.items())):
                panel.broken_barh(found.get(lane, []), (place - 0.35, 0.7), color=colour, linewidth=0, snap=False)
            panel.set(yticks=range(len(lanes)), yticklabels=list(reversed(lanes)), ylim=(-0.6, len(lanes) - 0.4))
            panel.set_title(title, loc="left", fontsize=10)
            panel.grid(axis="x", alpha=0.3)
        axes[-1, 0].set(xlabel="ms", xlim=(0, None))

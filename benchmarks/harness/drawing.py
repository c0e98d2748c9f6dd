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

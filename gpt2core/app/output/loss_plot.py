"""Plot the loss curves of one run or of several runs in one figure, and write the figure to a PNG file."""

import logging
import warnings
from typing import NamedTuple

from gpt2core.app.output.output_files import SOFTWARE
from gpt2core.app.output.theme import figure_style


class Curve(NamedTuple):
    """One curve of a plot."""

    label: str
    steps: list
    losses: list  # nats per token, at these steps
    style: dict  # further options of matplotlib's plot()


def run_curves(rows, training="training", validation="validation", **style):
    """A list of Curves: the training losses in the rows of a log and, if there are any, the validation losses.

    training, validation: the labels of the two curves. style: as in Curve.
    """
    curves = [Curve(training, [row["step"] for row in rows], [row["loss"] for row in rows], style)]
    if validated := [row for row in rows if "val_loss" in row]:
        steps, losses = [row["step"] for row in validated], [row["val_loss"] for row in validated]
        curves.append(Curve(validation, steps, losses, {"marker": "o", **style}))
    return curves


def loss_figure(curves, title):
    """A matplotlib Figure with the `curves`; a curve that has only one step is drawn as a point."""
    # Not a line for each matplotlib cache that cannot be written, and for each character that a font lacks.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib  # imported only if needed: the import takes longer than a step of preset tiny
    from matplotlib.figure import Figure

    with matplotlib.rc_context(figure_style()):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
    for label, steps, losses, style in curves:
        marker = {"marker": "o"} if len(steps) == 1 else {}  # a line needs two points
        axes.plot(steps, losses, label=escaped(label), **marker | style)
    if len(curves) > 1:
        widest = max(len(label) for label, *_ in curves)  # characters; about 75 fit beside each other
        figure.legend(loc="outside lower center", ncols=max(1, min(3, 75 // (widest + 6))), frameon=False)
    axes.set_title(escaped(title), wrap=True)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(linewidth=0.6)
    return figure


def write_plot(curves, title, path):
    """Write the figure of `curves` as a PNG file. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks
        loss_figure(curves, title).savefig(path, format="png", dpi=150, metadata=SOFTWARE)


def escaped(text):
    """`text` with a backslash before each $, because matplotlib would read $ as the start of a formula.

    "?" replaces each byte of a file name that is not UTF-8, which matplotlib cannot draw.
    """
    return text.encode("utf-8", "replace").decode("utf-8").replace("$", r"\$")

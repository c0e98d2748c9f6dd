"""Plot the loss curves of one run, or of several runs in one figure, to a PNG file."""

from typing import NamedTuple

from gpt2core.app.output_files import SOFTWARE


class Curve(NamedTuple):
    """One line of a plot; `style` has further options of matplotlib's plot()."""

    label: str
    steps: list
    losses: list  # nats per token
    style: dict


def run_curves(rows, training="training", validation="validation", **style):
    """The Curves of a log's rows, with these labels: the training losses and, if there are any, validation losses."""
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    curves = [Curve(training, steps, losses, style)]
    if validated := [row for row in rows if "val_loss" in row]:
        steps, losses = [row["step"] for row in validated], [row["val_loss"] for row in validated]
        curves.append(Curve(validation, steps, losses, {"marker": "o", **style}))
    return curves


def loss_figure(curves, title):
    """A matplotlib Figure with the `curves`; a curve of one step is drawn as a point."""
    from matplotlib.figure import Figure  # imported only here: that takes longer than a step of the preset tiny

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, steps, losses, style in curves:
        point = {"marker": "o"} if len(steps) == 1 else {}  # a line needs two points
        axes.plot(steps, losses, label=plain(label), **point | style)
    if len(curves) > 1:
        figure.legend(loc="outside lower center", ncols=3)
    axes.set_title(plain(title), wrap=True)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    return figure


def write_plot(curves, title, path):
    """Write the figure of `curves` as a PNG file. Raises OSError."""
    loss_figure(curves, title).savefig(path, format="png", dpi=150, metadata=SOFTWARE)


def plain(text):
    """`text` with each $ escaped, because matplotlib would read $ as the start of a formula."""
    return text.replace("$", r"\$")

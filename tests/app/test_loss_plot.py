"""The plot of a loss: its title, its labels, and a run of one step."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from gpt2core.app.output import run_log
from gpt2core.app.output.loss_plot import Curve, loss_figure, run_curves


def pixels(figure):
    """The picture of a Figure: (height, width, 4) uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def test_a_plot_of_one_step_is_not_blank(rng):
    figure = loss_figure([Curve("training", [0], [rng.uniform(1, 5)], {"color": "#ff0000"})], "one step")
    assert (pixels(figure) == (255, 0, 0, 255)).all(-1).sum() > 20


def test_a_plot_has_the_curves_of_a_log_and_a_title(rng):
    losses = rng.uniform(1, 5, 6).tolist()
    rows = [{"step": step + 3, "loss": loss} for step, loss in enumerate(losses)]
    rows[4]["val_loss"] = 2.5
    figure = loss_figure(run_curves(rows), "GPT-2 on costs in $ and in $.txt")
    (axes,), (legend,) = figure.axes, figure.legends
    training, validation = axes.lines
    assert training.get_xydata().tolist() == [[row["step"], row["loss"]] for row in rows]
    assert validation.get_xydata().tolist() == [[7, 2.5]]
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation"]
    pixels(figure)  # $ does not start a formula, which would not be drawn
    assert axes.get_title() == r"GPT-2 on costs in \$ and in \$.txt"


def test_the_plot_of_a_run_is_titled_with_model_and_corpus(train, corpus, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(run_log, "write_plot", lambda *arguments: drawn.append(arguments))
    plot = tmp_path / "run.png"
    flags = "--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--plot", plot
    assert train(*flags).code == 0
    ((curves, title, path),) = drawn
    assert title == f"GPT-2 nano on {corpus.name}" and path == plot
    assert [each.steps for each in curves] == [[0]]


@pytest.mark.parametrize("count", [0, 1])
def test_a_legend_is_drawn_only_for_several_curves(count):
    curves = [Curve(str(number), [0, 1], [2.0, 1.0], {}) for number in range(1 + count)]
    assert len(loss_figure(curves, "").legends) == count

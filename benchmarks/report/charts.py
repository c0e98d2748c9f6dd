"""The charts of the report, drawn by matplotlib: inline SVG in two sizes with the theme of the page, and files."""

import html
import json
import re
from dataclasses import dataclass
from io import StringIO
from textwrap import fill
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gpt2core.app.output.theme import COLOURS, DARK, LIGHT, figure_style

FONT = 9  # points
# as wide as the page, and as a phone: width, height of `lines`, height of a row (inches), characters of a label's line
SIZES = {"wide": (9.0, 4.0, 0.3, 40), "narrow": (4.1, 3.6, 0.42, 21)}


class Line(NamedTuple):
    """One line of a chart, with its label at its end. colour: a name of COLOURS. style: a line style of matplotlib."""

    label: str
    y: list  # at x = 0, 1, 2, ...
    colour: str
    style: str = "-"
    width: float = 2.8


class Row(NamedTuple):
    """One row of a chart. marks: [(value, text, colour, marker of matplotlib)]. text: at the right end."""

    label: str
    marks: list
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart with `lines`, or with `rows` on a logarithmic axis. alt: what a reader who sees the chart learns."""

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str = ""
    lines: list = ()
    rows: list = ()

    def inline(self):
        """The chart as inline SVG of each size, without fixed colours. "data-points" has [x, y, text] for tooltips."""
        pictures = []
        for size in SIZES:
            figure, points = draw(self, size, LIGHT)
            label, data = html.escape(self.alt), html.escape(json.dumps(points, separators=(",", ":")))
            head = f'<svg class="chart {size}" role="img" aria-label="{label}" data-points="{data}" '
            pictures.append(svg_of(figure, self.name + size).replace("<svg ", head, 1))
        return "".join(pictures)

    def write(self, folder):
        """Write NAME.svg, NAME.png and NAME-dark.png to the folder. Raises OSError."""
        for theme, ends in ((LIGHT, (".png", ".svg")), (DARK, ("-dark.png",))):
            figure, _ = draw(self, "wide", theme, self.title)
            for end in ends:
                figure.savefig(folder / f"{self.name}{end}", dpi=130)


def style_sheet():
    """CSS with the colours as variables, for light and dark screens. A printed page is light."""
    light, dark = ("; ".join(f"--{name}: {pair[theme]}" for name, pair in COLOURS.items()) for theme in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def svg_of(figure, salt):
    """A light figure as SVG with the variables of style_sheet() as colours.

    It has no style sheet, which would be one of the page. salt: makes the ids unique.
    """
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg")
    text = text.getvalue()
    text = re.sub(r"\s*<(metadata|style).*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    names = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: names.get(found[0], found[0]), text)


def draw(chart, size, theme, title=""):
    """(Figure, [[x, y, text]] of its points as fractions of its width and height from the upper left corner)."""
    colours = {name: pair[theme] for name, pair in COLOURS.items()}
    style = figure_style(theme) | {"font.size": FONT, "font.family": "sans-serif", "axes.facecolor": "none"}
    width, height, row, limit = SIZES[size]
    height = row * (len(chart.rows) + 0.6) + 0.75 if chart.rows else height
    with matplotlib.rc_context(style | {"grid.linewidth": 0.6, "axes.axisbelow": True}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        points = (draw_lines if chart.lines else draw_rows)(axes, chart, colours, limit)
        axes.set_xlabel(chart.x_label)
        axes.set_title(chart.y_label, loc="left", fontsize=FONT, color=colours["soft"], x=0, pad=4)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=FONT + 1)
        figure.draw_without_rendering()  # computes the layout, in which the labels must then keep their column
        figure.set_layout_engine("none")
        if chart.lines:
            move_apart(axes)
        pixels = axes.transData.transform([point[:2] for point in points]) / figure.bbox.size
    return figure, [[round(x, 4), round(1 - y, 4), text] for (x, y), (_, _, text) in zip(pixels, points, strict=True)]


def draw_lines(axes, chart, colours, limit):
    """Draw `lines`, with their labels in one column. Returns [(x, y, text)] of their points."""
    points = []
    thin = {"arrowstyle": "-", "color": colours["line"], "linewidth": 0.8, "shrinkB": 3, "relpos": (0, 0.5)}
    text = {"textcoords": "axes fraction", "va": "center", "arrowprops": thin}
    for label, y, colour, style, width in chart.lines:
        axes.plot(y, style, color=colours[colour], linewidth=width)
        points += [(x, value, f"{label}: {value:.4g} at {chart.x_label} {x}") for x, value in enumerate(y)]
        axes.annotate(fill(label, limit), points[-1][:2], (1.03, 0.5), color=colours[colour], **text)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, axis="y")
    return points


def move_apart(axes):
    """Move each label to the height of its point; labels that would touch are moved up or down."""
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(axes.texts, key=lambda label: to_axes.transform(label.xy)[1])
    line_height = 1.25 * FONT / 72 * axes.figure.dpi / axes.bbox.height
    heights = line_height * np.array([label.get_text().count("\n") + 1 for label in labels])
    middles = np.cumsum(heights) - heights / 2  # without space between the labels
    top = axes.transAxes.inverted().transform(axes.figure.bbox.size)[1]
    spaces = np.maximum.accumulate([to_axes.transform(label.xy)[1] for label in labels] - middles)
    for label, y in zip(labels, middles + np.clip(spaces, 0, top - heights.sum()), strict=True):
        label.set_y(y)


def draw_rows(axes, chart, colours, limit):
    """Draw `rows`. Returns [(value, row, text)] of their marks."""
    points, right = [], {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    for place, (label, marks, text) in enumerate(chart.rows):
        axes.annotate(text, (1, place), (6, 0), color=colours["soft"], **right)
        axes.plot([mark[0] for mark in marks], [place] * len(marks), color=colours["line"], linewidth=3, zorder=1)
        for value, said, name, marker in marks:
            points.append((value, place, f"{label}: {said}"))
            hollow = "none" if marker == "o" and name == "soft" else colours[name]
            look = {"markersize": 16 if marker == "|" else 8, "markeredgewidth": 1.5, "markerfacecolor": hollow}
            axes.plot(value, place, marker, color=colours[name], zorder=2, clip_on=False, **look)
    axes.set_yticks(range(len(chart.rows)), [fill(row.label, limit) for row in chart.rows])
    axes.tick_params(axis="y", length=0, labelcolor=colours["ink"])
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, axis="x")
    return points

"""The charts of the report, drawn by matplotlib: inline SVG that follows the page's theme, and PNG files."""

import functools
import re
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from textwrap import fill

from benchmarks.report.theme import COLOURS, DARK, with_variables

SIZE = 5.0, 3.3  # inches; a phone shows a chart about 4 inches wide, and its text stays readable
SERIES = ["c0", "c1", "c2", "c3", "c4"]  # colours of successive lines
CATEGORIES = {  # {category of an event: colour}; "phase" contains others and is not drawn
    "forward": "c0",
    "backward": "c3",
    "optimizer": "c4",
    "GPU": "c2",
    "wait": "line",
    "collective": "c1",
}
PAPER_STYLES = ["-", "--", "-.", ":"]  # line styles of the paper's columns


@dataclass(frozen=True)
class Line:
    """One line of a chart. colour: a name of COLOURS. style: a line style of matplotlib."""

    label: str
    x: list
    y: list
    colour: str = "ink"
    style: str = "-"
    marker: str = ""
    width: float = 1.6


@dataclass(frozen=True)
class Chart:
    """A chart with `lines`, horizontal `bars` [(label, value, text)], or `lanes` [(label, events of trace.py)].

    alt: what a reader learns from the chart, for readers who do not see it.
    """

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str = ""
    lines: list = field(default_factory=list)
    bars: list = field(default_factory=list)
    lanes: list = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False

    @functools.cached_property
    def svg(self):
        """The chart as inline SVG, without fixed colours and without ids that a second chart could repeat."""
        text = StringIO()
        save(self, 0, text, format="svg", metadata={"Date": None, "Creator": None})
        text = text.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"\s*<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)  # the style would hold for the page
        used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
        text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
        text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.alt)}" ', 1)
        return with_variables(text)


def save(chart, theme, file, **options):
    """Write the chart in one theme (0 light, 1 dark) to a file; options: arguments of matplotlib's savefig()."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = {name: pair[theme] for name, pair in COLOURS.items()}
    style = {
        "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": chart.name, "text.color": colours["ink"],
        "axes.labelcolor": colours["ink"], "axes.edgecolor": colours["soft"], "xtick.color": colours["soft"],
        "ytick.color": colours["soft"], "axes.facecolor": "none", "figure.facecolor": colours["page"],
        "grid.color": colours["line"], "legend.frameon": False, "font.family": "sans-serif",
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        height = SIZE[1] if chart.lines else 0.9 + 0.24 * len(chart.bars) + 0.42 * len(chart.lanes)
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.subplots()
        draw = draw_lines if chart.lines else draw_bars if chart.bars else draw_lanes
        draw(axes, figure, chart, colours)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        figure.suptitle(fill(chart.title, 70), fontsize=9, x=0.01, ha="left")
        figure.savefig(file, **options)


def draw_lines(axes, figure, chart, colours):
    for line in chart.lines:
        style = {"color": colours[line.colour], "linestyle": line.style, "linewidth": line.width}
        axes.plot(line.x, line.y, label=line.label, marker=line.marker, markersize=4, **style)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    if chart.whole_x:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)


def draw_bars(axes, figure, chart, colours):
    labels, values, texts = zip(*chart.bars, strict=True)
    places = range(len(values))
    axes.barh(places, values, color=colours["c0"], height=0.7)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.margins(x=0.35)  # space for the texts
    for place, value, text in zip(places, values, texts, strict=True):
        axes.text(value, place, f" {text}", va="center", fontsize=8)
    axes.grid(True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_lanes(axes, figure, chart, colours):
    """A row of bars for each lane; CATEGORIES gives their colours. Times are in microseconds, the axis in ms."""
    for place, (_, events) in enumerate(chart.lanes):
        for category, colour in CATEGORIES.items():
            bars = [(start / 1e3, duration / 1e3) for _, start, duration, kind, *_ in events if kind == category]
            axes.broken_barh(bars, (place - 0.35, 0.7), facecolors=colours[colour], linewidth=0)
    axes.set_yticks(range(len(chart.lanes)), [label for label, _ in chart.lanes])
    axes.invert_yaxis()
    used = {event[3] for _, events in chart.lanes for event in events}
    shown = [(name, colour) for name, colour in CATEGORIES.items() if name in used]
    handles = [axes.barh([0], [0], color=colours[colour], label=name) for name, colour in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    axes.set_xlim(0)


def write_png(chart, folder):
    """Write NAME.png and NAME-dark.png to the folder. Raises OSError."""
    for theme, suffix in ((0, ""), (DARK, "-dark")):
        save(chart, theme, folder / f"{chart.name}{suffix}.png", dpi=130)

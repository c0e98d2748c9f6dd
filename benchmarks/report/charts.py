"""The charts of the report, drawn by matplotlib: inline SVG in two sizes with the theme of the page, and files."""

import html
import json
import math
import re
from dataclasses import dataclass, field
from io import StringIO
from textwrap import wrap

from benchmarks.report.theme import standalone, with_variables
from gpt2core.app.output.theme import COLOURS, DARK, LIGHT, figure_style

FONT = 9  # points
SIZES = {"wide": (9.0, 4.0), "narrow": (4.4, 3.7)}  # inches: as wide as the page, and as a phone
ROW = {"wide": 0.3, "narrow": 0.42}  # inches of a row of `rows`
CHARACTER = 0.56 * FONT / 72  # inches, on average


@dataclass(frozen=True)
class Line:
    """One line of a chart, with its label at its end. colour: a name of COLOURS. style: a line style of matplotlib."""

    label: str
    x: list
    y: list
    colour: str = "ink"
    style: str = "-"
    marker: str = ""
    width: float = 1.6


@dataclass(frozen=True)
class Row:
    """One row of a chart. marks: [(value, text, colour, marker of matplotlib)]; bar: one bar."""

    label: str
    marks: list
    bar: bool = False
    text: str = ""  # at the right end


@dataclass(frozen=True)
class Chart:
    """A chart with `lines` or `rows`. alt: what a reader learns from the chart, for readers who do not see it."""

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str = ""
    lines: list = field(default_factory=list)
    rows: list = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False

    def inline(self):
        """The chart as inline SVG of each size, without fixed colours. "data-points" has [x, y, text] for tooltips."""
        pictures = []
        for size in SIZES:
            figure, points = draw(self, size, LIGHT)
            text = svg_of(figure, self.name + size)
            label, data = html.escape(self.alt), html.escape(json.dumps(points, separators=(",", ":")))
            head = f'<svg class="chart {size}" role="img" aria-label="{label}" data-points="{data}" '
            pictures.append(with_variables(text.replace("<svg ", head, 1)))
        return "".join(pictures)

    def write(self, folder):
        """Write NAME.svg, NAME.png and NAME-dark.png to the folder. Raises OSError."""
        for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
            figure, _ = draw(self, "wide", theme, self.title)
            figure.savefig(folder / f"{self.name}{suffix}.png", dpi=130)
            if theme == LIGHT:
                text = standalone(with_variables(svg_of(figure, self.name)))
                (folder / f"{self.name}.svg").write_text(text, encoding="utf-8")


def svg_of(figure, salt):
    """A figure as SVG text, without ids that a second chart could repeat and without rules for the whole page."""
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    text = text.getvalue()
    text = re.sub(r"\s*<(metadata|style).*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)


def draw(chart, size, theme, title=""):
    """(Figure, [[x, y, text]] of its points as fractions of its width and height from the upper left corner)."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = {name: pair[theme] for name, pair in COLOURS.items()}
    style = figure_style(theme) | {"font.size": FONT, "font.family": "sans-serif", "axes.facecolor": "none"}
    width, height = SIZES[size]
    if chart.rows:
        height = ROW[size] * (len(chart.rows) + 0.6) + 0.75
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots()
        top = 1 - (0.35 if title else 0.22) / height
        labels, limit = [line.label for line in chart.lines], 40 if size == "wide" else 21
        rights = [len(part) for label in labels for part in wrap(label, limit)] or [len(row.text) for row in chart.rows]
        left = 0.65 if chart.lines else min(max(len(row.label) for row in chart.rows) * CHARACTER + 0.3, 0.36 * width)
        axes.set_position([left / width, 0.5 / height, 0, 0])
        right = width - max(rights) * CHARACTER - 0.25
        axes.set_position([left / width, 0.5 / height, (right - left) / width, top - 0.5 / height])
        axes.set_xscale("log" if chart.log_x else "linear")
        axes.set_yscale("log" if chart.log_y else "linear")
        points = (draw_lines if chart.lines else draw_rows)(axes, figure, chart, colours, limit)
        for axis, log in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.log_y)):
            if log:
                low, high = axis.get_view_interval()
                axis.set_major_formatter(tick_label)
                axis.set_minor_formatter(lambda value, _, few=high < 30 * low: tick_label(value) if few else "")
        axes.set_xlabel(chart.x_label)
        if chart.y_label:
            axes.set_title(chart.y_label, loc="left", fontsize=FONT, color=colours["soft"], x=0, pad=4)
        if title:
            figure.text(0.01, 1 - 0.16 / height, title, fontsize=FONT + 1, va="center")
        axes.get_xlim(), axes.get_ylim()  # matplotlib computes the limits when they are read
        pixels = axes.transData.transform([point[:2] for point in points])
    whole = figure.dpi * width, figure.dpi * height
    fractions = [[round(x / whole[0], 4), round(1 - y / whole[1], 4)] for x, y in pixels]
    return figure, [[*place, point[2]] for place, point in zip(fractions, points, strict=True)]


def tick_label(value, _=None):
    """The label of a tick of a logarithmic axis: those of 1, 2 and 5 times a power of 10."""
    if f"{value:e}"[0] not in "125":
        return ""
    return f"{value:,g}" if value < 1e5 else f"{value / 1e6:g} M"


def draw_lines(axes, figure, chart, colours, limit):
    points = []
    for line in chart.lines:
        look = {"color": colours[line.colour], "linestyle": line.style, "linewidth": line.width}
        axes.plot(line.x, line.y, marker=line.marker, markersize=5, **look)
        pairs = [(x, y) for x, y in zip(line.x, line.y, strict=True) if not math.isnan(y)]
        points += [(x, y, f"{line.label}: {y:.4g} at {chart.x_label} {x:,g}") for x, y in pairs]
    if chart.whole_x:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, axis="y", linewidth=0.6)
    label_ends(axes, figure, chart, colours, limit)
    return points


def label_ends(axes, figure, chart, colours, limit):
    """Write the label of each line beside its end; labels that would touch are moved, with a thin line to the end."""
    axes.get_xlim(), axes.get_ylim()
    x = axes.get_window_extent().x1 + 12
    line_height = 1.25 * FONT * figure.dpi / 72
    ends = []
    for line in chart.lines:
        last = max(number for number, y in enumerate(line.y) if not math.isnan(y))
        place, text = (line.x[last], line.y[last]), "\n".join(wrap(line.label, limit))
        ends.append([axes.transData.transform(place)[1], place, text, line, line_height * (text.count("\n") + 1)])
    ends.sort(key=lambda end: end[0])
    heights, floor, before = [], axes.get_window_extent().y0, None
    for end in ends:
        low = max(floor if before is None else heights[-1] + (before + end[4]) / 2, end[0])
        heights.append(low)
        before = end[4]
    ceiling = figure.dpi * figure.get_figheight() - line_height / 2
    for number in reversed(range(len(heights))):  # move those down that are above the figure
        heights[number] = min(heights[number], ceiling)
        ceiling = heights[number] - (ends[number][4] + ends[max(0, number - 1)][4]) / 2
    for y, (_, place, text, line, _) in zip(heights, ends, strict=True):
        thin = {
            "arrowstyle": "-",
            "color": colours["line"],
            "linewidth": 0.8,
            "shrinkA": 2,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        }
        spot = 72 * x / figure.dpi, 72 * y / figure.dpi  # in points: the same for every resolution of a file
        axes.annotate(
            text, place, spot, textcoords="figure points", va="center", color=colours[line.colour], arrowprops=thin
        )  # fmt: skip


def draw_rows(axes, figure, chart, colours, limit):
    points = []
    for place, row in enumerate(chart.rows):
        values = [value for value, *_ in row.marks]
        if row.bar:
            (value, text, colour, _), *_ = row.marks
            axes.barh(place, value, color=colours[colour], height=0.62)
            axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=FONT - 0.5)
        elif len(values) > 1:
            axes.plot([min(values), max(values)], [place, place], color=colours["line"], linewidth=3, zorder=1)
        spot = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(row.text, (1, place), (6, 0), color=colours["soft"], **spot)
        for value, text, colour, marker in row.marks:
            points.append((value, place, f"{row.label}: {text}"))
            if not row.bar:
                hollow = "none" if marker == "o" and colour == "soft" else colours[colour]
                axes.plot(value, place, marker, color=colours[colour], markerfacecolor=hollow, markersize=8, zorder=2)
    characters = max(6, int(axes.get_position().x0 * figure.get_figwidth() / CHARACTER) - 2)
    axes.set_yticks(range(len(chart.rows)), ["\n".join(wrap(row.label, characters)) for row in chart.rows])
    axes.tick_params(axis="y", length=0, labelcolor=colours["ink"])
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    if any(row.bar for row in chart.rows):
        inches = axes.get_position().width * figure.get_figwidth()
        text = max(len(row.marks[0][1]) for row in chart.rows) * CHARACTER
        axes.set_xlim(0, max(row.marks[0][0] for row in chart.rows) * inches / (inches - text))
    axes.spines["left"].set_visible(False)
    if not chart.rows[0].bar:
        axes.grid(True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    return points

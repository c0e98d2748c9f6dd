"""Write the report: one HTML page without outside requests, and its charts and diagrams as PNG and SVG files."""

from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.report import commit, hardware
from benchmarks.report import machine_sections, paper_sections
from benchmarks.report.charts import write_png
from benchmarks.report.diagrams import diagrams
from benchmarks.report.markup import Markup, element, escape
from benchmarks.report.runs import Runs
from benchmarks.report.theme import standalone, style_sheet
from gpt2core.errors import ConfigError

GENERATOR = '<meta name="generator" content="staged GPT-2 report">'
FOLDER = Path(__file__).parent


def write_report(folder, records, missing, preset, steps, titles):
    """Write index.html and the picture files to `folder`; returns the path of the page. Raises ConfigError.

    records, missing: the results of run_parts(). preset, steps: of the training runs. titles: {name of a part: title}.
    """
    runs = Runs(records, missing, preset, steps)
    sections, charts = all_sections(runs, diagrams(), titles)
    page = folder / "index.html"
    try:
        for name, text in diagrams(wide=True).items():
            (folder / f"{name}.svg").write_text(standalone(text), encoding="utf-8")
        for chart in charts:
            (folder / f"{chart.name}.svg").write_text(standalone(chart.svg), encoding="utf-8")
            write_png(chart, folder)
        page.write_text(html(sections, runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: cannot be written ({error.strerror}): free some space"
        ) from None
    return page


def all_sections(runs, pictures, titles):
    """([section], [Chart]) of the whole page."""
    table_2, charts = paper_sections.table_2(runs)
    ops, op_charts = machine_sections.ops(runs)
    collectives, collective_charts = machine_sections.collectives(runs)
    scaling, scaling_charts = machine_sections.scaling(runs)
    timeline, timeline_charts = machine_sections.timeline(runs)
    sections = [
        machine_sections.machine(hardware(), runs, titles),
        paper_sections.table_1(runs),
        table_2,
        paper_sections.samples(runs),
        paper_sections.processes(),
        paper_sections.figures(pictures),
        ops,
        collectives,
        scaling,
        timeline,
        machine_sections.player(machine_sections.views(runs)),
    ]
    return sections, [*charts, *op_charts, *collective_charts, *scaling_charts, *timeline_charts]


def html(sections, runs):
    """The text of the page."""
    title = "Distributed GPT-2: the paper's comparison on this machine"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"Written on {now}, commit {commit()}. Training runs: preset {runs.preset}, {runs.steps} steps."
    links = [element("li", element("a", heading(each), href=f"#{identifier(each)}")) for each in sections]
    body = element(
        "body",
        element("header", element("h1", title), element("p", subtitle, class_="subtitle")),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("main", *sections),
        Markup(f"<script>\n{(FOLDER / 'player.js').read_text(encoding='utf-8')}</script>"),
    )
    style = style_sheet() + (FOLDER / "page.css").read_text(encoding="utf-8")
    head = "\n".join(
        [
            '<meta charset="utf-8">',
            GENERATOR,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
        ]
    )
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n{body}\n</html>\n'


def heading(section):
    return Markup(section.split("<h2>")[1].split("</h2>")[0])


def identifier(section):
    return section.split(' id="')[1].split('"')[0]

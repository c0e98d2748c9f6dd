"""Write the report: one HTML page without outside requests, and its charts as PNG and SVG files."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.report import commit, hardware
from benchmarks.report import architecture, sections
from benchmarks.report.charts import style_sheet
from benchmarks.report.runs import STAGE_NAMES, Runs
from benchmarks.report.views import views
from gpt2core.errors import ConfigError

GENERATOR = '<meta name="generator" content="staged GPT-2 report">'
FLAG = re.compile(r"(make report ARGS=)?--[a-z][a-z-]*")


def environment():
    """The jinja2 environment of page.html. Raises ConfigError if a package of the extra `report` is missing."""
    try:
        import jinja2
        from latex2mathml.converter import convert
        from markupsafe import Markup, escape  # of jinja2
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; pip install jinja2 latex2mathml") from None
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    found = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), **options)
    found.filters["math"] = lambda text: convert(str(text))
    found.filters["flags"] = lambda text: Markup(FLAG.sub(r"<code>\g<0></code>", str(escape(text))))
    found.filters["data"] = lambda value: json.dumps(value, separators=(",", ":")).replace("</", "<\\/")
    return found


def write_report(folder, records, missing, preset, steps, titles):
    """Write index.html and the picture files to `folder`; returns the path of the page.

    records, missing: the results of run_parts(). preset, steps: of the training runs. titles: {name of a part: title}.
    """
    template, runs = environment().get_template("page.html"), Runs(records, missing, preset, steps)
    charts, notes, page = [], [], folder / "index.html"

    def draw(chart):
        charts.append(chart)
        return chart.inline()

    def note(text):  # the number of a footnote; equal texts are one footnote
        if text not in notes:
            notes.append(text)
        return notes.index(text) + 1

    text = template.render(
        s=sections, f=architecture, runs=runs, stage_names=STAGE_NAMES, generator=GENERATOR, note=note, draw=draw,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}", commit=commit(),
        colours=style_sheet(), views=views(runs), prompt=runs.results("prompt"),
        tables=sections.machine(hardware(), runs, titles), notes=notes,
    )  # fmt: skip
    for chart in charts:
        chart.write(folder)
    page.write_text(text, encoding="utf-8")
    return page

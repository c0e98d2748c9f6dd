"""Write the report: one HTML page without outside requests, and its charts as PNG and SVG files."""

import json
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.report import commit, hardware
from benchmarks.report import sections
from benchmarks.report.charts import style_sheet
from benchmarks.report.runs import STAGE_NAMES
from benchmarks.report.views import views
from gpt2core.errors import ConfigError

GENERATOR = '<meta name="generator" content="staged GPT-2 report">'


def environment():
    """The jinja2 environment of page.html. Raises ConfigError if a package of the extra `report` is missing."""
    try:
        import jinja2
        from latex2mathml.converter import convert
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; pip install jinja2 latex2mathml") from None
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    found = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), **options)
    found.filters["math"] = lambda text: convert(str(text))
    found.filters["data"] = lambda value: json.dumps(value, separators=(",", ":")).replace("</", "<\\/")
    return found


def write_report(folder, runs):
    """Write index.html and the picture files of Runs to `folder`; returns the path of the page."""
    template, notes = environment().get_template("page.html"), {}

    def draw(chart):
        chart.write(folder)
        return chart.inline()

    text = template.render(
        s=sections, runs=runs, stage_names=STAGE_NAMES, generator=GENERATOR, colours=style_sheet(),
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}", commit=commit(), views=views(runs), draw=draw, notes=notes,
        note=lambda text: notes.setdefault(text, len(notes) + 1),  # the number of a footnote
        tables=sections.machine(hardware(), runs), prompt=runs.results("prompt"),
    )  # fmt: skip
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page

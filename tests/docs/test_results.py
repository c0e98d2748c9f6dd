"""The tables in the documentation are those that benchmarks/harness/tables.py generates from results/."""

import re

import pytest

from benchmarks.harness import assignment_tables, flag_tables, result_tables, table_format, tables
from benchmarks.harness.table_format import Table, load, number
from testing.jobs import ROOT

RESULTS = (
    "summary cpu-step cpu-decode start ranks-step ranks-collectives strategies gpu-step gpu-real-run gpu-positions "
    "gpu-attention gpu-products gpu-decode gpus-scaling gpus-sharding gpus-pipeline gpus-collectives torch-kernels "
    "parity kill choices"
).split()
BEGIN, END = re.compile(r"<!-- table: "), re.compile(r"<!-- end -->")
PAGES = [page for page in tables.pages() if BEGIN.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert len(BEGIN.findall(text)) == len(tables.BLOCK.findall(text)) == len(END.findall(text))
    assert tables.filled(text) == text, "run python -m benchmarks.harness.tables"


@pytest.mark.parametrize(
    "page, names",
    [
        ("RESULTS.md", set(RESULTS)),
        ("TEACHING.md", {"classroom"}),
        ("ASSIGNMENT.md", set(assignment_tables.TABLES)),
        ("USAGE.md", set(flag_tables.TABLES)),
    ],
)
def test_a_page_has_every_table_of_its_subject_once(page, names):
    found = [name for _, name, *_ in tables.BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(names)


def test_every_table_is_on_a_page_or_printed_by_a_benchmark():
    on_pages = {name for page in PAGES for _, name, *_ in tables.BLOCK.findall(page.read_text(encoding="utf-8"))}
    files = [path for path in (ROOT / "benchmarks").glob("*/*.py") if path.parent.name != "harness"]
    scripts = "".join(path.read_text(encoding="utf-8") for path in files)
    assert on_pages <= set(tables.TABLES)
    shown = on_pages | {name for name, table in result_tables.TABLES.items() if table.choice}  # "choices" has a row
    assert [name for name in set(tables.TABLES) - shown if f'"{name}"' not in scripts] == []


def test_every_results_file_is_the_source_of_a_table():
    sources = {file for table in tables.TABLES.values() for file in table()[1]}
    files = {str(path.relative_to(ROOT / "results").with_suffix("")) for path in (ROOT / "results").rglob("*.json")}
    of_tools = {"cpu/same_bits", "gpu/same_bits", "cpu/test_long"}  # tests/tools/
    of_tools |= {"gpu/ladder"}  # stage 2's notebook draws it
    assert files - sources - of_tools == {"gpus/timeline_trace"}  # docs/RESULTS.md links to it


def test_the_headline_links_to_sections_of_results_md():
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    linked = re.findall(r"docs/RESULTS\.md#([\w-]+)", tables.block("headline"))
    assert len(linked) == 6 and set(linked) <= anchors


def test_a_table_without_results_says_so(monkeypatch):
    monkeypatch.setitem(tables.TABLES, "example", lambda: ([], ["torch/example"]))
    line = "Not measured yet: `results/torch/example.json` has no rows of this table.\n"
    assert tables.block("example") == line


def test_a_changed_number_is_found(monkeypatch):
    text = "before\n<!-- table: kill -->\n" + tables.block("kill") + "<!-- end -->\nafter\n"
    assert tables.filled(text) == text and tables.filled(text.replace("| 20 |", "| 19 |")) == text
    with pytest.raises(SystemExit, match="no such table"):
        tables.filled("<!-- table: other -->\n<!-- end -->")


def test_a_source_line_names_date_commit_hardware_and_command():
    line, record = tables.source("gpu/step_gpt2"), load("gpu/step_gpt2")
    assert all(text in line for text in (record["date"][:10], record["commit"], "H200", record["command"]))


def test_a_source_line_names_the_commits_of_all_rows(monkeypatch):
    rows = [{"date": "2026-02-01", "commit": "bbb"}, {"date": "2026-01-01", "commit": "aaa"}, {"name": "no commit"}]
    record = load("gpu/step_gpt2") | {"commit": "bbb", "results": rows}
    monkeypatch.setattr(table_format, "load", lambda name: record)
    assert ", commits aaa, bbb, " in table_format.source("gpu/step_gpt2")


def test_a_description_has_templates_for_titles_and_cells():
    record = {"results": [{"name": "a", "ranks": 2, "ms": {"median": 0.5}, "gain": None}], "commit": "abc"}
    columns = "= {name} | {ranks} ranks = {ms:ms 3}\n gain = {2 * gain:.2f} | more = {row.more[0]} | ranks"
    table = Table("x", columns)
    assert table.cells([record]) == [{"": "a", "2 ranks": "500", "gain": "", "more": "", "ranks": "2"}]
    with pytest.raises(NameError, match="other"):
        Table("x", "a = {other}").cells([record])
    assert table.cells([{"results": []}]) == []


def test_what_is_computed_from_a_missing_number_is_missing():
    table = Table("x", "gain = {row.base.ms.mean / row.ms.mean:.1f} | ms = {row.ms:cell} | first = {words[0].name}")
    base = {"ms": {"mean": 6, "std": 1}}
    rows = [
        {"base": base, "ms": {"mean": 3.0, "std": 0.5}, "words": [{"name": "a"}]},
        {"base": base, "oom": True, "words": [{"name": None}]},
        {"base": None, "ms": None, "words": [{}]},
    ]
    cells = [list(row.values()) for row in table.cells([{"results": rows}])]
    assert cells == [["2.0", "3 ± 0.5", "a"], ["", "out of memory", ""], ["", "", ""]]


def test_a_row_is_beside_the_first_row_with_the_same_fields():
    rows = [{"name": name, "size": size} for size in (1, 2) for name in ("ours", "torch", "ours")][1:]
    rows += [{"name": "torch", "size": 2, "us": 5}, {"name": "ours", "size": 3}]
    table = Table("x", "size | base = {base.name} {base.size} {base.us}", base='name == "torch"', same="size")
    assert [row["base"] for row in table.cells([{"results": rows}])] == ["torch 1 "] * 2 + ["torch 2 "] * 4 + ["  "]


def test_rows_inside_rows_have_the_fields_of_the_row_around_them():
    results = {"a": {"size": 1, "times": [3, 4]}, "b": {"size": 2, "times": [5]}, "c": {"oom": True}}
    cells = Table("x", "key | us = {row.size * row.value:cell}", each="* times").cells([{"results": results}])
    assert [list(row.values()) for row in cells] == [["a", "3"], ["a", "4"], ["b", "10"], ["c", "out of memory"]]


def test_a_name_is_compared_with_a_template_and_rows_are_selected_and_sorted():
    names = "grid / 64 / ours", "grid / 128 / ours", "grid / 64 / torch", "grid / 64 / ours / 2", "sum / 64 / ours"
    table = Table("x", "size | by", name="grid / {size} / {by}", where='by == "ours"', order="int(size)")
    cells = table.cells([{"results": [{"name": name} for name in reversed(names)]}])
    assert cells == [{"size": "64", "by": "ours"}, {"size": "128", "by": "ours"}]


def test_rows_with_the_same_first_cell_are_merged_and_columns_keep_their_order():
    results = [{"size": size, "ranks": ranks} for ranks in (2, 4) for size in (30, 10)]
    table = Table("x", "MB = {size} | {ranks} ranks = {ranks}", merged=True, order="size")
    assert table.cells([{"results": results[:3]}]) == [
        {"MB": "10", "2 ranks": "2", "4 ranks": ""},
        {"MB": "30", "2 ranks": "2", "4 ranks": "4"},
    ]


def test_numbers_keep_their_significant_digits():
    sample = {"median": 0.0024, "q1": 0.002389, "q3": 3.1, "n": 5}
    assert number(sample, 3, 1e3) == "2.40" and number({"median": 3100.4}) == "3,100"

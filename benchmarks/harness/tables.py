"""Generate the tables of the documentation: the texts between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.harness.tables            # rewrite the tables of all pages
    python -m benchmarks.harness.tables --check    # exit code 1 if a page is out of date

The numbers are those of results/; the tables of flags are made from gpt2core/app/settings/definitions.py. The line
below a table of numbers names the source of its numbers: the file in results/, the date, the commit, the hardware and
the command of the measurement. A table with several source files has several such lines. Some scripts were renamed
after their measurement: then the line shows the name that the script had at the named commit.
"""

import re
import sys

from benchmarks.harness import assignment_tables, flag_tables, result_tables
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.table_format import load, source
from testing.jobs import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d|$")  # matches a cell with a number, or an empty cell
PAGES = ("*.md", "docs/*.md", "stage*/*.md", "benchmarks/*.md", "results/*.md", "data/*.md")


# -- comparisons with PyTorch: all of them in docs/RESULTS.md, some in README -----------------------------------------

HEADLINE = (  # (file, words of the question) of a row of README
    ("cpu/train_step", "`paper`"), ("cpu/train_step_intel", "`paper`"), ("ranks/ranks", ""),
    ("gpu/step_gpt2", ""), ("gpu/decode", ""), ("gpus/scaling_64", ""),
)  # fmt: skip


def summary():
    """The rows of all comparisons, and no files: each row names its own."""
    rows = [row for table in result_tables.SUMMARY for row in table()[0]]
    titles = "question", "hardware", "ours", "strongest peer", "ratio", "limit", "share of the limit", "file"
    return [{title: row.get(title, "") for title in titles} for row in rows], []


def headline():
    """The rows of README's table. The title of a row is a link to the section of docs/RESULTS.md with all results."""
    rows = [row for table in result_tables.SUMMARY for row in table()[0]]
    titles = {"": "readme", "this project": "ours", "PyTorch": "strongest peer", "speedup": "ratio"}
    for file, words in HEADLINE:
        row = next(row for row in rows if row["file"].startswith(f"`{file}`") and words in row["question"])
        yield {title: row[name] for title, name in titles.items()}


# -- the pages --------------------------------------------------------------------------------------------------------

# {name: Table, or function that returns (rows, names of the source files)}; a row is {column title: cell}
TABLES = {
    "headline": lambda: ([*headline()], []),
    "summary": summary,
    **result_tables.TABLES,
    **assignment_tables.TABLES,
    **flag_tables.TABLES,
}


def block(name):
    """The text of one table and of the lines that name its sources, or one line if there are no rows yet.

    Raises SystemExit for an unknown name.
    """
    if name not in TABLES:
        raise SystemExit(f"<!-- table: {name} -->: no such table; use one of {', '.join(TABLES)}")
    rows, files = TABLES[name]()
    if not rows:
        return f"Not measured yet: `results/{files[0]}.json` has no rows of this table.\n"
    header = list(rows[0])
    # Columns of numbers, except the first column, are right-aligned.
    numeric = {title: title != header[0] and all(NUMBER.match(str(row[title])) for row in rows) for title in header}
    lines = ["| " + " | ".join(header) + " |", "|" + "".join("---:|" if numeric[title] else "---|" for title in header)]
    lines += ["| " + " | ".join(str(row[title]) for title in header) + " |" for row in rows]
    sources = ["", "<br>".join(source(file) for file in files if load(file)["results"])] if files else []
    return "\n".join([*lines, *sources]) + "\n"


def filled(text):
    """The text of a page in which all tables are generated again."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[4], text)


def pages():
    """The paths of the pages that may contain tables."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def main():
    parser = benchmark_parser("benchmarks.harness.tables", __doc__, saves=False)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    args = parser.parse_args()
    outdated = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            outdated.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(new, encoding="utf-8")
    if outdated and args.check:
        print(f"{', '.join(outdated)}: differs from results/; run python -m benchmarks.harness.tables", file=sys.stderr)
        return 1
    print(f"{'up to date' if args.check or not outdated else 'rewritten: ' + ', '.join(outdated)}")
    return 0


if __name__ == "__main__":
    run_main(main, measures_time=False)

"""Generate the tables of the documentation: the texts between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.harness.tables            # rewrite the tables of all pages
    python -m benchmarks.harness.tables --check    # exit code 1 if a page is out of date

The numbers are those of results/; the tables of flags are made from gpt2core/app/settings/definitions.py. Below a table
of numbers, a line for each file in results/ names date, commit, hardware and command of the measurement. Some scripts
were renamed later: then the line shows the name that the script had at the named commit.
"""

import re
import sys

from benchmarks.harness import assignment_tables, flag_tables, result_tables
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import load, source
from testing.jobs import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d|$")  # matches a cell with a number, or an empty cell
PAGES = ("*.md", "docs/*.md", "stage*/*.md", "benchmarks/*.md", "results/*.md", "data/*.md")
HEADLINE = (  # (title in README, to which the hardware is added, file and words of the question in the summary)
    ("time per training step, preset `paper`, 2 threads,", "cpu/train_step", "`paper`"),
    ("time per training step, preset `paper`, 2 threads,", "cpu/train_step_intel", "`paper`"),
    ("the same with 2 MPI ranks, one thread each,", "ranks/ranks", ""),
    ("time per training step, GPT-2 124M, bf16, 64 x 1024 tokens, one", "gpu/step_gpt2", "bf16, 64 x 1024"),
    ("time per generated token, GPT-2 124M, bf16, one", "gpu/decode", "bf16"),
    ("training speed, GPT-2 124M, bf16, 4 GPUs, 64 x 1024 per GPU,", "gpus/scaling_64", "4 GPUs, 64 x 1024 per GPU"),
)


def summary():
    """The rows of all comparisons, the last one of each question and machine; and no files: each row names its own."""
    rows = (row for table in result_tables.SUMMARY for row in table()[0])
    return list({(row["question"], row["hardware"]): row for row in rows}.values()), []


def headline():
    """The rows of README's table, and no files. A title is a link to the section of docs/RESULTS.md."""
    rows = []
    for title, file, words in HEADLINE:
        row = next(row for row in summary()[0] if row["file"].startswith(f"`{file}`") and words in row["question"])
        link = f"[{title} {row['hardware']}](docs/RESULTS.md{row['question'].partition('](')[2]}"
        rows.append({"": link, "this project": row["ours"], "PyTorch": row["strongest peer"], "speedup": row["ratio"]})
    return rows, []


# {name: Table, or function that returns (rows, names of the source files)}; a row is {column title: cell}
TABLES = {
    "headline": headline,
    "summary": summary,
    "choices": result_tables.choices,
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
    columns = {title: [str(row[title]) for row in rows] for title in rows[0]}
    # Columns of numbers, except the first column, are right-aligned.
    numeric = [bool(place) and all(map(NUMBER.match, cells)) for place, cells in enumerate(columns.values())]
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *zip(*columns.values(), strict=True))]
    lines[1:1] = ["|" + "".join("---:|" if each else "---|" for each in numeric)]
    sources = ["", "<br>".join(source(file) for file in files if load(file)["results"])] if files else []
    return "\n".join([*lines, *sources]) + "\n"


def filled(text):
    """The text of a page in which all tables are generated again."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[4], text)


def pages():
    """The paths of the pages that may contain tables."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


@benchmark(
    saves=False,
    measures_time=False,
    check=dict(action="store_true", help="change nothing; exit code 1 if a page is out of date"),
)
def main(args):
    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    outdated = {path: new for path, text in texts.items() if (new := filled(text)) != text}
    names = ", ".join(str(path.relative_to(ROOT)) for path in outdated)
    if outdated and args.check:
        print(f"{names}: differs from results/; run python -m benchmarks.harness.tables", file=sys.stderr)
        return 1
    for path, new in outdated.items():
        path.write_text(new, encoding="utf-8")
    print(f"rewritten: {names}" if outdated else "up to date")
    return 0

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

from benchmarks.harness import assignment_tables, cpu_tables, flag_tables, gpu_tables
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.table_format import fill, load, source
from testing.jobs import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d|$")  # matches a cell with a number, or an empty cell
PAGES = ("*.md", "docs/*.md", "stage*/*.md", "benchmarks/*.md", "results/*.md", "data/*.md")


# -- README's table ---------------------------------------------------------------------------------------------------

STEP_TIME = "{seconds.median * 1e3:.4g} ms"
HEADLINE = (  # (title, section of docs/RESULTS.md, file, arguments of pair(), cell, PyTorch's program)
    (
        "time per training step, preset `paper`, 2 threads, AMD Zen 4",
        "cpu-training-step", "cpu/train_step", dict(ours="ours", torch="torch eager", threads=2), STEP_TIME, "eager",
    ),
    (
        "the same on an Intel Xeon, with MKL (see the note)",
        "cpu-training-step", "cpu/train_step_intel", dict(ours="ours", torch="torch eager", threads=2), STEP_TIME,
        "eager",
    ),
    (
        "the first row with 2 MPI ranks, one thread each",
        "ranks", "ranks/ranks", dict(ours="stage 1", torch="torch DDP, gloo"), STEP_TIME, "DDP, gloo",
    ),
    (
        "time per training step, GPT-2 124M, bf16, 64 x 1024 tokens, one {file.hardware.gpu:gpu}",
        "gpu-step", "gpu/step_gpt2", dict(ours="ours", torch="torch"), STEP_TIME, "compiled",
    ),
    (
        "time per generated token, GPT-2 124M, bf16, one {file.hardware.gpu:gpu}",
        "gpu-decode", "gpu/decode", dict(ours="ours", torch="torch", case="one"), "{token.median * 1e6:.0f} µs",
        "{name.removeprefix('torch ').replace(' + each step a graph', ', CUDA graph')}",
    ),
    (
        "training speed, GPT-2 124M, bf16, 4 {file.hardware.gpu:gpu}s",
        "several-gpus", "gpus/scaling_64", dict(ours="ours, 4 GPUs --dp flat --zero 1", torch="DDP, 4 GPUs"),
        "{tokens_per_second / 1e6:.2f} M tokens/s", "DDP, compiled",
    ),
)  # fmt: skip


def pair(results, ours, torch, **wanted):
    """(result of this project, of PyTorch, speedup). ours, torch: the start of the names; wanted: fields of both.

    The fastest program of PyTorch is the peer.
    """
    results = results if isinstance(results, list) else results["scaling"][0]["rows"]
    results = [result for result in results if wanted.items() <= result.items()]
    ours = next(result for result in results if result["name"].startswith(ours))
    peers = (result for result in results if result["name"].startswith(torch))
    torch = min(peers, key=lambda result: (result.get("token") or result["seconds"])["median"])
    speedup = ours.get("times_as_fast_as_eager") or ours["times_as_fast"]
    return ours, torch, speedup.get(torch["name"], speedup)


def headline():
    """The rows of README's table. The title of a row is a link to the section of docs/RESULTS.md with all results."""
    rows = []
    for title, section, file, names, cell, program in HEADLINE:
        ours, torch, speedup = pair(load(file)["results"], **names)
        rows.append(
            {
                "": fill(f"[{title}](docs/RESULTS.md#{section})", {}, load(file)),
                "this project": fill(cell, ours),
                "PyTorch": fill(f"{cell} ({program})", torch),
                "speedup": fill("{median:.2f}", speedup),
            }
        )
    return rows


# -- the pages --------------------------------------------------------------------------------------------------------

# {name: Table, or function that returns (rows, names of the source files)}; a row is {column title: cell}
TABLES = {
    "headline": lambda: (headline(), []),
    **cpu_tables.TABLES,
    **gpu_tables.TABLES,
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
    return "\n".join([*lines, *(line for file in files for line in ("", source(file)))]) + "\n"


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

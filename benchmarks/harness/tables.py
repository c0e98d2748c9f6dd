"""Fill the tables of the documentation from results/: the text between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.harness.tables            # rewrite the blocks of all pages
    python -m benchmarks.harness.tables --check    # exit code 1 if a page differs from results/

After a table, one line for each source file states the file, the date, the commit, the hardware and the command of the
measurement. The command in an older file contains the name that the module had at that commit.
"""

import argparse
import re
import sys

from benchmarks.harness import cpu_tables, gpu_tables
from benchmarks.harness.jobs import ROOT
from benchmarks.harness.table_format import load, source

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d|$")  # a column is right-aligned if this matches all its cells
PAGES = ("*.md", "docs/*.md", "stage*/*.md", "benchmarks/*.md", "results/*.md", "data/*.md")


def headline():
    """README's table: five results, each with a link to its section in docs/RESULTS.md."""
    cpu, ranks, step, decode, scaling = (
        load(name) for name in ("cpu/train_step", "ranks/ranks", "gpu/step_gpt2", "gpu/decode", "gpus/scaling")
    )
    serial = {row["name"]: row for row in cpu["results"] if row["threads"] == 2}
    ranks = {row["name"]: row for row in ranks["results"]}
    two = next(row for name, row in ranks.items() if name.startswith("stage 1"))
    ours, peer = step["results"]
    token, best, *_ = decode["results"]
    four = {row["name"]: row for row in scaling["results"]["scaling"][0]["rows"]}
    zero, ddp = four["ours, 4 GPUs --dp flat --zero 1"], four["DDP, 4 GPUs"]

    def row(title, anchor, ours, peer, ratio):
        return {
            "": f"[{title}](docs/RESULTS.md#{anchor})",
            "this project": ours,
            "PyTorch": peer,
            "speedup": f"{ratio['median']:.2f}",
        }

    def ms(result, key="seconds"):
        return f"{1e3 * result[key]['median']:.4g} ms"

    def us(result):
        return f"{1e6 * result['token']['median']:.0f} µs"

    def rate(result):
        return f"{1e-6 * result['tokens_per_second']:.2f} M tokens/s"

    return [
        row(
            "time per training step, preset `paper`, 2 CPU threads", "cpu-training-step", ms(serial["ours"]),
            f"{ms(serial['torch eager'])} (eager)", serial["ours"]["times_as_fast_as_eager"],
        ),
        row(
            "the same, 2 MPI ranks with one thread each", "ranks", ms(two),
            f"{ms(ranks['torch DDP, gloo'])} (DDP, gloo)", two["times_as_fast"]["torch DDP, gloo"],
        ),
        row(
            "time per training step, GPT-2 124M, bf16, 64 x 1024 tokens, one H200", "gpu-step", ms(ours),
            f"{ms(peer)} (compiled)", ours["times_as_fast"][peer["name"]],
        ),
        row(
            "time per generated token, GPT-2 124M, bf16, one H200", "gpu-decode", us(token),
            f"{us(best)} (compiled, CUDA graph)", token["times_as_fast"][best["name"]],
        ),
        row(
            "training speed, GPT-2 124M, bf16, 4 H200s", "several-gpus", rate(zero), f"{rate(ddp)} (DDP, compiled)",
            zero["times_as_fast"],
        ),
    ]  # fmt: skip


TABLES = {"headline": lambda: (headline(), []), **cpu_tables.TABLES, **gpu_tables.TABLES}


def block(name):
    """The lines of one table and of its sources. Raises SystemExit for an unknown name."""
    if name not in TABLES:
        raise SystemExit(f"<!-- table: {name} -->: no such table; use one of {', '.join(TABLES)}")
    rows, files = TABLES[name]()
    header = list(rows[0])
    numeric = {key: key != header[0] and all(NUMBER.match(str(row[key])) for row in rows) for key in header}
    lines = ["| " + " | ".join(header) + " |", "|" + "".join("---:|" if numeric[key] else "---|" for key in header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    return "\n".join([*lines, *(line for file in files for line in ("", source(file)))]) + "\n"


def filled(text):
    """The text of a page with all its blocks regenerated."""
    return BLOCK.sub(lambda found: found[1] + block(found[2]) + found[4], text)


def pages():
    """The pages that may have blocks."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.tables", description=__doc__.splitlines()[0])
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
    sys.exit(main())

"""Generate the tables of the documentation: the texts between `<!-- table: NAME -->` and `<!-- end -->`.

    python -m benchmarks.harness.tables            # rewrite the tables of all pages
    python -m benchmarks.harness.tables --check    # exit code 1 if a page is out of date

The numbers are those of results/; the tables of flags are made from gpt2core/app/settings.py. The line below a table of
numbers names the source of its numbers: the file in results/, the date, the commit, the hardware and the
command of the measurement. A table with several source files has several such lines. Some scripts were renamed after
their measurement: then the line shows the name that the script had at the named commit.
"""

import re
import sys

from benchmarks.harness import assignment_tables, cpu_tables, flag_tables, gpu_tables, torch_tables
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.table_format import load, source
from testing.jobs import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d|$")  # matches a cell with a number, or an empty cell
PAGES = ("*.md", "docs/*.md", "stage*/*.md", "benchmarks/*.md", "results/*.md", "data/*.md")


def headline():
    """The rows of README's table: six results of this project and of PyTorch.

    The title of a row is a link to the section of docs/RESULTS.md that has all results of this kind.
    """
    on_cpu = {result["name"]: result for result in load("cpu/train_step")["results"] if result["threads"] == 2}
    our_cpu_step, torch_cpu_step = on_cpu["ours"], on_cpu["torch eager"]
    on_intel = {result["name"]: result for result in load("cpu/train_step_intel")["results"] if result["threads"] == 2}
    our_intel_step, torch_intel_step = on_intel["ours"], on_intel["torch eager"]

    on_ranks = {result["name"]: result for result in load("ranks/ranks")["results"]}
    our_ranks = next(result for name, result in on_ranks.items() if name.startswith("stage 1"))
    torch_ranks = on_ranks["torch DDP, gloo"]

    our_gpu_step, torch_gpu_step = load("gpu/step_gpt2")["results"]
    our_decode, *torch_decodes = [each for each in load("gpu/decode")["results"] if each["case"] == "one"]
    torch_decode = min(torch_decodes, key=lambda result: result["token"]["median"])
    decode_peer = torch_decode["name"].removeprefix("torch ").replace(" + each step a graph", ", CUDA graph")

    on_gpus = {result["name"]: result for result in load("gpus/scaling")["results"]["scaling"][0]["rows"]}
    our_gpus, torch_gpus = on_gpus["ours, 4 GPUs --dp flat --zero 1"], on_gpus["DDP, 4 GPUs"]

    def row(title, section, ours, torch, speedup):
        return {
            "": f"[{title}](docs/RESULTS.md#{section})",
            "this project": ours,
            "PyTorch": torch,
            "speedup": f"{speedup['median']:.2f}",
        }

    def step_time(result):
        return f"{1e3 * result['seconds']['median']:.4g} ms"

    def token_time(result):
        return f"{1e6 * result['token']['median']:.0f} µs"

    def token_rate(result):
        return f"{1e-6 * result['tokens_per_second']:.2f} M tokens/s"

    def gpu(name):  # "NVIDIA H100 80GB HBM3" is an H100
        return load(name)["hardware"]["gpu"].split()[1]

    return [
        row(
            "time per training step, preset `paper`, 2 threads, AMD Zen 4", "cpu-training-step",
            step_time(our_cpu_step), f"{step_time(torch_cpu_step)} (eager)",
            our_cpu_step["times_as_fast_as_eager"],
        ),
        row(
            "the same on an Intel Xeon, with MKL", "cpu-training-step",
            step_time(our_intel_step), f"{step_time(torch_intel_step)} (eager)",
            our_intel_step["times_as_fast_as_eager"],
        ),
        row(
            "the first row with 2 MPI ranks, one thread each", "ranks",
            step_time(our_ranks), f"{step_time(torch_ranks)} (DDP, gloo)",
            our_ranks["times_as_fast"][torch_ranks["name"]],
        ),
        row(
            f"time per training step, GPT-2 124M, bf16, 64 x 1024 tokens, one {gpu('gpu/step_gpt2')}", "gpu-step",
            step_time(our_gpu_step), f"{step_time(torch_gpu_step)} (compiled)",
            our_gpu_step["times_as_fast"][torch_gpu_step["name"]],
        ),
        row(
            f"time per generated token, GPT-2 124M, bf16, one {gpu('gpu/decode')}", "gpu-decode",
            token_time(our_decode), f"{token_time(torch_decode)} ({decode_peer})",
            our_decode["times_as_fast"][torch_decode["name"]],
        ),
        row(
            f"training speed, GPT-2 124M, bf16, 4 {gpu('gpus/scaling')}s", "several-gpus",
            token_rate(our_gpus), f"{token_rate(torch_gpus)} (DDP, compiled)",
            our_gpus["times_as_fast"],
        ),
    ]  # fmt: skip


# {name: function that returns (rows, names of the source files)}; a row is {column title: cell}
TABLES = {
    "headline": lambda: (headline(), []),
    **cpu_tables.TABLES,
    **gpu_tables.TABLES,
    **torch_tables.TABLES,
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
    parser = benchmark_parser(
        "benchmarks.harness.tables", __doc__, ("", "rewrite the tables"), ("--check", "only compare them with results/")
    )
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
    sys.exit(run_main(main, measures_time=False))

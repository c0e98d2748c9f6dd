"""Draw the loss curves of several runs over each other, from the files that `--log` wrote.

python -m benchmarks.overlay one.jsonl two.jsonl --paper --out curves.png
"""

from pathlib import Path

from benchmarks.harness.report import print_table
from benchmarks.paper import paper_curves
from gpt2core.app.cli import Parser
from gpt2core.app.command import run_command
from gpt2core.app.loss_plot import run_curves, write_plot
from gpt2core.app.output_files import is_plot
from gpt2core.app.run_log import read_log
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, counted

LOSSES = {"loss", "val_loss"}  # fields of a log's lines


def read_runs(paths):
    """{name: rows} of the logs; a run's name is its path without .jsonl. Raises ConfigError."""
    runs = {}
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; give logs that training wrote with --log")
        rows = read_log(path)
        if not rows or not all(isinstance(row[key], int | float) for row in rows for key in LOSSES & row.keys()):
            raise ConfigError(f"{path}: this file is not a log; give logs that training wrote with --log")
        runs[str(path).removesuffix(".jsonl")] = rows
    return runs


def check_output(path):
    """Raise ConfigError if `path` is not the name of a PNG file, or if it exists and is not a plot of ours."""
    if path.suffix != ".png":
        raise ConfigError(f"--out {path}: the picture is a PNG file; give a name that ends in .png")
    if path.exists() and not is_plot(path):
        raise ConfigError(f"--out {path}: the file exists and is not a plot of this program; give another name")


def overlay(paths, paper, out):
    """Write the curves of the logs `paths`, and those of the paper if `paper`, to the PNG file `out`; print a table."""
    check_output(out)
    runs, curves = read_runs(paths), []
    for number, (name, rows) in enumerate(runs.items()):
        curves += run_curves(rows, name, f"{name}, validation", color=f"C{number}")  # C0 to C9, then again from C0
    title = f"Loss of {counted(len(runs), 'run')}" + " and of the paper" * paper
    out.parent.mkdir(parents=True, exist_ok=True)
    write_plot(curves + paper_curves() * paper, title, out)
    print_table(
        [{"run": name, "last step": run[-1]["step"], "loss": f"{run[-1]['loss']:.4f}"} for name, run in runs.items()]
    )
    print(f"\nWritten to {out}.")
    return 0


def main(argv=None):
    parser = Parser(prog="python -m benchmarks.overlay", description=__doc__.splitlines()[0])
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="FILE.jsonl", help="a log; the file name is the label of its curve"
    )
    parser.add_argument("--paper", action="store_true", help="also draw the paper's four curves of preset paper")
    default = Path("out", "overlay.png")
    text = f"the PNG file to write (default {default}, in the current directory)"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE.png", help=text)

    def body(world):
        args = parser.parse_args(argv)
        return overlay(args.logs, args.paper, args.out)

    run_command(Solo, body)


if __name__ == "__main__":
    main()

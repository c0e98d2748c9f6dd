"""Draw the loss curves of several training runs in one picture, from the files that training wrote with `--log`.

python -m benchmarks.overlay run.jsonl --paper --out run.png  # after train_gpt2.py --log run.jsonl
python -m benchmarks.overlay one.jsonl two.jsonl              # two runs
"""

from pathlib import Path

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser, print_table
from benchmarks.paper import paper_curves
from gpt2core.app.output.loss_plot import run_curves, write_plot
from gpt2core.app.output.output_files import is_plot
from gpt2core.app.output.run_log import read_log
from gpt2core.app.settings.flag_parser import to_path
from gpt2core.errors import ConfigError, counted
from gpt2core.text.input_file import open_file

LOSS_FIELDS = {"loss", "val_loss"}  # fields of a log's rows that contain losses


def read_runs(paths):
    """{name: rows} of the logs `paths`; the name of a run is the path of its log without .jsonl.

    Raises ConfigError if a file cannot be read or is not a log.
    """
    runs = {}
    for path in paths:
        try:
            open_file(path).close()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give logs that training wrote with --log") from None
        rows = read_log(path)
        if not rows or not all(isinstance(row[key], int | float) for row in rows for key in LOSS_FIELDS & row.keys()):
            raise ConfigError(f"{path}: this file is not a log; give logs that training wrote with --log")
        runs[str(path).removesuffix(".jsonl")] = rows
    return runs


def check_output(path):
    """Raise ConfigError if `path` does not end in .png, or is a file that is not a plot of this project."""
    if path.suffix != ".png":
        raise ConfigError(f"--out {path}: the picture is a PNG file; give a name that ends in .png")
    if path.exists() and not is_plot(path):
        raise ConfigError(f"--out {path}: the file exists and is not a plot of this program; give another name")


def main(argv=None):
    parser = benchmark_parser("benchmarks.overlay", __doc__, saves=False)
    text = "a log; its path without .jsonl is the curve's label"
    parser.add_argument("logs", type=to_path, nargs="+", metavar="FILE.jsonl", help=text)
    parser.add_argument("--paper", action="store_true", help="also draw the four loss curves of the paper")
    default = Path("out", "overlay.png")
    text = f"the PNG file to write (default {default}, in the current directory)"
    parser.add_argument("--out", type=to_path, default=default, metavar="FILE.png", help=text)

    def draw():
        args = parser.parse_args(argv)
        check_output(args.out)
        runs, curves = read_runs(args.logs), []
        for number, (name, rows) in enumerate(runs.items()):  # matplotlib repeats its ten colours
            curves += run_curves(rows, name, f"{name}, validation", color=f"C{number}")
        title = f"Loss of {counted(len(runs), 'run')}" + " and of the paper" * args.paper
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_plot(curves + paper_curves() * args.paper, title, args.out)
        last = {name: rows[-1] for name, rows in runs.items()}
        print_table([{"run": run, "last step": row["step"], "loss": f"{row['loss']:.4f}"} for run, row in last.items()])
        print(f"\nWritten to {args.out}.")
        return 0

    run_main(draw, measures_time=False)


if __name__ == "__main__":
    main()

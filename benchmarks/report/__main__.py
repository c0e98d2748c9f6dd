"""Measure what this machine can run of the paper's comparison, and write the report: one HTML page, PNG and SVG files.

The page needs no network. The measured parts are JSON files in OUT/parts: after an interruption, the same command
continues. Without a GPU, the page shows the shipped measurements of stages 2 and 3, with their hardware and date.
"""

import signal
import sys
from pathlib import Path

from benchmarks.report.measure import parts_of
from benchmarks.report.page import GENERATOR, environment, write_report
from benchmarks.report.parts import run_parts
from benchmarks.report.runs import Runs
from gpt2core.app.command import run_command
from gpt2core.app.settings.flag_parser import Parser, to_path
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, counted
from gpt2core.presets import PRESETS


def check_output(folder):
    """Create the directory of the report; raise ConfigError if it cannot be used."""
    page = folder / "index.html"
    try:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        if not page.exists() or GENERATOR in page.read_text(encoding="utf-8", errors="replace")[:2000]:
            return
        why = f"{page} is not a report of this program"
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
    raise ConfigError(f"--out {folder}: {why}: choose another directory")


def make_report(args):
    """Measure the parts that are missing and write the report; returns the exit code."""
    if args.steps < 2:
        raise ConfigError(f"--steps {args.steps}: the report needs 2 steps or more")
    check_output(args.out)
    environment()  # a missing package is an error before the measurements
    parts, folder = parts_of(args.preset, args.steps), args.out / "parts"
    try:
        records, failures = run_parts(parts, folder, args.no_measure, args.fresh)
    except KeyboardInterrupt:
        print(f"\ninterrupted: parts are saved in {folder}; run the same command again to continue", file=sys.stderr)
        return 130
    page = write_report(args.out, Runs(records, args.preset, args.steps))
    print(f"written: {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")
    if failures:
        print(f"{counted(len(failures), 'part')} failed: {', '.join(failures)}; run the same command to try again")
    return 1 if failures else 0


def main(argv=None):
    examples = (
        ("", "measure and write out/report/index.html"),
        ("--preset nano --steps 4 --out out/trial", "a quick trial"),
        ("--no-measure", "only the shipped results, in seconds"),
    )
    parser = Parser(__doc__.splitlines()[0], examples, "python -m benchmarks.report")
    add, default = parser.add_argument, Path("out", "report")
    add("--out", type=to_path, default=default, metavar="DIR", help=f"directory of the report (default {default})")
    add("--fresh", action="store_true", help="measure all parts again, also those that are saved in DIR/parts")
    add("--no-measure", action="store_true", help="measure no times: write the page from the saved and shipped results")
    add("--preset", choices=PRESETS, default="paper", help="model of the measurements (default paper)")
    add("--steps", type=int, default=50, help="steps of the training runs (default 50, as in the paper)")
    run_command(Solo, lambda world: make_report(parser.parse_args(argv)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C, so that the running command is stopped
    main()

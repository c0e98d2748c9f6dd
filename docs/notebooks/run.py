"""Execute the notebooks of the stages and write them with their outputs: out/notebooks/stageN.ipynb and pictures.

    python docs/notebooks/run.py            # all four
    python docs/notebooks/run.py 0 2        # stages 0 and 2

Prints the seconds of each notebook. Needs the packages nbclient and ipykernel, which `make test` installs.
"""

import base64
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build import ROOT, STAGES, Parser, Solo, nbformat, notebook_path, run_command, write

try:
    import ipykernel  # noqa: F401  nbclient starts it as a program
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
except ImportError as error:
    print(f"{error.name} is missing: run make test-fast, then source .venv/bin/activate", file=sys.stderr)
    sys.exit(2)

TIME_LIMIT = 600  # seconds for one cell


def execute(stage):
    """(the notebook of a stage with its outputs, seconds); raises CellExecutionError for a cell that fails."""
    began = time.monotonic()
    notebook = nbformat.read(notebook_path(stage), as_version=4)
    resources = {"metadata": {"path": str(notebook_path(stage).parent)}}
    options = {"kernel_name": "python3", "extra_arguments": ["--log-level=ERROR"], "record_timing": False}
    notebook = NotebookClient(notebook, timeout=TIME_LIMIT, resources=resources, **options).execute()
    return notebook, time.monotonic() - began


def pictures(notebook):
    """Yield (number of the cell, PNG bytes) of each picture that an executed notebook shows."""
    for number, cell in enumerate(notebook.cells, start=1):
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield number, base64.b64decode(output["data"]["image/png"])


def main():
    parser = Parser(__doc__.splitlines()[0], usage="%(prog)s [STAGE ...] [flags]")
    parser.add_argument("stages", nargs="*", type=int, metavar="STAGE", help="stages 0 to 3 (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "notebooks", help="default: out/notebooks")
    args = parser.parse_args()
    if unknown := set(args.stages) - set(STAGES):  # not by `choices`: with nargs="*" Python 3.11 refuses an empty list
        parser.error(f"there is no stage {min(unknown)}: stages are 0 to 3")
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages or STAGES:
        try:
            notebook, seconds = execute(stage)
        except CellExecutionError as error:
            print(f"stage {stage}: a cell failed\n{error}", file=sys.stderr)
            return 1
        for old in args.out.glob(f"stage{stage}-*.png"):
            old.unlink()
        path = args.out / f"stage{stage}.ipynb"
        write(path, notebook)
        for count, (number, png) in enumerate(pictures(notebook), start=1):
            (args.out / f"stage{stage}-{count:02}-cell{number}.png").write_bytes(png)
        print(f"{path}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    run_command(Solo, lambda world: main())

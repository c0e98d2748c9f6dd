"""Draw the figures of docs/ASSIGNMENT.md again from the files in results/torch, without a measurement or a GPU.

python -m benchmarks.harness.figures               # all figures
python -m benchmarks.harness.figures ddp_timeline  # one of them
"""

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.table_format import load
from benchmarks.torch import ddp, ddp_model, memory
from testing.jobs import ROOT

FOLDER = ROOT / "results" / "torch"
MODELS = {"ddp_model": "ddp", "ddp_model_sockets": "ddp_sockets"}  # a model and the file that it is compared with


def draw_model(name, path):
    """Draw a file of ddp_model; the time of backward is in the file that it is compared with."""
    model = load(f"torch/{name}")["results"]
    settings, w, o = model["settings"], model["w"], model["o"]
    found, base, s = ddp_model.compare(load(f"torch/{MODELS[name]}")["results"], settings, w, o)
    ddp_model.draw(found, s, w, o, base["backward"]["mean"] / 1e3, settings, path)


def draw_timeline(name, path):
    """Draw a file of `ddp --timeline`."""
    ddp.draw_intervals(load(f"torch/{name}")["results"]["intervals"], path)


FIGURES = {
    "memory": lambda name, path: memory.draw(load(f"torch/{name}")["results"], path),
    "ddp_timeline": draw_timeline,
    **dict.fromkeys(MODELS, draw_model),
}


def main():
    parser = benchmark_parser("benchmarks.harness.figures", __doc__, saves=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"figures (default all: {', '.join(FIGURES)})")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]}: use {', '.join(FIGURES)}")
    for name in args.names or FIGURES:
        path = FOLDER / f"{name}.png"
        if not path.with_suffix(".json").exists():
            print(f"{name}: results/torch/{name}.json does not exist; run its command first")
            continue
        FIGURES[name](name, path)
        print(f"results/torch/{name}.png")


if __name__ == "__main__":
    run_main(main, measures_time=False)

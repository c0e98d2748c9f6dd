"""Draw the figures of docs/ASSIGNMENT.md again from the files in results/torch, without a measurement or a GPU.

python -m benchmarks.harness.figures                      # all figures
python -m benchmarks.harness.figures --only ddp_timeline  # one of them
"""

from benchmarks.harness.script import benchmark
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


FIGURES = {
    "memory": lambda name, path: memory.draw(load(f"torch/{name}")["results"], path),
    "ddp_timeline": lambda name, path: ddp.draw_intervals(load(f"torch/{name}")["results"]["intervals"], path),
    **dict.fromkeys(MODELS, draw_model),
}


@benchmark(
    saves=False,
    measures_time=False,
    only=dict(nargs="+", choices=FIGURES, default=list(FIGURES), help="names of figures (default: all)"),
)
def main(args):
    for name in args.only:
        path = FOLDER / f"{name}.png"
        if path.with_suffix(".json").exists():
            FIGURES[name](name, path)
            print(f"results/torch/{name}.png")
        else:
            print(f"{name}: results/torch/{name}.json does not exist; run its command first")

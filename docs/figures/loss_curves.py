"""Draw docs/figures/loss_curves.png from results/: the loss curve of the paper and those of the four stages.

python docs/figures/loss_curves.py [--out FILE.png]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files and needs no display
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # so that it also runs without installation

from gpt2core.app.command import run_command  # noqa: E402
from gpt2core.app.settings.flag_parser import Parser, to_path  # noqa: E402
from gpt2core.communicator import Solo  # noqa: E402


def curves(results=ROOT / "results"):
    """[(label, 50 losses, arguments of pyplot.plot)] of preset `paper`, from the files in the directory `results`."""
    cpu = json.loads((results / "cpu" / "curve.json").read_text())["results"]
    # the file has each deviation = our loss / the paper's loss - 1
    paper = [loss / (1 + deviation) for loss, deviation in zip(cpu["losses"], cpu["deviations"], strict=True)]
    gpus = json.loads((results / "gpus" / "parity.json").read_text())["results"]["runs"]
    # The losses of stage 1 are bitwise identical to those of stage 0, those of stage 3 to those of stage 2.
    names = "one process", "stage 2"  # before 2026-11-29 the second one
    one_gpu = next(run for run in gpus if run["name"] in names and run["precision"] == "fp32")
    return [
        ("the paper, serial", paper, dict(color="0.55", linestyle="--")),
        ("stages 0 and 1: NumPy", cpu["losses"], dict(color="tab:blue", linewidth=4)),
        ("stages 2 and 3: CUDA, 1, 2 and 4 GPUs, fp32", one_gpu["losses"], dict(color="tab:orange", linewidth=1.5)),
    ]


def main():
    parser = Parser(__doc__.splitlines()[0])
    text = "the picture to write (default docs/figures/loss_curves.png)"
    parser.add_argument("--out", type=to_path, default=Path(__file__).with_name("loss_curves.png"), help=text)
    out = parser.parse_args().out
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for label, losses, style in curves():
        axes.plot(losses, label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None), xlim=(0, 49))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110, format="png")


if __name__ == "__main__":
    run_command(Solo, lambda world: main())

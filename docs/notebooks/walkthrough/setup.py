"""Prepare a notebook: install missing packages, choose the GPU or Triton's interpreter, and show figures."""

import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LINUX_X86 = "stages 2 and 3 need Triton, which has packages only for Linux on x86-64"


def prepare(stage):
    """Install what the notebook of this stage needs, and print the hardware. Returns whether there is a GPU to use.

    For stages 2 and 3 without a GPU it sets TRITON_INTERPRET=1, so it must run before triton is imported. Raises
    SystemExit with one line if a package cannot be installed.
    """
    cuda = cuda_version() if stage >= 2 else None
    if stage >= 2 and cuda is None:
        os.environ["TRITON_INTERPRET"] = "1"
    extra = "" if stage < 2 else f"[cuda{cuda}]" if cuda else "[interpreter]"
    modules = required_modules() + (["triton"] if stage >= 2 else []) + (["cupy"] if cuda else [])
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        install(extra, missing)
    style_figures()
    print(f"{hardware(stage, cuda)}; Python {sys.version.split()[0]}")
    return cuda is not None


def cuda_version():
    """12 or 13, the CUDA version whose packages fit the driver; None without a GPU."""
    try:
        table = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"CUDA[A-Z ]* Version: *(\d+)", table)
    return None if version is None or int(version[1]) < 12 else min(int(version[1]), 13)


def required_modules():
    """The modules of the packages that pyproject.toml requires; each has the name of its package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in project["dependencies"]]


def install(extra, missing):
    """Install the repository with one of its extras into the Python of this notebook."""
    print(f"installing {', '.join(missing)} (this may take a few minutes)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}{extra}"]
    done = subprocess.run(command, capture_output=True, text=True)
    importlib.invalidate_caches()
    still_missing = [name for name in missing if importlib.util.find_spec(name) is None]
    if done.returncode or still_missing:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "")
        hint = LINUX_X86 if "triton" in still_missing else f"run: pip install --editable '{ROOT}{extra}'"
        names = ", ".join(still_missing or missing)
        raise SystemExit(f"{names} could not be installed ({reason or 'see pip'}): {hint}")


def style_figures():
    """Use the style of `--plot`. Its background is white, so that figures can be read in dark themes too."""
    import matplotlib.pyplot as plt

    from gpt2core.app.output.theme import figure_style

    plt.rcParams |= figure_style() | {"figure.dpi": 100, "font.size": 10, "figure.constrained_layout.use": True}


def show(alt):
    """Show the current figure of Matplotlib and close it; alt: the text for readers who do not see it.

    A palette of 256 colours makes the PNG a third as large.
    """
    import matplotlib.pyplot as plt
    from IPython.display import Image, display
    from PIL import Image as Picture

    drawn, small = io.BytesIO(), io.BytesIO()
    plt.savefig(drawn, bbox_inches="tight")
    plt.close()
    Picture.open(drawn).convert("RGB").quantize(256, Picture.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    display(Image(small.getvalue(), alt=alt))


def hardware(stage, cuda):
    """One line: the GPU, or the CPU and what runs the kernels."""
    from benchmarks.harness.report import cpu, gpu_hardware

    if cuda:
        return f"{gpu_hardware()['gpu']}, CUDA {cuda}"
    kernels = "; no GPU: Triton's interpreter runs the kernels" if stage >= 2 else ""
    return f"{cpu()}, {os.cpu_count()} cores{kernels}"

"""Count what a student has to read: lines and files of the core, methods of its two large classes, the longest files.

    python tests/tools/count_layout.py

Prints a line for each count with its bound, the longest file of each package, and the lines of the files that explain
a training step. The exit code is 1 if a count is above its bound.
"""

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from gpt2core.backend import Backend  # noqa: E402
from gpt2core.trainer import Trainer  # noqa: E402

# The files of gpt2core that explain one training step, in reading order (README.md, "What to read").
STEP_FILES = ["tensor", "ops", "backend", "model", "data", "arena", "optimizer", "trainer", "parallel/micro_batches"]
PACKAGES = [
    "gpt2core", "stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda", "torch_bridge", "exercises",
    "benchmarks", "data", "tests",
]  # fmt: skip
KERNEL_METHOD = re.compile(r"_(forward|backward|cached)$|^(clip|sum_of_squares|loss|loss_rows|adamw_step)$")


@dataclass(frozen=True)
class Count:
    """One counted property of the repository, and the largest value that it may have."""

    name: str
    value: int
    bound: int

    @property
    def holds(self):
        return self.value <= self.bound

    def __str__(self):
        return f"{self.name:<66} {self.value:>5}  at most {self.bound:>4}{'' if self.holds else '  ABOVE'}"


def line_count(path):
    """The number of lines of a file. A Python file is counted as ruff formats it, so that long lines save nothing."""
    text = path.read_text(encoding="utf-8")
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if path.suffix == ".py" and ruff:
        command = [ruff, "format", "--stdin-filename", str(path), "-"]
        text = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True).stdout
    return len(text.splitlines())


def methods(cls):
    """The names of the methods and properties of a class and of its base classes except `object`."""
    kinds = (property, staticmethod, classmethod)
    bases = [base for base in cls.__mro__ if base is not object]
    return sorted({n for base in bases for n, v in vars(base).items() if inspect.isfunction(v) or isinstance(v, kinds)})


def step_files():
    """The paths of STEP_FILES that exist."""
    return [path for name in STEP_FILES if (path := ROOT / "gpt2core" / f"{name}.py").exists()]


def counts():
    """[Count] of all bounds."""
    top_level, to_read = sorted((ROOT / "gpt2core").glob("*.py")), step_files()
    return [
        Count("lines in gpt2core/*.py, top level", sum(map(line_count, top_level)), 2200),
        Count("files to read for one training step", len(to_read), 9),
        Count("lines to read for one training step", sum(map(line_count, to_read)), 1500),
        Count("methods of Trainer", len(methods(Trainer)), 12),
        Count(
            "methods of Backend that are not kernels, inherited ones counted",
            len([name for name in methods(Backend) if not KERNEL_METHOD.search(name)]),
            12,
        ),
        Count("lines in README.md", line_count(ROOT / "README.md"), 110),
    ]


def longest_files():
    """Yield (lines, path) of the longest Python file in each package."""
    for package in PACKAGES:
        paths = (ROOT / package).rglob("*.py")
        yield max((len(path.read_text(encoding="utf-8").splitlines()), path) for path in paths)


def main():
    all_counts = counts()
    print(*all_counts, "", "longest file of each package:", sep="\n")
    for lines, path in longest_files():
        print(f"  {lines:>5}  {path.relative_to(ROOT)}")
    print("", "lines of the files that explain a training step:", sep="\n")
    for path in step_files():
        print(f"  {line_count(path):>5}  {path.relative_to(ROOT)}")
    return int(not all(count.holds for count in all_counts))


if __name__ == "__main__":
    sys.exit(main())

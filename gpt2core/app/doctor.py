"""The command of `make doctor`: print versions of packages and devices, then run one small training step of each stage.

It needs only the standard library, so it also runs if no package is installed, and then reports the missing packages.
"""

import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path

from gpt2core.app import PACKAGES, missing_package
from gpt2core.app.output.failed_output import output_error
from gpt2core.app.output.terminal import terminal_width
from gpt2core.app.settings.flag_parser import HelpPrinted, Parser
from gpt2core.errors import ConfigError
from gpt2core.tuned_choices import processor

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 180  # seconds for one command
STEP = ["--preset", "nano", "--steps", "1", "--batch-size", "2", "--seq-len", "4", "--sample", "0", "--no-save"]
TWO_RANKS = ["-m", "stage1_mpi.launch", "-n", "2", "--"]
# (text about ranks and device for the report, arguments of Python) of stages 0 to 3; {} stands for the device's name
STAGES = [
    ("one process", ["-m", "stage0_serial.train_gpt2", *STEP]),
    ("2 ranks", [*TWO_RANKS, "-m", "stage1_mpi.train_gpt2", *STEP]),
    ("{}", ["-m", "stage2_cuda.train_gpt2", *STEP]),
    ("2 ranks, {}", [*TWO_RANKS, "-m", "stage3_mpi_cuda.train_gpt2", *STEP]),
]
QUERY = ["--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]


def main(arguments=None):
    """Print the report; returns exit code 0 if stage 0 works, otherwise 2, or that of output_error()."""
    text = "Print the versions of packages and devices, then run one small training step of each stage."
    try:
        Parser(text, [("", "check this machine"), ("> doctor.txt", "write the report to a file")]).parse_args(arguments)
        return report(run)
    except HelpPrinted:
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # standard output: its disk is full, or its reader has exited
        return output_error(error)


def report(run):
    """Print the report; returns the exit code. `run` is called like the function run() below; tests replace it."""
    for name, text in [*host_rows(), *mpi_rows(run), *gpu_rows(run)]:
        print_row(name, text)
    interpreted = not gpus(run)
    device = "Triton's interpreter on the CPU" if interpreted else "GPU"
    python = (["env", "TRITON_INTERPRET=1"] if interpreted else []) + [sys.executable]
    codes = []
    for number, (text, arguments) in enumerate(STAGES):
        start = time.perf_counter()
        code, _, errors = run([*python, *arguments])
        seconds = time.perf_counter() - start
        result = f"works ({text.format(device)}, {seconds:.1f} s)" if code == 0 else f"does not work: {cause(errors)}"
        print_row(f"stage {number}", result)
        codes.append(code)
    for number, code in enumerate(codes):
        if code:
            print(f"{installer(number, interpreted)} installs the packages of stage {number}", flush=True)
    return 2 if codes[0] else 0


def installer(stage, interpreted):
    """The command that installs the packages of a stage: of make, or of pip after a plain `pip install .`."""
    if (ROOT / "Makefile").exists():
        return f"`make train STAGE={stage}{' PRESET=nano' * (interpreted and stage >= 2)}`"
    device = ["interpreter"] if interpreted else ["cuda13"] + ["nccl13"] * (stage == 3)
    extras = ",".join(["mpi"] * (stage % 2) + device * (stage >= 2))
    driver = " (cuda12, nccl12 for a driver of CUDA 12)" * (stage >= 2 and not interpreted)
    return f"`pip install '.{f'[{extras}]' if extras else ''}'`{driver} in a clone of the repository"


def print_row(name, text):
    """Print a row of the report; on a terminal, a row that is too long continues in the next line."""
    width = terminal_width()
    row = f"{name:<13} {text}"
    print(textwrap.fill(row, width, subsequent_indent=" " * 14) if width else row, flush=True)


def run(command):
    """(exit code, standard output, standard error) of a command that runs in the root of the repository."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT,
        )  # fmt: skip
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"no result after {TIMEOUT} seconds"
    return done.returncode, done.stdout, done.stderr


def cause(errors):
    """The line with the cause of a failure; errors: the text that a command wrote to standard error.

    The name of an exception's class is removed from this line. The advice to install packages is removed too, because
    the report ends with the make commands that install them.
    """
    lines = errors.strip().splitlines() or ["no message"]
    line = next((line for line in lines if line.startswith("error: ")), lines[-1])
    if missing := re.fullmatch(r"ModuleNotFoundError: (No module named '([\w.]+)')", line):  # on a rank
        line = missing_package(ModuleNotFoundError(missing[1], name=missing[2])) or line
    return re.sub(r"^(error|[\w.]*Error): |; pip install .*|: run `make .*`, which installs it .*", "", line)


# -- generators of the rows of the report, each (name, text) -----------------------------------------------------------


def host_rows():
    """Python, the system, the processor, the packages and the BLAS library."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    needed = "" if sys.version_info >= (3, 11) else ", but 3.11 or newer is needed"
    yield "Python", f"{platform.python_version()} ({sys.executable}){needed}"
    yield "system", platform.platform()
    yield "CPU", f"{processor()}, {cores} of {os.cpu_count()} cores usable, {memory:.1f} GiB memory"
    yield "packages", versions(*PACKAGES)
    yield "BLAS", blas()
    yield "for tests", versions("pytest", "pytest-xdist", "hypothesis", "ruff", "torch", "transformers")


def blas():
    """The BLAS library that NumPy loads, with its version and the kernels that it chose for this CPU."""
    try:
        import numpy  # noqa: F401  loads BLAS
        import threadpoolctl
    except ImportError as error:
        return f"unknown: {error}"
    found = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    kernels = (f"{each['internal_api']} {each['version']}, kernels {each.get('architecture', '?')}" for each in found)
    return "; ".join(kernels) or "not found by threadpoolctl"


def mpi_rows(run):
    """mpi4py, the MPI library that it loads, and the launcher of that library."""
    yield "mpi4py", versions("mpi4py")
    code, output, errors = run([sys.executable, "-m", "stage1_mpi.launch", "--show"])
    library, launcher = output.strip().splitlines()[-2:] if code == 0 else (cause(errors), "none")
    yield "MPI", library
    yield "MPI launcher", launcher


def gpu_rows(run):
    """The GPUs and their driver, and the packages that stages 2 and 3 need."""
    rows = gpus(run)
    for name, memory, capability, driver in rows:
        yield "GPU", f"{name}, {memory}, compute capability {capability}, driver {driver}"
    if not rows:
        yield "GPU", "none: nvidia-smi lists no GPU"
    else:
        table = re.search(r"CUDA[A-Z ]* Version: *([\d.]+)", run(["nvidia-smi"])[1])
        yield "CUDA", f"the driver supports {table[1]}" if table else "the version of the driver is unknown"
    yield (
        "for GPUs",
        versions(
            "triton", "cupy|cupy-cuda12x|cupy-cuda13x", "nvidia-nccl|nvidia-nccl-cu12|nvidia-nccl-cu13", "ml_dtypes"
        ),
    )


def gpus(run):
    """A list with [name, memory, compute capability, driver version] of each GPU that nvidia-smi lists."""
    code, output, _ = run(["nvidia-smi", *QUERY])
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    return [row for row in rows if len(row) == 4] if code == 0 else []


def versions(*names):
    """Text: the installed distributions of `names` with their versions, then the missing ones.

    A name "a|b" is a distribution that has the name a or b.
    """
    found, missing = [], []
    for name in names:
        installed = [(each, version) for each in name.split("|") if (version := version_of(each))]
        found += [f"{each} {version}" for each, version in installed]
        missing += [] if installed else [name.split("|")[0]]
    return "; ".join(filter(None, (", ".join(found), f"missing: {', '.join(missing)}" if missing else "")))


def version_of(name):
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())

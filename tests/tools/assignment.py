"""Run the tests of the systems assignment, or of the Triton and MPI project, on this project, each five times.

    make assignment SUITE=../assignment2-systems
    python tests/tools/assignment.py ../assignment2-systems --revision spring2025

The suite is a checkout of github.com/stanford-cs336/assignment2-systems (any edition), or the folder pa2 of
github.com/hao-ai-lab/cse234-w25-PA or cse-dsc291-s26-pa. It is copied aside, and the adapters are put into the copy.
The tests of the assignment use one fixed port, so only one run of this command may be active. Exits with 1 if a command
failed, with 2 if the command line is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from benchmarks.harness.report import BenchmarkParser, print_table  # noqa: E402
from gpt2core.app.command import run_command  # noqa: E402
from gpt2core.communicator import Solo  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402
from testing.jobs import launcher  # noqa: E402

BASICS = ("einops", "einx", "jaxtyping")  # what the assignment's own package cs336_basics imports
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
FUNCTIONS = """from stage1_mpi.naive_tensor_parallel import (
    get_info,
    naive_collect_backward_output,
    naive_collect_backward_x,
    naive_collect_forward_input,
    naive_collect_forward_output_{how} as naive_collect_forward_output,
)
"""
SPLIT = """from stage1_mpi import naive_tensor_parallel

def split_data(x_train, y_train, mp_size, dp_size, rank):
    return naive_tensor_parallel.split_data(x_train, y_train, mp_size, dp_size, rank)
"""


@dataclass(frozen=True)
class Command:
    """pytest's arguments, the number of MPI ranks (0: no MPI), the packages that it imports, its extra environment."""

    arguments: tuple
    ranks: int = 0
    packages: tuple = ()
    environment: dict = field(default_factory=dict)

    @property
    def name(self):
        return f"{f'mpiexec -n {self.ranks} ' if self.ranks else ''}pytest {' '.join(self.arguments)}"


def systems_commands(suite):
    """The commands that the assignment names; the tests of FSDP run on the CPU, because gloo reduces no GPU tensors."""
    flash = ("pytorch", "forward_pass_pytorch"), ("triton", "forward_pass_triton"), ("backward", "backward")
    commands = [Command(("-k", f"test_flash_{name}"), packages=("einops",)) for _, name in flash]
    names = sorted(path.name for path in (suite / "tests").glob("test_ddp*.py"))
    commands += [Command((f"tests/{name}",)) for name in [*names, "test_sharded_optimizer.py"]]
    if (suite / "tests" / "test_fsdp.py").exists():
        commands.append(Command(("tests/test_fsdp.py",), packages=BASICS, environment={"CUDA_VISIBLE_DEVICES": ""}))
    return commands


def mpi_commands():
    """The commands of part 2 of the project, with the numbers of ranks that its text names."""
    ranks = {"data_split": 0, "get_info": 8, "transformer_forward": 4, "transformer_backward": 4}
    return [Command((f"tests/test_{name}.py",), number) for name, number in ranks.items()]


def copy_suite(source, revision, target):
    """Copy a directory, or a revision of the git repository there; return the copy's root."""
    if revision:
        archive = subprocess.run(["git", "-C", str(source), "archive", revision], capture_output=True)
        if archive.returncode:
            raise ConfigError(f"{source} has no revision {revision}: {archive.stderr.decode().strip()}")
        target.mkdir()
        subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", ".venv"))
    return target / "pa2" if (target / "pa2" / "model").is_dir() else target


def prepare(suite):
    """Put the adapters into a copied suite -> its commands."""
    if (suite / "tests" / "adapters.py").exists():
        shutil.copy(ROOT / "tests" / "torch_bridge" / "adapters.py", suite / "tests" / "adapters.py")
        return systems_commands(suite)
    functions = suite / "model" / "func_impl.py"
    if functions.exists():
        # The edition of 2026 divides fc_o by rows and says so; the edition of 2025 gathers columns.
        how = "sum" if "all-reduce sum" in functions.read_text() else "gather"
        functions.write_text(FUNCTIONS.replace("{how}", how))
        split = suite / "data" / "data_parallel_preprocess.py"
        split.write_text(SPLIT)
        return mpi_commands()
    raise ConfigError(
        "SUITE has neither tests/adapters.py nor model/func_impl.py: fetch github.com/stanford-cs336/"
        "assignment2-systems, or the folder pa2 of github.com/hao-ai-lab/cse234-w25-PA, and give its directory"
    )


def run(command, suite):
    """Run a command once -> (its exit code, its counts as text, its output)."""
    paths = [suite, suite / "cs336-basics", ROOT, os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    words = [*launcher(), "-n", str(command.ranks)] if command.ranks else []
    words += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command.arguments]
    done = subprocess.run(
        words, cwd=suite, env=environment | command.environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    summaries = [line for line in done.stdout.splitlines() if COUNT.search(line) and " in " in line]
    found = {f"{number} {kind}" for line in summaries for number, kind in COUNT.findall(line)}
    return done.returncode, ", ".join(sorted(found)) or f"exit code {done.returncode}", done.stdout


def main():
    parser = BenchmarkParser(__doc__.splitlines()[0], usage="%(prog)s SUITE [flags]")
    add = parser.add_argument
    add("suite", type=Path, help="directory of the fetched suite")
    add("--revision", help="commit or tag of the git repository in that directory (default: its files as they are)")
    add("--repeat", type=int, default=5, help="runs of each command, one after another (default 5)")
    add("--only", default="", help="run only the commands that contain this text")
    add("--show", action="store_true", help="print the output of passing commands too")
    args = parser.parse_args()
    if not args.suite.is_dir():
        raise ConfigError(f"SUITE={args.suite} is not a directory: fetch the suite and give its directory")
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        suite = copy_suite(args.suite.resolve(), args.revision, Path(folder, "suite"))
        for command in prepare(suite):
            if args.only not in command.name:
                continue
            missing = [name for name in command.packages if not find_spec(name)]
            counts = [f"not run: pip install {' '.join(missing)}"] if missing else []
            for _ in range(0 if missing else args.repeat):
                code, count, output = run(command, suite)
                if args.show or (code and count not in counts):  # a failure that repeats is printed once
                    print(output[-2500:], flush=True)
                failed |= bool(code)
                counts.append(count)
            failed |= bool(missing)
            print(f"{command.name}: {'; '.join(counts)}", flush=True)
            same = f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 and not missing else "; ".join(counts)
            rows.append({"command": command.name, "result": same})
    if not rows:
        raise ConfigError(f"--only {args.only} matches no command: omit it")
    print()
    print_table(rows)
    return int(failed)


if __name__ == "__main__":
    run_command(Solo, lambda world: main())

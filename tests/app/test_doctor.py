"""`make doctor` reports whatever is missing, with exit code 0 if stage 0 works; a missing package is one line."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from gpt2core import app
from gpt2core.app import cli, doctor

ROOT = Path(__file__).resolve().parents[2]
GPUS = "NVIDIA H200, 143771 MiB, 9.0, 580.65.06\n" * 2


def fake(failing=(), gpus=""):
    """(run, commands): a run() in which the stages whose modules contain one of `failing` fail, and a list of calls."""
    commands = []

    def run(command):
        commands.append(command)
        if command[0] == "nvidia-smi":
            return (0, gpus or "CUDA Version: 13.0", "") if gpus else (127, "", "nvidia-smi: not found")
        if any(word.startswith(tuple(failing)) for word in command if failing):
            return 2, "", "noise\nerror: mpi4py is not installed; pip install mpi4py\nnoise\n"
        return 0, "MPICH 5\n/usr/bin/mpiexec\n", ""

    return run, commands


@pytest.mark.parametrize("failing, code", [((), 0), (("stage1",), 0), (("stage0",), 2), (("stage",), 2)])
def test_the_exit_code_is_0_if_stage_0_works_and_each_cause_is_one_row(failing, code, capsys):
    run, _ = fake(failing)
    assert doctor.report(run) == code
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 20 and [line[:7] for line in shown if re.match(r"stage \d", line)] == [
        "stage 0", "stage 1", "stage 2", "stage 3",
    ]  # fmt: skip
    failed = [line for line in shown if line.endswith("does not work: mpi4py is not installed")]
    # stage 3 is started by the launcher of stage 1
    assert len(failed) == {(): 0, ("stage1",): 2, ("stage0",): 1, ("stage",): 4}[failing]
    advised = [
        line for line in shown if re.fullmatch(r"`make train STAGE=(\d).*` installs the packages of stage \1", line)
    ]
    assert len(advised) == len(failed)  # one line for each stage that does not work


def test_without_a_gpu_the_kernels_run_in_the_interpreter_and_with_gpus_on_them(capsys):
    for gpus, interpreted in (("", True), (GPUS, False)):
        run, commands = fake(gpus=gpus)
        assert doctor.report(run) == 0
        steps = [command for command in commands if doctor.STEP[-1] in command and "--sample" in command]
        assert len(steps) == 4
        assert [("TRITON_INTERPRET=1" in command) for command in steps] == [interpreted] * 4
        shown = capsys.readouterr().out
        assert ("Triton's interpreter on the CPU" in shown) == interpreted
        assert shown.count("NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.65.06") == gpus.count("H200")


def test_the_commands_of_the_report_run_scripts_that_exist_with_flags_that_exist():
    for number, (_, command) in enumerate(doctor.STAGES):
        module = command[-1 - len(doctor.STEP)]
        assert module.startswith(f"stage{number}_") and (ROOT / f"{module.replace('.', '/')}.py").exists()
    assert cli.train_parser().parse_args(doctor.STEP).preset == "nano"


def test_stage_0_and_the_launcher_are_really_run():
    assert doctor.run([sys.executable, *doctor.STAGES[0][1]])[0] == 0
    rows = dict(doctor.mpi_rows(doctor.run))
    assert set(rows) == {"mpi4py", "MPI", "MPI launcher"}
    assert Path(rows["MPI launcher"]).exists() or rows["MPI launcher"] == "none"


def ended(words, stdout):
    """(exit code, standard error) of `python -m WORDS` with this standard output."""
    command = [sys.executable, "-m", *words.split()]
    done = subprocess.run(command, cwd=doctor.ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        "stage0_serial.train_gpt2 --help",
        pytest.param("stage0_serial.train_gpt2 --version", marks=pytest.mark.long),
        "stage1_mpi.launch --help",
        "exercises.grade --help",
        pytest.param("benchmarks.parity --help", marks=pytest.mark.long),
        "gpt2core.app.doctor --help",
    ],
)
def test_a_help_that_cannot_be_printed_is_an_error_as_of_other_output(words):
    with open("/dev/full", "w") as full:
        assert ended(words, full) == (2, "error: the output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        assert ended(words, closed) == (1, "")


def test_a_closed_pipe_ends_the_report_with_exit_code_1():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        assert ended("gpt2core.app.doctor", closed) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_a_full_standard_output_is_one_line_and_exit_code_2():
    with open("/dev/full", "w") as full:
        assert ended("gpt2core.app.doctor", full) == (2, "error: the output: No space left on device\n")


def test_a_command_that_is_missing_or_fails_is_a_row(monkeypatch):
    assert doctor.run(["/no/such/program"]) == (127, "", "/no/such/program: No such file or directory")
    monkeypatch.setattr(doctor, "TIMEOUT", 0.2)
    assert doctor.run(["sleep", "9"]) == (124, "", "no result after 0.2 seconds")
    assert doctor.cause("Traceback\n  File\ngpt2core.errors.ConfigError: no mpiexec\n") == "no mpiexec"
    missing = doctor.cause("Traceback\n  File\nModuleNotFoundError: No module named 'triton'\n")
    assert re.fullmatch(rf"triton is not installed for {re.escape(sys.executable)}(: run `source .*` first)?", missing)
    assert doctor.cause("ModuleNotFoundError: No module named 'other'\n") == "No module named 'other'"
    assert doctor.versions("numpy|nothing", "no-such-package|other").endswith("; missing: no-such-package")


# -- a package that is not installed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """bare(*argv, **variables) -> a process of an interpreter in which no package is installed."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False)

    def run(*argv, cwd=ROOT, **variables):
        command = ["env", "-u", "PYTHONPATH", *(f"{k}={v}" for k, v in variables.items())]
        command += [str(word) for word in argv if word] if argv[0] == "make" else [home / "bin" / "python", *argv]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True)

    run.python = home / "bin" / "python"
    return run


@pytest.mark.parametrize("folder, script", [("stage0_serial", "train_gpt2.py"), ("stage3_mpi_cuda", "inference.py")])
def test_a_script_without_the_packages_prints_one_line_in_its_directory(bare, folder, script):
    done = bare(script, cwd=ROOT / folder)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: numpy is not installed for {bare.python}: run `")
    other = bare(script, cwd=ROOT / folder, PMI_SIZE=2, PMI_RANK=1)  # perhaps only this rank lacks the package
    assert other.stderr == done.stderr.replace("error: ", "error: rank 1: ")


def test_prepare_without_the_packages_prints_one_line(bare):
    done = bare(ROOT / "data" / "prepare.py", "data/dummy.txt")
    assert done.returncode == 2 and re.fullmatch(r"error: numpy is not installed for .*\n", done.stderr)


@pytest.mark.parametrize("goal", ["train", "test"])
def test_make_with_an_interpreter_without_the_packages_prints_one_line(bare, goal):
    done = bare("make", "--no-print-directory", goal, f"PYTHON={bare.python}", MAKEFLAGS="")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(
        r"error: numpy is not installed for .*: omit PYTHON=, so that make .*\nmake(\[\d+\])?: \*\*\* .*\n", done.stderr
    )


def test_the_doctor_runs_without_the_packages(bare):
    program = "from gpt2core.app import doctor; print(doctor.report(lambda command: (2, '', 'error: none')))"
    done = bare("-c", program)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("\n2\n")
    assert f"missing: {', '.join(app.PACKAGES)}" in done.stdout


def test_the_advice_depends_on_whether_the_virtual_environment_exists(monkeypatch, tmp_path):
    error = ModuleNotFoundError("No module named 'tqdm.auto'", name="tqdm.auto")
    monkeypatch.setattr(app, "__file__", str(tmp_path / "gpt2core" / "app" / "__init__.py"))
    assert app.missing_package(error).endswith("run `pip install '.'` in a clone of the repository")
    (tmp_path / "Makefile").touch()
    assert app.missing_package(error).endswith("run `make train`, which installs it into .venv")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert app.missing_package(error).endswith(f"run `source {tmp_path}/.venv/bin/activate` first")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert app.missing_package(error).endswith("run `make train`, which installs it into .venv")


def test_only_a_package_that_every_stage_needs_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))  # as if this were the environment that make creates
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(app.PACKAGES) == {re.match(r"[\w-]+", each)[0] for each in dependencies}
    assert app.missing_package(ModuleNotFoundError("no gpt2core.x", name="gpt2core.x")) is None
    assert app.missing_package(ImportError("numpy", name="numpy")) is None
    assert "`make train STAGE=2 PRESET=nano`" in app.missing_package(ModuleNotFoundError("none", name="triton"))
    assert app.missing_package(ValueError(3)) is None

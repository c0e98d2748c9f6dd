"""--help of every command: it begins with examples, and each of them works as it stands, however it was started."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.harness.processes import run_main
from gpt2core.app import cli, doctor
from gpt2core.app.command import run_command
from gpt2core.app.settings.flag_parser import started_as
from gpt2core.communicator import Solo
from stage1_mpi import launch
from testing.jobs import ROOT
from tests.support.help_text import arguments_of, assert_parsed, examples_of

sys.path.append(str(ROOT / "data"))


def exercise(name):
    return lambda: run_command(Solo, lambda world: import_module(f"exercises.{name}").command(None))


def benchmark(name):
    return lambda: run_main(import_module(f"benchmarks.{name}").main, measures_time=False)


COMMANDS = {
    **{f"exercises.{name}": exercise(name) for name in ("start", "detective", "predict", "grade", "collect")},
    **{f"benchmarks.{name}": benchmark(name) for name in ("report.__main__", "overlay", "parity.__main__")},
    **{f"benchmarks.{name}": benchmark(name) for name in ("harness.tables", "harness.figures")},
    "stage1_mpi.launch": lambda: sys.exit(launch.main()),
    "gpt2core.app.doctor": lambda: sys.exit(doctor.main()),
    "prepare": lambda: sys.exit(import_module("prepare").main()),
    "make_weights": lambda: run_command(Solo, lambda world: import_module("make_weights").main()),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_examples_and_an_error_is_one_line(name, monkeypatch, capsys):
    run, program = COMMANDS[name], f"python -m {name.removesuffix('.__main__')}"
    monkeypatch.setattr("sys.argv", [name, "--help"])
    if name in ("prepare", "make_weights", "gpt2core.app.doctor"):
        program = started_as()  # these have no fixed name
    with pytest.raises(SystemExit) as ended:
        run()
    text = capsys.readouterr().out
    assert not ended.value.code
    for example in examples_of(text):
        words = arguments_of(example.partition(" > ")[0], program)
        if name == "stage1_mpi.launch":
            args = launch.parser().parse_args(words)  # REMAINDER takes the flags of the program
            assert args.show or (args.n == 2 and args.command[:2] == ["--", "-m"] and import_module(args.command[2]))
        else:
            assert_parsed(monkeypatch, run, words)
    monkeypatch.setattr("sys.argv", [name, "--no-such-flag"])
    with pytest.raises(SystemExit) as ended:
        run()
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and error.startswith("error: ") and error.count("\n") == 1


def test_the_examples_of_training_and_inference_work_in_their_order(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for entry, parser in ((cli.train, cli.train_parser), (cli.infer, cli.inference_parser)):
        for example in examples_of(command(entry, "--help").out):
            words = arguments_of(example, started_as())
            parser().parse_args(words)
            if "--preset" in words or "--resume" in words or "--prompt" in words:  # the others take up to minutes
                result = command(entry, *words)
                says_weights = entry is cli.infer and result.err.startswith("weights: ")
                assert result.code == 0 and result.err.count("\n") == says_weights, words


def help_of(*command, cwd=ROOT):
    done = subprocess.run([*command, "--help"], cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
    return examples_of(done.stdout)


STAGE = ROOT / "stage0_serial"


@pytest.mark.parametrize(
    "words, cwd, program",
    [
        (["train_gpt2.py"], STAGE, "python train_gpt2.py"),
        (["stage0_serial/train_gpt2.py"], ROOT, "python stage0_serial/train_gpt2.py"),
        (["-m", "stage0_serial.inference"], ROOT, "python -m stage0_serial.inference"),
        (["prepare.py"], ROOT / "data", "python prepare.py dummy.txt"),
        (["data/prepare.py"], ROOT, "python data/prepare.py data/dummy.txt"),
    ],
)
def test_examples_begin_as_the_program_was_started(words, cwd, program):
    for example in help_of(sys.executable, *words, cwd=cwd):
        assert example.startswith(program)


def test_examples_of_an_installed_command_begin_with_its_name():
    installed = Path(sys.executable).with_name("gpt2-train-serial")
    if not installed.exists():
        pytest.skip("the project is not installed")
    assert all(example.startswith("gpt2-train-serial") for example in help_of(str(installed)))

"""The Makefile: its variables, and two commands that install packages at the same time. See also test_launch.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
VARIABLES = re.search(r"^variables = (.*)$", TEXT, re.M)[1].split()
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")

# An interpreter that installs nothing: it writes what it was asked to do to the file log.
PYTHON = """#!/bin/sh
case "$*" in
  -c*) exit 0 ;;
  *venv*) sleep 0.3; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> log ;;
  *pip*) sleep 0.3; echo "$*" | sed 's/.*--editable //' >> log ;;
  *) echo trained >> log ;;
esac
"""


def environment(**variables):
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", *VARIABLES)} | variables


def make(*words, **variables):
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True)


@pytest.mark.parametrize(
    "word, advice",
    [
        ("stage=1", "stage=1: there is no such variable: write STAGE=1."),
        ("preset=tiny", "preset=tiny: there is no such variable: write PRESET=tiny."),
        ("STEPS=3", 'STEPS=3: there is no such variable: write ARGS="--steps 3".'),
        ("BATCH_SIZE=4", 'BATCH_SIZE=4: there is no such variable: write ARGS="--batch-size 4".'),
        ("lr=1e-3", 'lr=1e-3: there is no such variable: write ARGS="--lr 1e-3".'),
        ("COLOUR=red", f"COLOUR=red: there is no such variable: use {' '.join(VARIABLES)}."),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_right_one(word, advice):
    for goal in ("train", "help"):
        done = make("-n", goal, word)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert advice in done.stderr


@pytest.mark.parametrize("preset, weights", [("paper", "data/gpt2-paper"), ("book", "data/gpt2-book")])
def test_generate_without_a_checkpoint_reads_the_shipped_weights_of_the_preset(tmp_path, preset, weights):
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / weights).mkdir(parents=True)
    command = ["make", "--no-print-directory", "-n", "generate", f"PRESET={preset}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f'echo "weights: {weights}"\n' in done.stdout and f'--weights "{weights}"' in done.stdout


@pytest.mark.parametrize("stage", [2, 3])
def test_generate_in_the_interpreter_reads_the_shipped_weights_of_preset_nano(stage):
    done = make("-n", "generate", f"STAGE={stage}", "TRITON_INTERPRET=1")
    assert (done.returncode, done.stderr) == (0, "") and '--weights "data/gpt2-nano"' in done.stdout
    refused = make("-n", "generate", f"STAGE={stage}", "TRITON_INTERPRET=1", "PRESET=paper")
    assert refused.returncode == 2 and "too slow for PRESET=paper: use PRESET=nano" in refused.stderr


@pytest.mark.parametrize("preset", ["tiny", "foo", "paper"])
def test_generate_from_a_given_folder_without_a_checkpoint_is_an_error_that_says_what_to_do(preset):
    done = make("-n", "generate", f"PRESET={preset}", "OUT=out/none")
    assert done.returncode == 2 and done.stdout == ""
    assert "out/none has no checkpoint: run make train with the same STAGE, PRESET and OUT first" in done.stderr
    assert "or omit OUT for the shipped weights" in done.stderr
    chosen = make("-n", "generate", f"PRESET={preset}", "OUT=out/none", "ARGS=--weights data/gpt2-book")
    assert (chosen.returncode, chosen.stderr) == (0, "") and "--weights data/gpt2-book" in chosen.stdout


def test_generate_reads_a_checkpoint_in_a_folder_whose_name_has_a_space(tmp_path):
    out = tmp_path / "my run"
    (out / "step-00000002").mkdir(parents=True)
    done = make("-n", "generate", "PRESET=tiny", f"OUT={out}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f'echo "weights: {out}"\n' in done.stdout and f'--weights "{out}"' in done.stdout


def test_doctor_uses_the_environment_of_a_clone_whose_path_has_a_space(tmp_path):
    clone = tmp_path / "my project"
    (clone / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", clone)
    command = ["make", "--no-print-directory", "-n", "doctor"]
    without = subprocess.run(command, cwd=clone, env=environment(), capture_output=True, text=True).stdout
    (clone / ".venv/bin/python").touch()
    shown = subprocess.run(command, cwd=clone, env=environment(), capture_output=True, text=True).stdout
    assert without == '"python3" -m gpt2core.app.doctor\n'
    assert shown == f'"{clone}/.venv/bin/python" -m gpt2core.app.doctor\n'


def test_every_variable_of_the_list_is_known_and_those_of_the_help_are_in_the_list():
    values = {"STAGE": "1", "N": "2", "TRITON_INTERPRET": "0"}
    done = make("-n", "train", *(f"{name}={values.get(name, 'x')}" for name in VARIABLES if name != "PYTHON"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r'-n 2 --hostfile "x" -- -m stage1_mpi.train_gpt2 --preset x --out "x" --overwrite x', done.stdout)
    assert set(re.findall(r"^  ([A-Z]+)=", make("help").stdout, re.M)) == set(VARIABLES) - {
        "PYTHONPATH", "TRITON_INTERPRET",
    }  # fmt: skip


@pytest.mark.parametrize("goal, module", [("exercise", "start"), ("grade", "grade")])
def test_the_working_folder_is_dir_of_the_command_line_only(goal, module):
    command = f'-m exercises.{module} --stage 2 --dir "some folder"'
    assert command in make("-n", goal, "STAGE=2", "DIR=some folder").stdout
    assert "--dir" not in make("-n", goal, "STAGE=2", DIR="of another program").stdout
    assert "STAGE=7 is not a stage: STAGE is 0, 1, 2 or 3" in make(goal, "STAGE=7").stderr


def test_a_detective_needs_its_number_and_parity_compares_a_working_folder():
    assert (
        '-m exercises.detective --case "2" --dir "some folder"'
        in make("-n", "detective", "CASE=2", "DIR=some folder").stdout
    )
    assert '-m exercises.grade --case "2"' in make("-n", "grade", "CASE=2").stdout
    assert "--stage 0" in make("-n", "grade", CASE="of another program").stdout
    for words, message in (
        (["detective"], "CASE is missing: make detective CASE=1"),
        (["parity", "DIR=no folder"], "DIR=no folder is not a directory: give a working folder, or omit DIR"),
    ):
        done = make(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and message in done.stderr
    assert f'cd "docs" && PYTHONPATH="{ROOT}"' in make("-n", "parity", "DIR=docs").stdout


@pytest.mark.parametrize("goal", ["tarin", "tests", "docs", "data", "./data", "gpt2core/", "stage0_serial", "Makefile"])
def test_an_unknown_target_is_an_error_that_names_make_help(goal):
    for goals in ([goal], ["help", goal]):
        done = make(*goals)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{goal.removeprefix('./')}: there is no such target: make help lists the targets" in done.stderr


@pytest.mark.parametrize(
    "word, message",
    [
        ("STAGE=0 1", "STAGE=0 1 is not a stage: STAGE is 0, 1, 2 or 3"),
        ("STAGE=", "STAGE= is not a stage"),
        ("STAGE=1 1", "STAGE=1 1 is not a stage"),
        ("STAGE=%", "STAGE=% is not a stage"),
        ("PRESET=a b", "PRESET=a b is not the name of one preset: use for example PRESET=nano"),
        ("PRESET=", "PRESET= is not the name of one preset"),
    ],
)
@pytest.mark.parametrize("goal", ["train", "generate"])
def test_a_variable_that_is_not_one_word_of_its_list_is_one_line(goal, word, message):
    done = make(goal, word)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and message in done.stderr


def test_the_help_fits_80_columns():
    assert [line for line in make("help").stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("goal", ["train", "test-fast", "doctor"])
@pytest.mark.parametrize("python", ["python9", "no/such"])
def test_an_interpreter_that_does_not_exist_is_one_line_that_names_it(goal, python):
    done = make(goal, f"PYTHON={python}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"PYTHON={python}: there is no such program: name an interpreter, for example PYTHON=python3" in done.stderr
    assert make("help", f"PYTHON={python}").returncode == 0


def test_the_command_of_the_tests_is_printed_as_it_runs():
    shown = make("-n", "test-fast").stdout
    assert re.search(r'" -m pytest -m "not gpu" --fast (-n 3 --dist loadgroup)? *$', shown) and "$(" not in shown


def test_a_variable_of_the_environment_counts_unless_the_command_line_has_it():
    environment = {"STAGE": "1", "N": "3", "PRESET": "nano", "ARGS": "--steps 2", "HOSTFILE": ""}
    command = make("-n", "train", **environment).stdout
    assert '-m stage1_mpi.launch -n 3  -- -m stage1_mpi.train_gpt2 --preset nano --out "out/stage1-nano"' in command
    assert command.endswith(" --steps 2\n")
    assert "-n 2  -- -m stage1_mpi" in make("-n", "train", "N=2", **environment).stdout


@pytest.mark.parametrize("goal", ["exercise", "predict", "grade"])
@pytest.mark.parametrize("stage, packages", [(0, "."), (1, "."), (2, ".[interpreter]"), (3, ".[interpreter]")])
def test_a_command_of_the_exercises_installs_what_their_stage_needs(tmp_path, goal, stage, packages):
    for name in ("Makefile", "pyproject.toml"):  # a clone without .venv
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--no-print-directory", "-n", goal, f"STAGE={stage}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"installing (\S+) into", done.stdout) == [packages]


@pytest.mark.skipif(not shutil.which("flock"), reason="there is no flock")
def test_two_commands_at_once_in_a_fresh_clone_install_one_after_the_other(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["make", "--no-print-directory", "train"]
    options = dict(cwd=tmp_path, env=environment(PATH=path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started = [subprocess.Popen([*command, f"STAGE={stage}"], text=True, **options) for stage in (0, 0, 1)]
    shown = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], shown
    assert sum("waiting for another make" in text for text in shown) >= 2
    log = (tmp_path / "log").read_text().split()
    assert log[0] == "venv" and log.count("venv") == 1 and log.count("trained") == 3
    # stage 1 installs stage 0's packages too; stage 0 installs its own if it comes first
    assert log.count(".[mpi]") == 1 and log.count(".") <= 1

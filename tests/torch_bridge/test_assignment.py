"""`make assignment` recognises the suites, puts the adapters into a copy, and says what is missing."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2core.errors import ConfigError
from tests.tools.assignment import copy_suite, main, prepare

ROOT = Path(__file__).resolve().parents[2]
BOTH = {
    "get_flashattention_autograd_function_pytorch", "get_flashattention_autograd_function_triton",
    "get_sharded_optimizer",
}  # fmt: skip
OF_2025 = {
    "get_ddp_individual_parameters", "ddp_individual_parameters_on_after_backward", "get_ddp_bucketed",
    "ddp_bucketed_on_after_backward", "ddp_bucketed_on_train_batch_start",
}  # fmt: skip
OF_2026 = {"get_ddp", "ddp_on_after_backward", "get_fsdp", "fsdp_on_after_backward", "fsdp_gather_full_params"}


def test_the_adapters_have_every_function_of_both_editions():
    tree = ast.parse((ROOT / "tests" / "torch_bridge" / "adapters.py").read_text())
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == BOTH | OF_2025 | OF_2026
    aliases = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
    assert aliases == {"get_flash_autograd_function_triton"}


def suite_of(folder, *files, text=""):
    """A directory with these files."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_copy_of_the_assignment_has_the_adapters_and_the_assignments_commands(tmp_path):
    names = ["adapters", "test_ddp", "test_ddp_individual_parameters", "test_fsdp", "test_sharded_optimizer"]
    source = suite_of(tmp_path / "a", *(f"tests/{name}.py" for name in names))
    copy = copy_suite(source, None, tmp_path / "b")
    commands = [command.name for command in prepare(copy)]
    assert commands == [
        "pytest -k test_flash_forward_pass_pytorch",
        "pytest -k test_flash_forward_pass_triton",
        "pytest -k test_flash_backward",
        "pytest tests/test_ddp.py",
        "pytest tests/test_ddp_individual_parameters.py",
        "pytest tests/test_sharded_optimizer.py",
        "pytest tests/test_fsdp.py",
    ]
    assert "get_ddp_bucketed" in (copy / "tests" / "adapters.py").read_text()
    assert (source / "tests" / "adapters.py").read_text() == ""  # the suite itself does not change


@pytest.mark.parametrize("text, how", [("# all-reduce summation: all-reduce sum", "sum"), ("# gathering", "gather")])
def test_a_copy_of_the_mpi_project_collects_the_output_as_its_edition_says(tmp_path, text, how):
    source = suite_of(tmp_path / "a", "pa2/model/func_impl.py", text=text)
    suite_of(tmp_path / "a", "pa2/data/data_parallel_preprocess.py")
    copy = copy_suite(source, None, tmp_path / "b")
    assert [command.ranks for command in prepare(copy)] == [0, 8, 4, 4]
    assert f"naive_collect_forward_output_{how} as" in (copy / "model" / "func_impl.py").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "SUITE=nowhere is not a directory: fetch the suite and give its directory"),
        (["."], "SUITE has neither tests/adapters.py nor model/func_impl.py: fetch github.com/"),
        ([".", "--revision", "none"], "has no revision none"),
    ],
)
def test_a_wrong_suite_is_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["assignment.py", *words])
    with pytest.raises(ConfigError, match=message):
        main()


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize(
    "words, message",
    [
        ([], "SUITE is missing: make assignment SUITE=DIR"),
        (["SUITE=nodir"], "SUITE=nodir is not a directory: fetch the suite"),
    ],
)
def test_make_assignment_without_a_suite_says_what_to_write(words, message):
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "SUITE", "ARGS")}
    command = ["make", "--no-print-directory", "assignment", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)  # before packages are installed

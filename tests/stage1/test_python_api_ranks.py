"""The Python API on several ranks of MPI: the losses of one process, and an error of one rank ends the job."""

import sys

import pytest

import staged_gpt2 as sg
from tests.support.jobs import ROOT, mpi, succeeded
from tests.support.mpi import mpiexec

PROGRAM = """
import sys
import staged_gpt2 as sg
write = sys.stdout.write  # in one call: the launcher may mix the parts of two ranks' lines
run = sg.train(preset="nano", steps=4, on_step=lambda step: write(f"step {step.step}\\n"))
run.model.save_pretrained(sys.argv[1])
write(f"{run.losses} {run.model.generate('the model', 2)}\\n")
"""


@pytest.fixture(autouse=True, scope="module")
def launcher():
    mpiexec()  # or skip


def job(program, *arguments):
    return mpi("-n", 2, sys.executable, "-c", program, *arguments, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")


def test_two_ranks_have_the_losses_of_one_process(tmp_path):
    done = succeeded(job(PROGRAM, tmp_path / "saved"))
    run = sg.train(preset="nano", steps=4, stage=0)
    line = f"{run.losses} {run.model.generate('the model', 2)}"
    assert sorted(done.out.splitlines()) == sorted([*(f"step {i}" for i in range(4)), line, line])
    loaded = sg.GPT2.from_pretrained(tmp_path / "saved", stage=0)
    assert loaded.generate("the model", 5) == run.model.generate("the model", 5)


@pytest.mark.parametrize(
    "error, message",
    [
        ("lambda step: 1 / 0", "ZeroDivisionError: division by zero"),  # on the first rank only
        ("5", "ConfigError: `on_step=5` must be a function of one argument, the Step"),  # on all ranks
    ],
)
def test_an_error_ends_all_ranks(error, message):
    program = f"import staged_gpt2 as sg; sg.train(preset='nano', steps=1000, on_step={error}); input()"
    done = job(program)
    assert done.code != 0 and message in done.err and done.left == ()


def test_a_stage_of_one_process_refuses_two():
    done = job("import staged_gpt2 as sg; sg.train(preset='nano', steps=1, stage=0)")
    assert done.code != 0 and "2 processes were started" in done.err and "use stage 1, or start it" in done.err

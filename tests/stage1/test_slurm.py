"""The scripts for Slurm: at the time limit they save a checkpoint and ask for another start, which continues the run.

Programs in place of srun, scontrol and sbatch take the part of Slurm; the ranks are one process of stage 0.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2core.app.checkpoints.directory import newest_step

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["stage3_mpi_cuda/slurm.sh", pytest.param("stage1_mpi/slurm.sh", marks=pytest.mark.long)]
# As Slurm's, srun forwards SIGTERM to the ranks: with exec, they get it directly.
PROGRAMS = {
    "srun": f"""while [ "$1" != python ]; do echo "$1" >> srun-flags; shift; done
shift 2
exec {sys.executable} -m stage0_serial.train_gpt2 "$@"
""",
    "scontrol": 'echo "$@" >> requeued\n',
    "sbatch": """grep '^#SBATCH' "$1" > options
exec env SLURM_JOB_ID=17 SLURM_CPUS_PER_TASK=1 bash "$@"
""",
}


@pytest.fixture
def slurm(tmp_path):
    """start(script, *flags) -> the process of sbatch, in tmp_path, where its programs write their files."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "activate").touch()
    (programs / "bin").symlink_to(programs)  # of the environment that the script activates
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "VENV": str(programs), "OUT": str(tmp_path / "run"),
    }  # fmt: skip
    started = []

    def start(script, *flags):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        words = ["sbatch", str(ROOT / script), *"--preset nano --sample 0".split(), *flags]
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_until(process, pattern):
    """The output until a line in which `pattern` is found."""
    lines, deadline = [], time.monotonic() + 60
    while not (lines and re.search(pattern, lines[-1])):
        lines.append(process.stdout.readline())
        assert lines[-1] and time.monotonic() < deadline, "".join(lines)
    return "".join(lines)


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_the_time_limit_a_job_saves_and_is_requeued_and_continues(slurm, tmp_path, script):
    job = slurm(script, "--steps", "1000000")
    output_until(job, "^step +3 ")
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=60)
    steps = int(re.search(r"stopped by SIGTERM after (\d+) of 1000000 steps", out)[1])
    assert job.returncode == 143 and newest_step(tmp_path / "run").name == f"step-{steps:08d}"
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert {"#SBATCH --requeue\n", "#SBATCH --signal=B:USR1@120\n"} <= {*open(tmp_path / "options")}
    again = slurm(script, "--steps", str(steps + 2))
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and f"resumed after {steps} steps" in out
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_mistake_and_a_job_that_slurm_ends_are_not_requeued(slurm, tmp_path, script):
    job = slurm(script, "--steps", "-1")
    assert "--steps -1" in job.communicate(timeout=60)[0] and job.returncode == 2
    job = slurm(script, "--steps", "1000000")
    output_until(job, "^step +3 ")
    job.terminate()
    assert "stopped by SIGTERM" in job.communicate(timeout=60)[0] and job.returncode == 143
    assert newest_step(tmp_path / "run") and not (tmp_path / "requeued").exists()

"""Run the scripts of stage 1 under mpiexec, as a user does, and check that no process remains."""

import sys

from testing.jobs import ROOT, Job
from tests.support.unsaved import unsaved

STAGE = ROOT / "stage1_mpi"


def mpi(*words, cwd=STAGE, **environment):
    """Run `mpiexec words...` to its end -> Done."""
    with Job(*words, cwd=cwd, **environment) as job:
        return job.done()


def script(ranks, *argv, name="train_gpt2.py", **options):
    """Run `mpiexec -n ranks python train_gpt2.py ...` to its end -> Done; see unsaved()."""
    words = unsaved(argv) if name == "train_gpt2.py" else argv
    return mpi("-n", ranks, sys.executable, name, *words, **options)


def succeeded(done):
    """Assert exit code 0, nothing on standard error and no remaining process; returns `done`."""
    assert (done.code, done.err, done.left) == (0, "", ()), done.out[-2000:] + done.err
    return done

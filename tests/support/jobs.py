"""Stage 1 as its users run it: one command line for mpiexec, and afterwards no process of it is left."""

import sys

from benchmarks.harness.jobs import ROOT, Job

STAGE = ROOT / "stage1_mpi"


def mpi(*words, cwd=STAGE, **environment):
    """Run a job to its end -> Done."""
    with Job(*words, cwd=cwd, **environment) as job:
        return job.done()


def script(ranks, *argv, name="train_gpt2.py", **options):
    """`mpiexec -n ranks python train_gpt2.py ...` to its end -> Done."""
    return mpi("-n", ranks, sys.executable, name, *argv, **options)


def succeeded(done):
    """`done`, of which nothing but standard output is to be told."""
    assert (done.code, done.err, done.left) == (0, "", ()), done.out[-2000:] + done.err
    return done

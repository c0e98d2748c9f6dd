"""Stage 1 as its users run it: one command line for mpiexec, and afterwards no process of it is left."""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mpi import ROOT, THREADS, end, mpiexec

STAGE = ROOT / "stage1_mpi"
LIMIT = 60  # seconds until a job that does not end is ended
# What a launcher or an MPI library says of its own when ranks are killed or abort: never a line of ours.
NOISE = re.compile(r"Abort\(\d+\) on node|MPI_A(BORT|bort)|^[-=]{20,}|^=  |^YOUR APPLICATION|^This typ|^Please see")


@dataclass(frozen=True)
class Done:
    """How a job ended: mpiexec's exit code, the text of all ranks, seconds, and the processes that it left behind."""

    code: int
    out: str
    err: str
    seconds: float
    left: tuple

    @property
    def lines(self):
        """Lines on standard error without the launcher's and the MPI library's."""
        return [line for line in self.err.splitlines() if line.strip() and not NOISE.search(line)]


class Job:
    """A running mpiexec. `words` are what follows its flags: "-n", 4, script, ... with ":" between groups of ranks.

    Use it as a context manager: a job that has not ended by then is ended. Every process of it carries a mark in its
    environment, by which it is found on Linux; elsewhere pids() is empty.
    """

    def __init__(self, *words, cwd=STAGE, **environment):
        self.mark = f"JOB_OF_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        environment = os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONPATH": str(ROOT), name: value} | environment
        self.files = [tempfile.TemporaryFile("w+") for _ in "oe"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*mpiexec(), *map(str, words)],
            cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1],
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        end(self.process)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for file in self.files:
            file.close()

    def pids(self, variable=""):
        """Process ids of the job, or {value of that environment variable: id} of those that have it."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                values = path.read_text(errors="replace").split("\0")
                if self.mark in values:
                    key = next((v.partition("=")[2] for v in values if v.partition("=")[0] == variable), None)
                    if key is not None or not variable:
                        found[key or path.parent.name] = int(path.parent.name)
        return found if variable else list(found.values())

    def ranks(self):
        """{rank: process id} of the ranks that have been started."""
        pids = self.pids("OMPI_COMM_WORLD_RANK") or self.pids("PMI_RANK")
        return {int(rank): pid for rank, pid in pids.items()}

    def out(self):
        """What has been written on standard output so far."""
        return os.pread(self.files[0].fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_for(self, text):
        """Return when standard output has `text`."""
        while text not in self.out():
            assert self.process.poll() is None and time.monotonic() - self.began < LIMIT, self.done().err
            time.sleep(0.01)

    def done(self):
        """The Done of the job, once it has ended."""
        since = time.monotonic()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            end(self.process)
            raise AssertionError(f"the job hung for {LIMIT} s; the ranks wrote: {self.texts()}") from None
        while (left := self.pids()) and time.monotonic() - since < 10:
            time.sleep(0.02)
        return Done(self.process.returncode, *self.texts(), time.monotonic() - since, tuple(left))

    def texts(self):
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self.files]


def mpi(*words, **options):
    """Run a job to its end -> Done."""
    with Job(*words, **options) as job:
        return job.done()


def script(ranks, *argv, name="train_gpt2.py", **options):
    """`mpiexec -n ranks python train_gpt2.py ...` to its end -> Done."""
    return mpi("-n", ranks, sys.executable, name, *argv, **options)


def succeeded(done):
    """`done`, of which nothing but standard output is to be told."""
    assert (done.code, done.err, done.left) == (0, "", ()), done.out[-2000:] + done.err
    return done

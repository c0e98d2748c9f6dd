"""Run the commands of stage 1 on ranks that stay: MPI starts once for many commands, in place of once for each.

Each rank calls cli.train or cli.infer in its process, on a new duplicate of MPI.COMM_WORLD. A test of what a process
does at its start or end runs a script under mpiexec instead: tests/support/jobs.py.
"""

import contextlib
import io
import json
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

from testing.jobs import LIMIT, Done, Job
from tests.support.unsaved import unsaved

POLL = 0.005  # seconds between two looks for the results


class RankServers:
    """A context manager. run(ranks, name, *argv) -> Done of a command; each number of ranks has its own processes."""

    def __enter__(self):
        self.stack, self.servers = contextlib.ExitStack(), {}
        return self

    def __exit__(self, *error):
        self.stack.close()

    def start(self, ranks):
        """(folder of the results, Job, a pipe to each rank) of new processes."""
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [folder / f"requests{rank}" for rank in range(ranks)]
        for path in paths:
            os.mkfifo(path)
        # "r+" because open() with "w" waits for a reader
        pipes = [self.stack.enter_context(open(path, "rb+", buffering=0)) for path in paths]
        job = self.stack.enter_context(Job("-n", ranks, sys.executable, "-m", "tests.support.rank_server", folder))
        return folder, job, pipes

    def run(self, ranks, name, *argv):
        """Run train_gpt2.py (see unsaved()) or inference.py with these arguments.

        Raises AssertionError if a rank ends or hangs.
        """
        if ranks not in self.servers:
            self.servers[ranks] = self.start(ranks)
        folder, job, pipes = self.servers[ranks]
        words = unsaved(argv) if name == "train_gpt2.py" else argv
        began, request = time.monotonic(), json.dumps([name, *map(str, words)])
        for pipe in pipes:
            pipe.write(f"{request}\n".encode())
        paths = [folder / f"result{rank}" for rank in range(ranks)]
        while not all(path.exists() for path in paths):
            if job.process.poll() is not None or time.monotonic() - began > LIMIT:
                del self.servers[ranks]  # the next command starts new processes
                raise AssertionError(f"no result of {request}; the output of the ranks: {job.texts()}")
            time.sleep(POLL)
        codes, outs, errs = zip(*(pickle.loads(path.read_bytes()) for path in paths), strict=True)
        for path in paths:
            path.unlink()
        assert len(set(codes)) == 1, f"the ranks have the exit codes {codes}"
        return Done(codes[0], "".join(outs), "".join(errs), time.monotonic() - began, ())


def serve(folder):
    """The program of one rank: run the commands that its pipe brings, until mpiexec ends the process."""
    from gpt2core.app import cli
    from stage0_serial.numpy_backend import NumpyBackend
    from stage1_mpi.mpi_communicator import MpiCommunicator

    world = MpiCommunicator()
    result, part = (folder / f"{name}{world.rank}" for name in ("result", "part"))
    for request in open(folder / f"requests{world.rank}"):
        name, *argv = json.loads(request)
        entry = {"train_gpt2.py": cli.train, "inference.py": cli.infer}[name]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                entry(1, NumpyBackend, lambda: MpiCommunicator(world.duplicate(), world.watchdog), argv)
            except SystemExit as exit:
                code = exit.code
        part.write_bytes(pickle.dumps((code, out.getvalue(), err.getvalue())))
        part.rename(result)  # the file is complete as soon as it exists


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

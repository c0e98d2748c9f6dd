"""Processes of one gloo process group that call a function on every rank; they start once for all tests of a session.

A process loads PyTorch in seconds, so the same processes run many checks. They meet in a file, so no port is used.
"""

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

LIMIT = 60  # seconds of one function; a rank that waits longer for another rank ends with an error


class Gloo:
    """A context manager. run(function, *args) -> [function(*args) of each rank], a top-level function of a module."""

    def __init__(self, size):
        self.size, self.processes = size, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process, pipe in self.processes:
            pipe.close()
            process.terminate()
            process.join()
        self.processes = []

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            pipe, end = context.Pipe()
            args = rank, self.size, str(Path(self.folder.name, "store")), end
            self.processes.append((context.Process(target=serve, args=args, daemon=True), pipe))
            self.processes[-1][0].start()
            end.close()

    def run(self, function, *args):
        """Call the function on every rank; raises AssertionError with the traceback of a rank that fails."""
        if not self.processes:
            self.start()
        for _, pipe in self.processes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self.processes):
            try:
                answered = pipe.poll(2 * LIMIT)
                result, error = pipe.recv() if answered else (None, f"no result after {2 * LIMIT} s")
            except EOFError:
                result, error = None, "the process has ended"
            results.append(result)
            errors += [f"rank {rank}: {error}"] * bool(error)
        if errors:
            self.__exit__()  # the next call starts new processes
            raise AssertionError("\n".join(errors))
        return results


def serve(rank, size, store, pipe):
    """One rank: call the functions that arrive in the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))

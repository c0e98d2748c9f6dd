"""Processes of one torch.distributed process group that call a function on every rank.

A process loads PyTorch in seconds, so the same processes run many functions. They meet in a file, so no port is used.
"""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

from gpt2core.errors import ConfigError, counted

LIMIT = 120  # seconds of one function (default); a rank that waits longer for another rank ends with an error


class RanksFailed(AssertionError):
    """A function raised an error on a rank, or took too long; the message has the tracebacks."""


class TorchRanks:
    """A context manager. run(function, *args) -> [function(*args) of each rank], a top-level function of a module.

    backend: "gloo", or "nccl" with one GPU per rank. threads: CPU threads of each rank. environment: variables of the
    processes. They start with the first call, and again with the first call after an error.

    share_gpus: with "nccl", rank r has GPU r % n, where n is the number of GPUs, and there may be more than n ranks. By
    default NCCL refuses two ranks on the same GPU of one host. So NCCL_HOSTID tells it that ranks 0 to n - 1 are on one
    host, ranks n to 2 n - 1 on another, and so on; ranks of different hosts send through the network. Results and
    memory are as with one GPU per rank; times are not. The first call raises ConfigError if there are too few GPUs.
    """

    def __init__(self, size, backend="gloo", threads=1, limit=LIMIT, environment=(), share_gpus=False):
        self.size, self.backend, self.threads, self.limit = size, backend, threads, limit
        self.environment, self.share_gpus, self.processes = dict(environment), share_gpus, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process, pipe in self.processes:
            pipe.close()
            process.terminate()
            process.join()
        self.processes = []

    def start(self):
        environments = [self.environment] * self.size
        if self.backend == "nccl":
            gpus = self.number_of_gpus()
            if self.share_gpus:
                hosts = (f"host {rank // gpus}" for rank in range(self.size))
                environments = [self.environment | {"NCCL_HOSTID": host} for host in hosts]
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name, "store"))
        for rank, environment in enumerate(environments):
            pipe, end = context.Pipe()
            args = rank, self.size, self.backend, self.threads, self.limit, environment, store, end
            self.processes.append((context.Process(target=serve, args=args, daemon=True), pipe))
            self.processes[-1][0].start()
            end.close()

    def number_of_gpus(self):
        """Raises ConfigError if there are too few for the ranks."""
        import torch

        gpus, needed = torch.cuda.device_count(), 1 if self.share_gpus else self.size
        if gpus < needed:
            found = f"NCCL with {counted(self.size, 'rank')} needs {counted(needed, 'GPU')}, but PyTorch found {gpus}"
            raise ConfigError(f"{found}: use " + ("gloo on the CPU" if gpus == 0 else "fewer ranks"))
        return gpus

    def run(self, function, *args):
        """Call the function on every rank; raises RanksFailed with the traceback of each rank that fails."""
        if not self.processes:
            self.start()
        for _, pipe in self.processes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self.processes):
            try:
                answered = pipe.poll(2 * self.limit)
                result, error = pipe.recv() if answered else (None, f"no result after {2 * self.limit} s")
            except EOFError:
                result, error = None, "the process has ended"
            results.append(result)
            errors += [f"rank {rank}: {error}"] * bool(error)
        if errors:
            self.__exit__()
            raise RanksFailed("\n".join(errors))
        return results


def serve(rank, size, backend, threads, limit, environment, store, pipe):
    """One rank: call the functions that arrive in the pipe."""
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=limit)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))

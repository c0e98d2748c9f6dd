"""The PyTorch program of ranks/ranks.py: TorchGPT2 in DistributedDataParallel on gloo, one process per rank."""

import functools
import os
import subprocess
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_gpt2 import make_trainer as make_serial_trainer

TIMEOUT = timedelta(minutes=10)  # for one collective


class ProcessGroup:
    """The ranks of a DDP job, with the methods that the harness uses. Rank 0 starts the others with its own command.

    The other ranks wait for rank 0 on their standard input, a pipe. So no gloo call is pending and no CPU time is used
    while the harness measures another program.
    """

    def __init__(self, size):
        self.rank, self.size = int(os.environ.get("RANK", 0)), size  # rank 0 sets RANK for the others
        self.is_root, self.workers = self.rank == 0, []  # workers: the processes of the other ranks, on rank 0
        port = int(os.environ.get("DDP_STORE_PORT", 0))  # 0: rank 0 chooses a free port
        store = dist.TCPStore("127.0.0.1", port, size, self.is_root, TIMEOUT, wait_for_workers=False)
        for rank in range(1, size) if self.is_root else ():
            environment = dict(os.environ, RANK=str(rank), DDP_STORE_PORT=str(store.port))
            worker = subprocess.Popen(sys.orig_argv, env=environment, stdin=subprocess.PIPE, text=True)
            self.workers.append(worker)
            threading.Thread(target=self._watch, args=(rank, worker), daemon=True).start()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)

    def _watch(self, rank, worker):
        """Wait until the process of a rank ends; if it failed, end this process too."""
        if status := worker.wait():
            print(f"rank {rank} ended with status {status}", file=sys.stderr)
            self.abort(1)

    def abort(self, code):
        """End this process immediately with the exit code `code`."""
        sys.stderr.flush()
        os._exit(code)

    def barrier(self):
        dist.barrier()

    def all_gather_object(self, obj):
        objects = [None] * self.size
        dist.all_gather_object(objects, obj)
        return objects

    def broadcast_object(self, line):
        """Send rank 0's line of text to all ranks, through their standard input; returns the line on every rank."""
        for worker in self.workers:
            worker.stdin.write(line)
            worker.stdin.flush()
        return line if self.is_root else sys.stdin.readline()


make_world = ProcessGroup  # harness/processes.py calls it before prepare()


def make_trainer(config, batch_size, seq_len, threads, world):
    """Return `step(inputs, targets) -> loss of this rank's sequences`; the arguments are NumPy int64 arrays.

    Their shape is (batch_size, seq_len): every rank passes the whole batch, and trains on its part.
    """
    # views of the buckets save a copy of the gradients
    wrap = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
    step = make_serial_trainer(config, batch_size, seq_len, threads, wrap=wrap)
    per_rank = batch_size // world.size
    rows = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
    return lambda inputs, targets: step(inputs[rows], targets[rows])

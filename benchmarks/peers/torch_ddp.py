"""PyTorch's side of ranks/ranks.py: torch_gpt2 in DistributedDataParallel on gloo, one process per rank."""

import os
import subprocess
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_gpt2 import TorchGPT2

TIMEOUT = timedelta(minutes=10)  # of one collective


class Processes:
    """The processes of a DDP job, with the methods that the harness uses. Rank 0 starts the others by its own command.

    The other ranks wait for rank 0 on their standard input, a pipe, so no gloo call is pending while another process is
    measured.
    """

    def __init__(self, size):
        self.rank, self.size = int(os.environ.get("RANK", 0)), size  # the variable that torchrun sets
        self.is_root, self.others = self.rank == 0, []
        port = int(os.environ.get("DDP_STORE_PORT", 0))  # 0: rank 0 takes a free port
        store = dist.TCPStore("127.0.0.1", port, size, self.is_root, TIMEOUT, wait_for_workers=False)
        for rank in range(1, size) if self.is_root else ():
            environment = dict(os.environ, RANK=str(rank), DDP_STORE_PORT=str(store.port))
            other = subprocess.Popen(sys.orig_argv, env=environment, stdin=subprocess.PIPE, text=True)
            self.others.append(other)
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)

    def _watch(self, other):
        if status := other.wait():  # a failed rank ends the job
            print(f"another process of the group ended with status {status}", file=sys.stderr)
            self.abort(1)

    def abort(self, code):
        sys.stderr.flush()
        os._exit(code)

    def barrier(self):
        dist.barrier()

    def all_gather_object(self, obj):
        objects = [None] * self.size
        dist.all_gather_object(objects, obj)
        return objects

    def broadcast_object(self, line):
        """Rank 0's line of text, on every rank."""
        for other in self.others:
            other.stdin.write(line)
            other.stdin.flush()
        return line if self.is_root else sys.stdin.readline()


make_world = Processes


def make_trainer(config, batch_size, seq_len, threads, world):
    """Return `step(inputs, targets) -> loss of this rank's rows`; NumPy int64 arrays (batch_size, seq_len)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = DistributedDataParallel(TorchGPT2(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    each = batch_size // world.size
    rows = slice(world.rank * each, (world.rank + 1) * each)

    def step(inputs, targets):
        logits = model(torch.from_numpy(inputs[rows]))
        loss = F.cross_entropy(logits.view(-1, config.vocab_size), torch.from_numpy(targets[rows]).view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step

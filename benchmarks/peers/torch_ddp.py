"""The ranks' peer: the same PyTorch GPT-2 in DistributedDataParallel on gloo, with its defaults, a process a rank."""

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

TIMEOUT = timedelta(minutes=10)  # of one meeting of the processes


class Processes:
    """This process and the others, as far as the harness needs them: rank 0 starts them by its own command line.

    Who waits for rank 0 is blocked on a pipe, its standard input: no call of gloo is open while others are measured.
    """

    def __init__(self, size):
        self.rank, self.size = int(os.environ.get("RANK", 0)), size  # torchrun's name for it
        self.is_root, self.others = self.rank == 0, []
        meeting = int(os.environ.get("MEETING", 0))  # the root's port; the root itself takes one that is free
        store = dist.TCPStore("127.0.0.1", meeting, size, self.is_root, TIMEOUT, wait_for_workers=False)
        for rank in range(1, size) if self.is_root else ():
            environment = dict(os.environ, RANK=str(rank), MEETING=str(store.port))
            other = subprocess.Popen(sys.orig_argv, env=environment, stdin=subprocess.PIPE, text=True)
            self.others.append(other)
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)

    def _watch(self, other):
        if status := other.wait():  # a rank that failed ends them all
            print(f"another process of the group ended with status {status}", file=sys.stderr)
            self.abort(1)

    def abort(self, code):
        sys.stderr.flush()
        os._exit(code)

    def barrier(self):
        dist.barrier()

    def all_gather_object(self, obj):
        everyones = [None] * self.size
        dist.all_gather_object(everyones, obj)
        return everyones

    def broadcast_object(self, line):
        """Rank 0's line of text."""
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

"""The parts of a training step on one batch that never changes, for each implementation, and their times.

forward              the loss, without a graph for gradients
forward + backward   the loss and all gradients
step                 the same and AdamW
"""

import torch

from benchmarks.harness.assignment_tables import FORWARD, GRADIENTS, STEP
from benchmarks.torch import models

EAGER, NAIVE, BLOCKS, COMPILED, OURS = "torch eager", "torch naive", "torch compiled blocks", "torch compiled", "ours"
IMPLEMENTATIONS = {
    EAGER: "PyTorch with scaled_dot_product_attention",
    NAIVE: "PyTorch with the (T, T) matrices of attention in memory, as in the assignment's model",
    BLOCKS: "torch eager, each block under torch.compile, which compiles one block for all layers",
    COMPILED: "torch eager, the whole model under torch.compile (30 to 60 s for 48 layers)",
    OURS: "stage 2 on a GPU, stage 0 on the CPU",
}


class TorchPasses:
    """A PyTorch model, its AdamW and a batch; run(kind) runs one kind and waits for the device.

    precision: "fp32" (without TF32), or "bf16": autocast over fp32 parameters. RANGES: of its parts, see range().
    """

    RANGES = "forward", "backward", "optimizer"

    def __init__(self, implementation, size, context, precision, device, batch):
        models.release_memory()
        self.device = torch.device(device)
        naive = models.NaiveAttention if implementation == NAIVE else None
        self.model = self.called = models.build(size, context, device, attention=naive)
        if implementation == COMPILED:
            self.called = torch.compile(self.model)
        if implementation == BLOCKS:
            for block in self.model.h:
                block.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        self.batch, self.precision = models.batch_of(batch, context, device, 0), precision

    def range(self, name):
        """A context manager: a profiler of NVIDIA shows the work inside under this name."""
        return models.named_range(name, self.device)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def run(self, kind):
        result = {FORWARD: self.forward, GRADIENTS: self.forward_and_backward, STEP: self.step}[kind]()
        return float(result.detach())  # waits for the device, at the end of the kind's work

    def loss(self):
        with self.range("forward"), self.autocast():
            return models.loss_of(self.called, *self.batch)

    def forward(self):
        with torch.no_grad():
            return self.loss()

    def new_loss(self):
        """The loss after the gradients of the last step were freed."""
        self.optimizer.zero_grad(set_to_none=True)
        return self.loss()

    def backward(self, loss):
        with self.range("backward"):
            loss.backward()

    def update(self):
        with self.range("optimizer"):
            self.optimizer.step()

    def forward_and_backward(self):
        loss = self.new_loss()
        self.backward(loss)
        return loss

    def step(self):
        loss = self.forward_and_backward()
        self.update()
        return loss


def our_passes(size, context, precision, device, batch, deterministic=False):
    """Passes of this project on the same tokens: stage 2 on a GPU, and for trials stage 0 on the CPU.

    deterministic: without tuning, whose candidates would be counted as memory.
    """
    from benchmarks.harness.ours import Passes

    models.release_memory()
    tokens = (ids.cpu().numpy() for ids in models.batch_of(batch, context, "cpu", 0))
    if device == "cpu":
        from stage0_serial.numpy_backend import NumpyBackend

        return Passes(models.config_of(size, context), NumpyBackend(), *tokens)
    from stage2_cuda.cuda_backend import CudaBackend

    return Passes(models.config_of(size, context), CudaBackend(precision, deterministic), *tokens)


def make_passes(implementation, size, context, precision, device, batch):
    """An object with run(kind) of an implementation of the table IMPLEMENTATIONS."""
    if implementation == OURS:
        return our_passes(size, context, precision, device, batch)
    return TorchPasses(implementation, size, context, precision, device, batch)


def times_of(passes, kind, device, warm_up, repeats):
    """Milliseconds of each of `repeats` runs of a kind, with the device's work, after `warm_up` runs."""
    for _ in range(warm_up):
        passes.run(kind)
    return [1e3 * models.timed(lambda: passes.run(kind), torch.device(device))[0] for _ in range(repeats)]

"""The PyTorch program of gpu/real_run.py: trains NanoGPT on the batches and from the weights of this project's run."""

import time

import numpy as np
import torch

from benchmarks.peers.torch_gpt2_cuda import ATTENTION, CudaSteps, NanoGPT, torch_weights
from gpt2core.model import initial_parameters
from gpt2core.parallel.evaluation import mean_loss

# B batch, T time


class RealRun:
    """A training run. precision, compiled, graph, ...: options of CudaSteps."""

    def __init__(self, config, batch_size, seq_len, seed, device="cuda", **options):
        self.weights, self.batch_size = dict(torch_weights(initial_parameters(config, seed))), batch_size
        if config.tied:
            self.weights["lm_head.weight"] = self.weights["wte.weight"]
        model = NanoGPT(config, pad=1)
        model.load_state_dict(self.weights)
        self.steps = CudaSteps(config, batch_size, seq_len, device=device, model=model.to(device), **options)
        if self.steps.graph_kind == "step":
            self.steps.capture()
            self.start_again()

    def start_again(self):
        """Undo the steps in capture(): the initial weights, in place, and zeros in the state of the optimizer."""
        self.steps.model.load_state_dict(self.weights)
        for state in self.steps.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def set_rate(self, lr):
        for group in self.steps.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(lr)  # the graph reads it
            else:
                group["lr"] = lr

    def sum_of_losses(self, inputs, targets):
        """The sum of the cross-entropy over the tokens of a batch (B, T); a batch of another size is not compiled."""
        steps = self.steps
        module = steps.loss_module if len(inputs) == self.batch_size else steps.model
        autocast = torch.autocast(steps.device, torch.bfloat16, enabled=steps.precision == "bf16")
        with torch.no_grad(), autocast, ATTENTION[steps.attention]():
            return module(*map(steps.upload, int64(inputs, targets))).item() * inputs.size

    def __call__(self, windows, validation, schedule, count, eval_every):
        """Train `count` steps. Returns {"losses", "val_losses", "seconds"}.

        windows, validation: Windows. schedule(step): the learning rate. losses: of each step. val_losses: [[step, loss]
        after every `eval_every` steps]. seconds: per step, of the steps before each validation. The losses are read
        only before a validation, so PyTorch waits for the GPU only then.
        """
        losses, val_losses, seconds, unread, started = [], [], [], [], time.perf_counter()
        for step in range(count):
            self.set_rate(schedule(step))
            batch = windows.batch(step * self.batch_size, self.batch_size)
            unread.append(self.steps(*int64(*batch), wait=False))
            if (step + 1) % eval_every == 0 or step + 1 == count:
                losses += [float(loss) for loss in unread]
                seconds.append((time.perf_counter() - started) / len(unread))
                val_losses.append([step, mean_loss(validation, self.batch_size, self.sum_of_losses)])
                unread, started = [], time.perf_counter()
        return {"losses": losses, "val_losses": val_losses, "seconds": seconds}


def int64(*arrays):
    """Copies of integer arrays, as CudaSteps.upload() needs them."""
    return [array.astype(np.int64) for array in arrays]

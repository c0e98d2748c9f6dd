"""The PyTorch program of gpu/step.py: nanoGPT's GPT-2, with torch.compile, autocast in bf16 and fused AdamW."""

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers import torch_gpt2
from benchmarks.peers.torch_graphs import captured_step

# B batch, T time, V vocabulary

LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
PAD = 64  # the vocabulary is padded to a multiple of PAD; nanoGPT pads 50257 to 50304
GRAPHS = (None, "trees", "step")  # values of the argument `graph` of CudaSteps
ATTENTION = {"default": nullcontext, "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}
AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}


class NanoGPT(torch_gpt2.TorchGPT2):
    """GPT-2 whose `forward(ids, targets)` returns the mean loss; ids, targets (B, T).

    The loss is compiled together with the model, so that the logits are not written to memory twice. The vocabulary is
    padded to a multiple of `pad`.
    """

    def __init__(self, config, pad=PAD):
        super().__init__(replace(config, vocab_size=-(-config.vocab_size // pad) * pad))

    def forward(self, ids, targets):
        logits = super().forward(ids)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def torch_weights(arrays):
    """Yield (PyTorch's name, tensor) of this project's parameters, whose matrices are (in, out), not (out, in).

    arrays: an iterator over (name, array).
    """
    for name, array in arrays:
        tensor, linear = torch.from_numpy(array), ".c_" in name and array.ndim == 2
        yield name.removeprefix("transformer.").replace(".mlp.", "."), tensor.T.contiguous() if linear else tensor


class CudaSteps:
    """Training steps: `steps(inputs, targets) -> loss`; the arguments are NumPy int64 arrays (batch_size, seq_len).

    precision: "fp32", "tf32", or "bf16" (autocast over fp32 weights; operations that stay in fp32 use TF32). graph:
    None: no CUDA graph. "trees": torch.compile captures forward and backward (mode="reduce-overhead"). "step": the
    whole step, with clipping and optimizer, is captured once and replayed. autotune: torch.compile times cuBLAS and
    Triton kernels for each product and uses the fastest (mode="max-autotune-no-cudagraphs"). attention: "default", the
    backend that PyTorch chooses, or "cudnn". model: to train instead of a new NanoGPT(config). With wait=False the loss
    is a tensor, and float(loss) waits for the device.
    """

    def __init__(
        self, config, batch_size, seq_len, precision="bf16", compiled=True, graph=None, autotune=False,
        attention="default", device="cuda", model=None,
    ):  # fmt: skip
        if graph not in GRAPHS or (graph == "trees" and not compiled):
            raise ValueError(f"graph={graph!r}, compiled={compiled}: use one of {GRAPHS}; 'trees' needs compiled=True")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        self.device, self.graph_kind, self.shape = device, graph, (batch_size, seq_len)
        self.precision, self.graph, self.attention = precision, None, attention
        self.model = NanoGPT(config).to(device) if model is None else model
        self.loss_module = self.model  # called as loss_module(ids, targets)
        if compiled:
            options = AUTOTUNE if autotune else {}
            self.loss_module = torch.compile(self.model, options=options | {"triton.cudagraphs": graph == "trees"})
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        # A graph reads the learning rate from device memory, as it must if a schedule changes the rate between replays.
        capturable = graph == "step"
        lr = torch.tensor(LR, device=device) if capturable else LR
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True, capturable=capturable)

    def update(self, inputs, targets):
        """One step on device tensors (B, T); returns the loss, a tensor, without waiting for the device."""
        autocast = torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()
        with autocast, ATTENTION[self.attention]():
            loss = self.loss_module(inputs, targets)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def capture(self):
        """Capture update() in a CUDA graph, with static inputs."""
        self.inputs, self.targets = (torch.zeros(self.shape, dtype=torch.long, device=self.device) for _ in range(2))
        self.graph, self.loss = captured_step(lambda: self.update(self.inputs, self.targets))

    def upload(self, array):
        """Copy a NumPy array to the device through pinned memory, asynchronously, as get_batch of nanoGPT does."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else tensor

    def __call__(self, inputs, targets, wait=True):
        inputs, targets = self.upload(inputs), self.upload(targets)
        if self.graph_kind == "step":
            if self.graph is None:
                self.capture()
            self.inputs.copy_(inputs)
            self.targets.copy_(targets)
            self.graph.replay()
            loss = self.loss
        else:
            if self.graph_kind == "trees":
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.update(inputs, targets)
        if wait:
            return loss.item()
        return loss.clone() if self.graph_kind else loss  # the next replay overwrites the results of a graph

    def memory(self):
        """{"allocated_bytes": peak of allocated tensors, "held_bytes": peak of memory that PyTorch has reserved}.

        On a CPU both are 0.
        """
        if self.device != "cuda":
            return {"allocated_bytes": 0, "held_bytes": 0}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "held_bytes": torch.cuda.max_memory_reserved(),
        }

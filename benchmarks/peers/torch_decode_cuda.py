"""The PyTorch program of gpu/decode.py: decoding with a KV cache of fixed size, eager, compiled or in CUDA graphs."""

import time

import torch
import torch.nn.functional as F

from benchmarks.peers import torch_gpt2

# B batch, T new positions, C channels, H heads, D = C // H, V vocabulary

KINDS = ("eager", "compiled", "overhead", "graph")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Attention(torch_gpt2.Attention):
    """Attention over a cache of fixed size, so that all steps have equal shapes; a mask hides the unused positions.

    forward: x (B, T, C); caches (2, B, H, block, D), or None for attention over only the new positions; positions (T).
    """

    def forward(self, x, caches, positions):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        if caches is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            keys, values = caches
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            visible = torch.arange(keys.shape[2], device=x.device)[None, :] <= positions[:, None]  # (T, block)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class CachedGPT2(torch_gpt2.TorchGPT2):
    """`forward(ids (B, T), positions (T), cached)` returns the most probable next token (B, 1).

    cached: whether to store k and v in the cache and attend to the cache.
    """

    def __init__(self, config, batch):
        super().__init__(config)
        for block in self.h:
            block.attn = Attention(config)
        self.apply(self._initialise)
        shape = config.n_layer, 2, batch, config.n_head, config.block_size, config.n_embd // config.n_head
        self.register_buffer("caches", torch.zeros(shape), persistent=False)

    def forward(self, ids, positions, cached=True):
        x = self.wte(ids) + self.wpe(positions)  # (B, T, C)
        for layer, block in enumerate(self.h):
            x = x + block.attn(block.ln_1(x), self.caches[layer] if cached else None, positions)
            x = x + block.c_proj(F.gelu(block.c_fc(block.ln_2(x)), approximate="tanh"))
        return self.lm_head(self.ln_f(x[:, -1:]))[:, -1].float().argmax(-1, keepdim=True)


class CudaGenerator:
    """Greedy decoding: `generate(prompts, new)` returns (ids (B, new), seconds until the first token, seconds for all).

    prompts: a NumPy int64 array (B, T). new: number of new tokens. The argument `kind` says how a step runs:

        eager       without torch.compile
        compiled    with torch.compile
        overhead    with torch.compile in mode "reduce-overhead", which captures the model in CUDA graphs of its own
        graph       with torch.compile; our code captures the whole step, with its state, in a CUDA graph and replays it

    The host waits only for the first and the last token. When the model's block is full, each step computes the whole
    window of the last tokens again, because the learned position of each token in the window changes.
    """

    def __init__(self, config, batch, precision="bf16", kind="graph", device="cuda"):
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: use one of {KINDS}")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        self.device, self.kind, self.block = device, kind, config.block_size
        self.model = CachedGPT2(config, batch).eval().to(device, DTYPES[precision])
        mode = "reduce-overhead" if kind == "overhead" else None
        self.forward = self.model if kind == "eager" else torch.compile(self.model, mode=mode, dynamic=False)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.window = torch.zeros(batch, self.block, dtype=torch.long, device=device)
        self.all_positions = torch.arange(self.block, device=device)
        self.graphs = {}  # {function: CUDAGraph}

    def call_model(self, *arguments):
        """The next token (B, 1). kind "overhead": a copy, because the next replay overwrites the result of a graph."""
        if self.kind != "overhead":
            return self.forward(*arguments)
        torch.compiler.cudagraph_mark_step_begin()
        return self.forward(*arguments).clone()

    def cached_step(self):
        """Compute the next token from the newest token and the cache."""
        self.token.copy_(self.call_model(self.token, self.position))
        self.position += 1

    def window_step(self):
        """Compute the next token from the whole window, and append it to the window."""
        self.token.copy_(self.call_model(self.window, self.all_positions, False))
        self.window.copy_(torch.cat([self.window[:, 1:], self.token], 1))

    def step(self, function):
        """Run function(); with kind="graph", replay its CUDA graph, which is captured at the first call."""
        if self.kind != "graph":
            return function()
        if function not in self.graphs:
            state = self.token, self.position, self.window
            saved = [tensor.clone() for tensor in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[function] = torch.cuda.CUDAGraph()
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)  # the warm-up calls have changed the state
            with torch.cuda.graph(self.graphs[function]):
                function()
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
        self.graphs[function].replay()

    @torch.no_grad()
    def __call__(self, prompts, new):
        started = time.perf_counter()
        prompts = torch.from_numpy(prompts).to(self.device)
        T, ids = prompts.shape[1], []
        self.window[:, -T:] = prompts
        for number in range(new):
            if T + number >= self.block:
                if number and T + number == self.block:  # the first step after the cached ones
                    self.window.copy_(torch.cat([prompts, *ids], 1))
                self.step(self.window_step)
            elif number == 0:
                positions = self.all_positions[:T]
                self.token.copy_(self.model(prompts, positions))  # not compiled, because prompts have many lengths
                self.position.fill_(T)
            else:
                self.step(self.cached_step)
            ids.append(self.token.clone())
            if number == 0:
                ids[0].cpu()
                first_seconds = time.perf_counter() - started
        ids = torch.cat(ids, 1).cpu()
        return ids.numpy(), first_seconds, time.perf_counter() - started

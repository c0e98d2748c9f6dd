"""PyTorch's program of gpu/decode.py, and of cpu/decode.py if compiled: decoding with a KV cache, in variants."""

import math
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.peers import torch_gpt2
from benchmarks.peers.torch_gpt2_cuda import PAD
from benchmarks.peers.torch_graphs import captured_step

# B batch, T new positions, C channels, H heads, D = C // H, L cached positions that a step reads, V vocabulary

KINDS = ("eager", "compiled", "overhead", "graph")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
ATTENTION = ("sdpa", "matmul", "sums")  # see attend()
PRODUCTS = {  # {value of `products`: options of torch.compile}
    "library": {},  # cuBLAS
    "sums": {"coordinate_descent_tuning": True},  # one sequence: see apply_linear(); tiles are tuned by timing
    "templates": {"max_autotune": True, "coordinate_descent_tuning": True},  # cuBLAS or Triton, whichever is faster
}
CUT = 128  # see CudaGenerator


def attend(kind, q, k, v, positions):
    """Attention of q (B, H, T, D) to k and v (B, H, L, D); the query of row t sees the keys 0 to positions[t].

    kind: "sdpa", PyTorch's fused attention. "matmul", two products and a softmax in fp32. "sums", for T = 1, the same
    with sums instead of products, which torch.compile fuses into kernels of its own.
    """
    visible = torch.arange(k.shape[2], device=q.device) <= positions[:, None]  # (T, L)
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    scale = q.shape[-1] ** -0.5
    if kind == "matmul":
        scores = (q @ k.transpose(2, 3)).float() * scale  # (B, H, T, L)
        return scores.masked_fill(~visible, -math.inf).softmax(-1).to(v.dtype) @ v
    scores = (q.float() * k).sum(-1) * scale  # (B, H, L)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights[..., None] * v).sum(2, keepdim=True).to(v.dtype)


def apply_linear(linear, x, products):
    """linear(x); with products="sums", a product of one row as a sum, which torch.compile fuses into its own kernel."""
    if products == "sums" and x.numel() == x.shape[-1]:
        return (x.float()[..., None, :] * linear.weight).sum(-1).to(x.dtype) + linear.bias
    return linear(x)


class Attention(torch_gpt2.Attention):
    """Attention with a KV cache: two buffers for each layer, so that torch.compile updates them in place.

    forward: x (B, T, C). positions: None for causal attention among the T positions of x, or the positions (T) of x,
    which then also see the earlier positions in the cache. length: with positions, how many cached positions the step
    reads; without, how many of the T positions are stored. last_only: return only the last position (B, 1, C).
    """

    def __init__(self, config, batch, attention, products):
        super().__init__(config)
        self.attention, self.products = attention, products
        shape = batch, config.n_head, config.block_size, config.n_embd // config.n_head
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, positions, length, last_only):
        B, T, C = x.shape
        qkv = apply_linear(self.c_attn, x, self.products).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in qkv)
        if positions is not None:
            self.keys.index_copy_(2, positions, k)
            self.values.index_copy_(2, positions, v)
            y = attend(self.attention, q, self.keys[:, :, :length], self.values[:, :, :length], positions)
        else:
            if length:
                self.keys[:, :, :length] = k
                self.values[:, :, :length] = v
            if last_only:
                y = F.scaled_dot_product_attention(q[:, :, -1:], k, v)
            elif self.attention == "matmul":
                y = attend("matmul", q, k, v, torch.arange(T, device=x.device))
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return apply_linear(self.c_proj, y.transpose(1, 2).reshape(B, -1, C), self.products)


class CachedGPT2(torch_gpt2.TorchGPT2):
    """GPT-2 with the state of greedy decoding in buffers, so that a step needs no input and one graph contains it.

    tokens: (B, 2 * block), prompt and new tokens. position: (1), the index of the newest token. Each function computes
    the next token of every sequence, writes it to `tokens` and advances `position`. The vocabulary is padded to a
    multiple of PAD, as in nanoGPT.
    """

    def __init__(self, config, batch, attention="sdpa", products="library"):
        super().__init__(replace(config, vocab_size=-(-config.vocab_size // PAD) * PAD))
        self.vocab_size, self.products = config.vocab_size, products
        for block in self.h:
            block.attn = Attention(config, batch, attention, products)
        self.apply(self._initialise)
        self.register_buffer("tokens", torch.zeros(batch, 2 * config.block_size, dtype=torch.long), persistent=False)
        self.register_buffer("position", torch.zeros(1, dtype=torch.long), persistent=False)

    def prompt_step(self, length):
        """Compute the first `length` tokens and fill the cache."""
        self.append_token(self.tokens[:, :length], self.positions[:length], length=length)

    def cached_step(self, length):
        """Compute the newest token; read the first `length` positions of the cache."""
        self.append_token(self.tokens.index_select(1, self.position), self.position, self.position, length)

    def window_step(self, length):
        """Compute the last `length` tokens, without the cache."""
        positions = self.positions[:length]
        self.append_token(self.tokens.index_select(1, self.position + 1 - length + positions), positions)

    def append_token(self, ids, positions, cached_positions=None, length=0):
        x = self.wte(ids) + self.wpe(positions)  # (B, T, C)
        for block in self.h:
            last_only = block is self.h[-1] and cached_positions is None
            y = block.attn(block.ln_1(x), cached_positions, length, last_only)
            x = (x[:, -1:] if last_only else x) + y
            hidden = F.gelu(apply_linear(block.c_fc, block.ln_2(x), self.products), approximate="tanh")
            x = x + apply_linear(block.c_proj, hidden, self.products)
        y = self.ln_f(x)  # (B, 1, C)
        if self.products == "sums" and len(y) == 1:
            logits = (y[:, 0].float()[:, None] * self.lm_head.weight).sum(-1)  # (1, padded V)
        else:
            logits = self.lm_head(y)[:, 0].float()
        self.position.add_(1)
        self.tokens.index_copy_(1, self.position, self.most_probable(logits))

    def most_probable(self, logits):
        """The indices (B, 1) of the largest of the first V logits; logits (B, padded V).

        Two steps, because torch.compile computes one argmax of a row in one block of threads.
        """
        padding = torch.arange(logits.shape[1], device=logits.device) >= self.vocab_size
        best, column = logits.masked_fill(padding, -math.inf).view(len(logits), PAD, -1).max(-1)  # (B, PAD)
        row = best.argmax(-1, keepdim=True)
        return row * (logits.shape[1] // PAD) + column.gather(1, row)


class CudaGenerator:
    """Greedy decoding: `generate(prompts, new)` returns (ids (B, new), seconds until the first token, seconds for all).

    prompts: a NumPy int64 array (B, T), T at most the model's block. new: number of new tokens, at most one block. The
    argument `kind` says how a step runs:

        eager       without torch.compile
        compiled    with torch.compile
        overhead    with torch.compile and its own CUDA graphs, as in the mode "reduce-overhead"
        graph       with torch.compile; our code captures the whole step in a CUDA graph and replays it

    attention, products: see attend() and PRODUCTS. cut: a step reads only the filled part of the cache, rounded up to a
    multiple of `cut` positions, so each multiple has its own compiled step; 0: a step reads the whole cache. A prompt
    is compiled, and captured, for each length.

    The host waits only for the first and the last token. When the model's block is full, each step computes the whole
    window of the last tokens again, because the learned position of each token in the window changes.
    """

    def __init__(
        self, config, batch, precision="bf16", kind="graph", attention="sdpa", products="library", cut=CUT,
        device="cuda",
    ):  # fmt: skip
        given = {"kind": (kind, KINDS), "attention": (attention, ATTENTION), "products": (products, tuple(PRODUCTS))}
        for name, (value, values) in given.items():
            if value not in values:
                raise ValueError(f"{name}={value!r}: use one of {values}")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
        self.device, self.kind, self.block, self.cut = device, kind, config.block_size, cut or config.block_size
        self.model = CachedGPT2(config, batch, attention, products).eval().to(device, DTYPES[precision])
        self.steps = {name: getattr(self.model, f"{name}_step") for name in ("prompt", "cached", "window")}
        if kind != "eager":
            # Every length is compiled separately. After too many lengths, PyTorch would run a step without compiling.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            options = PRODUCTS[products] | {"triton.cudagraphs": kind == "overhead"}
            for name, step in self.steps.items():
                self.steps[name] = torch.compile(step, fullgraph=True, dynamic=False, options=options)
        self.graphs = {}  # {(name of a step, length): CUDAGraph}

    def run_step(self, name, length):
        """Run a step; with kind="graph", replay its CUDA graph, which is captured at the first call."""
        if self.kind == "overhead":
            torch.compiler.cudagraph_mark_step_begin()
        if self.kind != "graph":
            return self.steps[name](length)
        if (name, length) not in self.graphs:
            self.graphs[name, length] = self.capture(name, length)
        self.graphs[name, length].replay()

    def capture(self, name, length):
        """The CUDA graph of a step. The state is the same before and after: warm-up steps change it."""
        state = self.model.tokens, self.model.position
        saved = [tensor.clone() for tensor in state]

        def restore():
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        return captured_step(lambda: self.steps[name](length), restore)[0]

    @torch.no_grad()
    def __call__(self, prompts, new):
        T = prompts.shape[1]
        if not 0 < T <= self.block or not 0 < new <= self.block:
            raise ValueError(f"{T} prompt tokens and {new} new tokens: use 1 to {self.block}, one block, of each")
        started = time.perf_counter()
        tokens = self.model.tokens
        tokens[:, :T] = torch.from_numpy(prompts).to(self.device)
        self.model.position.fill_(T - 1)
        for end in range(T, T + new):  # end: number of tokens so far
            if end > self.block or T == self.block:
                self.run_step("window", self.block)
            elif end == T:
                self.run_step("prompt", T)
            else:
                self.run_step("cached", min(self.block, -(-end // self.cut) * self.cut))
            if end == T:
                tokens[:, T].cpu()
                first_seconds = time.perf_counter() - started
        ids = tokens[:, T : T + new].cpu()
        return ids.numpy(), first_seconds, time.perf_counter() - started


def make_generator(config, threads, kind="compiled"):
    """Return `generate(prompts, n, use_cache)` of cpu/decode.py: fp32 on the CPU, without CUDA graphs.

    prompts: (B, T) token ids. It returns (new ids (B, n), seconds until the first new tokens, seconds for all). Raises
    ValueError for use_cache=False: without the cache, each number of tokens would be compiled.
    """
    torch.set_num_threads(threads)
    generators = {}  # {B: CudaGenerator}, reused

    def generate(prompts, n, use_cache):
        if not use_cache:
            raise ValueError("use_cache=False: use benchmarks.peers.torch_gpt2")
        B = len(prompts)
        if B not in generators:  # cut=0: one step for all lengths, which compiles faster
            generators[B] = CudaGenerator(config, B, "fp32", kind, products="sums", cut=0, device="cpu")
        ids, first_seconds, seconds = generators[B](prompts, n)
        return ids.tolist(), first_seconds, seconds

    return generate

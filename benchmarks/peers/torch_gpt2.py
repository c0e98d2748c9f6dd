"""The PyTorch program of the CPU benchmarks: GPT-2, eager or compiled.

It uses scaled_dot_product_attention, fused AdamW and a preallocated KV cache.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, P = `past` positions that are already in the cache


class Attention(nn.Module):
    """Causal self-attention of x (B, T, C). cache (2, B, H, block, D): keys, values; P positions are filled.

    last_only: return only the last position (B, 1, C). split(), as in nanoGPT, lets backward concatenate the gradients
    of q, k and v once.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None, past=0, last_only=False):
        B, T, C = x.shape
        parts = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in parts)  # each (B, H, T, D)
        if cache is not None:
            cache[0, :, :, past : past + T], cache[1, :, :, past : past + T] = k, v
            k, v = cache[:, :, :, : past + T]  # each (B, H, P + T, D)
        q = q[:, :, -1:] if last_only else q
        y = self.attend(q, k, v, causal=q.shape[2] > 1)  # one new position attends to all positions
        return self.c_proj(y.transpose(1, 2).reshape(B, -1, C))

    def attend(self, q, k, v, causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x, cache=None, past=0, last_only=False):
        y = self.attn(self.ln_1(x), cache, past, last_only)
        x = (x[:, -1:] if last_only else x) + y
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class TorchGPT2(nn.Module):
    """GPT-2 with the sizes of a GPT2Config.

    `forward(ids (B, T))` returns logits (B, T, V), or with last_only=True those of the last position (B, 1, V). Then
    the last layer computes only keys and values of the other positions.
    caches: keys and values (n_layer, 2, B, H, block, D), of which the first `past` positions are filled. If past > 0,
    T must be 1.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.register_buffer("positions", torch.arange(config.block_size), persistent=False)
        self.apply(self._initialise)
        if config.tied:
            self.lm_head.weight = self.wte.weight

    @staticmethod
    def _initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, caches=None, past=0, last_only=False):
        x = self.wte(ids) + self.wpe(self.positions[past : past + ids.shape[1]])  # (B, T, C)
        for layer, block in enumerate(self.h):
            x = block(x, None if caches is None else caches[layer], past, last_only and block is self.h[-1])
        return self.lm_head(self.ln_f(x))


def make_trainer(config, batch_size, seq_len, threads, compiled=False, bf16=False, wrap=lambda model: model):
    """Return `step(inputs, targets) -> loss`; the arguments are NumPy int64 arrays (batch_size, seq_len).

    bf16: compute forward under autocast in bf16; the weights stay fp32. wrap(model): the model to train.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = wrap(TorchGPT2(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(inputs, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = forward(torch.from_numpy(inputs))
            loss = F.cross_entropy(logits.view(-1, config.vocab_size), torch.from_numpy(targets).view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_generator(config, threads):
    """Return `generate(prompts, n, use_cache)`, which generates n tokens for each prompt with greedy decoding.

    prompts: (B, T) token ids. It returns (new ids (B, n), seconds until the first new tokens, seconds for all). When
    the block is full, the window of the last block_size tokens slides and every token gets another learned position.
    The cache is then invalid, so each further token recomputes the whole window.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = TorchGPT2(config).eval()
    for module in model.h.modules():
        if isinstance(module, nn.Linear):  # a product with one row is 10 % faster if the weight is stored as (in, out)
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    head_size, caches_of = config.n_embd // config.n_head, {}  # {B: caches}, reused

    @torch.inference_mode()
    def generate(prompts, n, use_cache):
        started = time.perf_counter()
        B, T = prompts.shape
        if B not in caches_of:
            caches_of[B] = torch.zeros(config.n_layer, 2, B, config.n_head, config.block_size, head_size)
        ids = torch.empty(B, T + n, dtype=torch.long)
        ids[:, :T] = torch.as_tensor(prompts)
        past = 0
        for end in range(T, T + n):  # end: number of tokens so far
            if use_cache and end <= config.block_size:
                logits = model(ids[:, past:end], caches_of[B], past, last_only=True)
                past = end
            else:
                logits = model(ids[:, max(0, end - config.block_size) : end], last_only=True)
            ids[:, end] = logits[:, -1].argmax(-1)
            if end == T:
                first = time.perf_counter() - started
        return ids[:, T:].tolist(), first, time.perf_counter() - started

    return generate

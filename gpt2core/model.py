"""GPT-2 itself: its sizes, the names and shapes of its parameters, and one forward pass for every runtime."""

# B batch, T time, C channels, V vocabulary

import functools
import math
from dataclasses import dataclass, fields

import numpy as np

from gpt2core import ops, primitives
from gpt2core.arena import Arena
from gpt2core.errors import ConfigError
from gpt2core.ops import SOLO
from gpt2core.parallel.tensor_parallel import shard, shard_shapes
from gpt2core.tensor import Tensor

LARGEST = 1 << 40  # parameters: beyond it a size is a slip of the hand, and array libraries stop counting


@dataclass(frozen=True)
class GPT2Config:
    """The size of one GPT-2. Names follow nanoGPT; `tied` says whether lm_head shares the token embedding.

    Raises ConfigError when a size is not positive or the width is not divisible by the heads.
    """

    vocab_size: int = 50257
    block_size: int = 1024  # positions: the longest sequence the model can see, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    tied: bool = True
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name} must be a positive whole number, but it is {value!r}")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ConfigError(f"layer_norm_epsilon must be between 0 and 1, but it is {self.layer_norm_epsilon!r}")
        weights = 12 * self.n_layer * self.n_embd**2 + (self.vocab_size + self.block_size) * self.n_embd
        if weights > LARGEST:
            raise ConfigError(
                f"{self.n_layer} layers, {self.n_embd} wide, vocabulary {self.vocab_size} and block {self.block_size} "
                f"make {weights:,} parameters, more than {LARGEST:,}: take a smaller model"
            )
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: every head needs the same width"
            )


def parameter_shapes(config):
    """Yield (name, shape) under Hugging Face's names, in forward order; weights are stored (in, out), as GPT-2's are.

    `transformer.wte.weight` and `lm_head.weight` are (V, C); a tied model has no `lm_head.weight`.
    """
    C, V = config.n_embd, config.vocab_size
    yield "transformer.wte.weight", (V, C)
    yield "transformer.wpe.weight", (config.block_size, C)
    for layer in range(config.n_layer):
        for name, shape in (
            ("ln_1.weight", (C,)),
            ("ln_1.bias", (C,)),
            ("attn.c_attn.weight", (C, 3 * C)),
            ("attn.c_attn.bias", (3 * C,)),
            ("attn.c_proj.weight", (C, C)),
            ("attn.c_proj.bias", (C,)),
            ("ln_2.weight", (C,)),
            ("ln_2.bias", (C,)),
            ("mlp.c_fc.weight", (C, 4 * C)),
            ("mlp.c_fc.bias", (4 * C,)),
            ("mlp.c_proj.weight", (4 * C, C)),
            ("mlp.c_proj.bias", (C,)),
        ):
            yield f"transformer.h.{layer}.{name}", shape
    yield "transformer.ln_f.weight", (C,)
    yield "transformer.ln_f.bias", (C,)
    if not config.tied:
        yield "lm_head.weight", (V, C)


def initial_parameters(config, seed):
    """Yield (name, float32 array): GPT-2's initialisation (Radford et al. 2019), the same in every runtime.

    Normal with deviation 0.02, divided by sqrt(2 n_layer) for the projections into the residual stream; biases 0,
    LayerNorm weights 1. Every parameter has its own random stream, so that none depends on the order of the others.
    """
    for index, (name, shape) in enumerate(parameter_shapes(config)):
        if name.endswith("bias"):
            value = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            value = np.ones(shape, np.float32)
        else:
            deviation = 0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02
            value = np.random.default_rng((seed, index)).standard_normal(shape, np.float32)
            value *= np.float32(deviation)
        yield name, value


@functools.cache  # asked for at every step
def parameter_count(config):
    """Numbers in the model: the tied embedding counts once."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


def flops_per_token(config, seq_len):
    """Floating-point operations of one training step for each token: 6 a weight, 12 LCT in attention (PaLM, app. B)."""
    positions = config.block_size * config.n_embd
    unused = positions + (0 if config.tied else config.vocab_size * config.n_embd)  # look-ups are no products
    return 6 * (parameter_count(config) - unused) + 12 * config.n_layer * config.n_embd * seq_len


class GPT2:
    """A GPT-2 over given parameters; whoever owns the parameters decides where their gradients go.

    parameters: {Hugging Face name: Tensor}; tensor_group: the ranks that share each layer, over which they are already
    divided (gpt2core.parallel.tensor_parallel).
    """

    def __init__(self, config, parameters, tensor_group=SOLO):
        self.config, self.parameters, self.group = config, parameters, tensor_group
        self.decoders = {}  # {number of texts: idle decoders}, of sampler.py

    @property
    def head(self):
        """The matrix (V, C) of the logits."""
        return self.parameters["transformer.wte.weight" if self.config.tied else "lm_head.weight"]

    @classmethod
    def of_arrays(cls, config, arrays, backend, group=SOLO):
        """A model for generation from {name: whole host array}: this rank's shards, copied into one arena.

        One large buffer reads faster than many.
        """
        backend.check_model(config)
        arena = Arena(shard_shapes(parameter_shapes(config), group.size))
        views = arena.views(backend.zeros((arena.size,), backend.compute))
        for name, view in views.items():
            view[...] = backend.asarray(shard(name, arrays[name], group.rank, group.size))
        return cls(config, {name: Tensor(view, backend) for name, view in views.items()}, group)

    def trunk(self, ids, cache=None, last_only=False):
        """ids (B, T) -> the final LayerNorm's output (B, T, C), or (B, 1, C) of the last position alone.

        With a cache, ids continue what the cache holds.
        """
        p, eps = self.parameters, self.config.layer_norm_epsilon
        position = 0 if cache is None else cache.length
        wte, wpe = p["transformer.wte.weight"], p["transformer.wpe.weight"]
        x = ops.embedding(ids, wte, wpe, position, self.group)  # (B, T, C)
        x, y = ops.stream_layernorm(x, p["transformer.h.0.ln_1.weight"], p["transformer.h.0.ln_1.bias"], eps)
        for layer in range(self.config.n_layer):
            h = f"transformer.h.{layer}."
            last = layer == self.config.n_layer - 1
            following = "transformer.ln_f." if last else f"transformer.h.{layer + 1}.ln_1."
            a = self.attention(y, h + "attn.", layer, cache)
            if last and last_only:  # only the last position's logits are needed
                x, a = (primitives.getitem(each, np.s_[:, -1:]) for each in (x, a))
            x, y = ops.residual_layernorm(
                x, a, p[h + "attn.c_proj.bias"], p[h + "ln_2.weight"], p[h + "ln_2.bias"], eps
            )
            m = self.mlp(y, h + "mlp.")
            x, y = ops.residual_layernorm(
                x, m, p[h + "mlp.c_proj.bias"], p[following + "weight"], p[following + "bias"], eps
            )
        return y

    def attention(self, y, name, layer, cache):
        """(B, T, C) -> (B, T, C) without its output bias: before the reduce, it would be added group.size times."""
        p, n_head = self.parameters, self.config.n_head // self.group.size
        y = ops.copy_to_group(y, self.group)
        qkv = ops.linear(y, p[name + "c_attn.weight"], p[name + "c_attn.bias"])  # (B, T, 3C / group.size)
        a = ops.attention(qkv, n_head) if cache is None else cache.attend(qkv, layer, n_head)
        return ops.reduce_from_group(ops.linear(a, p[name + "c_proj.weight"]), self.group)

    def mlp(self, y, name):
        """(B, T, C) -> (B, T, C) without its output bias."""
        p = self.parameters
        y = ops.copy_to_group(y, self.group)
        y = ops.mlp(y, p[name + "c_fc.weight"], p[name + "c_fc.bias"], p[name + "c_proj.weight"])
        return ops.reduce_from_group(y, self.group)

    def logits(self, ids, cache=None, last_only=False):
        """ids (B, T) -> logits (B, T, V), or (B, 1, V) of the last position alone."""
        y = ops.copy_to_group(self.trunk(ids, cache, last_only), self.group)
        return ops.gather_from_group(ops.unembed(y, self.head), self.group)

    def loss(self, ids, targets, scale=None, seed=None):
        """scale * summed cross-entropy of targets (B, T), a float64 scalar; the default scale gives the mean.

        seed: what backward() will be seeded with, or None for 1.
        """
        y = ops.copy_to_group(self.trunk(ids), self.group)
        return ops.unembed_cross_entropy(y, self.head, targets, scale, self.group, seed)

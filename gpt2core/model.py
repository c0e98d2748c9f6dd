"""GPT-2: its sizes, the names and shapes of its parameters, and its forward pass, the same for every backend."""

# B batch, T time, C channels, V vocabulary

import functools
import math
from dataclasses import dataclass, fields

import numpy as np

from gpt2core import ops, primitives
from gpt2core.errors import ConfigError
from gpt2core.ops import SOLO

MAX_PARAMETERS = 1 << 40  # a larger number is almost certainly a typo, and overflows in array libraries
MAX_LAYERS = 1000  # the deepest trained transformers have fewer; lists of millions of layers would take minutes


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of one GPT-2. Names follow nanoGPT. `tied`: the token embedding is also the matrix of the logits.

    Raises ConfigError for a size below 1, more than MAX_LAYERS or MAX_PARAMETERS, an epsilon outside (0, 1), or
    C % n_head != 0.
    """

    vocab_size: int = 50257
    block_size: int = 1024  # maximum sequence length, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # C
    tied: bool = True
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name} must be a positive whole number, but it is {value!r}")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ConfigError(f"layer_norm_epsilon must be between 0 and 1, but it is {self.layer_norm_epsilon!r}")
        if self.n_layer > MAX_LAYERS:
            raise ConfigError(f"n_layer {self.n_layer:,} is more than {MAX_LAYERS:,}: take a model with fewer layers")
        parameters = 12 * self.n_layer * self.n_embd**2 + (self.vocab_size + self.block_size) * self.n_embd
        if parameters > MAX_PARAMETERS:
            raise ConfigError(
                f"{self.n_layer} layers, {self.n_embd} wide, vocabulary {self.vocab_size} and block {self.block_size} "
                f"make about {parameters:,} parameters, more than {MAX_PARAMETERS:,}: take a smaller model"
            )
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: every head needs the same width"
            )


def parameter_shapes(config):
    """Yield (Hugging Face's name, shape) of each parameter, in forward order. Weights are (in, out), as in GPT-2.

    Only `transformer.wte.weight` and `lm_head.weight` are (V, C); a tied model has no `lm_head.weight`.
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


@functools.cache  # because it is called at every step
def parameter_count(config):
    """The number of parameters; a tied embedding counts once."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


class GPT2:
    """A GPT-2 that computes with the given parameters.

    parameters: {Hugging Face name: Tensor}. tensor_group: the ranks that divide each layer; `parameters` are this
    rank's shards (parallel/tensor_parallel.py). wait_on_read(module) is called before the parameters of a module are
    read, because other ranks may still be sending them (parallel/zero.py).
    """

    def __init__(self, config, parameters, tensor_group=SOLO, wait_on_read=lambda module: None):
        self.config, self.parameters, self.group = config, parameters, tensor_group
        self.wait_on_read = wait_on_read
        self.blocks = [Block(self, layer) for layer in range(config.n_layer)]

    def read(self, module):
        """(weight, bias or None) of a module, which is given by its Hugging Face name."""
        self.wait_on_read(module)
        return self.parameters[f"{module}.weight"], self.parameters.get(f"{module}.bias")

    @property
    def head(self):
        """The matrix (V, C) of the logits: the logits of y (..., C) are y @ head.T."""
        return self.read("transformer.wte" if self.config.tied else "lm_head")[0]

    def trunk(self, ids, cache=None, last_only=False):
        """ids (B, T) -> the final LayerNorm's output (B, T, C), or (B, 1, C) for the last position only.

        ids: integers, or the result of prepare_tokens. With a cache (sampler.KVCache), ids follow the cached tokens.
        """
        wte, wpe = self.read("transformer.wte")[0], self.read("transformer.wpe")[0]
        position = 0 if cache is None else cache.length
        x = ops.embedding(ids, wte, wpe, position, self.group, self.config.tied)  # (B, T, C), the residual stream
        x, y = ops.stream_layernorm(x, *self.blocks[0].read("ln_1"), self.config.layer_norm_epsilon)
        next_norms = [f"transformer.h.{layer}.ln_1" for layer in range(1, len(self.blocks))] + ["transformer.ln_f"]
        for block, next_norm in zip(self.blocks, next_norms, strict=True):
            a, bias = block.attention(y, cache)
            if last_only and block is self.blocks[-1]:  # only the last position's logits are needed
                x, a = last_position(x), last_position(a)
            x, y = self.add_and_normalize(x, (a, bias), block.read("ln_2"))
            x, y = self.add_and_normalize(x, block.mlp(y), self.read(next_norm))
        return y

    def add_and_normalize(self, x, branch, norm):
        """x (B, T, C), branch (output, bias), norm (weight, bias) -> x + output + bias, and its LayerNorm (B, T, C)."""
        return ops.residual_layernorm(x, *branch, *norm, self.config.layer_norm_epsilon)

    def logits(self, ids, cache=None, last_only=False):
        """ids (B, T) -> logits (B, T, V), or (B, 1, V) for the last position only."""
        y = ops.copy_to_group(self.trunk(ids, cache, last_only), self.group)
        return ops.gather_from_group(ops.unembed(y, self.head), self.group)

    def loss(self, ids, targets, scale=None, dloss=None):
        """scale * sum of the cross-entropy of targets (B, T), a float64 scalar; the default scale gives the mean.

        dloss: the array with which backward() of this loss will be called, or None if it is not known.
        """
        y = ops.copy_to_group(self.trunk(ids), self.group)
        return ops.unembed_cross_entropy(y, self.head, targets, scale, self.group, dloss)


class Block:
    """The two branches of one layer, attention and MLP. Each returns (output without its last bias, the last bias).

    The caller adds the bias after the all-reduce over the tensor-parallel ranks. If each rank added the bias before the
    all-reduce, the sum would contain it group.size times.
    """

    def __init__(self, model, layer):
        self.model, self.layer = model, layer

    def read(self, module):
        """(weight, bias) of a module of this layer, for example "ln_1"."""
        return self.model.read(f"transformer.h.{self.layer}.{module}")

    def attention(self, y, cache=None):
        """y (B, T, C) -> (output (B, T, C), bias (C))."""
        group, n_head = self.model.group, self.model.config.n_head // self.model.group.size
        qkv = ops.linear(ops.copy_to_group(y, group), *self.read("attn.c_attn"))  # (B, T, 3C / group.size)
        a = ops.attention(qkv, n_head) if cache is None else cache.attend(qkv, self.layer, n_head)
        w, bias = self.read("attn.c_proj")
        return ops.reduce_from_group(ops.linear(a, w), group), bias

    def mlp(self, y):
        """y (B, T, C) -> (output (B, T, C), bias (C))."""
        group, (w1, b1), (w2, bias) = self.model.group, self.read("mlp.c_fc"), self.read("mlp.c_proj")
        y = ops.mlp(ops.copy_to_group(y, group), w1, b1, w2)
        return ops.reduce_from_group(y, group), bias


def last_position(x):
    """x (B, T, C) -> its last position (B, 1, C)."""
    return primitives.getitem(x, np.s_[:, -1:])

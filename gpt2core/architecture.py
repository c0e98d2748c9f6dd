"""The architecture of GPT-2 as data: its sizes, its operations in order, and the names and shapes of its parameters.

model.py writes the same operations as formulas, for training. The decoders of the stages, which compute without
autograd, follow forward_plan(). This file imports neither tensors nor operations.
"""

# B batch, T time, C channels, V vocabulary

import functools
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from gpt2core.errors import ConfigError

MAX_PARAMETERS = 1 << 40  # a larger number is almost certainly a typo, and overflows in array libraries
POSITIONS = "learned", "rotary"  # a vector for each position; a rotation of queries and keys (ops.rotary_attention)
MAX_LAYERS = 1000  # the deepest trained transformers have fewer; lists of millions of layers would take minutes


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of one GPT-2. Names follow nanoGPT. `tied`: the token embedding is also the matrix of the logits.

    Raises ConfigError for a size below 1, more than MAX_LAYERS or MAX_PARAMETERS, an epsilon outside (0, 1), C % n_head
    != 0, positions that are not one of POSITIONS, or rotary positions with an odd head size C // n_head.
    """

    vocab_size: int = 50257
    block_size: int = 1024  # maximum sequence length, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # C
    tied: bool = True
    layer_norm_epsilon: float = 1e-5
    positions: str = "learned"  # one of POSITIONS

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
        if self.positions not in POSITIONS:
            raise ConfigError(f"positions is {self.positions!r}, but it must be one of {', '.join(POSITIONS)}")
        if self.positions == "rotary" and (size := self.n_embd // self.n_head) % 2:
            raise ConfigError(
                f"n_embd {self.n_embd} and n_head {self.n_head} make heads of {size} channels, but rotary positions "
                "rotate pairs of channels: choose an even head size"
            )

    @property
    def learns_positions(self):
        """Whether each position has a vector of parameters; otherwise attention rotates q and k."""
        return self.positions == "learned"

    @property
    def head(self):
        """The name of the matrix (V, C) of the logits: the logits of y (..., C) are y @ head.T."""
        return "transformer.wte.weight" if self.tied else "lm_head.weight"


class Sublayer(NamedTuple):
    """What a layer adds to the residual stream x: linear_out(operation(linear_in(norm(x)))). A layer has two sublayers.

    norm, linear_in and linear_out are Hugging Face's names of modules. The weight of linear_in is (C, columns C), that
    of linear_out (rows C, C). A decoder has a function for each operation.
    """

    norm: str
    linear_in: str
    operation: str
    linear_out: str
    columns: int
    rows: int

    @property
    def modules(self):
        return self.norm, self.linear_in, self.linear_out


SUBLAYERS = (  # of each layer
    Sublayer("ln_1", "attn.c_attn", "attention", "attn.c_proj", columns=3, rows=1),  # q, k and v of all heads
    Sublayer("ln_2", "mlp.c_fc", "gelu", "mlp.c_proj", columns=4, rows=4),
)


class PlannedSublayer(NamedTuple):
    """A Sublayer of one layer with its arrays: norm, linear_in and linear_out are lists [weight, bias]."""

    norm: list
    linear_in: list
    operation: str
    linear_out: list


class Plan(NamedTuple):
    """The forward pass of a GPT-2 as its arrays, in the order of their use:

    x = wte[tokens] + wpe[positions], or with rotary positions wte[tokens]
    x = x + linear_out(operation(linear_in(norm(x)))) for each sublayer of each layer
    logits = norm(x) @ head.T
    """

    wte: object  # (V, C)
    wpe: object  # (block_size, C), or None: attention rotates q and k
    layers: list  # of each layer: the list of its PlannedSublayers
    norm: list  # [weight, bias], each (C)
    head: object  # (V, C)

    @property
    def rotates(self):
        """Whether attention rotates q and k (rotary positions)."""
        return self.wpe is None


def forward_plan(config, parameters, operations, decoder):
    """The Plan with the arrays of `parameters`, {Hugging Face's name: array}, for a decoder.

    operations: the names of the operations that the decoder implements. Raises ConfigError if a sublayer has another
    one; `decoder` is a name for the message.
    """
    for each in SUBLAYERS:
        if each.operation not in operations:
            raise ConfigError(
                f"{decoder} does not implement the operation {each.operation!r} of the layers of this model, "
                f"only {', '.join(operations)}"
            )

    def module(name):
        return [parameters[f"{name}.{kind}"] for kind in ("weight", "bias")]

    def sublayer(names, prefix):
        norm, linear_in, linear_out = (module(f"{prefix}.{name}") for name in names.modules)
        return PlannedSublayer(norm, linear_in, names.operation, linear_out)

    return Plan(
        parameters["transformer.wte.weight"],
        parameters["transformer.wpe.weight"] if config.learns_positions else None,
        [[sublayer(names, f"transformer.h.{layer}") for names in SUBLAYERS] for layer in range(config.n_layer)],
        module("transformer.ln_f"),
        parameters[config.head],
    )


def unit_names(config):
    """The names of the units in forward order: "embedding", "h.0", "h.1", ..., "head"."""
    return ["embedding", *(f"h.{layer}" for layer in range(config.n_layer)), "head"]


def unit_of(name):
    """The unit of a parameter: "embedding", "h.0", "h.1", ..., or "head" (GPT2.units)."""
    module = name.removeprefix("transformer.")
    if module.startswith("h."):
        return ".".join(module.split(".")[:2])
    return "embedding" if module.startswith(("wte", "wpe")) else "head"


def parameter_shapes(config):
    """Yield (Hugging Face's name, shape) of each parameter, in forward order. Weights are (in, out), as in GPT-2.

    Only `transformer.wte.weight` and `lm_head.weight` are (V, C); a tied model has no `lm_head.weight`.
    """
    C, V = config.n_embd, config.vocab_size
    yield "transformer.wte.weight", (V, C)
    if config.learns_positions:
        yield "transformer.wpe.weight", (config.block_size, C)
    for layer in range(config.n_layer):
        for each in SUBLAYERS:
            shapes = (C,), (C, each.columns * C), (each.rows * C, C)
            for module, shape in zip(each.modules, shapes, strict=True):
                yield f"transformer.h.{layer}.{module}.weight", shape
                yield f"transformer.h.{layer}.{module}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (C,)
    yield "transformer.ln_f.bias", (C,)
    if not config.tied:
        yield "lm_head.weight", (V, C)


@functools.cache  # because it is called at every step
def parameter_count(config):
    """The number of parameters; a tied embedding counts once."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(config))


def flops_per_token(config, seq_len):
    """Floating-point operations of a training step per token (appendix B of the PaLM paper, Chowdhery et al. 2022).

    These are 6 per parameter, forward and backward, and 12 * n_layer * n_embd * seq_len for attention. Embeddings that
    are only looked up are not counted; a tied token embedding is counted, because it is also the matrix of the logits.
    """
    position_embedding = config.block_size * config.n_embd * config.learns_positions
    token_embedding = config.vocab_size * config.n_embd
    looked_up = position_embedding + (0 if config.tied else token_embedding)
    return 6 * (parameter_count(config) - looked_up) + 12 * config.n_layer * config.n_embd * seq_len

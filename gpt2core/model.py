"""GPT-2: its forward pass, its loss and its initial parameters, the same for every backend."""

# B batch, T time, C channels, V vocabulary

import math

import numpy as np

from gpt2core import ops
from gpt2core.architecture import parameter_shapes, unit_names
from gpt2core.communicator import SOLO
from gpt2core.forward_arguments import FIRST_TOKENS, ForwardArguments
from gpt2core.inference_model import InferenceModel
from gpt2core.stream import Branch, Stream
from gpt2core.vocabulary import Vocabulary


class GPT2:
    """A GPT-2 that computes with the given parameters.

    parameters: {Hugging Face name: Tensor}. group: the ranks that divide each layer; `parameters` are then this rank's
    shards (parallel/tensor/shards.py). units: the embedding, each block, and the head, in forward order; a forward
    pass calls x = unit(x, arguments) for each, where x is first ids (B, T), then the Stream (B, T, C), and last the
    loss.
    """

    def __init__(self, config, parameters, group=SOLO):
        self.config, self.parameters, self.group = config, parameters, group
        self.units = [make_unit(name, config, parameters, group) for name in unit_names(config)]
        self.embedding, *self.blocks, self.head = self.units
        self.backend = self.head.w.backend

    @property
    def is_whole(self):
        """Whether this rank has the whole model, not shards of its layers."""
        return self.group.size == 1

    def stream(self, ids):
        """ids (B, T), integers or from prepare_tokens -> the residual Stream (B, T, C) after the last block."""
        return forward(self.units[:-1], ids, FIRST_TOKENS)

    def logits(self, ids):
        """ids (B, T) -> logits (B, T, V)."""
        _, y = self.head.ln_f(self.stream(ids))
        return self.unembed(y)

    def without_autograd(self):
        """The InferenceModel with the arrays of these parameters, which generates text."""
        arrays = {name: tensor.data for name, tensor in self.parameters.items()}
        return InferenceModel(self.config, arrays, self.backend, self.group)

    def unembed(self, y):
        """The final LayerNorm's output (B, T, C) -> logits (B, T, V)."""
        logits = ops.unembed(ops.copy_to_group(y, self.group), self.head.w)  # of this rank's tokens
        return ops.gather_from_group(logits, self.group, self.config.vocab_size)

    def loss(self, ids, targets, scale=None):
        """scale * sum of the cross-entropy of targets (B, T), a float64 scalar; the default scale gives the mean.

        ParallelTrainer calls the units one by one, with the same result (parallel/part.py).
        """
        return forward(self.units, ids, ForwardArguments(targets=targets, scale=scale))


def forward(units, x, arguments):
    """The output of the last of these units, one after another. arguments: ForwardArguments."""
    for unit in units:
        x = unit(x, arguments)
    return x


def make_unit(name, config, parameters, group=SOLO):
    """The unit `name`. parameters: {Hugging Face name: Tensor}, of which it reads only its own; see also GPT2."""
    if name == "embedding":
        return Embedding(config, parameters, group)
    if name == "head":
        return Head(config, parameters, group)
    return Block(config, parameters, group, int(name.removeprefix("h.")))


class Embedding:
    """The first unit: a vector for each token, to which learned positions add a vector for its position."""

    name = "embedding"

    def __init__(self, config, parameters, group):
        self.wte, self.wpe = parameters["transformer.wte.weight"], parameters.get("transformer.wpe.weight")
        self.vocabulary = Vocabulary(config.vocab_size, group)

    def __call__(self, ids, arguments=FIRST_TOKENS):
        """ids (B, T) -> the Stream (B, T, C)."""
        return Stream(ops.embedding(ids, self.wte, self.wpe, arguments.position, self.vocabulary))


class Head:
    """The last unit: the final LayerNorm, the logits, and their cross-entropy."""

    name = "head"

    def __init__(self, config, parameters, group):
        self.ln_f = LayerNorm(parameters, "transformer.ln_f", config.layer_norm_epsilon)
        self.w = parameters[config.head]  # (V, C): the logits of y (..., C) are y @ w.T
        self.group, self.vocabulary = group, Vocabulary(config.vocab_size, group)

    def __call__(self, x, arguments):
        """The loss of a Stream: see GPT2.loss."""
        x, y = self.ln_f(x)
        y, targets = ops.copy_to_group(y, self.group), arguments.targets
        return ops.unembed_cross_entropy(y, self.w, targets, arguments.scale, self.vocabulary, arguments.gradient)


class Block:
    """One layer: attention and MLP, each of which adds a branch to the residual stream."""

    def __init__(self, config, parameters, group, layer):
        self.layer, self.group, self.n_head = layer, group, config.n_head // group.size
        self.rotary = not config.learns_positions
        self.name, eps = f"h.{layer}", config.layer_norm_epsilon
        prefix = f"transformer.{self.name}"
        self.ln_1, self.ln_2 = (LayerNorm(parameters, f"{prefix}.{norm}", eps) for norm in ("ln_1", "ln_2"))
        # sizes on one rank; a group of p ranks divides 3C of qkv, 4C of the MLP, and C, the rows of attention_out
        self.qkv = weight_and_bias(parameters, f"{prefix}.attn.c_attn")  # (C, 3C), (3C)
        self.attention_out = weight_and_bias(parameters, f"{prefix}.attn.c_proj")  # (C, C), (C)
        self.mlp_in = weight_and_bias(parameters, f"{prefix}.mlp.c_fc")  # (C, 4C), (4C)
        self.mlp_out = weight_and_bias(parameters, f"{prefix}.mlp.c_proj")  # (4C, C), (C)

    def __call__(self, x, arguments=FIRST_TOKENS):
        x, y = self.ln_1(x)  # the same stream, and its LayerNorm: see stream.py
        x = x + self.attention(y, arguments)
        x, y = self.ln_2(x)
        return x + self.mlp(y, arguments)

    def attention(self, y, arguments):
        """y (B, T, C) -> the Branch of attention."""
        w, bias = self.attention_out
        y = ops.copy_to_group(y, self.group)
        if self.rotary:
            a = ops.rotary_attention(y, *self.qkv, self.n_head, arguments.position)  # (B, T, C / group.size)
        else:
            a = ops.attention(ops.linear(y, *self.qkv), self.n_head)
        return Branch(ops.reduce_from_group(ops.linear(a, w), self.group), bias)

    def mlp(self, y, arguments):
        """y (B, T, C) -> the Branch of the MLP."""
        w, bias = self.mlp_out
        h = ops.mlp(ops.copy_to_group(y, self.group), *self.mlp_in, w)  # gelu(y w1 + b1) w
        return Branch(ops.reduce_from_group(h, self.group), bias)


def weight_and_bias(parameters, name):
    return parameters[f"{name}.weight"], parameters[f"{name}.bias"]


class LayerNorm:
    """LayerNorm with the parameters `name`.weight and `name`.bias (Ba et al. 2016)."""

    def __init__(self, parameters, name, eps):
        (self.w, self.b), self.eps = weight_and_bias(parameters, name), eps

    def __call__(self, x):
        """x: a Stream -> (the same Stream, its LayerNorm, a Tensor (B, T, C)): see Stream.layernorm."""
        return x.layernorm(self.w, self.b, self.eps)


def initial_parameters(config, seed):
    """Yield (name, float32 array) of each parameter: GPT-2's initialisation (Radford et al. 2019), equal in all stages.

    Matrices: normal with standard deviation 0.02, or 0.02 / sqrt(2 n_layer) for projections into the residual stream.
    Biases: 0. LayerNorm weights: 1. Each parameter has its own random stream, seeded by (seed, index of the parameter).
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

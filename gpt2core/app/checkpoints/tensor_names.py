"""The tensors of model.safetensors: those of Hugging Face's GPT-2 or, with rotary positions, of its GPT-NeoX.

GPT-NeoX stores the same numbers under other names. Its weights have the shape (outputs, inputs), and the columns of
q, k and v are grouped by head: q, k and v of head 0, then those of head 1, and so on.
"""

# C channels, H heads, D = C // H

import re

import numpy as np

from gpt2core.architecture import parameter_shapes

# {our name of a module: GPT-NeoX's}, of the whole model and of a layer
MODULES = {
    "transformer.wte": "gpt_neox.embed_in",
    "transformer.ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
LAYER_MODULES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)")
# {positions: the prefix that some programs omit, of names that begin with these words}
PREFIXES = {
    "learned": ("transformer.", ("h.", "wte.", "wpe.", "ln_f.")),
    "rotary": ("gpt_neox.", ("layers.", "embed_in.", "final_layer_norm.")),
}


def stored_name(config, name):
    """The name in model.safetensors of a parameter of parameter_shapes(config)."""
    if config.learns_positions:
        return name
    module, kind = name.rsplit(".", 1)
    if inside := LAYER.fullmatch(module):
        return f"gpt_neox.layers.{inside[1]}.{LAYER_MODULES[inside[2]]}.{kind}"
    return f"{MODULES[module]}.{kind}"


def with_prefix(config, stored):
    """The name of a tensor with the prefix that some programs omit."""
    prefix, starts = PREFIXES[config.positions]
    return f"{prefix}{stored}" if stored.startswith(starts) else stored


def stored_shapes(config):
    """{name in model.safetensors: shape}."""
    return {
        stored_name(config, name): shape[::-1] if is_transposed(config, name) else shape
        for name, shape in parameter_shapes(config)
    }


def to_stored(config, parameters):
    """{name in model.safetensors: array} for {name of parameter_shapes(config): array}."""
    if config.learns_positions:
        return parameters
    stored = {}
    for name, array in parameters.items():
        if ".attn.c_attn." in name:
            array = regrouped(array, 3, config.n_head)
        stored[stored_name(config, name)] = array.T if is_transposed(config, name) else array
    return stored


def from_stored(config, stored):
    """The inverse of to_stored(); each array is contiguous. `stored` has the names and shapes of stored_shapes()."""
    if config.learns_positions:
        return stored
    parameters = {}
    for name, _ in parameter_shapes(config):
        array = stored[stored_name(config, name)]
        array = array.T if is_transposed(config, name) else array
        if ".attn.c_attn." in name:
            array = regrouped(array, config.n_head, 3)
        parameters[name] = np.ascontiguousarray(array)
    return parameters


def is_transposed(config, name):
    """Whether the file has the transposed matrix: those of the layers in GPT-NeoX."""
    return (
        not config.learns_positions
        and name.startswith("transformer.h.")
        and name.endswith(".weight")
        and (".ln_" not in name)
    )


def regrouped(array, outer, inner):
    """array (..., 3C), whose last axis is (outer, inner, D), with the columns in the order (inner, outer, D)."""
    return array.reshape(*array.shape[:-1], outer, inner, -1).swapaxes(-3, -2).reshape(array.shape)

"""Convert a GPT2Config to the config.json that Hugging Face uses for a GPT-2, and back."""

import numpy as np

from gpt2core.architecture import GPT2Config
from gpt2core.errors import CheckpointError, ConfigError

# {field of GPT2Config: field of config.json}
SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "n_positions"}
# {field of config.json that changes the model: supported values}. config_to_json() writes the first value.
SUPPORTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # three names of one tanh formula
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def config_to_json(config, dtype):
    """The content of Hugging Face's config.json for a GPT2Config, as a dict."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{field: values[0] for field, values in SUPPORTED.items()},
        **{field: getattr(config, name) for name, field in SIZES.items()},
        "n_ctx": config.block_size,
        "n_inner": None,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": np.dtype(dtype).name,
        "torch_dtype": np.dtype(dtype).name,  # name of the field `dtype` before transformers 4.56
    }


def config_from_json(values, path):
    """The GPT2Config for `values`, the dict of a config.json. path: the path of this file, for error messages.

    Raises CheckpointError for a size that is missing and for a value that is not supported, with the name of the field.
    """
    inner = 4 * values["n_embd"] if isinstance(values.get("n_embd"), int) else None  # the width of GPT-2's MLP
    for field, choices in (SUPPORTED | {"n_inner": (None, inner)}).items():
        value = values.get(field, None if field == "model_type" else choices[0])  # model_type has no default
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise CheckpointError(f"{path}: {field} is {value!r}, but only {supported} is supported")
    missing = [field for field in SIZES.values() if field not in values]
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}: the size of the model is unknown")
    tied, epsilon = values.get("tie_word_embeddings", True), values.get("layer_norm_epsilon", 1e-5)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{path}: tie_word_embeddings is {tied!r}, but it must be true or false")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path}: layer_norm_epsilon is {epsilon!r}, but it must be between 0 and 1")
    try:
        sizes = {name: values[field] for name, field in SIZES.items()}
        return GPT2Config(**sizes, tied=tied, layer_norm_epsilon=float(epsilon))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error

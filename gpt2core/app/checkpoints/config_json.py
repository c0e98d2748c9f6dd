"""Convert a GPT2Config to the config.json that Hugging Face uses for a GPT-2, or for a GPT-NeoX, and back.

A GPT-2 with rotary positions is a GPT-NeoX whose attention and MLP are computed one after the other (no "parallel
residual"), and in which all channels of a head are rotated.
"""

from typing import NamedTuple

import numpy as np

from gpt2core.architecture import GPT2Config
from gpt2core.errors import CheckpointError, ConfigError


class Form(NamedTuple):
    """The config.json of one model_type."""

    architecture: str  # the class of transformers
    positions: str  # of the GPT2Config
    sizes: dict  # {field of GPT2Config: field of config.json}
    supported: dict  # {field that changes the model: (its value if it is missing, supported values)}; writes the first
    inner: tuple  # (the field with the width of the MLP, 4 C; the other values that mean 4 C, or () for none)
    context: dict  # {another field of config.json: field of GPT2Config}, which is written, not read
    epsilon: str  # the field with the epsilon of LayerNorm
    tied: bool  # tie_word_embeddings if it is missing
    dropouts: tuple  # fields that are written as 0


TANH_GELU = "gelu_new", "gelu_pytorch_tanh", "gelu_fast"  # three names of one formula
FORMS = {  # {model_type: its Form}
    "gpt2": Form(
        architecture="GPT2LMHeadModel",
        positions="learned",
        sizes={name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "n_positions"},
        supported={
            "activation_function": (TANH_GELU[0], TANH_GELU),
            "scale_attn_weights": (True, (True,)),
            "scale_attn_by_inverse_layer_idx": (False, (False,)),
            "reorder_and_upcast_attn": (False, (False,)),
            "add_cross_attention": (False, (False,)),
        },
        inner=("n_inner", (None,)),
        context={"n_ctx": "block_size"},
        epsilon="layer_norm_epsilon",
        tied=True,
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"),
    ),
    "gpt_neox": Form(
        architecture="GPTNeoXForCausalLM",
        positions="rotary",
        sizes={
            "vocab_size": "vocab_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embd": "hidden_size",
            "block_size": "max_position_embeddings",
        },
        supported={
            "hidden_act": ("gelu", TANH_GELU),
            "use_parallel_residual": (True, (False,)),
            "attention_bias": (True, (True,)),
            "rotary_pct": (0.25, (1.0,)),
            "rotary_emb_base": (10000, (10000,)),
            "rope_scaling": (None, (None,)),
        },
        inner=("intermediate_size", ()),
        context={},
        epsilon="layer_norm_eps",
        tied=False,
        dropouts=("attention_dropout", "hidden_dropout"),
    ),
}


def config_to_json(config, dtype):
    """The content of Hugging Face's config.json for a GPT2Config, as a dict."""
    ((model_type, form),) = ((name, form) for name, form in FORMS.items() if form.positions == config.positions)
    field, others = form.inner
    return {
        "architectures": [form.architecture],
        "model_type": model_type,
        **{field: values[0] for field, (_, values) in form.supported.items()},
        **{field: getattr(config, name) for name, field in form.sizes.items()},
        **{field: getattr(config, name) for field, name in form.context.items()},
        field: others[0] if others else 4 * config.n_embd,
        form.epsilon: config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(form.dropouts, 0.0),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": np.dtype(dtype).name,
        "torch_dtype": np.dtype(dtype).name,  # name of the field `dtype` before transformers 4.56
    }


def config_from_json(values, path):
    """The GPT2Config for `values`, the dict of a config.json. path: the path of this file, for error messages.

    Raises CheckpointError for a size that is missing and for a value that is not supported, with the name of the field.
    """
    check_supported(path, "model_type", values.get("model_type"), tuple(FORMS))
    form, values = FORMS[values["model_type"]], with_older_names(values)
    field, others = form.inner
    width = values.get(form.sizes["n_embd"])
    inner = 4 * width if isinstance(width, int) else None  # the width of GPT-2's MLP
    for name, (default, choices) in (form.supported | {field: (None, (*others, inner))}).items():
        check_supported(path, name, values.get(name, default), choices)
    missing = [field for field in form.sizes.values() if field not in values]
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}: the size of the model is unknown")
    tied, epsilon = values.get("tie_word_embeddings", form.tied), values.get(form.epsilon, 1e-5)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{path}: tie_word_embeddings is {tied!r}, but it must be true or false")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path}: {form.epsilon} is {epsilon!r}, but it must be between 0 and 1")
    try:
        sizes = {name: values[field] for name, field in form.sizes.items()}
        return GPT2Config(**sizes, tied=tied, layer_norm_epsilon=float(epsilon), positions=form.positions)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_supported(path, field, value, choices):
    if value not in choices:
        supported = " or ".join(repr(choice) for choice in choices)
        raise CheckpointError(f"{path}: {field} is {value!r}, but only {supported} is supported")


def with_older_names(values):
    """`values` with the content of `rope_parameters`, of transformers 5, in the fields of GPT-NeoX before."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return values
    names = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    older = {names[name]: value for name, value in rope.items() if name in names}
    kind = rope.get("rope_type", "default")
    return values | older | {"rope_scaling": None if kind == "default" else kind}

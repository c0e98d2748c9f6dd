"""Read, check and write the files of one checkpoint step: configuration, weights, moments and state.

`transformers.GPT2LMHeadModel.from_pretrained` opens the directory: Hugging Face's names, (in, out) weight layout.
"""

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.model import GPT2Config, parameter_shapes

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
FILES = (CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE)
MOMENTS = ("exp_avg.", "exp_avg_sq.")  # PyTorch's names for Adam's first and second moment


@dataclass(frozen=True)
class Checkpoint:
    """One saved step. Every array is a writable float32 array in memory, not a view of the file."""

    path: Path  # the directory that holds the files, tokenizer.json included
    config: GPT2Config
    parameters: dict[str, np.ndarray]  # Hugging Face's names, in the order of parameter_shapes
    moments: dict[str, tuple[np.ndarray, np.ndarray]] | None  # name -> (first, second), shaped like the parameter
    state: dict | None


def write_step(directory, *, config, parameters, tokenizer=None, moments=None, state=None, dtype=np.float32):
    """Write all files of one step into the existing `directory` and flush them to disk.

    The arguments are those of checkpoint_directory.save_checkpoint. Raises OSError if a file cannot be written.
    """
    write_safetensors(directory / MODEL, parameters, dtype)
    write_json(directory / CONFIG, config_to_json(config, dtype))
    if tokenizer is not None:
        tokenizer.save(str(directory / TOKENIZER))
    if moments is not None:
        first, second = ({MOMENTS[i] + name: pair[i] for name, pair in moments.items()} for i in (0, 1))
        write_safetensors(directory / OPTIMIZER, first | second)
    if state is not None:
        write_json(directory / STATE, state)
    for path in (*directory.iterdir(), directory):
        fsync(path)


def read_step(step, with_optimizer):
    """The Checkpoint in the directory `step`; raises CheckpointError (see checkpoint_directory.load_checkpoint)."""
    config = config_from_json(step / CONFIG)
    path, parameters = read_parameters(step, config)
    if config.n_layer > len(parameters):  # checked first: a corrupted n_layer could give a billion names
        raise CheckpointError(f"{path}: {len(parameters)} tensors cannot be the {config.n_layer} layers of {CONFIG}")
    shapes = dict(parameter_shapes(config))
    check_shapes(path, {name: array.shape for name, array in parameters.items()}, shapes)
    if with_optimizer and not os.path.exists(step / OPTIMIZER):
        raise CheckpointError(
            f"{step / OPTIMIZER}: no such file, so no run can be resumed from here: start a new one with --init-from"
        )
    moments = read_moments(step / OPTIMIZER, shapes) if with_optimizer else None
    state = read_json(step / STATE) if with_optimizer or os.path.exists(step / STATE) else None
    return Checkpoint(step, config, {name: parameters[name] for name in shapes}, moments, state)


def fsync(path):
    """Flush a file or a directory to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- model.safetensors, optimizer.safetensors ---


def read_parameters(step, config):
    """(path for error messages, {name: array}) with Hugging Face's present names; without lm_head if it is tied."""
    path, tensors = read_model(step)
    parameters = {}
    for stored, array in tensors.items():
        if re.search(r"(^|\.)attn\.(bias|masked_bias)$", stored):
            continue  # the causal mask, which older versions of transformers saved as a buffer
        name = f"transformer.{stored}" if stored.startswith(("h.", "wte.", "wpe.", "ln_f.")) else stored
        if name in parameters:
            raise CheckpointError(f"{path}: {name} is stored twice, with and without the prefix: remove one of them")
        parameters[name] = array
    if config.tied and "lm_head.weight" in parameters:
        head, embedding = parameters.pop("lm_head.weight"), parameters.get("transformer.wte.weight")
        if embedding is None or not np.array_equal(head, embedding):
            raise CheckpointError(
                f"{path}: lm_head.weight differs from transformer.wte.weight, but {CONFIG} has "
                "tie_word_embeddings true: set it to false to use both, or remove lm_head.weight"
            )
    return path, parameters


def read_model(step):
    """(path for error messages, {stored name: array}) of model.safetensors or of all its shards."""
    index = step / f"{MODEL}.index.json"
    if not os.path.exists(step / MODEL) and os.path.exists(index):
        return index, read_shards(step, index)
    with checkpoint_errors(step):  # a concurrent writer may have removed the directory
        pickled = not os.path.exists(step / MODEL) and any(step.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{step}: holds only pytorch_model.bin, a pickle, which is not read because it can run code: convert it "
            f"with transformers, GPT2LMHeadModel.from_pretrained({str(step)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    return step / MODEL, read_safetensors(step / MODEL)


def read_shards(step, index):
    """{stored name: array} of all files that the `index` lists."""
    with checkpoint_errors(index):
        tensors = {}
        for name in sorted(set(read_json(index)["weight_map"].values())):
            if name != os.path.basename(name):
                raise ValueError(f"{name!r} is not a file name in the same directory")
            shard = read_safetensors(step / name)
            if repeated := sorted(tensors.keys() & shard.keys()):
                raise ValueError(f"{first_three(repeated)} is in {name} and in another file")
            tensors |= shard
        return tensors


def read_moments(path, shapes):
    """{name: (first, second moment)}, each with the shape of the parameter; raises CheckpointError."""
    tensors = read_safetensors(path)
    expected = {moment + name: shape for moment in MOMENTS for name, shape in shapes.items()}
    check_shapes(path, {name: array.shape for name, array in tensors.items()}, expected)
    return {name: tuple(tensors[moment + name] for moment in MOMENTS) for name in shapes}


def check_shapes(path, found, expected):
    """Raise CheckpointError unless `found` has exactly the names and shapes of `expected` ({name: shape})."""
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in found]
    extra = [f"{name} {shape}" for name, shape in found.items() if name not in expected]
    wrong = [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    groups = (("missing: ", missing), ("not of this model: ", extra), ("wrong shape: ", wrong))
    if missing or extra or wrong:
        listed = "; ".join(title + first_three(names) for title, names in groups if names)
        raise CheckpointError(f"{path}: the tensors are not those of the model's configuration: {listed}")


def first_three(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # dtypes that can be read


def write_safetensors(path, tensors, dtype=np.float32):
    """Write {name: array} as `dtype`: float32 (contiguous float32 arrays are not copied) or float16."""
    if np.dtype(dtype) not in (np.float32, np.float16):
        raise CheckpointError(f"{path}: cannot store {np.dtype(dtype)}: choose float32 or float16")
    stored = {}
    for name, array in tensors.items():
        try:
            with np.errstate(over="raise"):
                stored[name] = np.ascontiguousarray(array, dtype)
        except FloatingPointError as error:
            raise CheckpointError(f"{path}: {name} has values too large for {np.dtype(dtype)}: use float32") from error
    try:
        save_file(stored, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library raises it for a full disk too
        raise OSError(str(error)) from error


def read_safetensors(path):
    """{name: float32 array} of a file whose tensors are float32, float16 or bfloat16.

    The file is read, not memory-mapped: if it were truncated while mapped, a bus error would kill this process.
    """
    with checkpoint_errors(path):
        tensors = {}
        for name, entry in deserialize(Path(path).read_bytes()):
            if not name.isprintable():
                raise ValueError(f"{name!r} is not a tensor name")
            if entry["dtype"] not in STORED:
                raise CheckpointError(
                    f"{path}: {name} is stored as {entry['dtype']!r}: save it as one of {list(STORED)}"
                )
            array = np.frombuffer(entry["data"], STORED[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = widen(array) if array.dtype == np.uint16 else array.astype(np.float32)
        return tensors


def widen(array):
    """bfloat16 -> float32; `array` holds the bits as uint16, because NumPy has no bfloat16.

    A bfloat16 is the upper half of a float32.
    """
    bits = array.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


# --- config.json, state.json ---

SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "n_positions"}
# Fields of Hugging Face's configuration that change the model, with the values that are supported. The first value is
# the one written.
ALLOWED = {
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
        **{field: allowed[0] for field, allowed in ALLOWED.items()},
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "n_ctx": config.block_size,
        "n_inner": None,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": np.dtype(dtype).name,
        "torch_dtype": np.dtype(dtype).name,  # the field's name before transformers 4.56
    }


def config_from_json(path):
    """The GPT2Config of a config.json; raises CheckpointError, naming the field, for any other model."""
    values = read_json(path)
    allowed = ALLOWED | {"n_inner": (None, 4 * values["n_embd"] if isinstance(values.get("n_embd"), int) else None)}
    for field, choices in allowed.items():
        value = values.get(field, None if field == "model_type" else choices[0])
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise CheckpointError(f"{path}: {field} is {value!r}, but only {supported} is supported")
    missing = [theirs for theirs in SIZES.values() if theirs not in values]
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}: the size of the model is unknown")
    tied, epsilon = values.get("tie_word_embeddings", True), values.get("layer_norm_epsilon", 1e-5)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{path}: tie_word_embeddings is {tied!r}, but it must be true or false")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path}: layer_norm_epsilon is {epsilon!r}, but it must be between 0 and 1")
    try:
        sizes = {ours: values[theirs] for ours, theirs in SIZES.items()}
        return GPT2Config(**sizes, tied=tied, layer_norm_epsilon=float(epsilon))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def write_json(path, values):
    def plain(value):  # a NumPy float32 is exact as a double, and JSON keeps every bit of a double
        return value.tolist() if isinstance(value, np.generic | np.ndarray) else os.fspath(value)

    path.write_text(json.dumps(values, indent=2, default=plain) + "\n", encoding="utf-8")


def read_json(path):
    """The JSON object in a file, as a dict; raises CheckpointError."""
    with checkpoint_errors(path):
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"not a JSON object but {type(values).__name__}")
        return values


@contextlib.contextmanager
def checkpoint_errors(path):
    """Convert errors from missing, truncated or corrupted files to CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}: use a complete checkpoint") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: is truncated or corrupted ({error}): use another copy") from error

"""Read, check and write the files of one checkpoint, the directory `step`: configuration, weights, moments and state.

`transformers.AutoModelForCausalLM.from_pretrained` opens the directory, because the tensors have the names and shapes
of Hugging Face's GPT-2 or, with rotary positions, of its GPT-NeoX (tensor_names.py).
"""

import contextlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2core.app.checkpoints.config_json import config_from_json, config_to_json
from gpt2core.app.checkpoints.digests import sha256, split_digests, with_digests
from gpt2core.app.checkpoints.safetensors_file import read_safetensors, write_safetensors
from gpt2core.app.checkpoints.tensor_names import from_stored, stored_name, stored_shapes, to_stored, with_prefix
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.errors import CheckpointError, counted
from gpt2core.text.input_file import read_file
from gpt2core.text.tokenizer import LARGEST

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
LARGEST_JSON = 1 << 26  # bytes of config.json, state.json or an index of shards
FILES = (CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE)
MOMENTS = ("exp_avg.", "exp_avg_sq.")  # name prefixes: PyTorch's names for Adam's first and second moment
# causal masks of any dtype, and the frequencies of rotary positions, saved by older versions of transformers
MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Checkpoint:
    """One saved checkpoint. Every array is a writable float32 array in memory, not a view of the file."""

    path: Path  # the directory that holds the files, tokenizer.json included
    config: GPT2Config
    parameters: dict[str, np.ndarray]  # Hugging Face's names, in the order of parameter_shapes
    moments: dict[str, tuple[np.ndarray, np.ndarray]] | None  # name -> (first, second), shaped like the parameter
    state: dict | None  # the content of state.json without its two fields of SHA-256; None: there is no such file
    edited: tuple[str, ...] = ()  # names of the files changed after they were saved; always empty without accept_edited


def write_step(directory, *, config, parameters, tokenizer=None, moments=None, state=None, dtype=np.float32):
    """Write all files of one step into the existing `directory` and flush them to disk.

    The arguments are those of directory.save_checkpoint. Raises OSError if a file cannot be written.
    """
    with ThreadPoolExecutor(1) as pool:  # this thread and that of the pool each hash and write one file
        if moments is not None:
            first, second = ({MOMENTS[i] + name: pair[i] for name, pair in moments.items()} for i in (0, 1))
            writing = pool.submit(write_safetensors, directory / OPTIMIZER, first | second)
        digests = {MODEL: write_safetensors(directory / MODEL, to_stored(config, parameters), dtype)}
    if moments is not None:
        digests[OPTIMIZER] = writing.result()
    digests[CONFIG] = write_json(directory / CONFIG, config_to_json(config, dtype))
    if tokenizer is not None:
        tokenizer.save(str(directory / TOKENIZER))
        digests[TOKENIZER] = sha256((directory / TOKENIZER).read_bytes())
    if state is not None:
        write_json(directory / STATE, with_digests(json.loads(to_json(state)), digests))
    for path in (*directory.iterdir(), directory):
        fsync(path)


def read_step(step, with_optimizer, accept_edited=False):
    """The Checkpoint in the directory `step`; raises CheckpointError (see directory.load_checkpoint)."""
    for path in (step / name for name in FILES):
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading a named pipe would never end
            raise CheckpointError(f"{path}: is a pipe or a device, not a file: use another copy")
    digests = {}  # {file name: SHA-256 of the bytes that were read}
    config = config_from_json(read_json(step / CONFIG, digests), step / CONFIG)
    with ThreadPoolExecutor(1) as pool:  # this thread and that of the pool each read and hash one file
        reading = pool.submit(read_moments, step / OPTIMIZER, digests) if with_optimizer else None
        path, stored = read_parameters(step, config, digests)
        if config.n_layer > len(stored):  # checked before parameter_shapes(), which makes names for each layer
            raise CheckpointError(
                f"{path}: {len(stored)} tensors cannot be {counted(config.n_layer, 'layer')} of {CONFIG}"
            )
        shapes = dict(parameter_shapes(config))
        check_tensors(path, stored, stored_shapes(config))
        parameters = from_stored(config, stored)
    moments = moments_of(step / OPTIMIZER, reading.result(), shapes) if with_optimizer else None
    state = edited = None
    if with_optimizer or os.path.exists(step / STATE):
        state, edited = read_state(step, digests)
    if edited and not accept_edited:
        raise CheckpointError(
            f"{step / edited[0]}: was changed after it was saved (its SHA-256 is not the one in {STATE}): use another "
            f"copy, or add --accept-edited if you changed it"
        )
    return Checkpoint(step, config, {name: parameters[name] for name in shapes}, moments, state, tuple(edited or ()))


def moments_of(path, tensors, shapes):
    """{name: (first, second) moment} from the tensors of the file `path`; shapes: {name: shape} of the parameters."""
    check_tensors(path, tensors, {moment + name: shapes[name] for moment in MOMENTS for name in shapes})
    return {name: tuple(tensors[moment + name] for moment in MOMENTS) for name in shapes}


def read_state(step, digests):
    """(the run's state, a list of the names of the files that were changed after they were saved).

    A file was changed if its SHA-256 is not the one in state.json. The list is empty if state.json has no SHA-256.
    digests: {file name: SHA-256} of the other files that were read.
    """
    state, recorded, state_unchanged = split_digests(read_json(step / STATE, {}))
    if recorded is None:
        return state, []
    if os.path.exists(step / TOKENIZER):
        with checkpoint_errors(step / TOKENIZER):
            digests[TOKENIZER] = sha256(read_file(step / TOKENIZER, LARGEST))
    changed = [name for name in digests if digests[name] != recorded.get(name)]
    return state, changed if state_unchanged else [STATE, *changed]


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
# These functions add the SHA-256 of each file that they read to the dict `digests`: {file name: SHA-256}.


def read_parameters(step, config, digests):
    """(path for error messages, {stored name: array}).

    Adds a missing prefix `transformer.` or `gpt_neox.`; omits the matrix of the logits if config.tied.
    """
    path, tensors = read_model(step, digests)
    parameters = {}
    for stored, array in tensors.items():
        name = with_prefix(config, stored)
        if name in parameters:
            raise CheckpointError(f"{path}: {name} is stored twice, with and without the prefix: remove one of them")
        parameters[name] = array
    head, table = (stored_name(config, name) for name in ("lm_head.weight", "transformer.wte.weight"))
    if config.tied and head in parameters:
        matrix, embedding = parameters.pop(head), parameters.get(table)
        if embedding is not None and not np.array_equal(matrix, embedding):
            raise CheckpointError(
                f"{path}: {head} differs from {table}, but {CONFIG} has "
                f"tie_word_embeddings true: set it to false to use both, or remove {head}"
            )
    return path, parameters


def read_model(step, digests):
    """(path for error messages, {stored name: array}) of model.safetensors or of all its shards.

    A large model of transformers is divided into several files, the shards; model.safetensors.index.json lists them.
    """
    index = step / f"{MODEL}.index.json"
    if not os.path.exists(step / MODEL) and os.path.exists(index):
        return index, read_shards(step, index, digests)
    with checkpoint_errors(step):  # a concurrent writer may have removed the directory
        pickled = not os.path.exists(step / MODEL) and any(step.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{step}: holds only pytorch_model.bin, a pickle, which is not read because it can run code: convert it "
            f"with transformers, GPT2LMHeadModel.from_pretrained({str(step)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    return step / MODEL, read_tensors(step / MODEL, digests)


def read_shards(step, index, digests):
    """{stored name: array} of all files that the `index` lists."""
    with checkpoint_errors(index):
        tensors = {}
        for name in sorted(set(read_json(index, digests)["weight_map"].values())):
            if name != os.path.basename(name):
                raise ValueError(f"{name!r} is not a file name in the same directory")
            shard = read_tensors(step / name, digests)
            if repeated := sorted(tensors.keys() & shard.keys()):
                raise ValueError(f"{first_three(repeated)} is in {name} and in another file")
            tensors |= shard
        return tensors


def read_moments(path, digests):
    """{stored name: array} of optimizer.safetensors; raises CheckpointError."""
    if not os.path.exists(path):
        raise CheckpointError(
            f"{path}: no such file, so no run can be resumed from here: start a new run with its weights"
        )
    tensors = read_tensors(path, digests)
    for name, array in tensors.items():
        if name.startswith(MOMENTS[1]) and array.size and array.min() < 0:
            raise CheckpointError(f"{path}: {name} has a negative value, but it is a mean of squares: use another copy")
    return tensors


def read_tensors(path, digests):
    """{stored name: float32 array} of a safetensors file, without causal masks (see MASK).

    Raises CheckpointError, also for values that are not finite.
    """
    with checkpoint_errors(path):
        tensors, digests[path.name] = read_safetensors(path, MASK)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"{path}: {name} has a value that is NaN or infinite: use another copy")
    return tensors


def check_tensors(path, tensors, shapes):
    """check_shapes() for a dict of arrays."""
    check_shapes(path, {name: array.shape for name, array in tensors.items()}, shapes)


def check_shapes(path, found, expected):
    """Raise CheckpointError unless the {name: shape} of `found` and of `expected` are equal."""
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
    """The first three of `names` and the number of the others, as text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- config.json and state.json ---


def write_json(path, values):
    """Write `values` as JSON; returns the SHA-256 of the file."""
    text = to_json(values).encode("utf-8")
    path.write_bytes(text)
    return sha256(text)


def to_json(values):
    """`values` as JSON text; they may contain NumPy numbers, NumPy arrays and Paths."""

    def plain(value):  # converts a float32 to a double without a rounding error, and JSON keeps all bits of a double
        return value.tolist() if isinstance(value, np.generic | np.ndarray) else os.fspath(value)

    return json.dumps(values, indent=2, default=plain) + "\n"


def read_json(path, digests):
    """The JSON object in a file, as a dict; adds the file's SHA-256 to `digests`; raises CheckpointError."""
    with checkpoint_errors(path):
        data = read_file(path, LARGEST_JSON)
        values, digests[path.name] = json.loads(data), sha256(data)
        if not isinstance(values, dict):
            raise ValueError(f"not a JSON object but {type(values).__name__}")
        return values


@contextlib.contextmanager
def checkpoint_errors(path):
    """In this context, convert errors from missing, truncated or corrupted files to CheckpointError with `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}: use a complete checkpoint") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: is truncated or corrupted ({error}): use another copy") from error

"""A checkpoint is a directory that Hugging Face opens, and `--out DIR` is never without a complete one.

DIR/step-00000040/   config.json  model.safetensors  tokenizer.json  optimizer.safetensors  state.json
DIR/latest           -> step-00000040, swapped in one rename once every byte of it is on disk
DIR/config.json ...  -> latest/config.json ..., so that `from_pretrained(DIR)` always sees the newest step

Where symbolic links cannot be made, `latest` is a text file with the name of the step: everything here follows it,
other programs open DIR/step-00000040 itself. A directory has one writer at a time and any number of readers.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.model import GPT2Config, parameter_shapes

LATEST, CONFIG, MODEL, TOKENIZER = "latest", "config.json", "model.safetensors", "tokenizer.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
STEP = re.compile(r"step-\d{8,}")
HIDDEN = re.compile(r"\.[\w.-]+\.[0-9a-f]{8}\.partial")  # our names for what is not, or no longer, a checkpoint
MOMENTS = ("exp_avg.", "exp_avg_sq.")  # PyTorch's names for Adam's first and second moment


@dataclass(frozen=True)
class Checkpoint:
    """One step as it was saved; every array is float32, writable and the reader's own."""

    path: Path  # the directory that holds the files, tokenizer.json among them
    config: GPT2Config
    parameters: dict[str, np.ndarray]  # Hugging Face's names, in the order of parameter_shapes
    moments: dict[str, tuple[np.ndarray, np.ndarray]] | None  # name -> (first, second), shaped like the parameter
    state: dict | None


def save_checkpoint(
    directory, step, *, config, parameters, tokenizer=None, moments=None, state=None, keep=2, dtype=np.float32
):
    """Write directory/step-XXXXXXXX, swap `latest` to it, remove all but the `keep` newest steps; return its Path.

    `parameters` maps each name of parameter_shapes(config) to an array (views are fine: nothing is copied whole),
    stored as `dtype`, float32 or float16. `moments` maps the same names to (first, second), stored as float32.
    `tokenizer` has `save(path)`. `state` is a dict for JSON, whose floats come back bit for bit. `keep=0` keeps all.
    The newest steps are those written last, so that a run begun again from an early step keeps its own.
    A crash at any moment leaves `directory` readable; raises CheckpointError where something cannot be written.
    """
    directory = writable_directory(directory)
    shapes = dict(parameter_shapes(config))
    _check_shapes(directory, {name: array.shape for name, array in parameters.items()}, shapes)
    for which in (0, 1) if moments is not None else ():
        _check_shapes(directory, {name: pair[which].shape for name, pair in moments.items()}, shapes)
    final = directory / f"step-{step:08d}"
    temporary = _hidden(final)
    _sweep(directory)
    try:
        temporary.mkdir()
        write_safetensors(temporary / MODEL, parameters, dtype)
        _write_json(temporary / CONFIG, _config_to_json(config, dtype))
        if tokenizer is not None:
            tokenizer.save(str(temporary / TOKENIZER))
        if moments is not None:
            first, second = ({MOMENTS[i] + name: pair[i] for name, pair in moments.items()} for i in (0, 1))
            write_safetensors(temporary / OPTIMIZER, first | second)
        if state is not None:
            _write_json(temporary / STATE, state)
        for path in (*temporary.iterdir(), temporary):
            _fsync(path)
        if final.is_dir():
            _make_way(directory, final)
        os.rename(temporary, final)
        _fsync(directory)  # the step before the link to it, or a power cut could leave the link alone
        _point(directory / LATEST, final.name)
        _link_files(directory)
        _fsync(directory)
        _prune(directory, keep)
    except OSError as error:
        raise CheckpointError(
            f"{final}: cannot save this checkpoint ({error.strerror or error}): free space or choose another "
            f"directory; the earlier checkpoints in {directory} are as they were"
        ) from error
    finally:
        _sweep(directory)
    return final


def load_checkpoint(path, *, with_optimizer=False):
    """Read the checkpoint that `path` names (see resolve_checkpoint); return a Checkpoint.

    Weights may be stored as float32, float16 or bfloat16, with or without the `transformer.` prefix, sharded or not.
    `with_optimizer` asks for all that a resumed run needs: optimizer.safetensors and state.json; `moments` is None
    otherwise. Raises CheckpointError, with the file's path, for whatever is missing, corrupted or of another model.
    """
    for _ in range(10):  # again where a writer removed or replaced the step between two of its files
        step = resolve_checkpoint(path)
        identity = _identity(step)
        try:
            checkpoint = _load(step, with_optimizer)
            if _identity(step) == identity:
                return checkpoint
        except CheckpointError:
            if resolve_checkpoint(path) == step and _identity(step) == identity:
                raise
    raise CheckpointError(f"{path}: was replaced each time that it was read: try again when its writer is done")


def newest_step(directory):
    """The newest complete step of an `--out` directory, as a Path, or None: the one that was written last."""
    return _latest(Path(directory)) or next(iter(_steps(Path(directory))), None)


def resolve_checkpoint(path):
    """The one directory to read: the newest complete step of an `--out` directory, else `path` itself, as a Path.

    Where `latest` is missing or leads nowhere, the step that was written last. Raises CheckpointError.
    """
    path = Path(path)
    if not os.path.isdir(path):
        what = "is a file, not a directory" if os.path.exists(path) else "does not exist"
        raise CheckpointError(f"{path}: {what}: give a checkpoint directory, or the --out directory of a run")
    if path.name == LATEST and path.is_symlink():
        path = path.parent  # followed once, here: the link may move on between two files
    with _reading(path):
        newest = newest_step(path)
    if newest:
        return newest
    if not os.path.exists(path / CONFIG):
        raise CheckpointError(f"{path}: holds neither {CONFIG} nor a step-XXXXXXXX directory: it is not a checkpoint")
    return path


def writable_directory(path):
    """Create `path` and prove that checkpoints can be written there, before any training; return it as a Path.

    Raises CheckpointError, also when files of ours would have to replace somebody else's.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = _hidden(path / LATEST)
        probe.write_bytes(b"probe")
        probe.unlink()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot write checkpoints here ({getattr(error, 'strerror', None) or error}): "
            "choose another directory"
        ) from error
    for name in (CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE):
        if os.path.exists(path / name) and not (path / name).is_symlink():
            raise CheckpointError(
                f"{path / name}: this file was not written by a run with this output directory, and would hide its "
                "checkpoints from other programs: choose another directory"
            )
    return path


# --- what a directory of steps looks like while it changes ---


def _hidden(path):
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.partial")


def _fsync(path):
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link, target):
    """Make `link` lead to `target` in one rename, as a symbolic link or, where there are none, as a text file."""
    temporary = _hidden(link)
    try:
        os.symlink(target, temporary)
    except (OSError, NotImplementedError):
        temporary.write_text(target + "\n", encoding="utf-8")
        _fsync(temporary)
    os.replace(temporary, link)


def _latest(directory):
    """The directory that `latest` leads to, or None."""
    link = directory / LATEST
    try:
        name = os.readlink(link) if link.is_symlink() else link.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return directory / name if name and os.path.isdir(directory / name) else None


def _identity(directory):
    """What tells a directory from another that took its name; None when there is none."""
    try:
        stat = os.stat(directory)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _steps(directory):
    """Complete steps, the one written last first; a step is complete when it has its name, weights included."""

    def written(step):
        try:
            return os.stat(step / MODEL).st_mtime_ns
        except OSError:
            return 0

    steps = [(written(path), path) for path in directory.iterdir() if STEP.fullmatch(path.name)]
    return [path for time, path in sorted(steps, reverse=True) if time]


def _make_way(directory, final):
    """Free the name of a step that is saved again; no rename replaces a directory that holds files.

    Readers of `latest` follow a twin of hard links meanwhile: it costs no space and is swept when they are past it.
    """
    if _latest(directory) == final:
        twin = _hidden(final)
        twin.mkdir()
        for path in filter(Path.is_file, final.iterdir()):
            try:
                os.link(path, twin / path.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, twin / path.name)
                _fsync(twin / path.name)
        _fsync(twin)
        _point(directory / LATEST, twin.name)
    os.rename(final, _hidden(final))


def _link_files(directory):
    for name in (CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE):
        link, there = directory / name, os.path.exists(directory / LATEST / name)
        if there and not link.is_symlink() and (directory / LATEST).is_symlink():
            _point(link, f"{LATEST}/{name}")
        elif link.is_symlink() and not there:
            link.unlink()


def _prune(directory, keep):
    latest = _latest(directory)
    for step in _steps(directory)[keep:] if keep > 0 else ():
        if step != latest:
            with contextlib.suppress(OSError):  # an old step that stays does no harm
                os.rename(step, _hidden(step))  # hidden first: no reader meets half of it; the sweep removes it


def _sweep(directory):
    """Remove what crashed runs left behind, except where `latest` still leads there."""
    latest = _latest(directory)
    with contextlib.suppress(OSError):
        for path in list(directory.iterdir()):
            if HIDDEN.fullmatch(path.name) and path != latest:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


# --- reading one step ---


def _load(step, with_optimizer):
    config = _config_from_json(step / CONFIG)
    weights, tensors = _read_weights(step)
    parameters = {}
    for stored, array in tensors.items():
        if re.search(r"(^|\.)attn\.(bias|masked_bias)$", stored):
            continue  # the causal mask, which older versions of transformers saved as a buffer
        name = f"transformer.{stored}" if stored.startswith(("h.", "wte.", "wpe.", "ln_f.")) else stored
        if name in parameters:
            raise CheckpointError(f"{weights}: {name} is there twice, with and without the prefix: remove one of them")
        parameters[name] = array
    if config.tied and "lm_head.weight" in parameters:
        head, embedding = parameters.pop("lm_head.weight"), parameters.get("transformer.wte.weight")
        if embedding is None or not np.array_equal(head, embedding):
            raise CheckpointError(
                f"{weights}: lm_head.weight differs from transformer.wte.weight, but {CONFIG} has "
                "tie_word_embeddings true: set it to false to use both, or remove lm_head.weight"
            )
    if config.n_layer > len(parameters):  # before a corrupted number makes a list of a billion names
        raise CheckpointError(f"{weights}: {len(parameters)} tensors cannot be the {config.n_layer} layers of {CONFIG}")
    shapes = dict(parameter_shapes(config))
    _check_shapes(weights, {name: array.shape for name, array in parameters.items()}, shapes)
    if with_optimizer and not os.path.exists(step / OPTIMIZER):
        raise CheckpointError(
            f"{step / OPTIMIZER}: no such file, so no run can be resumed here: start a new one from these weights"
        )
    moments = _read_moments(step / OPTIMIZER, shapes) if with_optimizer else None
    state = _read_json(step / STATE) if with_optimizer or os.path.exists(step / STATE) else None
    return Checkpoint(step, config, {name: parameters[name] for name in shapes}, moments, state)


def _read_weights(step):
    """(the path to name in errors, {stored name: array}) of model.safetensors or of all its shards."""
    index = step / f"{MODEL}.index.json"
    if not os.path.exists(step / MODEL) and os.path.exists(index):
        with _reading(index):
            tensors = {}
            for name in sorted(set(_read_json(index)["weight_map"].values())):
                if name != os.path.basename(name):
                    raise ValueError(f"{name!r} is not a file beside it")
                shard = read_safetensors(step / name)
                if twice := sorted(tensors.keys() & shard.keys()):
                    raise ValueError(f"{_some(twice)} is in {name} and in another file")
                tensors |= shard
            return index, tensors
    with _reading(step):  # a writer may have removed it a moment ago
        pickled = not os.path.exists(step / MODEL) and any(step.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{step}: holds only pytorch_model.bin, a pickle, which could run code and is not read here: convert it "
            f"with transformers, GPT2LMHeadModel.from_pretrained({str(step)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    return step / MODEL, read_safetensors(step / MODEL)


def _read_moments(path, shapes):
    tensors = read_safetensors(path)
    expected = {moment + name: shape for moment in MOMENTS for name, shape in shapes.items()}
    _check_shapes(path, {name: array.shape for name, array in tensors.items()}, expected)
    return {name: tuple(tensors[moment + name] for moment in MOMENTS) for name in shapes}


def _check_shapes(path, found, expected):
    """Every name of `expected` is in `found` with its shape, and no other; both map names to tuples."""
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in found]
    extra = [f"{name} {shape}" for name, shape in found.items() if name not in expected]
    wrong = [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    groups = (("missing: ", missing), ("not of this model: ", extra), ("wrong shape: ", wrong))
    if missing or extra or wrong:
        listed = "; ".join(what + _some(names) for what, names in groups if names)
        raise CheckpointError(f"{path}: the tensors are not those of the model's configuration: {listed}")


def _some(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- config.json, state.json ---

SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "n_positions"}
# The fields of Hugging Face that can make another model of it, with the values that are this one; the first is written.
ONLY = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # three names of one tanh formula
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def _config_to_json(config, dtype):
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{field: allowed[0] for field, allowed in ONLY.items()},
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "n_ctx": config.block_size,
        "n_inner": None,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": np.dtype(dtype).name,
        "torch_dtype": np.dtype(dtype).name,  # the same to transformers before 4.56
    }


def _config_from_json(path):
    values = _read_json(path)
    allowed = ONLY | {"n_inner": (None, 4 * values["n_embd"] if isinstance(values.get("n_embd"), int) else None)}
    for field, choices in allowed.items():
        value = values.get(field, None if field == "model_type" else choices[0])
        if value not in choices:
            expressed = " or ".join(repr(choice) for choice in choices)
            raise CheckpointError(f"{path}: {field} is {value!r}, but this model can only be {expressed}")
    missing = [theirs for theirs in SIZES.values() if theirs not in values]
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}: it does not say how large the model is")
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


def _write_json(path, values):
    def plain(value):  # a NumPy float32 is exact as a double, and doubles come back from JSON as they were
        return value.tolist() if isinstance(value, np.generic | np.ndarray) else os.fspath(value)

    path.write_text(json.dumps(values, indent=2, default=plain) + "\n", encoding="utf-8")


def _read_json(path):
    with _reading(path):
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"not a JSON object but {type(values).__name__}")
        return values


@contextlib.contextmanager
def _reading(path):
    """What bytes that nobody vouches for can raise, as one CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}: use a complete checkpoint") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: is truncated or corrupted ({error}): use another copy") from error


# --- safetensors ---

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_safetensors(path, tensors, dtype=np.float32):
    """Write {name: array} as `dtype`, float32 (contiguous arrays of it are not copied) or float16."""
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
    except SafetensorError as error:  # the library's word for a full disk too
        raise OSError(str(error)) from error


def read_safetensors(path):
    """{name: float32 array} of a file whose tensors are float32, float16 or bfloat16.

    The file is read, not mapped: a mapped one kills the process with a bus error when somebody writes over it.
    """
    with _reading(path):
        tensors = {}
        for name, entry in deserialize(Path(path).read_bytes()):
            if not name.isprintable():
                raise ValueError(f"no tensor is called {name!r}")
            if entry["dtype"] not in STORED:
                raise CheckpointError(
                    f"{path}: {name} is stored as {entry['dtype']!r}: save it as one of {list(STORED)}"
                )
            array = np.frombuffer(entry["data"], STORED[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = _widen(array) if array.dtype == np.uint16 else array.astype(np.float32)
        return tensors


def _widen(array):
    """bfloat16, which NumPy lacks, is the upper half of a float32; `array` holds its bits as uint16."""
    bits = array.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)

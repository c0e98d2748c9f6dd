"""Checkpoints: exact round trip, readable by transformers, complete at every instant, clear errors."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from gpt2core.app.checkpoints.directory import (
    load_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
    writable_directory,
)
from gpt2core.app.checkpoints.files import read_tensors
from gpt2core.app.checkpoints.safetensors_file import write_safetensors
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
FILES = {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors", "state.json"}


class Tokenizer:
    """Stands for any object with save(path)."""

    def save(self, path):
        Path(path).write_text('{"version": "1.0"}')


def read(path):
    """{name: array} of a safetensors file."""
    return read_tensors(path, {})


def random_config(rng, tied=False):
    n_head = int(rng.integers(1, 4))
    return GPT2Config(int(rng.integers(5, 40)), int(rng.integers(4, 20)), 2, n_head, 4 * n_head, tied, 1e-6)


def random_arrays(config, rng):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(config)}


def save_all(directory, step, config, rng, **options):
    """Save a random training checkpoint; return what was saved."""
    parameters, first, second = (random_arrays(config, rng) for _ in range(3))
    moments = {name: (first[name], second[name] ** 2) for name in parameters}
    state = {"step": step, "loss": float(rng.standard_normal()), "rate": np.float32(rng.random()), "seed": 2**70}
    arguments = {"tokenizer": Tokenizer(), "moments": moments, "state": state} | options
    save_checkpoint(directory, step, config=config, parameters=parameters, **arguments)
    return parameters, moments, state


def assert_same(got, want):
    assert sorted(got) == sorted(want)
    for name in want:
        assert got[name].dtype == np.float32
        assert got[name].tobytes() == np.asarray(want[name]).tobytes(), name  # bit for bit


def hidden_names(directory):
    return [path.name for path in Path(directory).iterdir() if path.name.startswith(".")]


def step_names(directory):
    return sorted(path.name for path in Path(directory).iterdir() if path.name.startswith("step-"))


# --- round trip ---


@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_keeps_every_bit(tmp_path, rng, tied):
    config = random_config(rng, tied)
    parameters, moments, state = save_all(tmp_path, 40, config, rng)
    for path in (tmp_path, tmp_path / "latest", tmp_path / "step-00000040"):
        got = load_checkpoint(path, with_optimizer=True)
        assert got.path == tmp_path / "step-00000040" and got.config == config
        assert_same(got.parameters, parameters)
        for which in (0, 1):
            assert_same({n: m[which] for n, m in got.moments.items()}, {n: m[which] for n, m in moments.items()})
        assert got.state == state  # floats too, with ==
    assert load_checkpoint(tmp_path).moments is None


def test_views_strides_and_other_dtypes_are_saved_by_value(tmp_path, rng):
    config = random_config(rng)
    parameters = {n: np.asfortranarray(a.astype(np.float64)) for n, a in random_arrays(config, rng).items()}
    arena = np.concatenate([a.ravel() for a in parameters.values()])
    save_checkpoint(tmp_path, 1, config=config, parameters=parameters)
    assert_same(load_checkpoint(tmp_path).parameters, {n: a.astype(np.float32) for n, a in parameters.items()})
    offset = np.cumsum([0] + [a.size for a in parameters.values()])
    views = {n: arena[i : i + a.size].reshape(a.shape) for i, (n, a) in zip(offset, parameters.items(), strict=False)}
    save_checkpoint(tmp_path, 2, config=config, parameters=views)
    assert_same(load_checkpoint(tmp_path).parameters, {n: a.astype(np.float32) for n, a in views.items()})


def test_loaded_arrays_and_the_file_are_independent(tmp_path, rng):
    parameters, _, _ = save_all(tmp_path, 1, random_config(rng), rng)
    got = load_checkpoint(tmp_path).parameters
    (tmp_path / "model.safetensors").write_bytes(b"")  # a mapped file would now kill the process
    assert_same(got, parameters)
    for array in got.values():
        array += 1


def test_sixteen_bit_weights_are_rounded_once_and_declared(tmp_path, rng):
    config = random_config(rng)
    parameters, _, _ = save_all(tmp_path, 1, config, rng, dtype=np.float16)
    want = {n: a.astype(np.float16).astype(np.float32) for n, a in parameters.items()}
    assert_same(load_checkpoint(tmp_path, with_optimizer=True).parameters, want)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"


def test_weights_too_large_for_sixteen_bits_are_named(tmp_path, rng):
    config = random_config(rng)
    parameters = random_arrays(config, rng)
    parameters["transformer.ln_f.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match="ln_f.weight has values too large for float16"):
        save_checkpoint(tmp_path, 1, config=config, parameters=parameters, dtype=np.float16)
    assert os.listdir(tmp_path) == []


def test_our_safetensors_equal_the_library_s(tmp_path, rng):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {f"t{i}": rng.standard_normal(rng.integers(1, 9, i)).astype(np.float32) for i in range(5)}
    write_safetensors(tmp_path / "ours", tensors)
    library.save_file(tensors, tmp_path / "theirs")
    for got in (library.load_file(tmp_path / "ours"), read(tmp_path / "theirs")):
        for name, want in tensors.items():
            assert_array_equal(got[name], want)  # exact: nothing was converted


# --- transformers ---


@pytest.fixture
def hugging_face(rng):
    """make(tied) a small random GPT2LMHeadModel, reopen(directory), logits(model)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    def make(tied):
        config = transformers.GPT2Config(
            vocab_size=23, n_positions=12, n_layer=2, n_head=2, n_embd=8, tie_word_embeddings=tied,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
        return model

    def logits(model):
        with torch.no_grad():
            return model(torch.arange(12)[None]).logits.float().numpy()

    def reopen(directory):
        return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()

    return SimpleNamespace(make=make, reopen=reopen, logits=logits, torch=torch)


def numpy_state(model, tied):
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    return {name: state[name] for name, _ in parameter_shapes(GPT2Config(23, 12, 2, 2, 8, tied))}


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_ours_with_equal_logits(tmp_path, hugging_face, tied):
    model = hugging_face.make(tied)
    config = GPT2Config(23, 12, 2, 2, 8, tied)
    for step, path in ((1, tmp_path), (2, tmp_path / "step-00000002")):
        save_checkpoint(tmp_path, step, config=config, parameters=numpy_state(model, tied))
        reopened = hugging_face.reopen(path)
        assert_array_equal(hugging_face.logits(reopened), hugging_face.logits(model))  # exact: the same weights
        assert reopened.config.attn_pdrop == reopened.config.embd_pdrop == reopened.config.resid_pdrop == 0
        assert reopened.config.bos_token_id is None and reopened.config.eos_token_id is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ours_opens_transformers_at_every_precision(tmp_path, hugging_face, tied, dtype):
    model = hugging_face.make(tied).to(getattr(hugging_face.torch, dtype))
    model.save_pretrained(tmp_path)
    got = load_checkpoint(tmp_path)
    assert got.config == GPT2Config(23, 12, 2, 2, 8, tied) and got.path == tmp_path and got.state is None
    assert_same(got.parameters, numpy_state(model, tied))
    with pytest.raises(CheckpointError, match="optimizer.safetensors: no such file, so no run can be resumed"):
        load_checkpoint(tmp_path, with_optimizer=True)


def test_transformers_opens_our_sixteen_bits(tmp_path, hugging_face):
    model = hugging_face.make(False).half()
    save_checkpoint(
        tmp_path, 1, config=GPT2Config(23, 12, 2, 2, 8, False), parameters=numpy_state(model, False), dtype=np.float16
    )
    reopened = hugging_face.reopen(tmp_path)
    assert reopened.dtype == hugging_face.torch.float16
    assert_array_equal(hugging_face.logits(reopened), hugging_face.logits(model))  # exact: the same weights


def test_shards_are_read_and_a_missing_one_is_named(tmp_path, hugging_face):
    model = hugging_face.make(False)
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert_same(load_checkpoint(tmp_path).parameters, numpy_state(model, False))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_checkpoint(tmp_path)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(CheckpointError, match="and in another file"):
        load_checkpoint(tmp_path)
    for broken in ({"a": "../model.safetensors"}, {"a": 3}, [1], None):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": broken}))
        with pytest.raises(CheckpointError, match="index.json"):
            load_checkpoint(tmp_path)


def test_older_files_without_prefix_and_with_mask_buffers_open(tmp_path, rng):
    config = random_config(rng, tied=True)
    parameters, _, _ = save_all(tmp_path, 1, config, rng, moments=None, state=None)
    older = {name.removeprefix("transformer."): array for name, array in parameters.items()}
    older |= {f"h.{i}.attn.{n}": np.ones(1, np.float32) for i in range(2) for n in ("bias", "masked_bias")}
    write_safetensors(tmp_path / "latest" / "model.safetensors", older)
    assert_same(load_checkpoint(tmp_path).parameters, parameters)
    write_safetensors(tmp_path / "latest" / "model.safetensors", older | parameters)
    with pytest.raises(CheckpointError, match="is stored twice, with and without the prefix"):
        load_checkpoint(tmp_path)


def test_a_tied_model_may_repeat_its_embedding_as_lm_head_but_not_differ(tmp_path, rng):
    config = random_config(rng, tied=True)
    parameters, _, _ = save_all(tmp_path, 1, config, rng, moments=None, state=None)
    file = tmp_path / "latest" / "model.safetensors"
    write_safetensors(file, parameters | {"lm_head.weight": parameters["transformer.wte.weight"]})
    assert_same(load_checkpoint(tmp_path).parameters, parameters)
    write_safetensors(file, parameters | {"lm_head.weight": -parameters["transformer.wte.weight"]})
    with pytest.raises(CheckpointError, match="lm_head.weight differs .* tie_word_embeddings"):
        load_checkpoint(tmp_path)


# --- errors name what cannot be read ---


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"), ("activation_function", "gelu"), ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True), ("n_inner", 7),
        ("add_cross_attention", True), ("tie_word_embeddings", "yes"), ("layer_norm_epsilon", 0), ("n_layer", 10**9),
        ("n_head", 5), ("n_head", 0), ("n_embd", "wide"), ("n_positions", 1.5), ("vocab_size", None),
    ],
)  # fmt: skip
def test_a_configuration_of_another_model_is_refused_by_name(tmp_path, rng, field, value):
    save_all(tmp_path, 1, replace(random_config(rng), n_head=2, n_embd=8), rng)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(CheckpointError, match="model.safetensors|config.json") as caught:
        load_checkpoint(tmp_path)
    shown = f"{value:,}" if field == "n_layer" else str(value)
    assert {"n_positions": "block_size"}.get(field, field) in str(caught.value) and shown in str(caught.value)
    del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if field in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"):
        with pytest.raises(CheckpointError, match=f"has no {field}"):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_missing_extra_and_misshapen_tensors_are_named_with_their_shapes(tmp_path, rng, file):
    config = replace(random_config(rng), n_head=2, n_embd=8, block_size=16)
    save_all(tmp_path, 1, config, rng)
    prefix = "exp_avg_sq." if file.startswith("optimizer") else ""
    tensors = read(tmp_path / file)
    del tensors[prefix + "transformer.ln_f.bias"]
    tensors["score.weight"] = np.ones((2, 3))
    tensors[prefix + "transformer.wpe.weight"] = np.ones((9, 8))
    write_safetensors(tmp_path / "latest" / file, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, with_optimizer=True)
    for part in (
        str(tmp_path / "step-00000001" / file), f"missing: {prefix}transformer.ln_f.bias (8,)",
        "not of this model: score.weight (2, 3)", f"{prefix}transformer.wpe.weight is (9, 8) instead of (16, 8)",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_saving_checks_names_and_shapes_too(tmp_path, rng):
    config = random_config(rng)
    parameters = random_arrays(config, rng)
    for broken in ({**parameters, "extra": np.ones(3)}, dict(list(parameters.items())[1:])):
        with pytest.raises(CheckpointError, match="not of this model: extra|missing: transformer.wte.weight"):
            save_checkpoint(tmp_path, 1, config=config, parameters=broken)
    moments = {name: (array, array[..., :1]) for name, array in parameters.items()}
    with pytest.raises(CheckpointError, match="wrong shape"):
        save_checkpoint(tmp_path, 1, config=config, parameters=parameters, moments=moments)
    with pytest.raises(CheckpointError, match="cannot store int8"):
        save_checkpoint(tmp_path, 1, config=config, parameters=parameters, dtype=np.int8)
    assert os.listdir(tmp_path) == []


def test_a_pickle_is_not_read_and_the_error_names_the_conversion(tmp_path, rng):
    save_all(tmp_path / "run", 1, random_config(rng), rng)
    shutil.copy(tmp_path / "run" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="model.safetensors: No such file"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin, a pickle.*save_pretrained"):
        load_checkpoint(tmp_path)


def test_the_error_for_a_directory_without_a_checkpoint_names_the_newest_renamed_one(tmp_path):
    """As after a run with --overwrite that was ended at once: it has renamed the directory and saved nothing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    for number in (1, 9, 10, 11):
        (tmp_path / f"run.{number}").mkdir()
        if number < 11:
            (tmp_path / f"run.{number}" / "config.json").touch()
    (tmp_path / "run.old").mkdir()
    with pytest.raises(
        CheckpointError, match=f"neither.*: give a checkpoint directory, for example {tmp_path}/run.10$"
    ):
        load_checkpoint(tmp_path / "run")


def test_a_path_without_a_checkpoint_has_its_own_error(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint("a\0b")
    with pytest.raises(CheckpointError, match="neither config.json nor a step"):
        load_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file, not a directory"):
        load_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("file", sorted(FILES - {"tokenizer.json"}))
def test_a_missing_file_is_named(tmp_path, rng, file):
    save_all(tmp_path, 1, random_config(rng), rng)
    (tmp_path / "latest" / file).unlink()
    with pytest.raises(CheckpointError, match=str(tmp_path / "step-00000001" / file)):
        load_checkpoint(tmp_path, with_optimizer=True)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """(a saved step, its parameters, its moments)."""
    directory, rng = tmp_path_factory.mktemp("example"), np.random.default_rng()
    config = replace(random_config(rng), n_layer=1)
    parameters, moments, _ = save_all(directory, 7, config, rng)
    return directory / "step-00000007", parameters, moments


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_broken_bytes_are_an_error_or_a_correct_load(example, data):
    source, parameters, moments = example
    with tempfile.TemporaryDirectory() as copy:
        broken = Path(copy) / "broken"
        shutil.copytree(source, broken)
        file = broken / data.draw(st.sampled_from(sorted(FILES)))
        content = bytearray(file.read_bytes())
        binary = file.suffix == ".safetensors"
        header = 8 + int.from_bytes(content[:8], "little") if binary else len(content)
        action = data.draw(st.sampled_from(["remove", "truncate", "append", "overwrite", "directory"]))
        if action in ("remove", "directory"):
            file.unlink()
            if action == "directory":
                file.mkdir()
        elif action == "overwrite":
            begin = data.draw(st.integers(0, header - 1))
            new = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"9", b"[", b"-", b"e", b'"', b"F16"]))
            content[begin : begin + len(new)] = new[: header - begin]
            file.write_bytes(content)
        else:
            size = data.draw(st.integers(0, len(content) - 1))
            file.write_bytes(content[:size] if action == "truncate" else content + content[: size + 1])
        try:
            got = load_checkpoint(broken, with_optimizer=True)
        except CheckpointError as error:
            assert str(broken) in str(error) and "\n" not in str(error)
        else:  # the damage is in metadata, in a number of state.json or in a file that is not read
            assert_same(got.parameters, parameters)
            for which in (0, 1):
                assert_same({n: m[which] for n, m in got.moments.items()}, {n: m[which] for n, m in moments.items()})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", 3]),
        "shape": st.lists(st.integers(-2, 4) | st.sampled_from([2**40, True, 1.0]), max_size=3),
        "data_offsets": st.lists(st.integers(-4, 12) | st.just(2**62), min_size=1, max_size=3),
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=json_values | st.dictionaries(st.sampled_from("abc"), entries, max_size=2))
def test_any_json_as_header_is_an_error_or_a_dict(tmp_path, header):
    text = json.dumps(header).encode() + b" "
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    try:
        assert isinstance(read(tmp_path / "file"), dict)
    except CheckpointError:
        pass


# --- complete at every instant ---


def test_an_output_directory_is_its_newest_step_through_links_that_never_change(tmp_path, rng):
    config = random_config(rng)
    for step in (5, 10, 15):
        parameters, _, state = save_all(tmp_path, step, config, rng)
        assert os.readlink(tmp_path / "latest") == f"step-{step:08d}"
        assert {path.name for path in tmp_path.iterdir() if path.is_symlink()} == FILES | {"latest"}
        assert all(os.readlink(tmp_path / name) == f"latest/{name}" for name in FILES)
        assert_same(read(tmp_path / "model.safetensors"), parameters)
        assert json.loads((tmp_path / "state.json").read_text())["loss"] == state["loss"]
    save_checkpoint(tmp_path, 20, config=config, parameters=parameters)
    assert {path.name for path in tmp_path.iterdir() if path.is_symlink()} == {
        "latest", "config.json", "model.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])]
)
def test_the_newest_k_steps_are_kept(tmp_path, rng, keep, left):
    config = random_config(rng)
    for step in range(5):
        save_all(tmp_path, step, config, rng, keep=keep)
    assert step_names(tmp_path) == [f"step-{step:08d}" for step in left]
    assert hidden_names(tmp_path) == []


def test_a_run_restarted_from_an_early_step_keeps_its_own_checkpoints(tmp_path, rng):
    config = random_config(rng)
    for step in (60, 80, 30, 40):
        save_all(tmp_path, step, config, rng, keep=2)
        time.sleep(0.02)  # file times have a resolution of up to 10 ms
    assert step_names(tmp_path) == ["step-00000030", "step-00000040"]
    assert load_checkpoint(tmp_path).path.name == "step-00000040"


def test_a_clock_that_was_set_back_does_not_delete_the_step_that_was_just_saved(tmp_path, rng):
    config = random_config(rng)
    for step in (1, 2):
        save_all(tmp_path, step, config, rng, keep=1)
        later = time.time() + 3600 * step
        os.utime(tmp_path / f"step-{step:08d}" / "model.safetensors", (later, later))
    parameters, _, _ = save_all(tmp_path, 3, config, rng, keep=1)
    assert "step-00000003" in step_names(tmp_path)
    assert_same(load_checkpoint(tmp_path).parameters, parameters)


def test_a_step_can_be_saved_again(tmp_path, rng):
    config = random_config(rng)
    save_all(tmp_path, 3, config, rng)
    for _ in range(3):
        parameters, _, _ = save_all(tmp_path, 4, config, rng)
        assert_same(load_checkpoint(tmp_path).parameters, parameters)
        assert step_names(tmp_path) == ["step-00000003", "step-00000004"]
        assert hidden_names(tmp_path) == [] and os.readlink(tmp_path / "latest") == "step-00000004"


def test_leftovers_of_saves_are_removed_and_other_files_are_not(tmp_path, rng):
    (tmp_path / ".step-00000001.0123abcd.partial").mkdir()
    (tmp_path / ".step-00000001.0123abcd.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.0123abcd.partial").symlink_to("nowhere")
    others = {".cache", ".step.partial", "step-1", "notes.0123abcd.partial"}
    for name in others:
        (tmp_path / name).mkdir()
    save_all(tmp_path, 2, random_config(rng), rng)
    assert set(os.listdir(tmp_path)) == others | FILES | {"latest", "step-00000002"}


STAGES = {"fsync": os, "rename": os, "replace": os, "write_bytes": Path, "mkdir": Path}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("operation", STAGES)
def test_a_failure_at_any_call_leaves_a_complete_checkpoint_and_no_leftovers(
    tmp_path, rng, monkeypatch, operation, again
):
    config, calls, nth = random_config(rng), 1, 0
    before, _, _ = save_all(tmp_path, 0, config, rng)
    real = getattr(STAGES[operation], operation)

    def fail(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    while calls >= nth:  # fail at the first call, the second, ... until a save makes fewer
        nth, calls, step = nth + 1, 0, 0 if again else nth + 1
        parameters = random_arrays(config, rng)
        moments = {name: (array, array**2) for name, array in parameters.items()}
        with monkeypatch.context() as patch:
            patch.setattr(STAGES[operation], operation, fail)
            try:
                save_checkpoint(tmp_path, step, config=config, parameters=parameters, moments=moments, state={})
                before = parameters
            except CheckpointError as error:
                assert "No space left on device" in str(error) and str(tmp_path) in str(error)
        got = load_checkpoint(tmp_path, with_optimizer=True)
        new = np.array_equal(got.parameters["lm_head.weight"], parameters["lm_head.weight"])
        before = parameters if new else before  # a failure after the rename leaves the new step
        assert_same(got.parameters, before)
        assert_same({name: pair[0] for name, pair in got.moments.items()} if new else before, before)
        if new:
            assert_same({name: pair[1] for name, pair in got.moments.items()}, {n: a**2 for n, a in parameters.items()})
    assert nth > 1
    save_all(tmp_path, 99, config, rng)
    assert hidden_names(tmp_path) == []


KILLED = """
import os, signal, sys
import numpy as np
from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.architecture import GPT2Config, parameter_shapes

directory, again = sys.argv[1], sys.argv[2] == "again"
config = GPT2Config(7, 4, 1, 1, 4, False)

def save(value, step):
    parameters = {name: np.full(shape, value, np.float32) for name, shape in parameter_shapes(config)}
    moments = {name: (array, array) for name, array in parameters.items()}
    save_checkpoint(directory, step, config=config, parameters=parameters, moments=moments, state={"value": value})

def value():
    got = load_checkpoint(directory, with_optimizer=True)
    values = {v for a in got.parameters.values() for v in a.ravel()}
    values |= {v for pair in got.moments.values() for a in pair for v in a.ravel()}
    assert values == {got.state["value"]}, (values, got.state)  # all values are of one save
    return got.state["value"]

save(0, 0)
for nth in range(1, 100):
    previous = value()
    child = os.fork()
    if not child:
        calls = 0
        def deadly(real):
            def call(*arguments, **options):
                global calls
                calls += 1
                if calls == nth:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)
            return call
        for name in ("fsync", "rename", "replace", "symlink", "link", "mkdir", "unlink", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        save(nth, 0 if again else nth)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and value() == nth
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert value() in (previous, nth), (value(), previous, nth)
print(nth)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("again", ["again", "next"])
def test_kill_9_before_any_system_call_of_a_save_leaves_a_complete_checkpoint(tmp_path, again):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, again], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 15 < int(done.stdout) < 99  # killed before each call in turn
    assert hidden_names(tmp_path) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_kill_9_at_a_random_moment_leaves_a_complete_checkpoint(tmp_path, rng):
    endless = KILLED.split("save(0, 0)")[0] + "save(0, 0)\nprint('saved', flush=True)\n"
    endless += "for step in range(10**9):\n    save(step, step // 2)\n"
    check = KILLED.split("save(0, 0)")[0] + "print(value())\n"
    for _ in range(3):
        command = [sys.executable, "-c", endless, tmp_path, "-"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"saved\n"  # the writer has started
            time.sleep(rng.uniform(0, 0.3))
            writer.kill()
        done = subprocess.run([sys.executable, "-c", check, tmp_path, "-"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_a_concurrent_reader_always_sees_a_complete_checkpoint(tmp_path):
    program = KILLED.split("save(0, 0)")[0].replace("state={", "keep=1, state={")
    program += "for step in range(10**9):\n    save(step, step // 2)\n"
    writer = subprocess.Popen([sys.executable, "-c", program, tmp_path, "-"], cwd=ROOT)
    try:
        while not (tmp_path / "latest").is_symlink():
            assert writer.poll() is None
            time.sleep(0.01)
        seen, begin = set(), time.monotonic()
        while time.monotonic() < begin + 1 or len(seen) < 4:  # at least 1 s and 4 different saves
            assert writer.poll() is None and time.monotonic() < begin + 60
            got = load_checkpoint(tmp_path, with_optimizer=True)
            values = {float(a.ravel()[-1]) for a in got.parameters.values()}
            values |= {float(a.ravel()[-1]) for pair in got.moments.values() for a in pair}
            assert values == {got.state["value"]}
            seen |= values
    finally:
        writer.kill()
        writer.wait()


def test_a_step_that_a_writer_removes_during_a_read_is_read_again(tmp_path, rng, monkeypatch):
    config, wanted = random_config(rng), []
    save_all(tmp_path, 1, config, rng)

    def glob(step, pattern):
        wanted.append(save_all(tmp_path, 2, config, rng, keep=1)[0])
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(step))

    monkeypatch.setattr(Path, "glob", glob)
    (tmp_path / "step-00000001" / "model.safetensors").unlink()  # the first of its files
    assert_same(load_checkpoint(tmp_path, with_optimizer=True).parameters, wanted[0])


def test_without_symbolic_links_latest_is_a_text_file(tmp_path, rng, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    config = random_config(rng)
    save_all(tmp_path / "moved", 1, config, rng)  # written with symbolic links
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    for directory in (tmp_path / "new", tmp_path / "moved"):
        for step in (1, 2, 2):
            parameters, _, _ = save_all(directory, step, config, rng, keep=1)
            assert (directory / "latest").read_text() == f"step-{step:08d}\n"
            assert_same(load_checkpoint(directory).parameters, parameters)
        assert sorted(os.listdir(directory)) == ["latest", "step-00000002"]


def test_without_a_usable_latest_the_step_written_last_is_read(tmp_path, rng):
    config = random_config(rng)
    for step in (9, 4):
        save_all(tmp_path, step, config, rng, keep=0)
        time.sleep(0.02)  # file times have a resolution of up to 10 ms
    (tmp_path / "step-00000100").mkdir()  # holds nothing: not a checkpoint
    for content in (None, b"nowhere", b"", b"\xff\0", b"x" * 5000):
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").write_bytes(content) if content is not None else (tmp_path / "latest").symlink_to("gone")
        assert resolve_checkpoint(tmp_path).name == "step-00000004"


# --- where writing fails ---


def test_an_unwritable_directory_is_refused_before_any_training(tmp_path):
    assert writable_directory(tmp_path / "a" / "b").is_dir() and os.listdir(tmp_path / "a" / "b") == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out", "/proc/nonexistent/out", "a\0b"):
        with pytest.raises(CheckpointError, match="cannot write checkpoints here"):
            writable_directory(path)


def test_files_of_other_programs_are_not_replaced(tmp_path, rng):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="model.safetensors: this file is not a link to a checkpoint"):
        save_all(tmp_path, 1, random_config(rng), rng)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("failing", ["write_safetensors", "write_json", "tokenizer"])
def test_a_full_disk_is_one_clear_error(tmp_path, rng, monkeypatch, failing):
    def full(*arguments):
        Path(arguments[-1] if failing == "tokenizer" else arguments[0]).write_bytes(b"ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    config, options = random_config(rng), {}
    before, _, _ = save_all(tmp_path, 1, config, rng)
    if failing == "tokenizer":
        options["tokenizer"] = type("Full", (), {"save": full})()
    else:
        monkeypatch.setattr(f"gpt2core.app.checkpoints.files.{failing}", full)
    with pytest.raises(CheckpointError, match="step-00000002: cannot save.*No space left on device.*earlier"):
        save_all(tmp_path, 2, config, rng, **options)
    assert_same(load_checkpoint(tmp_path).parameters, before)
    assert step_names(tmp_path) == ["step-00000001"] and hidden_names(tmp_path) == []

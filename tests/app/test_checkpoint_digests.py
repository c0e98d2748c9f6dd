"""A checkpoint that was changed after it was saved is refused by name, unless --accept-edited is given."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors_library

from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.app.checkpoints.safetensors_file import read_safetensors, write_safetensors
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.errors import CheckpointError
from gpt2core.text.tokenizer import Tokenizer
from tests.support.checkpoints import edit_json

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"


def save(directory, step, rng, tied=False, keep=2):
    """Save a checkpoint of random arrays; returns its directory."""
    config = GPT2Config(17, 8, 2, 2, 8, tied)
    parameters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(config)}
    moments = {name: (array * 0.5, array**2) for name, array in parameters.items()}
    state = {"step": step, "position": 4 * step, "rate": np.float32(rng.random()), "seed": 2**70, "loss": float("nan")}
    return save_checkpoint(
        directory, step, config=config, parameters=parameters, moments=moments, state=state, keep=keep,
        tokenizer=Tokenizer.word_level("a few words, and a few more"),
    )  # fmt: skip


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_save_records_the_hash_of_each_other_file_and_of_its_own_fields(tmp_path, rng):
    step = save(tmp_path, 3, rng)
    values = json.loads((step / STATE).read_text())
    assert values["files_sha256"] == {name: sha256(step / name) for name in (CONFIG, MODEL, TOKENIZER, OPTIMIZER)}
    own = values.pop("state_sha256")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert own == hashlib.sha256(text.encode()).hexdigest()
    loaded = load_checkpoint(tmp_path, with_optimizer=True)
    assert loaded.edited == () and not loaded.state.keys() & {"files_sha256", "state_sha256"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", [CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE])
def test_a_named_pipe_in_place_of_a_file_is_refused(tmp_path, rng, name):
    step = save(tmp_path, 3, rng)
    (step / name).unlink()
    os.mkfifo(step / name)
    with pytest.raises(CheckpointError, match=f"{name}: is a pipe or a device, not a file"):
        load_checkpoint(tmp_path, with_optimizer=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_our_safetensors_are_the_librarys_byte_for_byte(tmp_path, rng, dtype):
    shapes = {"b": (3,), "a.weight": (2, 5), "scalar": (), "empty": (0, 4), "é": (300, 301)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    digest = write_safetensors(tmp_path / "ours", tensors, dtype)
    stored = {name: array.astype(dtype) for name, array in tensors.items()}
    safetensors_library.save_file(stored, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    got, found = read_safetensors(tmp_path / "theirs")
    assert found == digest == sha256(tmp_path / "ours")
    for name, array in stored.items():
        np.testing.assert_array_equal(got[name], array.astype(np.float32), strict=True)
        assert got[name].flags.writeable


# -- changes that no other check finds ---------------------------------------------------------------------------------


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # the lowest bit of the last value
    path.write_bytes(content)


def permute(path):
    """Exchange the ids of two words."""
    values = json.loads(path.read_text(encoding="utf-8"))
    words = values["model"]["vocab"]
    words["a"], words[" few"] = words[" few"], words["a"]
    path.write_text(json.dumps(values), encoding="utf-8")


def change(**fields):
    def edit(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def rename_field(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


SILENT = {
    "weight": (MODEL, flip_last_byte), "moment": (OPTIMIZER, flip_last_byte), "tokenizer": (TOKENIZER, permute),
    "n_head": (CONFIG, change(n_head=4)), "epsilon": (CONFIG, change(layer_norm_epsilon=1e-6)),
    "space": (CONFIG, lambda path: path.write_text(path.read_text() + " ")),
    "position": (STATE, change(position=99999999999)), "step": (STATE, change(step=2)),
    "another hash": (STATE, change(state_sha256="0" * 64)), "no hashes": (STATE, change(files_sha256={})),
    "not hashes": (STATE, change(files_sha256=[1])), "no list": (STATE, rename_field("files_sha256", "files_sha255")),
    "no hash": (STATE, rename_field("state_sha256", "state_sha255")), "seed": (STATE, change(seed=2**70 + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_changed_file_is_refused_by_name_unless_that_is_accepted(tmp_path, rng, name):
    file, edit = SILENT[name]
    step = save(tmp_path, 3, rng)
    edit(step / file)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, with_optimizer=True)
    assert str(step / file) in str(caught.value) and "--accept-edited" in str(caught.value)
    assert "was changed after it was saved" in str(caught.value) and "\n" not in str(caught.value)
    accepted = load_checkpoint(tmp_path, with_optimizer=True, accept_edited=True)
    assert accepted.edited[0] == file
    if file == OPTIMIZER:
        assert load_checkpoint(tmp_path).edited == ()  # not read, so not compared
    else:
        with pytest.raises(CheckpointError, match=file):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize("file", [CONFIG, MODEL, TOKENIZER, OPTIMIZER, STATE])
def test_a_file_of_another_step_is_refused(tmp_path, rng, file):
    first, second = (save(tmp_path / name, 3, rng, tied) for name, tied in (("a", False), ("b", False)))
    edit_json(second / STATE, step=4)
    changed = file not in (CONFIG, TOKENIZER)  # these two are equal in both
    shutil.copy(second / file, first / file)
    if not changed or file == STATE:  # a state.json of an earlier version has no hashes
        assert load_checkpoint(first, with_optimizer=True).edited == ()
    else:
        with pytest.raises(CheckpointError, match=f"{file}: was changed"):
            load_checkpoint(first, with_optimizer=True)


def test_shards_in_the_place_of_the_saved_weights_are_refused(tmp_path, rng):
    step = save(tmp_path, 3, rng)
    os.rename(step / MODEL, step / "model-1.safetensors")
    names = read_safetensors(step / "model-1.safetensors")[0]
    (step / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    with pytest.raises(CheckpointError, match="was changed after it was saved"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, accept_edited=True).parameters.keys() == names.keys()


# -- values that are never accepted, with or without hashes ------------------------------------------------------------


@pytest.mark.parametrize("file, accept", [(MODEL, True), (OPTIMIZER, True), (MODEL, False)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path, rng, file, accept, value):
    step = save(tmp_path, 3, rng)
    if not accept:
        (step / STATE).unlink()  # as in a checkpoint of another program
    tensors = read_safetensors(step / file)[0]
    name = next(iter(tensors))
    tensors[name].flat[-1] = value
    write_safetensors(step / file, tensors)
    with pytest.raises(CheckpointError, match=f"{file}: {name} has a value that is NaN or infinite"):
        load_checkpoint(tmp_path, with_optimizer=file == OPTIMIZER, accept_edited=accept)


def test_a_negative_second_moment_is_refused(tmp_path, rng):
    step = save(tmp_path, 3, rng)
    tensors = read_safetensors(step / OPTIMIZER)[0]
    tensors["exp_avg_sq.lm_head.weight"][2, 3] = -1e-9
    write_safetensors(step / OPTIMIZER, tensors)
    with pytest.raises(CheckpointError, match="exp_avg_sq.lm_head.weight has a negative value"):
        load_checkpoint(tmp_path, with_optimizer=True, accept_edited=True)


# -- checkpoints without hashes ----------------------------------------------------------------------------------------


def test_a_checkpoint_of_an_earlier_version_has_no_hashes_and_loads(tmp_path, rng):
    step = save(tmp_path, 3, rng)
    edit_json(step / STATE)
    loaded = load_checkpoint(tmp_path, with_optimizer=True)
    assert loaded.edited == () and loaded.state["step"] == 3


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_a_stored_causal_mask_of_any_dtype_is_skipped(tmp_path, rng, dtype):
    step = save(tmp_path, 3, rng)
    (step / STATE).unlink()
    tensors = read_safetensors(step / MODEL)[0]
    mask = np.tril(np.ones((1, 1, 8, 8))).astype(dtype)
    masks = {f"transformer.h.{i}.attn.bias": mask for i in range(2)}
    safetensors_library.save_file(tensors | masks, step / MODEL)
    loaded = load_checkpoint(tmp_path).parameters
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)
    safetensors_library.save_file(tensors | {"mask": mask}, step / MODEL)
    with pytest.raises(CheckpointError, match=f"mask is stored as '{'U8' if dtype == np.uint8 else 'BOOL'}'"):
        load_checkpoint(tmp_path)


def test_a_tied_model_with_lm_head_only_lacks_its_embedding(tmp_path, rng):
    step = save(tmp_path, 3, rng, tied=True)
    (step / STATE).unlink()
    tensors = read_safetensors(step / MODEL)[0]
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    write_safetensors(step / MODEL, tensors)
    with pytest.raises(CheckpointError, match=r"missing: transformer.wte.weight \(17, 8\)"):
        load_checkpoint(tmp_path)


# -- the step to go on from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, STATE, CONFIG])
@pytest.mark.parametrize("damage", [flip_last_byte, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_a_damaged_newest_checkpoint_names_the_complete_one_before_it(tmp_path, rng, file, damage):
    steps = [save(tmp_path, step, rng, keep=0) for step in (1, 2, 3)]
    for seconds, step in enumerate(steps, 1):
        os.utime(step / MODEL, (seconds, seconds))  # the order of writing
    for step in steps[1:]:  # the step before the newest is damaged too
        damage(step / file)
    with pytest.raises(CheckpointError, match=f"{file}.*; {steps[0]} is complete: give this path instead"):
        load_checkpoint(tmp_path, with_optimizer=True)
    assert load_checkpoint(steps[0], with_optimizer=True).state["step"] == 1
    os.truncate(steps[0] / OPTIMIZER, 9)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path, with_optimizer=True)
    assert "is complete" not in str(caught.value)


# -- the commands ------------------------------------------------------------------------------------------------------

NANO = ("--preset", "nano", "--sample", 0, "--threads", 1)


@pytest.fixture
def run(train, corpus, tmp_path):
    """The directory of a run of two steps, each with a checkpoint."""
    result = train(*NANO, "--data", corpus, "--steps", 2, "--checkpoint-every", 1, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    return tmp_path / "run"


def test_the_commands_refuse_a_changed_checkpoint_and_take_the_flag(train, infer, corpus, run):
    newest, before = run / "step-00000002", run / "step-00000001"
    change(n_head=4)(newest / CONFIG)
    resume = ("--resume", run, "--steps", 3, "--sample", 0)
    start = (*NANO, "--init-from", run, "--data", corpus, "--steps", 1)
    prompt = ("--weights", run, "--prompt", "the model", "--max-new-tokens", 2)
    for command, flags in ((train, resume), (train, start), (infer, prompt)):
        refused = command(*flags)
        assert refused.code == 2 and refused.out == "" and refused.err.count("\n") == 1
        assert refused.err.startswith(f"error: {newest / CONFIG}: was changed after it was saved")
        assert "--accept-edited" in refused.err and f"{before} is complete: give this path instead" in refused.err
        accepted = command(*flags, "--accept-edited")
        assert accepted.code == 0, accepted.err
        note = f"note: --accept-edited: {newest} was changed after it was saved: config.json"
        assert " ".join((accepted.out + accepted.err).split()).count(note) == 1
    assert train("--resume", before, "--steps", 3, "--sample", 0).code == 0
    # a resumed run saves what it has accepted with new hashes
    assert train(*resume, "--accept-edited", "--out", run).code == 0
    assert load_checkpoint(run, with_optimizer=True).config.n_head == 4


@pytest.mark.parametrize("position, step", [(99999999999, 2), (1, 2), (True, 1), (0, 1 << 31)])
def test_impossible_progress_without_hashes_is_refused(train, run, position, step):
    edit_json(run / "latest" / STATE, position=position, step=step)
    result = train("--resume", run, "--steps", 3)
    assert result.code == 2 and result.err.count("\n") == 1
    assert f"{run / 'step-00000002' / STATE}: " in result.err and "cannot be resumed" in result.err


# -- a corpus that was moved -------------------------------------------------------------------------------------------


def test_a_moved_corpus_that_equals_the_shipped_one_is_found(train, tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("gpt2core.app.resume.SHIPPED", {"weights": corpus})  # a short one
    moved, out = tmp_path / "old.txt", tmp_path / "run"
    shutil.copy(corpus, moved)
    assert train(*NANO, "--data", moved, "--val-fraction", 0.25, "--steps", 1, "--out", out).code == 0
    moved.unlink()
    result = train("--resume", out, "--out", out, "--steps", 2, "--sample", 0)
    assert result.code == 0, result.err
    assert (
        f"note: {moved} does not exist: the shipped {corpus.name}, which has the same tokens, is used " in result.words
    )
    assert load_checkpoint(out).state["arguments"]["data"] == str(corpus)


def test_another_moved_corpus_is_named_with_the_flag(train, tmp_path, corpus, monkeypatch):
    out, moved, shipped = tmp_path / "run", tmp_path / "moved.txt", tmp_path / "shipped.txt"
    shipped.write_text("another short text\n" * 9)
    monkeypatch.setattr("gpt2core.app.resume.SHIPPED", {"weights": shipped})
    for tokenizer in ("word", "byte"):
        shutil.copy(corpus, moved)
        flags = (*NANO, "--data", moved, "--val-data", moved, "--tokenizer", tokenizer, "--steps", 1)
        assert train(*flags, "--out", out).code == 0
        moved.unlink()
        for flag, given in (("--data", ()), ("--val-data", ("--data", corpus))):
            result = train("--resume", out, "--steps", 2, "--sample", 0, *given)
            assert result.code == 2 and result.err.count("\n") == 1
            words = f"error: {flag}: {moved}, which {out / 'step-00000001'} was trained with, does not exist: "
            assert result.err.startswith(words)
            assert f"give its present path with {flag}" in result.err
        given = ("--data", corpus, "--val-data", corpus)
        assert train("--resume", out, "--steps", 2, "--sample", 0, *given).code == 0
        shutil.rmtree(out)

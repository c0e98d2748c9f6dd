"""OpenAI's GPT-2 is read in the form of the Hugging Face hub; if it is missing, the error gives a download command."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.shipped import OPENAI_NAMES
from gpt2core.architecture import GPT2Config, parameter_shapes

TEXT = "the model reads one token, then another; it learns what follows and forgets nothing. " * 40
# config.json of openai-community/gpt2, whose sizes the fixture replaces
CONFIG = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def write_tokenizer(directory, size):
    """Write tokenizer.json, vocab.json and merges.txt of `size` byte pairs in the hub's form; <|endoftext|> is last."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    model = json.loads(library.to_str())["model"]
    vocab, merges = model["vocab"] | {"<|endoftext|>": size - 1}, [" ".join(pair) for pair in model["merges"]]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": size - 1, "special": True, "content": "<|endoftext|>", "normalized": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    old_form = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {
            "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(old_form, ensure_ascii=False), encoding="utf-8")
    (directory / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 1024}')


@pytest.fixture
def downloaded(tmp_path, rng):
    """A directory with the files of openai-community/gpt2, small and with random weights."""
    directory, config = tmp_path / "gpt2", GPT2Config(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=16)
    directory.mkdir()
    write_tokenizer(directory, config.vocab_size)
    tensors = {
        name.removeprefix("transformer."): rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in parameter_shapes(config)
    }
    mask = np.tril(np.ones((1, 1, config.block_size, config.block_size), np.float32))
    tensors |= {f"h.{layer}.attn.bias": mask for layer in range(config.n_layer)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    sizes = dict(vocab_size=300, n_ctx=32, n_positions=32, n_layer=2, n_head=2, n_embd=16)
    sizes |= dict(bos_token_id=299, eos_token_id=299)
    (directory / "config.json").write_text(json.dumps(CONFIG | sizes, indent=2))
    (directory / "generation_config.json").write_text('{"_from_model_config": true, "transformers_version": "4.26.0"}')
    return directory


def test_a_downloaded_directory_continues_a_prompt_as_transformers_does(infer, downloaded):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    result = infer("--weights", downloaded, "--prompt", "Hello, 東京 🙂", "--max-new-tokens", 8)
    assert (result.code, result.err) == (0, "")
    library = tokenizers.Tokenizer.from_file(str(downloaded / "tokenizer.json"))
    ids = library.encode("Hello, 東京 🙂").ids
    theirs = transformers.GPT2LMHeadModel.from_pretrained(downloaded).eval()
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    want = library.decode(ids, skip_special_tokens=False)
    assert "".join(result.out.split(" tokens):\n")[1].split("\n\nContinuation:\n"))[:-1] == want


def test_a_downloaded_directory_is_fine_tuned_with_its_own_tokenizer(train, downloaded, tmp_path):
    (tmp_path / "my.txt").write_text("An ordinary text – with any characters: 東京 🙂.\n" * 20, encoding="utf-8")
    flags = ("--preset", "nano", "--data", tmp_path / "my.txt", "--steps", 2, "--sample", 0)
    result = train(*flags, "--init-from", downloaded, "--out", tmp_path / "tuned")
    assert (result.code, result.err) == (0, "") and "vocabulary 300" in result.out
    assert load_checkpoint(tmp_path / "tuned").config == load_checkpoint(downloaded).config


def test_a_directory_with_the_old_tokenizer_files_only_says_how_to_write_the_new_one(infer, downloaded):
    (downloaded / "tokenizer.json").unlink()
    result = infer("--weights", downloaded, "--prompt", "Hello")
    assert result.code == 2 and "has vocab.json and merges.txt, but no tokenizer.json: write it with" in result.err


@pytest.mark.parametrize("name", OPENAI_NAMES)
def test_the_name_of_openais_weights_gives_the_command_that_downloads_them(infer, train, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = "config.json model.safetensors tokenizer.json"
    for result in (infer("--weights", name), train("--init-from", name)):
        command = f"hf download openai-community/{name} {files} --local-dir {name}\n"
        assert result.code == 2 and result.err.endswith(command) and result.err.count("\n") == 1


def test_another_missing_directory_is_not_taken_for_openais(infer, tmp_path):
    result = infer("--weights", tmp_path / "gpt3")
    assert result.code == 2 and "does not exist" in result.err and "download" not in result.err

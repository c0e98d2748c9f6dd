"""The two shipped weights, and the measured curve that the README quotes."""

import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.settings.final_values import resolve_flags
from gpt2core.app.shipped import BOOK, BOOK_WEIGHTS, CORPUS, NANO_WEIGHTS, WEIGHTS
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.presets import PRESETS
from gpt2core.sampler import generate
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer, byte_alphabet
from stage0_serial.numpy_backend import NumpyBackend

ROOT = Path(__file__).resolve().parents[2]
WORDS = "attention blocks carry every gradient; heads, layers and tokens keep their shapes until training ends".split()


@pytest.fixture(scope="module")
def make_weights():
    spec = importlib.util.spec_from_file_location("make_weights", ROOT / "data" / "make_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("prompts", [2, pytest.param(10, marks=pytest.mark.long)])
def test_nine_of_ten_prompts_from_the_corpus_are_continued_with_its_own_tokens(make_weights, prompts):
    model = next(make_weights.models_for(1, load_checkpoint(WEIGHTS)))
    tokens = Tokenizer.load(WEIGHTS).encode(read_text(CORPUS))
    starts = range(0, 50_000, 50_000 // prompts)
    assert sum(make_weights.continues_correctly(model, tokens, start) for start in starts) >= 0.9 * prompts


def test_the_check_of_the_weights_says_what_it_does_and_shows_its_progress(make_weights, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_weights.py", "--check", "--prompts", "2", "--threads", "1"])
    monkeypatch.setattr(make_weights, "continues_correctly", lambda model, tokens, start: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert make_weights.main() == 0
    shown = capsys.readouterr()
    first, last = shown.out.splitlines()
    assert first.endswith("data/gpt2-paper: continuing 2 random prompts of dummy.txt by 30 tokens")
    assert last == "2 of 2 random prompts are continued correctly" and "0/2" in shown.err


def test_the_help_of_make_weights_fits_a_terminal(make_weights):
    assert max(map(len, make_weights.__doc__.splitlines())) <= 79


def test_the_shipped_weights_are_the_papers_model_in_16_bits_and_nothing_else():
    assert {path.name for path in WEIGHTS.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 22_000_000
    assert load_checkpoint(WEIGHTS).config == PRESETS["paper"]
    assert json.loads((WEIGHTS / "config.json").read_text())["dtype"] == "float16"


def test_the_weights_of_the_book_are_those_of_its_preset_in_16_bits_and_nothing_else():
    assert {path.name for path in BOOK_WEIGHTS.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (BOOK_WEIGHTS / "model.safetensors").stat().st_size <= 8_000_000
    assert load_checkpoint(BOOK_WEIGHTS).config == PRESETS["book"]
    assert json.loads((BOOK_WEIGHTS / "config.json").read_text())["dtype"] == "float16"


def test_the_weights_of_preset_nano_continue_the_corpus(make_weights):
    checkpoint = load_checkpoint(NANO_WEIGHTS)
    assert checkpoint.config == PRESETS["nano"]
    assert sum(path.stat().st_size for path in NANO_WEIGHTS.iterdir()) < 100_000
    model, tokens = next(make_weights.models_for(1, checkpoint)), Tokenizer.load(NANO_WEIGHTS).encode(read_text(CORPUS))
    assert list(generate(model, tokens[:18], 5)) == tokens[18:23].tolist()


def test_the_weights_of_the_book_predict_its_text():
    checkpoint = load_checkpoint(BOOK_WEIGHTS)
    model = load_model(checkpoint.config, checkpoint.parameters, NumpyBackend())
    text, tokenizer = read_text(BOOK), Tokenizer.load(BOOK_WEIGHTS)
    excerpts = [text[start : start + 2_000] for start in range(0, 1_000_000, 250_000)]
    rows = np.stack([tokenizer.encode(excerpt)[:257] for excerpt in excerpts])
    loss = float(model.loss(rows[:, :-1], rows[:, 1:]).numpy())
    assert loss < 4.5  # log(2048) = 7.6 for random weights, 6.3 for the frequencies of the tokens


def test_a_sample_of_the_weights_of_the_book_consists_of_its_words(infer):
    flags = ("--prompt", "Call me", "--max-new-tokens", 120, "--temperature", 0.6)
    result = infer("--weights", BOOK_WEIGHTS, *flags)
    assert (result.code, result.err) == (0, "")
    known = set(re.findall(r"[a-z]+", read_text(BOOK).lower()))
    words = re.findall(r"[a-z]+", result.out.split("Continuation:\n")[1].lower())[:-1]  # the last may be incomplete
    assert len(words) > 40 and sum(word in known for word in words) > 0.8 * len(words)


def test_without_a_prompt_the_weights_of_the_book_continue_the_book(infer):
    result = infer("--weights", BOOK_WEIGHTS, "--max-new-tokens", 1)
    assert (result.code, result.err) == (0, "") and "CHAPTER 1. Loomings.\n\nCall me Ishmael." in result.out


def test_the_weights_of_the_book_continue_any_text(infer, rng):
    letters = "".join(map(chr, rng.choice([*range(32, 0xD800), *range(0xE000, 0x110000)], 20)))
    for prompt in ("Hello", "\0", "naïve\r\n\t東京 🙂", letters):
        result = infer("--weights", BOOK_WEIGHTS, f"--prompt={prompt}", "--max-new-tokens", 2)
        assert (result.code, result.err) == (0, "") and f"):\n{prompt}\n\nContinuation:\n" in result.out


def test_the_weights_of_the_book_are_fine_tuned_on_any_text(train, tmp_path, rng):
    (tmp_path / "my.txt").write_text("".join(map(chr, rng.integers(0x3000, 0xA000, 500))), encoding="utf-8")
    flags = ("--data", tmp_path / "my.txt", "--seq-len", 32, "--batch-size", 2, "--sample", 0, "--lr", 1e-3)
    result = train("--init-from", BOOK_WEIGHTS, *flags, "--steps", 5)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.out)]
    assert (result.code, result.err) == (0, "") and losses[-1] < losses[0]


def test_the_preset_book_encodes_its_corpus_with_its_own_byte_pairs_unless_told_otherwise(train, tmp_path):
    (tmp_path / "my.txt").write_text("any text " * 50, encoding="utf-8")
    flags = ("--preset", "book", "--n-layer", 1, "--seq-len", 8, "--batch-size", 1, "--sample", 0, "--steps", 1)
    assert resolve_flags(cli.train_parser().parse_args(["--preset", "book"]), {}, True)[0].data == BOOK
    assert "vocabulary 2048\n" in train(*flags, "--data", tmp_path / "my.txt").out
    run = ("--out", tmp_path / "run")
    assert "vocabulary 256\n" in train(*flags, "--data", tmp_path / "my.txt", "--tokenizer", "byte", *run).out
    resumed = train("--resume", tmp_path / "run", "--steps", 2, "--sample", 0)
    assert (resumed.code, resumed.err) == (0, "") and "vocabulary 256\n" in resumed.out


def test_byte_pairs_encode_any_text_in_fewer_tokens_than_bytes(make_weights, tmp_path, rng):
    text = " ".join(WORDS[word] for word in rng.integers(0, len(WORDS), 500))
    make_weights.byte_pairs(text, 300).save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 300 and tokenizer.ids.keys() >= set(byte_alphabet())
    for other in (text, "naïve 東京 🙂\r\n"):
        assert tokenizer.decode(tokenizer.encode(other)) == other
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_the_measured_curve_is_the_papers_within_a_quarter_and_the_same_for_one_and_two_threads():
    measured = json.loads((ROOT / "results" / "cpu" / "curve.json").read_text())["results"]
    assert len(measured["losses"]) == 50 and max(map(abs, measured["deviations"])) < 0.25
    assert math.isclose(
        measured["losses"][0], math.log(172), rel_tol=0.03
    )  # random logits are slightly worse than uniform ones
    assert measured["equal"] and len(set(measured["hashes"].values())) == 1 and set(measured["hashes"]) >= {"1", "2"}

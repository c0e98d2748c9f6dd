"""The shipped weights, and the measured curve that the README quotes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.app.presets import CORPUS, PRESETS, WEIGHTS
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def make_weights():
    spec = importlib.util.spec_from_file_location("make_weights", ROOT / "data" / "make_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nine_of_ten_prompts_from_the_corpus_are_continued_with_its_own_tokens(make_weights):
    model = next(make_weights.models(load_checkpoint(WEIGHTS), 1))
    tokens = Tokenizer.load(WEIGHTS).encode(read_text(CORPUS))
    assert sum(make_weights.continues_correctly(model, tokens, start) for start in range(0, 50_000, 5_000)) >= 9


def test_the_shipped_weights_are_the_papers_model_in_16_bits_and_nothing_else():
    assert {path.name for path in WEIGHTS.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 22_000_000
    assert load_checkpoint(WEIGHTS).config == PRESETS["paper"]
    assert json.loads((WEIGHTS / "config.json").read_text())["dtype"] == "float16"


def test_the_measured_curve_is_the_papers_within_a_quarter_and_the_same_for_one_and_two_threads():
    measured = json.loads((ROOT / "results" / "cpu" / "curve.json").read_text())["results"]
    assert len(measured["losses"]) == 50 and max(map(abs, measured["deviations"])) < 0.25
    assert math.isclose(
        measured["losses"][0], math.log(172), rel_tol=0.03
    )  # random logits are slightly worse than uniform ones
    assert measured["equal"] and len(set(measured["hashes"].values())) == 1 and set(measured["hashes"]) >= {"1", "2"}

"""The shipped corpora: dummy.txt has the paper's sizes and is what its generator writes; moby_dick.txt is unchanged."""

import hashlib
import importlib.util
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"
GENERATOR = DATA / "make_corpus.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_corpus", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text():
    return read_text(DATA / "dummy.txt")


@pytest.fixture(scope="module")
def tokens(text):
    return Tokenizer.word_level(text).encode(text)


def test_corpus_has_the_papers_bytes_tokens_and_vocabulary(text, tokens):
    assert (len(text.encode("utf-8")), len(tokens), len(np.unique(tokens))) == (290_599, 52_600, 172)


def test_corpus_is_ascii_and_windows_may_wrap_around_its_end(text):
    assert text.isascii() and text.endswith(".\n") and "\r" not in text


def test_every_token_occurs_often_enough_to_be_learned(tokens):
    assert min(Counter(tokens.tolist()).values()) >= 12


def test_generator_writes_the_shipped_file(generator):
    assert generator.corpus().encode("ascii") == (DATA / "dummy.txt").read_bytes()


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_generator_checks_the_file_with_any_hash_seed(hash_seed, tmp_path):
    def run(*arguments):
        command = [sys.executable, str(GENERATOR), *map(str, arguments)]
        return subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=False)

    assert run("--check").returncode == 0
    copy = tmp_path / "copy.txt"
    assert run("--out", copy).returncode == 0 and copy.read_bytes() == (DATA / "dummy.txt").read_bytes()
    copy.write_bytes(copy.read_bytes().replace(b"Grace", b"grace", 1))
    changed = run("--check", "--out", copy)
    assert changed.returncode == 1 and b"make_corpus.py" in changed.stderr


def test_context_of_256_tokens_contains_every_digit_of_the_chapter_number(generator, text):
    words = re.findall(r" ?\w+| ?[^\w\s]|\s", text)
    for digit in (generator.YEARS, generator.SEASONS, generator.TOPICS):
        mentions = [at for at, word in enumerate(words) if word.strip() in digit]
        assert max(np.diff(mentions)) <= 105


def test_position_of_a_chapter_in_a_window_does_not_determine_its_topic(generator):
    lengths = {len(re.findall(r" ?\w+| ?[^\w\s]|\s", generator.chapter(number) + "\n")) for number in range(168)}
    phases = math.gcd(256, 52_600)
    assert lengths == {313} and math.gcd(313, phases) == 1 and math.gcd(len(generator.TOPICS), phases) == 1


def test_the_book_is_the_file_that_its_description_names():
    content, description = (DATA / "moby_dick.txt").read_bytes(), (DATA / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(content).hexdigest() in description and f"{len(content):,} bytes" in description
    text = content.decode("utf-8")
    assert re.findall(r"^CHAPTER (\d+)\. ", text, re.M) == [str(number) for number in range(1, 136)]
    assert text.count("\nEpilogue") == 1 and "\r" not in text and text.endswith(".\n")

"""make_english.py writes one line for each entry of a dictionary, and refuses a file that is not the dictionary."""

import gzip
import importlib
from pathlib import Path

import pytest

from gpt2core.text.token_file import load_tokens

DATA = Path(__file__).resolve().parents[2] / "data"
DICTIONARY = """00-database-url
   ftp://ftp.gnu.org/gnu/gcide

Largo \\Lar"go\\, a. & adv. [It., large, L. largus, See {Large}.]
   (Mus.)
   Slow or slowly; -- more so than {adagio}.
   [1913 Webster]

Lark \\Lark\\, v. i.
   To sport;   to frolic.
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DATA))
    module = importlib.import_module("make_english")
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.\n")
    monkeypatch.setattr(module, "BOOK", book)
    monkeypatch.setattr(module, "VOCAB_SIZE", 270)
    return module


def test_the_text_is_the_book_and_the_entries_without_their_marks(module, tmp_path, capsys):
    path = tmp_path / "gcide.dict.dz"
    path.write_bytes(gzip.compress(DICTIONARY.encode() + b"\xe9"))
    assert module.main([str(path), "--out", str(tmp_path / "out")]) == 0
    tokens, tokenizer = load_tokens(tmp_path / "out")
    assert tokenizer.decode(tokens.tolist()) == (
        "Call me Ishmael.\n"
        "00-database-url ftp://ftp.gnu.org/gnu/gcide\n"
        "Largo , a. & adv. (Mus.) Slow or slowly; -- more so than adagio.\n"
        "Lark , v. i. To sport; to frolic.\n"
    )
    assert f"{len(tokens):,} tokens" in capsys.readouterr().out and tokenizer.vocab_size == 270
    assert module.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert "tokens.bin exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"text" * 99, mtime=0)[:-20], b"\x1f\x8b" + b"x" * 20, None]
)
def test_another_file_is_refused(module, tmp_path, capsys, content):
    path = tmp_path / "gcide.dict.dz"
    if content is not None:
        path.write_bytes(content)
    assert module.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}") and not (tmp_path / "out").exists()

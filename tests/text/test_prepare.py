"""prepare.py writes the tokens of the whole text in constant memory; after an error it writes one line and no file."""

import importlib.util
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from gpt2core.errors import DataError
from gpt2core.text import token_file as dataset
from gpt2core.text.token_file import TOKEN_FILE, load_tokens, read_text
from gpt2core.text.tokenizer import END_OF_TEXT, FILE_NAME, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "data" / "prepare.py"
CORPUS = ROOT / "data" / "dummy.txt"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def story(tmp_path):
    """A text with words, marks, runs of whitespace, CRLF and characters of one to four bytes, in shuffled order."""
    words = ["loss", "naïve", "東京", "🙂", "it's", "2,048", "\r\n", "\n\n", "   ", "\t", ".", "—", "e\u0301"]
    rng = random.Random(0)
    path = tmp_path / "story.txt"
    path.write_bytes("".join(rng.choice(words) + rng.choice([" ", " ", ""]) for _ in range(20_000)).encode("utf-8"))
    return path


@pytest.fixture
def pairs(tmp_path, story):
    """The path of a small byte-pair tokenizer.json."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    library.train([str(story)], trainer)
    library.save(str(tmp_path / "pairs.json"))
    return tmp_path / "pairs.json"


@pytest.mark.parametrize("spec", ["word", "byte", "bpe"])
def test_token_file_holds_the_tokens_of_the_whole_text(module, spec, story, pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "text_chunks", lambda path: dataset.text_chunks(path, 1000))  # many chunks
    spec = str(pairs) if spec == "bpe" else spec
    assert module.main([str(story), "--tokenizer", spec, "--out", str(tmp_path / "out")]) == 0
    text = read_text(story)
    tokens, tokenizer = load_tokens(tmp_path / "out")
    assert tokens.tolist() == tokenizer.library.encode(text).ids and tokenizer.decode(tokens) == text
    if spec == "word":
        assert tokenizer.to_bytes() == Tokenizer.word_level(text).to_bytes()
    assert set(os.listdir(tmp_path / "out")) == {TOKEN_FILE, FILE_NAME}
    assert f"{len(tokens):,} tokens, vocabulary of {tokenizer.vocab_size}" in capsys.readouterr().out


def test_default_output_is_in_the_directory_of_the_text(module, story):
    assert module.main([str(story), "--tokenizer", "byte"]) == 0
    assert load_tokens(story.with_suffix(".tokens"))[1].decode(
        load_tokens(story.with_suffix(".tokens"))[0]
    ) == read_text(story)


def test_second_run_replaces_the_first_only_with_overwrite(module, story, tmp_path, capsys):
    words = [str(story), "--out", str(tmp_path / "out")]
    assert module.main([*words, "--tokenizer", "byte"]) == 0
    for missing in (None, TOKEN_FILE):
        if missing:
            (tmp_path / "out" / missing).unlink()  # the tokenizer of a checkpoint must not be replaced either
        capsys.readouterr()
        assert module.main([*words, "--tokenizer", "word"]) == 2
        error, file = capsys.readouterr().err, tmp_path / "out" / (FILE_NAME if missing else TOKEN_FILE)
        assert error == f"error: {file} exists: choose another --out, or add --overwrite to replace it\n"
        assert Tokenizer.load(tmp_path / "out").kind == "byte"
    assert module.main([*words, "--tokenizer", "word", "--overwrite"]) == 0
    assert load_tokens(tmp_path / "out")[1].kind == "word"


def test_uninstalled_clone_prepares_from_its_root(tmp_path):
    for name in ("gpt2core", "data"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "weights*", "*.safetensors")
        )
    command = [sys.executable, "data/prepare.py", "data/dummy.txt", "--out", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "52,600 tokens, vocabulary of 172 (word)" in run.stdout
    assert run.stderr == ""  # no bar, because standard error is no terminal
    assert len(load_tokens(tmp_path / "out")[0]) == 52_600


def peak_memory(*arguments):
    """The peak resident memory in KiB of prepare.py, in a separate process."""
    program = (
        "import resource, runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, str(SCRIPT), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout.split()[-1]) // (1024 if sys.platform == "darwin" else 1)


@pytest.mark.skipif(not hasattr(resource, "getrusage"), reason="needs getrusage")
@pytest.mark.parametrize("spec, copies", [("word", 12), ("byte", 100)])
def test_peak_memory_does_not_grow_with_the_text(spec, copies, tmp_path):
    peaks = []
    for times in (4, copies):  # one copy is less than a whole chunk, and its buffers are smaller by megabytes
        text = tmp_path / f"{times}.txt"
        text.write_bytes(CORPUS.read_bytes() * times)
        peaks.append(peak_memory(text, "--tokenizer", spec, "--out", tmp_path / str(times)))
    grown = (copies - 4) * CORPUS.stat().st_size / 1024
    # KiB: a whole text in memory takes several times its size, for ids and words; peaks differ by up to one size
    assert peaks[1] - peaks[0] < 2 * grown


@pytest.mark.parametrize(
    "content, message",
    [(None, "is not a file"), (b"", "is empty"), (b"caf\xe9 au lait", "is not UTF-8: byte 3 ")],
)
def test_bad_text_is_one_line_and_exit_code_2(module, content, message, tmp_path, capsys):
    text = tmp_path / "bad.txt"
    if content is not None:
        text.write_bytes(content)
    assert module.main([str(text), "--tokenizer", "byte", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert message in error and str(text) in error
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_directory_for_a_text_is_named(module, tmp_path, capsys):
    assert module.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} is not a file" in capsys.readouterr().err


def test_missing_tokenizer_is_named(module, story, tmp_path, capsys):
    assert module.main([str(story), "--tokenizer", "none.json", "--out", str(tmp_path / "out")]) == 2
    assert "cannot read the tokenizer none.json" in capsys.readouterr().err


def test_a_message_of_the_library_is_printed_with_flags(module, story, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise DataError("`tokenizer=word` finds no words: use `tokenizer=byte`")

    monkeypatch.setattr(module, "build_tokenizer", refuse)
    assert module.main([str(story), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: --tokenizer word finds no words: use --tokenizer byte\n"


def test_output_that_is_a_file_is_named(module, story, capsys):
    assert module.main([str(story), "--out", str(story)]) == 2
    assert f"cannot create the directory {story}" in capsys.readouterr().err


def test_interrupt_leaves_the_earlier_files(module, story, tmp_path, monkeypatch, capsys):
    assert module.main([str(story), "--tokenizer", "byte", "--out", str(tmp_path / "out")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(*_):
        yield "the loss "
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "chunks_with_bar", interrupted)
    words = [str(story), "--tokenizer", "byte", "--out", str(tmp_path / "out"), "--overwrite"]
    assert module.main(words) == 130
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert "interrupted" in capsys.readouterr().err


def test_help_names_every_flag(module, capsys):
    assert module.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--tokenizer", "--out", "text"))


def with_end_of_text(pairs):
    """Add the token <|endoftext|> to a tokenizer.json; returns its path."""
    library = Library.from_file(str(pairs))
    library.add_special_tokens([END_OF_TEXT])
    library.save(str(pairs))
    return pairs


def test_between_two_texts_is_the_token_that_ends_a_text(module, story, pairs, tmp_path):
    other, out = tmp_path / "other.txt", tmp_path / "out"
    other.write_text("another text")
    spec = str(with_end_of_text(pairs))
    assert module.main([str(story), str(other), str(story), "--tokenizer", spec, "--out", str(out)]) == 0
    ids, tokenizer = load_tokens(out)
    first, second = (tokenizer.encode(read_text(path)).tolist() for path in (story, other))
    end = tokenizer.end_of_text
    assert ids.tolist() == [*first, end, *second, end, *first] and tokenizer.token_bytes[end] == END_OF_TEXT.encode()


@pytest.mark.parametrize("spec", ["word", "byte", "bpe"])
def test_several_texts_need_a_token_between_them(module, spec, story, pairs, tmp_path, capsys):
    spec = str(pairs) if spec == "bpe" else spec
    assert module.main([str(story), str(story), "--tokenizer", spec, "--out", str(tmp_path / "out")]) == 2
    assert f"{spec} has no token {END_OF_TEXT} to put between 2 texts: give " in capsys.readouterr().err
    assert not (tmp_path / "out" / TOKEN_FILE).exists()


@pytest.mark.parametrize("arguments, words", [([], "required: TEXT"), (["a", "--tokeniser", "byte"], "--tokeniser")])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(module, arguments, words, capsys):
    assert module.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_a_terminal_shows_a_bar_for_each_pass(module, story, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert module.main([str(story), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().err
    assert "vocabulary: " in shown and "tokens: " in shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full")
def test_a_full_standard_output_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(SCRIPT), str(CORPUS), "--out", str(tmp_path / "out")]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (2, "error: the output: No space left on device\n")

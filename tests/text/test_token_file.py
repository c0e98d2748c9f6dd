"""Windows returns every window once, resumes exactly and copies nothing; a bad file is reported before step 1."""

import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2core.app.corpus import note_large_text
from gpt2core.data import Windows
from gpt2core.errors import ConfigError, DataError
from gpt2core.text import token_file as dataset
from gpt2core.text.token_file import (
    HEADER,
    MAGIC,
    TOKEN_FILE,
    first_tokens,
    load_tokens,
    open_token_file,
    read_text,
    split_validation,
    text_chunks,
    write_token_file,
)
from gpt2core.text.tokenizer import Tokenizer, build_tokenizer

STORY = "the loss went down, step after step\n" * 20

corpora = st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda sizes: (sizes[0], sizes[0] + 1 + sizes[1]))


def naive(tokens, start, length):
    """The endless circular stream from `start`, one token at a time."""
    return [int(tokens[(start + i) % len(tokens)]) for i in range(length)]


@settings(deadline=None)
@given(corpora, st.integers(0, 10**12), st.integers(1, 12))
def test_sequential_order_is_slicing_of_the_circular_stream(sizes, position, count):
    T, n = sizes
    tokens = np.arange(n, dtype=np.uint16)
    inputs, targets = Windows(tokens, T).batch(position, count)
    want = [naive(tokens, (position + row) * T, T + 1) for row in range(count)]
    assert inputs.tolist() == [row[:-1] for row in want] and targets.tolist() == [row[1:] for row in want]


@settings(deadline=None)
@given(corpora, st.integers(0, 3), st.integers(0, 5))
def test_shuffled_epoch_visits_every_window_once(sizes, seed, epoch):
    T, n = sizes
    tokens = np.arange(n, dtype=np.uint16)
    windows = Windows(tokens, T, "shuffled", seed)
    size = windows.windows_per_epoch
    inputs, targets = windows.batch(epoch * size, size)
    got = sorted([*x, y[-1]] for x, y in zip(inputs.tolist(), targets.tolist(), strict=True))
    assert size == -(-n // T)
    assert got in [sorted(naive(tokens, first + window * T, T + 1) for window in range(size)) for first in range(T)]
    assert inputs[:, 1:].tolist() == targets[:, :-1].tolist()


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@settings(deadline=None)
@given(corpora, st.integers(0, 200), st.integers(0, 3), st.integers(1, 4))
def test_rows_of_the_ranks_tile_the_global_batch(order, sizes, position, log_ranks, rows):
    T, n = sizes
    tokens = np.arange(n, dtype=np.uint16)
    ranks = 1 << log_ranks
    whole = Windows(tokens, T, order).batch(position, ranks * rows)
    parts = [Windows(tokens, T, order).batch(position + rank * rows, rows) for rank in range(ranks)]
    for whole_half, part_halves in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.concatenate(part_halves).tolist() == whole_half.tolist()


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_resumed_loader_continues_as_if_it_had_never_stopped(order):
    tokens = np.arange(1000)
    straight = Windows(tokens, 16, order, seed=7)
    history = [straight.batch(position, 4)[0].tolist() for position in range(0, 400, 4)]  # six epochs
    for position in (0, 64, 200, 396):
        assert Windows(tokens, 16, order, seed=7).batch(position, 4)[0].tolist() == history[position // 4]
    assert straight.batch(0, 4)[0].tolist() == history[0]  # also after later batches were read


def test_shuffled_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        windows = Windows(np.arange(1600), 16, "shuffled", seed)
        return windows.batch(100 * epoch, 100)[0][:, 0].tolist()

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(0, 0) != sorted(order(0, 0))


def test_over_shuffled_epochs_a_token_meets_every_position():
    windows = Windows(np.arange(64), 4, "shuffled")
    inputs, _ = windows.batch(0, 16 * 40)  # forty epochs
    assert {int(position) for position in np.nonzero(inputs == 13)[1]} == {0, 1, 2, 3}


def test_sequential_batch_is_a_view_of_the_corpus_and_only_the_seam_is_copied():
    tokens = np.arange(100, dtype=np.uint16)
    windows = Windows(tokens, 8)
    for position, copied in ((0, False), (8, False), (10, True), (13, False)):
        inputs, targets = windows.batch(position, 4)
        assert np.shares_memory(inputs, tokens) == np.shares_memory(targets, tokens) == (not copied)
        assert not inputs.flags.writeable and not targets.flags.writeable
        assert np.shares_memory(inputs, targets)  # one range of tokens, shifted by one
    assert tokens.flags.writeable  # the caller's array stays writeable


def test_validation_covers_each_whole_window_once_and_never_the_seam():
    tokens = np.arange(100)
    batches = list(Windows(tokens, 8).once(5))
    assert [len(inputs) for inputs, _ in batches] == [5, 5, 2]
    assert np.concatenate([targets.ravel() for _, targets in batches]).tolist() == list(range(1, 97))
    assert all(np.shares_memory(inputs, tokens) for inputs, _ in batches)
    assert [x.tolist() for x, _ in Windows(np.arange(9), 8).once(5)] == [[list(range(8))]]  # exactly one window
    for length in range(9, 40):  # 16, 24, ...: the last token of the last whole window has no next token
        targets = [y.ravel() for _, y in Windows(np.arange(length), 8).once(2)]
        assert np.concatenate(targets).tolist() == list(range(1, (length - 1) // 8 * 8 + 1)), length


@pytest.mark.parametrize("kind", ["word", "byte"])
@pytest.mark.parametrize("chunk", [1, 16, 1 << 13])
def test_the_first_tokens_are_those_of_the_whole_text(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(dataset, "FIRST_CHUNK", chunk)
    (tmp_path / "text").write_text(text := "the café of one naïve word\nand then another\n" * 9, encoding="utf-8")
    tokenizer = build_tokenizer(kind, text)
    ids = tokenizer.encode(text)
    write_token_file(tmp_path / "tokens.bin", [ids], tokenizer)
    tokenizer.save(tmp_path)
    for count in (0, 1, 5, 40, len(ids) - 1, len(ids), len(ids) + 7):
        for path in ("text", "tokens.bin"):
            assert first_tokens(tmp_path / path, tokenizer, count).tolist() == ids[:count].tolist(), (path, count)


def token_file(folder, ids=None, tokenizer=None):
    tokenizer = tokenizer or Tokenizer.byte_level()
    ids = tokenizer.encode(STORY) if ids is None else ids
    tokenizer.save(folder)
    write_token_file(folder / TOKEN_FILE, [ids[:100], ids[100:]], tokenizer)
    return folder / TOKEN_FILE


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_batches_of_a_memory_map_equal_those_of_the_array(order, tmp_path):
    ids = Tokenizer.byte_level().encode(STORY)
    mapped = open_token_file(token_file(tmp_path))
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable
    for position in (0, 20, 44):
        got, want = (Windows(tokens, 16, order).batch(position, 4) for tokens in (mapped, ids))
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    assert np.shares_memory(Windows(mapped, 16).batch(0, 4)[0], mapped)


def test_file_larger_than_its_disk_blocks_is_mapped_and_not_read(tmp_path, monkeypatch):
    path, count = tmp_path / TOKEN_FILE, 1 << 36  # 128 GiB of zeros, of which the file system stores none
    tokenizer = Tokenizer.byte_level()
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 2, tokenizer.fingerprint, 256, count))
        file.truncate(HEADER.size + 2 * count)
    windows = Windows(open_token_file(path), 1024)
    inputs, _ = windows.batch(windows.windows_per_epoch - 3, 8)  # across the seam
    assert inputs.shape == (8, 1024) and not inputs.any()


@pytest.mark.parametrize("size, item", [(256, 2), (65_536, 2), (65_537, 4)])
def test_token_file_has_the_documented_bytes(size, item, tmp_path, monkeypatch):
    tokenizer = Tokenizer.byte_level()
    tokenizer.vocab_size, tokenizer.dtype = size, np.dtype(f"u{item}")
    assert write_token_file(tmp_path / "x", [np.array([1, 2]), np.array([], int), np.array([size - 1])], tokenizer) == 3
    header = b"\x93GPT2TOK" + struct.pack("<HHIQQ", 1, item, tokenizer.fingerprint, size, 3)
    assert (tmp_path / "x").read_bytes() == header + struct.pack("<3" + {2: "H", 4: "I"}[item], 1, 2, size - 1)
    assert open_token_file(tmp_path / "x").tolist() == [1, 2, size - 1]


def test_interrupted_writing_leaves_the_old_file_and_no_other(tmp_path):
    path = token_file(tmp_path)
    before = path.read_bytes()

    def broken():
        yield np.zeros(10, np.uint16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(path, broken(), Tokenizer.byte_level())
    assert path.read_bytes() == before and set(os.listdir(tmp_path)) == {TOKEN_FILE, "tokenizer.json"}


def test_full_disk_and_missing_directory_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="cannot write .*missing.*No such file"):
        write_token_file(tmp_path / "missing" / "x", [np.zeros(3, int)], Tokenizer.byte_level())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset.os, "fsync", full)
    with pytest.raises(DataError, match=f"cannot write {tmp_path}/x: No space left on device"):
        write_token_file(tmp_path / "x", [np.zeros(3, int)], Tokenizer.byte_level())
    assert os.listdir(tmp_path) == []


def test_load_tokens_takes_a_text_a_token_file_or_its_directory(tmp_path):
    (tmp_path / "story.txt").write_text(STORY)
    path = token_file(tmp_path, tokenizer=Tokenizer.byte_level())
    for data, spec in ((path, None), (tmp_path, None), (str(tmp_path), "byte"), (path, tmp_path)):
        tokens, tokenizer = load_tokens(data, spec)
        assert tokenizer.kind == "byte" and tokenizer.decode(tokens) == STORY
    for spec, kind in ((None, "word"), ("word", "word"), ("byte", "byte"), (tmp_path, "byte")):
        tokens, tokenizer = load_tokens(tmp_path / "story.txt", spec)
        assert tokenizer.kind == kind and tokenizer.decode(tokens) == STORY


def test_validation_text_is_read_with_the_tokenizer_it_is_given(tmp_path):
    tokenizer = Tokenizer.word_level(STORY)
    (tmp_path / "same.txt").write_text("the step went down\n")
    (tmp_path / "other.txt").write_text("the dragon went down\n")
    tokens, same = load_tokens(tmp_path / "same.txt", tokenizer)
    assert same is tokenizer and tokenizer.decode(tokens) == "the step went down\n"
    with pytest.raises(DataError, match="' dragon'"):
        load_tokens(tmp_path / "other.txt", tokenizer)


def test_token_file_of_another_vocabulary_is_refused(tmp_path):
    path = token_file(tmp_path)
    with pytest.raises(DataError, match="`tokenizer=word`: .* contains byte tokens; omit the flag"):
        load_tokens(path, "word")
    with pytest.raises(DataError, match="made with another tokenizer .*has 256 tokens, this one 8"):
        load_tokens(path, Tokenizer.word_level(STORY))
    Tokenizer.word_level(STORY.replace("loss", "gain")).save(tmp_path)
    with pytest.raises(DataError, match="made with another tokenizer"):
        load_tokens(path)
    (tmp_path / "tokenizer.json").unlink()
    for tokenizer in (None, "byte"):
        with pytest.raises(DataError, match="cannot read the tokenizer .*tokenizer.json: .* convert the text again"):
            load_tokens(tmp_path, tokenizer)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda b: b[:-1], "truncated or corrupt"),
        (lambda b: b + b"\0", "truncated or corrupt"),
        (lambda b: b[:20], "it has 20 bytes, but its header needs 32"),
        (lambda b: b"", "is not a token file"),
        (lambda b: b"once upon a time", "is not a token file"),
        (lambda b: b[:8] + b"\x09" + b[9:], "version 9, this program reads version 1"),
        (lambda b: b[:10] + b"\x03" + b[11:], "has a corrupt header"),
        (lambda b: b[:16] + bytes(8) + b[24:], "has a corrupt header"),
        (lambda b: b[:16] + (65_537).to_bytes(8, "little") + b[24:], "2 bytes, vocabulary 65537"),
        (lambda b: b[:24] + bytes(8), "has a corrupt header"),
        (lambda b: b[:40] + b"\xff\xff" + b[42:], "token id 65535 is outside its vocabulary of 256"),
    ],
)
def test_damaged_token_file_is_named(damage, message, tmp_path):
    path = token_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        open_token_file(path)
    assert str(path) in str(error.value)


def test_missing_token_file_is_named(tmp_path):
    with pytest.raises(DataError, match="none.bin: No such file"):
        open_token_file(tmp_path / "none.bin")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(1, 5))
def test_text_is_read_byte_for_byte_whatever_the_chunks(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(text.encode("utf-8"))
    assert read_text(path) == text == "".join(text_chunks(path, size))


@pytest.mark.parametrize(
    "content, offset",
    [(b"abc\xffdef", 3), ("naïve".encode("latin-1"), 2), ("caf\u00e9".encode()[:-1], 3), (b"\xff\xfea", 0)],
)
def test_corpus_that_is_not_utf8_is_named_with_the_byte(tmp_path, content, offset):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    for size in (1, 2, 3, 1000):
        with pytest.raises(DataError, match=f"{path} is not UTF-8: byte {offset} "):
            list(text_chunks(path, size))


def test_missing_empty_or_foreign_corpus_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    for name, message in (("none.txt", "No such file"), (".", "directory"), ("empty.txt", "is empty")):
        with pytest.raises(DataError, match=message) as error:
            load_tokens(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)


def test_corpus_shorter_than_a_window_is_named_with_both_numbers():
    with pytest.raises(DataError, match="text has 256 tokens, but one sequence of 256 needs 257"):
        Windows(np.zeros(256, int), 256)
    assert Windows(np.zeros(257, int), 256).batch(0, 1)[0].shape == (1, 256)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"order": "random"}, "'random': choose sequential or shuffled"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_option_of_the_loader_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Windows(**{"tokens": np.arange(100), "seq_len": 8, **options})


@pytest.mark.parametrize("position, count", [(-1, 4), (0, 0)])
def test_wrong_batch_is_named(position, count):
    with pytest.raises(ConfigError, match=f"{count} windows at {position}"):
        Windows(np.arange(100), 8).batch(position, count)


@pytest.mark.parametrize("tokens", [np.zeros((10, 10), int), np.zeros(100), "abc"])
def test_tokens_that_are_no_row_of_integers_are_refused(tokens):
    with pytest.raises(DataError, match="one row of integers"):
        Windows(tokens, 8)


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True))
def test_validation_is_the_end_of_the_corpus_and_shares_its_memory(n, fraction):
    tokens = np.arange(n)
    training, validation = split_validation(tokens, fraction)
    assert np.concatenate([training, validation]).tolist() == tokens.tolist()
    assert abs(len(validation) - n * fraction) <= 0.5 and training.base is tokens


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_wrong_validation_fraction_is_named(fraction):
    with pytest.raises(ConfigError, match=f"`val_fraction={fraction}` must be"):
        split_validation(np.arange(10), fraction)


def test_only_a_large_text_gets_a_note_that_names_prepare(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2core.app.corpus.LARGE_TEXT", 100)
    tokenizer = Tokenizer.byte_level()
    write_token_file(tmp_path / TOKEN_FILE, [np.zeros(200, np.uint8)], tokenizer)
    (tmp_path / "small.txt").write_text("a" * 99)
    (tmp_path / "large.txt").write_text("a" * 100)
    with pytest.warns(UserWarning) as shown:
        for name in ("small.txt", "large.txt", TOKEN_FILE):
            note_large_text(tmp_path / name)
    (text,) = (str(each.message) for each in shown)
    assert text.startswith(f"encoding {tmp_path / 'large.txt'} ") and "data/prepare.py" in text

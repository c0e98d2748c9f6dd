"""Many files of tokens are read as one sequence, in the formats of this project, of llm.c and of nanoGPT."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.app.fingerprints import token_fingerprint
from gpt2core.data import Windows
from gpt2core.errors import DataError
from gpt2core.parallel.data.local_windows import LocalWindows
from gpt2core.text import token_file
from gpt2core.text.token_file import split_validation, write_token_file
from gpt2core.text.token_files import LLMC_MAGIC, data_files, first_tokens, load_tokens, token_paths
from gpt2core.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer.byte_level()
SIZES = (40, 1, 17, 300, 64)


def write_llmc(path, ids, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = LLMC_MAGIC, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())


def write_raw(path, ids):
    path.write_bytes(np.asarray(ids, "<u2").tobytes())


def write_own(path, ids):
    write_token_file(path, [np.asarray(ids, BYTES.dtype)], BYTES)


WRITERS = {"llm.c": write_llmc, "uint16": write_raw, "GPT2TOK": write_own}


def write_corpus(folder, write, rng, sizes=SIZES):
    """Write files of random bytes, and the tokenizer; returns the ids of all files as one array."""
    parts = [rng.integers(0, 256, size) for size in sizes]
    for number, part in enumerate(parts):
        write(folder / f"part_{number:03}.bin", part)
    BYTES.save(folder / "tokenizer.json")
    return np.concatenate(parts).astype(np.uint16)


@pytest.fixture
def corpus_of(tmp_path, rng):
    """corpus_of(write) -> (TokenFiles, the ids as one array)."""

    def make(write=write_raw):
        ids = write_corpus(tmp_path, write, rng)
        return load_tokens(tmp_path / "*.bin")[0], ids

    return make


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_batches_equal_those_of_one_array_across_all_ends(corpus_of, write, order):
    files, ids = corpus_of(write)
    for T in (1, 7, 64, len(ids) - 1):
        got, want = (Windows(tokens, T, order, seed=3) for tokens in (files, ids))
        assert got.windows_per_epoch == want.windows_per_epoch
        for position in range(0, 2 * want.windows_per_epoch + 1, 5):
            for batches in zip(got.batch(position, 5), want.batch(position, 5), strict=True):
                assert_array_equal(*batches)
        for batches in zip(got.once(3), want.once(3), strict=True):
            assert_array_equal(*batches)


def test_the_batches_of_all_ranks_together_are_those_of_one_rank(corpus_of):
    windows = Windows(corpus_of()[0], 16, "shuffled", seed=1)
    whole = windows.batch(8, 8)[0]
    for ranks in (1, 2, 4):
        own = 8 // ranks
        assert_array_equal(np.concatenate([windows.batch(8 + rank * own, own)[0] for rank in range(ranks)]), whole)


def test_local_shuffle_and_the_split_for_validation_are_those_of_one_array(corpus_of):
    files, ids = corpus_of()
    for got, want in zip(split_validation(files, 0.3), split_validation(ids, 0.3), strict=True):
        assert_array_equal(np.asarray(got), want)
        assert_array_equal(Windows(got, 16, "shuffled").batch(2, 9)[1], Windows(want, 16, "shuffled").batch(2, 9)[1])
    for rank in (0, 1):
        got, want = (LocalWindows(tokens, 16, 0, rank, 2).batch(4 + rank * 2, 2) for tokens in (files, ids))
        assert_array_equal(got, want)
    assert_array_equal(np.asarray(files[10:50][5:20]), ids[15:30])
    assert len(files[30:30]) == np.asarray(files[30:30]).size == 0


def test_batches_are_read_only_and_the_array_of_the_caller_stays_writeable(corpus_of):
    files, ids = corpus_of()
    for tokens in (files, ids):
        for order in ("sequential", "shuffled"):
            with pytest.raises(ValueError, match="read-only"):
                Windows(tokens, 16, order).batch(0, 2)[0][0, 0] = 1
    ids[0] = 1


def test_the_fingerprint_depends_on_contents_names_sizes_and_limits(tmp_path, rng):
    write_corpus(tmp_path, write_raw, rng)
    seen = [token_fingerprint(load_tokens(tmp_path / "*.bin")[0])]
    assert token_fingerprint(load_tokens(tmp_path / "*.bin")[0]) == seen[0]
    seen.append(token_fingerprint(split_validation(load_tokens(tmp_path / "*.bin")[0], 0.1)[0]))
    (tmp_path / "part_002.bin").rename(tmp_path / "part_0021.bin")
    seen.append(token_fingerprint(load_tokens(tmp_path / "*.bin")[0]))
    (tmp_path / "part_000.bin").write_bytes(bytes(80))
    seen.append(token_fingerprint(load_tokens(tmp_path / "*.bin")[0]))
    assert len(set(seen)) == 4


def test_a_single_file_has_the_fingerprint_of_its_array(tmp_path, rng):
    ids = write_corpus(tmp_path, write_llmc, rng, sizes=(500,))
    assert token_fingerprint(load_tokens(tmp_path / "part_000.bin")[0]) == token_fingerprint(ids)


def test_the_files_of_a_pattern_are_sorted_and_a_path_with_a_bracket_is_no_pattern(tmp_path):
    for name in ("b.bin", "a.bin", "a10.bin", "c.txt"):
        write_raw(tmp_path / name, [1, 2])
    assert [path.name for path in token_paths(tmp_path / "*.bin")] == ["a.bin", "a10.bin", "b.bin"]
    write_raw(tmp_path / "x[1].bin", [1, 2, 3])
    assert token_paths(tmp_path / "x[1].bin") == data_files(tmp_path / "x[1].bin") == [tmp_path / "x[1].bin"]
    BYTES.save(tmp_path / "tokenizer.json")
    assert_array_equal(first_tokens(tmp_path / "x[1].bin", BYTES, 2), [1, 2])


def test_an_id_beyond_the_vocabulary_is_named_with_its_file_and_place(tmp_path, rng, monkeypatch):
    write_corpus(tmp_path, write_raw, rng)
    write_raw(tmp_path / "part_003.bin", [1] * 250 + [256] + [2] * 49)
    message = r"part_003.bin: token 250 has the id 256, but the tokenizer has 256 tokens"
    with pytest.raises(DataError, match=message):
        load_tokens(tmp_path / "*.bin")
    monkeypatch.setattr(token_file, "CHECKED", 100)  # of a large corpus the first ids are checked, others when read
    tokens = load_tokens(tmp_path / "*.bin")[0]
    for order in ("sequential", "shuffled"):
        windows = Windows(tokens, 64, order)
        with pytest.raises(DataError, match=message):
            windows.batch(0, windows.windows_per_epoch)


def edit(name, content):
    return lambda folder: (folder / name).write_bytes(content)


MISTAKES = {
    "no file": (lambda folder: [path.unlink() for path in folder.glob("*.bin")], "no file matches this pattern"),
    "odd": (edit("part_001.bin", b"\0\0\1"), r"part_001.bin has an odd number of bytes \(3\): .* 2 bytes per token"),
    "empty": (edit("part_001.bin", b""), "part_001.bin has no bytes"),
    "mixed": (
        lambda folder: write_llmc(folder / "part_001.bin", [1, 2]),
        "part_000.bin has uint16 tokens of 2 bytes and .*part_001.bin has llm.c tokens of 2 bytes: give files of one",
    ),
    "version": (lambda folder: write_llmc(folder / "part_000.bin", [1], version=7), "llm.c file of version 7, .* 1"),
    "cut": (lambda folder: write_llmc(folder / "part_000.bin", [1], count=9), "1026 bytes, .* 9 tokens, .* 1042 bytes"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "without a tokenizer: copy the tokenizer"),
    "directory": (lambda folder: (folder / "x.bin").mkdir(), "x.bin is not a regular file"),
}


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_wrong_files_are_one_error(tmp_path, rng, change, message):
    write_corpus(tmp_path, write_raw, rng)
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokens(tmp_path / "*.bin")


# -- the command -------------------------------------------------------------------------------------------------------

NANO = ("--preset", "nano", "--sample", 3, "--threads", 1)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_training_on_files_has_the_losses_of_the_whole_corpus_and_resumes_exactly(train, infer, tmp_path, rng, write):
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole").mkdir()
    ids = write_corpus(tmp_path / "parts", write, rng)
    write_own(tmp_path / "whole" / "tokens.bin", ids)
    BYTES.save(tmp_path / "whole" / "tokenizer.json")
    hashes = []
    for data, steps in (("whole", [12]), ("parts/*.bin", [5, 12])):
        out, log = tmp_path / "run" / data[:5], tmp_path / f"{data[:5]}.jsonl"
        flags = ("--data", tmp_path / data, "--shuffle", "--val-fraction", 0.1)
        for count in steps:
            result = train(*NANO, *flags, "--steps", count, "--out", out, "--log", log)
            assert (result.code, result.err) == (0, "")
            flags = ("--resume", out)
        hashes.append(json.loads(log.read_text().splitlines()[-1])["parameters_sha256"])
    assert hashes[0] == hashes[1]
    result = infer("--weights", out, "--max-new-tokens", 2)  # the prompt is the beginning of the corpus
    assert (result.code, result.err) == (0, "") and "Prompt (16 tokens)" in result.out
    write(tmp_path / "parts" / "part_900.bin", [1, 2, 3])
    result = train("--resume", out, "--out", out, "--steps", 13)
    assert result.code == 2 and "was trained on" in result.err


def test_a_resumed_run_uses_the_tokenizer_of_its_checkpoint(train, tmp_path, rng):
    write_corpus(tmp_path, write_raw, rng)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    flags = ("--data", tmp_path / "*.bin", "--tokenizer", tmp_path / "other.json", "--out", tmp_path / "run")
    assert train(*NANO, *flags, "--steps", 1).code == 0
    result = train("--resume", tmp_path / "run", "--out", tmp_path / "run", "--steps", 2)
    assert (result.code, result.err) == (0, "") and "2 in total" in result.out


def test_a_corpus_that_was_moved_is_named_when_a_run_is_resumed(train, tmp_path, rng):
    (tmp_path / "a").mkdir()
    write_corpus(tmp_path / "a", write_raw, rng)
    assert train(*NANO, "--data", tmp_path / "a" / "*.bin", "--steps", 1, "--out", tmp_path / "run").code == 0
    (tmp_path / "a").rename(tmp_path / "b")
    again = ("--resume", tmp_path / "run", "--out", tmp_path / "run", "--steps", 2)
    result = train(*again)
    assert result.code == 2 and "does not exist: give its present path with --data" in result.err
    assert train(*again, "--data", tmp_path / "b" / "*.bin").code == 0


def test_the_memory_of_a_process_does_not_grow_with_the_tokens_that_it_reads(tmp_path):
    """80 MB of tokens are read in a random order; a memory map would keep the pages of all of them."""
    for number in range(4):
        with open(tmp_path / f"{number}.bin", "wb") as file:
            file.truncate(20 << 20)  # sparse: zeros
    BYTES.save(tmp_path / "tokenizer.json")
    code = f"""
import re
from gpt2core.data import Windows
from gpt2core.text.token_files import load_tokens
def resident(): return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = resident()
windows = Windows(load_tokens({str(tmp_path / "*.bin")!r})[0], 1024, "shuffled")
for position in range(0, windows.windows_per_epoch, 64):
    windows.batch(position, 64)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 << 10  # kB: those of a block of ids, of a batch and its indices, and of an epoch

"""What ranks compare when they start: their cores, and both ends of a large file or corpus."""

import os
import platform
import threading

import numpy as np
import pytest

from gpt2core.app import fingerprints
from gpt2core.app.fingerprints import file_fingerprint, token_fingerprint
from gpt2core.app.rank_agreement import agree_on_start, compare_files
from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.errors import ConfigError
from gpt2core.parallel.thread_communicator import run_ranks

ONE_HOST = ["a"] * 4


@pytest.mark.parametrize(
    "hosts, cores, shares",
    [
        (ONE_HOST, [range(8)] * 4, [2, 2, 2, 2]),
        (ONE_HOST, [range(7)] * 4, [1, 1, 1, 1]),  # rounded down
        (ONE_HOST, [range(2)] * 4, [1, 1, 1, 1]),  # more ranks than cores
        (ONE_HOST, [range(2 * rank, 2 * rank + 2) for rank in range(4)], [2, 2, 2, 2]),  # Slurm has divided them
        (["a", "a", "a", "b"], [range(6)] * 4, [2, 2, 2, 6]),
    ],
)
def test_ranks_that_may_use_the_same_cores_divide_them(monkeypatch, hosts, cores, shares):
    here = threading.local()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores[here.rank]), raising=False)
    monkeypatch.setattr(platform, "node", lambda: hosts[here.rank])

    def start(world):
        here.rank = world.rank
        return agree_on_start(world, TrainSettings)[1]

    assert run_ranks(len(hosts), start) == shares


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 24, 31, 32, 33, 100])
def test_a_change_at_either_end_or_of_the_length_changes_the_digest_of_a_file_and_of_a_corpus(
    tmp_path, monkeypatch, rng, size
):
    """EDGE is 16 here, and 1 << 22 in a run. Nothing between the two ends is hashed."""
    monkeypatch.setattr(fingerprints, "EDGE", 16)
    content = rng.integers(0, 256, size, np.uint8)

    def digests(changed):
        (tmp_path / "file").write_bytes(changed.tobytes())
        return file_fingerprint(tmp_path / "file"), token_fingerprint(changed)

    before = digests(content)
    assert before[0].startswith(f"{size}:") and before[1].startswith(f"{size} tokens with hash ")
    for index in {*range(min(16, size)), *range(max(0, size - 16), size)}:
        changed = content.copy()
        changed[index] ^= 1
        assert all(a != b for a, b in zip(digests(changed), before, strict=True)), index
    assert all(a != b for a, b in zip(digests(np.append(content, 0)), before, strict=True))
    if size > 32:
        content[size // 2] ^= 1  # not at an end
    assert digests(content) == before


def test_a_file_that_differs_is_named_with_its_rank_and_one_that_is_missing_is_not_compared():
    compare_files([{"a": "1:x", "b": "2:y"}, {"a": "1:x"}, {"c": "9:z"}])
    with pytest.raises(ConfigError, match=r"rank 2 has another b than rank 0 \(size:hash 3:z and 2:y\)"):
        compare_files([{"a": "1:x", "b": "2:y"}, {"a": "1:x"}, {"b": "3:z"}])

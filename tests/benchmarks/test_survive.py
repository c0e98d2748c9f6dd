"""benchmarks.ranks.survive: its choice of moments, its summary, and a short run."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.ranks import survive

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_kills_are_before_the_first_checkpoint_and_some_during_a_save():
    found = survive.moments(20, random.Random(1))
    assert Counter(found) == {survive.BEFORE: 2, survive.WRITING: 6, survive.RANDOM: 12}
    assert found[:2] == [survive.BEFORE] * 2 and survive.moments(1, random.Random(1)) == [survive.BEFORE]


def test_steps_and_incomplete_checkpoints_are_found(tmp_path):
    assert survive.steps_of("GPT-2\nstep     0 | loss 5\nstep    12 | loss 4\nresumed after 3 steps\n") == [0, 12]
    assert survive.incomplete_in(tmp_path / "missing") == set()
    for name in (".step-00000010.0123abcd.partial", "step-00000010", ".latest.0123abcd.partial"):
        (tmp_path / name).mkdir()
    assert survive.incomplete_in(tmp_path) == {".step-00000010.0123abcd.partial"}


def test_the_summary_has_the_largest_numbers():
    rows = [
        dict(moment=survive.BEFORE, incomplete=False, repeated=1),
        dict(moment=survive.WRITING, incomplete=True, repeated=9),
    ]
    summary = survive.summary_of(rows, [1], [1])
    assert summary["equal"] and summary["kills"] == 2 and summary["incomplete"] == 1
    assert summary["most_repeated"] == 9
    assert not survive.summary_of(rows, [1], [2])["equal"]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", ["--steps 60", "--steps 60 --async-checkpoints --checkpoint-every 20", "--stage 3 --steps 8"]
)
def test_a_run_survives_two_kills(flags):
    if "--stage 3" in flags:
        pytest.importorskip("triton")
    words = f"-m benchmarks.ranks.survive --times 2 --ranks 2 --preset nano --checkpoint-every 2 {flags}".split()
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    done = subprocess.run([sys.executable, *words], **options)
    assert done.returncode == 0 and "one run with 2 kills has the losses and parameters of an und" in done.stdout

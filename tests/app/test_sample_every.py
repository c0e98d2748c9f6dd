"""--sample-every prints a text during training, and changes no bit of it."""

import json

import pytest

from gpt2core.app import cli
from stage0_serial.numpy_backend import NumpyBackend


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_every_two_steps_changes_no_loss(command, corpus, tmp_path, threads):
    def trained(name, *flags):
        flags = ("--preset", "nano", "--data", corpus, "--steps", 5, "--threads", threads, *flags)
        log = tmp_path / f"{name}.jsonl"
        done = command(cli.train, *flags, "--no-save", "--log", log, backend=NumpyBackend)
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        return done.out, [(row["loss"], row["grad_norm"], row.get("parameters_sha256")) for row in rows]

    plain, want = trained("plain", "--sample", 4)
    out, got = trained("sampled", "--sample", 4, "--sample-every", 2)
    assert got == want
    samples = [line for line in out.splitlines() if line.startswith("sample after ")]
    assert [line.partition(": ")[0] for line in samples] == ["sample after 2 steps", "sample after 4 steps"]
    assert all(line.partition(": ")[2].strip() for line in samples) and "sample after" not in plain
    assert out.partition("Continuation:")[2] == plain.partition("Continuation:")[2] != ""
    none, _ = trained("none", "--sample", 0, "--sample-every", 2)
    assert "sample after" not in none
    assert "note: --sample-every 2: no effect, because --sample is 0" in " ".join(none.split())

"""Does the memory of a rank grow with its corpus? 4 GB of tokens in 40 files, and one small file.

The tokens are random numbers in files of nanoGPT's form (uint16), and are read in shuffled order. The model is `nano`
with more positions. "loader" is the difference of the peaks of resident memory, of the rank with the largest peak.

    python -m benchmarks.ranks.token_files                       # 4 GB on 1, 2 and 4 ranks; needs as much disk
    python -m benchmarks.ranks.token_files --megabytes 40 --ranks 1 2  # a trial
"""

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cpu.classroom import measure
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import python_command
from gpt2core.app.output.run_log import read_log
from gpt2core.app.shipped import TOKENIZERS
from gpt2core.text.tokenizer import Tokenizer

FILES, SMALL_MEGABYTES = 40, 1


def write_tokens(folder, megabytes, files):
    """Write `files` files of random tokens of the shipped tokenizer, 10^6 * megabytes bytes in all; return pattern."""
    folder.mkdir()
    rng, vocabulary = np.random.default_rng(0), Tokenizer.load(TOKENIZERS["book"]).vocab_size
    for number in range(files):
        rng.integers(0, vocabulary, 500_000 * megabytes // files, np.uint16).tofile(folder / f"{number:02}.bin")
    return os.fspath(folder / "*.bin")


def run(pattern, ranks, args):
    """(last row of the log, peak_bytes of the largest process) of a training on `ranks` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        log, T = Path(folder, "log.jsonl"), args.seq_len
        flags = f"--preset nano --block-size {T} --seq-len {T} --steps {args.steps} --shuffle --no-save --sample 0"
        files = "--data", pattern, "--tokenizer", TOKENIZERS["book"], "--log", log
        words = *flags.split(), "--threads", "1", *map(str, files)
        measured = measure(python_command(ranks, "stage1_mpi.train_gpt2", *words))
        return read_log(log)[-1], measured["peak_bytes"]


@benchmark(
    "token-files",
    dict(ranks=[1, 2, 4], seq_len=256, steps=50),
    megabytes=dict(type=int, default=4000, help=f"size of the {FILES} files together (default 4000)"),
)
def main(args):
    results = []
    with tempfile.TemporaryDirectory() as folder:
        large = write_tokens(Path(folder, "large"), args.megabytes, FILES)
        small = write_tokens(Path(folder, "small"), SMALL_MEGABYTES, 1)
        for ranks in args.ranks:
            (last, peak), (_, small_peak) = run(large, ranks, args), run(small, ranks, args)
            found = {"loss": last["loss"], "hash": last["parameters_sha256"][:8]}
            results.append({"ranks": ranks, "peak_bytes": peak, "loader_bytes": peak - small_peak, **found})
    return results

"""The tables of validation losses, the start of a generation, a sparse embedding and others, on made-up results."""

import resource
import sys

import numpy as np
import pytest

from benchmarks.cpu import deployment
from benchmarks.gpus import table_1
from benchmarks.harness import script
from benchmarks.harness.report import summarised
from benchmarks.harness.result_tables import TABLES
from benchmarks.ranks import collectives, convergence, sparse, token_files
from gpt2core.errors import UserError

HARDWARE = {"cores": 2}


def cells(name, results):
    return TABLES[name].cells([{"results": summarised(results), "hardware": HARDWARE, "commit": ""}])


def log(*losses):
    """A log of 2 steps for each validation loss."""
    return [{"step": step, "loss": 1.0} | ({"val_loss": losses[step // 2]} if step % 2 else {}) for step in range(4)]


def test_a_run_is_compared_with_the_run_of_the_same_seed():
    logs = {"in order": [log(5, 4.5), log(6, 5.25)], "--shuffle": [log(4, 3), log(6, 5)]}
    results = [convergence.result(name, of_seeds) for name, of_seeds in logs.items()]
    convergence.compare(results)
    in_order, shuffled = cells("ranks-convergence", results)
    assert in_order[""] == "in order" and shuffled[""] == "`--shuffle`"
    assert (in_order["loss after 2 steps"], in_order["loss after 4 steps"]) == ("5.500", "4.875")
    differences = "difference, mean of the seeds", "largest difference"
    assert [in_order[name] for name in differences] == ["+0.8750", "+1.5000"]
    assert [shuffled[name] for name in differences] == ["", ""]
    assert results[0]["val_losses"] == [[1, 5.5], [3, 4.875]]


def test_the_runs_differ_only_in_the_order_and_in_the_code_of_the_gradients():
    assert {flag for flags in convergence.RUNS.values() for flag in flags} == {
        "--no-shuffle", "--shuffle", "--local-shuffle", "--compress", "fp16", "bf16", "int8",
    }  # fmt: skip


def test_a_program_is_measured_with_its_imports():
    code = "import gpt2core.errors, gpt2core.tree_sum; print(1)"
    measured = deployment.run(["-c", code], deployment.ROOT)
    assert measured["modules"] >= 3 and 0 < measured["ms"] < 1e3 * measured["seconds"]
    assert measured["peak_bytes"] > 1 << 20
    if sys.platform == "linux":  # where it is at least that of the process that starts the program: until it runs
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert measured["peak_bytes"] < max(1 << 30, own + (1 << 20))
    row = {"program": "stage 0", "version": "now", "modules": 79, "seconds": [0.5], "ms": [20.0], "peak_bytes": 2**26}
    (found,) = cells("cpu-deployment", [row])
    assert [*found.values()] == ["one token, stage 0, now", "0.500", "79", "20.0", "64.0"]


def test_the_paper_s_table_has_the_times_of_each_stage(monkeypatch):
    logs = iter([[{"seconds": 2.0, "loss": 5.0}, {"seconds": 1.0, "loss": 4.5}, {"seconds": 1.5, "loss": 4.25}]] * 4)
    commands = []
    monkeypatch.setattr(table_1, "train", lambda *words, **flags: (next(logs), commands.append((words, flags))))
    times = iter([9.0, 0.5, 0.5] * 2)  # the first inference compiles
    monkeypatch.setattr(table_1, "inference_seconds", lambda name, *_: (next(times), ""))
    saved = []
    monkeypatch.setattr(script, "save", lambda results, args: saved.extend(results))
    table_1.main(["--stages", "0", "1", "--steps", "3", "--ranks", "2", "--rounds", "2"])
    first, second = ("stage 0", "stage0_serial"), ("stage 1, 2 ranks", "stage1_mpi")
    assert [words[:2] for words, _ in commands] == [first, first, second, second]
    assert [flags["steps"] for _, flags in commands] == [2, 3, 2, 3] and commands[3][1] == {
        "ranks": 2,
        "preset": "paper",
        "steps": 3,
    }
    first, _ = cells("table-1", saved)
    assert [*first.values()] == ["stage 0", "15,264.36", "112.62", "4.50", "1250.00", "0.500", "4.250000"]


def test_a_corpus_of_many_files_is_trained_on_as_one_and_its_memory_is_that_of_the_loader(monkeypatch):
    saved = []
    monkeypatch.setattr(script, "save", lambda results, args: saved.extend(results))
    token_files.main(["--megabytes", "2", "--ranks", "1", "2", "--steps", "2", "--seq-len", "32"])
    one, two = saved
    assert one["hash"] == two["hash"] and one["loss"] == two["loss"] > 5
    assert all(row["peak_bytes"] > 1 << 24 and abs(row["loader_bytes"]) < 1 << 24 for row in saved)
    assert [*cells("token-files", saved)[1]] == [
        "ranks", "peak of a rank, MB", "of which for 4 GB of tokens, MB", "loss of the last step",
        "parameters, SHA-256",
    ]  # fmt: skip


def test_stages_of_a_gpu_need_one(monkeypatch):
    monkeypatch.setattr(table_1, "nvidia_smi", lambda _: [])
    with pytest.raises(UserError, match="no GPU, which stages 2 and 3 need: use --stages 0 1"):
        table_1.main(["--steps", "2"])
    with pytest.raises(UserError, match="--steps 1: .* use 2 or more"):
        table_1.main(["--stages", "0", "--steps", "1"])


def test_a_reduce_scatter_and_an_all_to_all_are_shown_beside_the_library_s():
    def measured(operation, ranks, **seconds):
        results = [{"algorithm": name, "bytes": 1_000_000, "seconds": [each]} for name, each in seconds.items()]
        collectives.summarise(results, operation, ranks)
        return results

    jobs = ("reduce_scatter", 2, 1.0), ("reduce_scatter", 4, 0.5)
    times = sum((measured(operation, ranks, ring=seconds, mpi=0.5) for operation, ranks, seconds in jobs), [])
    times += measured("all_to_all", 2, mpi=0.5, pairwise=0.25, gloo=1.0)
    first, second = cells("ranks-collectives", {"times": times})
    two, four = "2 ranks, 2 cores", "4 ranks, 2 cores"
    assert [first[""], first[two], first[four]] == ["all_to_all, 1 MB", "500 ms; pairwise 0.50", ""]
    assert [second[""], second[two], second[four]] == ["reduce_scatter, 1 MB", "500 ms; ring 2.00", "500 ms; ring 1.00"]


def test_rows_of_an_embedding_are_compared_with_all_rows_and_a_step_with_a_step():
    seconds = {sparse.ALL_ROWS: [0.2, 0.4], f"{sparse.ROWS}, 1200": [0.1, 0.2], sparse.STEP: [4, 4]}
    seconds[sparse.SPARSE_STEP] = [3, 3]
    results = [
        {"name": name, "ranks": 4, "vocab_size": 5000, "bytes_sent": [2e6, 3e6], "cpu_seconds": 1}
        | {"seconds": [[each] for each in of_name]}
        | ({"distinct": 1200} if sparse.ROWS in name else {})
        for name, of_name in seconds.items()
    ]
    sparse.summarise(results)
    rows = cells("ranks-sparse", results)
    assert [row["time of this row / time with all rows"] for row in rows] == ["1.00", "0.50", "1.00", "0.75"]
    assert rows[1][""] == "V = 5,000, the sum, by rows, 1200 tokens" and rows[1]["MB sent per rank"] == "3.000"


def test_the_numbers_of_distinct_tokens_surround_the_break_even():
    assert sparse.distinct_tokens(50257, 4) == [785, 6282, 12564, 25128, 50256]
    assert sparse.distinct_tokens(172, 2) == [5, 43, 86, 172]  # two ranks send as many bytes with all tokens
    inputs, targets = sparse.zipf_batch(np.random.default_rng(), 50257, 16, 256)
    assert inputs.shape == targets.shape == (16, 256) and (inputs[:, 1:] == targets[:, :-1]).all()
    assert 1000 < len(np.unique(inputs)) < 3000  # of 4,096 tokens

"""The tables of validation losses, of the start of a generation and of the other collectives, on made-up results."""

import sys

from benchmarks.cpu import deployment
from benchmarks.harness.cpu_tables import TABLES
from benchmarks.harness.report import summarised
from benchmarks.ranks import convergence

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
    first, _ = convergence.curves_of(results)
    assert (first.steps, first.losses) == ((1, 3), (5.5, 4.875))


def test_the_runs_differ_only_in_the_order_and_in_the_code_of_the_gradients():
    assert {flag for flags in convergence.RUNS.values() for flag in flags} == {
        "--no-shuffle", "--shuffle", "--local-shuffle", "--compress", "fp16", "bf16", "int8",
    }  # fmt: skip


def test_a_program_is_measured_with_its_imports():
    code = "import gpt2core.errors, gpt2core.tree_sum; print(1)"
    measured = deployment.run(["-c", code], deployment.ROOT)
    assert measured["modules"] >= 3 and 0 < measured["import_ms"] < 1e3 * measured["seconds"]
    assert measured["peak_bytes"] > 1 << 20
    if sys.platform == "linux":
        assert measured["peak_bytes"] < 1 << 30
    row = {"program": "stage 0", "version": "now", "modules": 79, "seconds": [0.5], "ms": [20.0], "peak_bytes": 2**26}
    assert list(cells("cpu-deployment", [row])[0].values()) == ["stage 0, now", "79", "20.0", "0.500", "", "64.0"]


def test_a_reduce_scatter_and_an_all_to_all_are_shown_beside_the_library_s():
    def measured(algorithm, seconds, ranks=2):
        ratio = {"median": seconds / 0.5, "q1": 0, "q3": 0, "n": 1}
        return {
            "algorithm": algorithm,
            "bytes": 1_000_000,
            "ranks": ranks,
            "seconds": [seconds],
            "ratio_to_native": ratio,
        }

    results = {
        "all_to_all": [measured("pairwise", 0.25), measured("mpi", 0.5)],
        "reduce_scatter": [measured("ring", 1.0), measured("mpi", 0.5), measured("mpi", 0.5, 4)],
    }
    first, second, third, fourth = cells("ranks-collectives-others", results)
    column = "2 ranks, 2 cores"
    assert [first[""], first[column]] == ["1 MB, `all_to_all`, MPI library", "500 ms"]
    assert [second[""], second[column]] == ["1 MB, `all_to_all`, pairwise", "0.50"]
    assert [third[""], third[column], third["4 ranks, 2 cores"]] == [
        "1 MB, `reduce_scatter`, MPI library", "500 ms", "500 ms",
    ]  # fmt: skip
    assert fourth[column] == "2.00"

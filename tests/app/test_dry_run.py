"""--dry-run prints what training counts, refuses what training refuses, and writes nothing."""

import json
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from gpt2core.app.planning.dry_run import layout_of
from gpt2core.app.planning.flops import forward_flops, step_flops
from gpt2core.app.planning.layout import Layout
from gpt2core.app.planning.memory import device_terms, host_terms
from gpt2core.architecture import flops_per_token, parameter_count
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.memory.gpu import training_memory
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.sharded.units import memory
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS
from gpt2core.training_loop import read_batch
from tests.support.jobs import succeeded
from tests.support.training import make_trainer

NANO = PRESETS["nano"]


def arguments(*flags):
    return ["--preset", "nano", "--sample", "0", *map(str, flags)]


def layout(config=NANO, replicas=1, micro_batches=4, **options):
    return Layout(config, ParallelConfig(**options), 8, config.block_size, micro_batches, replicas)


def test_it_writes_nothing_and_prints_the_plan(train, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--out", tmp_path / "o", "--log", tmp_path / "l.jsonl", "--plot", tmp_path / "p.png")
    result = train(*arguments("--data", corpus, "--dry-run", *flags))
    assert (result.code, result.err) == (0, "") and list(tmp_path.iterdir()) == []
    count = int(re.search(r"^parameters: ([\d,]+)$", result.out, re.M)[1].replace(",", ""))
    assert f"GPT-2 nano: {count:,} parameters" in result.words
    assert re.search(r"^FLOPs of a step, over all ranks: [\d.e+]+$", result.out, re.M)
    total = float(re.search(r"^memory of rank 0, which needs most: ([\d,.]+) MiB$", result.out, re.M)[1])
    terms = re.findall(r"^  [a-z, ]+ ([\d.]+) MiB$", result.out, re.M)
    assert total == pytest.approx(sum(map(float, terms)), abs=0.01 * len(terms))  # each is rounded to 0.01
    assert "sent by" not in result.out and "step     0" not in result.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", 2),
        ("--seq-len", 17),
        ("--micro-batches", 3),
        ("--precision", "fp16"),
        ("--rounding", "stochastic"),
        ("--beta1", 2),
        ("--graph",),
        ("--n-head", 3),
        ("--checkpoint-every", 1, "--no-save"),
        ("--collectives", "ring"),
        ("--resume", "nowhere"),
    ],
    ids=str,
)
def test_an_option_that_training_refuses_is_refused_with_the_same_line(train, corpus, flags):
    given = arguments("--data", corpus, "--steps", 1, *flags)
    wanted = train(*given)
    assert wanted.code == 2 and wanted.err.count("\n") == 1
    assert train(*given, "--dry-run") == wanted


def test_a_log_of_an_older_run_is_refused_too(train, corpus, tmp_path):
    given = arguments("--data", corpus, "--steps", 1, "--log", tmp_path / "log.jsonl")
    assert train(*given).code == 0
    wanted = train(*given)
    dry = train(*given, "--dry-run")
    assert (dry.code, dry.err) == (wanted.code, wanted.err) == (2, wanted.err) and "log.jsonl" in dry.err


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stage_2_needs_no_gpu_for_it(train2, corpus, monkeypatch, precision):
    from stage2_cuda.runtime import triton_launch

    if precision == "bf16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    result = train2(*arguments("--data", corpus, "--dry-run", "--precision", precision))
    assert (result.code, result.err) == (0, "")
    vocabulary = int(re.search(r"vocabulary (\d+)", result.words)[1])
    needed = sum(training_memory(replace(NANO, vocab_size=vocabulary), 4, 16, precision).values())
    printed = re.search(r"which needs most: ([\d,.]+) MiB", result.out)[1].replace(",", "")
    assert float(printed) == pytest.approx(needed / 2**20, abs=0.01)
    refused = train2(*arguments("--data", corpus, "--dry-run", "--precision", "fp64"))
    assert refused.code == 2 and "fp64" in refused.err


RUNS = [
    (2, ()), (2, ("--zero", 1, "--zero-gather", "forward")), (2, ("--tp", 2, "--recompute", "block")),
    (2, ("--pp", 2, "--pp-schedule", "zero-bubble")), (2, ("--zero", 3, "--threads", 2)),
    pytest.param(3, ("--zero", 3, "--batch-size", 6, "--no-deterministic"), marks=pytest.mark.long),
    pytest.param(
        3, ("--batch-size", 6, "--no-deterministic", "--collectives", "halving-doubling", "--dp", "bucket"),
        marks=pytest.mark.long,
    ),
    pytest.param(4, ("--pp", 2, "--tp", 2, "--n-layer", 4), marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.xdist_group("mpi")
@pytest.mark.parametrize("ranks, flags", RUNS, ids=str)
def test_the_bytes_are_those_of_the_log_of_training(servers, ranks, flags, tmp_path):
    log, given = tmp_path / "log.jsonl", arguments("--steps", 2, "--batch-size", 4, *flags)
    dry, _ = (
        succeeded(servers.run(ranks, "train_gpt2.py", *given, *more)) for more in (("--dry-run",), ("--log", log))
    )
    sent = int(re.search(r"sent by rank 0 in a step: ([\d,]+) bytes", dry.out)[1].replace(",", ""))
    assert {json.loads(line)["bytes_sent"] for line in log.read_text().splitlines()} == {sent}


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_flops_of_the_units_are_those_of_the_architecture(name):
    config = PRESETS[name]
    assert 3 * sum(forward_flops(config, 16).values()) == flops_per_token(config, 16)
    assert step_flops(layout(config))[0] == flops_per_token(config, config.block_size) * 8 * config.block_size


def test_recomputed_blocks_are_counted_apart():
    needed, computed = step_flops(layout(PRESETS["paper"], recompute="block"))
    block = forward_flops(PRESETS["paper"], 256)["h.0"]
    assert computed - needed == 5 * block * 8 * 256  # all but the last one


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options, ranks, micro_batches", [
    *(({}, 1, count) for count in (2, 8)), *((dict(zero=zero), 2, count) for zero in (1, 2, 3) for count in (2, 8)),
    *((dict(zero=zero, **how), 4, 8) for zero in (2, 3) for how in (dict(tp=2), dict(pp=2))),
], ids=str)  # fmt: skip
def test_the_flat_arrays_in_the_memory_of_a_rank_are_those_of_a_trainer(options, ranks, micro_batches, threads):
    micro_batches *= threads

    def arrays(comm):
        trainer = make_trainer(comm, ParallelConfig(**options), micro_batches=micro_batches, threads=threads)
        moments = trainer.optimizer.nbytes
        plan = Layout(
            trainer.config, trainer.parallel, 16, 16, micro_batches, trainer.mesh.data.size, trainer.accumulator.merged,
            threads,
        )  # fmt: skip
        place = plan.places()[comm.rank]
        if trainer.parallel.zero > 1:
            return host_terms(plan, place), sum(memory(trainer.accumulator.work, trainer.parallel.zero, threads))
        flat = trainer.gradients.nbytes  # of one buffer of each unit
        workers = [next(iter(each.unit_gradients.sums.values())) for each in trainer.accumulator.workers]
        sums = [flat for unit_sum in workers for _ in unit_sum.buffers]
        return host_terms(plan, place), trainer.parameters.nbytes + moments + sum(sums)

    for terms, stored in run_ranks(ranks, arrays):
        assert terms.pop("activations") > 0 and (ranks == 1) == (terms.pop("buffers of messages", 0) == 0)
        if options.get("zero", 0) < 2:
            assert sum(terms.values()) == stored
        else:  # memory() is an upper bound: of two units, and of three if the table is tied
            assert stored / 2 <= sum(terms.values()) <= stored


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_memory_of_a_rank_is_that_which_numpy_allocates(recompute):
    config, tokens = replace(PRESETS["tiny"], n_layer=4, block_size=16), np.random.default_rng().integers(0, 172, 999)
    tracemalloc.start()
    try:
        trainer = make_trainer(Solo(), ParallelConfig(recompute=recompute), config, batch_size=64)
        for _ in range(2):
            trainer.step(read_batch(trainer, Windows(tokens, 16)), 3e-3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    plan = layout_of(trainer)
    assert sum(host_terms(plan, *plan.places()).values()) == pytest.approx(peak, rel=0.15)


def test_the_memory_of_a_gpu_is_that_of_the_memory_model():
    plan = layout(PRESETS["gpt2"], replicas=2, zero=1)
    wanted = training_memory(PRESETS["gpt2"], 4, 1024, "bf16", 2, 2, ParallelConfig(zero=1))
    assert device_terms(plan, "bf16", in_order=False) == [wanted] and parameter_count(PRESETS["gpt2"]) == 124_439_808


def test_an_array_without_memory_has_a_shape():
    from gpt2core.app.planning.without_memory import WithoutMemory
    from stage0_serial.numpy_backend import NumpyBackend

    backend = WithoutMemory(NumpyBackend())
    array = backend.zeros((1 << 30, 1 << 10), np.float32)
    assert array.shape == (1 << 30, 1 << 10) and array.base is not None and backend.on_host
    assert backend.cast(array, array) is None and backend.precision == "fp32"

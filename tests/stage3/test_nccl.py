"""Stage 3 on GPUs: collectives against NumPy and in graphs, stage 2's bits on 1, 2 and 4 ranks, and failures."""

import json
import os
import re
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.app.shipped import CORPUS
from gpt2core.codecs import CODECS
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import STRATEGIES, ParallelConfig
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.presets import PRESETS
from gpt2core.text.token_file import load_tokens
from gpt2core.training_loop import read_batch
from gpt2core.tree_sum import tree_sum
from stage2_cuda.cuda_backend import CudaBackend, dtype_of
from stage2_cuda.runtime.cuda_graph import CapturedStep
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator
from tests.support.collectives import REDUCED, rank_inputs
from tests.support.jobs import Job, mpi
from tests.support.mpi import ROOT, mpiexec, run_mpi
from tests.support.unsaved import unsaved

pytestmark = pytest.mark.gpu

STAGE = ROOT / "stage3_mpi_cuda"
LIMIT = 240  # seconds of a job, which may compile kernels first
SOON = 30  # seconds from a failure to the end of the job
TYPES = ["float32", "float64", "int32", "int64", "float16", "bfloat16"]


@pytest.fixture
def gpus():
    """gpus(n): skip the test if there are fewer than n GPUs."""
    import cupy

    def need(count):
        there = cupy.cuda.runtime.getDeviceCount()
        if there < count:
            pytest.skip(f"needs {count} GPUs, but there are {there}")

    mpiexec()  # or skip
    return need


def world_of(host, transport):
    world = NcclCommunicator(host)
    assert world.use_transport(transport) == transport
    return world


# -- collectives -------------------------------------------------------------------------------------------------------


def rounded(x, name):
    """x rounded to dtype `name`; 16-bit values as float32, because NumPy has no bfloat16."""
    return x.astype(dtype_of(name)).astype(np.float32) if name.endswith("16") else x


def to_gpu(x, name):
    import cupy

    return cupy.asarray(x).astype(dtype_of(name))


def same(got, want, name):
    """Assert equal bits: `got` is a GPU array of dtype `name`, `want` is converted by rounded()."""
    assert got.dtype == dtype_of(name) and got.flags.c_contiguous
    got = (got.astype(np.float32) if name.endswith("16") else got).get()
    np.testing.assert_array_equal(got, rounded(want, name))


def poisoned(like):
    """An array like `like`, filled with NaN, or with -1 for integers."""
    import cupy

    out = cupy.empty(like.shape, like.dtype)
    out.view(np.uint8)[...] = 0xFF
    return out


def check_collectives(world, name, rows):
    """Assert that each collective equals NumPy: out of place, in place, and into an out filled with NaN."""
    p, r = world.size, world.rank
    kind = np.float32 if name.endswith("16") else np.dtype(name)
    xs = [rounded(x, name) for x in rank_inputs(rows, p, (rows, 3), kind)]
    longs = [rounded(x, name) for x in rank_inputs(rows + 1, p, (p * rows, 3), kind)]
    mine, root = slice(r * rows, (r + 1) * rows), rows % p
    x, long = to_gpu(xs[r], name), to_gpu(longs[r], name)
    ops = {"sum": tree_sum, "min": REDUCED["min"], "max": REDUCED["max"]}
    for op, reduced in ops.items():
        same(world.all_reduce(x, op), reduced(xs), name)
        same(world.all_reduce(x, op, out=poisoned(x)), reduced(xs), name)
        same(world.reduce_scatter(long, op), reduced(longs)[mine], name)
        buffer, other = x.copy(), long.copy()
        assert world.all_reduce(buffer, op, out=buffer) is buffer
        world.reduce_scatter(other, op, out=other[mine])
        same(buffer, reduced(xs), name)
        same(other[mine], reduced(longs)[mine], name)
    transposed = np.concatenate([np.ascontiguousarray(other.T) for other in xs])
    same(world.all_gather(x.T), transposed, name)
    same(world.all_to_all(long), np.concatenate([other[mine] for other in longs]), name)
    for at in range(p):
        same(world.broadcast(x, at), xs[at], name)
    buffer, other = poisoned(long), long.copy()
    buffer[mine] = x
    assert world.all_gather(buffer[mine], out=buffer) is buffer
    same(buffer, np.concatenate(xs), name)
    assert world.all_to_all(other, out=other) is other
    same(other, np.concatenate([each[mine] for each in longs]), name)
    same(x, xs[r], name)
    same(long, longs[r], name)
    handles = [world.all_reduce_start(x), world.all_gather_start(x), world.broadcast_start(x, root)]
    wants = [tree_sum(xs), np.concatenate(xs), xs[root]]
    for handle, want in list(zip(handles, wants, strict=True))[::-1]:
        same(handle.wait(), want, name)


def collectives(host, transport):
    world = world_of(host, transport)
    for name in TYPES if transport == "nccl" else TYPES[:4]:  # MPI rounds 16-bit types at each addition
        for rows in (1, 7, 1000):
            check_collectives(world, name, rows)
    same(world.all_reduce(to_gpu(np.float32(world.rank), "float32")), np.float32(sum(range(world.size))), "float32")
    group = world.split(world.rank % 2, key=-world.rank)  # with two ranks, a group of one
    members = [rank for rank in range(world.size) if rank % 2 == world.rank % 2][::-1]
    same(group.all_gather(to_gpu(np.float32([world.rank]), "float32")), np.float32(members), "float32")
    exchange(world)
    return world.native_algorithm


def exchange(world):
    """Every rank sends before it receives."""
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    x, out = to_gpu(np.full(1 << 20, world.rank, np.float32), "float32"), to_gpu(np.zeros(1 << 20), "float32")
    send, receive = world.send_start(x, to), world.recv_start(out, source)
    same(receive.wait(), np.full(1 << 20, source, np.float32), "float32")
    send.wait()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective_equals_its_oracle(gpus, ranks):
    gpus(ranks)
    assert run_mpi(ranks, collectives, "nccl", timeout=LIMIT) == ["nccl"] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_through_the_host_equals_its_oracle(gpus, ranks):
    gpus(1)  # the ranks may share one
    assert run_mpi(ranks, collectives, "mpi", timeout=LIMIT) == ["mpi"] * ranks


def large_sums(host, transport, megabytes):
    """An all-reduce of many chunks, whose length is not divisible by the ranks."""
    world = world_of(host, transport)
    xs = rank_inputs(3, world.size, (megabytes * 250_000 + 3,), np.float32)
    x = to_gpu(xs[world.rank], "float32")
    same(world.all_reduce(x, out=x), tree_sum(xs), "float32")
    world.use_collectives(world.native_algorithm)
    got, want = world.all_reduce(to_gpu(xs[world.rank], "float32")).get(), tree_sum(xs)
    # the sum of at most four float32 numbers in another order; they may cancel
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(xs).max())


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_a_large_sum_has_the_canonical_order(gpus, transport):
    gpus({"nccl": 2, "mpi": 1}[transport])
    run_mpi(2, large_sums, transport, 100, timeout=LIMIT)


def captured(host):
    """Collectives of two groups and kernels in one CUDA graph: run, captured and replayed with new inputs each time."""
    import cupy

    world = world_of(host, "nccl")
    data = world.split(0)
    p, r, n = world.size, world.rank, 1 << 18
    x, total, parts = (cupy.empty(size, np.float32) for size in (n, n, n))
    own = slice(r * n // p, (r + 1) * n // p)

    def step():
        first = data.all_reduce_start(x, out=total)
        second = world.reduce_scatter_start(x, out=parts[own])
        twice = x * 2
        first.wait()
        second.wait()
        return data.all_gather(parts[own], out=parts), total + twice

    replay = CapturedStep(step, collectives=True)
    for call in range(5):
        xs = rank_inputs(call, p, (n,), np.float32)
        x.set(xs[r])
        results = replay().wait()
        cupy.cuda.runtime.deviceSynchronize()
        gathered, got = map(cupy.asarray, results)  # on the host from the second call on
        same(gathered, tree_sum(xs), "float32")
        same(got, tree_sum(xs) + xs[r] * 2, "float32")
    return replay.graph is not None


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_captured_with_the_kernels_around_them(gpus, ranks):
    gpus(ranks)
    assert run_mpi(ranks, captured, timeout=LIMIT) == [True] * ranks


# -- training ----------------------------------------------------------------------------------------------------------

STEPS, SHARDS = 5, 4  # the first is run, the second is captured, the others are replays


def trained(
    world, precision, deterministic=True, micro_batches=SHARDS, capture=True, layers=2, tied=False, rounding="nearest",
    dropout=0.0, vocab_size=None, **parallel,
):  # fmt: skip
    """[(loss, gradient norm) of each step], and the hash of the parameters."""
    tokens, _ = load_tokens(CORPUS, None)
    config = replace(PRESETS["tiny"], n_layer=layers, tied=tied)
    config = replace(config, vocab_size=vocab_size or config.vocab_size)
    recipe = dict(clip=0.5, weight_decay=0.1, rounding=rounding)
    sizes = dict(batch_size=16, seq_len=config.block_size, micro_batches=micro_batches)
    backend, sharing = CudaBackend(precision, deterministic), ParallelConfig(bucket_mb=0.1, **parallel)
    options = dict(optimizer=recipe, world=world, parallel=sharing, capture=capture, dropout=dropout)
    trainer = Trainer(config, [backend], **sizes, **options)
    windows = Windows(tokens, config.block_size)
    steps = [trainer.step(read_batch(trainer, windows), 1e-3 / (1 + i)) for i in range(STEPS)]
    return [(step.loss, step.grad_norm) for step in steps], parameter_hash(trainer)


def runs(host, transport, ways):
    world = world_of(host, transport)
    results = []
    for options in ways:
        results.append(trained(world, **options))
        host.barrier()
    return results


WAYS = [dict(dp="flat"), dict(dp="bucket"), dict(dp="overlap"), dict(zero=1), dict(dp="bucket", zero=1)]
WAYS += [dict(dp=dp, zero=1, zero_gather="forward") for dp in ("flat", "bucket")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_dp_strategy_and_zero_has_stage_2_s_bits(gpus, ranks, precision):
    gpus(ranks)
    want = trained(None, precision)
    ways = [dict(precision=precision, **way) for way in WAYS]
    for results in run_mpi(ranks, runs, "nccl", ways, timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("precision, tied", [("fp32", False), ("bf16", True), ("fp16", True)])
def test_every_schedule_of_a_pipeline_has_stage_2_s_bits(gpus, precision, tied):
    gpus(2)
    want = trained(None, precision, layers=4, tied=tied)
    ways = [dict(pp=2, pp_schedule=schedule) for schedule in SCHEDULES]
    ways += [
        dict(pp=2, recompute="block"),
        dict(pp=2, capture=False),
        dict(pp=2, pp_schedule="zero-bubble", capture=False),
    ]
    ways = [dict(precision=precision, layers=4, tied=tied, **way) for way in ways]
    for results in run_mpi(2, runs, "nccl", ways, timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_of_four_gpus_and_replicas_of_one_have_stage_2_s_bits(gpus, tied):
    gpus(4)
    want = trained(None, "bf16", layers=4, tied=tied)
    ways = [
        dict(pp=2, pp_schedule="interleaved", zero=1),
        dict(pp=2, dp="bucket"),
        dict(pp=4),
        dict(pp=4, pp_schedule="zero-bubble"),
    ]
    ways = [dict(precision="bf16", layers=4, tied=tied, **way) for way in ways]
    for results in run_mpi(4, runs, "nccl", ways, timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("flag", [(), ("--no-graph",)], ids=["captured", "eager"])
def test_the_times_of_a_pipeline_s_actions_are_measured_on_the_gpus(gpus, flag):
    gpus(2)
    flags = ("--preset", "tiny", "--n-layer", 4, "--pp", 2, "--micro-batches", 8, "--steps", 5, "--sample", 0)
    out = script(2, *flags, "--schedule-picture", *flag).out
    found = re.findall(r"pipeline (measured|simulated), .*?: ([\d.]+) ms, bubble ([\d.]+)%", " ".join(out.split()))
    assert [kind for kind, _, _ in found] == ["measured", "simulated"]
    assert all(0 < float(ms) < 1000 and 0 < float(bubble) < 100 for _, ms, bubble in found), out


def test_a_pipeline_of_ranks_that_share_a_gpu_has_stage_2_s_bits(gpus):
    gpus(1)
    want = trained(None, "bf16", layers=4, tied=True)
    how = dict(precision="bf16", layers=4, tied=True, pp=2)
    ways = [dict(how, pp_schedule=schedule) for schedule in ("1f1b", "zero-bubble")]
    for results in run_mpi(2, runs, "mpi", ways, timeout=LIMIT):
        assert results == [want] * 2


def test_fp16_overflow_repeats_the_step_on_all_ranks(gpus):
    gpus(2)
    want = trained(None, "fp16")
    ways = [dict(precision="fp16", **way) for way in (dict(dp="flat"), dict(zero=1), dict(zero=2), dict(zero=3))]
    for results in run_mpi(2, runs, "nccl", ways, timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [2, 4])  # one or two passes of each of two ranks
@pytest.mark.parametrize("precision, rounding", [("fp32", "nearest"), ("bf16", "nearest"), ("bf16", "stochastic")])
def test_zero_2_and_3_have_stage_2_s_bits_captured_and_not(gpus, precision, rounding, micro_batches, tied):
    gpus(2)
    options = dict(precision=precision, rounding=rounding, micro_batches=micro_batches, tied=tied)
    want = trained(None, **options)
    ways = [dict(zero=zero, capture=capture) for zero in (2, 3) for capture in (True, False)]
    ways.append(dict(zero=3, recompute="block"))
    for results in run_mpi(2, runs, "nccl", [options | way for way in ways], timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport, ranks", [("nccl", 2), ("nccl", 4), ("mpi", 4)])
def test_zero_2_and_3_change_no_bit_of_tensor_parallelism(gpus, transport, ranks, precision):
    """The vocabulary is odd, so the last rank of each replica has fewer tokens."""
    gpus(ranks if transport == "nccl" else 1)
    how = dict(precision=precision, layers=4, tied=True, vocab_size=173, tp=2)
    pipelines = [dict(pp=2), dict(pp=2, zero=3)] if ranks == 4 else []
    ways = [dict(how, **way) for way in (dict(zero=0), dict(zero=2), dict(zero=3), dict(dp="bucket"), *pipelines)]
    (want, *_), *_ = results = run_mpi(ranks, runs, transport, ways, timeout=LIMIT)
    assert results == [[want] * len(ways)] * ranks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_two_slices_on_one_gpu_have_the_bits_of_two_ranks(gpus, transport, precision, tied):
    """The vocabulary is odd, so the last slice has fewer tokens."""
    gpus({"nccl": 2, "mpi": 1}[transport])
    how = dict(precision=precision, tied=tied, vocab_size=173)
    want = trained(None, canonical_tp=2, **how)
    assert want != trained(None, **how)
    for way in (dict(capture=False), dict(recompute="block"), dict(zero=3), dict(dp="bucket")):
        assert trained(None, canonical_tp=2, **how, **way) == want
    for results in run_mpi(2, runs, transport, [dict(how, tp=2)], timeout=LIMIT):
        assert results == [want]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport, ranks", [("nccl", 2), ("nccl", 4), ("mpi", 4)])
def test_four_slices_have_the_same_bits_on_every_number_of_ranks(gpus, transport, ranks, precision):
    """MPI rounds sums of 16 bits after each addition, so the bits of `tp=4` in bf16 are compared with NCCL only."""
    gpus(ranks if transport == "nccl" else 1)
    how = dict(precision=precision, layers=4, tied=True, vocab_size=173, canonical_tp=4)
    want = trained(None, **how)
    ways = [dict(tp=2), dict(tp=2, capture=False)] if ranks == 2 else [dict(tp=2, pp=2), dict(tp=2, zero=2)]
    ways += [dict(pp=2), dict(zero=3)] if ranks == 2 else []
    ways += [dict(tp=4)] if ranks == 4 and (transport, precision) != ("mpi", "bf16") else []
    for results in run_mpi(ranks, runs, transport, [dict(how, **way) for way in ways], timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport, ranks", [("nccl", 2), ("nccl", 4), ("mpi", 4)])
def test_zero_2_and_3_in_a_pipeline_have_stage_2_s_bits(gpus, transport, ranks, precision):
    gpus(ranks if transport == "nccl" else 1)
    how = dict(precision=precision, layers=4, tied=True)
    want = trained(None, **how)
    ways = [dict(how, pp=2, zero=zero, pp_schedule=name) for zero in (2, 3) for name in ("1f1b", "zero-bubble")]
    for results in run_mpi(ranks, runs, transport, ways, timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_has_the_same_bits_in_every_layout_of_two_gpus(gpus, precision, tied):
    gpus(2)
    how = dict(precision=precision, layers=4, tied=tied, dropout=0.1)
    want = trained(None, **how)
    assert want != trained(None, **dict(how, dropout=0.0)) and want == trained(None, capture=False, **how)
    ways = [dict(dp="flat"), dict(dp="bucket", zero=1), dict(zero=3), dict(pp=2), dict(pp=2, recompute="block")]
    for results in run_mpi(2, runs, "nccl", [dict(how, **way) for way in ways], timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("zero", [2, 3])
def test_one_rank_and_ranks_that_share_a_gpu_train_with_zero_2_and_3(gpus, zero):
    gpus(1)
    options = dict(precision="bf16", tied=True)
    want = trained(None, **options)
    assert trained(None, zero=zero, **options) == want
    for results in run_mpi(2, runs, "mpi", [options | dict(zero=zero)], timeout=LIMIT):
        assert results == [want]


def test_ranks_that_share_a_gpu_have_stage_2_s_bits_with_transport_mpi(gpus):
    gpus(1)
    want = trained(None, "fp32")
    ways = [dict(dp="flat"), dict(dp="bucket", zero=1), dict(dp="bucket", sparse_embedding=True)]
    for results in run_mpi(2, runs, "mpi", [dict(way, precision="fp32") for way in ways], timeout=LIMIT):
        assert results == [want] * len(ways)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_the_embedding_have_stage_2_s_bits(gpus, ranks, precision):
    gpus(ranks)
    want = trained(None, precision)
    ways = [*(dict(dp=dp) for dp in STRATEGIES), dict(dp="bucket", zero=1), dict(dp="overlap", recompute="block")]
    ways = [dict(way, precision=precision, sparse_embedding=True) for way in ways]
    for results in run_mpi(ranks, runs, "nccl", ways, timeout=LIMIT):
        assert results == [want] * len(ways)


def near(result, want, tolerance):
    losses, wanted = ([step[0] for step in rows] for rows, _ in (result, want))
    np.testing.assert_allclose(losses, wanted, rtol=tolerance)


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_deterministic_has_nearly_stage_2_s_curve_and_equal_parameters_on_all_ranks(gpus, ranks):
    gpus(ranks)
    want = trained(None, "fp32", deterministic=False, micro_batches=1)
    ways = [
        dict(precision="fp32", deterministic=False, micro_batches=ranks, dp="bucket"),
        dict(precision="fp32", deterministic=False, micro_batches=ranks // 2, tp=2),
        *(dict(precision="fp32", deterministic=False, micro_batches=ranks, compress=kind) for kind in CODECS),
    ]
    all_ranks = run_mpi(ranks, fast_runs, ways, timeout=LIMIT)
    assert all(results == all_ranks[0] for results in all_ranks)
    for number, result in enumerate(all_ranks[0]):
        near(result, want, 1e-3 if number < 2 else 1e-2)  # compressed gradients have 8 to 11 bits


def fast_runs(host, ways):
    """As runs(), with NCCL's own sums."""
    world = world_of(host, "nccl")
    world.use_collectives("nccl")
    return [trained(world, **options) for options in ways]


# -- the scripts -------------------------------------------------------------------------------------------------------

TINY = ("--preset", "tiny", "--sample", 0)


def script(ranks, *flags, name="train_gpt2.py", **environment):
    words = unsaved(flags) if name == "train_gpt2.py" else flags
    return mpi("-n", ranks, sys.executable, name, *words, cwd=STAGE, **environment)


def rows_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def curve(log):
    return [(row["loss"], row["grad_norm"], row.get("parameters_sha256")) for row in rows_of(log)]


def test_two_ranks_train_and_generate_as_one(gpus, tmp_path):
    gpus(2)
    logs = []
    for ranks in (1, 2):
        logs.append(tmp_path / f"{ranks}.jsonl")
        flags = (*TINY, "--steps", 6, "--deterministic", "--log", logs[-1], "--out", tmp_path / "run")
        done = script(ranks, *flags, "--verify-every", 2, "--overwrite")
        assert (done.code, done.left) == (0, ()), done.err
    assert "--collectives canonical, --compress none, --zero 1, --transport nccl" in " ".join(done.out.split())
    assert curve(logs[0]) == curve(logs[1]) and rows_of(logs[1])[-1]["bytes_sent"] > 4 * 126_208
    ask = ("--weights", tmp_path / "run", "--prompt", "The model", "--max-new-tokens", 5)
    texts = [
        script(ranks, *ask, "--mode", mode, name="inference.py") for ranks, mode in ((1, "replicate"), (2, "tensor"))
    ]
    assert texts[0].out == texts[1].out and "Continuation:" in texts[0].out, texts[1].err
    (tmp_path / "prompts").write_text("The model\nEvery token\nThe\n")
    ask = ("--weights", tmp_path / "run", "--prompts", tmp_path / "prompts", "--max-new-tokens", 5, "--mode", "batch")
    one, two = (script(ranks, *ask, name="inference.py") for ranks in (1, 2))
    assert one.out == two.out and two.out.count("Continuation:") == 3, two.err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_gather_forward_is_complete_for_every_reader_between_steps(gpus, tmp_path, precision):
    """Validation, checkpoints, verification and resume between captured steps: as with --zero-gather end."""
    gpus(2)
    curves = []
    for when in ("end", "forward"):
        flags = (*TINY, "--precision", precision, "--deterministic", "--val-fraction", 0.1, "--out", tmp_path / when)
        how = ("--dp", "bucket", "--zero", 1, "--zero-gather", when, "--bucket-mb", 0.1, "--verify-every", 2)
        rows = []
        for steps, more in ((5, ("--checkpoint-every", 3)), (9, ("--resume", tmp_path / when))):
            log = tmp_path / f"{when}-{steps}.jsonl"
            done = script(2, *flags, *how, *more, "--eval-every", 2, "--steps", steps, "--log", log)
            assert (done.code, done.left) == (0, ()), done.err
            rows += [(row["loss"], row.get("val_loss"), row.get("parameters_sha256")) for row in rows_of(log)]
        curves.append(rows)
    assert curves[0] == curves[1] and len(curves[0]) == 9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_3_validates_saves_and_resumes_between_captured_steps(gpus, tmp_path, precision):
    """The curve of ZeRO-3, resumed with ZeRO-2, is that of one rank."""
    gpus(2)
    curves = []
    for ranks in (1, 2):
        rows, out = [], tmp_path / str(ranks)
        flags = (*TINY, "--precision", precision, "--deterministic", "--val-fraction", 0.1, "--eval-every", 2)
        for steps, zero, more in ((5, 3, ("--checkpoint-every", 3)), (9, 2, ("--resume", out))):
            log, how = tmp_path / f"{ranks}-{steps}.jsonl", ("--zero", zero) if ranks == 2 else ()
            done = script(ranks, *flags, *how, *more, "--out", out, "--verify-every", 2, "--steps", steps, "--log", log)
            assert (done.code, done.left) == (0, ()), done.err
            rows += [(row["loss"], row.get("val_loss"), row.get("parameters_sha256")) for row in rows_of(log)]
        curves.append(rows)
    assert curves[0] == curves[1] and len(curves[0]) == 9


def test_the_measured_bucket_size_is_printed_and_saved(gpus, tmp_path):
    gpus(2)
    flags = (*TINY, "--steps", 4, "--dp", "bucket", "--verify-every", 1)
    done = script(2, *flags, "--out", tmp_path / "run")
    assert (done.code, done.left) == (0, ()), done.err
    measured = r"--bucket-mb (\d+): ([\d.-]+) us per message and ([\d.-]+) ps per byte"
    size, alpha, _ = re.search(measured, done.out).groups()
    assert int(size) >= 1 and 0 < float(alpha) < 1000
    (state,) = (tmp_path / "run").glob("step-*/state.json")
    assert json.loads(state.read_text())["bucket_mb"] == int(size)
    assert "a message" not in script(2, *flags, "--deterministic").out


def test_more_ranks_than_gpus_share_them_and_print_a_note(gpus, tmp_path):
    gpus(1)
    flags, one = (*TINY, "--steps", 3), dict(CUDA_VISIBLE_DEVICES="0")
    done = script(2, *flags, **one)
    assert (done.code, done.left) == (0, ()), done.err
    assert "has 1 GPU for 2 ranks, so ranks share GPUs" in done.err and "--transport mpi" in done.out
    done = script(2, *flags, "--transport", "nccl", **one)
    words = "--transport nccl: needs a GPU for each rank, but "
    assert done.code == 2 and words in done.err and "has 1 GPU for 2 ranks" in done.err
    assert done.err.count("error: ") == 1 and not done.left


def test_a_missing_nccl_names_the_package_to_install(gpus):
    gpus(2)
    hide = "import cupy.cuda.nccl as nccl; nccl.available = False"
    code = f"{hide}; import runpy; runpy.run_path('train_gpt2.py', run_name='__main__')"
    done = mpi("-n", 2, sys.executable, "-c", code, "--no-save", cwd=STAGE)
    assert done.code == 2 and "pip install nvidia-nccl-cu" in done.err and done.err.count("error: ") == 1


FAULTY = """
import os, signal
import cupy
from gpt2core.app.cli import train
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage2_cuda.cuda_backend import CudaBackend
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

original = Trainer.begin

def begin(self, batch, lr):
    if self.world.rank == 1 and self.steps == 4:
        {fault}
    return original(self, batch, lr)

Trainer.begin = begin
train(stage=3, backend=CudaBackend, world=NcclCommunicator)
"""


@pytest.mark.parametrize(
    "fault, cause",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 has sent no heartbeat for 20 s"),
        ("cupy.empty(1 << 50, 'u1')", "error: rank 1: out of memory"),
        ("raise ZeroDivisionError('an injected fault')", "ZeroDivisionError: an injected fault"),
    ],
    ids=["SIGKILL", "SIGSTOP", "memory", "exception"],
)
def test_a_rank_that_fails_while_others_wait_in_nccl_ends_the_job(gpus, fault, cause):
    gpus(2)
    with Job("-n", 2, sys.executable, "-c", FAULTY.format(fault=fault), *TINY, "--no-save", "--steps", 1000) as job:
        job.wait_for("step     3 ")
        done = job.done()
    assert done.code not in (0, None) and not done.left and done.seconds < SOON, done.err
    assert (done.out + done.err).count(cause) == 1 or not cause, done.err


def test_a_rank_that_is_killed_during_replays_ends_the_job(gpus):
    gpus(2)
    flags = (*TINY, "--no-save", "--steps", 10**6, "--dp", "bucket")
    with Job("-n", 2, sys.executable, "train_gpt2.py", *flags, cwd=STAGE) as job:
        job.wait_for("step    50 ")
        os.kill(job.ranks()[1], signal.SIGKILL)
        done = job.done()
    assert done.code not in (0, None) and not done.left and done.seconds < SOON, done.err

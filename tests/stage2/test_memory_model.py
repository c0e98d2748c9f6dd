"""The memory model: its sum is what a step allocates, and its error message names options that fit."""

import gc
import math
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.app import cli
from gpt2core.app.backend_setup import memory_errors, step_sizes
from gpt2core.app.settings.run_config import RunConfig
from gpt2core.architecture import GPT2Config, parameter_count, parameter_shapes
from gpt2core.communicator import Communicator, Handle, Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import DeviceMemoryError
from gpt2core.memory import gpu as memory
from gpt2core.memory.gpu import (
    MARGIN,
    MIN_FUSED_GELU,
    generation_memory,
    shares,
    training_memory,
)
from gpt2core.parallel import parallel_trainer as trainers
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.whole_parameters import load
from gpt2core.presets import PRESETS
from gpt2core.runtime import Runtime
from gpt2core.training_loop import read_batch
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda import cuda_backend
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.cuda_runtime import CudaRuntime
from stage2_cuda.gemm import products
from stage2_cuda.kernels.codecs import FusedCodec
from stage2_cuda.memory_advice import explain_generation_oom, explain_training_oom, is_out_of_memory, largest_batch
from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.peak_flops import peak_flops
from stage2_cuda.runtime.side_stream import NoStream, SideStream
from stage2_cuda.tuning.tuner import Tuner
from testing.fake_gpu import Event, Stream
from tests.support.pooled_cupy import PooledCupy
from tests.support.unsaved import unsaved

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
CONFIG = PRESETS["nano"]
gpu = pytest.mark.gpu
in_the_interpreter = pytest.mark.skipif(not triton_launch.interpreted(), reason="counts NumPy's allocations")

# in each size another term is the largest: the layers, the head, the parameters
SIZES = [
    (GPT2Config(172, 128, 6, 4, 64, tied=False), 16, 128, 1),
    (GPT2Config(20000, 64, 2, 4, 64, tied=True), 16, 64, 1),
    (GPT2Config(100, 32, 4, 4, 256, tied=False), 4, 32, 4),
]


def keeping():
    """A side stream that keeps its operands alive as on a GPU, and allocates in the heap of this process."""
    stream = Stream()
    cuda = SimpleNamespace(Stream=lambda **_: stream, get_current_stream=lambda: stream, Event=Event)
    return SideStream(SimpleNamespace(cuda=cuda))


def trainer_of(monkeypatch, backend, config, batch, seq_len, **options):
    """(a Trainer whose kernels do nothing, a function that updates it with a batch of `batch` sequences)."""
    monkeypatch.setattr(triton_launch.launcher(), "launch", lambda *_: None)
    monkeypatch.setattr(backend.products.gemm, "matmul", lambda *_, **__: None)
    windows = Windows(np.arange(batch * seq_len + 1) % config.vocab_size, seq_len)
    trainer = Trainer(config, [backend], seq_len=seq_len, **options)
    prepared = trainer.prepare(*windows.batch(0, batch))
    return trainer, lambda: trainer.compiled(prepared, trainer.optimizer.coefficients(1, 1e-3))


def peak_of(*args, steps=1, **options):
    """Peak memory in bytes of the steps of trainer_of(*args, **options)."""
    tracemalloc.start()
    try:
        _, update = trainer_of(*args, **options)
        for _ in range(steps):
            tracemalloc.reset_peak()  # excludes the initial parameters, which are created on the host
            with np.errstate(all="ignore"):
                update()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@in_the_interpreter
@pytest.mark.parametrize("precision, wide", [("fp32", MIN_FUSED_GELU), ("fp16", MIN_FUSED_GELU), ("fp16", 0)])
@pytest.mark.parametrize("side", [NoStream, keeping])
@pytest.mark.parametrize("config, batch, seq_len, micro_batches", SIZES, ids=["layers", "head", "parameters"])
def test_the_model_is_the_memory_of_a_step(monkeypatch, precision, wide, side, config, batch, seq_len, micro_batches):
    """Within 10 %, with kernels that do nothing: only the lifetime and the size of each array matter."""
    for module in (memory, products):
        monkeypatch.setattr(module, "MIN_FUSED_GELU", wide)
    backend = CudaBackend(precision)
    backend.runtime.side = side()
    sizes = dict(batch_size=batch, seq_len=seq_len, micro_batches=micro_batches)
    peak = peak_of(monkeypatch, backend, config, batch, **sizes)
    terms = training_memory(config, batch, seq_len, precision, micro_batches)
    elsewhere = terms["workspace"] + terms["context"] + terms["side stream"]
    assert peak == pytest.approx(sum(terms.values()) - elsewhere, rel=0.1)


def pooled(monkeypatch, config, precision="fp16"):
    """(a CudaBackend on a PooledCupy that captures its steps, the PooledCupy, uninitialised parameters)."""
    cupy = PooledCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(triton_launch, "array_module", lambda: cupy)
    drawn = [(name, np.empty(shape, np.float32)) for name, shape in parameter_shapes(config)]
    monkeypatch.setattr(trainers, "initial_parameters", lambda *_: iter(drawn))
    runtime = CudaRuntime.__new__(CudaRuntime)
    Runtime.__init__(runtime)
    runtime.precision = precision
    runtime.xp, runtime.name, runtime.side = cupy, "a pooled CuPy", SideStream(cupy)
    runtime.gemm, runtime.tuner, runtime.compiled, runtime.decoding_memories = products.NumpyGemm(), Tuner(cupy), [], []
    runtimes = [runtime]  # only the backend keeps it, so that its memory is freed with the backend
    monkeypatch.setattr(cuda_backend, "make_runtime", lambda *_: runtimes.pop())
    return CudaBackend(precision), cupy, drawn


@in_the_interpreter
@pytest.mark.parametrize(
    "preset, batch, micro_batches, how",
    [
        ("gpt2", 64, 1, "recomputed"),
        ("gpt2", 64, 2, "captured"),
        ("gpt2", 64, 8, "eager"),
        ("gpt2", 64, 8, "resumed"),
        ("gpt2", 1, 1, "captured"),
        ("gpt2", 64, 1, "sliced"),
        ("gpt2", 64, 8, "sliced"),
        pytest.param("gpt2", 64, 4, "recomputed", marks=pytest.mark.long),
        pytest.param("gpt2-medium", 32, 1, "recomputed", marks=pytest.mark.long),
        pytest.param("gpt2", 64, 4, "captured", marks=pytest.mark.long),
        pytest.param("gpt2", 64, 8, "captured", marks=pytest.mark.long),
        pytest.param("gpt2", 64, 16, "captured", marks=pytest.mark.long),
        pytest.param("gpt2-medium", 32, 8, "captured", marks=pytest.mark.long),
    ],
)
def test_the_model_equals_the_memory_in_cupy_s_pools(monkeypatch, preset, batch, micro_batches, how):
    """Within 1 %: freed blocks are reused, because no small live array splits them."""
    config = PRESETS[preset]
    backend, _, drawn = pooled(monkeypatch, config)
    slices = 2 if how == "sliced" else 1
    parallel = ParallelConfig(recompute="block" if how == "recomputed" else "none", canonical_tp=slices)
    sizes = dict(batch_size=batch, seq_len=config.block_size, micro_batches=micro_batches, parallel=parallel)
    trainer, update = trainer_of(monkeypatch, backend, config, batch, capture=how != "eager", **sizes)
    if how == "resumed":
        load(trainer, dict(drawn), {name: (array, array) for name, array in drawn})
    for _ in range(3):  # the first compiles, the second is captured, the third replayed
        update()
    terms = training_memory(config, batch, config.block_size, "fp16", micro_batches, parallel=parallel)
    want = sum(terms.values()) - terms["workspace"] - terms["context"]
    assert backend.runtime.peak_memory() == pytest.approx(want, rel=0.01)


@in_the_interpreter
@pytest.mark.parametrize("preset, batch", [("gpt2", 256), ("paper", 64)])
def test_recomputation_keeps_no_activation_for_the_side_stream(monkeypatch, preset, batch):
    """Within 7 %: with the operands of the block above it would be up to 20 %."""
    config, parallel = PRESETS[preset], ParallelConfig(recompute="block")
    backend, _, _ = pooled(monkeypatch, config)
    sizes = dict(batch_size=batch, seq_len=config.block_size, micro_batches=1, parallel=parallel)
    _, update = trainer_of(monkeypatch, backend, config, batch, **sizes)
    for _ in range(3):
        update()
    terms = training_memory(config, batch, config.block_size, "fp16", parallel=parallel)
    want = sum(terms.values()) - terms["workspace"] - terms["context"]
    assert backend.runtime.peak_memory() == pytest.approx(want, rel=0.07)


@in_the_interpreter
def test_deleting_a_trainer_frees_all_of_its_memory(monkeypatch):
    def trained():
        backend, cupy, _ = pooled(monkeypatch, PRESETS["gpt2"])
        _, update = trainer_of(monkeypatch, backend, PRESETS["gpt2"], 8, 1024, batch_size=8, micro_batches=1)
        for _ in range(3):
            update()
        pools = [cupy.pool, *(captured.graph_memory.pool for captured in backend.runtime.compiled)]
        assert len(pools) == 2 and all(pool.total_bytes() > GIB for pool in pools)
        return pools

    shared, own = trained()
    gc.collect()
    assert own.total_bytes() == 0
    shared.free_all_blocks()
    assert shared.total_bytes() == 0


@gpu
def test_memory_does_not_grow_over_successive_trainers():
    """Counts the bytes in the pools of this process, because other processes may use the same GPU."""
    import cupy

    default = cupy.get_default_memory_pool()

    def left_after_training():
        """Bytes left in the default pool and in the pools of the graphs, and the bytes held before."""
        gc.collect()  # arrays of earlier tests
        default.free_all_blocks()
        backend = CudaBackend("bf16")
        windows = Windows(np.arange(10_000) % 172, 256)
        trainer = Trainer(PRESETS["paper"], [backend], batch_size=16, seq_len=256, micro_batches=1)
        losses = [trainer.step(read_batch(trainer, windows), 1e-3).loss for _ in range(3)]
        assert np.isfinite(losses).all()
        held = backend.runtime.held_memory()
        pools = [step.graph_memory.pool for step in backend.runtime.compiled]
        assert sum(pool.total_bytes() for pool in pools) > held / 4  # the graph has its own memory
        del trainer, backend
        gc.collect()
        default.free_all_blocks()
        return default.total_bytes(), sum(pool.total_bytes() for pool in pools), held

    (before, *_), (after, left_in_graphs, held) = left_after_training(), left_after_training()
    assert held > GIB / 4 and left_in_graphs == 0 and after - before < held / 4


class EqualRanks(Communicator):
    """A group of `size` ranks in which all others have the data of this one; only this rank uses memory."""

    rank = bytes_sent = 0

    def __init__(self, size):
        self.size = size

    def all_reduce_start(self, x, op="sum", out=None):
        return Handle(x.copy() if out is None else out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        return Handle(x[: len(x) // self.size].copy() if out is None else out)

    def all_gather_start(self, x, out=None):
        return Handle(np.concatenate([x] * self.size) if out is None else out)

    def all_to_all_start(self, x, out=None):
        return Handle(x.copy())

    def broadcast_start(self, x, root=0, out=None):
        return Handle(x)

    def codec(self, kind):
        return FusedCodec(kind, np)

    def split(self, color, key=0):
        return EqualRanks(self.size)


SHARED_SIZES = dict(zip(["layers", "head", "parameters"], SIZES, strict=True))
SHARED_SIZES["one pass"] = GPT2Config(100, 32, 8, 4, 256, tied=False), 2, 32, 1
SHARED = [
    ("layers", 2, ParallelConfig(dp="bucket", bucket_mb=1)),
    ("layers", 1, ParallelConfig(recompute="block")),
    ("layers", 2, ParallelConfig(recompute="block", tp=2)),
    ("head", 1, ParallelConfig(recompute="block")),
    ("layers", 1, ParallelConfig(tp=2)),
    ("layers", 1, ParallelConfig(tp=4)),
    ("layers", 1, ParallelConfig(canonical_tp=4)),
    ("layers", 2, ParallelConfig(canonical_tp=2, recompute="block")),
    ("head", 1, ParallelConfig(canonical_tp=4)),
    ("head", 2, ParallelConfig(canonical_tp=2, zero=3)),
    ("parameters", 2, ParallelConfig(tp=2, canonical_tp=4, zero=1)),
    ("head", 2, ParallelConfig(tp=2)),
    ("parameters", 4, ParallelConfig(zero=1)),
    ("parameters", 2, ParallelConfig(tp=2, zero=1)),
    ("layers", 2, ParallelConfig(zero=2)),
    ("layers", 2, ParallelConfig(zero=3, recompute="block")),
    ("head", 2, ParallelConfig(zero=2)),
    ("head", 4, ParallelConfig(zero=3)),
    ("parameters", 2, ParallelConfig(zero=2)),
    ("parameters", 4, ParallelConfig(zero=3)),
    ("one pass", 4, ParallelConfig(zero=2)),
    ("one pass", 4, ParallelConfig(zero=3)),
    ("layers", 2, ParallelConfig(tp=2, zero=2)),
    ("head", 2, ParallelConfig(tp=2, zero=3)),
    ("parameters", 4, ParallelConfig(tp=2, zero=3)),
    ("parameters", 2, ParallelConfig(compress="fp16")),
    ("parameters", 2, ParallelConfig(compress="bf16")),
    ("parameters", 4, ParallelConfig(compress="int8", zero=1)),
    ("parameters", 2, ParallelConfig(compress="int8", dp="bucket", bucket_mb=0.5)),
]


@in_the_interpreter
@pytest.mark.parametrize("kind, ranks, parallel", SHARED)
def test_the_model_equals_the_memory_of_one_of_many_ranks(monkeypatch, kind, ranks, parallel):
    config, batch, seq_len, micro_batches = SHARED_SIZES[kind]
    tensor = EqualRanks(parallel.tp) if parallel.tp > 1 else Solo()
    data = EqualRanks(ranks)
    mesh = SimpleNamespace(data=data, gradients=data, tensor=tensor, pipeline=Solo(), groups=dict, replica=tensor)
    mesh.total_loss = lambda losses, signal=0: (sum(losses), signal)
    mesh.groups_of_workers = lambda count: [mesh] * count
    monkeypatch.setattr(trainers, "Mesh", lambda *_: mesh)
    sizes = dict(batch_size=batch * ranks, seq_len=seq_len, micro_batches=micro_batches * ranks)
    mesh.world = EqualRanks(ranks * parallel.tp)
    shared = dict(world=mesh.world, parallel=parallel)
    peak = peak_of(monkeypatch, CudaBackend(), config, batch, steps=2, **sizes, **shared)
    terms = training_memory(config, batch, seq_len, "fp32", micro_batches, ranks, parallel)
    elsewhere = sum(
        terms[name] for name in ("workspace", "context", "side stream", "gathered to save", "free in pieces")
    )
    assert peak == pytest.approx(sum(terms.values()) - elsewhere, rel=0.1)


@in_the_interpreter
@pytest.mark.parametrize(
    "preset, batch, micro_batches, ranks, zero, recompute",
    [
        ("gpt2", 8, 1, 4, 2, "none"),
        ("gpt2", 8, 1, 4, 3, "none"),
        ("gpt2", 8, 1, 8, 3, "block"),
        ("gpt2", 16, 4, 4, 2, "none"),
        ("gpt2", 16, 4, 4, 3, "none"),
        ("paper", 64, 1, 2, 3, "none"),
        ("gpt2-medium", 4, 1, 8, 3, "block"),
    ],
)
def test_the_model_of_zero_2_and_3_equals_the_memory_in_cupy_s_pools(
    monkeypatch, preset, batch, micro_batches, ranks, zero, recompute
):
    """Within 3 %: the arrays of units come and go, and the blocks that they leave are reused."""
    config, parallel = PRESETS[preset], ParallelConfig(zero=zero, recompute=recompute)
    backend, _, _ = pooled(monkeypatch, config)
    data, solo = EqualRanks(ranks), Solo()
    mesh = SimpleNamespace(data=data, gradients=data, tensor=solo, pipeline=solo, groups=dict, replica=solo)
    mesh.total_loss = lambda losses, signal=0: (sum(losses), signal)
    mesh.groups_of_workers = lambda count: [mesh] * count
    monkeypatch.setattr(trainers, "Mesh", lambda *_: mesh)
    sizes = dict(batch_size=batch * ranks, seq_len=config.block_size, micro_batches=micro_batches * ranks)
    mesh.world = EqualRanks(ranks)
    shared = dict(world=mesh.world, parallel=parallel)
    trainer, update = trainer_of(monkeypatch, backend, config, batch, **sizes, **shared)
    trainer.layout.order = np.zeros(len(trainer.layout.order), int)  # the fake has no values
    for _ in range(3):
        update()
    terms = training_memory(config, batch, config.block_size, "fp16", micro_batches, ranks, parallel)
    elsewhere = sum(terms[name] for name in ("workspace", "context", "gathered to save"))
    assert backend.runtime.peak_memory() == pytest.approx(sum(terms.values()) - elsewhere, rel=0.03)


def train_in_new_process(*flags):
    """Run train_gpt2.py in a new process, because CuPy's pools of this process hold memory of other tests."""
    words = [sys.executable, "-m", "stage2_cuda.train_gpt2", *unsaved(map(str, flags)), "--sample", "0"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)


@gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("flags", [(), ("--no-graph",)], ids=["captured", "eager"])
def test_the_model_is_within_a_tenth_of_the_reported_memory(precision, flags, recompute):
    flags = *flags, "--recompute", recompute
    done = train_in_new_process("--preset", "paper", "--batch-size", 64, "--steps", 3, "--precision", precision, *flags)
    assert done.returncode == 0, done.stderr
    held = float(re.search(r"largest amount of device memory used: ([\d.]+) GiB", done.stdout)[1])
    terms = training_memory(PRESETS["paper"], 64, 256, precision, parallel=ParallelConfig(recompute=recompute))
    assert held == pytest.approx((sum(terms.values()) - terms["context"]) / GIB, rel=0.1)


# -- suggestions -----------------------------------------------------------------------------------------------------


def needed(*step):
    return sum(training_memory(*step).values())


def test_the_suggested_batch_fits_and_a_larger_one_does_not():
    config, free = PRESETS["gpt2"], 40 * GIB
    message = explain_training_oom(config, 512, 1024, "bf16", 1, 1, free)
    assert "--batch-size 512 of 1024 tokens in 1 micro-batch needs about" in message
    assert "only 40.0 GiB are free" in message
    batch, shards = map(int, re.search(r"use --batch-size (\d+), --micro-batches (\d+) or", message).groups())
    assert MARGIN * needed(config, batch, 1024, "bf16") <= free < MARGIN * needed(config, batch + 1, 1024, "bf16")
    assert MARGIN * needed(config, 512, 1024, "bf16", shards) <= free
    assert MARGIN * needed(config, 512, 1024, "bf16", shards // 2) > free
    assert message.endswith("or --recompute block")
    recomputed = needed(config, 512, 1024, "bf16", 1, 1, ParallelConfig(recompute="block"))
    assert MARGIN * recomputed <= free
    message = explain_training_oom(config, 512, 1024, "bf16", 1, 1, recomputed / 2, ParallelConfig(recompute="block"))
    assert "with --recompute block needs" in message and "--recompute" not in message.split("; use ")[1]


def test_the_suggested_batch_is_divisible_by_the_micro_batches_of_all_ranks():
    message = explain_training_oom(PRESETS["gpt2"], 512, 1024, "bf16", 8, 4, 20 * GIB)
    batch = int(re.search(r"--batch-size (\d+)[, ]", message.split("; use ")[1])[1])
    assert batch % 8 == 0 and needed(PRESETS["gpt2"], batch // 4, 1024, "bf16", 2) < 20 * GIB


def test_zero_and_compression_are_suggested_if_they_suffice():
    config, sizes = PRESETS["gpt2-xl"], (1024, "bf16", 4, 4)
    with_zero = sum(training_memory(config, 1, 1024, "bf16", 1, 4, ParallelConfig(zero=1)).values())
    message = explain_training_oom(config, 4, *sizes, MARGIN * with_zero + GIB)
    assert message.startswith("--batch-size 4 of 1024 tokens in 4 micro-batches needs")
    assert message.endswith("use --zero 1")
    message = explain_training_oom(
        config, 4, *sizes, MARGIN * with_zero + GIB, ParallelConfig(zero=1, tp=5, compress="int8"), True
    )
    assert "in 4 micro-batches with --tp 5 --zero 1 --compress int8 needs about" in message and "use" in message
    message = explain_training_oom(config, 4, *sizes, MARGIN * with_zero + GIB, ParallelConfig(zero=1, compress="bf16"))
    assert message.endswith("use --compress none")
    # the prediction fits, but the GPU had too little memory: no advice to give a flag that is given
    message = explain_training_oom(config, 4, *sizes, 10 * with_zero, ParallelConfig(zero=1))
    assert "--zero 1" not in message.split("; use ")[1]


def test_zero_3_is_suggested_if_no_smaller_one_suffices():
    config, sizes = PRESETS["gpt2-xl"], (1024, "bf16", 4, 4)
    needed = [
        sum(training_memory(config, 1, 1024, "bf16", 1, 4, ParallelConfig(zero=zero)).values()) for zero in range(4)
    ]
    assert needed[0] > needed[1] > needed[2] > needed[3]
    for zero in (2, 3):
        free = MARGIN * needed[zero] + 1e6
        assert explain_training_oom(config, 4, *sizes, free).endswith(f"use --zero {zero}")
        other = ParallelConfig(dp="bucket")  # ZeRO-2 and ZeRO-3 refuse it
        assert "--zero" not in explain_training_oom(config, 4, *sizes, free, other).split("; use ")[1]


def test_the_terms_of_each_kind_of_parallelism():
    config, sizes = PRESETS["gpt2"], (8, 1024, "bf16", 1)
    one_rank = training_memory(config, *sizes)
    assert training_memory(config, *sizes, 4, ParallelConfig(zero=1))["moments"] == one_rank["moments"] / 4
    halves = training_memory(PRESETS["small"], *sizes, 1, ParallelConfig(tp=2))
    whole = training_memory(PRESETS["small"], *sizes)
    assert all(0.5 * whole[name] <= halves[name] < 0.7 * whole[name] for name in ("parameters", "activations"))
    in_order = {
        dp: training_memory(config, *sizes, 4, ParallelConfig(dp=dp), in_order=True) for dp in ("flat", "bucket")
    }
    assert in_order["flat"]["sums over ranks"] == one_rank["gradients"]
    largest = 50257 * 768 + 25e6 / 4  # a bucket ends at the end of a parameter; wte is larger than a bucket
    assert in_order["bucket"]["sums over ranks"] == pytest.approx(4 * largest)
    kept = training_memory(config, *sizes, 4, ParallelConfig(dp="bucket", compress="int8"))["compression"]
    assert 1.25 * one_rank["gradients"] < kept < 2.5 * one_rank["gradients"]


def test_the_flags_of_many_ranks_reach_the_memory_model(monkeypatch):
    args = SimpleNamespace(batch_size=16, seq_len=32, tp=2, dp="bucket", bucket_mb=3.0, compress="int8", zero=1)
    args.recompute, args.pp, args.pp_schedule, args.chunks, args.canonical_tp = "block", 1, "1f1b", None, 2
    args.transport, args.collectives, args.zero_gather, args.sparse_embedding = "nccl", "canonical", "forward", False
    args.parallel = RunConfig.parallel.fget(args)
    asked = {}
    runtime = SimpleNamespace(explain_oom=lambda error, *sizes: asked.setdefault("sizes", sizes) and "no room")
    backend = SimpleNamespace(runtime=runtime)
    with pytest.raises(DeviceMemoryError, match="no room"), memory_errors(backend, CONFIG, *step_sizes(args, 4, 2)):
        raise MemoryError
    assert asked["sizes"] == (
        CONFIG,
        16,
        32,
        4,
        2,
        ParallelConfig(2, "bucket", 3.0, "int8", 1, "forward", "block"),
        True,
    )
    args.transport = "mpi"
    assert step_sizes(args, 4, 2)[-1] is False


def test_a_smaller_model_is_suggested_if_no_batch_fits():
    assert explain_training_oom(PRESETS["gpt2-xl"], 4, 1024, "fp32", 1, 1, 20 * GIB).endswith(
        "; use a smaller --seq-len, or a smaller model"
    )
    assert explain_generation_oom(PRESETS["gpt2-xl"], "fp32", 4 * GIB).endswith(
        "use --precision bf16, or a smaller model"
    )
    assert explain_generation_oom(PRESETS["gpt2-xl"], "bf16", 2 * GIB).endswith("use a smaller model")
    assert generation_memory(PRESETS["gpt2"], "bf16")["keys and values"] == 12 * 2 * 2 * 1024 * 768


@pytest.mark.parametrize("most", [0, 1, 5, 8, 96, 99])
@pytest.mark.parametrize("step", [1, 4])
def test_the_largest_batch_is_found(most, step):
    assert largest_batch(lambda n: n <= most, 100, step) == most // step * step


@pytest.mark.parametrize(
    "error, is_it",
    [
        (MemoryError(), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cudaErrorMemoryAllocation: out of memory"), True),
        (RuntimeError("cublasLtCreate returned CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cudaErrorIllegalAddress"), False),
    ],
)
def test_which_errors_are_out_of_memory(error, is_it):
    assert is_out_of_memory(error) is is_it


# -- error messages ---------------------------------------------------------------------------------------------------


class SmallRuntime(CpuRuntime):
    def explain_oom(self, error, config, batch_size=None, seq_len=None, *sizes, **shared):
        return f"no room for {batch_size} x {seq_len}" if is_out_of_memory(error) else None


class Small(NumpyBackend):
    """Stage 0 on a device without enough memory for a step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.runtime = SmallRuntime()

    def attention_forward(self, qkv, n_head):
        raise MemoryError("of no interest")

    def attention_cached(self, *_):
        raise MemoryError("of no interest")


def test_out_of_memory_is_one_line(command, train, corpus, tmp_path):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 1)
    result = command(cli.train, *flags, backend=Small)
    assert (result.code, result.err) == (2, "error: no room for 4 x 16\n")
    assert train(*flags, "--out", tmp_path / "run").code == 0
    result = command(cli.infer, "--weights", tmp_path / "run", backend=Small)
    assert (result.code, result.err) == (2, "error: no room for None x None\n")


@gpu
@pytest.mark.long  # it fills the GPU, so that other programs on this GPU fail meanwhile
def test_a_batch_that_is_too_large_is_one_line_and_the_suggested_one_fits():
    flags = ("--preset", "gpt2-medium", "--steps", 3, "--precision", "bf16")
    batch = 256  # 200 GiB of activations; with less than 20 GiB no batch fits
    for _ in range(2):
        done = train_in_new_process(*flags, "--batch-size", batch)
        if done.returncode == 0:
            break
        *notes, message = done.stderr.splitlines()
        assert done.returncode == 2 and message.startswith("error: out of memory on the "), done.stderr
        once = re.compile("(timing|compiling .*) kernels for this GPU, only once")
        assert all(map(once.match, notes)), done.stderr
        batch = int(re.search(r"use --batch-size (\d+)", done.stderr)[1])
    assert done.returncode == 0 and batch < 256, done.stderr


# -- utilisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 104e12),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("the Triton interpreter", "fp32", None),
    ],
)
def test_the_peak_is_the_data_sheet_s_or_unknown(name, precision, peak):
    assert peak_flops(name, precision) == peak


@pytest.mark.parametrize("tied", [False, True])
def test_the_ranks_of_a_pipeline_divide_the_memory_of_the_model(tied):
    config = replace(PRESETS["gpt2-medium"], tied=tied)
    sizes = 32, 1024, "bf16", 16, 1

    def terms(**options):
        return training_memory(config, *sizes, ParallelConfig(**options), in_order=True)

    whole = terms()
    for schedule in SCHEDULES:
        parts = shares(config, ParallelConfig(pp=2, pp_schedule=schedule), 16)
        assert sum(math.prod(shape) for part in parts for _, shape in part.shapes) == parameter_count(config)
        assert [part.has_head for part in parts] == [False, True]
        assert [part.copies for part in parts] == [config.vocab_size * config.n_embd * tied, 0]
        half = terms(pp=2, pp_schedule=schedule)
        for name in ("parameters", "gradients", "moments"):
            assert 0.49 < half[name] / whole[name] < 0.62
    activations = {name: terms(pp=2, pp_schedule=name)["activations"] for name in SCHEDULES}
    assert activations["1f1b"] < activations["interleaved"] < activations["gpipe"]
    assert activations["gpipe"] == pytest.approx(16 * whole["activations"] / 2, rel=0.05)
    assert terms(pp=2, recompute="block")["activations"] < activations["1f1b"] / 4


def test_zero_divides_the_part_of_a_rank_of_a_grid():
    config, sizes = PRESETS["gpt2-medium"], (32, 1024, "bf16", 16, 4)
    for how in (dict(tp=4), dict(pp=2), dict(tp=4, pp=2)):
        plain, zero_2, zero_3 = (
            training_memory(config, *sizes, ParallelConfig(zero=zero, **how)) for zero in (0, 2, 3)
        )  # fmt: skip
        for name in ("parameters", "moments"):
            assert zero_2[name] == zero_3[name] == pytest.approx(plain[name] / 4, rel=0.001)
        assert zero_2["whole parameters"] == pytest.approx(plain["parameters"] / 2, rel=0.001)  # bf16
        blocks = config.n_layer // how.get("pp", 1)
        assert zero_3["whole parameters"] < zero_2["whole parameters"] * 2 / blocks

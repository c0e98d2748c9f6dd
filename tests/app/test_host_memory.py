"""A model that cannot fit into the memory of the host is refused before anything is allocated."""

from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import host_memory
from gpt2core.app.host_memory import available_memory, control_group_limits, largest_unit, needed_memory
from gpt2core.architecture import parameter_count
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.config import ParallelConfig
from gpt2core.presets import PRESETS
from stage0_serial.numpy_backend import NumpyBackend

TINY = PRESETS["tiny"]
FP32 = 4 * parameter_count(TINY)  # bytes of the parameters


@pytest.mark.parametrize("threads", [1, 2])
def test_the_lower_bound_is_at_most_the_flat_buffers_of_a_trainer(threads):
    trainer = Trainer(TINY, [NumpyBackend() for _ in range(threads)], batch_size=8, seq_len=4, micro_batches=8)
    workers = trainer.accumulator.workers
    sums = [worker.gradients for worker in workers for _ in worker.unit_gradients.sums["head"].buffers]
    buffers = [trainer.parameters, *trainer.optimizer.states.values(), *sums]
    needed = needed_memory(TINY, ParallelConfig(), threads, 1, 1)
    assert needed == (3 + threads) * FP32 <= sum(buffer.nbytes for buffer in buffers)
    assert all(buffer.dtype == np.float32 for buffer in buffers)


def test_zero_divides_the_moments_and_tensor_parallelism_divides_everything():
    assert needed_memory(TINY, ParallelConfig(), 1, 4, 4) == 4 * 4 * FP32
    assert needed_memory(TINY, ParallelConfig(zero=1), 1, 4, 4) == (4 * 2 + 2) * FP32
    assert needed_memory(TINY, ParallelConfig(zero=1), 1, 2, 4) == (2 * 2 + 1) * FP32  # the other two ranks elsewhere
    assert needed_memory(TINY, ParallelConfig(tp=2), 1, 2, 1) == 4 * (FP32 // 2 * 2)


def test_zero_2_and_3_divide_also_gradients_and_parameters_but_not_those_of_a_unit():
    unit = 4 * largest_unit(TINY)
    assert 0 < unit < FP32 / 2
    assert needed_memory(TINY, ParallelConfig(zero=2), 1, 4, 4) == 4 * (FP32 + FP32 + unit)
    assert needed_memory(TINY, ParallelConfig(zero=3), 1, 4, 4) == 4 * (FP32 + 2 * unit)
    assert needed_memory(TINY, ParallelConfig(zero=3), 1, 1, 4) == FP32 + 2 * unit
    assert needed_memory(TINY, ParallelConfig(zero=3), 3, 1, 4) == FP32 + (1 + 3) * unit  # gradients of each thread


def test_a_host_with_too_little_memory_is_one_line(train, corpus, monkeypatch):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--threads", 2)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 18)
    result = train(*flags)
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert result.err.startswith("error: a model of ") and "but the host has 0.0 GiB" in result.err
    assert "use a smaller model, fewer --threads, or more hosts with --tp or --zero 3 (stage 1)" in result.err
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 24)
    assert train(*flags).code == 0


@pytest.mark.parametrize(
    "groups, limits, expected",
    [
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "4096"}, [4096]),
        ("0::/", {"memory.max": "8192"}, [8192]),
        ("9:cpu:/a\n4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "512", "cpu/a/memory.max": "1"}, [512]),
        ("4:memory:/outside", {"memory/memory.limit_in_bytes": "256"}, [256]),  # in a container
        ("0::/", {}, []),
    ],
)
def test_the_limits_of_control_groups_are_read_and_swap_is_added(tmp_path, monkeypatch, groups, limits, expected):
    (tmp_path / "cgroup").write_text(groups)
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert list(control_group_limits(tmp_path / "cgroup", tmp_path / "fs")) == expected
    read_text, swap = Path.read_text, 3 << 20

    def read(path, *arguments, **options):
        return "MemTotal: 9 kB\nSwapTotal:  3072 kB\n" if path == Path("/proc/meminfo") else read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read)
    available = available_memory(tmp_path / "cgroup", tmp_path / "fs")
    assert available == expected[0] + swap if expected else available >= 1 << 28
    assert list(control_group_limits(tmp_path / "missing", tmp_path)) == []

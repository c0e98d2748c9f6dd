"""An error about a GPU or an unsupported option is one line that says what to do; a profiler shows named ranges."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.app.backend_setup import check_graph
from gpt2core.app.training import command as train_command
from gpt2core.architecture import GPT2Config
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError
from gpt2core.presets import PRESETS
from stage2_cuda.cuda_backend import CudaBackend, dtype_of
from stage2_cuda.runtime import nvtx, triton_launch

gpu = pytest.mark.gpu
in_the_interpreter = pytest.mark.skipif(not triton_launch.interpreted(), reason="tests the interpreter")
pytestmark = [] if triton_launch.interpreted() else [gpu]
NANO = ("--preset", "nano", "--sample", 0)


def one_line(result, *words):
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1, result
    for word in words:
        assert word in result.err
    return True


@in_the_interpreter
def test_the_interpreter_warns_about_a_large_model():
    assert CudaBackend().runtime.notes(PRESETS["nano"]) == []
    (note,) = CudaBackend().runtime.notes(PRESETS["paper"])
    assert "--preset nano" in note


@in_the_interpreter
def test_the_command_that_resumes_an_interpreted_run_selects_the_interpreter(train2, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(train_command, "StopSignals", lambda _: contextlib.nullcontext(SimpleNamespace(received=15)))
    sizes = ("--steps", 3, "--batch-size", 1, "--seq-len", 4)
    result = train2(*NANO, "--data", corpus, *sizes, "--out", tmp_path / "run")
    assert (result.code, result.err) == (128 + 15, "")
    assert "stopped by SIGTERM after 1 of 3 steps: continue with\n  TRITON_INTERPRET=1 " in result.out


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A CuPy that is installed but cannot be imported."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "cupy" else None

    def exec_module(self, module):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.12: cannot open shared object file\nCuPy is not correctly installed"),
        RuntimeError("CuPy was built for CUDA 12, and this driver has 13"),
    ],
)
def test_a_cupy_that_cannot_be_imported_is_a_one_line_error(monkeypatch, error):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    monkeypatch.setattr(triton_launch, "has_driver", lambda: True)
    with pytest.raises(ConfigError) as caught:
        triton_launch.GpuLauncher()
    message, reason = str(caught.value), str(error).splitlines()[0]
    assert message.startswith(f"CuPy is needed but cannot be imported ({reason}): pip install cupy-")
    assert "TRITON_INTERPRET=1" in message and "\n" not in message


@in_the_interpreter
def test_bf16_without_a_gpu_and_its_packages_is_a_one_line_error(train2, infer2, monkeypatch):
    for name in ("cupy", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, value in (("interpreted", False), ("has_driver", False)):
        monkeypatch.setattr(triton_launch, name, lambda value=value: value)
    monkeypatch.setattr(triton_launch, "launcher", triton_launch.GpuLauncher)
    for run in (train2, infer2):
        assert one_line(run("--precision", "bf16"), "no GPU was found", "set the environment variable TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="ml_dtypes is needed but cannot be imported .*: pip install ml_dtypes"):
        dtype_of("bfloat16")  # with a GPU


@pytest.mark.parametrize("width, heads", [(272, 2), (24, 2), (512, 2)])
def test_an_unsupported_head_size_is_a_one_line_error(train, train2, infer2, corpus, tmp_path, width, heads):
    flags = (*NANO, "--data", corpus, "--steps", 1, "--n-embd", width, "--n-head", heads)
    result = train2(*flags)
    assert one_line(result, f"multiples of 8 up to 128, not {width} / {heads}") and result.out == ""
    assert train(*flags, "--out", tmp_path / "run").code == 0  # stage 0 supports every head size
    result = infer2("--weights", tmp_path / "run", "--prompt", "the model")
    assert one_line(result, f"not {width} / {heads}") and result.out == ""


def test_a_loss_that_is_not_finite_stops_training(train2, corpus):
    flags = (*NANO, "--data", corpus, "--batch-size", 1, "--steps", 9, "--lr", 1e30, "--deterministic")  # no timing
    assert one_line(train2(*flags), "the loss is nan", "Lower --lr")


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_the_cpu_supports_neither_tf32_nor_fp16(train, infer, precision):
    for run in (train, infer):
        assert one_line(run("--precision", precision), f"--precision {precision} is not available on the CPU")


@gpu
def test_nvtx_and_the_graph_exclude_each_other(train2):
    assert one_line(train2(*NANO, "--steps", 1, "--nvtx"), "add --no-graph")
    assert train2(*NANO, "--steps", 2, "--nvtx", "--no-graph").code == 0


@pytest.mark.parametrize(
    "uses_graphs, graph, annotated, words",
    [
        (True, None, True, "--nvtx has no effect on a step that is replayed from a CUDA graph: add --no-graph"),
        (True, True, True, "add --no-graph"),
        (True, False, True, None),
        (True, None, False, None),
        (True, True, False, None),
        (False, None, True, None),
        (False, False, False, "--no-graph has no meaning here: cpu has no CUDA graphs; omit the flag"),
    ],
)
def test_the_flags_of_cuda_graphs_are_refused_only_where_they_have_no_effect(uses_graphs, graph, annotated, words):
    backend = SimpleNamespace(name="cpu", runtime=SimpleNamespace(uses_graphs=uses_graphs))
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        check_graph(SimpleNamespace(graph=graph, nvtx=annotated, sparse_embedding=False), backend)


@pytest.mark.parametrize("graph", [None, True, False])
def test_a_captured_step_cannot_exchange_rows_of_the_embedding(graph):
    words = "`graph=True` and `sparse_embedding=True` exclude each other, .* use `graph=False`"
    with pytest.raises(ConfigError, match=words) if graph else contextlib.nullcontext():
        backend = SimpleNamespace(name="gpu", runtime=SimpleNamespace(uses_graphs=True))
        check_graph(SimpleNamespace(graph=graph, nvtx=False, sparse_embedding=True), backend)


# -- profiling --------------------------------------------------------------------------------------------------------


class Ranges:
    """A fake of cupy.cuda.nvtx that records the path of every range that is opened."""

    def __init__(self):
        self.open, self.paths = [], []

    def RangePush(self, name):
        self.open.append(name)
        self.paths.append("/".join(self.open))

    def RangePop(self):
        self.open.pop()


@in_the_interpreter
def test_a_profiler_shows_the_phases_of_a_step_and_their_ops(monkeypatch):
    monkeypatch.setattr(triton_launch.launcher(), "launch", lambda *_: None)
    ranges, config = Ranges(), GPT2Config(40, 8, 1, 2, 16)
    backend = CudaBackend()
    nvtx.annotate(backend, ranges)
    trainer = Trainer(config, [backend], batch_size=2, seq_len=8, micro_batches=2)
    batch, hyper = trainer.prepare(*np.zeros((2, 2, 8), np.int64)), trainer.optimizer.coefficients(1, 1e-3)
    with np.errstate(all="ignore"):
        trainer.compiled(batch, hyper)
    assert ranges.open == []
    phases = [path for path in ranges.paths if "/" not in path]
    assert phases == ["forward", "backward"] * 2 + ["optimizer"] * 2  # the norm, the update
    ops = "embedding linear attention residual_layernorm mlp unembed_cross_entropy"
    for op in ops.split():
        assert f"forward/{op}_forward" in ranges.paths and f"backward/{op}_backward" in ranges.paths
    assert {"optimizer/page_sums", "optimizer/clip", "optimizer/adamw_step"} <= set(ranges.paths)
    assert CudaBackend.linear_forward is vars(CudaBackend)["linear_forward"]  # no other backend is touched
    assert "range" not in vars(CudaBackend().runtime)

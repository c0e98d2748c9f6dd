"""--trace records the kernels and collectives of all ranks in one file, changes no bit, and damages no other file."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.tracing.hooks import KERNELS
from gpt2core.tracing.trace import Trace
from gpt2core.tracing.trace_file import Process, Span, write_trace
from gpt2core.training_loop import read_batch
from stage2_cuda.runtime import cupti
from tests.support.training import CONFIG, make_trainer

NANO = ("--preset", "nano", "--sample", 0)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 400)


def events_of(path):
    """The complete events of a trace, after a check of its names."""
    events = json.loads(path.read_text())["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == named
    return spans


def lane(path, title, pid=0):
    """The complete events of one lane."""
    events = json.loads(path.read_text())["traceEvents"]
    (tid,) = {e["tid"] for e in events if e["ph"] == "M" and e["pid"] == pid and e["args"].get("name") == title}
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]


def assert_nested(spans):
    """Assert that two spans of one lane are disjoint, or that one contains the other; a viewer shows no others."""
    ends = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while ends and ends[-1] <= span["ts"] + 0.002:  # times are rounded to 0.001 us
            ends.pop()
        assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.002
        ends.append(span["ts"] + span["dur"])


def log_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("parameters_sha256")) for row in rows]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_trace_changes_no_bit_and_has_the_kernels_of_each_worker(train, corpus, tmp_path, threads):
    flags, trace = (*NANO, "--data", corpus, "--steps", 3, "--threads", threads), tmp_path / "trace.json"
    assert train(*flags, "--log", tmp_path / "plain").code == 0
    done = train(*flags, "--log", tmp_path / "traced", "--trace", trace, "--trace-steps", 2)
    assert (done.code, done.err) == (0, "") and f"steps 0 to 1 are traced in {trace}" in "".join(done.out.split("\n"))
    assert log_of(tmp_path / "plain") == log_of(tmp_path / "traced")
    assert [event["name"] for event in lane(trace, "steps")] == ["step 0", "step 1"]
    for worker in range(threads):
        spans = lane(trace, f"worker {worker}")
        assert_nested(spans)
        attention = [span for span in spans if span["name"] == "attention_backward"]
        modules = [span["args"]["module"] for span in attention]
        passes = len(modules) // 4  # two steps of two layers; a pass may merge micro-batches
        assert modules == ["h.1.attn", "h.0.attn"] * 2 * passes
        assert {span["cat"] for span in spans} == {"phase", "forward", "backward", "optimizer"}
        assert {span["args"]["module"] for span in spans if span["name"] == "mlp_forward"} == {"h.0.mlp", "h.1.mlp"}
    assert {event["pid"] for event in events_of(trace)} == {0}


def test_a_run_that_is_shorter_than_the_trace_is_traced_to_its_end(train, corpus, tmp_path):
    trace = tmp_path / "trace.json"
    assert train(*NANO, "--data", corpus, "--steps", 2, "--trace", trace).code == 0
    assert [event["name"] for event in lane(trace, "steps")] == ["step 0", "step 1"]
    assert json.loads(trace.read_text())["otherData"]["steps"] == "0 to 1"


def rank_with_trace(world, path, config=CONFIG, **how):
    """(losses, hash) of three steps on one rank, two of them traced unless `path` is None."""
    trainer, windows = make_trainer(world, ParallelConfig(bucket_mb=0.02, **how), config), Windows(TOKENS, 16)
    trace = path and Trace(trainer, path, 2)
    if trace:
        trace.begin()
    losses = []
    for number in range(3):
        step = trainer.step(read_batch(trainer, windows), 3e-3)
        losses.append(step.loss)
        if trace:
            lines = trace.step_ended(step, last=number == 2)
            assert bool(lines) == (number == 1)
            hooked = set(KERNELS) & vars(trainer.backend).keys()
            assert bool(hooked) == (number < 1)  # the hooks are removed after the last traced step
    return losses, parameter_hash(trainer)


HOW = [
    dict(dp="flat"), dict(dp="bucket", zero=1), dict(dp="overlap", zero=1, zero_gather="forward"), dict(tp=2),
    dict(zero=2), dict(zero=3), dict(zero=3, recompute="block"),
]  # fmt: skip


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_whose_tied_table_is_not_in_memory_is_traced(tmp_path, zero):
    how = dict(config=replace(CONFIG, tied=True), pp=2, zero=zero)
    plain, traced = (run_ranks(2, lambda world, path=path: rank_with_trace(world, path, **how))
                     for path in (None, tmp_path / "trace.json"))  # fmt: skip
    assert plain == traced
    assert "embedding_backward" in {span["name"] for span in lane(tmp_path / "trace.json", "worker 0", pid=1)}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_the_root_writes_the_collectives_of_all_ranks_and_no_bit_changes(tmp_path, how):
    path = tmp_path / "trace.json"
    plain = run_ranks(2, lambda world: rank_with_trace(world, None, **how))
    traced = run_ranks(2, lambda world: rank_with_trace(world, path, **how))
    assert plain == traced
    group = "tensor-parallel group of worker 0" if "tp" in how else "data-parallel group"
    for rank in (0, 1):
        spans = lane(path, group, rank)
        assert_nested(spans)
        assert {span["args"]["ranks"] for span in spans} == {2} and all(span["args"]["bytes"] > 0 for span in spans)
        assert_nested(lane(path, "worker 0", rank))
        names = {span["name"] for span in spans}
        assert ("reduce_scatter" if how.get("zero", 0) > 1 else "all_reduce") in names
        assert ("broadcast" in names) == (how.get("zero_gather") == "forward")
    if how.get("dp") == "bucket":  # every element of the gradient is in one bucket of each of the two steps
        sums = [e["args"] for e in lane(path, group) if e["args"].get("buffer") == "gradients"]
        trainer = json.loads(path.read_text())["otherData"]
        covered = np.zeros(trainer["arena_elements"], int)
        for part in sums:
            covered[part["first"] : part["first"] + part["elements"]] += 1
        assert len(sums) > 4 and set(covered) <= {0, 2}
    assert {event["pid"] for event in events_of(path)} == {0, 1}


def refused(result, *words):
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1
    for word in words:
        assert str(word) in result.err


def test_a_trace_of_which_only_a_part_can_be_written_is_an_empty_file(tmp_path, monkeypatch):
    def write_a_part(self, text, encoding):
        with open(self, "w", encoding=encoding) as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_a_part)
    with pytest.raises(ConfigError, match=r"trace.json: cannot be written \(No space left on device\)"):
        write_trace(tmp_path / "trace.json", [Process("rank 0", {"steps": [Span("step 0", 0.0, 1.0)]})])
    assert (tmp_path / "trace.json").read_bytes() == b""


def test_a_trace_replaces_a_trace_of_this_program_only(train, corpus, tmp_path):
    flags = (*NANO, "--data", corpus, "--steps", 1)
    trace, other = tmp_path / "trace.json", tmp_path / "other.json"
    assert train(*flags, "--trace", trace).code == 0
    before = trace.read_bytes()
    assert train(*flags, "--trace", trace).code == 0 and trace.read_bytes() != before
    other.write_text('{"traceEvents": []}\n')
    refused(train(*flags, "--trace", other), f"{other}: is not a trace of this program: choose another file")
    assert other.read_text() == '{"traceEvents": []}\n'
    new = tmp_path / "new"
    refused(train(*flags, "--trace", new, "--log", new), f"--log {new} and --trace {new} are one file")
    refused(train(*flags, "--trace", new, "--plot", new), f"--plot {new} and --trace {new} are one file")


def test_a_resumed_run_is_traced_from_its_first_step(train, corpus, tmp_path):
    out, trace = tmp_path / "run", tmp_path / "trace.json"
    assert train(*NANO, "--data", corpus, "--steps", 2, "--out", out).code == 0
    assert train("--resume", out, "--out", out, "--steps", 4, "--sample", 0, "--trace", trace).code == 0
    assert [event["name"] for event in lane(trace, "steps")] == ["step 2", "step 3"]


# -- kernels of a GPU --------------------------------------------------------------------------------------------------


class FakeProfiler:
    """A fake of torch.profiler.profile; its events are 7 s ahead of time.perf_counter()."""

    def __init__(self, activities):
        self.marks = []

    def start(self):
        pass

    def stop(self):
        pass

    def export_chrome_trace(self, path):
        mark = next(at for name, at in self.marks if name == cupti.ORIGIN)
        kernels = [("void gelu<float>(int)", 2000.0, 5.0), ("ncclDevKernel_AllReduce(x)", 2003.0, 9.0)]
        events = [{"ph": "X", "name": cupti.ORIGIN, "ts": mark, "dur": 1.0}]
        events += [{"ph": "X", "cat": "kernel", "name": n, "ts": mark + at, "dur": d} for n, at, d in kernels]
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


def test_the_times_of_gpu_kernels_are_converted_to_the_clock_of_the_host(monkeypatch):
    clock, profilers = SimpleNamespace(now=100.0), []

    class record_function:
        def __init__(self, name):
            profilers[0].marks.append((name, 1e6 * (clock.now + 7)))

        def __enter__(self):
            clock.now += 0.5

        def __exit__(self, *error):
            pass

    def profile(activities):
        profilers.append(FakeProfiler(activities))
        return profilers[0]

    fake = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CPU=0, CUDA=1), profile=profile, record_function=record_function
    )
    monkeypatch.setitem(sys.modules, "torch.profiler", fake)
    monkeypatch.setattr(cupti, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    lanes = cupti.KernelRecorder(lambda: None).stop()
    assert list(lanes) == ["GPU: compute", "GPU: communication"]
    ((name, start, seconds),) = lanes["GPU: compute"]
    assert (name, start, seconds) == ("gelu", pytest.approx(100.502), pytest.approx(5e-6))
    assert lanes["GPU: communication"][0][1] == pytest.approx(100.502003)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--no-graph",)], ids=["graph", "no graph"])
def test_on_a_gpu_the_kernels_are_inside_their_steps_and_no_bit_changes(train2, tmp_path, flags):
    flags, trace = ("--preset", "tiny", "--steps", 6, "--sample", 0, "--deterministic", *flags), tmp_path / "trace.json"
    assert train2(*flags, "--log", tmp_path / "plain").code == 0
    done = train2(*flags, "--log", tmp_path / "traced", "--trace", trace)
    assert done.code == 0 and f"steps 0 to 4 are traced in {trace}" in "".join(done.out.split("\n")), done.err
    assert log_of(tmp_path / "plain") == log_of(tmp_path / "traced")
    steps, kernels = lane(trace, "steps"), lane(trace, "GPU: compute")
    begin, end = steps[0]["ts"] - 2000, steps[-1]["ts"] + steps[-1]["dur"] + 2000  # us; the clocks agree within 2 ms
    assert len(kernels) > 5 * 40 and all(begin <= kernel["ts"] <= end for kernel in kernels)
    assert any("attention" in kernel["name"] or "forward_kernel" in kernel["name"] for kernel in kernels)
    assert_nested(kernels)
    replayed = [step["ts"] for step in steps[3:]]  # a replay shows kernels, but no launches by Python
    launches = [span for span in lane(trace, "worker 0") if span["ts"] > replayed[0]]
    assert bool(launches) == ("--no-graph" in flags)

"""A captured step, its inputs and its results, on a fake device whose queue runs when the host waits for it."""

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.cuda_graph import CapturedStep
from stage2_cuda.runtime.static_inputs import StaticInputs
from tests.support.fake_cupy import DeviceArray


class LateStream:
    """A queue of work that runs when an event after it is waited for; during capture the work belongs to the graph."""

    count = 0

    def __init__(self, device):
        LateStream.count += 1
        self.device, self.ptr, self.queue, self.captured = device, LateStream.count, [], None
        device.streams[self.ptr] = self

    def __enter__(self):
        self.outer, self.device.current = self.device.current, self

    def __exit__(self, *error):
        self.device.current = self.outer

    def submit(self, work):
        (self.queue if self.captured is None else self.captured).append(work)

    def begin_capture(self, mode):
        self.captured = []

    def end_capture(self):
        work, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda stream: stream.queue.extend(work))

    def synchronize(self):
        assert self.captured is None, "a stream that is being captured cannot be waited for"
        while self.queue:
            self.queue.pop(0)()


class LateEvent:
    def __init__(self, disable_timing):
        self.stream, self.done = None, True

    def record(self, stream):
        self.stream, self.done = stream, False
        self.mark = lambda: setattr(self, "done", True)
        stream.submit(self.mark)

    def synchronize(self):
        while self.stream and self.stream.queue and not (self.done and self.stream.device.late):
            self.stream.queue.pop(0)()


class LateCupy:
    """The parts of CuPy that cuda_graph.py and static_inputs.py use. late=False: work runs as soon as possible."""

    ndarray, late = DeviceArray, True

    def __init__(self):
        self.streams = {}
        self.current = LateStream(self)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                deviceSynchronize=self.synchronize,
                memcpyAsync=self.copy,
                streamCaptureModeRelaxed=2,
                CUDARuntimeError=RuntimeError,
            ),
            get_current_stream=lambda: self.current,
            Stream=lambda non_blocking: LateStream(self),
            Event=LateEvent,
            MemoryPool=lambda: SimpleNamespace(malloc=None, free_all_blocks=lambda: None),
            using_allocator=lambda malloc: nullcontext(),
            alloc_pinned_memory=bytearray,
        )

    def synchronize(self):
        for stream in self.streams.values():
            stream.synchronize()

    def copy(self, to, source, count, kind, stream):
        assert kind in (1, 2, 3)
        self.streams[stream].submit(lambda: ctypes.memmove(to, source, count))

    def empty(self, shape, dtype):
        return self.array(np.full(shape, 0xFF, dtype))

    def array(self, values):
        return np.array(values).view(DeviceArray)

    def get_default_memory_pool(self):
        return SimpleNamespace(total_bytes=lambda: 0, free_all_blocks=lambda: None)


@pytest.fixture
def cupy(monkeypatch):
    cupy = LateCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("most_ahead", [0, 1])
def test_each_call_has_its_own_input_and_its_own_results(cupy, rng, most_ahead, late):
    """The host is as far ahead of the device as it may be, or far behind: an array overwritten too early is wrong."""
    cupy.late = late
    inputs = rng.standard_normal((8, 5)).astype(np.float32)
    state = cupy.array(np.zeros(5))
    total, wide = cupy.array(np.zeros(())), cupy.array(np.zeros((5, 1)))

    def step(batch, rate):
        ((tokens, _),) = batch

        def work():
            state[...] += tokens * rate
            total[...] = state.sum()
            wide[...] = state[:, None]

        cupy.current.submit(work)
        return [total, wide]

    captured, unread, got = CapturedStep(step), [], []
    for number, each in enumerate(inputs):
        unread.append(captured([(each.copy(), None)], np.array([number + 0.5])))
        while len(unread) > (most_ahead if captured.can_overlap else 0):
            got.append([np.array(result) for result in unread.pop(0).wait()])
    got += [[np.array(result) for result in results.wait()] for results in unread]
    want = np.cumsum(inputs * (np.arange(8) + 0.5)[:, None], 0, dtype=np.float64)
    np.testing.assert_allclose([wide for _, wide in got], want[:, :, None], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([total for total, _ in got], want.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("collectives", [False, True])
def test_a_step_with_collectives_is_not_called_to_compile_its_kernels(cupy, monkeypatch, collectives):
    calls = []
    monkeypatch.setattr(triton_launch, "compile_ahead", lambda function, *args: function(*args))
    CapturedStep(lambda: calls.append(1), collectives=collectives)()
    assert len(calls) == (1 if collectives else 2)


def test_a_step_without_results_is_recorded_too(cupy):
    calls = []
    captured = CapturedStep(lambda: cupy.current.submit(lambda: calls.append(1)))
    for _ in range(4):
        assert captured().wait() == []
    cupy.current.synchronize()
    assert len(calls) == 4


def test_without_recording_every_call_runs_the_function(cupy):
    calls = []
    step = CapturedStep(lambda x: calls.append(x.tolist()), capture=False)
    for number in range(3):
        assert step(np.array([number])).wait() == [] and not step.can_overlap
        cupy.current.synchronize()
    assert len(calls) == 3


def test_a_step_that_cannot_be_recorded_names_the_flag_to_use(cupy):
    captured = CapturedStep(lambda: cupy.current.synchronize() if captured.calls > 1 else None)
    captured()
    with pytest.raises(AssertionError, match="being captured") as caught:
        captured()
    assert any("--no-graph" in note for note in caught.value.__notes__) and not captured.can_overlap


def test_the_tree_of_arguments_keeps_its_structure_and_its_other_leaves(cupy):
    array = cupy.array(np.ones(3))
    tree = [(np.arange(3), array), None, 7]
    inputs = StaticInputs(cupy, tree)
    inputs.upload(tree)
    cupy.current.synchronize()
    [(copied, same), nothing, seven] = inputs.arguments
    assert copied.tolist() == [0, 1, 2] and same is array and (nothing, seven) == (None, 7)


@pytest.mark.parametrize(
    "other, says",
    [
        ([np.zeros(4), 7], r"argument 0 .* float64 \(3,\) in the first call and is float64 \(4,\) now"),
        ([np.zeros(3, np.float32), 7], r"argument 0 .* float64 \(3,\) in the first call and is float32 \(3,\) now"),
        ([np.zeros(3), 8], "argument 1 was 7 in the first call and is 8 now"),
    ],
)
def test_arguments_that_differ_in_more_than_values_are_refused(cupy, other, says):
    inputs = StaticInputs(cupy, [np.zeros(3), 7])
    with pytest.raises(ValueError, match=says):
        inputs.upload(other)

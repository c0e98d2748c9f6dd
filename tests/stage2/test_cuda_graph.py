"""A recorded step, what goes to it and what comes from it, on a device that works when somebody waits for it."""

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from stage2_cuda.runtime.cuda_graph import RecordedStep
from stage2_cuda.runtime.static_inputs import Mailbox
from tests.support.fake_cupy import DeviceArray


class LateStream:
    """A queue of work, which is done when an event behind it is waited for; while captured, a graph's."""

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
    """As much of CuPy as graph.py and mailbox.py touch. Not `late`, it does all at once when it does anything."""

    ndarray, late = DeviceArray, True

    def __init__(self):
        self.streams = {}
        self.current = LateStream(self)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(memcpyAsync=self.copy, streamCaptureModeRelaxed=2, CUDARuntimeError=RuntimeError),
            get_current_stream=lambda: self.current,
            Stream=lambda non_blocking: LateStream(self),
            Event=LateEvent,
            MemoryPool=lambda: SimpleNamespace(malloc=None, free_all_blocks=lambda: None),
            using_allocator=lambda malloc: nullcontext(),
        )

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
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))
    return cupy


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("most_ahead", [0, 1])
def test_each_call_has_its_own_input_and_its_own_results(cupy, rng, most_ahead, late):
    """The host is as far ahead of the device as it may be, or far behind: what it overwrites too early is wrong."""
    cupy.late = late
    mailbox = Mailbox(cupy)
    inputs = rng.standard_normal((8, 5)).astype(np.float32)
    place, rate = mailbox.put("tokens", inputs[0]), mailbox.put("rate", np.zeros(1))
    state = cupy.array(np.zeros(5))
    total, wide = cupy.array(np.zeros(())), cupy.array(np.zeros((5, 1)))

    def step():
        def work():
            state[...] += place * rate
            total[...] = state.sum()
            wide[...] = state[:, None]

        cupy.current.submit(work)
        return [total, wide]

    recorded, unread, got = RecordedStep(step, mailbox.send), [], []
    for number, each in enumerate(inputs):
        mailbox.put("tokens", each), mailbox.put("rate", np.array([number + 0.5]))
        unread.append(recorded())
        while len(unread) > (most_ahead if recorded.ahead else 0):
            got.append(read(unread.pop(0), cupy))
    got += [read(finish, cupy) for finish in unread]
    want = np.cumsum(inputs * (np.arange(8) + 0.5)[:, None], 0, dtype=np.float64)
    np.testing.assert_allclose([wide for _, wide in got], want[:, :, None], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([total for total, _ in got], want.sum(1), rtol=1e-5, atol=1e-5)


def read(finish, cupy):
    results = finish()
    if isinstance(results[0], DeviceArray):  # the first call's, which are on the device still
        cupy.current.synchronize()
    return [np.array(result) for result in results]


def test_a_step_without_results_is_recorded_too(cupy):
    calls = []
    recorded = RecordedStep(lambda: cupy.current.submit(lambda: calls.append(1)))
    for _ in range(4):
        assert recorded()() == []
    cupy.current.synchronize()
    assert len(calls) == 4


def test_a_step_that_cannot_be_recorded_says_how_to_do_without(cupy):
    recorded = RecordedStep(lambda: cupy.current.synchronize() if recorded.calls > 1 else None)
    recorded()
    with pytest.raises(AssertionError, match="being captured") as caught:
        recorded()
    assert any("--no-graph" in note for note in caught.value.__notes__) and not recorded.ahead

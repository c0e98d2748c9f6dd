"""The checks of stage 3 without GPUs: the kernel runs in Triton's interpreter, NCCL's calls on threads as ranks."""

# p ranks, r this rank

import contextlib
from types import SimpleNamespace

import numpy as np

from exercises.checks.common import BUCKET_MB, RANK_SECONDS, expect_same_training, random
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.arena import Arena
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.tree_sum import tree_sum as canonical_sum
from stage3_mpi_cuda import nccl_collectives
from stage3_mpi_cuda.nccl_collectives import NcclCollectives
from stage3_mpi_cuda.tree_sum import tree_sum
from tests.support.fake_gpu import fake_gpu

FP32 = 1e-6  # relative norm: at most 5 terms, each rounding is 6e-8


def mixed(p, n, seed=0):
    """[x of each rank], float32 of mixed magnitude, so that the order of a sum changes its bits."""
    rng = random(seed)
    return [(rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32) for _ in range(p)]


def on_ranks(p, function):
    """[function(collectives) of each rank]; collectives: NcclCollectives on a fake GPU, ranks are threads."""

    def run(threads):
        return function(NcclCollectives(threads, fake_gpu(threads)))

    return run_ranks(p, run, timeout=RANK_SECONDS)


# -- 3.1 the canonical sum ---------------------------------------------------------------------------------------------


def summed(rows):
    out = np.full(rows.shape[1], np.nan, rows.dtype)
    tree_sum(out, np.ascontiguousarray(rows))
    return out


def in_turn(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def halves(rows):
    """The sum of the first count // 2 rows plus the sum of the others: another tree if count is no power of two."""
    count = len(rows)
    return rows[0] if count == 1 else halves(rows[: count // 2]) + halves(rows[count // 2 :])


ORDER = "tree_of_rows: the first HALF rows, then the others; HALF is the largest power of two below COUNT"


def tree_values():
    for p in range(1, 6):
        rows = random(p).standard_normal((p, 70)).astype(np.float32)
        want = rows.sum(0, dtype=np.float64)
        wrong = [
            (rows[0], "The result is the first row: the other rows are not added."),
            (want - rows[-1], "The last row is missing."),
            (want - rows[0], "The first row is missing."),
            (p * rows[0], "The first row is added in place of each other row: move rows_ptr by HALF * stride."),
        ]
        expect(f"the sum of {p} rows", summed(rows), want, FP32, wrong, ORDER)


def tree_order():
    for p in (3, 4, 5, 6, 7, 8):
        rows = np.stack(mixed(p, 200, seed=p))
        wrong = [
            (halves(rows), "The rows are divided in the middle: HALF is the largest power of two below COUNT."),
            (in_turn(rows), "The rows are added one after another: add the sums of two halves."),
            (in_turn(rows[::-1]), "The rows are added one after another, from the last: add the sums of two halves."),
        ]
        expect_bits(f"the sum of {p} rows", summed(rows), canonical_sum(list(rows)), wrong, ORDER)


def expect_bits(name, got, want, wrong, look):
    """expect() with tolerance 0, where a typical mistake is recognised by its bits too."""
    hint = next((hint for array, hint in wrong if np.array_equal(got, array)), None)
    if hint and not np.array_equal(got, want):
        wrong = [(got, hint)]
    else:
        wrong = ()
    expect(name, got, want, 0, wrong, look)


def tree_half():
    rows = (random().standard_normal((5, 200)) * 10).astype(np.float16)
    want = canonical_sum([row.astype(np.float32) for row in rows]).astype(np.float16)
    hint = "The rows are added in float16: convert each row to float32 when it is loaded."
    expect_bits("the sum of 5 rows in float16", summed(rows), want, [(canonical_sum(list(rows)), hint)], "x.to(tl.float32)")


# -- 3.2 the canonical all-reduce --------------------------------------------------------------------------------------


def part_edges():
    for n, p in ((12, 3), (7, 2), (7, 3), (2, 4), (0, 2)):
        want = [n * j // p for j in range(p + 1)]
        rounded = [min(n, -(-n // p) * j) for j in range(p + 1)]
        wrong = [
            (want[:-1], "The last edge is missing: there are p + 1 edges, from 0 to n."),
            ([n // p * j for j in range(p + 1)], "The parts do not cover all elements: the last edge is n."),
            ([*[n // p * j for j in range(p)], n], "The last part has all remaining elements: lengths differ by at most one."),
            (rounded, "The last part is shorter than the others by more than one element: use n * j // p."),
        ]
        expect_equal(f"part_edges({n}, {p})", list(nccl_collectives.part_edges(n, p)), want, wrong, "part_edges")


def expected_parts(xs, rank):
    edges = [xs[0].size * j // len(xs) for j in range(len(xs) + 1)]
    return np.stack([x[edges[rank] : edges[rank + 1]] for x in xs])


def exchange_parts():
    for p in (2, 3):
        xs = mixed(p, 3 * p)
        edges = [3 * j for j in range(p + 1)]
        found = on_ranks(p, lambda comm, xs=xs, edges=edges: np.array(comm._exchange_parts(xs[comm.rank], edges)))
        for rank, got in enumerate(found):
            own = np.stack(np.split(xs[rank], p))
            wrong = [(own, "The rows are the parts of this rank's own x: row j is what rank j sent.")]
            wrong += [
                (expected_parts(xs, j), f"Rank {rank} received part {j} of every rank: send part j to rank j.")
                for j in range(p) if j != rank
            ]  # fmt: skip
            look = "_exchange_parts: send part j of x to rank j, receive row j of the result from rank j"
            expect(f"with {p} ranks, the parts that rank {rank} has", got, expected_parts(xs, rank), 0, wrong, look)


def expect_all_reduce(p, n):
    xs = mixed(p, n)
    want = canonical_sum(xs)

    def run(comm):
        x = xs[comm.rank].copy()
        separate = np.array(comm.all_reduce(x))
        if not np.array_equal(x, xs[comm.rank]):
            raise Mismatch(f"on rank {comm.rank}, x is changed", "Write to `out`, not to x.")
        return separate, np.array(comm.all_reduce(x, out=x))

    for rank, results in enumerate(on_ranks(p, run)):
        edges = [n * j // p for j in range(p + 1)]
        own = slice(edges[rank], edges[rank + 1])
        only_own = xs[rank].copy()
        only_own[own] = want[own]
        wrong = [
            (xs[rank], "The result is this rank's x: nothing was added."),
            (only_own, "Only this rank's part is a sum: after the sum, an all-gather sends every part to all ranks."),
            (in_turn(xs), "The ranks' arrays are added one after another: use tree_sum."),
            (in_turn(xs[::-1]), "The ranks' arrays are added one after another: use tree_sum."),
        ]
        for got, place in zip(results, ("", " with out=x"), strict=True):
            look = "_canonical_all_reduce: exchange the parts, add them with tree_sum, all-gather the sums"
            expect_bits(f"the all-reduce of {n} elements on rank {rank} of {p}{place}", got, want, wrong, look)


def canonical_all_reduce():
    for p in (2, 3, 4):
        expect_all_reduce(p, 5 * p)


def canonical_uneven():
    for p, n in ((2, 7), (3, 7), (4, 2), (3, 0)):
        expect_all_reduce(p, n)


# -- 3.3 the overlap hook ----------------------------------------------------------------------------------------------

NAMES = "abcde"  # five parameters of one block each; backward completes them from the last to the first
BUCKETS = [["e"], ["d", "c"], ["b", "a"]]


class Recorded:
    """A DataParallel of the student whose reduce_start only records; events: ("start", k) and ("wait", k) of bucket k."""

    def __init__(self, eager):
        from gpt2core.parallel.data_parallel import DataParallel

        arena, self.events = Arena([(name, (10,)) for name in NAMES]), []
        self.data = DataParallel(arena, BUCKETS, self.start, eager)

    def start(self, part):
        number = next((k for k, known in enumerate(self.data.parts) if known == part), None)
        if number is None:
            raise Mismatch(f"reduce_start({part}) is not called with the slice of a bucket", "Use self.parts[number].")
        self.events.append(("start", number))
        return SimpleNamespace(wait=lambda: self.events.append(("wait", number)))

    def backward(self):
        """Complete all gradients; returns the events after each."""
        found = {}
        for name in reversed(NAMES):
            self.data.completed(name)
            found[name] = list(self.events)
        return found


def hook_starts():
    found, starts = Recorded(eager=True).backward(), [("start", 0)]
    first = [("start", 0), ("start", 1)]
    for name, want in (("e", starts), ("d", starts), ("c", first), ("b", first), ("a", [*first, ("start", 2)])):
        early = "The sum of a bucket starts before all its gradients are complete: count the missing ones."
        wrong = [
            ([], "No sum starts during backward: start it when the bucket's last gradient is complete, if self.eager."),
            (first, early), ([*first, ("start", 2)], early), ([*starts, ("start", 1), ("start", 1)], "A bucket is summed twice."),
            ([("start", 0), ("wait", 0)], "The hook waits for the sum: only finish() waits, so that backward continues."),
        ]  # fmt: skip
        look = "DataParallel.completed: self.missing counts the incomplete gradients of each bucket"
        expect_equal(f"after the gradient of {name!r}, the calls", found[name], want, wrong, look)


WAITS = [("wait", 0), ("wait", 1), ("wait", 2)]


def hook_finish():
    recorded = Recorded(eager=True)
    recorded.backward()
    before = len(recorded.events)
    recorded.data.finish()
    wrong = [
        ([], "finish() does not wait: call wait() of every handle that was started."),
        (WAITS[:2], "finish() does not wait for the last sum."),
        ([each for k in range(3) for each in (("start", k), ("wait", k))], "finish() starts the sums again: a bucket is summed twice."),
    ]  # fmt: skip
    look = "DataParallel.finish"
    expect_equal("with eager, the calls of finish()", sorted(recorded.events[before:]), WAITS, wrong, look)
    recorded = Recorded(eager=False)
    found = recorded.backward()["a"]
    hint = "Without eager no sum starts during backward: test self.eager in completed()."
    expect_equal("without eager, the calls during backward", found, [], [(found, hint)] if found else (), look)
    recorded.data.finish()
    starts = [("start", k) for k in range(3)]
    wrong = [
        ([], "Without eager, finish() must start the sum of every part, and wait for it."),
        (starts, "finish() starts the sums, but does not wait for them."),
    ]
    expect_equal("without eager, the calls of finish()", sorted(recorded.events), starts + WAITS, wrong, look)


def hook_second_step():
    for eager in (True, False):
        recorded = Recorded(eager)
        recorded.backward()
        recorded.data.finish()
        first = list(recorded.events)
        recorded.events.clear()
        recorded.backward()
        recorded.data.finish()
        wrong = [
            ([each for each in first if each[0] == "wait"], "In the second step no sum starts: finish() must set self.missing back."),
            ([], "In the second step nothing happens: finish() must set self.missing and self.handles back."),
            (sorted([*first, *WAITS]), "The handles of the first step are waited for again: finish() must empty self.handles."),
        ]  # fmt: skip
        look = "the end of DataParallel.finish, which prepares the next step"
        name = f"with eager={eager}, the calls of the second step"
        expect_equal(name, sorted(recorded.events), sorted(first), [(sorted(w), h) for w, h in wrong], look)


def hook_training():
    look = "completed and finish: is every bucket summed exactly once in each step?"
    for strategy in ("overlap", "bucket", "flat"):
        expect_same_training(ParallelConfig(dp=strategy, bucket_mb=BUCKET_MB), look)


# -- 3.4 the communication stream --------------------------------------------------------------------------------------


class Streams:
    """A simulation of CUDA streams: each stream knows which work is complete before its next kernel starts."""

    def __init__(self):
        self.caller, self.communication = Stream(self), Stream(self)
        self.current, self.host_waits = self.caller, 0
        self.cuda = SimpleNamespace(Event=lambda disable_timing=False: Event(self), get_current_stream=lambda: self.current)

    def collectives(self):
        """NcclCollectives of the student that has only what _enqueue() needs."""
        found = object.__new__(NcclCollectives)
        found._cuda, found._stream, found._stored_messages = self.cuda, self.communication, []
        return found


class Stream(contextlib.AbstractContextManager):
    def __init__(self, streams):
        self.streams, self.known, self.ptr = streams, set(), 0

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self
        return self

    def __exit__(self, *error):
        self.streams.current = self.before

    def kernel(self, name):
        """Enqueue a kernel; returns the names of the kernels that are complete when it starts."""
        before = set(self.known)
        self.known.add(name)
        return before

    def wait_event(self, event):
        if event.known is None:
            raise Mismatch("a stream waits for an event that was not recorded", "Record the event before the wait.")
        self.known |= event.known

    def record(self, event):
        event.record(self)
        return event

    def synchronize(self):
        self.streams.host_waits += 1


class Event:
    def __init__(self, streams):
        self.streams, self.known = streams, None

    def record(self, stream=None):
        self.known = set((stream or self.streams.current).known)

    def synchronize(self):
        self.streams.host_waits += 1


def enqueue(streams):
    """Enqueue a kernel of the caller, then a call of NCCL; returns (handle, what was complete when NCCL's call began)."""
    seen = []
    streams.caller.kernel("gradient")
    array = np.ones(3)

    def run():
        seen.append((streams.current is streams.communication, streams.current.kernel("nccl")))

    handle = streams.collectives()._enqueue(run, array)
    if handle is None:
        raise Mismatch("_enqueue returns None", "Return _StreamOperation(self._cuda, done, arrays).")
    if len(seen) != 1:
        raise Mismatch(f"run() is called {len(seen)} times, but 1 time is expected", "Call run() once in _enqueue.")
    return handle, *seen[0], array


def stream_order():
    streams = Streams()
    _, on_stream, before, _ = enqueue(streams)
    if not on_stream:
        raise Mismatch("run() is called with the caller's stream as current stream", "Call it inside `with self._stream`.")
    if "gradient" not in before:
        raise Mismatch(
            "NCCL's call may start before the caller's kernel has written the gradient",
            "Record the event `ready` on the caller's stream, and call self._stream.wait_event(ready) before run().",
        )
    if streams.host_waits:
        raise Mismatch("_enqueue waits on the host", "Use events between streams: do not call synchronize().")


def stream_join():
    streams = Streams()
    handle, *_ = enqueue(streams)
    if "nccl" in streams.caller.kernel("other work"):
        raise Mismatch(
            "the caller's stream waits for NCCL's call before wait()",
            "Only wait() makes the caller's stream wait: otherwise nothing overlaps.",
        )
    handle.wait()
    if "nccl" not in streams.caller.kernel("optimizer"):
        raise Mismatch(
            "after wait(), a kernel of the caller may start before NCCL's call is complete",
            "Record `done` on self._stream after run(), and let wait() call wait_event(done) of the current stream.",
        )
    if streams.host_waits:
        raise Mismatch("wait() blocks the host", "Use wait_event(): do not call synchronize().")


def stream_result():
    streams = Streams()
    handle, *_, array = enqueue(streams)
    for time in ("first", "second"):
        if handle.wait() is not array:
            raise Mismatch(f"the {time} wait() does not return the result", "Return self._result in every case.")
    if getattr(handle, "_pending", 0) is not None:
        raise Mismatch("the handle keeps the arrays after wait()", "Set self._pending to None, so that memory is reused.")


def stream_collectives():
    xs = mixed(3, 9)

    def run(comm):
        x = xs[comm.rank]
        first, second = comm.reduce_scatter_start(x), comm.all_gather_start(x)
        gathered = np.array(second.wait())
        return np.array(first.wait()), gathered

    for rank, (part, gathered) in enumerate(on_ranks(3, run)):
        want = canonical_sum(xs)[3 * rank : 3 * rank + 3]
        expect(f"the reduce-scatter on rank {rank}", part, want, 0, look="_enqueue")
        expect(f"the all-gather on rank {rank}", gathered, np.concatenate(xs), 0, look="_enqueue")

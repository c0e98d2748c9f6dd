"""A trace of the first steps of a training run: when each kernel and each collective ran, on every rank.

    rank 0    steps                  | step 0                                                | step 1 ...
              worker 0               | forward: embedding, linear, ... | backward ... | wait | optimizer |
              data-parallel group                                        | all_reduce |

A worker is a thread of the rank. A lane of a group shows how long each of its collectives was in progress: until the
message was complete or, if the communicator does not report this time, until wait() returned. "wait" is the time for
which the thread that called the collective was blocked. On a GPU the lanes "GPU: ..." show what the device ran. The
kernels in the lane of the worker are then launches; the replay of a CUDA graph has none.
"""

import contextlib
import functools
import platform
import threading
import time
from dataclasses import asdict

from gpt2core.communicator import Handle, address
from gpt2core.parallel.all_or_raise import on_root
from gpt2core.parallel.mesh import TITLES, WorkerGroups
from gpt2core.tracing.hooks import Hooks, Modules, around_gradients
from gpt2core.tracing.trace_file import Process, Span, write_trace

now = time.perf_counter


class Trace:
    """Records `steps` steps of a Trainer and writes them to the file `path`, on the root for all ranks.

    begin() starts the recording. Call step_ended() on all ranks after each step; after the last step that is traced it
    writes the file. A runtime may have a method record_kernels(): it prepares to record the kernels of the device, and
    returns a function that starts to record (see stage2_cuda/runtime/cupti.py). The constructor raises ConfigError if
    the kernels cannot be recorded.
    """

    def __init__(self, trainer, path, steps):
        self.trainer, self.path, self.steps = trainer, path, steps
        self.hooks, self.lanes, self.kernels = Hooks(), {"steps": []}, None
        self.lane_of_thread = {}  # {id of a thread: lane of the worker that last ran in it}
        self.first_step, self.last_step = trainer.steps, None  # last_step: None until a step has ended
        self.record_kernels = getattr(trainer.backend.runtime, "record_kernels", lambda: None)()

    def begin(self):
        """Start the recording; all ranks must call this method."""
        trainer, started = self.trainer, now()
        # One host has one clock. The clocks of other hosts are compared when the ranks leave this barrier.
        trainer.world.barrier()
        clocks = trainer.world.all_gather_object((platform.node(), started, now()))
        (root_host, origin, root_left), (host, _, left_barrier) = clocks[0], clocks[trainer.world.rank]
        self.origin = origin if host == root_host else left_barrier - (root_left - origin)
        self.first_step = trainer.steps
        for number, worker in enumerate(trainer.accumulator.workers):
            self.watch_worker(f"worker {number}", worker)
        for title, group in groups(trainer):
            self.watch_group(title, group)
        if self.record_kernels:
            self.kernels = self.record_kernels()

    # -- recording -----------------------------------------------------------------------------------------------------

    def add(self, lane, name, start, end, category, details=None):
        self.lanes[lane].append((name, start, end, category, details))

    @contextlib.contextmanager
    def span(self, lane, name, category):
        start = now()
        try:
            yield
        finally:
            self.add(lane, name, start, now(), category)

    def watch_worker(self, lane, worker):
        """Record the kernels and ranges of a worker."""
        modules, backend = Modules(worker.tensors), worker.backend
        self.lanes[lane] = []

        def around(name, kernel, arguments, options):
            module = modules.before(name, arguments)

            def record(function, *arguments, **options):
                self.lane_of_thread[threading.get_ident()], start = lane, now()
                result = function(*arguments, **options)
                self.add(lane, name, start, now(), category(name), {"module": module} if module else None)
                return result

            result = record(kernel, *arguments, **options)
            modules.after(name, module, result)
            return around_gradients(result, record)

        earlier = backend.runtime.range

        @contextlib.contextmanager
        def named_range(name):
            with self.span(lane, name, "phase"), earlier(name):
                yield

        self.hooks.around_kernels(backend, around)
        self.hooks.set(backend.runtime, "range", named_range)

    def watch_group(self, title, group):
        """Record the collectives of a group in the lane `title`, and the time that a caller waits in its own lane."""
        self.lanes[title] = []

        def around(name, call, x, blocking):
            details, start = self.describe(x, group), now()
            result = call()
            if blocking:
                ended(name, details, start, start, now())
                return result
            return TimedHandle(result, functools.partial(ended, name, details, start))

        def ended(name, details, start, waited, end):
            latest = self.lanes[title][-1][2] if self.lanes[title] else start  # collectives of a group run in order
            self.add(title, name, max(start, min(latest, end)), end, "collective", details)
            caller = self.lane_of_thread.get(threading.get_ident(), "worker 0")
            self.add(caller, f"wait: {name}", waited, now(), "wait", details)

        self.hooks.around_collectives(group, around)

    def describe(self, x, group):
        """The details of a collective: bytes of this rank's array, ranks, and its place in a flat buffer."""
        details = {"bytes": int(x.nbytes), "ranks": group.size}
        buffers = {"gradients": self.trainer.accumulator.gradients, "parameters": self.trainer.compute_parameters}
        for name, flat in buffers.items():
            if type(x) is type(flat) and x.dtype == flat.dtype and x.size:
                first = (address(x) - address(flat)) // flat.itemsize
                if 0 <= first < flat.size:
                    return details | {"buffer": name, "first": first, "elements": int(x.size)}
        return details

    # -- the end -------------------------------------------------------------------------------------------------------

    def step_ended(self, step, last):
        """Record the Step. After the last step that is traced, write the file; returns a list of lines to print.

        last: whether training ends with this step. All ranks must call this method after each step.
        """
        if self.last_step is not None and not self.hooks.replaced:
            return []
        end = self.trainer.finished
        self.add("steps", f"step {step.step}", end - step.seconds, end, "step", {"loss": step.loss})
        self.last_step = step.step
        if step.step - self.first_step + 1 < self.steps and not last:
            return []
        self.hooks.remove()
        spans = self.kernels.stop() if self.kernels else {}
        for lane, kernels in spans.items():
            # the next step may already run: a device may begin it before the host reads the result of this step
            self.lanes[lane] = [(name, at, at + seconds, "GPU", None) for name, at, seconds in kernels if at < end]
        trainer, steps = self.trainer, f"{self.first_step} to {self.last_step}"
        gathered = trainer.world.all_gather_object(self.relative_lanes())
        processes = [Process(f"rank {rank}", lanes) for rank, lanes in enumerate(gathered)]
        details = {"steps": steps, "arena_elements": trainer.arena.size} | asdict(trainer.parallel)
        on_root(trainer.world, lambda: write_trace(self.path, processes, **details))
        self.lanes.clear()
        return [f"steps {steps} are traced in {self.path}: ui.perfetto.dev opens the file"]

    def relative_lanes(self):
        """{title: [Span]} of all lanes that are not empty, relative to the start of the trace."""

        def span(name, start, end, category, details):
            return Span(name, 1e6 * (start - self.origin), 1e6 * (end - start), category, details)

        return {title: [span(*event) for event in events] for title, events in self.lanes.items() if events}


def category(kernel):
    """The category of a kernel: forward, backward or optimizer."""
    if kernel == "add" or kernel.endswith("_backward"):  # autograd adds gradients
        return "backward"
    return "forward" if kernel.endswith("_forward") or kernel.startswith("loss") else "optimizer"


def groups(trainer):
    """Yield (title, group) of the groups that a Trainer uses, each group once."""
    titles, names = trainer.mesh.groups(), [TITLES[name] for name in WorkerGroups._fields]
    for number, worker in enumerate(trainer.accumulator.workers):
        for name, group in zip(names, worker.groups, strict=False):
            titles[f"{name} of worker {number}"] = group
    seen = set()
    for title, group in titles.items():
        if id(group) not in seen:
            seen.add(id(group))
            yield title, group


class TimedHandle(Handle):
    """A Handle that calls ended(start of the first wait(), end of the operation) when the first wait() returns.

    A handle with an attribute `future` gives the time at which its operation has ended; else it is the end of wait().
    """

    def __init__(self, handle, ended):
        super().__init__()
        self.handle, self.ended, self.end = handle, ended, None
        if future := getattr(handle, "future", None):
            future.add_done_callback(lambda _: setattr(self, "end", now()))

    def wait(self):
        waited, result = now(), self.handle.wait()
        if self.ended:
            self.ended(waited, self.end or now())
            self.ended = None
        return result

    def progress(self):
        self.handle.progress()

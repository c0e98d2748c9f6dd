"""Choose the fastest kernel configuration or algorithm on this GPU by timing the candidates once; cache it on disk.

    tuner = Tuner(cupy, tuned_for="NVIDIA H200, cublasLt 130000, Triton 3.6.0", directory=cache_directory())
    config = tuner.choose("attention forward ...", configs, run, outputs)  # times at the first call, then looks it up

The tuner times the candidates in several rounds, each in another random order. Each candidate is captured several times
in a CUDA graph, because the time of one small kernel would mostly be launch overhead. A choice is stored as
text: str(candidate), under the name of the choice. It is logged with the run and sent to other ranks.
"""

import functools
import warnings

import numpy as np

from gpt2core.parallel.tuned_choices import cache_file, read_choices, write_choices
from stage2_cuda.runtime.cuda_graph import no_garbage_collection

# Another candidate than the first is chosen only if its time is below this share of the first candidate's time: a
# smaller difference may be noise, which must not change the bits of a result from run to run.
FASTER = 0.99
TOLERANCE = {2: 2e-2, 4: 2e-3}  # {bytes of an element: largest relative difference of two candidates' results}
PIECE = 1 << 22  # elements that `difference` compares at once
SEED = 20260101  # for the random order of the candidates in each round
ROUNDS, CALLS, ENOUGH = 5, 20, 20.0  # rounds of timing; calls per graph at most; milliseconds of a graph to aim for


class Tuner:
    """Times candidates on CuPy's current device and keeps the choices.

    tuned_for: the device and libraries that the choices are valid for. None: time nothing and always choose the first
    candidate, so that every run and every rank computes the same bits. directory: of the cache file, or None.
    notify(text) prints that timing kernels takes time. tuned: the {what: choice} that are used now.
    """

    def __init__(self, cupy, tuned_for=None, directory=None, notify=print):
        self.cupy, self.tuned_for, self.notify = cupy, tuned_for, notify
        cached = tuned_for is not None and directory is not None
        self.file = cache_file(directory, tuned_for) if cached else None
        self.tuned = read_choices(self.file, tuned_for) if cached else {}
        self.timed = {}  # {what: choice} that this process has timed
        self.chosen = {}  # {what: the candidate itself}
        self.final, self.failed, self.announced = tuned_for is None, False, False

    def retune(self):
        """Drop all choices, so that everything is timed again."""
        self.tuned = {}
        self.chosen.clear()

    def load_tuned(self, choices, final=False):
        """Use the choices {what: choice} of another rank or an earlier run; returns whether anything changed.

        They replace all choices of this tuner: ranks with equal choices time the same candidates. With
        `final` they are only added, and nothing is timed from then on: a new `what` gets its first candidate.
        """
        self.final, before = self.final or final, self.tuned
        self.tuned = self.tuned | choices if final else dict(choices)
        if changed := self.tuned != before:
            self.chosen.clear()
            if replaced := {what: choices[what] for what in self.timed.keys() & choices.keys()}:
                self.timed |= replaced  # the next run reads the same choices from the file
                self.write()
        return changed

    def keep(self, what, choice):
        """Store a choice that was timed, in memory and on disk."""
        self.tuned[what] = self.timed[what] = choice
        self.write()

    def write(self):
        if self.file:
            write_choices(self.file, self.tuned_for, self.timed)

    def announce(self):
        """Print once why the first step takes longer."""
        if not self.announced:
            where = f"once; cached in {self.file}" if self.file else "in every run, because there is no home directory"
            self.notify(f"timing kernels for this GPU, {where}")
        self.announced = True

    # -- candidates ----------------------------------------------------------------------------------------------------

    def choose(self, what, candidates, run, outputs, before=lambda: None):
        """The candidate whose run(candidate) is fastest; the first one unless another is faster by more than noise.

        what: the name of the choice. str() of the candidates must differ. run(candidate) launches its work on the
        current stream, does not synchronize, and writes all of `outputs`: arrays or views, whose contents are undefined
        afterwards. before() is called once before timing. A candidate that fails, or whose results differ from the
        first one's, is skipped. If timing itself fails, the first candidate is chosen, with a warning.
        """
        if what not in self.chosen:
            candidate = self.look_up(what, candidates)
            self.chosen[what] = candidate or self.time_candidates(what, candidates, run, outputs, before)
        return self.chosen[what]

    def look_up(self, what, candidates):
        name = self.tuned.get(what)
        return next((candidate for candidate in candidates if str(candidate) == name), None)

    def time_candidates(self, what, candidates, run, outputs, before):
        if self.final or len(candidates) == 1 or self.capturing():
            return candidates[0]
        if not self.failed:
            self.announce()
            try:
                fastest = self.fastest(candidates, run, outputs, before)
                self.keep(what, str(fastest))
                return fastest
            except Exception as error:
                self.failed, problem = True, (str(error).strip() or type(error).__name__).splitlines()[0]
                message = f"{what}: cannot be timed ({problem}); this run uses the default configurations"
                warnings.warn(message, stacklevel=4)
        self.tuned[what] = str(candidates[0])  # sent to the other ranks, but not cached: the next run tries again
        return candidates[0]

    def capturing(self):
        """Whether the current stream is being captured, so that nothing can be timed."""
        return self.cupy.cuda.get_current_stream().is_capturing()

    def fastest(self, candidates, run, outputs, before):
        """Time the candidates that run and whose results agree; raises the last error if none does."""
        cuda, usable, graphs, wanted = self.cupy.cuda, [], [], None
        cuda.runtime.deviceSynchronize()  # another stream may still write the inputs
        stream = cuda.Stream(non_blocking=True)
        try:
            with cuda.using_allocator(None), stream:  # outside CuPy's pool, whose peak is reported to the user
                before()
                for candidate in candidates:
                    call = functools.partial(run, candidate)
                    try:
                        for array in outputs:
                            array[...] = np.nan  # so that check() fails for elements that are not written
                        call()
                        wanted = wanted or [array.copy() for array in outputs]
                        check(outputs, wanted)  # the first against itself: fails if a result is not finite
                        if not graphs:
                            calls = calls_per_graph(milliseconds(self.cupy, stream, call))
                        graphs.append(capture_calls(stream, call, calls))
                        usable.append(candidate)
                    except Exception as error:  # too many registers, too much shared memory, or a compiler error
                        problem = error
                if not graphs:
                    raise problem
                times = medians(self.cupy, stream, graphs)
        finally:
            cuda.runtime.deviceSynchronize()  # after an error too: complete all timing work
        best = int(times.argmin())
        return usable[best] if times[best] < FASTER * times[0] else usable[0]


# -- time --------------------------------------------------------------------------------------------------------------


def calls_per_graph(call_milliseconds):
    return max(1, int(ENOUGH / max(call_milliseconds, ENOUGH / CALLS)))


def capture_calls(stream, call, calls):
    """A CUDA graph of `calls` calls, captured on `stream`, which must be the current stream."""
    with no_garbage_collection():
        stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        finally:
            graph = stream.end_capture()
    return graph


def medians(cupy, stream, graphs, rounds=ROUNDS):
    """The median milliseconds of each graph over the rounds.

    The graphs run without a pause, so that the GPU is as warm as in training: the fastest kernel of a short burst may
    draw more power, and be slower after the clock rate drops. Each round has its own random order, because the power
    draw of the preceding graph affects the next one.
    """
    for graph in graphs:
        graph.launch(stream)
    times, shuffled = np.empty((rounds, len(graphs))), np.random.default_rng(SEED)
    for row in times:
        for number in shuffled.permutation(len(graphs)):
            row[number] = milliseconds(cupy, stream, functools.partial(graphs[number].launch, stream))
    return np.median(times, axis=0)


def milliseconds(cupy, stream, call):
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    call()
    stop.record(stream)
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)


# -- results -----------------------------------------------------------------------------------------------------------


def check(outputs, wanted):
    """Raise ArithmeticError if an output differs from the wanted one by more than rounding, or is NaN."""
    for got, want in zip(outputs, wanted, strict=True):
        if not (error := difference(got, want)) <= TOLERANCE[got.dtype.itemsize]:
            raise ArithmeticError(f"the results differ by {error:.1e}")


def difference(got, want):
    """norm(got - want) / norm(want) in float64; in pieces, to limit the memory of the float64 copies."""
    rows = max(1, PIECE * len(got) // max(1, got.size))
    error = size = 0.0
    for start in range(0, len(got), rows):
        a, b = (array[start : start + rows].astype(np.float64) for array in (got, want))
        error, size = error + ((a - b) ** 2).sum(), size + (b * b).sum()
    error, size = float(error), float(size)
    return (error / size) ** 0.5 if size else error

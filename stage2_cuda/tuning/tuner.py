"""Choose the fastest kernel configuration or algorithm on this GPU: time the candidates once, keep the choice on disk.

    tuner = Tuner(cupy, tuned_for="NVIDIA H200, cublasLt 130000, Triton 3.6.0", directory=cache_directory())
    config = tuner.choose("attention forward ...", configs, run, outputs)  # times at the first call, then looks it up

The tuner times the candidates in several rounds, each in another random order. A candidate is timed as a CUDA graph of
several calls, because for a single call of a small kernel the time would mostly be launch overhead. The choices are
stored as {what: choice}: `what` is a text that names the choice, such as "attention forward ...", and `choice` is str()
of the fastest candidate. They are saved in checkpoints and sent to other ranks.
"""

import contextlib
import functools
import warnings

import numpy as np

from gpt2core.tuned_choices import cache_file, read_choices, write_choices
from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.cuda_graph import no_garbage_collection

# The first candidate is the default. Another one is chosen only if its time is below FASTER times the default's time.
# A smaller difference may be noise, and noise must not change the bits of a result from run to run.
FASTER = 0.99
TOLERANCE = {2: 2e-2, 4: 2e-3}  # {bytes per element: largest relative difference between two candidates' results}
PIECE = 1 << 22  # elements that difference() converts to float64 at once
SEED = 20260101  # for the random order of the candidates in each round
ROUNDS = 5  # number of times that each candidate is timed
MAX_CALLS, GRAPH_MILLISECONDS = 20, 20.0  # a graph has so many calls that it takes about 20 ms, but at most 20 calls


class Tuner:
    """Times candidates on CuPy's current device and keeps the choices.

    tuned_for: text, the device and the library versions for which the choices are valid. None: time nothing and always
    choose the first candidate, so that every run and every rank computes the same bits. directory: where the cache file
    is, or None for no cache file. notify(text): called before the first timing, because that takes a while.
    The attribute `tuned` is the {what: choice} that is used now.
    """

    def __init__(self, cupy, tuned_for=None, directory=None, notify=print):
        self.cupy, self.tuned_for, self.notify = cupy, tuned_for, notify
        cached = tuned_for is not None and directory is not None
        self.file = cache_file(directory, tuned_for) if cached else None
        self.tuned = read_choices(self.file, tuned_for) if cached else {}
        self.timed = {}  # {what: choice} of what this process has timed; goes to the cache file
        self.chosen = {}  # {what: candidate} for a fast look-up
        self.final = tuned_for is None  # whether nothing is timed from now on
        self.failed, self.notified = False, False  # whether timing has raised an error; whether notify() was called

    def retune(self):
        """Forget all choices, so that each is timed again."""
        self.tuned = {}
        self.chosen.clear()

    def load_tuned(self, choices, final=False):
        """Use the choices {what: choice} of another rank or an earlier run. Returns whether any choice changed.

        `choices` replaces all choices of this tuner, so that all ranks have equal choices and later time the same
        candidates. final: add `choices` to those of this tuner instead, and time nothing from now on; where no choice
        is stored, the first candidate is then used.
        """
        self.final, before = self.final or final, self.tuned
        self.tuned = self.tuned | choices if final else dict(choices)
        if changed := self.tuned != before:
            self.chosen.clear()
            if replaced := {what: choices[what] for what in self.timed.keys() & choices.keys()}:
                self.timed |= replaced  # so that the next run reads the choices of this run from the file
                self.write()
        return changed

    def keep(self, what, choice):
        """Store a choice that this process has made by timing, in memory and on disk."""
        self.tuned[what] = self.timed[what] = choice
        self.write()

    def write(self):
        """Write the choices that this process has timed to the cache file."""
        if self.file:
            write_choices(self.file, self.tuned_for, self.timed)

    def announce(self):
        """At the first call, notify the user that timing kernels takes a while."""
        if not self.notified:
            once = f"only once: results are saved in {self.file}"
            how_often = once if self.file else "in every run: there is no home directory"
            self.notify(f"timing kernels for this GPU, {how_often}")
        self.notified = True

    # -- candidates ----------------------------------------------------------------------------------------------------

    def choose(self, what, candidates, run, outputs, before=lambda: None):
        """The candidate whose run(candidate) is fastest; the first one unless another is faster by more than noise.

        what: the name of the choice. The candidates' str() must differ. run(candidate) launches its work on the current
        stream, does not synchronize, and writes all elements of the arrays `outputs`, whose contents are undefined
        afterwards. before() is called once before timing. A candidate is skipped if it raises an error, or if its
        results differ from those of the first candidate. If timing fails, the first candidate is chosen, with a
        warning.
        """
        if what not in self.chosen:
            candidate = self.look_up(what, candidates)
            if candidate is None and triton_launch.launcher().only_compiles:
                return self.compile_candidates(candidates, run, outputs)
            self.chosen[what] = candidate or self.time_candidates(what, candidates, run, outputs, before)
        return self.chosen[what]

    def look_up(self, what, candidates):
        """The candidate that `tuned` names, or None."""
        choice = self.tuned.get(what)
        return next((candidate for candidate in candidates if str(candidate) == choice), None)

    def compile_candidates(self, candidates, run, outputs):
        """Start to compile all candidates that will be timed, and return the first one.

        Only called during triton_launch.compile_ahead(), when run(candidate) compiles and launches nothing. A thread
        also calls compile_check() for each dtype of the outputs.
        """
        needed = candidates[:1] if self.final or self.failed else candidates
        for candidate in needed:
            run(candidate)
        if len(needed) > 1:
            for dtype in {array.dtype for array in outputs}:
                compile = functools.partial(compile_check, self.cupy, dtype)
                triton_launch.launcher().start_thread(("check", dtype), compile)
        return candidates[0]

    def time_candidates(self, what, candidates, run, outputs, before):
        """Time the candidates, keep the choice of the fastest one, and return it.

        Returns the first candidate if nothing may be timed, or with a warning if timing fails.
        """
        if self.final or len(candidates) == 1 or self.capturing():
            return candidates[0]
        if not self.failed:
            self.announce()
            triton_launch.launcher().wait_for_threads()  # they would slow the launches that are timed
            try:
                fastest = self.fastest_of(candidates, run, outputs, before)
                self.keep(what, str(fastest))
                return fastest
            except Exception as error:
                self.failed, problem = True, (str(error).strip() or type(error).__name__).splitlines()[0]
                message = f"{what}: cannot be timed ({problem}); this run uses the default configurations"
                warnings.warn(message, stacklevel=4)
        # send the default to other ranks, but do not write it to the cache file, so that the next run tries again
        self.tuned[what] = str(candidates[0])
        return candidates[0]

    def capturing(self):
        """Whether the current stream is being captured; then nothing can be timed."""
        return self.cupy.cuda.get_current_stream().is_capturing()

    def fastest_of(self, candidates, run, outputs, before):
        """The fastest of the candidates whose results agree with the first results; see choose().

        If every candidate fails, the last error is raised.
        """
        expected, calls = [], None

        def graph_of(candidate):
            nonlocal calls
            call = functools.partial(run, candidate)
            for array in outputs:
                array[...] = np.nan  # so that check() fails if an element is not written
            call()
            expected.extend([] if expected else [array.copy() for array in outputs])
            check(outputs, expected)  # for the first candidate: fails if a result is not finite
            calls = calls or calls_per_graph(milliseconds(self.cupy, stream, call))
            return capture_calls(stream, call, calls)

        with timing_stream(self.cupy) as stream:
            before()
            usable, times = time_usable(self.cupy, stream, candidates, graph_of)
        fastest = int(times.argmin())
        return usable[fastest] if times[fastest] < FASTER * times[0] else usable[0]


# -- time --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def timing_stream(cupy):
    """A new stream for work that is timed; in this context it is the current stream, and arrays are not in CuPy's pool.

    The pool is not used because its peak size is reported to the user.
    """
    synchronize = cupy.cuda.runtime.deviceSynchronize
    synchronize()  # another stream may still be writing the inputs, or using a workspace
    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        with cupy.cuda.using_allocator(None), stream:
            yield stream
    finally:
        synchronize()  # complete all timing work, after an error too


def time_usable(cupy, stream, candidates, graph_of):
    """(candidates for which graph_of(candidate), a CUDA graph, raises no error; array of their median milliseconds).

    If every candidate fails, the last error is raised.
    """
    usable, graphs = [], []
    for candidate in candidates:
        try:
            graphs.append(graph_of(candidate))
            usable.append(candidate)
        except Exception as error:  # too many registers, too much shared memory, a compiler error, ...
            last_error = error
    if not graphs:
        raise last_error
    return usable, medians(cupy, stream, graphs)


def calls_per_graph(call_milliseconds):
    """How many calls of this duration a graph contains: GRAPH_MILLISECONDS in total, 1 to MAX_CALLS calls."""
    return max(1, int(GRAPH_MILLISECONDS / max(call_milliseconds, GRAPH_MILLISECONDS / MAX_CALLS)))


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

    The graphs run without a pause, so that the GPU is as warm as in training. A kernel that is the fastest in a short
    test may need more power; in training the GPU then lowers its clock rate, and this kernel is slower. Each round has
    another random order, because the power that a graph needs affects the time of the next one.
    """
    for graph in graphs:
        graph.launch(stream)
    times, rng = np.empty((rounds, len(graphs))), np.random.default_rng(SEED)
    for times_of_round in times:
        for number in rng.permutation(len(graphs)):
            times_of_round[number] = milliseconds(cupy, stream, functools.partial(graphs[number].launch, stream))
    return np.median(times, axis=0)


def milliseconds(cupy, stream, call):
    """The time of the work that call() launches on `stream`; waits until the work is done."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    call()
    stop.record(stream)
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)


# -- results -----------------------------------------------------------------------------------------------------------


def check(outputs, expected):
    """Raise ArithmeticError if an output differs from the expected one by more than TOLERANCE, or contains NaN."""
    for got, want in zip(outputs, expected, strict=True):
        if not (error := difference(got, want)) <= TOLERANCE[got.dtype.itemsize]:  # `not`, for an error of NaN
            raise ArithmeticError(f"the results differ by {error:.1e}")


def difference(got, want):
    """norm(got - want) / norm(want) in float64, computed in pieces to limit the memory of the float64 copies."""
    rows = max(1, PIECE * len(got) // max(1, got.size))
    error_squares = want_squares = 0.0
    for start in range(0, len(got), rows):
        a, b = (array[start : start + rows].astype(np.float64) for array in (got, want))
        error_squares, want_squares = error_squares + ((a - b) ** 2).sum(), want_squares + (b * b).sum()
    error_squares, want_squares = float(error_squares), float(want_squares)
    return (error_squares / want_squares) ** 0.5 if want_squares else error_squares


def compile_check(cupy, dtype):
    """Let CuPy compile its kernels with which fastest_of() fills, copies and compares outputs of this dtype."""
    array = cupy.empty((8, 8), dtype)
    array[...] = np.nan
    difference(array, array.copy())

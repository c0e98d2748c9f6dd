"""What is fastest on this GPU is found by trying it, once: algorithms and tiles, chosen by timing and kept on disk.

    tuner = Tuner(cupy, made_for="NVIDIA H200, cublasLt 130000, Triton 3.6.0", directory=cache_directory())
    config = tuner.choose("attention forward ...", configs, run, outputs)  # times at the first call, looks up later

Candidates are timed in turns, A B C, B A C, ..., each in a CUDA graph of several calls, or a small kernel would time
its launch. A choice is text, {what: choice}, so that it can be recorded with a run and given to other ranks.
"""

import functools
import json
import os
import re
import secrets
import warnings
from pathlib import Path

import numpy as np

from stage2_cuda.runtime.cuda_graph import no_garbage_collection

FASTER = 0.99  # of the first candidate's time: less may be noise, and noise shall not change bits from run to run
DIFFERENT = {2: 2e-2, 4: 2e-3}  # relative norm beyond what another order of sums makes, by bytes of an element
PIECE = 1 << 22  # elements that are compared at once
SEED = 20260101  # of the order in which candidates take their turns
ROUNDS, CALLS, ENOUGH = 5, 20, 20.0  # turns of each graph; calls in one, at most; milliseconds that they should take


class Tuner:
    """Chooses by timing on the current device of CuPy, and keeps what it has chosen.

    made_for: the device and the libraries for which a choice is good; None: nothing is timed, and always the first
    candidate chosen, so that every run and every rank computes the same bits. directory: where choices are kept, or
    None. say(text) tells the user what takes so long. `choices` {what: choice} are those in force.
    """

    def __init__(self, cupy, made_for=None, directory=None, say=print):
        self.cupy, self.made_for, self.say = cupy, made_for, say
        keeps = made_for is not None and directory is not None
        self.file = Path(directory, re.sub(r"[^\w.]+", "-", made_for) + ".json") if keeps else None
        self.choices = read_choices(self.file, made_for) if keeps else {}
        self.timed, self.chosen = {}, {}  # what this process has timed; {what: the candidate that a choice names}
        self.final, self.failed, self.announced = made_for is None, False, False

    def forget(self):
        """Choose all anew."""
        self.choices = {}
        self.chosen.clear()

    def adopt(self, choices, final=False):
        """Choose as `choices`, another rank's or an earlier run's, have it; -> whether that is new here.

        Nothing else is known then, so that ranks which adopt the same try out the same. But if it is final, what only
        this rank has met stays as it is, and no candidates are tried from here on: what comes later takes the first.
        """
        self.final, before = self.final or final, self.choices
        self.choices = self.choices | choices if final else dict(choices)
        if new := self.choices != before:
            self.chosen.clear()
            if overruled := {what: choices[what] for what in self.timed.keys() & choices.keys()}:
                self.timed |= overruled  # or the next run, which reads the file, would choose otherwise than this one
                self.write()
        return new

    def keep(self, what, choice):
        """Let what has been chosen by timing be found again, on disk too."""
        self.choices[what] = self.timed[what] = choice
        self.write()

    def write(self):
        if self.file:
            write_choices(self.file, self.made_for, self.timed)

    def announce(self):
        """Tell once why the first step takes so long."""
        if not self.announced:
            where = f"once: the fastest are kept in {self.file}" if self.file else "in this run alone: there is no home"
            self.say(f"timing kernels for this GPU, {where}")
        self.announced = True

    # -- candidates ----------------------------------------------------------------------------------------------------

    def choose(self, what, candidates, run, outputs, before=lambda: None):
        """The candidate with which run(candidate) is the fastest; the first, unless another is so by more than noise.

        what: for which choice, as text; candidates differ as text too. run launches on the current stream, waits for
        nothing, and writes all of `outputs`, arrays or views of them, which hold nothing of use afterwards; before()
        is run once before. A candidate that cannot run, or whose results are others, is passed over. Nothing that goes
        wrong here ends a run: it takes the first candidate then, with a warning.
        """
        if what not in self.chosen:
            self.chosen[what] = self.look_up(what, candidates) or self.try_out(what, candidates, run, outputs, before)
        return self.chosen[what]

    def look_up(self, what, candidates):
        name = self.choices.get(what)
        return next((candidate for candidate in candidates if str(candidate) == name), None)

    def try_out(self, what, candidates, run, outputs, before):
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
                told = f"{what}: cannot be timed ({problem}), so this run takes tiles from the table"
                warnings.warn(told, stacklevel=4)
        self.choices[what] = str(candidates[0])  # for all ranks; but not on disk, as the next run may have more luck
        return candidates[0]

    def capturing(self):
        """Whether the current stream is being captured: then nothing can be timed."""
        return self.cupy.cuda.get_current_stream().is_capturing()

    def fastest(self, candidates, run, outputs, before):
        cuda, sound, graphs, wanted = self.cupy.cuda, [], [], None
        cuda.runtime.deviceSynchronize()  # what is read may be at work on another stream
        stream = cuda.Stream(non_blocking=True)
        try:
            with cuda.using_allocator(None), stream:  # not out of the pool, whose peak is shown to the user
                before()
                for candidate in candidates:
                    call = functools.partial(run, candidate)
                    try:
                        for array in outputs:
                            array[...] = np.nan  # what is not written is noticed
                        call()
                        wanted = wanted or [array.copy() for array in outputs]
                        check(outputs, wanted)  # the first against itself: what is not finite decides nothing
                        if not graphs:
                            calls = calls_for(milliseconds(self.cupy, stream, call))
                        graphs.append(recorded(stream, call, calls))
                        sound.append(candidate)
                    except Exception as error:  # it asks for more than there is, or its compiler gives up
                        problem = error
                if not graphs:
                    raise problem
                times = medians(self.cupy, stream, graphs)
        finally:
            cuda.runtime.deviceSynchronize()  # whatever happened, what follows meets no work of ours
        best = int(times.argmin())
        return sound[best] if times[best] < FASTER * times[0] else sound[0]


# -- time --------------------------------------------------------------------------------------------------------------


def calls_for(once):
    """How many calls of so many milliseconds had better be timed together."""
    return max(1, int(ENOUGH / max(once, ENOUGH / CALLS)))


def recorded(stream, call, calls):
    """A graph of so many calls, recorded on the current stream, which is `stream`."""
    with no_garbage_collection():
        stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        finally:
            graph = stream.end_capture()
    return graph


def medians(cupy, stream, graphs, rounds=ROUNDS):
    """Milliseconds of each graph, the median of its turns; all one after the other, so that the GPU is as hot as later.

    What is fastest in a burst may draw more power, and be slower once the clock has sunk. Each round has its own order:
    behind the same other one a graph would be slower or faster every time, by the power that that one draws.
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
    """Raise ArithmeticError where an output differs from the wanted one by more than rounding; a NaN does."""
    for got, want in zip(outputs, wanted, strict=True):
        if not (error := difference(got, want)) <= DIFFERENT[got.dtype.itemsize]:
            raise ArithmeticError(f"the results differ by {error:.1e}")


def difference(got, want):
    """norm(got - want) / norm(want); in pieces, as float64 of all may have no room."""
    rows = max(1, PIECE * len(got) // max(1, got.size))
    error = size = 0.0
    for start in range(0, len(got), rows):
        a, b = (array[start : start + rows].astype(np.float64) for array in (got, want))
        error, size = error + ((a - b) ** 2).sum(), size + (b * b).sum()
    error, size = float(error), float(size)
    return (error / size) ** 0.5 if size else error


# -- the cache on disk -------------------------------------------------------------------------------------------------


def cache_directory():
    """Where choices are kept; None for a user without a home, as in some containers, who chooses anew in every run."""
    try:
        return Path.home() / ".cache" / "staged-gpt2"
    except RuntimeError:
        return None


def load_choices(path, made_for):
    cache = json.loads(path.read_text(encoding="utf-8"))
    if cache["made_for"] != made_for:
        raise ValueError(f"it was made for {cache['made_for']}, this is {made_for}")
    if not all(isinstance(choice, str) for choice in cache["choices"].values()):
        raise TypeError("a choice is no text")
    return cache["choices"]


def read_choices(path, made_for):
    """{what: choice}; {} where there is no file, and with a warning where it is not of use."""
    try:
        return load_choices(path, made_for)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"the autotune cache {path} is ignored and will be rewritten: {error!r}", stacklevel=3)
        return {}


def write_choices(path, made_for, choices):
    """Add to the file, replacing it as a whole: a reader never sees half of one. Where it cannot be, warn and go on."""
    try:
        before = load_choices(path, made_for)  # another process may have chosen for other shapes meanwhile
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        before = {}
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"made_for": made_for, "choices": before | choices}, indent=1), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        warnings.warn(f"the autotune cache {path} cannot be written: {error.strerror or error}", stacklevel=3)

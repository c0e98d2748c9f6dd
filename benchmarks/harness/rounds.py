"""Measure programs in turn, functions of one process or processes: A B C, B C A, ... (see processes.interleaved)."""

import functools
import statistics
import time
import timeit
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, peak_bytes, run_rounds
from benchmarks.harness.processes import interleaved as interleaved  # for programs in one process
from gpt2core.parallel.micro_batches.count import plan_micro_batches

SEED = 20260101


def random_batch(rng, vocab_size, batch_size, seq_len):
    """Random (inputs, targets), int64 arrays (batch_size, seq_len)."""
    tokens = rng.integers(0, vocab_size, (batch_size, seq_len + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def median_seconds(function, times):
    """The median seconds of `times` calls of function()."""
    return statistics.median(timeit.repeat(function, number=1, repeat=times))


def mean_seconds(function, times):
    """The mean seconds of `times` calls of function()."""
    return timeit.timeit(function, number=times) / times


def measure_specs(specs, args, warm_up, request):
    """run_rounds() of the processes of some ProcessSpecs, and "import_bytes", their memory after the imports.

    args: the flags, of which "timeout" and "rounds" are read, and "benchmark", the module that has prepare().
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(BenchmarkProcess(spec, args.benchmark, args.timeout)) for spec in specs]
        measured = run_rounds(processes, args.rounds, warm_up, request)
        return {each.spec.name: measured[each.spec.name] | {"import_bytes": each.baseline} for each in processes}


class GraphTimer:
    """Times short GPU calls precisely: several calls of a function are captured in one CUDA graph, which is replayed.

    A subclass sets `calls`, {kind: function}. It has milliseconds(call), the device time of call(), captured(kind,
    count), a function that replays a new graph of `count` calls, and norms(), the norms of the results.
    """

    def __init__(self):
        self.calls, self.graphs = {}, {}  # graphs: {kind: (function that replays, number of calls)}

    def run_round(self, length):
        """{kind: milliseconds of one call, "norms": norms of the results}. Each graph is about `length` ms long."""
        for kind, call in self.calls.items():
            if kind not in self.graphs:
                self.milliseconds(call)  # compiles
                count = max(1, round(length / min(self.milliseconds(call) for _ in range(3))))
                self.graphs[kind] = self.captured(kind, count), count
        times = {}
        for kind, (replay, count) in self.graphs.items():
            replay()  # brings the GPU to its full clock rate
            times[kind] = self.milliseconds(replay) / count
        return times | {"norms": self.norms()}


def measure_shapes(specs, args, shapes, kinds):
    """Yield the results of one shape after another: a dictionary for each ProcessSpec, with its name.

    "ms" has the milliseconds of each round for each of `kinds`, "norms" those of the last round. args: the flags, of
    which "timeout", "rounds" and "milliseconds" are read, and "benchmark", the module that has prepare().
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(BenchmarkProcess(spec, args.benchmark, args.timeout)) for spec in specs]
        for shape in shapes:
            request = {"shape": shape, "milliseconds": args.milliseconds}
            measured = run_rounds(processes, args.rounds, request, request)
            results = []
            for spec in specs:
                rounds = measured[spec.name]["rounds"]
                ms = {kind: [each[kind] for each in rounds] for kind in kinds}
                results.append({"name": spec.name, "shape": shape, "norms": rounds[-1]["norms"], "ms": ms})
            yield results


def timed_steps(world, step, config, batch_size, seq_len=None, draw=random_batch):
    """Return `run_round(steps)`, which trains on random tokens, from draw(), and measures every step.

    All ranks start a step together, after a barrier. The time of a step is measured from the moment when the first rank
    leaves the barrier to the moment when the last rank has finished the step. step: step(inputs, targets) -> loss.
    seq_len: tokens of a sequence, by default the block size.
    """
    rng = np.random.default_rng(SEED)  # the same tokens in every process and on every rank

    def run_round(steps):
        started, ended, losses, cpu_seconds = [], [], [], 0.0
        for _ in range(steps):
            inputs, targets = draw(rng, config.vocab_size, batch_size, seq_len or config.block_size)
            world.barrier()
            cpu_started = time.process_time()
            started.append(time.perf_counter())  # all processes of a host have the same clock
            losses.append(step(inputs, targets))
            ended.append(time.perf_counter())
            cpu_seconds += time.process_time() - cpu_started
        started, ended, losses, cpu_seconds, peaks = zip(
            *world.all_gather_object((started, ended, losses, cpu_seconds, peak_bytes())), strict=True
        )
        seconds = np.max(ended, axis=0) - np.min(started, axis=0)
        return {
            "seconds": seconds.tolist(),
            # A rank of PyTorch returns the loss of its own sequences. Our ranks all return the same loss.
            "losses": [None if None in of_step else float(np.mean(of_step)) for of_step in zip(*losses, strict=True)],
            "cpu_seconds": sum(cpu_seconds),
            "peak_bytes": max(peaks),
        }

    return run_round


def step_results(measured):
    """{name: {"seconds": a list per round with a number per step, "cpu_seconds": of all steps}} of timed_steps().

    measured: from run_rounds().
    """
    return {
        name: {
            "seconds": [each["seconds"] for each in answers["rounds"]],
            "cpu_seconds": sum(each["cpu_seconds"] for each in answers["rounds"]),
        }
        for name, answers in measured.items()
    }


def measure_variants(args, specs):
    """Measure variants of the training step in interleaved rounds; return one result for each variant.

    specs: the ProcessSpecs of jobs; their option "variants" is {name: options}, and run_round(name, steps) returns a
    dictionary. All jobs are prepared before the first one trains. A result has "name", "side" (the name of its job),
    "ranks", all options, the answer of the last round, and "seconds", a list of those of each round. args: the flags.
    """
    with ExitStack() as stack:
        runs, results = {}, {}
        for spec in specs:
            process = stack.enter_context(BenchmarkProcess(spec, args.benchmark, args.timeout))
            process.run_round()
            common = {key: value for key, value in spec.options.items() if key != "variants"}
            for name, options in spec.options["variants"].items():
                runs[name] = functools.partial(process.run_round, name=name)
                results[name] = {"name": name, "side": spec.name, "ranks": spec.ranks, **common, **options}
        measured = run_rounds(runs, args.rounds, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    for name, answers in measured.items():
        rounds = answers["rounds"]
        results[name] |= rounds[-1] | {"seconds": [each["seconds"] for each in rounds]}
        if "cpu_seconds" in rounds[-1]:
            results[name]["cpu_seconds"] = sum(each["cpu_seconds"] for each in rounds)
    return list(results.values())


def measure_jobs(args, cases):
    """Yield measure_variants() of each case (ranks, variants, other options of prepare()), an MPI job of this project.

    Raises ConfigError before the first job if the sequences cannot be divided.
    """
    for ranks, *_ in cases:
        plan_micro_batches(args.batch_size, None, 1, ranks, deterministic=True)
    for ranks, variants, options in cases:
        options = options | {"batch_size": args.batch_size, "variants": variants}
        yield measure_variants(args, [ProcessSpec("ours", "benchmarks.harness.ours", 1, options, ranks, mpi=True)])

"""How fast are our collectives compared with the MPI library's and gloo's? How much CPU time does a waiting rank use?

Ours are built from send and receive only (stage1_mpi/collectives.py). gloo is PyTorch's library for CPU tensors.

    python -m benchmarks.ranks.collectives                                            # all-reduce on 2, 4 and 8 ranks
    python -m benchmarks.ranks.collectives --ranks 2 --sizes 1000 1000000 --rounds 3  # a quick trial
    python -m benchmarks.ranks.collectives --idle                                     # CPU time of a waiting rank
"""

import statistics
import tempfile
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.harness.drawing import panels
from benchmarks.harness.processes import BenchmarkFailed, progress
from benchmarks.harness.report import paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved, mean_seconds
from benchmarks.harness.script import benchmark
from stage1_mpi import collectives, mpi_communicator
from stage1_mpi.mpi_communicator import CHOICES, NATIVE
from testing.jobs import run_mpi

BENCHMARK = "benchmarks.ranks.collectives"  # the name under which the ranks import this file
SIZES = [10**k for k in range(3, 9)]
GLOO = "gloo"
OPERATIONS = {  # name: our algorithms
    "all_reduce": [*collectives.ALL_REDUCE],
    "reduce_scatter": [*collectives.REDUCE_SCATTER],
    "all_to_all": ["pairwise"],
}
ALGORITHMS = [NATIVE, *dict.fromkeys(name for names in OPERATIONS.values() for name in names), GLOO]
MIN_ROUNDS = 3  # number of rounds that are measured for every size, even if they take longer than --seconds
MATRIX_SIZE = 512  # rows and columns of the matrices that rank 0 multiplies


# -- on the ranks -----------------------------------------------------------------------------------------------------


def collective_times(world, operation, sizes, rounds, budget, store_file, with_gloo=True):
    """Measure float32 collectives, the all-reduce in place; return [{algorithm, bytes, seconds, bytes_sent}].

    sizes: bytes of the arrays. budget: seconds per size; fewer rounds are measured if they would take longer. In the
    result, seconds has one number per round, the time of the slowest rank, and bytes_sent one number per rank, 0 for
    gloo.
    """
    from mpi4py import MPI

    gloo = open_gloo(world, store_file) if with_gloo and find_spec("torch") else None
    results = []
    for size in sizes:
        length = size // 4 // world.size * world.size
        source = np.random.default_rng(world.rank).standard_normal(length, np.float32)
        x, repeats = source.copy(), max(1, min(20, 10**6 // size))  # short calls are timed in groups

        def measured(call, x=x, source=source, repeats=repeats):
            x[...], sent = source, world.bytes_sent
            MPI.COMM_WORLD.Barrier()  # a waiting rank polls, so all ranks leave at nearly the same time
            seconds = mean_seconds(call, repeats)
            return world.all_gather_object((seconds, (world.bytes_sent - sent) // repeats))

        functions = {name: partial(measured, call) for name, call in calls_of(world, operation, x, gloo).items()}
        started = time.monotonic()
        interleaved(functions, 1)  # for warm-up
        possible = int(budget / (time.monotonic() - started))
        found = interleaved(functions, world.broadcast_object(min(rounds, max(MIN_ROUNDS, possible))))
        for name, of_rounds in found.items():
            seconds = [max(seconds for seconds, _ in of_ranks) for of_ranks in of_rounds]
            sent = [sent for _, sent in of_rounds[-1]]
            results.append({"algorithm": name, "bytes": x.nbytes, "seconds": seconds, "bytes_sent": sent})
    return results


def calls_of(world, operation, x, gloo):
    """{algorithm: function()} that run one collective of x: MPI's own, ours, and gloo's unless `gloo` is None."""
    out = x if operation == "all_reduce" else np.empty(len(x) // (world.size if "scatter" in operation else 1), x.dtype)

    def call(name):
        # world.all_to_all selects by size; here the name selects
        mpi_communicator.OURS_MIN_BYTES = float("inf") if name == NATIVE else 0
        if name in CHOICES:
            world.use_collectives(name)
        getattr(world, operation)(x, out=out)

    calls = {name: partial(call, name) for name in (NATIVE, *OPERATIONS[operation])}
    return calls if gloo is None else calls | {GLOO: gloo_call(gloo, operation, x, out)}


def gloo_call(gloo, operation, x, out):
    """A function() that runs one collective of PyTorch's gloo on the same arrays."""
    import torch

    x, out = torch.from_numpy(x), torch.from_numpy(out)
    if operation == "all_reduce":
        return lambda: gloo.all_reduce(x)
    method = {"reduce_scatter": gloo.reduce_scatter_tensor, "all_to_all": gloo.all_to_all_single}[operation]
    return lambda: method(out, x)


def open_gloo(world, store_file):
    """torch.distributed with a gloo process group of these ranks; a job uses one store file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=world.rank, world_size=world.size)
    return dist


def idle_waiting(world, rounds, seconds):
    """Let rank 0 multiply matrices while the other ranks wait; return {how they wait: [GFLOP/s of rank 0 per round]}.

    seconds: how long rank 0 computes in a round, for each way of waiting.
    """
    from mpi4py import MPI

    a = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    b, c = a.copy(), a.copy()

    def receive():
        for to in range(1, world.size) if world.is_root else ():
            world.send(a[0], to)
        if not world.is_root:
            world.recv(c[0], source=0)

    waiting = {
        "asleep": lambda: time.sleep(seconds + 0.2),
        "in our barrier": world.barrier,
        "in our all-reduce": lambda: world.all_reduce(np.ones(1000)),
        "in our receive": receive,
        "in the library's barrier": MPI.COMM_WORLD.Barrier,
    }

    def speed(wait):
        MPI.COMM_WORLD.Barrier()
        if not world.is_root:
            return wait()
        time.sleep(0.1)  # until the other ranks wait
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            np.matmul(a, b, out=c)
            count += 1
        wait()
        return 2e-9 * MATRIX_SIZE**3 * count / elapsed

    return interleaved({name: partial(speed, wait) for name, wait in waiting.items()}, rounds)


# -- in the parent process --------------------------------------------------------------------------------------------


def launch(ranks, function, *args, timeout, benchmark=BENCHMARK):
    """Run a new MPI job; return the result of rank 0. `function`: the name of a function of the module `benchmark`."""
    progress(f"{function}, {ranks} ranks")
    try:
        return run_mpi(ranks, getattr(import_module(benchmark), function), *args, timeout=timeout)[0]
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from None
    finally:
        progress("")


def summarise(results, operation, ranks):
    """Add operation, ranks and ratio_to_native, the time divided by the MPI library's, to the results of one job.

    The library's results also get the medians of the others' "ratios", {algorithm: ratio}, and the "best" algorithm.
    """
    for size in dict.fromkeys(result["bytes"] for result in results):
        of_size = {result["algorithm"]: result for result in results if result["bytes"] == size}
        for result in of_size.values():
            ratio = paired_ratio(result["seconds"], of_size[NATIVE]["seconds"])
            result |= {"operation": operation, "ranks": ranks, "ratio_to_native": ratio}
        ratios = {name: each["ratio_to_native"]["median"] for name, each in of_size.items() if name != NATIVE}
        of_size[NATIVE] |= {"ratios": ratios, "best": min(ratios, key=ratios.get)}


def fit(results, key="algorithm"):
    """[{"name", "alpha", "beta"}] for each result[key]: the fit t = alpha + beta n to the seconds t of n bytes.

    alpha (seconds) includes the start-up times of all messages of an all-reduce. beta (seconds per byte) includes the
    additions and the number of bytes that a rank sends per byte of the array, which is 2 (p-1)/p for a ring of p ranks.
    """
    points = {}
    for result in results:
        points.setdefault(result[key], []).append((result["bytes"], statistics.median(result["seconds"])))
    fits = {name: fit_line(*zip(*of_name, strict=True)) for name, of_name in points.items()}
    return [{"name": name, "alpha": alpha, "beta": beta} for name, (alpha, beta) in fits.items()]


def fit_line(sizes, seconds):
    """[alpha, beta] of seconds = alpha + beta sizes, by least squares of the relative error."""
    sizes, seconds = np.array(sizes, float), np.array(seconds)
    terms = np.stack([1 / seconds, sizes / seconds], axis=1)
    return np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)[0].tolist()


def plot(results, path, operation="all_reduce"):
    """Draw seconds against bytes, both logarithmic, one panel for each number of ranks."""
    counts = sorted({result["ranks"] for result in results})
    with panels(path, 1, len(counts), figsize=(4.5 * len(counts), 4), sharey=True, layout="tight") as (_, axes):
        for ranks, panel in zip(counts, axes[0], strict=True):
            for name in ALGORITHMS:
                shown = [result for result in results if (result["algorithm"], result["ranks"]) == (name, ranks)]
                points = [(result["bytes"], statistics.median(result["seconds"])) for result in shown]
                if points:
                    panel.loglog(*zip(*sorted(points), strict=True), "k--" if name == NATIVE else ".-", label=name)
            panel.set(title=f"{ranks} ranks", xlabel="bytes of x")
            panel.grid(alpha=0.3)
        axes[0][0].set_ylabel(f"seconds of {operation}")
        axes[0][0].legend()


def compare(args, operation):
    """Measure one operation with each number of ranks, print the tables and the fits; return (results, fits)."""
    results, fits = [], []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            job = operation, args.sizes, args.rounds, args.seconds, str(Path(folder, "store"))
            of_ranks = launch(ranks, "collective_times", *job, timeout=args.timeout)
        print(f"{operation}:")
        summarise(of_ranks, operation, ranks)
        TABLES["ranks-collectives"].print({"times": of_ranks})
        of_fits = [{"operation": operation, "ranks": ranks, **each} for each in fit(of_ranks)]
        TABLES["ranks-fit"].print({"fits": of_fits})
        results, fits = results + of_ranks, fits + of_fits
    return results, fits


@benchmark(
    common=dict(ranks=[2, 4, 8], rounds=9, timeout=900),
    operations=dict(choices=OPERATIONS, nargs="+", default=["all_reduce"], help="collectives (default all_reduce)"),
    sizes=dict(type=int, nargs="+", default=SIZES, help="bytes of the array (default 1 KB, 10 KB, ..., 100 MB)"),
    seconds=dict(type=float, default=20, help="seconds per size; at least 3 rounds are measured (default 20)"),
    idle=dict(action="store_true", help="measure only rank 0's speed while other ranks wait"),
)
def main(args):
    if args.idle:
        ranks = max(args.ranks)
        speeds = launch(ranks, "idle_waiting", args.rounds, 1.0, timeout=args.timeout)
        results = [
            {"name": name, "ranks": ranks, "gflops": speed, "share_of_speed": paired_ratio(speed, speeds["asleep"])}
            for name, speed in speeds.items()
        ]
        TABLES["ranks-idle"].print(results)
        save(results, args, name="collectives_idle")
        return
    found = {operation: compare(args, operation) for operation in args.operations}
    times, fits = zip(*found.values(), strict=True)
    path = save({"times": sum(times, []), "fits": sum(fits, [])}, args)
    for operation, (results, _) in found.items():
        end = "" if operation == "all_reduce" else f"_{operation}"
        plot(results, path.with_name(f"{path.stem}{end}.png"), operation)

"""How do collectives made of messages compare with the MPI library's own, and what does a waiting rank cost others?"""

import argparse
import statistics
import time
from importlib import import_module

import numpy as np

from benchmarks.harness.contenders import ROOT, paired_ratio, print_table, progress, run, save
from benchmarks.harness.jobs import run_mpi
from stage1_mpi import collectives
from stage1_mpi.mpi_communicator import NATIVE

BENCHMARK = "benchmarks.ranks.collectives"  # how the ranks import this file
SIZES = [10**k for k in range(3, 9)]
CONTENDERS = [NATIVE, *collectives.ALL_REDUCE]
AT_LEAST = 3  # rounds, also where they take longer than the budget
GEMM = 512  # rows and columns


# -- on the ranks -----------------------------------------------------------------------------------------------------


def all_reduces(world, sizes, rounds, budget):
    """[{algorithm, bytes, seconds of each round (the slowest rank's), bytes_sent by each rank}], in place, float32."""
    from mpi4py import MPI

    results = []
    for size in sizes:
        source = np.random.default_rng(world.rank).standard_normal(size // 4, np.float32)
        x = source.copy()
        repeats = max(1, min(20, 10**6 // size))  # short calls are timed several at once
        of_size = {name: {"algorithm": name, "bytes": x.nbytes, "seconds": []} for name in CONTENDERS}
        started = time.monotonic()
        for index in range(-1, rounds):  # the first is a warm-up
            if world.broadcast_object(index >= AT_LEAST and time.monotonic() - started > budget):
                break
            first = index % len(CONTENDERS)
            for name in CONTENDERS[first:] + CONTENDERS[:first]:
                world.use_collectives(name)
                x[...] = source
                sent = world.bytes_sent
                MPI.COMM_WORLD.Barrier()  # spins: all leave it together
                began = time.perf_counter()
                for _ in range(repeats):
                    world.all_reduce(x, out=x)
                seconds = (time.perf_counter() - began) / repeats
                sent = (world.bytes_sent - sent) // repeats
                seconds, sent = zip(*world.all_gather_object((seconds, sent)), strict=True)
                if index >= 0:
                    of_size[name]["seconds"].append(max(seconds))
                    of_size[name]["bytes_sent"] = sent
        results += of_size.values()
    return results


def idle_waiting(world, rounds, seconds):
    """{how the others spend their time: [GFLOP/s of rank 0 in each round]}."""
    from mpi4py import MPI

    waiting = {
        "asleep": lambda: time.sleep(seconds + 0.2),
        "in our barrier": world.barrier,
        "in our all-reduce": lambda: world.all_reduce(np.ones(1000)),
        "in our receive": lambda: receive_from_root(world),
        "in the library's barrier": MPI.COMM_WORLD.Barrier,
    }
    a = np.ones((GEMM, GEMM), np.float32)
    b, c = a.copy(), a.copy()
    speeds = {name: [] for name in waiting}
    for index in range(rounds):
        names = list(waiting)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            MPI.COMM_WORLD.Barrier()
            if world.is_root:
                time.sleep(0.1)  # the others are waiting by now
                began, count = time.perf_counter(), 0
                while (elapsed := time.perf_counter() - began) < seconds:
                    np.matmul(a, b, out=c)
                    count += 1
                speeds[name].append(2e-9 * GEMM**3 * count / elapsed)
                if name == "in our receive":
                    for to in range(1, world.size):
                        world.send(a[0], to)
                    continue
            waiting[name]()
    return speeds


def receive_from_root(world):
    world.recv(np.empty(GEMM, np.float32), source=0)


# -- on the one that launches them ------------------------------------------------------------------------------------


def launch(ranks, function, *args, timeout, benchmark=BENCHMARK):
    """What `function` of that file, else of this one, returns on rank 0 of a job of its own."""
    try:
        return run_mpi(ranks, getattr(import_module(benchmark), function), *args, timeout=timeout)[0]
    except AssertionError as error:
        raise SystemExit(str(error)) from None


def summarise(results, ranks):
    """Add medians, ratios within rounds and the fit t = alpha + beta n to one job's results; return table rows."""
    native = {result["bytes"]: result["seconds"] for result in results if result["algorithm"] == NATIVE}
    rows = []
    for result in sorted(results, key=lambda result: (result["bytes"], CONTENDERS.index(result["algorithm"]))):
        result["ranks"] = ranks
        result["median"] = statistics.median(result["seconds"])
        result["ratio_to_native"] = paired_ratio(result["seconds"], native[result["bytes"]])
        rows.append(
            {
                f"{ranks} ranks": result["algorithm"],
                "bytes": f"{result['bytes']:,}",
                "ms": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * min(result['seconds']):.4g}",
                "GB/s": f"{1e-9 * result['bytes'] / result['median']:.3g}",
                "most bytes a rank sends": f"{max(result['bytes_sent']):,}",
                "x native time": f"{result['ratio_to_native']:.2f}",
            }
        )
    return rows


def fit(results):
    """[alpha seconds, beta seconds a byte] of t = alpha + beta n by least squares of the relative error, per algorithm.

    n is the length of x, so that the number of rounds is in alpha, and 2 (p-1)/p and the additions are in beta.
    """
    of_name = {name: [result for result in results if result["algorithm"] == name] for name in CONTENDERS}
    return {name: line([r["bytes"] for r in found], [r["median"] for r in found]) for name, found in of_name.items()}


def line(sizes, seconds):
    """[alpha, beta] of seconds = alpha + beta sizes by least squares of the relative error."""
    sizes, seconds = np.array(sizes, float), np.array(seconds)
    terms = np.stack([1 / seconds, sizes / seconds], axis=1)
    return np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)[0].tolist()


def plot(results, path):
    """Seconds over bytes, both logarithmic, one panel for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = sorted({result["ranks"] for result in results})
    figure, panels = plt.subplots(1, len(counts), figsize=(4.5 * len(counts), 4), sharey=True, squeeze=False)
    for ranks, panel in zip(counts, panels[0], strict=True):
        for name in CONTENDERS:
            points = [(r["bytes"], r["median"]) for r in results if (r["algorithm"], r["ranks"]) == (name, ranks)]
            panel.loglog(*zip(*sorted(points), strict=True), "k--" if name == NATIVE else ".-", label=name)
        panel.set(title=f"{ranks} ranks", xlabel="bytes of x")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds of an all-reduce")
    panels[0][0].legend()
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def compare(args):
    """The all-reduces of every number of ranks: tables, fit and plot."""
    results, fits = [], {}
    for ranks in args.ranks:
        progress(f"{ranks} ranks")
        of_ranks = launch(ranks, "all_reduces", args.sizes, args.rounds, args.seconds, timeout=args.timeout)
        progress("")
        print_table(summarise(of_ranks, ranks))
        fits[ranks] = fit(of_ranks)
        print()
        print_table(
            [
                {f"{ranks} ranks": name, "alpha us": f"{1e6 * alpha:.4g}", "beta ns/byte": f"{1e9 * beta:.3g}"}
                for name, (alpha, beta) in fits[ranks].items()
            ]
        )
        print()
        results += of_ranks
    return {"all_reduce": results, "alpha_beta": fits}


def idle(args):
    """What ranks that wait leave to the one that works."""
    ranks = max(args.ranks)
    speeds = launch(ranks, "idle_waiting", args.rounds, 1.0, timeout=args.timeout)
    alone = speeds["asleep"]
    print_table(
        [
            {
                f"{ranks - 1} ranks are": name,
                "GFLOP/s of the one that works": f"{statistics.median(of_name):.1f}",
                "share of its speed": f"{100 * paired_ratio(of_name, alone):.0f} %",
            }
            for name, of_name in speeds.items()
        ]
    )
    return {"ranks": ranks, "gflops": speeds}


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="ranks of each job (default 2 4 8)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of x (default 1 KB to 100 MB by 10)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each algorithm (default 9)")
    parser.add_argument("--seconds", type=float, default=20, help="of one size, then no new round (default 20)")
    parser.add_argument("--timeout", type=int, default=900, help="seconds that one job may take (default 900)")
    parser.add_argument("--idle", action="store_true", help="instead: the speed of one rank while the others wait")
    parser.add_argument("--no-save", action="store_true", help="leave results/ as it is")
    args = parser.parse_args()

    if args.idle:
        results = idle(args)
        if not args.no_save:
            save(BENCHMARK, results, name="collectives_idle")
        return
    results = compare(args)
    if not args.no_save:
        plot(results["all_reduce"], ROOT / "results" / "ranks" / "collectives.png")
        save(BENCHMARK, results)


if __name__ == "__main__":
    run(main)

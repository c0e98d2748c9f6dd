"""How long does an all-reduce take with gloo on the CPU, with NCCL on GPUs, and with our algorithms over MPI?

One row per library, number of ranks and size. `ddp_model` fits its two constants to these rows.
"""

import functools
import statistics

import torch
import torch.distributed as dist

from benchmarks.harness.processes import run_main
from benchmarks.torch.models import BACKENDS, device_of_rank, ranks_of, timed
from benchmarks.torch.rows import Rows, add_flags, attempt, mean_and_deviation, parser_of

BENCHMARK = "benchmarks.torch.all_reduce"
SIZES = [10**k for k in range(6, 10)]
MPI = "mpi"
LIBRARIES = [*BACKENDS, MPI]


def all_reduces(size, warm_up, repeats):
    """Seconds of each measured all-reduce of `size` bytes of float32 on this rank."""
    device = device_of_rank()
    x = torch.zeros(size // 4, device=device)
    for _ in range(warm_up):
        dist.all_reduce(x)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        seconds.append(timed(lambda: dist.all_reduce(x), device)[0])
    return seconds


def measure_torch(group, size, args):
    """The values of a row: of each run, the time of the slowest rank."""
    seconds = [max(each) for each in zip(*group.run(all_reduces, size, args.warm_up, args.repeats), strict=True)]
    return values_of(seconds, size, group.size)


def measure_mpi(ranks, size, args):
    """The values of one row per algorithm of stage 1; {algorithm: values}."""
    from benchmarks.ranks.collectives import launch

    job = "all_reduce", [size], args.repeats, 60.0, "", False
    results = launch(ranks, "collective_times", *job, timeout=600, benchmark="benchmarks.ranks.collectives")
    return {each["algorithm"]: values_of(each["seconds"], size, ranks) for each in results}


def values_of(seconds, size, ranks):
    mean, deviation = mean_and_deviation(seconds, 1e3)
    speed = size / statistics.median(seconds)
    return {
        "ranks": ranks,
        "bytes": size,
        "ms": mean,
        "sd": deviation,
        "GB/s": 1e-9 * speed,
        "bus GB/s": 1e-9 * speed * 2 * (ranks - 1) / ranks,
    }


def main():
    parser = parser_of(BENCHMARK, __doc__)
    add = parser.add_argument
    add("--libraries", nargs="+", choices=LIBRARIES, default=["gloo", "mpi"], help="libraries (default gloo mpi)")
    add("--ranks", type=int, nargs="+", help="numbers of ranks (default: 2 4 6, for nccl 2 4)")
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the float32 array (default 1 MB to 1 GB by 10)")
    add_flags(add, "all_reduce", warm_up=5, repeats=10)
    args = parser.parse_args()

    rows = Rows(BENCHMARK, args)
    for library in args.libraries:
        for ranks in args.ranks or ((2, 4) if "nccl" in library else (2, 4, 6)):
            names = {f"{library}, {ranks} ranks, {size / 1e6:g} MB": size for size in args.sizes}
            if library == MPI:
                for name in rows.missing(names):
                    for algorithm, values in measure_mpi(ranks, names[name], args).items():
                        rows.add(f"{name}, {algorithm}" if algorithm != MPI else name, **values)
                continue
            with ranks_of(library, ranks) as group:
                for name in rows.missing(names):
                    attempt(rows, name, functools.partial(measure_torch, group, names[name], args))
    rows.print()
    rows.save()


if __name__ == "__main__":
    run_main(main)

"""How long does an all-reduce take with gloo on the CPU, with NCCL on GPUs, and with our algorithms over MPI?

One row per library, number of ranks and size. `ddp_model` fits its two constants to these rows.

    python -m benchmarks.torch.all_reduce                                             # gloo and MPI on the CPU
    python -m benchmarks.torch.all_reduce --ranks 2 --sizes 1000000 --libraries gloo  # a quick trial
    python -m benchmarks.torch.all_reduce --libraries nccl                            # on several GPUs
"""

import functools

import torch
import torch.distributed as dist

from benchmarks.harness.assignment_tables import print_tables
from benchmarks.harness.rows import ROW_FLAGS, mean_and_deviation, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch.groups import TIMED_BACKENDS, Groups, seconds_of, slowest
from benchmarks.torch.models import device_of_rank

SIZES = [10**k for k in range(6, 10)]
MPI = "mpi"
LIBRARIES = [*TIMED_BACKENDS, MPI]


def all_reduces(size, warm_up, repeats):
    """{"seconds": of each measured all-reduce of `size` bytes of float32} of this rank."""
    device = device_of_rank()
    x = torch.zeros(size // 4, device=device)
    return {"seconds": seconds_of(lambda: dist.all_reduce(x), device, warm_up, repeats)}


def torch_row(groups, library, ranks, size, args):
    """The values of a row of PyTorch."""
    found = groups.run(library, ranks, all_reduces, size, args.warm_up, args.repeats)
    return with_bandwidth(ranks, size, slowest(found, "seconds"))


def mpi_row(ranks, size, args):
    """The values of a row of MPI's own all-reduce, and the times of stage 1's algorithms under "ours ..."."""
    from benchmarks.ranks.collectives import launch

    job = "all_reduce", [size], args.repeats, 60.0, "", False
    results = launch(ranks, "collective_times", *job, timeout=600, benchmark="benchmarks.ranks.collectives")
    times = {each["algorithm"]: mean_and_deviation([1e3 * s for s in each["seconds"]]) for each in results}
    ours = {f"ours, {name}": time for name, time in times.items() if name != MPI}
    return with_bandwidth(ranks, size, times[MPI]) | ours


def with_bandwidth(ranks, size, milliseconds):
    speed = 1e-6 * size / milliseconds["mean"]  # GB/s
    return {
        "ranks": ranks,
        "bytes": size,
        "time": milliseconds,
        "GB/s": speed,
        "bus GB/s": speed * 2 * (ranks - 1) / ranks,  # what each rank sends in a ring
    }


@benchmark(
    common=ROW_FLAGS | dict(warm_up=5, repeats=10),
    libraries=dict(nargs="+", choices=LIBRARIES, default=["gloo", "mpi"], help="libraries (default gloo mpi)"),
    ranks=dict(type=int, nargs="+", help="numbers of ranks (default: 2 4 6, for nccl 2 4)"),
    sizes=dict(type=int, nargs="+", default=SIZES, help="bytes of the float32 array (default 1 MB to 1 GB by 10)"),
)
def main(args):
    cases = {}
    with Groups() as groups:
        for library in args.libraries:
            for ranks in args.ranks or ((2, 4) if "nccl" in library else (2, 4, 6)):
                for size in args.sizes:
                    row = (mpi_row,) if library == MPI else (torch_row, groups, library)
                    cases[f"{library}, {ranks} ranks, {size / 1e6:g} MB"] = functools.partial(*row, ranks, size, args)
        print_tables(run_rows(args, cases), "all-reduce", "all-reduce-ours")

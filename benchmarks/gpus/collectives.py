"""Does our all-reduce over NCCL reach the bandwidth of PyTorch's, and what do the canonical order and bf16 cost?

Ours are recorded as a graph, several behind each other, as a training step has them; PyTorch's follow each other as
Python calls them, which is what DistributedDataParallel does, and hides the calls behind all but the smallest ones.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.contenders import add_saving, paired_ratio, print_table, progress, run, save
from benchmarks.ranks.collectives import launch, line
from gpt2core.app.presets import PRESETS
from gpt2core.arena import Arena
from gpt2core.model import parameter_shapes
from gpt2core.parallel.bucket_size import best_bucket
from gpt2core.parallel.compression import Compressed

BENCHMARK = "benchmarks.gpus.collectives"
SIZES = [10**k for k in range(6, 10)]  # bytes of a float32 array
TORCH = "torch, fp32"
OURS = {  # name: (type that is summed, algorithm, codec)
    "nccl, fp32": ("float32", "nccl", None),
    "canonical, fp32": ("float32", "canonical", None),
    "nccl, bf16": ("bfloat16", "nccl", None),
    "canonical, bf16": ("bfloat16", "canonical", None),
    "--compress bf16": ("float32", "nccl", "bf16"),
}
STAGED = "--transport mpi, fp32"
CONTENDERS = [TORCH, *OURS, STAGED]
FIT = ["nccl, fp32", "canonical, fp32"]
SCALE = 1e-30  # of the numbers: sums of sums stay finite through all repetitions
ACCURATE = 10**7  # bytes of the array whose sum is compared with one in float64
AT_LEAST = 0.97  # of PyTorch's bandwidth


# -- on the ranks ------------------------------------------------------------------------------------------------------


def all_reduces(host, sizes, rounds, meeting):
    """({contender: its relative error}, [{name, bytes, seconds of each round, the slowest rank's}]); x (n) in place."""
    import torch.distributed as dist

    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world = NcclCommunicator(host)
    world.use_transport("nccl")
    torch_sum = open_torch(world, meeting)
    errors = {name: error_of(world, name, torch_sum) for name in CONTENDERS}
    results = []
    for size in sizes:
        repeats = max(4, min(20, 2 * 10**8 // size))
        source = source_of(world, size // 4)
        turns = {name: turn_of(world, name, source, repeats, torch_sum) for name in CONTENDERS}
        of_size = {name: {"name": name, "bytes": size, "seconds": []} for name in CONTENDERS}
        for index in range(-2, rounds):  # the first runs, the second is recorded, or warms up
            first = index % len(CONTENDERS)
            for name in CONTENDERS[first:] + CONTENDERS[:first]:
                seconds = max(world.all_gather_object(turns[name]()))
                if index >= 0:
                    of_size[name]["seconds"].append(seconds)
        results += of_size.values()
        turns.clear()  # with their graphs and buffers, before there are larger ones
    dist.destroy_process_group()
    return errors, results


def open_torch(world, meeting):
    """all_reduce(a CuPy array, in place), by PyTorch's NCCL, on PyTorch's current stream."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(world.gpu.number)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=world.rank, world_size=world.size)
    return lambda array: dist.all_reduce(torch.as_tensor(array, device="cuda"))


def source_of(world, n):
    """(n) random numbers of this rank, on the GPU."""
    import cupy

    cupy.random.seed(world.rank)
    return cupy.random.standard_normal(n, np.float32) * np.float32(SCALE)


def reduction(world, name, source):
    """(x, reduce): a buffer of what one of ours adds up, filled by the caller, and the sum over the ranks in place."""
    import cupy

    from stage2_cuda.cuda_backend import dtype_of
    from stage2_cuda.kernels.codecs import FusedCodec

    kind, algorithm, codec = OURS[name]
    x = cupy.empty(source.shape, dtype_of(kind))
    compressed = codec and Compressed(FusedCodec(codec, cupy), x, world, cupy)

    def reduce():
        world.use_collectives(algorithm)
        if compressed:
            compressed.reduce_start(slice(0, x.size)).wait()
        else:
            world.all_reduce(x, out=x)

    return x, reduce


def turn_of(world, name, source, repeats, torch_sum):
    """A function that fills the buffer anew and returns the seconds of one of many all-reduces; 0 while it warms up."""
    if name == TORCH:
        return torch_turn(world, source, repeats, torch_sum)
    if name == STAGED:
        return staged_turn(world, source)
    from cupy import cuda

    from stage2_cuda.runtime.cuda_graph import RecordedStep

    x, reduce = reduction(world, name, source)

    def sums():
        for _ in range(repeats):
            reduce()
        return ()

    step = RecordedStep(sums, lambda: None)

    def turn():
        x[...] = source.astype(x.dtype)
        cuda.runtime.deviceSynchronize()
        world.barrier()
        begin, end = cuda.Event(), cuda.Event()
        step()  # leaves the ranks in step
        if step.graph is None or step.calls == 2:
            cuda.runtime.deviceSynchronize()
            return 0.0
        begin.record(step.stream)
        step.graph.launch(step.stream)
        end.record(step.stream)
        end.synchronize()
        return cuda.get_elapsed_time(begin, end) / 1e3 / repeats

    return turn


def torch_turn(world, source, repeats, torch_sum):
    """The same of PyTorch's, one call after the other."""
    import torch

    x = source.copy()

    def turn():
        x[...] = source
        torch.cuda.synchronize()
        world.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(2 * repeats):  # the first half leaves the ranks in step
            if number == repeats:
                begin.record()
            torch_sum(x)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    return turn


def staged_turn(world, source):
    """The same through the host, once: it waits there, so it is in no graph, and the host's clock is good for it."""
    from cupy import cuda

    x = source.copy()

    def turn():
        x[...] = source
        cuda.runtime.deviceSynchronize()
        world.barrier()
        started = time.perf_counter()
        staged(world).all_reduce(x, out=x)
        return time.perf_counter() - started

    return turn


@functools.cache
def staged(world):
    """The transport `mpi` of these ranks, with its pinned memory."""
    from stage3_mpi_cuda.staged_collectives import StagedCollectives

    return StagedCollectives(world.host, world.gpu)


def error_of(world, name, torch_sum):
    """norm(sum - exact) / norm(exact) of one sum over the ranks, the exact one in float64."""
    import cupy

    source = source_of(world, ACCURATE // 4)
    exact = world.all_gather(source.get()[None]).astype(np.float64).sum(0)
    if name in OURS:
        x, reduce = reduction(world, name, source)
    else:
        x, way = source.copy(), torch_sum if name == TORCH else lambda x: staged(world).all_reduce(x, out=x)
        reduce = functools.partial(way, x)
    x[...] = source.astype(x.dtype)
    cupy.cuda.runtime.deviceSynchronize()
    reduce()
    cupy.cuda.runtime.deviceSynchronize()
    return float(np.linalg.norm(x.astype(np.float32).get() - exact) / np.linalg.norm(exact))


# -- on the one that starts them ---------------------------------------------------------------------------------------


def bus_bandwidth(size, seconds, ranks):
    """Bytes a second that each GPU sends in a ring, whatever the algorithm does: nccl-tests' measure."""
    return 2 * (ranks - 1) / ranks * size / seconds


def moved(name, size):
    """Bytes of the array that goes over the wire for a float32 one of `size`."""
    return size // 2 if name.endswith("bf16") else size


def summarise(results, errors, ranks):
    """Add medians, bus bandwidth and ratios within rounds to one job's results; return table rows."""
    torch = {result["bytes"]: result["seconds"] for result in results if result["name"] == TORCH}
    rows = []
    for result in results:
        name, size = result["name"], result["bytes"]
        result["ranks"], result["median"] = ranks, statistics.median(result["seconds"])
        result["times_as_fast_as_torch"] = paired_ratio(torch[size], result["seconds"])
        result["bus_bandwidth"] = bus_bandwidth(moved(name, size), result["median"], ranks)
        rows.append(
            {
                f"{ranks} GPUs": name,
                "MB of fp32": f"{1e-6 * size:,.0f}",
                "us": f"{1e6 * result['median']:.1f}",
                "best": f"{1e6 * min(result['seconds']):.1f}",
                "GB/s on the bus": f"{1e-9 * result['bus_bandwidth']:.1f}",
                "x torch": f"{result['times_as_fast_as_torch']:.3f}",
                "relative error": f"{errors[name]:.1e}",
            }
        )
    return rows


def fit(results):
    """{name: [alpha seconds, beta seconds a byte]} of t = alpha + beta n, n the bytes of the array."""
    of_name = {name: [result for result in results if result["name"] == name] for name in FIT}
    return {name: line([r["bytes"] for r in found], [r["median"] for r in found]) for name, found in of_name.items()}


def gradient_bytes(preset):
    return 4 * Arena(parameter_shapes(PRESETS[preset])).size


def verdicts(results, ranks):
    """One sentence for each large size."""
    for result in results:
        if result["name"] == FIT[0] and result["bytes"] >= 10**8:
            ratio = result["times_as_fast_as_torch"]
            met = "reached" if ratio >= AT_LEAST else "MISSED"
            size = f"{1e-6 * result['bytes']:,.0f} MB"
            yield f"{ranks} GPUs, {size}: {ratio:.3f} x torch's bandwidth (target {AT_LEAST}: {met})"


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs of each job (default 2 4)")
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the array in fp32 (default 1 MB to 1 GB by 10)")
    add("--preset", choices=PRESETS, default="gpt2", help="whose gradient the size of a bucket is for (default gpt2)")
    add("--rounds", type=int, default=9, help="turns of each all-reduce (default 9)")
    add("--timeout", type=int, default=150, help="seconds that one job may take (default 150)")
    add_saving(add, "collectives")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    results, fits, everyones_errors, buckets = [], {}, {}, {}
    for ranks in args.ranks:
        progress(f"{ranks} GPUs")
        with tempfile.TemporaryDirectory() as folder:
            job = args.sizes, args.rounds, str(Path(folder, "meeting"))
            errors, of_ranks = launch(ranks, "all_reduces", *job, timeout=args.timeout, benchmark=BENCHMARK)
        progress("")
        print_table(summarise(of_ranks, errors, ranks))
        print("\n" + "\n".join(verdicts(of_ranks, ranks)))
        fits[ranks], everyones_errors[ranks] = fit(of_ranks), errors
        for name, (alpha, beta) in fits[ranks].items():
            buckets[f"{ranks} GPUs, {name}"] = bucket = best_bucket(alpha, beta, gradient_bytes(args.preset)) / 1e6
            fitted = f"alpha {1e6 * alpha:.1f} us, beta {1e12 * beta:.2f} ps a byte"
            print(f"{ranks} GPUs, {name}: {fitted}; for the gradient of {args.preset} --bucket-mb {bucket:.0f}")
        print(flush=True)
        results += of_ranks
    if not args.no_save:
        found = {"all_reduce": results, "errors": everyones_errors, "alpha_beta": fits, "bucket_mb": buckets}
        save(BENCHMARK, found, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)

"""Does our all-reduce over NCCL reach the bandwidth of PyTorch's, and what do the canonical order and bf16 cost?

Ours are captured in a graph, several in sequence, as in a training step. PyTorch's are called from Python one after
another, as DistributedDataParallel does; the launch time is hidden except for the smallest arrays.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.processes import progress, run_main
from benchmarks.harness.report import add_save_flags, paired_ratio, print_table, save
from benchmarks.ranks.collectives import launch, line_of
from gpt2core.app.presets import PRESETS
from gpt2core.arena import Arena
from gpt2core.model import parameter_shapes
from gpt2core.parallel.bucket_size import best_bucket
from gpt2core.parallel.compression import Compressed

BENCHMARK = "benchmarks.gpus.collectives"
SIZES = [10**k for k in range(6, 10)]  # bytes of a float32 array
TORCH = "torch, fp32"
OURS = {  # name: (dtype of the sum, algorithm, codec)
    "nccl, fp32": ("float32", "nccl", None),
    "canonical, fp32": ("float32", "canonical", None),
    "nccl, bf16": ("bfloat16", "nccl", None),
    "canonical, bf16": ("bfloat16", "canonical", None),
    "--compress bf16": ("float32", "nccl", "bf16"),
}
STAGED = "--transport mpi, fp32"
ALGORITHMS = [TORCH, *OURS, STAGED]
FIT = ["nccl, fp32", "canonical, fp32"]
SCALE = 1e-30  # small numbers, so that repeated in-place sums stay finite
ERROR_BYTES = 10**7  # size of the array whose sum is compared with the sum in float64
MIN_SHARE = 0.97  # required share of PyTorch's bandwidth


# -- on the ranks ------------------------------------------------------------------------------------------------------


def all_reduces(host, sizes, rounds, store_file):
    """({algorithm: relative error}, [{name, bytes, seconds}]); seconds: of the slowest rank in each round."""
    import torch.distributed as dist

    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world = NcclCommunicator(host)
    world.use_transport("nccl")
    torch_sum = open_torch(world, store_file)
    errors = {name: error_of(world, name, torch_sum) for name in ALGORITHMS}
    results = []
    for size in sizes:
        repeats = max(4, min(20, 2 * 10**8 // size))
        source = source_of(world, size // 4)
        timed = {name: timed_sums(world, name, source, repeats, torch_sum) for name in ALGORITHMS}
        by_name = {name: {"name": name, "bytes": size, "seconds": []} for name in ALGORITHMS}
        for index in range(-2, rounds):  # two warm-up rounds: the first runs, the second captures the graph
            first = index % len(ALGORITHMS)
            for name in ALGORITHMS[first:] + ALGORITHMS[:first]:
                seconds = max(world.all_gather_object(timed[name]()))
                if index >= 0:
                    by_name[name]["seconds"].append(seconds)
        results += by_name.values()
        timed.clear()  # frees graphs and buffers before the next, larger size
    dist.destroy_process_group()
    return errors, results


def open_torch(world, store_file):
    """Return all_reduce(array), which sums a CuPy array in place with PyTorch's NCCL on PyTorch's current stream."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(world.gpu.device_id)
    dist.init_process_group("nccl", init_method=f"file://{store_file}", rank=world.rank, world_size=world.size)
    return lambda array: dist.all_reduce(torch.as_tensor(array, device="cuda"))


def source_of(world, n):
    """(n) random numbers of this rank, on the GPU."""
    import cupy

    cupy.random.seed(world.rank)
    return cupy.random.standard_normal(n, np.float32) * np.float32(SCALE)


def reduction(world, name, source):
    """(x, reduce): a buffer that the caller fills, and a function that sums it over the ranks in place."""
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


def timed_sums(world, name, source, repeats, torch_sum):
    """A function that refills the buffer and returns the seconds of one of `repeats` all-reduces; 0 during warm-up."""
    if name == TORCH:
        return torch_sums(world, source, repeats, torch_sum)
    if name == STAGED:
        return staged_sum(world, source)
    from cupy import cuda

    from stage2_cuda.runtime.cuda_graph import CapturedStep

    x, reduce = reduction(world, name, source)

    def sums():
        for _ in range(repeats):
            reduce()
        return ()

    step = CapturedStep(sums)

    def timed():
        x[...] = source.astype(x.dtype)
        cuda.runtime.deviceSynchronize()
        world.barrier()
        begin, end = cuda.Event(), cuda.Event()
        step()  # synchronises the ranks
        if step.graph is None or step.calls == 2:
            cuda.runtime.deviceSynchronize()
            return 0.0
        begin.record(step.stream)
        step.graph.launch(step.stream)
        end.record(step.stream)
        end.synchronize()
        return cuda.get_elapsed_time(begin, end) / 1e3 / repeats

    return timed


def torch_sums(world, source, repeats, torch_sum):
    """timed_sums() of PyTorch's all-reduce, called one after another."""
    import torch

    x = source.copy()

    def timed():
        x[...] = source
        torch.cuda.synchronize()
        world.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(2 * repeats):  # the first half synchronises the ranks
            if number == repeats:
                begin.record()
            torch_sum(x)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    return timed


def staged_sum(world, source):
    """timed_sums() of one all-reduce through the host, with the host's clock and no graph, because it waits there."""
    from cupy import cuda

    x = source.copy()

    def timed():
        x[...] = source
        cuda.runtime.deviceSynchronize()
        world.barrier()
        started = time.perf_counter()
        staged(world).all_reduce(x, out=x)
        return time.perf_counter() - started

    return timed


@functools.cache
def staged(world):
    """The collectives of --transport mpi, with their pinned memory."""
    from stage3_mpi_cuda.staged_collectives import StagedCollectives

    return StagedCollectives(world.host, world.gpu)


def error_of(world, name, torch_sum):
    """norm(sum - exact) / norm(exact) of one sum over the ranks; exact is computed in float64."""
    import cupy

    source = source_of(world, ERROR_BYTES // 4)
    exact = world.all_gather(source.get()[None]).astype(np.float64).sum(0)
    if name in OURS:
        x, reduce = reduction(world, name, source)
    else:
        x, function = source.copy(), torch_sum if name == TORCH else lambda x: staged(world).all_reduce(x, out=x)
        reduce = functools.partial(function, x)
    x[...] = source.astype(x.dtype)
    cupy.cuda.runtime.deviceSynchronize()
    reduce()
    cupy.cuda.runtime.deviceSynchronize()
    return float(np.linalg.norm(x.astype(np.float32).get() - exact) / np.linalg.norm(exact))


# -- in the parent process ---------------------------------------------------------------------------------------------


def bus_bandwidth(size, seconds, ranks):
    """Bytes per second that each GPU would send in a ring: the bus bandwidth of nccl-tests."""
    return 2 * (ranks - 1) / ranks * size / seconds


def sent(name, size):
    """Bytes that are sent for a float32 array of `size` bytes."""
    return size // 2 if name.endswith("bf16") else size


def summarise(results, errors, ranks):
    """Add the bus bandwidth and the ratios of each round to one job's results; return the table's rows."""
    torch = {result["bytes"]: result["seconds"] for result in results if result["name"] == TORCH}
    rows = []
    for result in results:
        name, size = result["name"], result["bytes"]
        result["ranks"], median = ranks, statistics.median(result["seconds"])
        result["times_as_fast_as_torch"] = paired_ratio(torch[size], result["seconds"])
        result["bus_bandwidth"] = bus_bandwidth(sent(name, size), median, ranks)
        rows.append(
            {
                f"{ranks} GPUs": name,
                "MB of fp32": f"{1e-6 * size:,.0f}",
                "us": f"{1e6 * median:.1f}",
                "best": f"{1e6 * min(result['seconds']):.1f}",
                "bus GB/s": f"{1e-9 * result['bus_bandwidth']:.1f}",
                "x torch": f"{result['times_as_fast_as_torch']['median']:.3f}",
                "relative error": f"{errors[name]:.1e}",
            }
        )
    return rows


def fit(results):
    """{name: [alpha seconds, beta seconds per byte]} of t = alpha + beta n, n the bytes of the array."""
    return {name: line_of([result for result in results if result["name"] == name]) for name in FIT}


def gradient_bytes(preset):
    """The size of a preset's gradient buffer."""
    return 4 * Arena(parameter_shapes(PRESETS[preset])).size


def verdicts(results, ranks):
    """Yield one sentence for each size of 100 MB or more."""
    for result in results:
        if result["name"] == FIT[0] and result["bytes"] >= 10**8:
            ratio = result["times_as_fast_as_torch"]["median"]
            met = "reached" if ratio >= MIN_SHARE else "MISSED"
            size = f"{1e-6 * result['bytes']:,.0f} MB"
            yield f"{ranks} GPUs, {size}: {ratio:.3f} x torch's bandwidth (target {MIN_SHARE}: {met})"


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs of each job (default 2 4)")
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the fp32 array (default 1 MB, 10 MB, ..., 1 GB)")
    add("--preset", choices=PRESETS, default="gpt2", help="compute --bucket-mb for this model (default gpt2)")
    add("--rounds", type=int, default=9, help="number of rounds; each round times every program (default 9)")
    add("--timeout", type=int, default=150, help="seconds that one job may take (default 150)")
    add_save_flags(add, "collectives")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    results, fits, errors, buckets = [], {}, {}, {}
    for ranks in args.ranks:
        progress(f"{ranks} GPUs")
        with tempfile.TemporaryDirectory() as folder:
            job = args.sizes, args.rounds, str(Path(folder, "store"))
            errors[ranks], of_ranks = launch(ranks, "all_reduces", *job, timeout=args.timeout, benchmark=BENCHMARK)
        progress("")
        print_table(summarise(of_ranks, errors[ranks], ranks))
        print("\n" + "\n".join(verdicts(of_ranks, ranks)))
        fits[ranks] = fit(of_ranks)
        for name, (alpha, beta) in fits[ranks].items():
            buckets[f"{ranks} GPUs, {name}"] = bucket = best_bucket(alpha, beta, gradient_bytes(args.preset)) / 1e6
            fitted = f"alpha {1e6 * alpha:.1f} us, beta {1e12 * beta:.2f} ps per byte"
            print(f"{ranks} GPUs, {name}: {fitted}; for the gradient of {args.preset} --bucket-mb {bucket:.0f}")
        print(flush=True)
        results += of_ranks
    found = {"all_reduce": results, "errors": errors, "alpha_beta": fits, "bucket_mb": buckets}
    save(BENCHMARK, found, args, args.save_as)


if __name__ == "__main__":
    run_main(main)

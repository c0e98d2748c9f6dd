"""Does our all-reduce over NCCL reach the bandwidth of PyTorch's, and how fast is it in canonical order and in bf16?

Several of our all-reduces are captured in one CUDA graph, as in a training step. PyTorch's all-reduces are launched
from Python one after another, as DistributedDataParallel does. These launches matter only for the smallest arrays: for
larger arrays a launch takes less time than an all-reduce.

    python -m benchmarks.gpus.collectives                            # on two and four GPUs
    python -m benchmarks.gpus.collectives --ranks 2 --sizes 1000000  # one size on two GPUs
"""

import functools
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.harness.report import check_gpus, paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved, mean_seconds
from benchmarks.harness.script import benchmark
from benchmarks.ranks.collectives import fit, launch
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.parallel.data.bucket_size import best_bucket
from gpt2core.parallel.data.compression import Compressed
from gpt2core.presets import PRESETS

SIZES = [10**k for k in range(6, 10)]  # bytes of a float32 array
TORCH = "torch, fp32"
OURS = {  # name: (dtype of the sum, algorithm for use_collectives(), codec of --compress)
    "nccl, fp32": ("float32", "nccl", None),
    "canonical, fp32": ("float32", "canonical", None),
    "nccl, bf16": ("bfloat16", "nccl", None),
    "canonical, bf16": ("bfloat16", "canonical", None),
    "--compress bf16": ("float32", "nccl", "bf16"),
}
STAGED = "--transport mpi, fp32"  # copies the array to the host, where MPI adds it, and back
ALGORITHMS = [TORCH, *OURS, STAGED]
FITTED = ["nccl, fp32", "canonical, fp32"]  # the algorithms whose alpha and beta are fitted
SCALE = 1e-30  # factor that makes the numbers so small that repeated in-place sums stay finite
MODEL = "gpt2"  # for which the best --bucket-mb is computed
ERROR_BYTES = 10**7  # size of the array for which the error of the sum is computed


# -- on the ranks ------------------------------------------------------------------------------------------------------


def all_reduces(host, sizes, rounds, store_file):
    """Measure all algorithms. Returns ({algorithm: relative error}, [{name, bytes, seconds}]).

    name: the algorithm. seconds: one number per round, the time of the slowest rank. store_file: the path of a file
    through which PyTorch's processes find each other.
    """
    import torch
    import torch.distributed as dist

    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator
    from stage3_mpi_cuda.staged_collectives import StagedCollectives

    world = NcclCommunicator(host)
    world.use_transport("nccl")
    torch.cuda.set_device(world.gpu.device_id)
    dist.init_process_group("nccl", init_method=f"file://{store_file}", rank=world.rank, world_size=world.size)
    staged = StagedCollectives(world.mpi_group, world.gpu)  # its pinned memory is reused
    others = {  # in-place sums of a CuPy array
        TORCH: lambda array: dist.all_reduce(torch.as_tensor(array, device="cuda")),
        STAGED: lambda array: staged.all_reduce(array, out=array),
    }
    errors = {name: error_of(world, name, others) for name in ALGORITHMS}
    results = []
    for size in sizes:
        repeats = max(4, min(20, 2 * 10**8 // size))
        source = random_array(world, size // 4)
        timed = {name: timed_sums(world, name, source, repeats, others) for name in ALGORITHMS}
        # two rounds more for warm-up: one without graph, one that captures it
        for name, seconds in interleaved(timed, 2 + rounds).items():
            results.append({"name": name, "bytes": size, "seconds": seconds[2:]})
        timed.clear()  # frees graphs and buffers before the next, larger size
    dist.destroy_process_group()
    return errors, results


def random_array(world, n):
    """n random float32 numbers on the GPU, different on each rank."""
    import cupy

    cupy.random.seed(world.rank)
    return cupy.random.standard_normal(n, np.float32) * np.float32(SCALE)


def reduction(world, name, source, others):
    """Return a buffer x and a function reduce(), which sums x over the ranks in place by the algorithm `name`.

    x has the shape of `source`; the caller fills x. others: {name: in-place sum} of algorithms that are not in OURS.
    """
    if name in others:
        x = source.copy()
        return x, functools.partial(others[name], x)
    import cupy

    from stage2_cuda.cuda_backend import dtype_of
    from stage2_cuda.kernels.codecs import FusedCodec

    dtype, algorithm, codec = OURS[name]
    x = cupy.empty(source.shape, dtype_of(dtype))
    compressed = codec and Compressed(FusedCodec(codec, cupy), x, world, cupy)

    def reduce():
        world.use_collectives(algorithm)
        if compressed:
            compressed.reduce_start(slice(0, x.size)).wait()
        else:
            world.all_reduce(x, out=x)

    return x, reduce


def timed_sums(world, name, source, repeats, others):
    """A function that runs `repeats` all-reduces of `source` and returns the seconds of one, on the slowest rank.

    The first two calls are for warm-up: their results are not used.
    """
    import cupy

    x, reduce = reduction(world, name, source, others)
    seconds = {TORCH: launched_seconds, STAGED: host_seconds}.get(name, captured_seconds)(reduce, repeats)

    def timed():
        x[...] = source.astype(x.dtype)
        cupy.cuda.runtime.deviceSynchronize()
        world.barrier()
        return max(world.all_gather_object(seconds()))

    return timed


def captured_seconds(reduce, repeats):
    """A function that replays a graph of `repeats` all-reduces; its first two calls capture the graph and return 0."""
    import cupy

    from stage2_cuda.runtime.cuda_graph import CapturedStep
    from stage2_cuda.tuning.tuner import milliseconds

    def sums():
        for _ in range(repeats):
            reduce()
        return ()

    step = CapturedStep(sums, collectives=True)

    def seconds():
        step()  # not timed: it makes all ranks start the timed replay together
        if step.graph is None or step.calls == 2:  # one of the first two calls: there was no graph before it
            cupy.cuda.runtime.deviceSynchronize()
            return 0.0
        return milliseconds(cupy, step.stream, lambda: step.graph.launch(step.stream)) / 1e3 / repeats

    return seconds


def launched_seconds(reduce, repeats):
    """A function that launches PyTorch's all-reduces without a graph."""
    from benchmarks.peers.torch_graphs import milliseconds

    def sums():
        for _ in range(repeats):
            reduce()

    def seconds():
        sums()  # not timed: it makes all ranks start together
        return milliseconds(sums) / 1e3 / repeats

    return seconds


def host_seconds(reduce, repeats):
    """A function that times one all-reduce by the host's clock, because the host waits for the GPU in it."""
    return lambda: mean_seconds(reduce, 1)


def error_of(world, name, others):
    """The relative error of one algorithm: norm(sum - exact) / norm(exact); exact is the sum in float64."""
    import cupy

    source = random_array(world, ERROR_BYTES // 4)
    exact = world.all_gather(source.get()[None]).astype(np.float64).sum(0)
    x, reduce = reduction(world, name, source, others)
    x[...] = source.astype(x.dtype)
    cupy.cuda.runtime.deviceSynchronize()
    reduce()
    cupy.cuda.runtime.deviceSynchronize()
    return float(np.linalg.norm(x.astype(np.float32).get() - exact) / np.linalg.norm(exact))


# -- in the parent process ---------------------------------------------------------------------------------------------


def summarise(results, ranks, errors):
    """Add four fields to the results of one job: ranks, bus_bandwidth, times_as_fast_as_torch, error (of 10 MB).

    bus_bandwidth, as in nccl-tests: bytes per second that each GPU would send in a ring all-reduce.
    """
    torch_seconds = {result["bytes"]: result["seconds"] for result in results if result["name"] == TORCH}
    for result in results:
        sent = result["bytes"] // (2 if result["name"].endswith("bf16") else 1)  # the array as it is encoded
        result["ranks"], median = ranks, statistics.median(result["seconds"])
        result["error"] = errors[result["name"]]
        result["times_as_fast_as_torch"] = paired_ratio(torch_seconds[result["bytes"]], result["seconds"])
        result["bus_bandwidth"] = 2 * (ranks - 1) / ranks * sent / median


def fit_buckets(results, ranks):
    """The fits of fit() to the algorithms FITTED, with "ranks" and "bucket_mb", the best --bucket-mb for MODEL."""
    gradients = 4 * Arena(parameter_shapes(PRESETS[MODEL])).size  # bytes
    fits = fit([result for result in results if result["name"] in FITTED], "name")
    for each in fits:
        each |= {"ranks": ranks, "bucket_mb": best_bucket(each["alpha"], each["beta"], gradients) / 1e6}
    return fits


@benchmark(
    common=dict(ranks=[2, 4], rounds=9, timeout=150),
    sizes=dict(type=int, nargs="+", default=SIZES, help="bytes of the fp32 array (default 1 MB, 10 MB, ..., 1 GB)"),
)
def main(args):
    check_gpus(max(args.ranks))
    results, fits = [], []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            options = args.sizes, args.rounds, str(Path(folder, "store"))
            job = launch(ranks, "all_reduces", *options, timeout=args.timeout, benchmark=args.benchmark)
        errors, of_ranks = job
        summarise(of_ranks, ranks, errors)
        results, fits = results + of_ranks, fits + fit_buckets(of_ranks, ranks)
        # after each job, so that an interrupted run keeps its finished ones
        save({"all_reduce": results, "fits": fits}, args)
    TABLES["gpus-collectives"].print({"all_reduce": results, "fits": fits})

"""Is `--zero 3` faster than PyTorch's fully_shard on several GPUs, and does it need as little memory?

Every program is a job of its own on all GPUs. In PyTorch, fully_shard is applied to each compiled block and to the
root. All programs begin with the same parameters and train on the same sequences in the same order. The losses of their
first steps must agree; otherwise they do not train the same model, and the exit code is 1.

"GPU memory" is what nvidia-smi shows as used after the first steps, at most, without the CUDA context and without the
memory of the other jobs. It includes NCCL's buffers. "held in pools" is the peak of CuPy's or PyTorch's pools:
peak_memory_bytes in the log of training, max_memory_reserved in PyTorch. "tensors" is PyTorch's max_memory_allocated.

    python -m benchmarks.gpus.sharding  # gpt2-xl on two GPUs
    python -m benchmarks.gpus.sharding --zero 3 --recompute none --rounds 3  # only the first comparison
    python -m benchmarks.gpus.sharding --preset nano --precision fp32 --rounds 1  # a trial, with TRITON_INTERPRET=1
"""

import functools
from dataclasses import replace

import numpy as np

from benchmarks.gpus.scaling import (
    CORPUS,
    add_speed,
    flags_of,
    gpus,
    our_job,
    round_function,
    seq_len_of,
    variant_name,
)
from benchmarks.harness.report import nvidia_smi, save_each
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED, measure_variants
from benchmarks.harness.script import benchmark
from gpt2core.architecture import parameter_shapes
from gpt2core.data import Windows
from gpt2core.memory.gpu import MARGIN, training_memory
from gpt2core.parallel.config import RECOMPUTE, ZERO, ParallelConfig
from gpt2core.presets import PRESETS
from stage2_cuda.runtime import triton_launch

MAX_DIFFERENCE = 2**-8  # relative, of the first losses: the rounding error of one number in bf16
PERIOD = 1_048_583  # a prime, so that the rows of a matrix of repeated numbers differ


def prepare(module, world, preset, seq_len, variants, **options):
    """As scaling.prepare(); module: benchmarks.gpus.ours or benchmarks.peers.torch_fsdp_cuda."""
    config, rng = PRESETS[preset], np.random.default_rng(SEED)
    # Small numbers are frequent, so that the loss decreases: it shows within a few steps whether an update is wrong.
    tokens = (config.vocab_size * rng.random(CORPUS) ** 4).astype(np.int64)
    options["initial"] = functools.partial(initial_parameters, config)
    functions = module.make_variants(config, world, Windows(tokens, seq_len), variants, **options)
    used_bytes = functools.partial(used_bytes_of, world.rank)
    return round_function({name: observed(train, used_bytes) for name, train in functions.items()}, world)


def used_bytes_of(gpu):
    """The bytes of a GPU that all programs use; 0 without a GPU."""
    gpus = nvidia_smi("memory.used")
    return int(gpus[gpu][0]) << 20 if gpus else 0


def initial_parameters(config):
    """Yield (name, float32 array) of each parameter: matrices have the standard deviation 0.02, biases are 0.

    All matrices repeat the same PERIOD random numbers: to draw 1.5e9 numbers would take half a minute in each job.
    """
    numbers = np.random.default_rng(SEED).standard_normal(PERIOD, np.float32) * np.float32(0.02)
    for index, (name, shape) in enumerate(parameter_shapes(config)):
        if len(shape) == 1:
            yield name, np.full(shape, not name.endswith("bias"), np.float32)
        else:
            yield name, np.resize(np.roll(numbers, 7919 * index), shape)


def observed(train, used_bytes):
    """train(steps) whose measurements also have "first_losses" and "driver_bytes", from its first call.

    These are the losses of the steps of the first call, and the largest number of bytes that the GPU uses after one of
    them, minus those before the first call. used_bytes(): the bytes in use.
    """
    seen = {}

    def observed_train(steps):
        if seen:
            return train(steps) | seen
        before, losses, used = used_bytes(), [], []
        for _ in range(steps):
            measured = train(1)
            losses.append(measured["loss"])
            used.append(used_bytes() - before)
        seen.update(first_losses=losses, driver_bytes=max(used))
        return measured | seen

    return observed_train


def variants(ranks, batch_size, zeros, recompute, bucket_mb):
    """({name: options} of our programs, {name: options} of PyTorch's) of one table.

    batch_size: sequences of all ranks together. zeros: values of --zero. recompute: "none" or "block".
    """
    sizes = {"ranks": ranks, "batch_size": batch_size}
    flags = {} if recompute == "none" else {"recompute": recompute}
    ours = {}
    for zero in zeros:
        # ZeRO-2 and ZeRO-3 send each unit by itself; without them, buckets are sent during the backward pass
        options = {"dp": "flat" if zero > 1 else "bucket", "zero": zero, **flags}
        ours[variant_name(ranks, options)] = dict(sizes, bucket_mb=bucket_mb, **options)
    name = f"fully_shard, {gpus(ranks)}" + ", checkpointed blocks" * bool(flags)
    return ours, {name: dict(sizes, **flags)}


def fitting(args, zeros, recompute, available):
    """The values of `zeros`, as many from the first on as fit in GPU memory beside the others and PyTorch's program.

    available: bytes of a GPU. PyTorch's program is assumed to need as much memory as --zero 3.
    """
    sizes = args.batch_size, seq_len_of(args, args.preset), args.precision

    def predicted(zero):
        parallel = ParallelConfig(zero=zero, recompute=recompute)
        terms = training_memory(PRESETS[args.preset], *sizes, ranks=args.ranks, parallel=parallel)
        return MARGIN * (sum(terms.values()) - terms["gathered to save"])

    left, found = available - predicted(3), []
    for zero in zeros:
        left -= predicted(zero)
        if left < 0 and found:
            print(f"--zero {zero} --recompute {recompute}: omitted, because the jobs would not fit in the GPU's memory")
            break
        found.append(zero)
    return found


def specs_of(args, ours, peers):
    """The ProcessSpec of each job; a job has one program. Without --no-torch the last one is PyTorch's."""
    specs = [our_job(args, args.preset, {name: options}) for name, options in ours.items()]
    device = "cpu" if triton_launch.interpreted() else "cuda"
    for name, options in {} if args.no_torch else peers.items():
        job = our_job(args, args.preset, {name: options})
        options = job.options | {"compiled": not args.no_compile, "device": device}
        module = "benchmarks.peers.torch_fsdp_cuda"
        specs.append(replace(job, name="fully_shard", module=module, options=options))
    return specs


def summarise(results):
    """Do add_speed() for each result of one table, and compare it with PyTorch's, if there is one.

    memory_ratio: its driver_bytes / PyTorch's; None without a GPU or PyTorch.
    loss_difference, only with PyTorch: the largest relative difference of the first losses; NaN if a loss is NaN.
    """
    peer = next((result for result in results if result["side"] != "ours"), None)
    for result in results:
        add_speed(result, peer)
        known = peer and peer["driver_bytes"]
        result["memory_ratio"] = result["driver_bytes"] / peer["driver_bytes"] if known else None
        if peer:
            differences = np.abs(np.divide(result["first_losses"], peer["first_losses"]) - 1)
            result["loss_difference"] = float(np.max(differences))


def agree(results):
    """Whether the first losses of all programs of a table agree; False if one is not a number."""
    return all(
        result["loss_difference"] <= MAX_DIFFERENCE
        for result in results
        if result["side"] == "ours" and "loss_difference" in result
    )


@benchmark(
    common=flags_of(2, preset="gpt2-xl", no_torch=False, no_compile=False),
    zero=dict(type=int, choices=ZERO, nargs="+", default=[3, 2, 0], help="our programs that fit (default 3 2 0)"),
    recompute=dict(choices=RECOMPUTE, nargs="+", default=list(RECOMPUTE), help="one table each (default none block)"),
)
def main(args):
    memory = nvidia_smi("memory.total")

    def measure(recompute):
        zeros = fitting(args, args.zero, recompute, int(memory[0][0]) << 20) if memory else args.zero
        programs = variants(args.ranks, args.ranks * args.batch_size, zeros, recompute, args.bucket_mb)
        results = measure_variants(args, specs_of(args, *programs))
        size = f"{args.batch_size} x {seq_len_of(args, args.preset)} per GPU"
        print(f"\n{args.preset}, {args.precision}, {size}, --recompute {recompute}")
        return results

    results = save_each(args, map(measure, args.recompute), summarise, TABLES["gpus-sharding"].print)
    if agree(results):
        return 0
    print(f"the first losses of a program differ from PyTorch's by more than {MAX_DIFFERENCE:.1e}")
    return 1

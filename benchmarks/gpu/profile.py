"""How long does each kernel of one training step on the GPU run, and how long is the GPU idle?

CUPTI records every kernel of the process. The training step runs on one stream, on which kernels run in launch order.
So the n-th kernel of this project that Python launches is the n-th one that CUPTI records, and so are the products.
This matching gives the source file of each kernel and the shape of each product.

    python -m benchmarks.gpu.profile                                  # gpt2 in bf16
    python -m benchmarks.gpu.profile --preset paper --precision fp32  # another model
"""

import functools
import math
import re
import statistics
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED, median_seconds, random_batch
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from gpt2core.errors import ConfigError
from gpt2core.presets import PRESETS
from stage2_cuda.runtime.cupti import open_cupti, recorded, short
from stage2_cuda.tuning.tuner import milliseconds

# Kernel names of matrix products. cublasLt adds a second kernel to a split-K product, which sums the parts.
PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|xmma", re.IGNORECASE)
SPLIT_K_REDUCTION = re.compile(r"splitk_?reduce", re.IGNORECASE)
# Number of products (T, D) x (D, T) that each attention kernel computes per head; each counts as T T D operations,
# because half of the scores are masked.
ATTENTION_PRODUCTS = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4, "both_kernel": 7}
# Files whose kernels read and write each array once, so their bytes are the sizes of their arguments.
ONE_PASS = "layernorm", "gelu", "column_sums", "cross_entropy", "adamw", "cast"
# Titles of the kernels in CUDA C, which are those of the Triton kernels that they replace on some GPUs
CUDA = {"layernorm_backward": "layernorm: backward", "cross_entropy_rows": "cross_entropy: forward_backward"}
ROWS = 30  # printed of a table
UPDATED = {"adamw_kernel": ("p_ptr", "m_ptr", "v_ptr")}  # arguments that are read and written: they count twice
# The largest rates measured on an H200: TFLOP/s of bf16 products of random numbers, TB/s of a copy.
CEILINGS = {"tflops": 766, "tbps": 4.26}
GROUPS = "attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding"
KERNELS = Table("", """
    kernel = `{title}` | calls = {calls:g} | ms = {ms:.3f} | share of time = {share:percent}
    TFLOP/s = {row.tflops:.0f} | TB/s = {row.tbps:.2f} | share of the limit = {row.limit:percent 0}""")  # fmt: skip


class Launch(NamedTuple):
    """One launch by Python, of a kernel of this project or of a product."""

    kernel: str | None  # the name of the kernel; None for a product of cublasLt
    title: str  # in the tables
    flops: int = 0  # floating-point operations; 0 if they are not counted
    bytes: int = 0  # bytes that are read and written; 0 if they are not counted


def launches_of(function, backend):
    """Call function(); return [Launch] of the kernels and products that it launches, in launch order.

    If a captured step compiles its kernels ahead, it calls its function once more; those calls launch nothing.
    """
    from stage2_cuda.runtime import cuda_launch, triton_launch

    launches, gpu, gemm = [], triton_launch.launcher(), backend.products.gemm
    launch, launch_cuda, matmul = gpu.launch, cuda_launch.launch, gemm.matmul

    def record_launch(kernel, grid, arguments, options):
        (*_, room, module), name = kernel.fn.__module__.split("."), kernel.__name__
        if module.startswith("hopper_"):  # the file has the name of the plain kernel
            name = f"{module.removeprefix('hopper_')}_kernel"
        module = room if room == "attention" else module  # one group of rows
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        work, title = work_of(module, name, named, options), f"{module}: {name.removesuffix('_kernel')}"
        if module == "gluon_gelu":
            title = f"product ({named['M']}, {named['K']}) ({named['K']}, {named['N']})"
            title += " and gradient of GELU" if options["BACKWARD"] else " and GELU"
        if not gpu.only_compiles:
            launches.append(Launch(kernel.__name__, title, **work))
        return launch(kernel, grid, arguments, options)

    def record_cuda(source, name, blocks, threads, *arguments, **options):
        sizes = sum(value.nbytes for value in arguments if hasattr(value, "nbytes"))
        if not gpu.only_compiles:
            launches.append(Launch(name, CUDA[name], bytes=sizes))
        return launch_cuda(source, name, blocks, threads, *arguments, **options)

    def record_matmul(out, a, b, **options):
        terms = a.shape[0 if options.get("trans_a") else 1]  # of the sum that gives one element of the product
        marks = ("'" * bool(options.get(flag)) for flag in ("trans_a", "trans_b"))  # ' marks a transposed matrix
        title = " ".join(f"{matrix.shape}{mark}" for matrix, mark in zip((a, b), marks, strict=True))
        if not gpu.only_compiles:
            launches.append(Launch(None, f"product {title}", 2 * out.size * terms))
        return matmul(out, a, b, **options)

    gpu.launch, cuda_launch.launch, gemm.matmul = record_launch, record_cuda, record_matmul
    try:
        function()
    finally:
        cuda_launch.launch = launch_cuda
        del gpu.launch, gemm.matmul  # restores the methods of the classes
    return launches


def work_of(module, name, arguments, options):
    """{"flops": number} of a kernel that multiplies matrices, {"bytes": number} of a one-pass kernel, else {}.

    module, name: of the kernel. arguments: {parameter: argument}. options: the constants of the kernel.
    """
    if module == "fp16x3" and name == "product_kernel":  # counted as one fp32 product, whatever the number of passes
        return {"flops": 2 * arguments["m"] * arguments["n"] * arguments["k"]}
    if module == "gluon_gelu":
        return {"flops": 2 * arguments["M"] * arguments["N"] * arguments["K"]}
    if module == "attention" and name in ATTENTION_PRODUCTS:
        B, H, T, _ = arguments["q_desc"].shape
        head_size = options["HEAD_DIM"] if "HEAD_DIM" in options else options["D"]  # D: of a Gluon kernel
        return {"flops": ATTENTION_PRODUCTS[name] * B * H * T * T * head_size}
    if module not in ONE_PASS:
        return {}
    updated = [arguments[parameter] for parameter in UPDATED.get(name, ())]
    return {"bytes": sum(value.nbytes for value in [*arguments.values(), *updated] if hasattr(value, "nbytes"))}


def is_product(activity):
    """Whether the activity is a matrix product; the reduction of a split-K product is not one."""
    return bool(PRODUCT.search(activity.name)) and not SPLIT_K_REDUCTION.search(activity.name)


def triton_kernel(name, kernels):
    """The longest name in `kernels` with which `name`, CUPTI's name of a kernel, ends; None if there is none.

    Triton may add a prefix to the name of a kernel.
    """
    return max((kernel for kernel in kernels if re.search(rf"(^|_|\W){kernel}$", name)), key=len, default=None)


def match_launches(activities, launches):
    """[(title, Activity, Launch or None)], and whether all activities of this project are the launches, in order.

    Kernels and products are matched separately, so that an unknown product does not change the rows of the kernels. The
    title of a matched activity is that of its launch; the title of another activity is the name from short().
    """
    names = {launch.kernel for launch in launches if launch.kernel}
    recorded_kernels = [triton_kernel(activity.name, names) for activity in activities]
    own = [n for n, kernel in enumerate(recorded_kernels) if kernel or is_product(activities[n])]
    launch_of, agree, listed = {}, True, []
    for of_products in (False, True):
        found = [n for n in own if (recorded_kernels[n] is None) == of_products]
        launched = [launch for launch in launches if (launch.kernel is None) == of_products]
        if [recorded_kernels[n] for n in found] == [launch.kernel for launch in launched]:
            launch_of |= zip(found, launched, strict=True)
        else:
            agree = False
    for n, activity in enumerate(activities):
        launch = launch_of.get(n)
        listed.append((launch.title if launch else short(activity.name), activity, launch))
    return listed, agree


def idle_share(activities, steps):
    """The share of a step in which no kernel runs.

    A step lasts from the start of its first kernel to the end of its last kernel. Returns the median of the steps; None
    if the activities cannot be divided into `steps` groups of equal size.
    """
    if len(activities) % steps:
        return None
    shares = []
    for of_step in np.split(np.array([(each.start, each.start + each.duration) for each in activities]), steps):
        shares.append(1 - union_length(of_step) / (of_step[:, 1].max() - of_step[0, 0]))
    return statistics.median(shares)


def union_length(intervals):
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(map(tuple, intervals)):
        total, reached = total + max(0.0, end - max(start, reached)), max(end, reached)
    return total


def kernel_rows(listed, steps, precision):
    """One dictionary for each title, the longest time first; "ms" and "calls" are those of one step.

    listed: from match_launches(), of `steps` steps. limit: the share of CEILINGS; that of products is known in bf16.
    """
    microseconds, calls, flops, moved, names = Counter(), Counter(), Counter(), Counter(), defaultdict(set)
    for title, activity, launch in listed:
        microseconds[title] += activity.duration
        calls[title] += 1
        names[title].add(short(activity.name))
        if launch:
            flops[title] += launch.flops
            moved[title] += launch.bytes
    total, rows = sum(microseconds.values()), []
    for title, spent in microseconds.most_common():
        tflops, tbps = (counts[title] / spent / 1e6 for counts in (flops, moved))
        limit = tflops / CEILINGS["tflops"] if precision == "bf16" and tflops else tbps / CEILINGS["tbps"]
        row = {"title": title, "calls": calls[title] / steps, "ms": spent / 1e3 / steps, "share": spent / total}
        row |= {"tflops": tflops or None, "tbps": tbps or None, "limit": limit or None}
        rows.append({**row, "kernels": sorted(names[title])})
    return rows


def group_rows(result):
    """The rows of the table "gpu-profile": the time of each group of kernels, then those of the whole step."""
    groups = defaultdict(list)
    for kernel in result["graph"]:
        groups[group_of(kernel)].append((kernel["ms"], kernel["limit"] or 0.0))
    total = sum(kernel["ms"] for kernel in result["graph"])
    for title, found in sorted(groups.items(), key=lambda group: -sum(ms for ms, _ in group[1])):
        ms = sum(ms for ms, _ in found)
        limit = sum(ms * limit for ms, limit in found) / ms
        yield {"title": title, "ms": ms, "share": ms / total, "limit": limit or None}
    yield {"title": "sum of the kernels", "ms": total}
    yield {"title": "idle, by device clock", "idle": result["idle_share"]}
    yield {"title": "idle, by the kernels' time stamps", "idle": result["idle_share_profiled"]}
    yield {"title": "whole step, graph replayed", "ms": 1e3 * result["graph_step_seconds"]}
    yield {"title": "whole step, launched from Python", "ms": 1e3 * result["eager_step_seconds"]}


def group_of(kernel):
    """The group of a kernel: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = kernel["title"].partition(": ")[0]
    if name.startswith(("product", "splitK")):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def profile(config, args):
    """Measure one configuration; return the dictionary that is written to results/."""
    open_cupti()
    from benchmarks.harness.ours import ProfiledSteps

    step = ProfiledSteps(config, args.batch_size, config.block_size, args.precision)
    rng = np.random.default_rng(SEED)

    def train():
        step(*random_batch(rng, config.vocab_size, args.batch_size, config.block_size))

    step.use_graph(False)
    train()  # compiles kernels and chooses algorithms
    train()
    launches = launches_of(step.compute_update, step.backend)
    eager_seconds = median_seconds(train, args.steps)

    step.use_graph(True)
    for _ in range(3):  # the first step is launched from Python, the second is captured, the third is replayed
        train()
    graph_seconds = median_seconds(train, args.steps)
    graph, stream = step.graph_and_stream
    graph.launch(stream)
    replay = functools.partial(graph.launch, stream)
    device_ms = milliseconds(step.backend.xp, stream, lambda: [replay() for _ in range(args.steps)]) / args.steps
    replays = recorded(step.replay, args.steps)
    if not replays:
        raise ConfigError("CUPTI reported no kernels of the replayed graph; use another driver or PyTorch version")
    listed, agree = match_launches(replays, launches * args.steps)
    busy_seconds = sum(activity.duration for activity in replays) / args.steps / 1e6
    return {
        **{name: getattr(args, name) for name in ("preset", "precision", "batch_size", "steps")},
        **{"seq_len": config.block_size, "vocab_size": config.vocab_size},
        # Whole steps, launched from Python and as a graph: random tokens, sorting, upload, update, reading the loss.
        "eager_step_seconds": eager_seconds,
        "graph_step_seconds": graph_seconds,
        "device_seconds": device_ms / 1e3,  # of one of several back-to-back replays, by device events
        "busy_seconds": busy_seconds,  # the sum of the durations of a replay's kernels, by CUPTI
        "idle_share_profiled": idle_share(replays, args.steps),
        "idle_share": max(0.0, 1 - 1e3 * busy_seconds / device_ms),
        "launches_agree": agree,
        "graph": kernel_rows(listed, args.steps, args.precision),
    }


@benchmark(
    common=dict(preset="gpt2", precision="bf16", steps=5),
    batch_size=dict(type=int, help="sequences per step (default 64; for preset paper: 16)"),
)
def main(args):
    args.batch_size = args.batch_size or (16 if args.preset == "paper" else 64)
    result = profile(PRESETS[args.preset], args)
    result["groups"] = list(group_rows(result))
    KERNELS.print(result["graph"][:ROWS], "a step as a graph")
    products = f"{CEILINGS['tflops']} TFLOP/s in bf16 (not measured in other precisions)"
    print(f"Ceilings of an H200: {products}, {CEILINGS['tbps']} TB/s.")
    TABLES["gpu-profile"].print(result)
    if not result["launches_agree"]:
        print("CUPTI recorded other kernels or products than Python launched; their rows have the names from CUPTI")
    save(result, args)

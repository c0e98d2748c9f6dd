"""How long does each kernel of one training step on the GPU run, and how long is the GPU idle?

CUPTI (part of PyTorch) records every kernel of the process, including those of CuPy, Triton and cublasLt. On one stream
the kernels run in launch order, so the n-th launch made by Python is the n-th kernel recorded by CUPTI. This gives the
source file of each kernel and the shape of each product.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from gpt2core.app.presets import PRESETS
from gpt2core.errors import ConfigError

BENCHMARK = "benchmarks.gpu.profile"
SEED = 20260101
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # Kineto's categories of GPU activities
PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|xmma", re.IGNORECASE)
SECOND_PART = re.compile(r"splitk_?reduce", re.IGNORECASE)  # sums the parts of a split-K product; not a launch of ours
CEILINGS = {"tflops": 766, "tbps": 4.26}  # measured on an H200: bf16 products of random numbers, and a copy
ATTENTION_PRODUCTS = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4, "both_kernel": 7}  # causal, per head
ONE_PASS = "layernorm", "gelu", "column_sums", "cross_entropy", "adamw", "cast"  # files of one-pass kernels
UPDATED = {"adamw_kernel": ("p_ptr", "m_ptr", "v_ptr")}  # arguments that are read and written


class Activity(NamedTuple):
    """One activity of the GPU; start and duration in microseconds."""

    start: float
    duration: float
    name: str


class Launch(NamedTuple):
    """One launch made by Python: CUPTI's name of the kernel (None: a product), our title, its operations or bytes."""

    kernel: str | None
    title: str
    flops: int = 0
    bytes: int = 0


# -- launches made by Python ------------------------------------------------------------------------------------------


def launches_of(function, backend):
    """[Launch] of the Triton kernels and products that one call of function() launches, in order."""
    from stage2_cuda.runtime import triton_launch

    found, gpu, gemm = [], triton_launch.launcher(), backend.products.gemm
    launch, matmul = gpu.launch, gemm.matmul

    def record_launch(kernel, grid, arguments, options):
        module = kernel.fn.__module__.rpartition(".")[2]
        module = re.sub("attention_(forward|backward)", "attention", module)  # one group of rows for both files
        work = work_of(module, kernel.__name__, dict(zip(kernel.arg_names, arguments, strict=False)), options)
        found.append(Launch(kernel.__name__, f"{module}: {kernel.__name__.removesuffix('_kernel')}", **work))
        return launch(kernel, grid, arguments, options)

    def record_matmul(out, a, b, **options):
        summed = a.shape[0 if options.get("trans_a") else 1]
        marks = ("'" * bool(options.get(flag)) for flag in ("trans_a", "trans_b"))
        title = " ".join(f"{matrix.shape}{mark}" for matrix, mark in zip((a, b), marks, strict=True))
        found.append(Launch(None, f"product {title}", 2 * out.size * summed))
        return matmul(out, a, b, **options)

    gpu.launch, gemm.matmul = record_launch, record_matmul
    try:
        function()
    finally:
        del gpu.launch, gemm.matmul  # restores the methods of the classes
    return found


def work_of(module, name, arguments, options):
    """{"flops": operations} of products, {"bytes": bytes moved} of one-pass kernels, else {}."""
    if module == "fp16x3" and name == "product_kernel":  # counted as one fp32 product, whatever the number of passes
        return {"flops": 2 * arguments["m"] * arguments["n"] * arguments["k"]}
    if module == "attention" and name in ATTENTION_PRODUCTS:
        B, H, T, _ = arguments["q_desc"].shape
        return {"flops": ATTENTION_PRODUCTS[name] * B * H * T * T * options["HEAD_DIM"]}
    if module not in ONE_PASS:
        return {}
    written = [arguments[which] for which in UPDATED.get(name, ())]
    return {"bytes": sum(value.nbytes for value in [*arguments.values(), *written] if hasattr(value, "nbytes"))}


# -- activities of the GPU --------------------------------------------------------------------------------------------


def recorded(function, times):
    """[Activity] of `times` calls of function(), in the order of their start."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return sorted(
        Activity(float(event["ts"]), float(event["dur"]), event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    )


def open_cupti():
    """Open CUPTI. It reports a graph's kernels only if it was open when the graph was captured, so call this first."""
    os.environ["TEARDOWN_CUPTI"] = "0"  # Kineto: keep CUPTI open between two profiles
    try:
        import torch
    except ImportError as error:
        raise ConfigError("the profile needs PyTorch's CUPTI; install torch") from error
    if not torch.cuda.is_available():
        raise ConfigError("no GPU was found; the profile needs one")
    one = torch.ones(1, device="cuda")
    return recorded(lambda: one + one, 1)


def short(name):
    """A kernel's name without namespaces, template arguments and parameters, at most 60 characters."""
    if found := re.search(r"cutlass_?\w*_\w+|nvjet_\w+", name):
        return found[0][:60]
    name = re.sub(r"\(anonymous namespace\)", "", name.removeprefix("void "))
    return re.split(r"[<(]", name)[0].rpartition("::")[2].strip()[:60] or name[:60]


def is_product(activity):
    """Whether the activity is a matrix product (without the reduction of a split-K product)."""
    return bool(PRODUCT.search(activity.name)) and not SECOND_PART.search(activity.name)


def triton_kernel(name, kernels):
    """The name in `kernels` that `name` ends with (Triton adds a prefix), or None."""
    return max((kernel for kernel in kernels if re.search(rf"(^|_|\W){kernel}$", name)), key=len, default=None)


def named(activities, launches):
    """([(title, Activity, Launch or None)], {"kernels", "products": whether the activities match the launches}).

    Matching activities have the titles of their launches, others short kernel names.
    """
    kernels = {launch.kernel for launch in launches if launch.kernel}
    triton = [activity for activity in activities if triton_kernel(activity.name, kernels)]
    products = [activity for activity in activities if is_product(activity)]
    triton_launches = [launch for launch in launches if launch.kernel]
    product_launches = [launch for launch in launches if not launch.kernel]
    titles, agree = {}, {}
    same = [triton_kernel(activity.name, kernels) for activity in triton] == [
        launch.kernel for launch in triton_launches
    ]
    for kind, found, launched, equal in (
        ("kernels", triton, triton_launches, same),
        ("products", products, product_launches, len(products) == len(product_launches)),
    ):
        agree[kind] = equal
        if equal:
            titles |= {id(activity): launch for activity, launch in zip(found, launched, strict=True)}
    listed = []
    for activity in activities:
        launch = titles.get(id(activity))
        listed.append((launch.title if launch else short(activity.name), activity, launch))
    return listed, agree


def idle_share(activities, steps):
    """The share of a step, from its first kernel's start to its last one's end, in which no kernel runs; the median.

    None if the activities cannot be divided into steps with equal numbers of kernels.
    """
    if len(activities) % steps:
        return None
    each, shares = len(activities) // steps, []
    for first in range(0, len(activities), each):
        busy = covered = 0.0
        for activity in activities[first : first + each]:  # in the order of their start
            end = activity.start + activity.duration
            busy += max(0.0, end - max(activity.start, covered))
            covered = max(covered, end)
        shares.append(1 - busy / (covered - activities[first].start))
    return statistics.median(shares)


# -- tables -----------------------------------------------------------------------------------------------------------


def kernel_rows(listed, steps):
    """One dictionary for each title, sorted by time: milliseconds and calls of one step."""
    microseconds, calls, flops, moved, names = Counter(), Counter(), Counter(), Counter(), defaultdict(set)
    for title, activity, launch in listed:
        microseconds[title] += activity.duration
        calls[title] += 1
        names[title].add(short(activity.name))
        if launch:
            flops[title] += launch.flops
            moved[title] += launch.bytes
    total = sum(microseconds.values())
    return [
        {
            "title": title,
            "calls": calls[title] / steps,
            "ms": spent / 1e3 / steps,
            "share": spent / total,
            "tflops": flops[title] / spent / 1e6 or None,
            "tbps": moved[title] / spent / 1e6 or None,
            "kernels": sorted(names[title]),
        }
        for title, spent in microseconds.most_common()
    ]


def family(row):
    """The group of a table row: a file of kernels, "products", "copies and fills" or "CuPy"."""
    file, colon, _ = row["title"].partition(": ")
    if colon:
        return file
    if row["tflops"] or any(PRODUCT.search(name) or SECOND_PART.search(name) for name in row["kernels"]):
        return "products"
    return "copies and fills" if row["title"].startswith(("Mem", "cupy_copy")) else "CuPy"


def share_of_ceiling(row, ceilings):
    """A row's rate as a percentage of its ceiling; "" for a row without a rate."""
    return next((f"{100 * row[rate] / ceiling:.0f} %" for rate, ceiling in ceilings.items() if row[rate]), "")


def print_kernels(heading, rows, limit, ceilings=CEILINGS):
    """Print the first `limit` rows, the sum of the others, and the sum of all."""
    shown = rows[:limit]
    table = [
        {
            heading: row["title"],
            "calls": f"{row['calls']:g}",
            "ms": f"{row['ms']:.4f}",
            "share": f"{100 * row['share']:.1f} %",
            "TFLOP/s": f"{row['tflops']:.0f}" if row["tflops"] else "",
            "TB/s": f"{row['tbps']:.2f}" if row["tbps"] else "",
            "of ceiling": share_of_ceiling(row, ceilings),
        }
        for row in shown
    ]
    for name, part in (("others", rows[limit:]), ("sum", rows)):
        if part:
            calls, spent = sum(row["calls"] for row in part), sum(row["ms"] for row in part)
            share = f"{100 * sum(row['share'] for row in part):.1f} %"
            sums = {heading: name, "calls": f"{calls:g}", "ms": f"{spent:.4f}", "share": share}
            table.append(dict.fromkeys(table[0], "") | sums)
    print_table(table)
    print()


def print_families(rows):
    """Print the time of each group of kernels."""
    spent = Counter()
    for row in rows:
        spent[family(row)] += row["ms"]
    total = sum(spent.values())
    print_table(
        [{"group": name, "ms": f"{ms:.3f}", "share": f"{100 * ms / total:.1f} %"} for name, ms in spent.most_common()]
    )
    print()


# -- the measurement --------------------------------------------------------------------------------------------------


def median_seconds(function, times):
    """The median seconds of `times` calls of function()."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def back_to_back(graph, stream, times):
    """Seconds of one of `times` back-to-back replays, timed by device events, without the profiler."""
    from cupy import cuda

    begin, end = cuda.Event(), cuda.Event()
    graph.launch(stream)
    begin.record(stream)
    for _ in range(times):
        graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return cuda.get_elapsed_time(begin, end) / 1e3 / times


def profile(config, args):
    """All figures of one configuration, as written to results/."""
    open_cupti()
    from benchmarks.harness.ours import ProfiledSteps

    seq_len = args.seq_len or config.block_size
    step = ProfiledSteps(config, args.batch_size, seq_len, args.precision)
    rng = np.random.default_rng(SEED)

    def train():
        tokens = rng.integers(0, config.vocab_size, (args.batch_size, seq_len + 1))
        step(tokens[:, :-1].copy(), tokens[:, 1:].copy())

    step.use_graph(False)
    train()  # compiles, chooses algorithms
    train()
    launches = launches_of(step.compute_update, step.backend)
    eager_seconds = median_seconds(train, args.steps)
    eager = recorded(train, args.steps)
    eager_listed, eager_agree = named(eager, launches * args.steps)

    step.use_graph(True)
    for _ in range(3):  # launched from Python once more, then captured, then replayed
        train()
    graph_seconds = median_seconds(train, args.steps)
    replay_seconds = median_seconds(step.replay, args.steps)
    device_seconds = back_to_back(*step.graph, args.steps)
    replays = recorded(step.replay, args.steps)
    if not replays:
        raise ConfigError("CUPTI reported no kernels of the replayed graph; use another driver or PyTorch version")
    listed, agree = named(replays, launches * args.steps)
    busy = sum(activity.duration for activity in replays) / args.steps / 1e6
    return {
        "preset": args.preset,
        "precision": args.precision,
        "batch_size": args.batch_size,
        "seq_len": seq_len,
        "vocab_size": config.vocab_size,
        "steps": args.steps,
        "eager_step_seconds": eager_seconds,  # a whole step: random tokens, upload, sorting, update, reading the loss
        "graph_step_seconds": graph_seconds,
        "replay_seconds": replay_seconds,  # from the launch of the graph until the host has waited for it
        "device_seconds": device_seconds,  # one of several back-to-back replays
        "busy_seconds": busy,  # the sum of its kernels' durations by CUPTI
        "idle_share_profiled": idle_share(replays, args.steps),
        "idle_share": max(0.0, 1 - busy / device_seconds),
        "launches_agree": {"eager": eager_agree, "graph": agree},
        "eager": kernel_rows(eager_listed, args.steps),
        "graph": kernel_rows(listed, args.steps),
    }


def report(result, limit):
    """Print all tables and times of one profile."""
    known = CEILINGS if result["precision"] == "bf16" else {"tbps": CEILINGS["tbps"]}
    print_kernels("a step as a graph", result["graph"], limit, known)
    products = f"{CEILINGS['tflops']} TFLOP/s in bf16 (not measured in other precisions), "
    print(f"Ceilings of an H200: {products}{CEILINGS['tbps']} TB/s.\n")
    print_families(result["graph"])
    inside = {row["title"] for row in result["graph"]}
    outside = [row for row in result["eager"] if row["title"] not in inside]
    if outside:
        print_kernels("outside the graph: tokens and loss", outside, limit, known)
    for key, text in (
        ("eager_step_seconds", "whole step without the graph, wall clock"),
        (
            "graph_step_seconds",
            "whole step with the graph, wall clock; includes random tokens, upload, reading the loss",
        ),
        ("replay_seconds", "one replay of the graph, wall clock"),
        ("device_seconds", "one of several back-to-back replays, device clock"),
        ("busy_seconds", "sum of its kernels"),
    ):
        print(f"{1e3 * result[key]:10.3f} ms  {text}")
    print(f"{100 * result['idle_share']:10.2f} %   idle: back-to-back replay minus the sum of its kernels")
    if result["idle_share_profiled"] is not None:
        print(f"{100 * result['idle_share_profiled']:10.2f} %   idle by time stamps (CUPTI widens the gaps)")
    for mode, agree in result["launches_agree"].items():
        for kind, equal in agree.items():
            if not equal:
                print(f"{mode}: Python's and CUPTI's lists of {kind} differ; the rows show the kernels' names")


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="gpt2", help="model (default gpt2)")
    add("--precision", choices=("fp32", "tf32", "bf16"), default="bf16", help="precision (default bf16)")
    add("--batch-size", type=int, help="sequences per step (default 64; paper 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: the model's block size)")
    add("--vocab-size", type=int, help="vocabulary size, to measure an odd one (default: the preset's)")
    add("--steps", type=int, default=5, help="steps per measurement (default 5)")
    add("--rows", type=int, default=30, help="rows shown in each table (default 30)")
    add_save_flags(add, "profile")
    args = parser.parse_args()
    args.batch_size = args.batch_size or (16 if args.preset == "paper" else 64)
    config = PRESETS[args.preset]
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)

    result = profile(config, args)
    report(result, args.rows)
    save(BENCHMARK, result, args, args.save_as)


if __name__ == "__main__":
    run_main(main)

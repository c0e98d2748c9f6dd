"""Where do the milliseconds of one training step on the GPU go, kernel by kernel, and how long is the GPU idle in it?

CUPTI, which PyTorch brings along, records every kernel of the process, also what CuPy, Triton and cublasLt launch. All
of ours run one after another, so the n-th launch that Python made is the n-th kernel that CUPTI saw: that gives each
its file, and each product its shape.
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

from benchmarks.harness.contenders import add_saving, print_table, run, save
from gpt2core.app.presets import PRESETS
from gpt2core.errors import ConfigError

BENCHMARK = "benchmarks.gpu.profile"
SEED = 20260101
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # Kineto's categories of what runs on the GPU
PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|xmma", re.IGNORECASE)
SECOND_PART = re.compile(r"splitk_?reduce", re.IGNORECASE)  # adds up a product that was divided: no launch of its own
CEILINGS = {"tflops": 766, "tbps": 4.26}  # of an H200: products of bf16 on random numbers, and a copy
OF_ATTENTION = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4, "both_kernel": 7}  # causal products, for a head
ONCE = "layernorm", "gelu", "column_sums", "cross_entropy", "adamw", "cast"  # files of kernels that go over arrays once
WRITTEN_BACK = {"adamw_kernel": ("p_ptr", "m_ptr", "v_ptr")}  # what is one argument, and both read and written


class Ran(NamedTuple):
    """One thing that the GPU did: when, in microseconds, and what."""

    start: float
    duration: float
    name: str


class Launch(NamedTuple):
    """One launch that Python made: what CUPTI calls it (None: a product), what we call it, its operations or bytes."""

    kernel: str | None
    title: str
    flops: int = 0
    bytes: int = 0


# -- what Python launches ---------------------------------------------------------------------------------------------


def launches_of(function, backend):
    """The Triton launches and products that one call of function() makes, in order."""
    from stage2_cuda.runtime import triton_launch

    found, gpu, gemm = [], triton_launch.launcher(), backend.products.gemm
    launch, matmul = gpu.launch, gemm.matmul

    def noted_launch(kernel, grid, arguments, options):
        module = kernel.fn.__module__.rpartition(".")[2]
        work = work_of(module, kernel.__name__, dict(zip(kernel.arg_names, arguments, strict=False)), options)
        found.append(Launch(kernel.__name__, f"{module}: {kernel.__name__.removesuffix('_kernel')}", **work))
        return launch(kernel, grid, arguments, options)

    def noted_matmul(out, a, b, **options):
        summed = a.shape[0 if options.get("trans_a") else 1]
        marks = ("'" * bool(options.get(flag)) for flag in ("trans_a", "trans_b"))
        title = " ".join(f"{matrix.shape}{mark}" for matrix, mark in zip((a, b), marks, strict=True))
        found.append(Launch(None, f"product {title}", 2 * out.size * summed))
        return matmul(out, a, b, **options)

    gpu.launch, gemm.matmul = noted_launch, noted_matmul
    try:
        function()
    finally:
        del gpu.launch, gemm.matmul  # the methods of their classes again
    return found


def work_of(module, name, arguments, options):
    """{"flops": operations} of products, {"bytes": moved} of a kernel that goes over its arrays once, or {}."""
    if module == "fp16x3" and name == "product_kernel":  # of fp32, once, however many passes it takes
        return {"flops": 2 * arguments["m"] * arguments["n"] * arguments["k"]}
    if module == "attention" and name in OF_ATTENTION:
        B, _, H, T, _ = (arguments["qkv_desc"] if name == "both_kernel" else arguments["qkv_m"]).shape
        return {"flops": OF_ATTENTION[name] * B * H * T * T * options["HEAD_DIM"]}
    if module not in ONCE:
        return {}
    again = [arguments[which] for which in WRITTEN_BACK.get(name, ())]
    return {"bytes": sum(value.nbytes for value in [*arguments.values(), *again] if hasattr(value, "nbytes"))}


# -- what the GPU ran -------------------------------------------------------------------------------------------------


def recorded(function, times):
    """[Ran] of `times` calls of function(), in the order of their start."""
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
        Ran(float(event["ts"]), float(event["dur"]), event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    )


def open_cupti():
    """CUPTI has to know a graph's kernels from when they are recorded: it is opened before anything else is done."""
    os.environ["TEARDOWN_CUPTI"] = "0"  # Kineto: it stays open between two profiles
    try:
        import torch
    except ImportError as error:
        raise ConfigError("the profile is made with the CUPTI that comes with PyTorch: install torch") from error
    if not torch.cuda.is_available():
        raise ConfigError("no GPU was found: there is nothing to profile")
    one = torch.ones(1, device="cuda")
    return recorded(lambda: one + one, 1)


def short(name):
    """A kernel's name without its types: the last of its namespaces, or what a template is about."""
    if found := re.search(r"cutlass_?\w*_\w+|nvjet_\w+", name):
        return found[0][:60]
    name = re.sub(r"\(anonymous namespace\)", "", name.removeprefix("void "))
    return re.split(r"[<(]", name)[0].rpartition("::")[2].strip()[:60] or name[:60]


def is_product(ran):
    return bool(PRODUCT.search(ran.name)) and not SECOND_PART.search(ran.name)


def triton_kernel(name, kernels):
    """Which of the kernels this is, whatever Triton has put before its name; None: none of them."""
    return max((kernel for kernel in kernels if re.search(rf"(^|_|\W){kernel}$", name)), key=len, default=None)


def named(rans, launches):
    """[(title, Ran, Launch or None)]: with the launches' titles where both lists agree, else short names; and whether.

    Triton's kernels and the products are compared each by itself.
    """
    kernels = {launch.kernel for launch in launches if launch.kernel}
    triton = [ran for ran in rans if triton_kernel(ran.name, kernels)]
    products = [ran for ran in rans if is_product(ran)]
    noted_triton = [launch for launch in launches if launch.kernel]
    noted_products = [launch for launch in launches if not launch.kernel]
    titles, agree = {}, {}
    same = [triton_kernel(ran.name, kernels) for ran in triton] == [launch.kernel for launch in noted_triton]
    for what, found, noted, equal in (
        ("kernels", triton, noted_triton, same),
        ("products", products, noted_products, len(products) == len(noted_products)),
    ):
        agree[what] = equal
        if equal:
            titles |= {id(ran): launch for ran, launch in zip(found, noted, strict=True)}
    listed = []
    for ran in rans:
        launch = titles.get(id(ran))
        listed.append((launch.title if launch else short(ran.name), ran, launch))
    return listed, agree


def idle_share(rans, steps):
    """Of the time from the first kernel's start to the last one's end, what no kernel covers: the median over steps.

    None where the steps cannot be told apart, because not all were seen with as many kernels.
    """
    if len(rans) % steps:
        return None
    each, shares = len(rans) // steps, []
    for first in range(0, len(rans), each):
        busy = covered = 0.0
        for ran in rans[first : first + each]:  # in the order of their start
            end = ran.start + ran.duration
            busy += max(0.0, end - max(ran.start, covered))
            covered = max(covered, end)
        shares.append(1 - busy / (covered - rans[first].start))
    return statistics.median(shares)


# -- tables -----------------------------------------------------------------------------------------------------------


def kernel_rows(listed, steps):
    """One dictionary for each title, the longest first: milliseconds and calls of one step."""
    microseconds, calls, flops, moved, names = Counter(), Counter(), Counter(), Counter(), defaultdict(set)
    for title, ran, launch in listed:
        microseconds[title] += ran.duration
        calls[title] += 1
        names[title].add(short(ran.name))
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
    """What a row of the table belongs to: a file of kernels, the products, or CuPy's own."""
    file, colon, _ = row["title"].partition(": ")
    if colon:
        return file
    if row["tflops"] or any(PRODUCT.search(name) or SECOND_PART.search(name) for name in row["kernels"]):
        return "products"
    return "copies and fills" if row["title"].startswith(("Mem", "cupy_copy")) else "CuPy"


def share_of_ceiling(row, ceilings):
    return next((f"{100 * row[rate] / most:.0f} %" for rate, most in ceilings.items() if row[rate]), "")


def print_kernels(heading, rows, limit, ceilings=CEILINGS):
    shown = rows[:limit]
    table = [
        {
            heading: row["title"],
            "calls": f"{row['calls']:g}",
            "ms": f"{row['ms']:.4f}",
            "share": f"{100 * row['share']:.1f} %",
            "TFLOP/s": f"{row['tflops']:.0f}" if row["tflops"] else "",
            "TB/s": f"{row['tbps']:.2f}" if row["tbps"] else "",
            "of the ceiling": share_of_ceiling(row, ceilings),
        }
        for row in shown
    ]
    for name, some in (("the rest", rows[limit:]), ("sum", rows)):
        if some:
            calls, spent = sum(row["calls"] for row in some), sum(row["ms"] for row in some)
            share = f"{100 * sum(row['share'] for row in some):.1f} %"
            sums = {heading: name, "calls": f"{calls:g}", "ms": f"{spent:.4f}", "share": share}
            table.append(dict.fromkeys(table[0], "") | sums)
    print_table(table)
    print()


def print_families(rows):
    spent = Counter()
    for row in rows:
        spent[family(row)] += row["ms"]
    total = sum(spent.values())
    print_table(
        [
            {"of the step": name, "ms": f"{ms:.3f}", "share": f"{100 * ms / total:.1f} %"}
            for name, ms in spent.most_common()
        ]
    )
    print()


# -- the measurement --------------------------------------------------------------------------------------------------


def timed(function, times):
    """The median of the seconds that function() takes."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def back_to_back(graph, stream, times):
    """Seconds of one replay among `times` that follow each other without Python in between, unprofiled."""
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
    """All figures of one configuration, as they go to results/."""
    open_cupti()
    from benchmarks.harness.ours import CudaSteps
    from stage2_cuda.runtime.side_stream import NoStream

    seq_len = args.seq_len or config.block_size
    step = CudaSteps(config, args.batch_size, seq_len, args.precision)
    trainer, graph_update = step.trainer, step.trainer.update
    step.backend.side = NoStream()  # one after another, or the n-th launch would not be the n-th kernel
    rng = np.random.default_rng(SEED)

    def train():
        tokens = rng.integers(0, config.vocab_size, (args.batch_size, seq_len + 1))
        step(tokens[:, :-1].copy(), tokens[:, 1:].copy())

    def replay():
        graph_update()
        step.backend.wait()

    trainer.update = step.backend.compile_step(trainer.compute_update, record=False)
    train()  # compiles, chooses algorithms
    train()
    launches = launches_of(trainer.compute_update, step.backend)
    eager_seconds = timed(train, args.steps)
    eager = recorded(train, args.steps)
    eager_listed, eager_agree = named(eager, launches * args.steps)

    trainer.update = graph_update
    for _ in range(3):  # eager once more, then recorded, then replayed
        train()
    graph_seconds = timed(train, args.steps)
    replay_seconds = timed(replay, args.steps)
    device_seconds = back_to_back(graph_update.graph, graph_update.stream, args.steps)
    replays = recorded(replay, args.steps)
    if not replays:
        raise ConfigError("CUPTI saw no kernels in the replayed graph: this driver or this PyTorch does not tell them")
    listed, agree = named(replays, launches * args.steps)
    busy = sum(ran.duration for ran in replays) / args.steps / 1e6
    return {
        "preset": args.preset,
        "precision": args.precision,
        "batch_size": args.batch_size,
        "seq_len": seq_len,
        "vocab_size": config.vocab_size,
        "steps": args.steps,
        "eager_step_seconds": eager_seconds,  # of the whole step, tokens made, uploaded and sorted, loss read
        "graph_step_seconds": graph_seconds,
        "replay_seconds": replay_seconds,  # from the launch of the graph until the host knows that it is done
        "device_seconds": device_seconds,  # of one replay among many, nothing in between
        "busy_seconds": busy,  # the sum of its kernels, as CUPTI saw them
        "idle_share_profiled": idle_share(replays, args.steps),
        "idle_share": max(0.0, 1 - busy / device_seconds),
        "launches_agree": {"eager": eager_agree, "graph": agree},
        "eager": kernel_rows(eager_listed, args.steps),
        "graph": kernel_rows(listed, args.steps),
    }


def report(result, limit):
    known = CEILINGS if result["precision"] == "bf16" else {"tbps": CEILINGS["tbps"]}
    print_kernels("a step as a graph", result["graph"], limit, known)
    products = f"{CEILINGS['tflops']} TFLOP/s in bf16 (of other products none was measured), "
    print(f"The ceilings are an H200's: {products}{CEILINGS['tbps']} TB/s.\n")
    print_families(result["graph"])
    inside = {row["title"] for row in result["graph"]}
    outside = [row for row in result["eager"] if row["title"] not in inside]
    if outside:
        print_kernels("beside the graph, tokens and loss", outside, limit, known)
    for key, text in (
        ("eager_step_seconds", "a whole step without the graph, wall clock"),
        ("graph_step_seconds", "a whole step with it, wall clock: tokens made, uploaded, sorted; the loss read"),
        ("replay_seconds", "the graph alone, wall clock"),
        ("device_seconds", "the graph on the device, one of many back to back"),
        ("busy_seconds", "the sum of its kernels"),
    ):
        print(f"{1e3 * result[key]:10.3f} ms  {text}")
    print(f"{100 * result['idle_share']:10.2f} %   idle: the graph back to back, less the sum of its kernels")
    if result["idle_share_profiled"] is not None:
        print(f"{100 * result['idle_share_profiled']:10.2f} %   idle by its kernels' time stamps (CUPTI widens gaps)")
    for run_of, agree in result["launches_agree"].items():
        for what, equal in agree.items():
            if not equal:
                print(f"Python's and CUPTI's lists of {what} differ ({run_of}): their rows have the kernels' own names")


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="gpt2", help="model (default gpt2)")
    add("--precision", choices=("fp32", "tf32", "bf16"), default="bf16", help="of the arithmetic (default bf16)")
    add("--batch-size", type=int, help="sequences per step (default 64; paper 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: the model's block size)")
    add("--vocab-size", type=int, help="words, to see what an odd number of them costs (default: the preset's)")
    add("--steps", type=int, default=5, help="steps that are averaged, of each kind (default 5)")
    add("--rows", type=int, default=30, help="longest rows of a table that are shown (default 30)")
    add_saving(add, "profile")
    args = parser.parse_args()
    args.batch_size = args.batch_size or (16 if args.preset == "paper" else 64)
    config = PRESETS[args.preset]
    if args.vocab_size:
        config = replace(config, vocab_size=args.vocab_size)

    result = profile(config, args)
    report(result, args.rows)
    if not args.no_save:
        save(BENCHMARK, result, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)

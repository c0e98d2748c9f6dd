"""Is the NumPy training step faster than PyTorch's on as many threads, and how close is it to the BLAS floor?

The BLAS floor is the time of only the matrix products of a step (cpu/sgemm_floor.py).

    python -m benchmarks.cpu.train_step                                        # with one and with two threads
    python -m benchmarks.cpu.train_step --threads 1 --no-compile               # without a C++ compiler
    python -m benchmarks.cpu.train_step --preset gpt2 --batch-size 4 --seq-len 64 --no-compile  # GPT-2 124M, few tokens
    python -m benchmarks.cpu.train_step --preset tiny --rounds 1 --no-compile  # a quick trial
"""

import math

from benchmarks.harness.processes import BenchmarkFailed, ProcessSpec
from benchmarks.harness.report import add_peer, add_step_fields, paired_ratio
from benchmarks.harness.rounds import measure_specs, step_results, timed_steps
from benchmarks.harness.script import benchmark
from benchmarks.peers import llmc
from gpt2core.communicator import Solo
from gpt2core.presets import PRESETS
from stage0_serial.numpy_backend import NumpyBackend

OURS, EAGER, LLMC, FLOOR = "ours", "torch eager", "llm.c", "sgemm floor"


def prepare(module, preset, batch_size, seq_len, threads, **options):
    """Called in each process. Return `run_round(steps)`, which trains on fresh random tokens and times every step.

    module: the imported Python module that is measured; its make_trainer() builds the training step.
    """
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, seq_len or config.block_size, threads, **options)
    return timed_steps(Solo(), step, config, batch_size, seq_len)


def process_specs(args, threads):
    """Yield a ProcessSpec for each row: ours with Python threads, PyTorch with OpenMP threads."""
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "seq_len": args.seq_len, "threads": threads}
    variants = {OURS: dict(deterministic=True), "ours --no-deterministic": dict(deterministic=False)}
    if NumpyBackend().runtime.blas == "mkl":
        variants["ours --blas openblas"] = dict(deterministic=True, blas="openblas")
    for name, options in variants.items():
        yield ProcessSpec(name, "benchmarks.harness.ours", 1, sizes | options)
    yield ProcessSpec(EAGER, "benchmarks.peers.torch_gpt2", threads, sizes)
    if not args.no_compile:
        yield ProcessSpec("torch compiled", "benchmarks.peers.torch_gpt2", threads, dict(sizes, compiled=True))
    if args.bf16:
        NumpyBackend("bf16")  # raises ConfigError if this CPU or its MKL has no bf16 products
        options = dict(sizes, deterministic=True, precision="bf16")
        yield ProcessSpec("ours --precision bf16", "benchmarks.harness.ours", 1, options)
        yield ProcessSpec("torch bf16 autocast", "benchmarks.peers.torch_gpt2", threads, dict(sizes, bf16=True))
    if args.llmc:
        llmc.require(args.llmc, PRESETS[args.preset])
        yield ProcessSpec(LLMC, "benchmarks.peers.llmc", threads, dict(sizes, folder=args.llmc))
    yield ProcessSpec(FLOOR, "benchmarks.cpu.sgemm_floor", 1, sizes)


def check_losses(measured, tolerance=1e-4):
    """Raise BenchmarkFailed unless ours and llm.c, which have equal weights and tokens, have equal losses.

    tolerance: relative; the rounding errors of fp32, which the updates of some steps enlarge.
    """
    if LLMC in measured:
        ours, peer = (
            sum((each["losses"] for each in [answers["warm_up"], *answers["rounds"]]), [])
            for answers in (measured[OURS], measured[LLMC])
        )
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(ours, peer, strict=True)):
            raise BenchmarkFailed(f"llm.c computes another model: its losses are {peer}, ours are {ours}")


def measure(args, threads, specs):
    """Measure all specs with one thread count; return one result for each spec, with the seconds of every step."""
    measured = measure_specs(specs, args, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    check_losses(measured)
    times = step_results(measured)
    return [
        {
            **dict(name=name, preset=args.preset, threads=threads),
            **times[name],
            "warm_up_seconds": answers["warm_up"]["seconds"],
            "final_loss": answers["rounds"][-1]["losses"][-1],
            "peak_bytes": answers["rounds"][-1]["peak_bytes"],
            "import_bytes": answers["import_bytes"],
        }
        for name, answers in measured.items()
    ]


def summarise(results):
    """Add minimum, cores used and ratios to the results of one thread count; the ratios are computed in each round."""
    medians = add_step_fields(results)
    for result in results:
        result["share_of_floor"] = paired_ratio(medians[FLOOR], medians[result["name"]])
    ours, floor = (next(result for result in results if result["name"] == name) for name in (OURS, FLOOR))
    add_peer(ours, results, {name: paired_ratio(seconds, medians[OURS]) for name, seconds in medians.items()})
    ours["floor"] = {"seconds": floor["seconds"]}
    if LLMC in medians:
        ours["times_as_fast_as_llmc"] = paired_ratio(medians[LLMC], medians[OURS])


@benchmark(
    "cpu-step",
    common=dict(preset="paper", threads=[1, 2], batch_size=16, rounds=5, steps_per_round=2, warm_up=2),
    timeout=900,
    no_compile=False,
    seq_len=dict(type=int, help="tokens per sequence (default: the block size of the model)"),
    bf16=dict(action="store_true", help="also measure --precision bf16 and torch.autocast, on a CPU with AMX"),
    llmc=dict(metavar="DIR", help="also measure llm.c: a checkout of github.com/karpathy/llm.c, which gcc compiles"),
)
def main(args):
    for threads in args.threads:
        results = measure(args, threads, list(process_specs(args, threads)))
        summarise(results)
        yield results

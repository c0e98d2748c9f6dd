"""Are the matrix products of a training step as fast as torch.matmul's?

Each linear layer has three, of 2 N C K operations each: forward x w, input gradient dy w', weight gradient x' dy. Each
side runs as a CUDA graph of several calls, timed by device events, in interleaved rounds. Ours are cublasLt's with the
algorithm that is chosen by timing; in fp32 they are three passes on tensor cores, and the time includes splitting both
operands, which a training step does once for several products. Our weight gradient is float32; PyTorch's has the
operands' type, as in autograd.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import ours
from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, run_main, run_rounds, timed_round
from benchmarks.harness.report import add_save_flags, paired_ratio, print_table, save

# x (N, C), w (C, K), dy (N, K); transposed: w is (K, C), as in lm_head

SEED = 20260101
BENCHMARK = "benchmarks.gpu.products"  # the name under which the benchmark processes import this file
OURS, PEER = "ours", "torch.matmul"
KINDS = ("forward", "input", "weight")
# N, C, K, transposed: the layers of GPT-2 124M with 64 x 1024 tokens, a chunk of its lm_head, and those of preset paper
SHAPES = {
    "gpt2": [
        (65536, 768, 2304, False),
        (65536, 768, 768, False),
        (65536, 768, 3072, False),
        (65536, 3072, 768, False),
        (10240, 768, 50304, True),
    ],
    "paper": [(4096, 384, 1152, False), (4096, 384, 384, False), (4096, 384, 1536, False), (4096, 1536, 384, False)],
}
AGREE = {"bf16": 1e-2, "tf32": 1e-3, "fp32": 1e-4}  # largest relative difference between the norms of the two results


# -- in the benchmark process ------------------------------------------------------------------------------------------


def numbers(N, C, K, transposed):
    """[(numbers, shape)] of x, w and dy, float32, the same in both processes, which repeat the numbers to the shape."""
    some = np.random.default_rng(SEED).standard_normal(1_000_003, np.float32)
    return [(some[at:], shape) for at, shape in enumerate(((N, C), (K, C) if transposed else (C, K), (N, K)))]


def prepare(module, precision):
    """Return `run_round(shape, milliseconds)`: {kind: ms of one call, "norms": of the three results}."""
    held = {}

    def run_round(shape, milliseconds):
        shape = tuple(shape)
        if shape not in held:
            held.clear()  # the largest arrays take several gigabytes
            held[shape] = module.Linear(numbers(*shape), shape[3], precision)
        return timed_round(held[shape], milliseconds)

    return run_round


class Linear(ours.Graphs):
    """Our products, with the arguments of benchmarks.peers.torch_products.Linear."""

    def __init__(self, numbers, transposed, precision):
        from stage2_cuda.cuda_backend import CudaBackend

        super().__init__()
        backend = CudaBackend(precision, deterministic=False)
        x, w, dy = (
            self.cupy.resize(self.cupy.asarray(some), shape).astype(backend.compute_dtype) for some, shape in numbers
        )  # fmt: skip
        y, dx, dw = self.cupy.empty_like(dy), self.cupy.empty_like(x), self.cupy.empty(w.shape, np.float32)
        self.results, multiply = (y, dx, dw), backend.products.multiply
        self.calls = {
            "forward": lambda: multiply(y, x, w, trans_b=transposed),
            "input": lambda: multiply(dx, dy, w, trans_b=not transposed),
            "weight": lambda: multiply(dw, dy, x, trans_a=True) if transposed else multiply(dw, x, dy, trans_a=True),
        }
        self.cupy.cuda.runtime.deviceSynchronize()

    def norms(self):
        return [self.norm(array) for array in self.results]


# -- in the parent process --------------------------------------------------------------------------------------------


def measure(args, precision):
    """One pair of results for each shape, with the milliseconds of each round."""
    modules, results = {OURS: BENCHMARK, PEER: "benchmarks.peers.torch_products"}, []
    specs = [ProcessSpec(name, module, args.threads, {"precision": precision}) for name, module in modules.items()]
    with ExitStack() as stack:
        processes = [stack.enter_context(BenchmarkProcess(spec, BENCHMARK, args.timeout)) for spec in specs]
        for shape in [shape for preset in args.preset for shape in SHAPES[preset]]:
            request = {"shape": shape, "milliseconds": args.milliseconds}
            measured = run_rounds(processes, args.rounds, request, request)
            pair = []
            for spec in specs:
                rounds = measured[spec.name]["rounds"]
                times = {kind: [each[kind] for each in rounds] for kind in KINDS}
                pair.append({"name": spec.name, "precision": precision, "shape": shape, "ms": times})
                pair[-1]["norms"] = rounds[-1]["norms"]
            results.append(pair)
    return results


def summarise(pair):
    """Add rates and the ratios of each round to the results of one shape; return its row of the table."""
    mine, peer = pair
    N, C, K, _ = mine["shape"]
    row = {f"{mine['precision']}: N x C x K": f"{N} x {C} x {K}"}
    for result in pair:
        result["tflops"] = {kind: 2e-9 * N * C * K / statistics.median(result["ms"][kind]) for kind in KINDS}
    mine["times_as_fast"] = {kind: paired_ratio(peer["ms"][kind], mine["ms"][kind]) for kind in KINDS}
    for kind, heading in zip(KINDS, ("forward", "input gradient", "weight gradient"), strict=True):
        row[f"{heading}, TFLOP/s"] = f"{mine['tflops'][kind]:.0f}"
        row["torch" + " " * KINDS.index(kind)] = f"{peer['tflops'][kind]:.0f}"
        row["x" + " " * KINDS.index(kind)] = f"{mine['times_as_fast'][kind]['median']:.3f}"
    worst = max(abs(a / b - 1) for a, b in zip(peer["norms"], mine["norms"], strict=True))
    if not worst < AGREE[mine["precision"]]:
        print(f"{OURS} and {PEER} do not compute the same: norms {mine['norms']} and {peer['norms']}")
    return row


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=SHAPES, nargs="+", default=list(SHAPES), help="models (default both)")
    add("--precision", choices=AGREE, nargs="+", default=list(AGREE), help="precisions, one table each (default all)")
    add("--rounds", type=int, default=7, help="number of rounds; each round times every program (default 7)")
    add("--milliseconds", type=float, default=20, help="approximate device time of one round (default 20)")
    add("--threads", type=int, default=4, help="CPU threads of each process (default 4)")
    add("--timeout", type=int, default=300, help="seconds per round of a process, with compilation (default 300)")
    add_save_flags(add, "products")
    return parser


def main(argv=None):
    args, results = parser().parse_args(argv), []
    for precision in args.precision:
        of_precision = measure(args, precision)
        print_table([summarise(pair) for pair in of_precision])
        print(flush=True)
        results += of_precision
        save(BENCHMARK, results, args, args.save_as)


if __name__ == "__main__":
    sys.exit(run_main(main))

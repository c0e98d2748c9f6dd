"""Are the matrix products of a training step as fast as torch.matmul's?

The three products of each linear layer: forward x w, the gradient of its input dy w', and that of its weights x' dy.
Both sides as a CUDA graph of several calls, timed by events on the device, in turns; 2 N C K operations. Ours are
cublasLt's with the algorithm that is timed once, and in fp32 three passes on tensor cores, with the splitting of both
operands, which a training step shares among products. The gradient of weights is float32 in ours, as it is summed, and
of the operands' type in PyTorch, as autograd leaves it.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import ours
from benchmarks.harness.contenders import (
    Contender,
    Running,
    add_saving,
    paired_ratio,
    play,
    print_table,
    run,
    save,
    timed_turn,
)

# x (N, C), w (C, K), dy (N, K); where it is turned, w is (K, C), as lm_head is

SEED = 20260101
BENCHMARK = "benchmarks.gpu.products"  # how the contenders' processes import this file
OURS, PEER = "ours", "torch.matmul"
KINDS = ("forward", "input", "weight")
# N, C, K, turned: the layers of GPT-2 124M with 64 x 1024 tokens, a chunk of its lm_head, and those of preset paper
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
AGREE = {"bf16": 1e-2, "tf32": 1e-3, "fp32": 1e-4}  # between norms of what the two compute, summed in fp32


# -- in the contender's process ---------------------------------------------------------------------------------------


def numbers(N, C, K, turned):
    """[(numbers, shape)] of x, w and dy, float32, the same for both contenders, who repeat them as needed."""
    some = np.random.default_rng(SEED).standard_normal(1_000_003, np.float32)
    return [(some[at:], shape) for at, shape in enumerate(((N, C), (K, C) if turned else (C, K), (N, K)))]


def prepare(module, precision):
    """Return `turn(shape, milliseconds)`: {kind: ms of one call, "norms": of the three results}."""
    held = {}

    def turn(shape, milliseconds):
        shape = tuple(shape)
        if shape not in held:
            held.clear()  # the largest are some gigabytes
            held[shape] = module.Linear(numbers(*shape), shape[3], precision)
        return timed_turn(held[shape], milliseconds)

    return turn


class Linear(ours.Graphs):
    """Ours. The arguments are those of the peer."""

    def __init__(self, numbers, turned, precision):
        from stage2_cuda.cuda_backend import CudaBackend

        super().__init__()
        backend = CudaBackend(precision, deterministic=False)
        x, w, dy = (
            self.cupy.resize(self.cupy.asarray(some), shape).astype(backend.compute) for some, shape in numbers
        )  # fmt: skip
        y, dx, dw = self.cupy.empty_like(dy), self.cupy.empty_like(x), self.cupy.empty(w.shape, np.float32)
        self.results, multiply = (y, dx, dw), backend.products.multiply
        self.calls = {
            "forward": lambda: multiply(y, x, w, trans_b=turned),
            "input": lambda: multiply(dx, dy, w, trans_b=not turned),
            "weight": lambda: multiply(dw, dy, x, trans_a=True) if turned else multiply(dw, x, dy, trans_a=True),
        }
        self.cupy.cuda.runtime.deviceSynchronize()

    def norms(self):
        return [self.norm(array) for array in self.results]


# -- on the one that starts them --------------------------------------------------------------------------------------


def measure(args, precision):
    """One pair of results for each shape, with every turn's milliseconds."""
    modules, results = {OURS: BENCHMARK, PEER: "benchmarks.peers.torch_products"}, []
    rows = [Contender(name, module, args.threads, {"precision": precision}) for name, module in modules.items()]
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        for shape in [shape for preset in args.preset for shape in SHAPES[preset]]:
            request = {"shape": shape, "milliseconds": args.turn}
            played = play(running, args.rounds, request, request)
            pair = []
            for row in rows:
                rounds = played[row.name]["rounds"]
                times = {kind: [answer[kind] for answer in rounds] for kind in KINDS}
                pair.append({"name": row.name, "precision": precision, "shape": shape, "ms": times})
                pair[-1]["norms"] = rounds[-1]["norms"]
            results.append(pair)
    return results


def summarise(pair):
    """Add medians, rates and ratios (taken within rounds) to the results of one shape; return its row of the table."""
    mine, peer = pair
    N, C, K, _ = mine["shape"]
    row = {f"{mine['precision']}: N x C x K": f"{N} x {C} x {K}"}
    for result in pair:
        result["median"] = {kind: statistics.median(result["ms"][kind]) for kind in KINDS}
        result["tflops"] = {kind: 2e-9 * N * C * K / result["median"][kind] for kind in KINDS}
    mine["times_as_fast"] = {kind: paired_ratio(peer["ms"][kind], mine["ms"][kind]) for kind in KINDS}
    for kind, heading in zip(KINDS, ("forward", "input's gradient", "weights' gradient"), strict=True):
        row[f"{heading}, TFLOP/s"] = f"{mine['tflops'][kind]:.0f}"
        row["torch" + " " * KINDS.index(kind)] = f"{peer['tflops'][kind]:.0f}"
        row["x" + " " * KINDS.index(kind)] = f"{mine['times_as_fast'][kind]:.3f}"
    worst = max(abs(a / b - 1) for a, b in zip(peer["norms"], mine["norms"], strict=True))
    if not worst < AGREE[mine["precision"]]:
        print(f"{OURS} and {PEER} do not compute the same: norms {mine['norms']} and {peer['norms']}")
    return row


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=SHAPES, nargs="+", default=list(SHAPES), help="whose layers (default both)")
    add("--precision", choices=AGREE, nargs="+", default=list(AGREE), help="a table for each (default all)")
    add("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    add("--turn", type=float, default=20, help="milliseconds on the device of one turn, about (default 20)")
    add("--threads", type=int, default=4, help="threads of each process on the host (default 4)")
    add("--timeout", type=int, default=300, help="seconds that one turn may take, compiling included (default 300)")
    add_saving(add, "products")
    return parser


def main(argv=None):
    args, results = parser().parse_args(argv), []
    for precision in args.precision:
        of_precision = measure(args, precision)
        print_table([summarise(pair) for pair in of_precision])
        print(flush=True)
        results += of_precision
        if not args.no_save:
            save(BENCHMARK, results, args.commit, args.save_as)


if __name__ == "__main__":
    sys.exit(run(main))

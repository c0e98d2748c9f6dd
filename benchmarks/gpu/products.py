"""Are the matrix products of a training step as fast as torch.matmul's?

Each linear layer has three products of 2 N C K floating-point operations: forward x w, input gradient dy w^T, weight
gradient x^T dy. Each program captures several calls in a CUDA graph. In fp32 this project computes a product as three
fp16 products on tensor cores; the time includes splitting both operands, which a training step does only once for
several products. The weight gradient of this project is float32; that of PyTorch has the dtype of the operands.

    python -m benchmarks.gpu.products                                  # both models
    python -m benchmarks.gpu.products --preset paper --precision bf16  # one model
"""

import functools
import statistics

import numpy as np

from benchmarks.gpu.timing import random_arrays
from benchmarks.harness import ours
from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import compare_norms, paired_ratio
from benchmarks.harness.rounds import measure_shapes
from benchmarks.harness.script import benchmark

# x (N, C), w (C, K), dy (N, K); transposed: w is stored as (K, C), as in lm_head

OURS, PEER = "ours", "torch.matmul"
KINDS = ("forward", "input", "weight")  # input, weight: the products that compute these gradients
# preset: [(N, C, K, transposed)]. gpt2: the layers of GPT-2 124M with 64 x 1024 tokens; the last entry is lm_head for a
# chunk of 10240 rows. paper: the layers of preset paper with 16 x 256 tokens.
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
TOLERANCES = {"bf16": 1e-2, "tf32": 1e-3, "fp32": 1e-4}  # largest relative difference between the norms of two results


def random_inputs(N, C, K, transposed):
    """x, w and dy."""
    return random_arrays((N, C), (K, C) if transposed else (C, K), (N, K))


def prepare(module, precision):
    """Called in each process. Return `run_round(shape, milliseconds)`, the run_round() of a module's Linear."""

    @functools.lru_cache(maxsize=1)  # the largest arrays take several gigabytes
    def build(*shape):
        return module.Linear(random_inputs(*shape), shape[3], precision)

    return lambda shape, milliseconds: build(*shape).run_round(milliseconds)


class Linear(ours.Graphs):
    """This project's three products of a layer; the arguments are those of benchmarks.peers.torch_products.Linear."""

    def __init__(self, inputs, transposed, precision):
        from stage2_cuda.cuda_backend import CudaBackend

        super().__init__()
        backend = CudaBackend(precision, deterministic=False)
        cupy = self.cupy
        x, w, dy = (cupy.asarray(array).astype(backend.compute_dtype) for array in inputs)
        y, dx, dw = cupy.empty_like(dy), cupy.empty_like(x), cupy.empty(w.shape, np.float32)
        self.results, multiply = (y, dx, dw), backend.products.multiply
        self.calls = {
            "forward": lambda: multiply(y, x, w, trans_b=transposed),
            "input": lambda: multiply(dx, dy, w, trans_b=not transposed),
            "weight": lambda: multiply(dw, dy, x, trans_a=True) if transposed else multiply(dw, x, dy, trans_a=True),
        }
        cupy.cuda.runtime.deviceSynchronize()

    def norms(self):
        return [self.norm(array) for array in self.results]


def measure(args, precision):
    """Measure all shapes; return for each shape two results, of this project and of PyTorch."""
    modules = {OURS: args.benchmark, PEER: "benchmarks.peers.torch_products"}
    specs = [ProcessSpec(name, module, args.threads, {"precision": precision}) for name, module in modules.items()]
    shapes, results = [shape for preset in args.preset for shape in SHAPES[preset]], []
    for pair in measure_shapes(specs, args, shapes, KINDS):
        results += [result | {"precision": precision} for result in pair]
        summarise(results[-2:])
    return results


def summarise(pair):
    """Add TFLOP/s and speed ratios to the two results of one shape; report results that differ."""
    own, peer = pair
    N, C, K, _ = own["shape"]
    for result in pair:
        result["tflops"] = {kind: 2e-9 * N * C * K / statistics.median(result["ms"][kind]) for kind in KINDS}
    own["times_as_fast"] = {kind: paired_ratio(peer["ms"][kind], own["ms"][kind]) for kind in KINDS}
    compare_norms(peer, own, TOLERANCES[own["precision"]])


@benchmark(
    "gpu-products",
    common=dict(threads=4, rounds=7, milliseconds=20.0, timeout=300),
    preset=dict(choices=SHAPES, nargs="+", default=list(SHAPES), help="models (default both)"),
    precision=dict(choices=TOLERANCES, nargs="+", default=list(TOLERANCES), help="a table for each (default all)"),
)
def main(args):
    for precision in args.precision:
        yield measure(args, precision)

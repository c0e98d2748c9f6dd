"""Is causal attention, forward and backward, faster than PyTorch's own, FlashAttention-2 and cuDNN?

This project's kernels read q, k and v from one packed projection (B, T, 3C) and write one packed gradient. PyTorch
reads three arrays (B, H, T, D) and writes three gradients. Each program captures several calls in a CUDA graph.

TFLOP/s: forward counts as 2 B H T T D floating-point operations, half of those of its two matrix products, because half
of the scores are masked. Backward counts as 2.5 times as many. "ours" uses the tiles that a training run chooses by
timing, "ours, the table's tiles" those of a run with --deterministic, "ours, plain Triton" no Gluon kernels.

    python -m benchmarks.gpu.attention                                  # all shapes and peers
    python -m benchmarks.gpu.attention --shape 8x12x1024x64 --rounds 3  # one shape
    python -m benchmarks.gpu.attention --designs                        # steps from plain Triton to Gluon, on Hopper
"""

import argparse
import functools
import statistics

import numpy as np

from benchmarks.gpu.timing import random_arrays
from benchmarks.harness import ours
from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import compare_norms, paired_ratio
from benchmarks.harness.rounds import measure_shapes
from benchmarks.harness.script import benchmark
from gpt2core.errors import ConfigError

# B batch, H heads, T time, D head size, C = H * D

# {row: options of CausalAttention}; the others are compared with the first row
OURS = {"ours": {}, "ours, the table's tiles": {"tuned": False}, "ours, plain Triton": {"gluon": False}}
DESIGNS = {
    "Gluon, a warp for copies": {"design": "specialized"},
    "Gluon, products in flight": {"design": "pipelined"},
    "plain Triton": {"gluon": False},
}
PEERS = {"flash": "torch, FlashAttention-2", "cudnn": "torch, cuDNN"}
SHAPES = [
    (1, 16, 16384, 64),
    (64, 12, 1024, 64),
    (32, 12, 1024, 64),
    (16, 6, 256, 64),
    (4, 16, 4096, 128),
    (1, 12, 8192, 64),
]
DESIGN_SHAPES = SHAPES[:2]
TOLERANCE = 1e-2  # largest relative difference between the norms of two implementations in bf16
KINDS = ("forward", "both")  # both: forward and backward


def prepare(module, **options):
    """Called in each process. Return run_round(shape, milliseconds), that of the module's CausalAttention."""

    @functools.cache
    def build(B, H, T, D):
        return module.CausalAttention(*random_arrays((B, T, 3 * H * D), (B, T, H * D)), H, **options)

    return lambda shape, milliseconds: build(*shape).run_round(milliseconds)


class CausalAttention(ours.Graphs):
    """Our kernels in bf16, captured in CUDA graphs. qkv (B, T, 3C), dy (B, T, C) on the host."""

    def __init__(self, qkv, dy, n_head, tuned=True, gluon=True, design=None):
        import ml_dtypes

        from stage2_cuda.attention import launches as attention

        super().__init__()
        self.kernels, self.heads = attention, n_head
        B, T, C = dy.shape
        self.qkv, self.dy = (self.cupy.asarray(array).astype(ml_dtypes.bfloat16) for array in (qkv, dy))
        self.y, self.dqkv = self.cupy.empty_like(self.dy), self.cupy.empty_like(self.qkv)
        self.lse, self.delta = (self.cupy.empty((B, n_head, T), np.float32) for _ in range(2))
        self.calls = {"forward": self.forward, "both": self.both}
        if design:
            from stage2_cuda.attention.hopper_launches import GluonTile

            tile = GluonTile(design)
            self.forward_tiles = attention.AttentionTiles(forward=tile)
            self.backward_tiles = attention.AttentionTiles(dq=tile, dkdv=tile)
        else:
            self.choose_tiles(tuned, gluon)
        self.cupy.cuda.runtime.deviceSynchronize()

    def choose_tiles(self, tuned, gluon):
        """Choose the tiles by timing, as a training run does.

        tuned=False: take them from the table, as a training run with --deterministic does. gluon=False: consider only
        the plain Triton kernels. Their choices are kept apart from those of training runs: in no cache file.
        """
        from stage2_cuda.attention import tuned_tiles
        from stage2_cuda.cuda_backend import CudaBackend
        from stage2_cuda.tuning.tuner import Tuner

        tuner = CudaBackend("bf16", deterministic=not tuned).runtime.tuner
        if not gluon:
            self.kernels.gluon_table = tuned_tiles.gluon_table = lambda *_: {}
            tuner = Tuner(self.cupy, tuner.tuned_for)
        arguments = self.qkv, self.heads, "ieee"
        self.forward_tiles = tuned_tiles.tuned_forward(tuner, self.forward, self.y, self.lse, *arguments)
        self.forward()
        backward = self.backward, self.dqkv, self.delta
        self.backward_tiles = tuned_tiles.tuned_backward(tuner, *backward, *arguments)

    def forward(self, tiles=None):
        self.kernels.attention_forward(self.y, self.lse, self.qkv, self.heads, tiles=tiles or self.forward_tiles)

    def backward(self, tiles=None):
        arrays = self.dqkv, self.delta, self.dy, self.qkv, self.y, self.lse
        self.kernels.attention_backward(*arrays, self.heads, tiles=tiles or self.backward_tiles)

    def both(self):
        self.forward()
        self.backward()

    def norms(self):
        return [self.norm(array) for array in (self.y, self.dqkv)]


def process_specs(args):
    for name, options in (DESIGNS if args.designs else OURS).items():
        yield ProcessSpec(name, args.benchmark, args.threads, options)
    for peer in () if args.designs else args.peers:
        options = {"backend": peer, "packed": False}
        yield ProcessSpec(PEERS[peer], "benchmarks.peers.torch_attention", args.threads, options)


def summarise(results):
    """Add TFLOP/s and speed ratios to the results of one shape; report results that differ from the first."""
    (B, H, T, D), own = results[0]["shape"], results[0]
    forward_flops = 2 * B * H * T * T * D
    flops = {"forward": forward_flops, "both": 3.5 * forward_flops}
    for result in results:
        result["tflops"] = {kind: flops[kind] / statistics.median(result["ms"][kind]) / 1e9 for kind in KINDS}
        result["ours_is_times_as_fast"] = {kind: paired_ratio(result["ms"][kind], own["ms"][kind]) for kind in KINDS}
        compare_norms(result, own, TOLERANCE)
    if peers := [result for result in results if result["name"] in PEERS.values()]:
        peer = min(peers, key=lambda each: statistics.median(each["ms"]["both"]))
        own["peer"] = {"name": peer["name"], "ms": peer["ms"]}
        ratios = [result["ours_is_times_as_fast"] for result in peers]
        own["ratio"] = {kind: min((each[kind] for each in ratios), key=lambda ratio: ratio["median"]) for kind in KINDS}


def parse_shape(text):
    """(B, H, T, D) of a text such as "1x16x16384x64". Raises ArgumentTypeError."""
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text} is not a shape; give four positive integers, such as 1x16x16384x64")
    return tuple(int(size) for size in sizes)


def chosen_shapes(args):
    """The shapes to measure. Raises ConfigError if --shape has a head size that a design of --designs does not have."""
    from stage2_cuda.attention.hopper_launches import designs

    shapes = args.shape or (DESIGN_SHAPES if args.designs else SHAPES)
    for *_, D in shapes if args.designs else ():
        if "pipelined" not in designs("forward", D):
            raise ConfigError(f"--designs: not every design has head size {D} of --shape; use head size 64")
    return shapes


@benchmark(
    "gpu-attention",
    common=dict(threads=4, rounds=15, milliseconds=30.0, timeout=300),
    shape=dict(type=parse_shape, nargs="+", metavar="BxHxTxD", help="a table for each (default 6; with --designs 2)"),
    peers=dict(choices=PEERS, nargs="+", default=list(PEERS), help="PyTorch's programs (default flash cudnn)"),
    designs=dict(
        action="store_true",
        help="compare the designs of the Gluon kernels, which need a Hopper GPU",
        save_as="gluon_ladder",
    ),
)
def main(args):
    for results in measure_shapes(list(process_specs(args)), args, chosen_shapes(args), KINDS):
        summarise(results)
        yield results

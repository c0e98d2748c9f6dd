"""How much does each step from plain Triton to Gluon gain in attention's kernels? Needs a Hopper GPU.

The rows: the plain Triton kernels, with tiles chosen by timing, and the two designs of the Gluon kernels. Each program
captures several calls in a CUDA graph; the rounds are interleaved.

    python -m benchmarks.gpu.gluon_ladder                                  # all shapes
    python -m benchmarks.gpu.gluon_ladder --shape 8x12x1024x64 --rounds 3  # one shape
"""

from benchmarks.gpu import attention
from benchmarks.harness.processes import ProcessSpec, run_main
from benchmarks.harness.report import benchmark_parser, save_each

# B batch, H heads, T time, D head size

BENCHMARK = "benchmarks.gpu.gluon_ladder"
SHAPES = [(1, 16, 16384, 64), (64, 12, 1024, 64)]
STEPS = {  # {row: options of CausalAttention}; each row is compared with the first
    "Gluon, a warp for copies": {"design": "specialized"},
    "Gluon, products in flight": {"design": "pipelined"},
    "plain Triton": {"gluon": False},
}
prepare = attention.prepare


class CausalAttention(attention.CausalAttention):
    """Attention as in benchmarks.gpu.attention, with one design of the Gluon kernels or with the plain kernels."""

    def __init__(self, qkv, dy, n_head, design=None, gluon=True):
        self.design = design
        super().__init__(qkv, dy, n_head, gluon=gluon)

    def choose_tiles(self, tuned, gluon):
        if not gluon:
            return super().choose_tiles(tuned, gluon)
        from stage2_cuda.attention.hopper_launches import GluonTile

        tile = GluonTile(self.design)
        self.forward_tiles = self.kernels.AttentionTiles(forward=tile)
        self.backward_tiles = self.kernels.AttentionTiles(dq=tile, dkdv=tile)


def main():
    parser = benchmark_parser(BENCHMARK, __doc__)
    text = "batch, heads, tokens and head size 64, one table for each (default: two shapes)"
    parser.add_argument("--shape", type=attention.parse_shape, nargs="+", default=SHAPES, metavar="BxHxTxD", help=text)
    parser.add_flags(threads=4, rounds=15, milliseconds=30.0, timeout=300)
    args = parser.parse_args()
    specs = [ProcessSpec(name, BENCHMARK, args.threads, options) for name, options in STEPS.items()]
    save_each(args, attention.measure(args, specs), attention.TABLES["gpu-attention"].print)


if __name__ == "__main__":
    run_main(main)

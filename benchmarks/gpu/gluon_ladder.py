"""How much does each step from plain Triton to Gluon gain in attention's kernels? Needs a Hopper GPU.

The rows: the plain Triton kernels, with tiles chosen by timing; the two designs of the Gluon kernels; and the second
design without one of its parts. Each program captures several calls in a CUDA graph; the rounds are interleaved.
"""

import argparse
import sys

from benchmarks.gpu import attention
from benchmarks.harness.processes import ProcessSpec, run_main
from benchmarks.harness.report import add_save_flags, save

# B batch, H heads, T time, D head size

BENCHMARK = "benchmarks.gpu.gluon_ladder"
SHAPES = [(1, 16, 16384, 64), (64, 12, 1024, 64)]
KERNEL_FILES = "forward", "dq", "dkdv"
STEPS = {  # {row: options of CausalAttention}; each row is compared with the first
    "Gluon, a warp for copies": {"design": "specialized"},
    "Gluon, products in flight": {"design": "pipelined"},
    "... a warp for copies, exp2 of several instructions": {"design": "specialized", "change": "exact_exp2"},
    "... a warp for copies, all heads at a time": {"design": "specialized", "change": "one_group"},
    "plain Triton": {"gluon": False},
}


def exact_exp2():
    """Make the kernels call gl.exp2, which also returns denormal numbers."""
    from triton.experimental.gluon import language as gl

    from stage2_cuda.kernels import gluon_launches

    for kernel in KERNEL_FILES:
        gluon_launches.module_of(kernel).exp2 = gl.exp2


def one_group():
    """Compute a tile of every head before the next tile of any head."""
    from stage2_cuda.kernels import gluon_launches

    gluon_launches.GROUP_BYTES = 1 << 62


class CausalAttention(attention.CausalAttention):
    """Attention as in benchmarks.gpu.attention, with one design of the Gluon kernels or with the plain kernels.

    change: the name of a function of this file, which is called first.
    """

    def __init__(self, qkv, dy, n_head, design=None, change=None, gluon=True):
        self.design = design
        if change:
            globals()[change]()
        super().__init__(qkv, dy, n_head, gluon=gluon)

    def choose_tiles(self, tuned, gluon):
        if not gluon:
            return super().choose_tiles(tuned, gluon)
        from stage2_cuda.kernels.gluon_launches import GluonTile

        tile = GluonTile(self.design)
        self.forward_tiles = self.kernels.AttentionTiles(forward=tile)
        self.backward_tiles = self.kernels.AttentionTiles(dq=tile, dkdv=tile)


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "batch, heads, tokens and head size 64, one table for each (default: two shapes)"
    add("--shape", type=attention.parse_shape, nargs="+", default=SHAPES, metavar="BxHxTxD", help=text)
    add("--rounds", type=int, default=15, help="number of rounds; each round times every program (default 15)")
    add("--milliseconds", type=float, default=30, help="approximate device time of one round (default 30)")
    add("--threads", type=int, default=4, help="CPU threads of each process (default 4)")
    add("--timeout", type=int, default=300, help="limit for one round of a process, in seconds (default 300)")
    add_save_flags(add, "gluon_ladder")
    args = parser.parse_args()
    specs = [ProcessSpec(name, BENCHMARK, args.threads, options) for name, options in STEPS.items()]
    for results in attention.measure(args, specs):
        save(BENCHMARK, results, args, args.save_as)


if __name__ == "__main__":
    sys.exit(run_main(main))

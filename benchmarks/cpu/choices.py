"""What does each choice in the NumPy backend gain?

A choice replaces naive NumPy code by faster code that computes the same values. This script times the naive code and
this project's code alternately, on arrays of the sizes in preset `paper`.
"""

import statistics
import time

import numpy as np

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, benchmark_parser, paired_ratio, print_table, save
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.threads import limit_blas
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.numpy_backend import NumpyBackend

ROWS = 512  # a micro-batch: 2 sequences of 256 tokens


def choices():
    """Yield (name, naive, ours) of each choice; naive() and ours() compute the same values."""
    config, rng, backend = PRESETS["paper"], np.random.default_rng(), NumpyBackend()
    C = config.n_embd
    wide = rng.standard_normal((ROWS, 4 * C), np.float32)  # the widest activations of a layer, those of the MLP
    out, pool = np.empty_like(wide), BufferPool()
    activations = range(24)  # 24 arrays of 3 MB are allocated, then all are freed
    yield "cube: x**3 -> x*x*x", lambda: wide**3, lambda: np.multiply(np.multiply(wide, wide, out=out), wide, out=out)
    yield (
        "activations: np.empty -> BufferPool",
        lambda: [np.add(wide, 1, out=np.empty_like(wide)) for _ in activations],
        lambda: [np.add(wide, 1, out=pool.empty(wide.shape, wide.dtype)) for _ in activations],
    )
    slope = np.empty_like(wide)
    yield "GELU and slope: whole arrays -> blocks", lambda: gelu(wide), lambda: backend.gelu(wide, None, out, slope)
    ones = np.ones(ROWS, np.float32)
    yield "bias gradient: x.sum(0) -> ones @ x", lambda: wide.sum(0), lambda: ones @ wide
    weights = [rng.standard_normal((4 * C, C), np.float32) for _ in range(24)]  # together larger than the cache
    row = wide[:1]
    product = np.empty((1, C), np.float32)
    backend.one_row(row, weights[0], product)
    (chosen,) = backend.row_products.names.values()
    for way in ("blas", "einsum"):
        naive = backend.row_products.candidates(weights[0])[way]
        yield (
            f"one row @ w: {way} -> {chosen}, the fastest on this CPU",
            lambda naive=naive: [naive(row, w, product) for w in weights],
            lambda: [backend.one_row(row, w, product) for w in weights],
        )
    if backend.runtime.blas == "mkl":
        square = wide[:, :C].copy()
        yield (
            "products: OpenBLAS -> MKL",
            lambda: [np.matmul(wide, w, out=square) for w in weights],
            lambda: [backend.matmul(wide, w, square) for w in weights],
        )
    qkv = rng.standard_normal((2, 256, 3 * C), np.float32)
    heads = config.n_head
    yield (
        "attention: whole T x T -> causal blocks",
        lambda: attention(qkv, heads),
        lambda: backend.attention_forward(qkv, heads),
    )


def gelu(x):
    """(GELU(x), its derivative) in whole-array operations, with x * x * x for the cube. 0.7978846 is sqrt(2 / pi)."""
    u = np.float32(0.7978846) * (x + np.float32(0.044715) * x * x * x)
    t = np.tanh(u)
    du = np.float32(0.7978846) * (1 + np.float32(3 * 0.044715) * x * x)
    return np.float32(0.5) * x * (1 + t), np.float32(0.5) * (1 + t) + np.float32(0.5) * x * (1 - t * t) * du


def attention(qkv, n_head):
    """Causal attention of qkv (B, T, 3C) that computes all T x T scores; returns (B, T, C)."""
    B, T, C3 = qkv.shape
    q, k, v = qkv.reshape(B, T, 3, n_head, -1).transpose(2, 0, 3, 1, 4)  # (B, H, T, D) each
    s = q @ k.transpose(0, 1, 3, 2) * np.float32((C3 // 3 // n_head) ** -0.5)
    s = np.where(np.tril(np.ones((T, T), bool)), s, np.float32(-1e30))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, C3 // 3)


def seconds_per_call(function, repeat):
    """Seconds of one call of function(), the mean of `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - start) / repeat


def main():
    parser = benchmark_parser(
        "benchmarks.cpu.choices", __doc__, ("", "every choice, 15 rounds"), ("--rounds 3", "a quick trial")
    )
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds of each choice (default 15)")
    add_save_flags(parser.add_argument)
    args = parser.parse_args()
    limit_blas(1)
    results, rows = [], []
    for name, naive, ours in choices():
        repeat = max(1, int(0.02 / seconds_per_call(ours, 2)))  # as many calls as our code makes in 20 ms
        times = [(seconds_per_call(naive, repeat), seconds_per_call(ours, repeat)) for _ in range(args.rounds)]
        naive_seconds, our_seconds = zip(*times, strict=True)
        gain = paired_ratio(naive_seconds, our_seconds)
        results.append({"choice": name, "naive_seconds": naive_seconds, "our_seconds": our_seconds, "gain": gain})
        rows.append(
            {
                "choice": name,
                "naive, us": f"{statistics.median(naive_seconds) * 1e6:,.0f}",
                "ours, us": f"{statistics.median(our_seconds) * 1e6:,.0f}",
                "times as fast": f"{gain['median']:.2f}",
            }
        )
    print_table(rows)
    save("benchmarks.cpu.choices", results, args)


if __name__ == "__main__":
    run_main(main)

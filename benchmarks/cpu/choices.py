"""What does each choice in the NumPy backend gain?

First, choices that concern all kernels: memory, and which library multiplies. Then, each kernel that NumpyBackend
overrides, beside its formula in PlainBackend: both compute the same values. This script times the two alternately, on
arrays of the sizes in preset `paper`.

    python -m benchmarks.cpu.choices             # every choice, 15 rounds
    python -m benchmarks.cpu.choices --rounds 3  # a quick trial
"""

from functools import partial

import numpy as np

from benchmarks.harness.report import paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved, mean_seconds
from benchmarks.harness.script import benchmark
from gpt2core.optimizer import AdamW
from gpt2core.plain_backend import PlainBackend
from gpt2core.presets import PRESETS
from gpt2core.threads import limit_blas
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.numpy_backend import NumpyBackend

B, T = 2, 256  # a micro-batch: 2 sequences of 256 tokens
BLOCKS = 2048  # of the flat arrays of AdamW and of the norm: 2048 x 1024 elements


def choices():
    """Yield (name, naive, ours) of each choice; naive() and ours() compute the same values."""
    config, rng, backend = PRESETS["paper"], np.random.default_rng(), NumpyBackend()
    C = config.n_embd
    wide = rng.standard_normal((B * T, 4 * C), np.float32)  # the widest activations of a layer, those of the MLP
    out, pool = np.empty_like(wide), BufferPool()
    activations = range(24)  # 24 arrays of 3 MB are allocated, then all are freed
    yield "cube: x**3 -> x*x*x", lambda: wide**3, lambda: np.multiply(np.multiply(wide, wide, out=out), wide, out=out)
    yield (
        "activations: np.empty -> BufferPool",
        lambda: [np.add(wide, 1, out=np.empty_like(wide)) for _ in activations],
        lambda: [np.add(wide, 1, out=pool.empty(wide.shape, wide.dtype)) for _ in activations],
    )
    weights = [rng.standard_normal((4 * C, C), np.float32) for _ in range(24)]  # together larger than the cache
    row = wide[:1]
    product = np.empty((1, C), np.float32)
    backend.one_row(row, weights[0], product)
    (chosen,) = backend.row_products.names.values()
    for way in ("blas", "einsum"):
        naive = backend.row_products.candidates(weights[0])[way]
        yield (
            f"one row @ w: {way} -> {chosen}, which RowProducts chose here",
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
    plain, ours = overrides(PlainBackend(), config), overrides(backend, config)
    for name in plain:
        yield f"{name}: formula -> override", plain[name], ours[name]


def overrides(backend, config):
    """{kernel: function() that computes it, forward and backward} on a backend."""
    rng, (C, V, H) = np.random.default_rng(0), (config.n_embd, config.vocab_size, config.n_head)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def compute(*gradients):
        """Compute gradients that a kernel has returned as functions of their destination."""
        return [gradient(None) if callable(gradient) else gradient for gradient in gradients]

    x, a, dy, qkv, d_wide = normal(B, T, C), normal(B, T, C), normal(B, T, C), normal(B, T, 3 * C), normal(B, T, 4 * C)
    w, b, w1, b1, w2 = normal(C), normal(C), 0.02 * normal(C, 4 * C), normal(4 * C), 0.02 * normal(4 * C, C)
    wte, wpe, ids, targets = normal(V, C), normal(T, C), rng.integers(0, V, (B, T)), rng.integers(0, V, B * T)
    (p, m, v, g), decays = (abs(normal(BLOCKS * 1024)) for _ in range(4)), np.ones(BLOCKS, np.int32)
    coefficients = AdamW(0.9, 0.99, 1e-8, 0.1).coefficients(1, 1e-3)

    def linear():
        backend.linear_forward(x, w1, b1)
        compute(*backend.linear_backward(d_wide, x, w1))

    def mlp():
        _, aux = backend.mlp_forward(x, w1, b1, w2)
        compute(*backend.mlp_backward(dy, x, w1, b1, w2, aux))

    def residual_layernorm():
        _, _, aux = backend.residual_layernorm_forward(x, a, b, w, b, 1e-5)
        compute(*backend.residual_layernorm_backward(dy, dy, w, aux))

    def attention():
        y, aux = backend.attention_forward(qkv, H)
        backend.attention_backward(dy, qkv, y, aux, H)

    def embedding():
        backend.embedding_forward(ids, wte, wpe)
        compute(*backend.embedding_backward(dy, ids, wte, wpe))

    def unembed_cross_entropy():
        maxima, sums, _, aux = backend.unembed_cross_entropy_forward(x, wte, targets)
        dloss = np.array(1.0)
        compute(*backend.unembed_cross_entropy_backward(dloss, x, wte, targets, 0.1, maxima, sums, aux))

    def page_sums():
        backend.page_sums(g)

    def adamw_step():
        backend.adamw_step(p, m, v, g, coefficients, np.float64(1.0), decays, (0.9, 0.99))

    kernels = linear, mlp, residual_layernorm, attention, embedding, unembed_cross_entropy, page_sums, adamw_step
    return {kernel.__name__: kernel for kernel in kernels}


@benchmark(__doc__, rounds=15)
def main(parser):
    args = parser.parse_args()
    limit_blas(1)
    results = []
    for name, naive, ours in choices():
        repeat = max(1, int(0.02 / mean_seconds(ours, 2)))  # as many calls as our code makes in 20 ms
        functions = {"naive_seconds": naive, "our_seconds": ours}
        timers = {side: partial(mean_seconds, function, repeat) for side, function in functions.items()}
        seconds = interleaved(timers, args.rounds)
        results.append({"choice": name, **seconds, "gain": paired_ratio(*seconds.values())})
    TABLES["cpu-choices"].print(results)
    save(results, args)

"""fp32 on tensor cores: three passes of tf32 against three of fp16, cublasLt's own fp32, and tiles of attention."""

import itertools

import numpy as np

from benchmarks import gpu_tune as tune
from benchmarks import trial_tf32x3 as tf32x3
from benchmarks.harness import run
from stage2_cuda.kernels import attention, fp16x3
from stage2_cuda.products import cublaslt

# (M, K, N), transposes: forward, input gradients, weight gradients of a layer
KINDS = {"": (False, False), "dx": (False, True), "dw": (True, False)}
SHAPES = {
    "paper": [((4096, 384, n), "") for n in (384, 1152, 1536)]
    + [((4096, 1536, 384), "")]
    + [((4096, n, 384), "dx") for n in (384, 1152, 1536)]
    + [((4096, 384, 1536), "dx")]
    + [((384, 4096, n), "dw") for n in (384, 1152, 1536)]
    + [((1536, 4096, 384), "dw")],
    "gpt2": [((65536, 768, 3072), ""), ((65536, 3072, 768), "dx"), ((768, 65536, 3072), "dw")],
}
TILES = [(64, 64, 64, 4, 2), (64, 64, 64, 4, 3), (64, 64, 128, 4, 2), (64, 128, 64, 4, 2), (128, 64, 64, 4, 2)]
TILES += [(128, 64, 64, 8, 2), (128, 64, 64, 8, 3), (128, 128, 64, 8, 2), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3)]


def operands(of, shape, kind):
    (m, k, n), (ta, tb) = shape, KINDS[kind]
    a = of.rng.standard_normal((k, m) if ta else (m, k), dtype=np.float32)
    return a, of.rng.standard_normal((n, k) if tb else (k, n), dtype=np.float32), ta, tb


def split(of, x):
    halves, scales = fp16x3.split_shapes(x)
    return fp16x3.split(of.xp.empty(halves, np.float16), of.floats(*scales), x)


def old_product(of, out, a, b, ta, tb, timed="both"):
    halves = [of.floats(*tf32x3.halves_shape(a, ta)), of.floats(*tf32x3.halves_shape(b, not tb))]
    shape = tf32x3.partials_shape(*out.shape, halves[0].shape[2])
    partials = None if shape is None else of.floats(*shape)

    def split_them():
        tf32x3.halves(halves[0], a, ta)
        tf32x3.halves(halves[1], b, not tb)

    split_them()
    product = lambda: tf32x3.product(out, partials, *halves)  # noqa: E731
    return {"both": lambda: (split_them(), product()), "product": product}[timed]


def new_product(of, out, a, b, ta, tb, timed="both"):
    count = fp16x3.partials_shape(*out.shape, a.shape[0 if ta else 1])
    partials = None if count is None else of.floats(*count)
    left, right = split(of, a), split(of, b)
    product = lambda: fp16x3.product(out, partials, left, right, None, ta, tb)  # noqa: E731
    return {"both": lambda: (split(of, a), split(of, b), product()), "product": product}[timed]


def products(of, rows, *_):
    name = "paper" if rows == 4096 else "gpt2"
    gemm = cublaslt(of.xp, True, of.xp.cuda.Stream(non_blocking=True))
    for shape, kind in SHAPES[name]:
        a, b, ta, tb = operands(of, shape, kind)
        out, moved = of.floats(shape[0], shape[2]), 4 * (a.size + b.size + shape[0] * shape[2])
        print(f"# {shape} {kind}: tf32 both, tf32 product, fp16 both, fp16 product with tiles, cublasLt fp32")
        for make, module in ((old_product, tf32x3), (new_product, fp16x3)):
            for timed in ("both", "product"):
                tiles = [fp16x3.Tile(*tile) for tile in TILES] if (make, timed) == (new_product, "product") else []
                candidates = [{}, *(dict(SMALL=tile, LARGE=tile, MANY=1) for tile in tiles)]
                prepare = lambda make=make, timed=timed, call=(out, a, b, ta, tb): make(of, *call, timed)  # noqa: E731
                yield module, prepare, [out], candidates, moved
        prepare = lambda call=(out, a, b), ta=ta, tb=tb: lambda: gemm.matmul(*call, trans_a=ta, trans_b=tb)  # noqa: E731
        yield fp16x3, prepare, [out], [{}], moved


def splits(of, rows, channels, *_):
    for columns in (channels, 4 * channels):
        x = of.rng.standard_normal((rows, columns), dtype=np.float32)
        halves, scales = fp16x3.split_shapes(x)
        halves, scales = of.xp.empty(halves, np.float16), of.floats(*scales)
        prepare = lambda x=x, out=(halves, scales): lambda: fp16x3.split(*out, x)  # noqa: E731
        yield fp16x3, prepare, [scales], [{}, dict(SPLIT_WARPS=8), dict(SPLIT_WARPS=32)], 2 * x.nbytes
        for turned in (False, True):
            out = of.floats(*tf32x3.halves_shape(x, turned))
            prepare = lambda x=x, out=out, turned=turned: lambda: tf32x3.halves(out, x, turned)  # noqa: E731
            yield tf32x3, prepare, [out], [{}], 3 * x.nbytes


def attention_fp32(of, rows, *_):
    if rows != 4096:
        return
    B, T, H, D, precision = 16, 256, 6, 64, "tf32x3"
    qkv, dy = (of.rng.standard_normal((B, T, parts * H * D), dtype=np.float32) for parts in (3, 1))
    y, lse, delta, dqkv = of.xp.empty_like(dy), of.floats(B, H, T), of.floats(B, H, T), of.xp.empty_like(qkv)
    *_, used = attention.plan(qkv, H, precision)
    attention.attention_forward(y, lse, qkv, H, precision)
    out = [y.copy(), lse.copy()]
    tiles = [
        attention.Tile(*tile) for tile in itertools.product((32, 64, 128), (32, 64), (4, 8), (1, 2, 3)) if tile[2] == 4
        or tile[0] == 128
    ]  # fmt: skip

    def several(**parts):
        configs = [used._replace(**{part: tile}) for part, chosen in parts.items() for tile in chosen]
        return [{}, *(dict(CONFIGS={precision: {(D, T): config}}) for config in configs)]

    prepare = lambda: lambda: attention.attention_forward(*out, qkv, H, precision)  # noqa: E731
    yield attention, prepare, out, several(forward=tiles), qkv.nbytes + y.nbytes
    prepare = lambda: lambda: attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H, precision)  # noqa: E731
    square = [tile for tile in tiles if tile.M == tile.N]
    candidates = several(dq=tiles, dkdv=tiles, both=square)
    yield attention, prepare, [dqkv], candidates, 2 * qkv.nbytes + 2 * y.nbytes


def errors():
    """Relative norms against float64."""
    of = tune.Arrays()
    gemm = cublaslt(of.xp, True, of.xp.cuda.Stream(non_blocking=True))
    for shape, kind in (((512, 384, 384), ""), ((512, 3072, 768), "dx"), ((384, 65536, 384), "dw")):
        a, b, ta, tb = operands(of, shape, kind)
        a *= 10.0 ** of.xp.asarray(np.random.default_rng(1).uniform(-4, 0, a.shape), np.float32)
        want = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
        out = of.floats(shape[0], shape[2])
        calls = {
            "tf32x3": old_product(of, out, a, b, ta, tb),
            "fp16x3": new_product(of, out, a, b, ta, tb),
            "cublasLt": lambda out=out, a=a, b=b, ta=ta, tb=tb: gemm.matmul(out, a, b, trans_a=ta, trans_b=tb),
        }
        for name, call in calls.items():
            out[...] = np.nan
            call()
            print(f"{shape} {kind} {name}: error {tune.error_of([out], [want]):.2e}", flush=True)


if __name__ == "__main__":
    tune.BENCHMARK = "benchmarks.trial_products"
    tune.KERNELS.clear()
    tune.KERNELS.update(products=products, splits=splits, attention=attention_fp32)
    run(tune.main)
    errors()

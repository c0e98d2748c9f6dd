"""Does it save time to fuse a matrix product with LayerNorm before it, or with GELU or the derivative of GELU after it?

Each fusion has up to three versions. The first is a separate kernel and a product of cublasLt. The second is a product
of cublasLt with an epilogue, if cublasLt has this epilogue. The third is one Triton kernel that computes both. The
Triton kernels of the third version are slower, so no stage uses them. With --gluon, on a Hopper GPU, the tiles of the
Gluon products, which compute GELU during the next tile, are compared with the epilogues of cublasLt. Each tile has its
own process.

    python -m benchmarks.gpu.fusions              # every fusion, 5 rounds
    python -m benchmarks.gpu.fusions --rounds 1   # a quick trial
    python -m benchmarks.gpu.fusions --gluon      # tiles of the Gluon products
"""

from functools import partial

import numpy as np
import triton
import triton.language as tl

from benchmarks.gpu.timing import time_functions
from benchmarks.harness.ours import check_gpu
from benchmarks.harness.processes import BenchmarkFailed, BenchmarkProcess, ProcessSpec
from benchmarks.harness.report import save_each
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED
from benchmarks.harness.script import benchmark
from gpt2core.errors import ConfigError
from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.gluon_launch import gluon_kind
from stage2_cuda.runtime.triton_launch import descriptor, first_line, gpu_model, launch
from torch_bridge.kernels.fused_matmul import MatmulTile, matmul, tile_origin

# A product is x (n, c) w (c, k), with bias b (k). In a kernel, N, K and C are the sizes of a tile in n, k and c.
# _desc: TMA descriptors, which load and store whole tiles.

SEPARATE, EPILOGUE = "separate kernel", "cublasLt epilogue"
TOLERANCE = 1e-2  # largest relative difference of two results that are rounded to 16 bits
DIRECTIONS = {"GELU after": "forward", "GELU' after": "backward"}  # of the Gluon products
# (n, c, k) of the MLP's first product and of the q, k, v projection, in gpt2 and in paper
SHAPES = [(65536, 768, 3072), (65536, 768, 2304), (4096, 384, 1536), (4096, 384, 1152)]
TILES = [(128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 3)]  # (N, K, C, warps, stages)
A, B = tl.constexpr((2 / np.pi) ** 0.5), tl.constexpr(0.044715)  # gelu(x) = x (1 + tanh(u)) / 2, u = A (x + B x^3)


@triton.jit
def gelu_backward_kernel(
    dh_desc, sums_ptr, dy_desc, w2_desc, h_desc, n, k, c, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr
):
    """dh = (dy w2^T) times the derivative of GELU at h, with w2 (k, c).

    sums (tiles of rows, k): dh summed over the rows of each tile. The gradient of the bias is their sum over the tiles.
    """
    row, col = tile_origin(n, k, N, K)
    acc = tl.zeros((N, K), tl.float32)
    for start in tl.range(0, c, C):
        acc = tl.dot(dy_desc.load([row, start]), w2_desc.load([col, start]).T, acc)
    h = h_desc.load([row, col]).to(tl.float32)
    s = sigmoid_of_2u(h)
    acc *= s + 2 * h * s * (1 - s) * (1 + 3 * h * h * B) * A
    dh_desc.store([row, col], acc.to(dh_desc.dtype))
    tl.store(sums_ptr + row // N * k + col + tl.arange(0, K), tl.sum(acc, 0))


@triton.jit
def layernorm_product_kernel(
    y_desc, x_desc, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, w_desc, b_ptr, n, k, c,
    N: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y = ((x - mean) rstd weight + bias) w + b: LayerNorm is applied to each tile of x after loading it."""
    row, col = tile_origin(n, k, N, K)
    rows = row + tl.arange(0, N)
    mean, rstd = tl.load(mean_ptr + rows)[:, None], tl.load(rstd_ptr + rows)[:, None]
    acc = tl.zeros((N, K), tl.float32)
    for start in tl.range(0, c, C):
        channels = start + tl.arange(0, C)
        x = (x_desc.load([row, start]).to(tl.float32) - mean) * rstd
        x *= tl.load(weight_ptr + channels).to(tl.float32)[None, :]
        x += tl.load(bias_ptr + channels).to(tl.float32)[None, :]
        acc = tl.dot(x.to(x_desc.dtype), w_desc.load([start, col]), acc)
    acc += tl.load(b_ptr + col + tl.arange(0, K)).to(tl.float32)[None, :]
    y_desc.store([row, col], acc.to(y_desc.dtype))


@triton.jit
def residual_statistics_kernel(s_ptr, mean_ptr, rstd_ptr, x_ptr, branch_ptr, channels, WIDTH: tl.constexpr):
    """s = x + branch, and the mean and 1 / std of each row of s: what layernorm_product_kernel needs."""
    cols = tl.arange(0, WIDTH)
    offs, mask = tl.program_id(0).to(tl.int64) * channels + cols, cols < channels
    s = tl.load(x_ptr + offs, mask, 0).to(tl.float32) + tl.load(branch_ptr + offs, mask, 0).to(tl.float32)
    tl.store(s_ptr + offs, s, mask)
    mean = tl.sum(s, 0) / channels
    centred = tl.where(mask, s - mean, 0)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), 1 / tl.sqrt(tl.sum(centred * centred, 0) / channels + 1e-5))


def functions_of(cupy, backend, n, c, k, gluon):
    """({(fusion, version): function}, {fusion: arrays that the functions write}) for the sizes n, c, k.

    The functions read the same random arrays in 16 bits. In the names of fusions, GELU' is the derivative of GELU;
    "after" and "before" are relative to the product. gluon: only the epilogues of cublasLt and the Gluon products.
    """
    from stage2_cuda.gemm import gluon_gelu
    from stage2_cuda.kernels import column_sums, gelu, layernorm

    rng, dtype, gemm = np.random.default_rng(SEED), backend.compute_dtype, backend.products.gemm

    def random(*shape):
        return cupy.asarray(rng.standard_normal(shape, np.float32) * 0.5).astype(dtype)

    def empty_fp32(*shape):
        return cupy.empty(shape, np.float32)

    x, w, b, dy, w2 = random(n, c), random(c, k), random(k), random(n, c), random(k, c)
    weight, bias, branch, zero = random(c), random(c), random(n, c), cupy.zeros(c, dtype)
    h, y, dh, s, normed = (cupy.empty((n, size), dtype) for size in (k, k, k, c, c))
    mean, rstd, db = empty_fp32(n), empty_fp32(n), empty_fp32(k)
    partials, sums = empty_fp32(*gelu.gelu_partials_shape(n, k)), empty_fp32(*column_sums.partials_shape(n, k))

    def layernorm_forward():
        layernorm.residual_layernorm_forward(s, normed, mean, rstd, x, branch, zero, weight, bias, 1e-5)

    def residual_statistics():
        width = triton.next_power_of_2(c)
        launch(residual_statistics_kernel, (n,), s, mean, rstd, x, branch, c, WIDTH=width, num_warps=4)

    def in_order(*launches):
        return lambda: [function() for function in launches]

    def triton_product(kernel, tile, *arguments):
        N, K, C, warps, stages = tile
        grid = (triton.cdiv(n, N) * triton.cdiv(k, K),)
        launch(kernel, grid, *arguments, n, k, c, N=N, K=K, C=C, num_warps=warps, num_stages=stages)

    functions = {
        ("GELU after", SEPARATE): in_order(lambda: gemm.matmul(h, x, w), lambda: gelu.bias_gelu_forward(y, h, b)),
        ("GELU after", EPILOGUE): lambda: gemm.matmul(y, x, w, bias=b, activation="gelu", aux=h),
        ("GELU' after", SEPARATE): in_order(
            lambda: gemm.matmul(dh, dy, w2, trans_b=True),
            lambda: gelu.bias_gelu_backward(dh, partials, dh, h, b),
            lambda: column_sums.add_partials(partials, db),
        ),
        ("GELU' after", EPILOGUE): in_order(
            lambda: gemm.matmul(dh, dy, w2, trans_b=True, activation="dgelu", aux=h),
            lambda: column_sums.column_sums(db, sums, dh),
        ),
        ("LayerNorm before", SEPARATE): in_order(layernorm_forward, lambda: gemm.matmul(y, normed, w, bias=b)),
    }
    if gluon:
        functions = {name: function for name, function in functions.items() if name[1] == EPILOGUE}
        for tile in gluon_gelu.FORWARD_TILES:
            functions["GELU after", tile.text()] = partial(gluon_gelu.gelu_product, y, h, x, w, b, tile)
        for tile in gluon_gelu.BACKWARD_TILES:
            tile_sums = empty_fp32(*gluon_gelu.partials_shape(n, k, tile))
            functions["GELU' after", tile.text()] = in_order(
                partial(gluon_gelu.gelu_backward_product, dh, tile_sums, dy, w2, h, tile),
                partial(column_sums.add_partials, tile_sums, db),
            )
    for tile in () if gluon else TILES:
        N, K, C = tile[:3]
        name, tile_sums = f"Triton {N} x {K} x {C}", empty_fp32(triton.cdiv(n, N), k)
        x_desc, dy_desc, s_desc = (descriptor(array, (N, C)) for array in (x, dy, s))
        y_desc, h_desc, dh_desc = (descriptor(array, (N, K)) for array in (y, h, dh))
        w_desc, w2_desc = descriptor(w, (C, K)), descriptor(w2, (K, C))
        functions["GELU after", name] = partial(matmul, y, x, w, b, "gelu", h, MatmulTile(*tile, c_at="end"))
        functions["GELU' after", name] = in_order(
            partial(triton_product, gelu_backward_kernel, tile, dh_desc, tile_sums, dy_desc, w2_desc, h_desc),
            partial(column_sums.add_partials, tile_sums, db),
        )
        norm = mean, rstd, weight, bias
        functions["LayerNorm before", name] = in_order(
            residual_statistics,
            partial(triton_product, layernorm_product_kernel, tile, y_desc, s_desc, *norm, w_desc, b),
        )
    return functions, {"GELU after": (y, h), "GELU' after": (dh, db)}


def prepare(module, fusion, version):
    """Called in the process of a tile. Return run_round(rounds): the times of it and of cublasLt's epilogue."""
    from stage2_cuda.cuda_backend import CudaBackend

    def run_round(rounds):
        backend = CudaBackend("bf16", deterministic=False)
        functions, outputs = functions_of(backend.xp, backend, *SHAPES[0], gluon=True)
        compared = {name: functions[fusion, name] for name in (EPILOGUE, version)}
        return time_functions(compared, rounds, outputs=outputs[fusion], tolerance=TOLERANCE)

    return run_round


def gluon_row(args, fusion, tile):
    """The row of a Gluon product, with the "error" if it fails, hangs or ends its process."""
    row = {"direction": DIRECTIONS[fusion], "variant": tile.text()}
    options = {"fusion": fusion, "version": tile.text()}
    spec = ProcessSpec(f"{fusion}, {tile.text()}", "benchmarks.harness.ours", 1, options)
    try:
        with BenchmarkProcess(spec, args.benchmark, args.timeout) as process:
            found = process.run_round(rounds=args.rounds)
    except BenchmarkFailed as error:
        print(error, flush=True)
        return row | {"error": first_line(error)}
    times = found[tile.text()]
    if "failed" in times:
        print(f"{spec.name}: {times['failed']}", flush=True)
        return row | {"error": times["failed"]}
    return row | {"us": 1e3 * times["ms"], "cublasLt us": 1e3 * found[EPILOGUE]["ms"]}


def gluon_rows(args):
    """Yield [the row] of each Gluon product. Raises ConfigError if the GPU has none."""
    from stage2_cuda.gemm.gluon_gelu import BACKWARD_TILES, FORWARD_TILES

    if gluon_kind(*gpu_model()) is None:
        raise ConfigError("--gluon: this GPU or this Triton has no Gluon kernels: use a Hopper GPU and Triton 3.6")
    for fusion, tiles in zip(DIRECTIONS, (FORWARD_TILES, BACKWARD_TILES), strict=True):
        for tile in tiles:
            yield [gluon_row(args, fusion, tile)]


def fusion_rows(args):
    """Yield the rows of each shape."""
    from stage2_cuda.cuda_backend import CudaBackend

    backend = CudaBackend("bf16", deterministic=False)
    for n, c, k in SHAPES:
        functions, _ = functions_of(backend.xp, backend, n, c, k, gluon=False)
        sizes = {"rows": n, "c": c, "k": k}
        yield [
            {**sizes, "fusion": fusion, "version": version, "us": 1e3 * each["ms"]}
            for (fusion, version), each in time_functions(functions, args.rounds).items()
            if "ms" in each
        ]


@benchmark(
    common=dict(rounds=5, timeout=60),
    gluon=dict(
        action="store_true",
        help="compare the Gluon products with the epilogues of cublasLt, on a Hopper GPU",
        save_as="gelu_product",
    ),
)
def main(args):
    check_gpu()
    if not args.gluon:
        save_each(args, fusion_rows(args), TABLES["gpu-fusions"].print)
        return 0
    results = save_each(args, gluon_rows(args))
    TABLES["gpu-gelu"].print(results)
    return int(any("error" in result for result in results))

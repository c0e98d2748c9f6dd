"""Is a Gluon product that computes GELU during the next tile faster than cublasLt's epilogues? Needs a Hopper GPU.

Forward: h = x w + b and y = gelu(h). Backward: dh = (dy w2') gelu'(h) and its column sums. For each variant of the
kernel in stage2_cuda/gemm/gluon_gelu.py one process compiles it, times it and cublasLt in interleaved rounds, and
compares their results; tests/stage2/test_gluon_gelu.py compares those of each variant with float64. A variant that
fails or exceeds the time limit gets a row with the error. The processes compile at the same time, and time one after
another.

    python -m benchmarks.gpu.gelu_product                            # every variant
    python -m benchmarks.gpu.gelu_product --only forward --rounds 1  # a quick trial
"""

# x, dy (M, K); w (K, N); w2, h, y, dh: see gluon_gelu.py

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from benchmarks.gpu.fusions import microseconds
from benchmarks.harness.ours import check_gpu
from benchmarks.harness.processes import BenchmarkFailed, BenchmarkProcess, ProcessSpec, progress, run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED
from gpt2core.errors import ConfigError
from stage2_cuda.runtime.gluon_launch import gluon_kind
from stage2_cuda.runtime.triton_launch import gpu_model
from stage2_cuda.tuning.tuner import difference

BENCHMARK = "benchmarks.gpu.gelu_product"
SHAPE = (65536, 768, 3072)  # (M, K, N) in GPT-2 124M with 64 x 1024 tokens
TOLERANCE = 1e-2  # relative norm of the difference: both results are rounded to 16 bits


class Product:
    """One variant on random arrays of one shape. xp: cupy; dtype: of all arrays except the partial sums."""

    def __init__(self, xp, dtype, backward, tile, shape):
        from stage2_cuda.gemm import gluon_gelu

        self.module, self.backward, self.tile, (M, K, N) = gluon_gelu, backward, tile, shape
        rng = np.random.default_rng(SEED)

        def random(*sizes, scale=1.0):
            return xp.asarray(rng.standard_normal(sizes, np.float32) * np.float32(scale)).astype(dtype)

        self.a = random(M, K)
        self.b = random(*((N, K) if backward else (K, N)), scale=1.5 * K**-0.5)
        self.h = random(M, N, scale=1.5) if backward else xp.empty((M, N), dtype)
        self.out = xp.empty((M, N), dtype)  # y or dh
        self.bias = None if backward else random(N)
        self.partials = xp.empty(gluon_gelu.partials_shape(M, N, tile), np.float32) if backward else None

    def run(self):
        if self.backward:
            self.module.gelu_backward_product(self.out, self.partials, self.a, self.b, self.h, self.tile)
        else:
            self.module.gelu_product(self.out, self.h, self.a, self.b, self.bias, self.tile)


def prepare(module, direction, index):
    """A function that answers the requests "compile" and "time" for one variant."""
    from stage2_cuda.cuda_backend import CudaBackend
    from stage2_cuda.gemm import gluon_gelu
    from stage2_cuda.kernels import column_sums
    from stage2_cuda.runtime import triton_launch

    backward, backend = direction == "backward", CudaBackend("bf16", deterministic=False)
    tile = (gluon_gelu.BACKWARD_TILES if backward else gluon_gelu.FORWARD_TILES)[index]
    xp, gemm = backend.xp, backend.products.gemm
    product = Product(xp, backend.compute_dtype, backward, tile, SHAPE)
    a, b, h, out, bias = product.a, product.b, product.h, product.out, product.bias
    sums, partials = xp.empty(out.shape[1], np.float32), xp.empty(column_sums.partials_shape(*out.shape), np.float32)

    def compile():
        triton_launch.compile_ahead(product.run)
        triton_launch.launcher().wait_for_threads()
        return {}

    def ours():
        product.run()
        if backward:
            column_sums.add_partials(product.partials, sums)

    def library():
        if backward:
            gemm.matmul(out, a, b, trans_b=True, activation="dgelu", aux=h)
            column_sums.column_sums(sums, partials, out)
        else:
            gemm.matmul(out, a, b, bias=bias, activation="gelu", aux=h)

    def time(rounds):
        ours()
        found = out.copy(), sums.copy()
        library()
        pairs = zip(found, (out, sums), strict=True)
        differences = [difference(*pair) for pair in (pairs if backward else list(pairs)[:1])]
        if not max(differences) <= TOLERANCE:
            return {"error": f"the results differ by {max(differences):.1e} from those of cublasLt"}
        return microseconds({"us": ours, "product us": product.run, "cublasLt us": library}, rounds)

    return lambda action, **options: {"compile": compile, "time": time}[action](**options)


def variants(only):
    """[(direction, index, text)] of the variants whose direction or text contains `only`."""
    from stage2_cuda.gemm.gluon_gelu import BACKWARD_TILES, FORWARD_TILES

    tiles = {"forward": FORWARD_TILES, "backward": BACKWARD_TILES}
    found = [(way, i, tile.text()) for way, each in tiles.items() for i, tile in enumerate(each)]
    return [variant for variant in found if only in " ".join((variant[0], variant[2]))]


def answer(process, timeout, **request):
    """The answer to a request, or {"error": text} if there is none within `timeout` seconds."""
    process.timeout = timeout
    try:
        return process.run_round(**request)
    except BenchmarkFailed as error:
        first, *rest = str(error).removeprefix(f"benchmark process '{process.spec.name}' ").splitlines()
        return {"error": (rest[-1] if rest else first.partition(";")[0])[:120]}


def measure(args):
    """[result] of all variants."""
    chosen = variants(args.only)
    if not chosen:
        raise ConfigError(f'--only "{args.only}": no variant contains this text')
    with ExitStack() as stack:

        def start(variant):
            way, index, text = variant
            spec = ProcessSpec(f"{way} {text}", BENCHMARK, 1, {"direction": way, "index": index})
            process = stack.enter_context(BenchmarkProcess(spec, args.benchmark, args.compile_timeout))
            return process, answer(process, args.compile_timeout, action="compile")

        progress(f"compiling {len(chosen)} variants")
        with ThreadPoolExecutor(len(chosen)) as threads:
            started = list(threads.map(start, chosen))
        results = []
        for (way, _, text), (process, compiled) in zip(chosen, started, strict=True):
            progress(f"{way} {text}")
            result = {"direction": way, "variant": text} | {k: v for k, v in compiled.items() if k == "error"}
            if "error" not in result:
                result |= answer(process, args.timeout, action="time", rounds=args.rounds)
            results.append(result)
            process.__exit__()  # its memory is freed before the next variant is timed
        progress("")
        return results


def main():
    parser = benchmark_parser(BENCHMARK, __doc__, rounds=5)
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help='only variants whose text contains this, such as "forward"')
    add("--timeout", type=int, default=20, help="limit for the times of a variant (default 20 s)")
    add("--compile-timeout", type=int, default=60, help="limit for the start and for compiling (default 60 s)")
    args = parser.parse_args()
    check_gpu()
    if gluon_kind(*gpu_model()) is None:
        raise ConfigError("this GPU or this Triton has no Gluon kernels: use a Hopper GPU and Triton 3.6 or later")
    results = measure(args)
    TABLES["gpu-gelu"].print(results)
    for result in results:
        if "error" in result:
            print(f"{result['direction']} {result['variant']}: {result['error']}")
    print("us, cublasLt us: the product and, in backward, the column sums")
    save(results, args)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    run_main(main)

"""Compile the kernels for a GPU without having one, and print their registers, spills and shared memory.

    python tests/tools/compiled.py --preset gpt2 --precision bf16
    python tests/tools/compiled.py --precision fp32 --gpu a100 --kernel attention --keep out/kernels

Training and generation of a preset with two layers run on NumPy arrays. Each launch is recorded as a variant (the
kernel and everything that Triton specialises on), which is compiled and never run. --keep writes PTX and machine code,
the machine code with source lines.
"""

# B batch, T time, C channels, H heads, D head size, V vocabulary

import contextlib
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # started as a script
os.environ.pop("TRITON_INTERPRET", None)  # triton.jit reads it when a kernel is defined

if importlib.util.find_spec("ml_dtypes") is None:
    print("error: ml_dtypes, the bf16 type of NumPy, is not installed: pip install ml_dtypes", file=sys.stderr)
    sys.exit(2)

import numpy as np  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.harness.processes import run_main  # noqa: E402
from benchmarks.harness.report import BenchmarkParser  # noqa: E402
from gpt2core.architecture import parameter_shapes  # noqa: E402
from gpt2core.data import Windows  # noqa: E402
from gpt2core.engine.fast_trainer import FastTrainer  # noqa: E402
from gpt2core.errors import Diverged  # noqa: E402
from gpt2core.parallel import parallel_trainer as gpt2core_trainer  # noqa: E402
from gpt2core.parallel.evaluation import evaluate  # noqa: E402
from gpt2core.parallel.tensor.loaded_model import load_model  # noqa: E402
from gpt2core.presets import PRESETS  # noqa: E402
from gpt2core.sampler import Greedy, KVCache, Sampling, generate_batch  # noqa: E402
from gpt2core.text.only_tokens import OnlyTokens  # noqa: E402
from gpt2core.training_loop import read_batch  # noqa: E402
from stage2_cuda import cuda_backend  # noqa: E402
from stage2_cuda.attention import launches as attention  # noqa: E402
from stage2_cuda.attention import tuned_tiles  # noqa: E402
from stage2_cuda.cuda_backend import PRECISIONS  # noqa: E402
from stage2_cuda.gemm import gluon_gelu  # noqa: E402
from stage2_cuda.runtime import cuda_launch, triton_launch  # noqa: E402
from tests.tools import sanitize  # noqa: E402
from torch_bridge.kernels import attention_parts, fp16x3_launches, fused_matmul  # noqa: E402


class Target(NamedTuple):
    """A GPU: its compute capability, and the bytes of shared memory that a program may use."""

    capability: tuple
    shared: int


SLOW = {  # kernels that take the compiler 1 to 6 s each; the suite compiles others of the same kind
    "attention.backward.dkdv_kernel", "attention.hopper_dkdv.specialized_kernel",
    "attention.hopper_dq.specialized_kernel", "attention.hopper_forward.specialized_kernel",
    "decoding.cached_attention.cached_kernel", "decoding.sampling.append_sampled_kernel", "gemm.fp16x3.product_kernel",
    "gemm.gluon_gelu.gelu_kernel", "kernels.attention_fp16x3.backward_kernel",
    "kernels.attention_fp16x3.forward_kernel", "kernels.attention_fp16x3.split_kernel",
}  # fmt: skip
ADDED_ROWS = "fp32", "bf16"  # precisions in which the suite compares the order of the sums of add_rows()
GPUS = {"a100": Target((8, 0), 163 << 10), "h200": Target((9, 0), 227 << 10)}
REGISTERS, WARPS = 1 << 16, 64  # of one multiprocessor of either GPU


# -- recording launches -----------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """One kernel for one GPU; specialization: what Triton specialises on, in its own JSON format."""

    gpu: str
    module: str
    function: str
    specialization: str

    @property
    def kernel(self):
        return getattr(importlib.import_module(self.module), self.function)


class Address:
    """The attributes of a CuPy array that a launch reads, of a NumPy array."""

    def __init__(self, array):
        self.dtype, self.shape, self.strides, self.flags = array.dtype, array.shape, array.strides, array.flags
        self.data = SimpleNamespace(ptr=array.ctypes.data)


class RecordedVariant:
    """Takes the place of a compiled kernel in the cache of GpuLauncher: a launch sets gpu.last."""

    def __init__(self, gpu, variant):
        self.gpu, self.variant = gpu, variant

    def __getitem__(self, grid):
        return self

    def __call__(self, *_):
        self.gpu.last = self.variant


class RecordingLauncher(triton_launch.GpuLauncher):
    """A GpuLauncher that records the variant of each launch and neither compiles nor runs it."""

    xp = SimpleNamespace(ndarray=Address)

    def __init__(self, name):
        self.name, self.device = name, lambda: name
        self.compiled, self.variants, self.last = {}, {}, None
        self.only_compiles, self.threads = False, SimpleNamespace(result=lambda key: None)

    def capability(self, device=None):
        return GPUS[self.name].capability

    def gpu_model(self):
        return GPUS[self.name].capability, self.name.upper()

    def launch(self, kernel, grid, arguments, options):
        arguments = [Address(value) if isinstance(value, np.ndarray) else value for value in arguments]
        super().launch(kernel, grid, arguments, options)
        expected = self.last
        self.new_variant(None, kernel, arguments, options)
        assert self.last == expected, f"triton_launch has one key for two variants: {expected} and {self.last}"

    def load(self, kernel, arguments, options):
        kernel.warmup(*arguments, grid=(1,), **options)
        return RecordedVariant(self, self.last)

    def record(self, *, fn, compile, **_):
        """Triton's jit_cache_hook, called before compiling; returning True prevents the compilation."""
        kernel = fn.jit_function.fn
        self.last = Variant(self.name, kernel.__module__, kernel.__name__, compile["specialization_data"])
        self.variants[self.last] = None
        return True

    @contextlib.contextmanager
    def active(self):
        """A context in which this object launches all kernels, with NumPy arrays as arguments."""
        with contextlib.ExitStack() as stack:

            def replace(owner, name, value):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            launcher = SimpleNamespace(
                xp=np,
                launch=self.launch,
                can_overlap=self.can_overlap,
                gpu_model=self.gpu_model,
                multiprocessors=lambda: 132,
                only_compiles=False,
            )
            replace(triton_launch, "launcher", lambda: launcher)
            replace(triton_launch, "interpreted", lambda: True)  # NumPy arrays, and no CUDA graphs
            replace(cuda_launch, "launch", lambda *_, **__: None)  # CUDA C: test_cluster_step.py compiles it
            replace(cuda_backend, "INTERPRETER_PRECISIONS", tuple(PRECISIONS))
            replace(gpt2core_trainer, "initial_parameters", zeros)
            replace(triton.knobs.runtime, "jit_cache_hook", self.record)
            activate(self.name)
            yield


def activate(gpu):
    """Make Triton compile for this GPU."""
    major, minor = GPUS[gpu].capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: gpu, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )


class NoProducts:
    """Replaces CublasLt, whose products are not Triton kernels; computes nothing."""

    choices = {}

    def adopt(self, choices):
        pass

    def matmul(self, *_, **__):
        pass


class Backend(cuda_backend.CudaBackend):
    """CudaBackend on NumPy arrays with the launches of a GPU; nothing is computed."""

    def __init__(self, precision):
        super().__init__(precision)
        self.products.gemm = NoProducts()

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)  # token arrays must hold valid tokens


# -- programs to record -----------------------------------------------------------------------------------------------


def two_layers(preset, **sizes):
    """The preset's GPT2Config with two layers."""
    return dataclasses.replace(PRESETS[preset], n_layer=2, **sizes)


def zeros(config, seed=0):
    """Replaces initial_parameters, which would take seconds."""
    return ((name, np.zeros(shape, np.float32)) for name, shape in parameter_shapes(config))


def train(config, precision, batch, dropout=0.0, **options):
    """A training step, an evaluation, and the first kernels of a resumed run."""
    T = config.block_size
    windows = Windows(np.zeros(batch * T + 1, np.int32), T)
    sizes = dict(batch_size=batch, seq_len=T, micro_batches=1)
    optimizer = dict(clip=1.0, weight_decay=0.1, **options)
    trainer = FastTrainer(config, [Backend(precision)], **sizes, optimizer=optimizer, dropout=dropout)
    trainer.compute_update(read_batch(trainer, windows), trainer.optimizer.coefficients(1, 1e-3))
    with contextlib.suppress(Diverged):  # the loss is uninitialised memory
        evaluate(trainer, windows)
    trainer.optimizer.refresh_copy(1)


def write(config, precision, batch, rules):
    """Generation with each sampling rule: the prompt, a step with the cache, a step over the whole window."""
    model = load_model(config, dict(zeros(config)), Backend(precision))
    prompt = [0] * (config.block_size - 1)
    for rule in rules:
        for _ in generate_batch(model, [prompt] * batch, 3, [rule] * batch):
            pass


def attend(precision, T, D):
    """Attention, forward and backward."""
    backend, H = Backend(precision), 2
    qkv, dy = (np.empty((1, T, parts * H * D), backend.compute_dtype) for parts in (3, 1))
    backend.attention_backward(dy, qkv, *backend.attention_forward(qkv, H), H)


def attend_with_all_tiles(precision, T, D):
    """Attention with every tile that the tuner may choose, backward also with rotary positions."""
    backend, H = Backend(precision), 2
    qkv, y = (np.empty((1, T, parts * H * D), backend.compute_dtype) for parts in (3, 1))
    dqkv, lse, rotation = np.empty_like(qkv), np.empty((1, H, T), np.float32), np.empty((T, 2, D // 2), np.float32)
    for part, candidates in tuned_tiles.tiles_for(qkv, H, backend.dot_precision)[1].items():
        for tile in candidates:
            tiles = attention.AttentionTiles(**{part: tile})
            if part == "forward":
                attention.attention_forward(y, lse, qkv, H, backend.dot_precision, tiles)
                continue
            for angles in (None, rotation):
                attention.attention_backward(dqkv, lse, y, qkv, y, lse, H, backend.dot_precision, tiles, angles)


def multiply(precision, rows, C, K):
    """A linear layer, forward and backward."""
    backend = Backend(precision)
    x, w, dy = (np.empty(shape, backend.compute_dtype) for shape in ((rows, C), (C, K), (rows, K)))
    backend.linear_forward(x, w, np.empty(K, backend.compute_dtype))
    backend.linear_backward(dy, x, w)


def fuse(precision, M, N, K):
    """The fused product with each epilogue."""
    dtype = Backend(precision).compute_dtype
    d, a, b, c = (np.empty(shape, dtype) for shape in ((M, N), (M, K), (K, N), (M, N)))
    for added, activation in ((None, None), (c[0], None), (c, "relu"), (c[0], "gelu")):
        fused_matmul.matmul(d, a, b, added, activation)


def multiply_with_gelu(precision, M, N, K):
    """All variants of the Gluon products with GELU and its derivative."""
    dtype = Backend(precision).compute_dtype
    y, h, x, w, w2, bias = (np.empty(shape, dtype) for shape in ((M, N), (M, N), (M, K), (K, N), (N, K), (N,)))
    for tile in gluon_gelu.FORWARD_TILES:
        gluon_gelu.gelu_product(y, h, x, w, bias, tile)
    for tile in gluon_gelu.BACKWARD_TILES:
        partials = np.empty(gluon_gelu.partials_shape(M, N, tile), np.float32)
        gluon_gelu.gelu_backward_product(y, partials, x, w2, h, tile)


def divide(config, precision):
    """More launches of a tensor parallel rank: attention with a cache, the gradient of its part of the vocabulary."""
    backend, B, T = Backend(precision), 2, 5
    cache = KVCache(config, backend, B)
    qkv, logits = (np.empty((B, T, size), backend.compute_dtype) for size in (3 * config.n_embd, config.vocab_size))
    backend.attention_cached(qkv, cache.keys[0], cache.values[0], 3, config.n_head)
    logits, targets = logits.reshape(B * T, -1), np.zeros(B * T, np.int32)
    maxima, sums, _, aux = backend.cross_entropy_forward(logits, targets)
    backend.cross_entropy_backward(np.ones((), np.float32), logits, targets, 1.0, maxima, sums, aux)


def add_rows(precision, C):
    """The gradient of the bias of a residual addition: fused with LayerNorm, and where the model is cut."""
    backend = Backend(precision)
    x, w = np.empty((4096, C), backend.compute_dtype), np.empty(C, backend.compute_dtype)
    backend.residual_add_forward(x, x, w)
    for ds in (x, None):
        backend.residual_layernorm_backward(ds, x, w, backend.residual_layernorm_forward(x, x, w, w, w, 1e-5)[2])
    backend.bias_backward(x)(None)


def reduce_gradients(kind):
    """The kernels that sum and compress the gradients of several ranks."""
    arrays = sanitize.Arrays(np, kind)
    sanitize.launch_tree_sum(arrays)
    sanitize.launch_codecs(arrays)


def custom_rule(logits):
    """A sampling rule that the caller defines."""
    return 0


def everything(preset, precision):
    """All programs whose kernels the table shows."""
    config = two_layers(preset)
    drawn = [Sampling(top_k=top_k, top_p=top_p) for top_k in (0, 40) for top_p in (1.0, 0.9)]
    train(config, precision, 16, dropout=0.1)
    divide(config, precision)
    for batch in (1, 8):
        write(config, precision, batch, [Greedy(), custom_rule, *drawn])


def suite(gpu):
    """The programs that the tests compile: all for a Hopper GPU, for an older one those with descriptors and tl.dot.

    Those of preset gpt2 are first: print_suite("one") keeps the first variant of each kernel that is not SLOW.
    """
    greedy, narrowed = Greedy(), Sampling(top_k=40, top_p=0.9)
    if gpu == "a100":
        attend("bf16", 256, 64)
        multiply("fp32", 4096, 768, 3072)
        fuse("fp16", 2048, 2048, 2048)
        return write(two_layers("paper"), "bf16", 8, [greedy])
    train(two_layers("gpt2"), "bf16", 8)
    write(two_layers("gpt2"), "bf16", 1, [greedy, OnlyTokens(greedy, np.arange(9)), custom_rule, narrowed])
    attend("bf16", 256, 64)
    multiply("fp32", 4096, 768, 3072)
    fuse("fp16", 2048, 2048, 2048)
    train(two_layers("paper"), "fp32", 16, dropout=0.1)
    train(two_layers("paper"), "bf16", 16, rounding="stochastic", dropout=0.1)
    for precision in ADDED_ROWS:
        add_rows(precision, two_layers("paper").n_embd)
    for precision in ("tf32", "fp16"):
        attend(precision, 256, 64)
    divide(two_layers("paper"), "fp32")
    for precision, batch in (("fp32", 1), ("tf32", 8), ("fp16", 8)):
        write(two_layers("paper"), precision, batch, [greedy])
    rotary = two_layers("gpt2", positions="rotary")
    train(rotary, "bf16", 8)
    for batch in (1, 8):
        write(rotary, "bf16", batch, [greedy, custom_rule, narrowed])
    wide = dataclasses.replace(PRESETS["gpt2-xl"], n_layer=1, vocab_size=172, block_size=64)
    train(wide, "bf16", 8)
    write(wide, "bf16", 1, [greedy])
    for T, D in ((16384, 64), (1024, 128)):
        attend("bf16", T, D)
    for precision, D in (("bf16", 64), ("bf16", 128), ("tf32", 64)):
        attend_with_all_tiles(precision, 1024, D)
    sanitize.attend_separately(sanitize.Arrays(np, "bfloat16"), (1, 2, 1000, 777, 64), "ieee")
    for D, tiles in fp16x3_launches.TILES.items():
        for parts in (1, 2):
            config = attention.AttentionTiles(*[tile and tile._replace(parts=parts) for tile in tiles])
            sanitize.attend_in_parts(sanitize.Arrays(np, "float32"), (1, 2, 1000, 777, D), config, fp16x3_launches)
    both = attention.TileConfig(64, 64, 4, 2, parts=4)
    small = attention.AttentionTiles(attention.TileConfig(64, 64, 4, 3, parts=4), both=both)
    sanitize.attend_in_parts(sanitize.Arrays(np, "bfloat16"), (1, 2, 1000, 777, 64), small, attention_parts)
    reduce_gradients("bfloat16")
    for precision in ("bf16", "fp16"):
        multiply_with_gelu(precision, 16384, 3072, 768)


# -- compiling and printing -------------------------------------------------------------------------------------------


def compile_variant(variant, keep=None):
    """{gpu, kernel, constants, types, registers, local, shared, warps, row_sums} of a Variant, sizes in bytes.

    If the compiler fails, `error` replaces the last five. keep: a directory for the code, or None.
    """
    activate(variant.gpu)
    words, kernel = json.loads(variant.specialization), variant.kernel
    names = [kernel.arg_names[path[0]] for path in words["constant_keys"]]
    constants = dict(zip(names, words["constant_vals"], strict=True))
    types = [kind for kind in words["signature"].values() if kind != "constexpr"]
    row = dict(gpu=variant.gpu, kernel=sanitize.name_of(kernel), constants=constants, types=types)
    try:
        compiled = kernel.preload(variant.specialization)
    except Exception as error:  # reported in the table
        return row | dict(error=f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = tool("cuobjdump", "--dump-resource-usage", cubin)
        if keep:
            row["file"] = f"{row['kernel']}-{compiled.hash[:8].lower()}"
            Path(keep, f"{row['file']}.ptx").write_text(compiled.asm["ptx"])
            Path(keep, f"{row['file']}.sass").write_text(tool("nvdisasm", "--print-line-info", "--print-code", cubin))
    registers, local = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    found = compiled.metadata
    sizes = dict(registers=registers, local=local, shared=found.shared, warps=found.num_warps)
    return row | sizes | dict(row_sums=row_sums(compiled.asm["ttgir"]))


def row_sums(code):
    """The layouts of the matrices whose rows a kernel adds: the layout determines the order of the additions."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.M))
    reduces = re.findall(r'"tt\.reduce"\(.*?\) <\{axis = (\d).*?\}\) : \(tensor<\d+x\d+x\w+, (#\w+)>\)', code, re.S)
    return sorted({layouts[name] for axis, name in reduces if axis == "0"})


def tool(name, *words):
    """The output of one of the tools that Triton ships."""
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *words], capture_output=True, text=True, check=True).stdout


def variants_of(gpu, run, *arguments):
    launcher = RecordingLauncher(gpu)
    with launcher.active():
        run(*arguments)
    return list(launcher.variants)


def compile_all(variants, keep=None):
    """Yield the row of each variant, in order, compiled by one process per core."""
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(functools.partial(compile_variant, keep=keep), variants)


def resident(row):
    """The number of programs that fit one multiprocessor at the same time."""
    registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]  # allocated in units of eight per thread
    shared = row["shared"] + 1024  # the driver reserves 1 KiB per program
    return min(REGISTERS // registers, WARPS // row["warps"], (GPUS[row["gpu"]].shared + 1024) // shared)


def print_table(rows):
    print(f"{'kernel':42} {'registers':>9} {'spilled':>8} {'shared':>8} {'warps':>5} {'resident':>8}  constants, types")
    for row in rows:
        constants = " ".join(f"{name}={value}" for name, value in row["constants"].items())
        words = f"{constants} | {' '.join(row['types'])} {row.get('file', '')}"
        if "error" in row:
            print(f"{row['kernel']:42} {row['error']}  {words}")
        else:
            sizes = f"{row['registers']:9} {row['local']:8} {row['shared']:8} {row['warps']:5} {resident(row):8}"
            print(f"{row['kernel']:42} {sizes}  {words}", flush=True)


def main():
    parser = BenchmarkParser(__doc__.splitlines()[0])
    parser.add_argument(
        "--preset", choices=PRESETS, default="paper", help="the model whose kernels are compiled (default: paper)"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="one or more (default: all)"
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="the GPU to compile for (default: h200)")
    parser.add_argument(
        "--kernel", default="", help="only kernels whose name contains this, for example attention or layernorm.forward"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write PTX and machine code to this directory")
    parser.add_argument(
        "--suite",
        choices=("one", "all"),
        help="print the JSON that tests/stage2/test_triton_compile.py reads: one variant of most kernels, or all",
    )
    args = parser.parse_args()
    if args.suite:
        return print_suite(args.suite)
    variants = []
    for precision in args.precision:
        variants += variants_of(args.gpu, everything, args.preset, precision)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    wanted = [variant for variant in dict.fromkeys(variants) if args.kernel in sanitize.name_of(variant.kernel)]
    print_table(compile_all(wanted, args.keep))


def print_suite(which):
    """Print the JSON of {unsanitized: kernels that sanitize.py does not launch, slow: kernels left out, rows}.

    which: "all", or "one" for the first variant of each kernel on a Hopper GPU that is not SLOW, and those of
    add_rows(). A kernel that no program of the suite launches is compiled as sanitize.py launches it.
    """
    launcher = RecordingLauncher("h200")
    with launcher.active():
        unsanitized = sanitize.call_all_launches(np, ("float32", "float16", "bfloat16"))
    variants = variants_of("h200", suite, "h200")
    launched = {variant.kernel for variant in variants}
    variants += [each for each in launcher.variants if each.kernel not in launched]
    if which == "all":
        variants += variants_of("a100", suite, "a100")
    else:
        first = {each.kernel: each for each in reversed(variants) if sanitize.name_of(each.kernel) not in SLOW}
        sums = [each for kind in ADDED_ROWS for each in variants_of("h200", add_rows, kind, two_layers("paper").n_embd)]
        variants = list(dict.fromkeys([*first.values(), *sums]))
    slow = sorted(SLOW if which == "one" else ())
    print(json.dumps(dict(unsanitized=sorted(unsanitized), slow=slow, rows=list(compile_all(variants)))))


if __name__ == "__main__":
    run_main(main, measures_time=False)

"""Is torch_bridge.flash_attention faster than PyTorch's attention? Three parts, whose rows have one file.

memory: wall time of PyTorch's naive attention in float32, batch 8, and the memory before backward. grid: causal, batch
1 without heads: device time of forward, backward and both. leaderboard: 16 heads, T 16,384, D 64, bf16, causal: forward
and backward, timed by triton.testing.do_bench exactly as the assignment's leaderboard does.

Times are milliseconds.

    python -m benchmarks.torch.attention --dry-run      # the names of the rows
    python -m benchmarks.torch.attention --only memory  # one part
    python -m benchmarks.torch.attention                # all rows that are missing
"""

import functools
import time

import torch
import torch._functorch.config as functorch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.assignment_tables import GRID, OURS, print_tables
from benchmarks.harness.report import check_gpus
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rows import ROW_FLAGS, mean_and_deviation, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.peers.torch_graphs import captured
from benchmarks.torch.models import attention_scores
from torch_bridge.flash_attention import FlashAttention2Triton, FlashAttention2TritonCompiled

# T time (queries and keys), D head size

HEAD_SIZES = 16, 32, 64, 128
MEMORY_BATCH, MEMORY_REPEATS, MEMORY_LENGTHS = 8, 100, (256, 1024, 4096, 8192, 16384, 32768, 65536)
GRID_LENGTHS = tuple(2**power for power in range(7, 17))
# Calls are timed in a CUDA graph, because launches from Python would take longer than short kernels. With a longer T
# the T x T matrices of the others would not fit into the memory of a graph.
GRAPH_LENGTH, ALWAYS_IN_GRAPH = 8192, ("sdpa", OURS)
LEADERBOARD = OURS, "ours, eager", "ours, compiled backward", "naive", "sdpa flash", "sdpa cudnn"
BOARD_SHAPE = 3, 16, 16384, 64  # q, k and v; heads, T, D


def naive(q, k, v, causal):
    """softmax(q k' / sqrt(D)) v with the T x T matrices in memory."""
    return attention_scores(q, k, causal).softmax(-1) @ v


def sdpa(backend, q, k, v, causal):
    """PyTorch's own attention by one backend: "FLASH_ATTENTION", "EFFICIENT_ATTENTION" or "CUDNN_ATTENTION"."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        four = (x[None] if x.ndim == 3 else x for x in (q, k, v))  # flash and cuDNN need (batch, heads, T, D)
        o = scaled_dot_product_attention(*four, is_causal=causal)
        return o[0] if q.ndim == 3 else o


def implementation(name, dtype):
    """The function (q, k, v, causal) -> o of a row."""
    sdpa_backend = "EFFICIENT_ATTENTION" if dtype == torch.float32 else "FLASH_ATTENTION"
    return {
        "naive": naive,
        "compiled": torch.compile(naive),
        "sdpa": functools.partial(sdpa, sdpa_backend),
        "sdpa flash": functools.partial(sdpa, "FLASH_ATTENTION"),
        "sdpa cudnn": functools.partial(sdpa, "CUDNN_ATTENTION"),
        OURS: FlashAttention2Triton.apply,
        "ours, compiled backward": FlashAttention2TritonCompiled.apply,
    }[name]


def memory_row(T, D):
    """Wall time of naive attention, the memory before backward, and the part of it that the T x T matrix takes."""
    q, k, v, do = (torch.randn(MEMORY_BATCH, T, D, device="cuda") for _ in range(4))
    leaves, times = [x.requires_grad_() for x in (q, k, v)], {"forward": [], "backward": []}
    for number in range(MEMORY_REPEATS + 3):  # the first three are warm-up
        torch.cuda.synchronize()
        start = time.perf_counter()
        o = naive(*leaves, False)
        torch.cuda.synchronize()
        middle, allocated = time.perf_counter(), torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(o, leaves, do)
        torch.cuda.synchronize()
        if number >= 3:
            times["forward"].append(1e3 * (middle - start))
            times["backward"].append(1e3 * (time.perf_counter() - middle))
        del o, gradients
    result = {kind: mean_and_deviation(samples) for kind, samples in times.items()}
    # Of the scores, the scaled scores and the weights (each batch x T x T), backward needs the weights only.
    return result | {"bytes_before_backward": allocated, "bytes_of_weights": 4 * MEMORY_BATCH * T * T}


def grid_row(name, dtype_name, T, D, args):
    """Device time of forward, backward and both."""
    functorch.donated_buffer = False  # a compiled function is differentiated several times
    forget_compiled(name, dtype_name, D)
    dtype = getattr(torch, dtype_name)
    attend = implementation(name, dtype)
    q, k, v, do = (torch.randn(1, T, D, device="cuda", dtype=dtype) for _ in range(4))
    leaves, stream = [x.requires_grad_() for x in (q, k, v)], torch.cuda.Stream()

    def forward():
        with torch.no_grad():
            return attend(*leaves, True)

    def both():
        return torch.autograd.grad(attend(*leaves, True), leaves, do)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o = attend(*leaves, True)
        calls = {
            "forward": forward,
            "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
            "both": both,
        }
        result = {}
        for kind, call in calls.items():
            for _ in range(3):
                call()
            if T <= GRAPH_LENGTH or name in ALWAYS_IN_GRAPH:
                call = captured(call, stream)[0].replay
            samples = triton.testing.do_bench(call, args.warmup, args.rep, return_mode="all")
            result[kind] = mean_and_deviation(samples)
    torch.cuda.synchronize()
    return result


@functools.lru_cache(maxsize=1)
def forget_compiled(*_):
    """Forget compiled code if the arguments are not those of the last call, which the cache of one entry detects.

    torch.compile limits the number of its compilations. At the second T it compiles code for all T, so different T are
    within the limit; different implementations, dtypes and D are not.
    """
    torch._dynamo.reset()


def board_row(name):
    """The time of the assignment's test_timing_flash_forward_backward. Ours is compiled, except for "ours, eager"."""
    q, k, v = torch.randn(*BOARD_SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    attend = implementation(name.removesuffix(", eager"), torch.bfloat16)
    flash = torch.compile(attend) if name.startswith("ours") and "eager" not in name else attend

    def flash_forward_backward():
        o = flash(q, k, v, True)
        loss = o.sum()
        loss.backward()

    samples = triton.testing.do_bench(flash_forward_backward, rep=10000, warmup=1000, return_mode="all")
    return {"both": mean_and_deviation(samples)}


def cases(args):
    """{name of a row: function that measures it}."""
    found = {f"leaderboard / {name}": functools.partial(board_row, name) for name in LEADERBOARD}
    for dtype in ("bfloat16", "float32"):
        for D in HEAD_SIZES:
            for name in GRID:
                for T in GRID_LENGTHS:
                    row = functools.partial(grid_row, name, dtype, T, D, args)
                    found[f"grid / {dtype} / D {D} / T {T} / {name}"] = row
    for D in HEAD_SIZES:
        for T in MEMORY_LENGTHS:
            found[f"memory / D {D} / T {T}"] = functools.partial(memory_row, T, D)
    return found


@benchmark(
    common=ROW_FLAGS,
    warmup=dict(type=int, default=25, help="milliseconds before each measurement of `grid` (default 25)"),
    rep=dict(type=int, default=100, help="milliseconds of each measurement of `grid` (default 100)"),
)
def main(args):
    check_gpus(0 if args.dry_run else 1)
    rows = run_rows(args, cases(args))
    TABLES["torch-kernels"].print(rows, "leaderboard")
    print_tables(rows, "grid-forward", "grid-backward", "grid-both", "naive-memory")

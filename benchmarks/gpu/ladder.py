"""How much faster does each version of one kernel become, from CuPy's operations to the kernel of stage 2?

The computation is s = x + a + bias; y = LayerNorm(s) w + b, for N rows of C columns in fp32. The versions, called
rungs, are those of stage 2's notebook. "bytes" counts each array that the rung reads or writes, once per pass.

    python -m benchmarks.gpu.ladder             # 7 rounds
    python -m benchmarks.gpu.ladder --rounds 1  # a quick trial
"""

import functools

import numpy as np
import triton
import triton.language as tl

from benchmarks.gpu.timing import device_seconds
from benchmarks.harness.ours import check_gpu
from benchmarks.harness.processes import progress
from benchmarks.harness.report import save
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from stage2_cuda.runtime.triton_launch import array_module, launch
from stage2_cuda.tuning.tuner import difference

ROWS, COLUMNS, EPS, SEED = 16384, 768, 1e-5, 20260101


def operations(xp, s, y, x, a, bias, w, b):
    """Rung 1: one CuPy operation after another. Each is a kernel that reads its operands and writes its result."""
    s[...] = x + a + bias
    h = s - s.mean(1, keepdims=True)
    y[...] = h / xp.sqrt((h * h).mean(1, keepdims=True) + EPS) * w + b


CUDA_C = r"""
extern "C" __global__ void layernorm(float* s, float* y, const float* x, const float* a, const float* bias,
                                     const float* w, const float* b, int rows, int columns, float eps) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;  // one thread computes one row
    if (row >= rows) return;
    size_t start = (size_t)row * columns;
    float sum = 0, squares = 0;
    for (int c = 0; c < columns; c++) {
        s[start + c] = x[start + c] + a[start + c] + bias[c];
        sum += s[start + c];
    }
    float mean = sum / columns;
    for (int c = 0; c < columns; c++) {
        float h = s[start + c] - mean;
        squares += h * h;
    }
    float rstd = rsqrtf(squares / columns + eps);
    for (int c = 0; c < columns; c++) y[start + c] = (s[start + c] - mean) * rstd * w[c] + b[c];
}
"""


def cuda_c(xp, s, y, x, a, bias, w, b):
    """Rung 2: one kernel in CUDA C, one thread per row. CuPy compiles it at the first call."""
    rows, columns = x.shape
    kernel, threads = raw_kernel(xp), 128
    arguments = s, y, x, a, bias, w, b, np.int32(rows), np.int32(columns), np.float32(EPS)
    kernel((-(-rows // threads),), (threads,), arguments)


@functools.cache
def raw_kernel(xp):
    return xp.RawKernel(CUDA_C, "layernorm")


@triton.jit
def three_pass_kernel(s_ptr, y_ptr, x_ptr, a_ptr, bias_ptr, w_ptr, b_ptr, n_cols, eps, BLOCK: tl.constexpr):
    """Rung 3: one program per row, which reads the row three times, BLOCK columns at a time."""
    start = tl.program_id(0).to(tl.int64) * n_cols
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_cols, BLOCK):  # the mean
        cols = first + tl.arange(0, BLOCK)
        mask = cols < n_cols
        s = tl.load(x_ptr + start + cols, mask, 0) + tl.load(a_ptr + start + cols, mask, 0)
        total += s + tl.load(bias_ptr + cols, mask, 0)
    mean = tl.sum(total, 0) / n_cols
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_cols, BLOCK):  # the variance
        cols = first + tl.arange(0, BLOCK)
        mask = cols < n_cols
        s = tl.load(x_ptr + start + cols, mask, 0) + tl.load(a_ptr + start + cols, mask, 0)
        h = tl.where(mask, s + tl.load(bias_ptr + cols, mask, 0) - mean, 0)
        squares += h * h
    rstd = 1 / tl.sqrt(tl.sum(squares, 0) / n_cols + eps)
    for first in range(0, n_cols, BLOCK):  # s and y
        cols = first + tl.arange(0, BLOCK)
        mask = cols < n_cols
        s = tl.load(x_ptr + start + cols, mask, 0) + tl.load(a_ptr + start + cols, mask, 0)
        s += tl.load(bias_ptr + cols, mask, 0)
        tl.store(s_ptr + start + cols, s, mask)
        y = (s - mean) * rstd * tl.load(w_ptr + cols, mask, 0) + tl.load(b_ptr + cols, mask, 0)
        tl.store(y_ptr + start + cols, y, mask)


def three_passes(xp, s, y, x, a, bias, w, b):
    launch(three_pass_kernel, (x.shape[0],), s, y, x, a, bias, w, b, x.shape[1], EPS, BLOCK=256, num_warps=4)


@triton.jit
def one_pass_kernel(s_ptr, y_ptr, x_ptr, a_ptr, bias_ptr, w_ptr, b_ptr, n_cols, eps, BLOCK: tl.constexpr):
    """Rung 4: one program per row, which keeps the row in registers: BLOCK >= n_cols."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    offs = tl.program_id(0).to(tl.int64) * n_cols + cols
    s = tl.load(x_ptr + offs, mask, 0) + tl.load(a_ptr + offs, mask, 0) + tl.load(bias_ptr + cols, mask, 0)
    tl.store(s_ptr + offs, s, mask)
    h = tl.where(mask, s - tl.sum(s, 0) / n_cols, 0)
    rstd = 1 / tl.sqrt(tl.sum(h * h, 0) / n_cols + eps)
    y = h * rstd * tl.load(w_ptr + cols, mask, 0) + tl.load(b_ptr + cols, mask, 0)
    tl.store(y_ptr + offs, y, mask)


def one_pass(xp, s, y, x, a, bias, w, b):
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    launch(one_pass_kernel, (rows,), s, y, x, a, bias, w, b, columns, EPS, BLOCK=block, num_warps=4)


def stage2(xp, s, y, x, a, bias, w, b):
    """Rung 5: the kernel of stage 2. A program has several rows, and also stores mean and rstd for backward."""
    from stage2_cuda.kernels.layernorm import residual_layernorm_forward

    mean, rstd = xp.empty(x.shape[0], np.float32), xp.empty(x.shape[0], np.float32)
    residual_layernorm_forward(s, y, mean, rstd, x, a, bias, w, b, EPS)


# name: (function, arrays of N x C numbers that it reads or writes)
RUNGS = {
    "1 CuPy operations": (operations, 21),
    "2 CUDA C, a thread per row": (cuda_c, 6),
    "3 Triton, three passes": (three_passes, 8),
    "4 Triton, row in registers": (one_pass, 4),
    "5 stage 2's kernel": (stage2, 4),
}

TABLE = """
    rung = {name} | us = {seconds.median * 1e6:.1f}
    times as fast as rung 1 = {base.seconds.median / seconds.median:.2f}
    bytes, MB = {bytes:MB .0f} | TB/s = {bytes / seconds.median / 1e12:.2f}"""


def arguments(xp, rows=ROWS, columns=COLUMNS):
    """Random s, y, x, a, bias, w, b, as the rungs take them; s and y are overwritten."""
    rng = np.random.default_rng(SEED)
    shapes = [(rows, columns)] * 4 + [(columns,)] * 3
    return [xp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def relative_error(xp, rung, arrays):
    """The largest relative error of s and y of a rung; the reference is computed in float64."""
    x, a, bias, w, b = (array.astype(np.float64) for array in arrays[2:])
    wanted = xp.empty_like(x), xp.empty_like(x)
    operations(xp, *wanted, x, a, bias, w, b)
    rung(xp, *arrays)
    return max(difference(*pair) for pair in zip(arrays[:2], wanted, strict=True))


def measure(rounds, rungs=RUNGS, rows=ROWS, columns=COLUMNS):
    """[{"name", "bytes", "seconds": one number for each round}] of `rungs`; ArithmeticError for one that is wrong."""
    xp = array_module()
    arrays = arguments(xp, rows, columns)
    for name, (rung, _) in rungs.items():
        progress(name)
        if not (error := relative_error(xp, rung, arrays)) < 1e-5:  # fp32: rounding gives about 1e-7
            raise ArithmeticError(f"{name}: the relative error is {error:.1e}, more than 1e-5")
    calls = {name: functools.partial(rung, xp, *arrays) for name, (rung, _) in rungs.items()}
    timers = {name: functools.partial(device_seconds, xp, call) for name, call in calls.items()}
    seconds = interleaved(timers, rounds)
    progress("")
    return [
        {"name": name, "bytes": 4 * rows * columns * passes, "seconds": seconds[name]}
        for name, (_, passes) in rungs.items()
    ]


def computed(rungs, bandwidth, rows=ROWS, columns=COLUMNS):
    """Results like those of measure(), but computed: the seconds to move the bytes of a rung at `bandwidth` bytes/s."""
    sizes = {name: 4 * rows * columns * passes for name, (_, passes) in rungs.items()}
    return [{"name": name, "bytes": nbytes, "seconds": [nbytes / bandwidth]} for name, nbytes in sizes.items()]


@benchmark(rounds=7)
def main(args):
    check_gpu()
    results = measure(args.rounds)
    Table("", TABLE, base="True").print(results)
    save(results, args)

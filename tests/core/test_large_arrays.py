"""Arrays of more than 2^31 elements: a kernel computes their end as it computes a small array with the same values.

On a GPU the arrays are allocated and all programs run. In the interpreter they are reserved addresses of which a few
pages are used, and only the last programs of each axis run, with their true program ids.
"""

# N rows, B batch, T time, C channels, H heads, V vocabulary, K columns

import mmap

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core.optimizer import AdamW
from gpt2core.parallel.divided.rounding import rounding_key  # noqa: E402
from stage2_cuda.attention import launches as attention  # noqa: E402
from stage2_cuda.decoding import cached_attention, gather  # noqa: E402
from stage2_cuda.gemm import fp16x3  # noqa: E402
from stage2_cuda.kernels import adamw, cast, column_sums, cross_entropy, embedding, gelu, layernorm, rounding  # noqa: E402
from stage2_cuda.runtime import triton_launch  # noqa: E402
from stage3_mpi_cuda.tree_sum import tree_sum  # noqa: E402

HAS_GPU = not triton_launch.interpreted()
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
MORE = (1 << 31) + (1 << 20)  # elements
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap has from 3.13 on: no memory is reserved for the pages
HELD = 1 << 27  # bytes of GPU memory that a test may use beside the large arrays


@pytest.fixture
def large():
    """large(*shape, dtype): zeros. Skips the test if the memory does not suffice."""
    if HAS_GPU:
        yield large_on_gpu
        triton_launch.array_module().get_default_memory_pool().free_all_blocks()
    else:
        yield reserved_addresses


def large_on_gpu(*shape, dtype="float32"):
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free, wanted = cupy.cuda.runtime.memGetInfo()[0], int(np.prod(shape)) * np.dtype(dtype).itemsize
    if wanted + HELD > free:
        pytest.skip(
            f"another array of {wanted / 2**30:.1f} GiB does not fit into the {free / 2**30:.1f} GiB that are free"
        )
    return cupy.zeros(shape, dtype)


def reserved_addresses(*shape, dtype="float32"):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        pytest.skip(f"{size / 2**30:.1f} GiB of addresses cannot be reserved: {error}")
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # or writing one byte would allocate 2 MB
    return np.frombuffer(pages, dtype).reshape(shape)


@pytest.fixture(autouse=True)
def last_programs(monkeypatch):
    """In the interpreter, launch only the last two programs of each axis."""
    if HAS_GPU:
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    run, be, among = triton_launch.launcher().launch, builder.set_grid_idx, builder.set_grid_dim

    def launch(kernel, grid, arguments, options):
        grid = (*grid, 1, 1)[:3]
        before = [max(0, count - 2) for count in grid]
        with monkeypatch.context() as patch:
            patch.setattr(builder, "set_grid_dim", lambda *few: among(*grid))
            patch.setattr(builder, "set_grid_idx", lambda *at: be(*(i + b for i, b in zip(at, before, strict=True))))
            run(kernel, tuple(count - b for count, b in zip(grid, before, strict=True)), arguments, options)

    monkeypatch.setattr(triton_launch.launcher(), "launch", launch)


def device(array):
    return triton_launch.array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def empty(*shape, dtype="float32"):
    return triton_launch.array_module().full(shape, np.nan, dtype)


def normal(rng, *shape):
    return device(rng.standard_normal(shape, np.float32))


def filled(array, end):
    """Return `array` after its last rows are set to those of `end`."""
    array[len(array) - len(end) :] = end
    return array


def same_end(large, small, rows):
    assert_array_equal(host(large[len(large) - rows :]), host(small[len(small) - rows :]))


def same(got, want):
    """Equal bits in the interpreter. On a GPU up to rounding: a small array may run another variant of the kernel."""
    bound = 1e-6 if HAS_GPU else 0
    np.testing.assert_allclose(host(got), host(want), rtol=bound, atol=bound)


def near(got, want, tolerance=1e-5):
    assert np.linalg.norm(host(got) - want) <= tolerance * np.linalg.norm(want)


# -- flat buffers: preset 2.7B has 2.6e9 elements ---------------------------------------------------------------------


@pytest.mark.parametrize("random", [False, True])
def test_adamw(rng, large, random):
    n, k = MORE, 2 * adamw.BLOCK
    ends = [device(rng.random(k, np.float32)) for _ in "pmvg"]
    arrays, kind = [filled(large(n), end) for end in ends], "uint16" if random else "float16"
    copies, key = (large(n, dtype=kind), device(np.zeros(k, kind))), device(rounding_key(1, 2))
    coefficients = device(AdamW(0.9, 0.95, 1e-8, 0.1).coefficients(3, 1e-3))
    for (p, m, v, g), copy in zip((arrays, ends), copies, strict=True):
        place = (key, n - p.size) if random else ()
        adamw.adamw_step(p, m, v, copy, g, coefficients, None, None, 0.9, 0.95, *place)
    for got, want in zip((*arrays[:3], copies[0]), (*ends[:3], copies[1]), strict=True):
        same_end(got, want, k)


def test_page_sums(rng, large):
    n, end = MORE, normal(rng, 2 * adamw.BLOCK)
    sums = device(np.zeros(n // adamw.BLOCK, np.float32))
    adamw.page_sums(sums, filled(large(n), end))
    near(sums[-2:], np.square(host(end), dtype=np.float64).reshape(2, -1).sum(1))


def test_cast(rng, large):
    n, end = MORE, normal(rng, 1000)
    wide, narrow = filled(large(n), end), large(n, dtype="float16")
    cast.cast(narrow, wide)
    same_end(narrow, end.astype("float16"), 1000)


def test_stochastic_rounding(rng, large):
    n, end = MORE, normal(rng, rounding.BLOCK)
    bits, some, key = (
        large(n, dtype="uint16"),
        device(np.zeros(end.size, np.uint16)),
        device(rounding_key(1, 2)),
    )
    rounding.round_to_bf16(bits, filled(large(n), end), key)
    rounding.round_to_bf16(some, end, key, n - end.size)
    same_end(bits, some, end.size)


def test_tree_sum(rng, large):
    rows, out, end = large(3, MORE), large(MORE), normal(rng, 3, 1000)
    rows[:, MORE - 1000 :] = end
    tree_sum(out, rows)
    same_end(out, end[0] + end[1] + end[2], 1000)


# -- activations ------------------------------------------------------------------------------------------------------


def test_layernorm(rng, large):
    k, (C, N) = 2, (1 << 13, 528 * 498) if HAS_GPU else (1 << 16, 528 * 63)  # the last row is the last program's
    ends, (a_bias, w, b) = [normal(rng, k, C) for _ in range(3)], (normal(rng, C) for _ in range(3))
    results = []
    for rows, zeros in ((N, large), (k, empty)):
        x, a, dy = (filled(zeros(rows, C), end) for end in ends)
        s, y, mean, rstd = zeros(rows, C), zeros(rows, C), zeros(rows), zeros(rows)
        layernorm.residual_layernorm_forward(s, y, mean, rstd, x, a, a_bias, w, b, 1e-5)
        partials = zeros(*layernorm.layernorm_partials_shape(rows, C, dy.dtype))
        layernorm.residual_layernorm_backward(x, partials, a, dy, s, w, mean, rstd)
        results.append((s, y, mean, rstd, x))
        del x, a, dy
    for got, want in zip(*results, strict=True):
        same_end(got, want, 1)


def test_gelu(rng, large):
    n, K, k = 1407, (MORE // 1407 // 512 + 2) * 512, 2  # the last row is the last program's
    h, dy, bias = (normal(rng, *shape) for shape in ((k, 1024), (k, 1024), (1024,)))
    shift, arrays = filled(large(K), bias), [large(n, K) for _ in "hdy"]
    for array, end in zip(arrays, (h, dy), strict=False):
        array[n - k :, K - 1024 :] = end
    partials, small = large(*gelu.gelu_partials_shape(n, K)), empty(k, 1024)
    gelu.bias_gelu_forward(arrays[2], arrays[0], shift)
    gelu.bias_gelu_forward(small, h, bias)
    same(arrays[2][-1:, K - 1024 :], small[1:])
    gelu.bias_gelu_backward(arrays[2], partials, arrays[1], arrays[0], shift)
    gelu.bias_gelu_backward(small, None, dy, h, bias)
    same(arrays[2][-1:, K - 1024 :], small[1:])


def test_column_sums(rng, large):
    n, K = 3001, MORE // 3001 + 1
    x, end, out = large(n, K), normal(rng, 40, 16), large(K)
    x[n - 40 :, K - 16 :] = end
    column_sums.column_sums(out, large(*column_sums.partials_shape(n, K)), x)
    near(out[K - 16 :], host(end).sum(0, dtype=np.float64))


def test_embedding(rng, large):
    C, V = 256, 50
    T = MORE // C + 9  # so many positions, too
    ids = np.zeros((1, T), np.int32)
    ids[0, -4:] = 1, 2, V - 1, V - 1
    wte, places, dy = normal(rng, V, C), normal(rng, 8, C), normal(rng, 8, C)
    wpe, y = filled(large(T, C), places), large(1, T, C)
    embedding.embedding_forward(y, device(ids), wte, wpe)
    same_end(y[0], wte[V - 1] + places, 2)
    del y
    y = large(1, T, C)
    runs = embedding.SortedTokens(*map(device, embedding.sort_tokens(ids, V)))
    filled(y[0], dy)
    dwte, dwpe, pieces = empty(V, C), wpe, large(*embedding.chunk_sums_shape(T, C))
    embedding.token_gradient(dwte, pieces, runs, y)
    embedding.position_gradient(dwpe, y)
    near(dwte[V - 1 :], (host(dy[-2:-1]) + host(dy[-1:])))
    same_end(dwpe, dy, 2)


def test_cross_entropy(rng, large):
    V, W, k = 50257, 50304, 2
    N, end = MORE // W + 3, normal(rng, k, W)
    targets = device(rng.integers(0, V, N).astype(np.int32))
    logits, out = filled(large(N, W), end), large(N, W)
    rows, few, small = [empty(N) for _ in range(3)], [empty(k) for _ in range(3)], empty(k, W)
    for both in ((out, *rows, logits, targets), (small, *few, end, targets[-k:])):
        cross_entropy.cross_entropy_forward_backward(*both, 0.1, V)
    cross_entropy.cross_entropy_forward(*rows, logits, targets, V)
    for got, want in zip((out, *rows), (small, *few), strict=True):
        same_end(got, want, k)
    if not HAS_GPU:  # what other programs would have made
        rows[1][:-k] = 1
    cross_entropy.cross_entropy_backward(out, logits, targets, *rows[:2], 0.1, V)
    near(out[-k:], host(small).astype(np.float64))


def test_products_of_halves(rng, large):
    M, N, K = (1 << 16) + 256, 1 << 15, 64
    a, b = normal(rng, M, K), normal(rng, K, N)
    few_a, few_b = a[M - 128 :].copy(), device(np.ascontiguousarray(host(b[:, N - 128 :])))
    split, x, out = [], large(M, N), large(M, N)
    x[M - 128 :, N - 128 :] = few_a[:, :1]

    def halves(x, zeros):
        shapes = fp16x3.split_shapes(x)
        return fp16x3.split(zeros(*shapes[0], dtype="float16"), zeros(*shapes[1]), x)

    whole = halves(x, large)
    near(whole.halves[:, M - 128 :, N - 128 :].astype("float32").sum(0) * whole.scales[-1, -1],
         host(x[M - 128 :, N - 128 :]).astype(np.float64), 1e-6)  # fmt: skip
    del whole, x
    for left, right in ((few_a, few_b), (a, b)):
        zeros = empty if left is few_a else large
        split.append([halves(left, zeros), halves(right, zeros)])
    if not HAS_GPU:  # those halves that other programs would have made
        for few, all_ in zip(*split, strict=True):
            all_.scales[...] = 1
            all_.halves[:, -few.shape[0] :, -few.shape[1] :], all_.scales[-1:, -1:] = few.halves, few.scales
    small = empty(128, 128)
    fp16x3.product(out, None, *split[1])
    fp16x3.product(small, None, *split[0])
    near(out[M - 64 :, N - 128 :], host(small[64:]).astype(np.float64), 1e-6)


# -- sequences --------------------------------------------------------------------------------------------------------


def test_last_rows(rng, large):
    B, C = 2, 768
    T, end = MORE // C // B + 3, normal(rng, 1, C)
    y, h = large(B, T, C), empty(B, C)
    filled(y[B - 1], end)
    gather.gather_last_rows(h, y, device(np.array([T, T], np.int32)))
    same_end(h, end, 1)


def test_attention_of_a_large_batch(rng, large):
    T, H, D = 64, 2, 32
    B, end, gradient = MORE // (3 * H * D * T) + 2, normal(rng, 1, T, 3 * H * D), normal(rng, 1, T, H * D)
    results = []
    for batch, zeros in ((B, large), (1, empty)):
        qkv, dy = (filled(zeros(batch, T, x.shape[2]), x) for x in (end, gradient))
        y, dqkv, (lse, delta) = zeros(*dy.shape), zeros(*qkv.shape), (zeros(batch, H, T) for _ in range(2))
        attention.attention_forward(y, lse, qkv, H)
        attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H)
        results.append((y, lse, dqkv))
    for got, want in zip(*results, strict=True):
        same_end(got, want, 1)


def test_attention_over_a_cache_of_a_long_text(rng, large):
    H, D, k = 4096, 128, 2
    C = H * D
    t, end = MORE // (3 * C) + 17, normal(rng, 1, k, 3 * C)
    qkv, y = large(1, t, 3 * C), large(1, t, C)
    qkv[:, t - k :] = end
    caches = large(1, H, D, t), large(1, H, t, D)
    cached_attention.attention_cached(y, qkv, *caches, 0, H)
    q, key, value = host(end).reshape(k, 3, H, D).astype(np.float64).swapaxes(0, 1)  # (k, H, D)
    weights = np.exp((key * q[-1]).sum(-1) / np.sqrt(D))  # (k, H); of all others 1, and their values are 0
    want = (weights[:, :, None] * value).sum(0) / (t - k + weights.sum(0))[:, None]
    near(y[0, -1].reshape(H, D)[-1], want[-1])
    same_end(caches[1][0, -1], value[:, -1].astype(np.float32), k)

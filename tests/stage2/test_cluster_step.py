"""The kernels of cluster_step.cu and cluster_rows.cu, in an emulator of threads and on a GPU; the oracle is float64."""

import copy
import ctypes
import functools
import math

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.architecture import POSITIONS, GPT2Config
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.plain_backend import rotate, rotation
from gpt2core.sampler import Greedy, generate_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.decoding import batched, cluster_step
from stage2_cuda.decoding.decode_step import ClusterStep
from stage2_cuda.kernels.gelu import U1, U3
from stage2_cuda.runtime import cuda_launch, triton_launch
from tests.support.cuda_sources import on_cpu, pointers, spills

D, EPS, BLOCK = cluster_step.HEAD_SIZE, 1e-5, 1024
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
TOLERANCE = {
    "bf16": 2e-2,
    "fp16": 3e-3,
}  # of q, k, v and y, which are rounded to 16 bits, relative to the largest element


class Layer:
    """Random inputs of both kernels, as arrays of 16 bits and float32, and the expected results in float64.

    place: the index of the newest position in the cache. rotation: the cosines and sines (2, D / 2), or None.
    """

    def __init__(self, random, C, dtype, length, parts, rotates=False):
        self.C, self.H, self.dtype, self.parts = C, C // D, dtype, parts
        rounded = lambda *shape, scale=1.0, mean=0.0: (mean + scale * random.standard_normal(shape)).astype(dtype)  # noqa: E731
        self.bias, self.ln_w, self.ln_b = rounded(C), rounded(C, mean=1, scale=0.2), rounded(C)
        self.qkv, self.proj = rounded(3 * C, C, scale=C**-0.5), rounded(C, C, scale=C**-0.5)
        self.fc, self.fc_proj = rounded(4 * C, C, scale=C**-0.5), rounded(C, 4 * C, scale=C**-0.5)
        self.qkv_bias, self.fc_bias = rounded(3 * C), rounded(4 * C)
        self.draw_sequence(random, length, rotates)

    def draw_sequence(self, random, length, rotates):
        self.place, self.length = (length - 1) % BLOCK, length
        self.rotation = np.concatenate(rotation([length - 1], D, np.float32)) if rotates else None
        self.x = random.standard_normal(self.C).astype(np.float32)
        self.partials = random.standard_normal((max(self.parts, 1), self.C)).astype(np.float32)
        self.cache = random.standard_normal((BLOCK, 2 * self.C)).astype(self.dtype)
        self.cache[self.place] = np.nan  # positions that must not be used
        self.cache[length:] = np.nan

    def others(self, random, lengths, rotates=False):
        """This layer with other sequences: a Layer with the same weights for each length."""
        layers = [copy.copy(self) for _ in lengths]
        for layer, length in zip(layers, lengths, strict=True):
            layer.draw_sequence(random, length, rotates)
        return layers

    def folded(self, w, bias):
        """[gamma_w, beta_w] of single_row.fold_layernorm."""
        w, gamma, beta, bias = (a.astype(np.float64) for a in (w, self.ln_w, self.ln_b, bias))
        return [np.ascontiguousarray(a, np.float32) for a in (w @ gamma, w @ beta + bias)]

    def normalized(self):
        """(s, LN(s))"""
        s = self.x.astype(np.float64)
        if self.parts:
            s = s + self.partials.astype(np.float64).sum(0) + self.bias.astype(np.float64)
        h = (s - s.mean()) / np.sqrt(s.var() + EPS)
        return s, h * self.ln_w.astype(np.float64) + self.ln_b.astype(np.float64)

    def attention(self):
        """(partials (H, C), s, k and v of the newest position (2C))"""
        C, H = self.C, self.H
        s, h = self.normalized()
        qkv = (self.qkv.astype(np.float64) @ h + self.qkv_bias.astype(np.float64)).astype(self.dtype)
        if self.rotation is not None:
            qkv = rotate(qkv[None].astype(np.float64), H, *rotation([self.length - 1], D, float))[0]
        q, new = qkv[:C].astype(np.float64), qkv[C:].astype(self.dtype)
        cache = self.cache[: self.length].astype(np.float64)
        cache[self.place] = new
        cache = cache.reshape(-1, 2, H, D)
        scores = np.einsum("hd,nhd->hn", q.reshape(H, D), cache[:, 0]) / math.sqrt(D)
        p = np.exp(scores - scores.max(1, keepdims=True))
        y = np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), cache[:, 1])
        return np.einsum("hd,chd->hc", y, self.proj.astype(np.float64).reshape(C, H, D)), s, new

    def mlp(self):
        """(partials (clusters, C), s)"""
        s, h = self.normalized()
        g = self.fc.astype(np.float64) @ h + self.fc_bias.astype(np.float64)
        g = g / (1 + np.exp2(g * (U1.value + U3.value * g * g)))
        clusters = cluster_step.mlp_clusters(self.C)
        return np.einsum(
            "kn,ckn->kc", g.reshape(clusters, -1), self.fc_proj.astype(np.float64).reshape(self.C, clusters, -1)
        ), s


def stacked(layers, name, axis=0):
    """One attribute of several Layers, as one array with a new axis; None if it is None."""
    arrays = [getattr(layer, name) for layer in layers]
    return None if arrays[0] is None else np.stack(arrays, axis)


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), atol=tolerance * np.abs(want).max(), rtol=0
    )


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """emulated(C, dtype name): the shared library with the kernels."""
    built, folder = {}, tmp_path_factory.mktemp("emulated")

    def build(C, name, file="cluster_step"):
        if (C, name, file) not in built:
            macros = cluster_step.macros(C, np.dtype(DTYPES[name]), ahead=2)
            built[C, name, file] = on_cpu(f"{file}_on_cpu.cpp", macros, folder / f"{C}-{name}-{file}.so")
        return built[C, name, file]

    return build


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("C", [long(256), long(512), 768])
@pytest.mark.parametrize("name", DTYPES)
def test_the_kernels_compile_without_spills(tmp_path, C, name):
    """With two blocks per multiprocessor, a thread may use 128 registers."""
    macros = functools.partial(cluster_step.macros, C, np.dtype(DTYPES[name]))
    assert spills(cluster_step.SOURCES, macros(), tmp_path) == [0, 0, 0]
    assert all(spills(cluster_step.ROWS_SOURCES, macros(ahead), tmp_path) == [0, 0] for ahead in (2, 4))


CASES = [
    long(768, "bf16", 700, 12, False),
    (256, "bf16", 300, 16, False),
    (256, "fp16", 1, 0, False),
    long(256, "bf16", 1024, 3, False),
    long(512, "fp16", 17, 16, False),
    (256, "fp16", 100_000, 3, True),
    long(256, "bf16", 1, 0, True),
    long(512, "fp16", 300, 16, True),
    long(768, "bf16", 1025, 12, True),
]


@pytest.mark.parametrize("C, name, length, parts, rotates", CASES)
def test_attention_equals_float64_in_the_emulator(emulated, C, name, length, parts, rotates):
    layer = Layer(np.random.default_rng(length), C, DTYPES[name], length, parts, rotates)
    partials, s, lengths = (
        np.full((C // D, C), np.nan, np.float32),
        np.full(C, np.nan, np.float32),
        np.array([length], np.int32),
    )
    want, want_s, new = layer.attention()
    residual = (layer.x, layer.partials, layer.bias) if parts else (layer.x, None, None)
    weights = layer.ln_w, layer.qkv, *layer.folded(layer.qkv, layer.qkv_bias), layer.proj
    arguments = *residual, *weights, lengths, layer.rotation
    scale = ctypes.c_float(math.log2(math.e) / math.sqrt(D))
    run = emulated(C, name).run_attention
    run(C // D, pointers(partials, s, layer.cache, *arguments), parts, BLOCK, ctypes.c_float(EPS), scale)
    assert_close(s, want_s, 1e-6)
    assert_close(layer.cache[layer.place], new, TOLERANCE[name])
    assert_close(partials, want, TOLERANCE[name])


@pytest.mark.parametrize("C, name, parts", [(256, "bf16", 4), long(768, "bf16", 12), long(512, "fp16", 8)])
def test_the_mlp_equals_float64_in_the_emulator(emulated, C, name, parts):
    layer = Layer(np.random.default_rng(C), C, DTYPES[name], 1, parts)
    clusters = cluster_step.mlp_clusters(C)
    partials, s = np.full((clusters, C), np.nan, np.float32), np.full(C, np.nan, np.float32)
    arguments = (
        layer.x,
        layer.partials,
        layer.bias,
        layer.ln_w,
        layer.fc,
        *layer.folded(layer.fc, layer.fc_bias),
        layer.fc_proj,
    )
    emulated(C, name).run_mlp(clusters, pointers(partials, s, *arguments), parts, ctypes.c_float(EPS))
    want, want_s = layer.mlp()
    assert_close(s, want_s, 1e-6)
    assert_close(partials, want, 1e-4)


@pytest.mark.parametrize("C, name, V", [(256, "bf16", 1000), long(768, "fp16", 129)])
def test_the_logits_equal_float64_in_the_emulator(emulated, C, name, V):
    random, clusters = np.random.default_rng(V), 2
    layer, rows = Layer(random, C, DTYPES[name], 1, 16), cluster_step.rows_per_warp(V, clusters)
    head = (random.standard_normal((V, C)) / C**0.5).astype(DTYPES[name])
    logits, s, warps = np.full(V, np.nan, np.float32), np.full(C, np.nan, np.float32), 64 * clusters
    maxima, indices = np.full(warps, np.nan, np.float32), np.full(warps, -1, np.int32)
    arguments = logits, maxima, indices, s, layer.x, layer.partials, layer.bias, layer.ln_w, layer.ln_b, head
    emulated(C, name).run_logits(clusters, pointers(*arguments), 16, V, rows, ctypes.c_float(EPS))
    want = head.astype(np.float64) @ layer.normalized()[1]
    assert_close(logits, want, 1e-4)
    assert maxima.max() == logits.max() and indices[maxima.argmax()] == logits.argmax()
    assert ((0 <= indices) & (indices < V)).all()
    parts = [logits[start : start + rows] for start in range(0, V, rows)]
    assert (maxima[: len(parts)] == [part.max() for part in parts]).all()


ROWS_CASES = [
    (256, "bf16", [300, 1, 129], True, False),
    (256, "fp16", [1024, 100_000, *range(1, 10)], True, True),
    long(768, "bf16", [700, 1024, 513, 512], True, False),
    long(512, "fp16", [17, 1], False, True),
    long(768, "bf16", [1025, 3, 128], True, True),
]


@pytest.mark.parametrize("C, name, lengths, parts, rotates", ROWS_CASES)
def test_attention_of_several_sequences_equals_float64_in_the_emulator(emulated, rng, C, name, lengths, parts, rotates):
    B, layer = len(lengths), Layer(rng, C, DTYPES[name], 1, parts * cluster_step.mlp_clusters(C))
    rows = layer.others(rng, lengths, rotates)
    partials, s = np.full((C // D, B, C), np.nan, np.float32), np.full((B, C), np.nan, np.float32)
    residual = stacked(rows, "x"), *((stacked(rows, "partials", 1), layer.bias) if parts else (None, None))
    weights = layer.ln_w, layer.qkv, *layer.folded(layer.qkv, layer.qkv_bias), layer.proj
    cache = stacked(rows, "cache")
    arguments = *residual, *weights, np.array(lengths, np.int32), stacked(rows, "rotation")
    scale, clusters = ctypes.c_float(math.log2(math.e) / math.sqrt(D)), C // D * -(-B // cluster_step.ROWS)
    run = emulated(C, name, "cluster_rows").run_attention
    run(clusters, pointers(partials, s, cache, *arguments), BLOCK, ctypes.c_float(EPS), scale, B)
    for b, row in enumerate(rows):
        want, want_s, new = row.attention()
        assert_close(s[b], want_s, 1e-6)
        assert_close(cache[b, row.place], new, TOLERANCE[name])
        assert_close(partials[:, b], want, TOLERANCE[name])
        others = np.delete(np.arange(BLOCK), row.place)
        assert cache[b, others].tobytes() == row.cache[others].tobytes()


@pytest.mark.parametrize("C, name, B", [(256, "bf16", 9), long(768, "bf16", 8), long(512, "fp16", 2)])
def test_the_mlp_of_several_sequences_equals_float64_in_the_emulator(emulated, rng, C, name, B):
    layer, clusters = Layer(rng, C, DTYPES[name], 1, C // D), cluster_step.mlp_clusters(C)
    rows = layer.others(rng, [1] * B)
    partials, s = np.full((clusters, B, C), np.nan, np.float32), np.full((B, C), np.nan, np.float32)
    residual = stacked(rows, "x"), stacked(rows, "partials", 1), layer.bias
    arguments = *residual, layer.ln_w, layer.fc, *layer.folded(layer.fc, layer.fc_bias), layer.fc_proj
    run = emulated(C, name, "cluster_rows").run_mlp
    run(clusters * -(-B // cluster_step.ROWS), pointers(partials, s, *arguments), ctypes.c_float(EPS), B)
    for b, row in enumerate(rows):
        want, want_s = row.mlp()
        assert_close(s[b], want_s, 1e-6)
        assert_close(partials[:, b], want, 1e-4)


class InNumpy:
    """The launches of cluster_step.py in NumPy."""

    def total(self, s, residual):
        x, partials, bias = residual
        s[:] = x.reshape(s.shape) if partials is None else x + partials.sum(0) + bias
        return s

    def folded_product(self, s, ln_w, w, ln, eps):
        """LN(s) w' + b, as in single_row.py."""
        return ((s * ln_w) @ w.T - s.mean(1, keepdims=True) * ln[0]) / np.sqrt(s.var(1, keepdims=True) + eps) + ln[1]

    def attention_block(
        self, partials, s, cache, residual, ln_w, qkv, qkv_ln, proj, lengths, rotation, ahead, eps, overlap
    ):
        assert overlap == (residual[1] is not None) and [a.size for a in ahead] == [qkv.size, proj.size]
        (H, _, C), block = partials.shape, cache.shape[1]
        qkv = self.folded_product(self.total(s, residual), ln_w, qkv, qkv_ln, eps)
        for b, n in enumerate(lengths):
            if rotation is not None:
                qkv[b] = rotate(qkv[b : b + 1], H, *rotation[b][:, None])[0]
            cache[b, (n - 1) % block] = qkv[b, C:]
            k, v = cache[b, :n].reshape(-1, 2, H, C // H).transpose(1, 2, 0, 3)  # (H, n, D); at most block positions
            p = np.exp(np.einsum("hd,hnd->hn", qkv[b, :C].reshape(H, -1), k) / math.sqrt(C // H))
            y = np.einsum("hn,hnd->hd", p / p.sum(1, keepdims=True), v)
            partials[:, b] = np.einsum("hd,chd->hc", y, proj.reshape(C, H, -1))

    def mlp_block(self, partials, s, residual, ln_w, fc, fc_ln, fc_proj, ahead, eps):
        assert [a.size for a in ahead] == [fc.size, fc_proj.size]
        g = self.folded_product(self.total(s, residual), ln_w, fc, fc_ln, eps)
        partials[:] = 0
        partials[0] = (g / (1 + np.exp2(g * (U1.value + U3.value * g * g)))) @ fc_proj.T

    def logits(self, logits, maxima, indices, s, residual, ln, head, ahead, eps):
        self.total(s, residual)
        logits[:] = head @ ((s - s.mean()) / np.sqrt(s.var() + eps) * ln[0] + ln[1])
        maxima[:], indices[:] = logits.max(), logits.argmax()


@pytest.mark.skipif(not triton_launch.interpreted(), reason="on a GPU the kernels themselves are tested, below")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2], [3, 1, 4, 1]]], ids=["one", "two"])
def test_the_launches_of_a_step_give_stage_0_s_tokens(rng, monkeypatch, positions, prompts):
    """Which arrays each launch gets, and in which order, without the kernels."""
    for name in ("attention_block", "mlp_block", "logits"):
        monkeypatch.setattr(cluster_step, name, getattr(InNumpy(), name))
    monkeypatch.setattr(cluster_step, "supports", lambda *_: True)
    tiling = batched.SINGLE._replace(block_vocab=1024)  # in the interpreter each program takes 10 ms
    monkeypatch.setattr(CudaBackend, "decode_tiling", staticmethod(lambda batch: tiling))
    config, decoders = GPT2Config(3100, 8, 2, 4, 256, tied=False, positions=positions), {}
    parameters = {
        name: array + 0.1 * rng.standard_normal(array.shape, np.float32)
        for name, array in initial_parameters(config, 0)
    }
    ours, stage0 = (load_model(config, parameters, backend) for backend in (CudaBackend(), NumpyBackend()))
    rules = [Greedy()] * len(prompts)
    assert list(generate_batch(ours, prompts, 8, rules, decoders)) == list(generate_batch(stage0, prompts, 8, rules))
    assert isinstance(decoders[len(prompts)][0].decode_step, ClusterStep)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
SIZES = [(C, name) for C in cluster_step.UNITS for name in DTYPES]


@pytest.fixture
def cupy():
    if triton_launch.interpreted() or triton_launch.gpu_model()[0] != cuda_launch.HOPPER:
        pytest.skip("these kernels need a Hopper GPU")
    return triton_launch.array_module()


def on_device(cupy, *arrays):
    return [None if array is None else cupy.asarray(array) for array in arrays]


def empty(cupy, *shape):
    return cupy.full(shape, np.nan, np.float32)


@gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length, parts", [(1, 0), (2, 16), (255, 1), (256, 12), (257, 3), (700, 16), (1024, 9)])
@pytest.mark.parametrize("C, name", SIZES)
@pytest.mark.parametrize("rotates", [False, True])
def test_attention_equals_float64(cupy, rng, C, name, length, parts, overlap, rotates):
    length += rotates * 10 * BLOCK  # with rotary positions the cache slides
    layer = Layer(rng, C, DTYPES[name], length, parts, rotates)
    residual = on_device(cupy, layer.x, *((layer.partials, layer.bias) if parts else (None, None)))
    weights = on_device(cupy, layer.ln_w, layer.qkv), on_device(cupy, *layer.folded(layer.qkv, layer.qkv_bias))
    proj, lengths, rotation = on_device(cupy, layer.proj, np.array([length], np.int32), layer.rotation)
    found = []
    for ahead in ((None, None), (weights[0][1], proj)):  # the second call must give the same bits
        partials, s, cache = empty(cupy, C // D, 1, C), empty(cupy, C), cupy.asarray(layer.cache[None])
        arguments = *weights[0], weights[1], proj, lengths, rotation, ahead, EPS, overlap
        cluster_step.attention_block(partials, s, cache, residual, *arguments)
        found.append((partials.get()[:, 0], s.get(), cache.get()[0]))
    (partials, s, cache), (want, want_s, new) = found[0], layer.attention()
    assert_close(s, want_s, 1e-6)
    assert_close(cache[layer.place], new, TOLERANCE[name])
    assert_close(partials, want, TOLERANCE[name])
    others = np.delete(np.arange(min(length, BLOCK)), layer.place)
    np.testing.assert_array_equal(cache[others], layer.cache[others])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))


@gpu
@pytest.mark.parametrize("parts", [1, 12, 16])
@pytest.mark.parametrize("C, name", SIZES)
def test_the_mlp_equals_float64(cupy, rng, C, name, parts):
    layer = Layer(rng, C, DTYPES[name], 1, parts)
    residual = on_device(cupy, layer.x, layer.partials, layer.bias)
    ln_w, fc, fc_proj = on_device(cupy, layer.ln_w, layer.fc, layer.fc_proj)
    folded, found = on_device(cupy, *layer.folded(layer.fc, layer.fc_bias)), []
    for ahead in ((None, None), (fc, fc_proj)):
        partials, s = empty(cupy, cluster_step.mlp_clusters(C), 1, C), empty(cupy, C)
        cluster_step.mlp_block(partials, s, residual, ln_w, fc, folded, fc_proj, ahead, EPS)
        found.append((partials.get()[:, 0], s.get()))
    (partials, s), (want, want_s) = found[0], layer.mlp()
    assert_close(s, want_s, 1e-6)
    assert_close(partials, want, 1e-4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))


def device_residual(cupy, rows):
    return on_device(cupy, stacked(rows, "x"), stacked(rows, "partials", 1), rows[0].bias)


@gpu
@pytest.mark.parametrize("lengths", [[1, 2], [128, 129, 512, 513, 700, 1024, 3, 640], [*range(500, 532)]])
@pytest.mark.parametrize("C, name", SIZES)
@pytest.mark.parametrize("rotates", [False, True])
def test_attention_of_several_sequences_equals_float64_in_any_order(cupy, rng, C, name, lengths, rotates):
    """The bits of a row do not depend on the other rows, nor on its place among them."""
    lengths = np.array(lengths, np.int32) + rotates * 10 * BLOCK
    B, layer = len(lengths), Layer(rng, C, DTYPES[name], 1, cluster_step.mlp_clusters(C))
    rows, found = layer.others(rng, lengths, rotates), []
    weights = on_device(cupy, layer.ln_w, layer.qkv), on_device(cupy, *layer.folded(layer.qkv, layer.qkv_bias))
    proj = cupy.asarray(layer.proj)
    for order, ahead in (np.arange(B), (None, None)), (rng.permutation(B), (weights[0][1], proj)):
        ordered = [rows[i] for i in order]
        partials, s = empty(cupy, C // D, B, C), empty(cupy, B, C)
        cache, length, rotation = on_device(
            cupy, stacked(ordered, "cache"), lengths[order], stacked(ordered, "rotation")
        )
        arguments = *weights[0], weights[1], proj, length, rotation, ahead, EPS, True
        cluster_step.attention_block(partials, s, cache, device_residual(cupy, ordered), *arguments)
        back = np.argsort(order)
        found.append((partials.get()[:, back], s.get()[back], cache.get()[back]))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    for b, row in enumerate(rows):
        want, want_s, new = row.attention()
        assert_close(found[0][1][b], want_s, 1e-6)
        assert_close(found[0][2][b, row.place], new, TOLERANCE[name])
        assert_close(found[0][0][:, b], want, TOLERANCE[name])
        others = np.delete(np.arange(BLOCK), row.place)
        assert found[0][2][b, others].tobytes() == row.cache[others].tobytes()


@gpu
@pytest.mark.parametrize("B", [2, 8, 31])
@pytest.mark.parametrize("C, name", SIZES)
def test_the_mlp_of_several_sequences_equals_float64_in_any_order(cupy, rng, C, name, B):
    layer = Layer(rng, C, DTYPES[name], 1, C // D)
    rows, found = layer.others(rng, [1] * B), []
    ln_w, fc, fc_proj = on_device(cupy, layer.ln_w, layer.fc, layer.fc_proj)
    folded = on_device(cupy, *layer.folded(layer.fc, layer.fc_bias))
    for order, ahead in (np.arange(B), (None, None)), (rng.permutation(B), (fc, fc_proj)):
        partials, s = empty(cupy, cluster_step.mlp_clusters(C), B, C), empty(cupy, B, C)
        residual = device_residual(cupy, [rows[i] for i in order])
        cluster_step.mlp_block(partials, s, residual, ln_w, fc, folded, fc_proj, ahead, EPS)
        found.append((partials.get()[:, np.argsort(order)], s.get()[np.argsort(order)]))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    for b, row in enumerate(rows):
        want, want_s = row.mlp()
        assert_close(found[0][1][b], want_s, 1e-6)
        assert_close(found[0][0][:, b], want, 1e-4)


@gpu
@pytest.mark.parametrize("V", [1, 37, 1537, 50257])
@pytest.mark.parametrize("C, name", SIZES)
def test_the_logits_equal_float64(cupy, rng, C, name, V):
    layer, head = Layer(rng, C, DTYPES[name], 1, 16), (rng.standard_normal((V, C)) / C**0.5).astype(DTYPES[name])
    residual, ln = on_device(cupy, layer.x, layer.partials, layer.bias), on_device(cupy, layer.ln_w, layer.ln_b)
    weights = on_device(cupy, layer.qkv, layer.proj, layer.fc, layer.fc_proj)
    count = cluster_step.logit_maxima()
    logits, maxima, s = empty(cupy, V), empty(cupy, count), empty(cupy, C)
    indices = cupy.full(count, -1, np.int32)
    cluster_step.logits(logits, maxima, indices, s, residual, ln, cupy.asarray(head), weights, EPS)
    logits, maxima, indices = logits.get(), maxima.get(), indices.get()
    assert_close(logits, head.astype(np.float64) @ layer.normalized()[1], 1e-4)
    assert maxima.max() == logits.max() and indices[maxima.argmax()] == logits.argmax()
    assert ((0 <= indices) & (indices < V)).all()


@gpu
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("config", [GPT2Config(300, 128, 3, 4, 256), GPT2Config(20000, 1024, 2, 12, 768, tied=False)])
@pytest.mark.parametrize("B", [1, 3, cluster_step.MAX_ROWS])
def test_a_model_gives_the_logits_of_the_training_kernels_and_the_same_bits_every_time(cupy, rng, config, precision, B):
    """A custom rule receives the logits, and is called by the host; a greedy rule runs in the graph."""
    model, seen = load_model(config, dict(initial_parameters(config, 0)), CudaBackend(precision)), []
    prompts, decoders = [rng.integers(0, config.vocab_size, 50 - b).tolist() for b in range(B)], {}

    def choose(logits):
        seen.append(logits.copy())
        return int(logits.argmax())

    texts = [list(generate_batch(model, prompts, 20, [rule] * B, decoders)) for rule in 3 * [choose] + 3 * [Greedy()]]
    assert isinstance(decoders[B][0].decode_step, ClusterStep)
    assert all(text == texts[0] for text in texts)
    rounds = np.array(seen).reshape(3, 20, B, -1)
    assert np.array_equal(rounds[0], rounds[1]) and np.array_equal(rounds[0], rounds[2])
    for count in (1, 2, 19):
        for b in (0, B - 1):
            tokens = [*prompts[b], *(step[b] for step in texts[0][:count])]
            want = model.logits(np.array([tokens])).numpy()[0, -1]
            # the two sets of kernels round at different places, as in test_decoder.py
            tolerance = {"bf16": 5e-2, "fp16": 1e-2}[precision]
            assert np.linalg.norm(rounds[0][count, b] - want) <= tolerance * np.linalg.norm(want)

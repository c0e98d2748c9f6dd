"""The Gluon products with GELU: the order of the tiles, the barriers, and the results on a GPU against float64."""

# n: number of a tile within a program; c: consumer. M, K, N: sizes of the product

import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")

from benchmarks.parity import oracle  # noqa: E402
from gpt2core.parallel.parameter import Destination  # noqa: E402
from stage2_cuda.cuda_backend import CudaBackend, dtype_of  # noqa: E402
from stage2_cuda.gemm import gluon_gelu  # noqa: E402
from stage2_cuda.gemm.gluon_gelu import BACKWARD_TILE, BACKWARD_TILES, FORWARD_TILE, FORWARD_TILES  # noqa: E402
from stage2_cuda.runtime.gluon_launch import gluon_kind  # noqa: E402
from stage2_cuda.runtime.gluon_tiles import slot  # noqa: E402
from stage2_cuda.runtime.triton_launch import array_module, gpu_model  # noqa: E402
from tests.support.gradients import arrays  # noqa: E402

slot, tile_place, turn_parity = (
    function.fn for function in (slot, gluon_gelu.tile_place, gluon_gelu.turn_parity)
)  # without compiler

gpu = pytest.mark.gpu
HOPPER = gluon_kind(*gpu_model()) is not None
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and Triton 3.6")
# (M, K, N): fewer tiles than programs, odd numbers of tiles per program, one step, and sizes that no tile divides
SHAPES = [(128, 64, 128), (384, 192, 384), (133 * 128, 64, 128), (265 * 128, 192, 256), (1000, 200, 136)]
# Relative norm. A 16-bit result is rounded by at most 2^-9 (bf16). The column sums are float32; the derivative has an
# error of a few units in the last place of float32.
TOLERANCES = {"h": 4e-3, "y": 4e-3, "dh": 4e-3, "partials": 1e-4}
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # the largest relative error of rounding to this type
VARIANTS = [(False, tile) for tile in FORWARD_TILES] + [(True, tile) for tile in BACKWARD_TILES]


def test_the_kernel_serves_16_bit_products():
    assert gluon_gelu.serves(2, 65536, 3072, 768)
    assert gluon_gelu.serves(2, 1, 8, 8)
    assert not gluon_gelu.serves(4, 65536, 3072, 768)
    assert not gluon_gelu.serves(2, 65536, 3076, 768)  # rows of 6152 bytes
    assert not gluon_gelu.serves(2, 65536, 3072, 172)
    assert not gluon_gelu.serves(2, 0, 3072, 768)
    assert not gluon_gelu.serves(2, 2**31, 8, 8)


@pytest.mark.parametrize("tiles_m, tiles_n", [(1, 1), (7, 3), (8, 24), (133, 1), (37, 5)])
@pytest.mark.parametrize("group", [1, 8, 16])
def test_every_tile_has_one_place(tiles_m, tiles_n, group):
    places = {tile_place(tile, tiles_m, tiles_n, group) for tile in range(tiles_m * tiles_n)}
    assert places == {(row, col) for row in range(tiles_m) for col in range(tiles_n)}


# -- the barriers of one program, simulated ----------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends after `count` arrivals, and after the copies that were announced."""

    def __init__(self, count):
        self.count, self.phase, self.arrivals, self.copies = count, 0, 0, 0

    def arrive(self, copies=0):
        assert self.arrivals < self.count, "more arrivals than the barrier counts"
        self.arrivals, self.copies = self.arrivals + 1, self.copies + copies
        self.advance()

    def copied(self):
        self.copies -= 1
        self.advance()

    def advance(self):
        if self.arrivals == self.count and self.copies == 0:
            self.phase, self.arrivals = self.phase + 1, 0

    def passes(self, parity):
        """Whether a wait for the phase of this parity returns. It cannot tell a phase from the one two before it."""
        return self.phase & 1 != parity


class Program:
    """The producer and the consumers of gelu_kernel as generators, which yield while they wait.

    The contents of a tile in shared memory are the number of its step or tile; None while a copy is in flight.
    """

    def __init__(self, tile, backward, tiles, steps):
        self.tile, self.backward, self.tiles, self.steps = tile, backward, tiles, steps
        consumers = tile.consumers
        self.ring, self.h, self.in_flight, self.computed = [None] * tile.stages, [None] * consumers, [], []
        barriers = dict(full=(tile.stages, 1), empty=(tile.stages, 1))
        barriers |= {name: (consumers, 1) for name in ("turns", "h_full", "h_empty")}
        self.barriers = SimpleNamespace(**{k: [Barrier(n) for _ in range(c)] for k, (c, n) in barriers.items()})

    def copy(self, barrier, memory, i, value):
        barrier.arrive(copies=1)
        memory[i] = None
        self.in_flight.append((barrier, memory, i, value))

    def producer(self):
        b, use = self.barriers, 0
        for n in range(self.tiles):
            for _ in range(self.steps):
                i, parity = slot(use, self.tile.stages)
                while not b.empty[i].passes(parity ^ 1):
                    yield
                self.copy(b.full[i], self.ring, i, use)
                use += 1
            if self.backward:
                i, parity = slot(n, self.tile.consumers)
                while not b.h_empty[i].passes(parity ^ 1):
                    yield
                self.copy(b.h_full[i], self.h, i, n)

    def consumer(self, c):
        b, steps, stages, consumers = self.barriers, self.steps, self.tile.stages, self.tile.consumers
        for n in range(c, self.tiles, consumers):
            while not b.turns[c].passes(turn_parity(n, c, consumers)):
                yield
            for step in range(steps):
                i, parity = slot(n * steps + step, stages)
                while not b.full[i].passes(parity):
                    yield
                assert self.ring[i] == n * steps + step
                yield  # the product of this step and of the previous one are in flight
                previous = n * steps + step - 1
                if step > 0:
                    assert self.ring[previous % stages] == previous
                    b.empty[slot(previous + stages, stages)[0]].arrive()
            b.turns[(c + 1) % consumers].arrive()
            yield
            last = (n + 1) * steps - 1
            assert self.ring[last % stages] == last
            b.empty[slot(last, stages)[0]].arrive()
            if self.backward:
                while not b.h_full[c].passes((n // consumers) & 1):
                    yield
                assert self.h[c] == n
                yield
                b.h_empty[c].arrive()
            self.computed.append((n, c))

    def run(self, rng):
        """Run all workers in a random order, and end copies in a random order; fail if none can continue."""
        workers, idle = [self.producer(), *map(self.consumer, range(self.tile.consumers))], 0
        while workers:
            assert idle < 500, f"deadlock with {self.tile}, {self.tiles} tiles, {self.steps} steps"
            if self.in_flight and rng.random() < 0.4:
                barrier, memory, i, value = self.in_flight.pop(rng.randrange(len(self.in_flight)))
                memory[i] = value
                barrier.copied()
                idle = 0
            state = [(barrier.phase, barrier.arrivals) for each in vars(self.barriers).values() for barrier in each]
            worker = rng.choice(workers)
            try:
                next(worker)
            except StopIteration:
                workers.remove(worker)
                idle = 0
            after = [(barrier.phase, barrier.arrivals) for each in vars(self.barriers).values() for barrier in each]
            idle = 0 if after != state else idle + 1
        return self.computed


@pytest.mark.parametrize("backward, tile", VARIANTS)
def test_the_barriers_order_all_steps_and_end(backward, tile):
    rng = random.Random(0)
    for tiles in (1, 2, 3, 7):
        for steps in (1, 2, 3, 5, 12):
            for _ in range(5):
                computed = Program(tile, backward, tiles, steps).run(rng)
                assert sorted(computed) == [(n, n % tile.consumers) for n in range(tiles)]


def test_the_simulation_finds_a_missing_turn(monkeypatch):
    monkeypatch.setitem(globals(), "turn_parity", lambda n, c, consumers: 1)  # consumer 0 waits for an earlier phase
    rng = random.Random(0)
    with pytest.raises(AssertionError):
        for _ in range(100):
            Program(FORWARD_TILE, False, 7, 3).run(rng)


# -- results -----------------------------------------------------------------------------------------------------------


class Product:
    """One variant on random arrays of one shape. xp: cupy; dtype: of all arrays except the partial sums."""

    def __init__(self, xp, dtype, backward, tile, shape):
        self.backward, self.tile, (M, K, N), rng = backward, tile, shape, np.random.default_rng()

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
            gluon_gelu.gelu_backward_product(self.out, self.partials, self.a, self.b, self.h, self.tile)
        else:
            gluon_gelu.gelu_product(self.out, self.h, self.a, self.b, self.bias, self.tile)


def results_of(product):
    """{name: array} of the results of a new call, whose arrays contain NaN before it."""
    names = (
        {"dh": product.out, "partials": product.partials} if product.backward else {"h": product.h, "y": product.out}
    )
    for array in names.values():
        array[...] = np.nan
    product.run()
    return names


def float64(array):
    return (array if isinstance(array, np.ndarray) else array.get()).astype(np.float64)


def expected(product):
    """{name: float64 array} of the results; partials: each warp of a tile adds 16 rows of each 64."""
    a, b = float64(product.a), float64(product.b)
    if not product.backward:
        h = a @ b + float64(product.bias)
        return {"h": h, "y": oracle.gelu(h)}
    dh, rows = (a @ b.T) * oracle.gelu_slope(float64(product.h)), product.tile.rows
    whole = np.zeros((-(-len(dh) // rows) * rows, dh.shape[1]))
    whole[: len(dh)] = dh
    return {"dh": dh, "partials": whole.reshape(-1, rows // 64, gluon_gelu.WARPS.value, 16, dh.shape[1]).sum((1, 3))}


@gpu
@on_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backward, tile", VARIANTS)
def test_products_and_column_sums_equal_float64_and_have_equal_bits(dtype, backward, tile):
    for shape in SHAPES:
        product = Product(array_module(), dtype_of(dtype), backward, tile, shape)
        first = {name: array.copy() for name, array in results_of(product).items()}
        for name, array in results_of(product).items():
            assert (array.view(np.uint8) == first[name].view(np.uint8)).all()
        for name, want in expected(product).items():
            near(first[name], want.reshape(first[name].shape), TOLERANCES[name])


@gpu
@on_hopper
@pytest.mark.parametrize("backward", [False, True])
def test_the_bits_of_a_row_depend_neither_on_m_nor_on_the_run(backward):
    xp, rows = array_module(), 384
    product = Product(
        xp, dtype_of("bfloat16"), backward, BACKWARD_TILE if backward else FORWARD_TILE, (128 * 133, 768, 512)
    )
    first = {name: array.copy() for name, array in results_of(product).items()}
    for _ in range(5):
        for name, array in results_of(product).items():
            assert (array.view(np.uint8) == first[name].view(np.uint8)).all()
    product.a, product.h, product.out = product.a[:rows], product.h[:rows].copy(), product.out[:rows]
    if backward:
        product.partials = product.partials[: len(product.partials) * rows // (128 * 133)]
        product.run()
        few = {"dh": product.out, "partials": product.partials}
    else:
        few = results_of(product)
    for name, array in few.items():
        assert (array.view(np.uint8) == first[name][: len(array)].view(np.uint8)).all()


def near(got, want, tolerance):
    got, want = (array if isinstance(array, np.ndarray) else array.get() for array in (got, want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def mlp_operands(rng, backend, M, K, N):
    """x, w, b, dy and w2 of an MLP on the device, in the type of this backend."""
    shapes, scales = [(M, K), (K, N), (N,), (M, K), (N, K)], [1, K**-0.5, 0.5, 1, K**-0.5]
    numbers = [scale * rng.standard_normal(shape, np.float32) for shape, scale in zip(shapes, scales, strict=True)]
    return [backend.xp.asarray(array).astype(backend.compute_dtype) for array in numbers]


def run_mlp(backend, x, w, b, dy, w2, out=(None, None, None)):
    """[y, dx, dw, db, dw2] of an MLP; out: the Destinations of dw, db, dw2, or None."""
    y, aux = backend.mlp_forward(x, w, b, w2)
    dx, *gradients = backend.mlp_backward(dy, x, w, b, w2, aux)
    gradients = [gradient(destination) for gradient, destination in zip(gradients, out, strict=True)]
    backend.runtime.join()
    return [y, *arrays(dx), *gradients]


@gpu
@on_hopper
@pytest.mark.parametrize("precision", UNIT)
def test_the_backend_uses_the_gluon_products(rng, monkeypatch, precision):
    launched, original = [], gluon_gelu.launch_product
    monkeypatch.setattr(gluon_gelu, "launch_product", lambda *a: (launched.append(a[0]), original(*a)))
    backend = CudaBackend(precision)
    operands = mlp_operands(rng, backend, 16384, 128, 2048)
    found = run_mlp(backend, *operands)
    assert launched == [False, True]
    monkeypatch.setattr(backend.products, "fuses_gelu", lambda n, k: False)
    for got, want in zip(found, run_mlp(backend, *operands), strict=True):
        near(got, want, 4 * UNIT[precision])  # both round several arrays
    assert launched == [False, True]


@pytest.mark.skipif(HOPPER, reason="needs a GPU without Gluon kernels, or the interpreter")
@pytest.mark.parametrize("given", [False, True])
def test_the_bias_gradient_of_an_mlp_is_the_sum_of_the_partial_sums(rng, given):
    backend = CudaBackend("fp16")
    operands = mlp_operands(rng, backend, 128, 24, 96)

    def gelu_forward_product(y, h, x, w, b):
        h[...] = (backend.product(x, w).astype(np.float32) + b).astype(h.dtype)
        y[...] = backend.gelu_forward(h)

    def gelu_backward_product(dh, dy, w2, h):
        dh[...] = backend.gelu_backward(backend.product(dy, w2, trans_b=True), h)
        return dh.reshape(2, 64, 96).astype(np.float32).sum(1)

    want = run_mlp(backend, *operands)
    backend.products.fuses_gelu = lambda n, k: True
    backend.products.gelu_product = gelu_forward_product
    backend.products.gelu_backward_product = gelu_backward_product
    shapes = (24, 96), (96,), (96, 24)
    out = [Destination(backend.xp.asarray(np.empty(shape, np.float32)), False) if given else None for shape in shapes]
    found = run_mlp(backend, *operands, out)
    for got, expected in zip(found, want, strict=True):
        near(got, expected, 4 * UNIT["fp16"])
    assert not given or all(a is b.array for a, b in zip(found[2:], out, strict=True))

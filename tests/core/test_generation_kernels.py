"""Generation in NumPy: every way to multiply one row, the choice between them, one token without autograd, threads."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.architecture import GPT2Config
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.sampler import Greedy, KVCache, generate, generate_batch
from gpt2core.tensor import no_grad
from stage0_serial.blas import mkl
from stage0_serial.cpu_runtime import CpuRuntime, blas_libraries
from stage0_serial.generation import row_products, timed_choice, window
from stage0_serial.generation import token_step as token_step_module
from stage0_serial.generation.batch_decoder import BatchDecoder
from stage0_serial.generation.row_products import PART, RowProducts
from stage0_serial.generation.token_step import TokenStep, token_step
from stage0_serial.numpy_backend import NumpyBackend


def runtime_of(threads):
    runtime = CpuRuntime()
    runtime.use_blas("openblas")  # also on an Intel CPU with MKL
    runtime.use_threads(threads)
    return runtime


def threads_of_openblas():
    """The numbers of threads of the loaded BLAS libraries. MKL, if it is installed, always has one (mkl.py)."""
    return {library.num_threads for library in blas_libraries() if library.internal_api != "mkl"}


@pytest.fixture(autouse=True)
def one_blas_thread_afterwards():
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(timed_choice, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(row_products, "MEMORY", 0)  # times are not compared here
    monkeypatch.setattr(row_products, "SECONDS", 0)
    monkeypatch.setattr(row_products, "MIN_ELEMENTS", 0)


def weights(rng, C, K):
    """A weight in memory by rows, one by columns, and one with gaps between its rows."""
    w = rng.standard_normal((C, 2 * K), np.float32)
    return np.ascontiguousarray(w[:, :K]), np.asfortranarray(w[:, :K]), w[:, :K]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("C, K", [(5, 7), (PART, 3), (3 * PART, 10), (2, 1)])
def test_every_way_gives_the_product(rng, threads, C, K):
    products, x = RowProducts(runtime_of(threads)), rng.standard_normal((1, C), np.float32)
    for w in weights(rng, C, K):
        exact = x.astype(np.float64) @ w.astype(np.float64)
        ways = products.candidates(w)
        assert ("einsum" in ways) == w.flags.c_contiguous and ("blas, one thread" in ways) == (threads > 1)
        for name, way in ways.items():
            y = np.full((1, K), np.nan, np.float32)
            way(x, w, y)
            assert_allclose(y, exact, atol=C * 1e-6, err_msg=name)  # a sum of C products, each of order 1
        assert_allclose(products(x, w, np.empty((1, K), np.float32)), exact, atol=C * 1e-6)


@pytest.mark.parametrize("N", [1, 2, 3, 33])
@pytest.mark.parametrize("way", ["blas", "einsum", "parts", "blas, one thread"])
def test_a_product_of_any_number_of_rows_is_right_whatever_way_is_chosen_for_one_row(rng, monkeypatch, way, N):
    """Several rows never use a way for one row, and one row that is recorded does not: training chooses nothing."""
    chosen = []
    monkeypatch.setattr(row_products, "stored_choice", lambda what, ways, choose: chosen.append(what) or way)
    backend = NumpyBackend()
    backend.runtime.use_threads(3)
    x, w = rng.standard_normal((N, 3 * PART), np.float32), rng.standard_normal((3 * PART, 96), np.float32)
    recorded = backend.linear_forward(x, w)
    assert chosen == []
    with no_grad():
        y = backend.linear_forward(x, w)
    assert len(chosen) == (N == 1)
    exact = x.astype(np.float64) @ w
    for found in (recorded, y):
        assert_allclose(found, exact, rtol=0, atol=3 * PART * 1e-6)  # a sum of 3 PART products, each of order 1


def test_a_choice_of_the_file_that_is_not_possible_any_more_is_made_again():
    for names, way in ((["blas", "mkl"], "mkl"), (["blas", "einsum"], "einsum")):  # MKL was removed
        assert timed_choice.stored_choice("a product", names, lambda way=way: way) == way
        assert timed_choice.stored_choice("a product", names, pytest.fail) == way


def test_the_choice_is_made_once_and_kept_in_a_file(rng, monkeypatch, tmp_path):
    timed = []

    def fastest(ways, *arrays):
        timed.append(list(ways))
        return "einsum"

    monkeypatch.setattr(row_products, "fastest", fastest)
    x, w, y = (
        rng.standard_normal((1, 8), np.float32),
        rng.standard_normal((8, 4), np.float32),
        np.empty((1, 4), np.float32),
    )
    for _ in range(2):  # a second process reads the file
        products = RowProducts(runtime_of(1))
        for _ in range(2):
            products(x, w, y)
    assert timed == [["blas", "einsum"]]
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["choices"].values()) == ["einsum"]


def test_with_mkl_its_product_is_timed_too_and_has_a_choice_of_its_own(rng, monkeypatch, tmp_path):
    monkeypatch.setattr(row_products, "fastest", lambda ways, *arrays: list(ways)[-1])
    monkeypatch.setattr(row_products.mkl, "product", lambda a, b, out: np.add(a @ b, 1, out=out))
    x, w, y = rng.standard_normal((1, 8)), rng.standard_normal((8, 4)), np.empty((1, 4))
    for blas, added in ("openblas", 0), ("mkl", 1):
        runtime = runtime_of(1)
        runtime.blas = blas
        assert_allclose(RowProducts(runtime)(x, w, y), x @ w + added)
    (file,) = tmp_path.iterdir()
    names = json.loads(file.read_text())["choices"]
    assert list(names.values()) == ["einsum", "mkl"] and [", with MKL" in what for what in names] == [False, True]


def test_without_a_home_directory_the_choice_is_made_in_memory(rng, monkeypatch):
    monkeypatch.setattr(timed_choice, "cache_directory", lambda: None)
    x, w = rng.standard_normal((1, 8), np.float32), rng.standard_normal((8, 4), np.float32)
    assert_allclose(RowProducts(runtime_of(1))(x, w, np.empty((1, 4), np.float32)), x @ w, rtol=1e-5)


@pytest.fixture
def models(rng):
    """The same model in float64, on one thread and on three."""
    config = GPT2Config(37, 96, 2, 4, 24)
    parameters = {name: value * 10 for name, value in initial_parameters(config, 5)}
    backends = NumpyBackend("fp64"), NumpyBackend("fp64")
    backends[1].runtime.use_threads(3)
    return [load_model(config, parameters, backend) for backend in backends]


@no_grad()
@pytest.mark.parametrize("length", [1, 63, 64, 96])
def test_logits_on_threads_are_those_of_one_thread(rng, models, length):
    ids = rng.integers(0, 37, (1, length))
    one, three = (model.without_autograd().logits(ids, KVCache(model.config, model.backend)) for model in models)
    assert_allclose(one, three, rtol=1e-9, atol=1e-9)  # a product may add in another order for another number of rows


@no_grad()
def test_a_prompt_in_two_parts_equals_the_whole_prompt(rng, models):
    model, ids = models[0], rng.integers(0, 37, (1, 80))
    whole, cache = model.logits(ids).data, KVCache(model.config, model.backend)
    for part in (slice(0, 30), slice(30, 79), slice(79, 80)):
        logits = model.without_autograd().logits(ids[:, part], cache)
        assert_allclose(logits, whole[:, part], rtol=1e-9, atol=1e-9)  # as above
        cache.length += part.stop - part.start


def test_threads_generate_the_tokens_of_one_thread_also_after_the_window_slides(rng, models):
    prompt = rng.integers(0, 37, 90).tolist()
    one, three = (list(generate(model, prompt, 12)) for model in models)
    assert one == three and len(one) == 12


@no_grad()
def test_one_token_without_autograd_has_the_logits_of_the_model(rng, models):
    model, ids = models[0], rng.integers(0, 37, 40).tolist()
    step, cache, expected = token_step(model), KVCache(model.config, model.backend), []
    logits = [step(ids[:7], cache), *(step([token], cache) for token in ids[7:])]
    for end in range(7, 41):
        expected.append(model.without_autograd().logits(np.array(ids[:end])[None], last_only=True)[0, -1])
    assert cache.length == 40
    assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)  # float64; products of one row add in another order


@no_grad()
def test_a_full_window_without_autograd_has_the_logits_of_the_model(rng, models):
    for model in models:
        block = model.config.block_size
        ids, step = rng.integers(0, 37, block).tolist(), token_step(model)
        expected = model.without_autograd().logits(np.array(ids)[None], last_only=True)[0, -1]
        for _ in range(2):  # the first window is a prompt
            cache = KVCache(model.config, model.backend)
            assert_allclose(step(ids, cache), expected, rtol=1e-9, atol=1e-9)  # as above
            assert cache.length == block  # the next token begins a new cache


@pytest.mark.parametrize("length", [5, 150], ids=["tokens", "windows"])
def test_the_next_generation_reads_weights_that_were_changed_in_place(rng, length):
    model, decoders, prompt = random_model(rng), {}, rng.integers(0, 37, length).tolist()
    list(generate(model, prompt, 3, decoders=decoders))
    for tensor in model.parameters.values():
        tensor.data += rng.normal(0, 0.3, tensor.shape)
    again = list(generate(model, prompt, 8, decoders=decoders))
    assert again == list(generate(model, prompt, 8)) and len(decoders[1]) == 1


def logits_of(config, parameters, threads, prompts):
    """The logits (4, n, V) of four greedy tokens after n prompts."""
    backend, seen = NumpyBackend("fp64"), []
    backend.runtime.use_threads(threads)

    def choose(logits):
        seen.append(logits.copy())
        return int(logits.argmax())

    list(generate_batch(load_model(config, parameters, backend), prompts, 4, [choose] * len(prompts)))
    return np.reshape(seen, (4, len(prompts), -1))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("vocabulary, channels, heads", [(172, 128, 4), (97, 160, 5), (301, 114, 3)])
@pytest.mark.parametrize("lengths", [(95,), (96,), (60,) * 8, (3, 90, 41), (1, 96, 96), (1,) * 70])
def test_logits_do_not_depend_on_the_number_of_threads(rng, positions, vocabulary, channels, heads, lengths):
    """Prompts, full windows, and batches of different lengths."""
    config = GPT2Config(vocabulary, 96, 2, heads, channels, positions=positions)
    parameters = {name: value * 4 for name, value in initial_parameters(config, 5)}
    prompts = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    prompts[0][-1] = vocabulary - 1
    one = logits_of(config, parameters, 1, prompts)
    for number in 2, 3:
        assert_allclose(logits_of(config, parameters, number, prompts), one, rtol=1e-9, atol=1e-9)  # as above


@no_grad()
@pytest.mark.parametrize(
    "block, heads, layers, vocabulary", [(2, 1, 1, 37), (9, 1, 2, 16), (64, 4, 1, 48), (33, 2, 3, 64)]
)
def test_windows_of_small_and_odd_shapes(rng, block, heads, layers, vocabulary):
    """Also a vocabulary of C, 3 C or 4 C, whose logits have the width of another product."""
    config = GPT2Config(vocab_size=vocabulary, block_size=block, n_layer=layers, n_head=heads, n_embd=16)
    for number in 1, 4:
        backend = NumpyBackend("fp64")
        backend.runtime.use_threads(number)
        model = load_model(config, dict(initial_parameters(config, 1)), backend)
        ids = rng.integers(0, vocabulary, block).tolist()
        expected = model.without_autograd().logits(np.array(ids)[None], last_only=True)[0, -1]
        step = token_step(model)
        for _ in range(2):  # as a prompt, and by the Window
            assert_allclose(step(ids, KVCache(config, backend)), expected, rtol=1e-9, atol=1e-9)


def random_model(rng, precision="fp64", factor=1.0, **sizes):
    """A model with random biases and LayerNorm weights. factor: of the weights and biases that give q, k and v."""
    config = GPT2Config(**dict(vocab_size=37, block_size=150, n_layer=3, n_head=3, n_embd=24) | sizes)
    parameters = {name: w + rng.normal(0, 0.3, w.shape) for name, w in initial_parameters(config, 5)}
    for name in parameters:
        parameters[name] *= factor if "c_attn" in name else 1
    backend = NumpyBackend(precision)
    arrays = {name: w.astype(backend.dtype) for name, w in parameters.items()}
    return load_model(config, arrays, backend)


def window_beside_model(rng, model):
    """The logits of a full window by the Window of a TokenStep and by the InferenceModel."""
    config = model.config
    ids, step = rng.integers(0, config.vocab_size, config.block_size).tolist(), token_step(model)
    step(ids[:-1], KVCache(config, model.backend))
    step(ids, KVCache(config, model.backend))
    assert step.window is None  # neither a prompt nor the first window copies weights
    logits = step(ids, KVCache(config, model.backend))
    assert isinstance(step.window, window.Window)
    assert_array_equal(step(ids, KVCache(config, model.backend)), logits)
    return logits, model.without_autograd().logits(np.array(ids)[None], last_only=True)[0, -1]


@no_grad()
def test_a_window_with_changed_weights_has_the_logits_of_the_model(rng):
    found, expected = window_beside_model(rng, random_model(rng))
    assert_allclose(found, expected, rtol=1e-9, atol=1e-9)  # as above


@no_grad()
def test_a_window_in_float32_is_as_accurate_as_the_model(rng):
    found, expected = window_beside_model(rng, random_model(rng, "fp32", vocab_size=301))
    assert_allclose(
        found, expected, rtol=0, atol=1e-5 * abs(expected).max()
    )  # 3 layers, each rounds to 1e-7 many times


@no_grad()
def test_exponentials_of_a_window_that_overflow_are_computed_with_the_maximum(rng, monkeypatch):
    model, scores = random_model(rng, factor=30.0), []
    exp_of_scores = model.backend.exp_of_scores

    def recorded(q, k, *others):
        scores.append(np.matmul(q, k))
        exp_of_scores(q, k, *others)

    monkeypatch.setattr(model.backend, "exp_of_scores", recorded)
    found, expected = window_beside_model(rng, model)
    assert max(each.max() for each in scores) > 800  # exp(800) is infinite in float64
    assert_allclose(found, expected, rtol=1e-9, atol=1e-9)  # as above


@no_grad()
def test_windows_of_large_models_are_computed_as_prompts(rng, monkeypatch):
    model, logits = random_model(rng), []
    ids = rng.integers(0, 37, 150).tolist()
    layers = 3 * 12 * 24 * 24 * 8  # bytes of the weights of the linear layers
    for size, made in ((layers, True), (layers - 1, False)):
        monkeypatch.setattr(window, "MAX_BYTES", size)
        step = token_step(model)
        step(ids, KVCache(model.config, model.backend))
        logits.append(step(ids, KVCache(model.config, model.backend)))
        assert (step.window is not None) == made
    assert_allclose(*logits, rtol=1e-9, atol=1e-9)  # as above


@pytest.fixture
def fake_mkl(monkeypatch):
    """`use_blas("mkl")` uses NumPy's product, because MKL may not be installed."""
    monkeypatch.setattr(mkl, "load", dict)
    monkeypatch.setattr(mkl, "product", lambda a, b, out: np.matmul(a, b, out=out))


def test_generation_with_mkl_and_two_threads_uses_openblas_and_continues_as_with_one(rng, models, fake_mkl):
    """Past the end of the window. MKL is loaded without threads."""
    model, runtime = models[0], models[0].backend.runtime
    prompt = rng.integers(0, 37, model.config.block_size - 3).tolist()
    one = list(generate(model, prompt, 8))
    runtime.use_blas("mkl")
    assert runtime.product is mkl.product
    runtime.use_threads(2)
    assert runtime.product is np.matmul and threads_of_openblas() == {2}
    assert list(generate(model, prompt, 8)) == one


def test_the_fastest_way_has_the_shortest_call():
    calls = []
    ways = {"slow": lambda: calls.append("slow") or time.sleep(0.02), "fast": lambda: calls.append("fast")}
    assert timed_choice.fastest_way(ways, seconds=0) == "fast"
    assert calls == ["slow", "fast"]
    assert timed_choice.fastest_way({"slow": ways["slow"]}, seconds=0.03) == "slow"
    assert calls[2:] in (["slow"] * 2, ["slow"])  # of at least 0.02 s each


def test_blas_has_one_thread_in_the_context_and_the_earlier_number_afterwards():
    runtime = runtime_of(2)
    with pytest.raises(ZeroDivisionError), runtime.one_blas_thread():
        assert threads_of_openblas() == {1}
        raise ZeroDivisionError
    assert threads_of_openblas() == {2}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_of_one_row_has_the_bits_of_the_row_among_others(rng, dtype):
    backend = NumpyBackend("fp64" if dtype == np.float64 else "fp32")
    x, bias = rng.standard_normal((3, 70)).astype(dtype) * 4, rng.standard_normal(70).astype(dtype)
    for b in (None, bias):
        several, one = np.empty_like(x), np.empty_like(x[:1])
        backend.gelu(x, b, several, None)
        backend.gelu(x[:1], b, one, None)
        assert_array_equal(one, several[:1])


@pytest.mark.parametrize("lengths", [(1, 1), (1, 7, 7, 90, 95), (96, 5, 100), (3, 96)])
def test_logits_of_a_batch_are_those_of_each_prompt_alone(rng, models, lengths):
    """Also while the windows of some sequences slide and those of others do not."""
    prompts = [rng.integers(0, 37, length).tolist() for length in lengths]
    for model in models:
        seen = []

        def choose(logits, seen=seen):
            seen.append(logits.copy())
            return int(logits.argmax())

        list(generate_batch(model, prompts, 10, [choose] * len(prompts)))
        batch, seen[:] = np.reshape(seen, (10, len(prompts), -1)), []
        for prompt in prompts:
            list(generate(model, prompt, 10, choose))
        alone = np.reshape(seen, (len(prompts), 10, -1)).transpose(1, 0, 2)
        assert_allclose(batch, alone, rtol=1e-9, atol=1e-9)  # products with another number of rows add in another order


def test_a_batch_computes_all_prompts_in_one_call_and_then_one_position_each(rng, models, monkeypatch):
    model, rows = models[0], []
    product = TokenStep.product
    monkeypatch.setattr(TokenStep, "product", lambda self, x, *a: rows.append(len(x)) or product(self, x, *a))
    list(generate_batch(model, [[1], [2, 3, 4], [5, 6]], 2, [Greedy()] * 3))
    # two layers of 4 products and the logits; in the last layer only keys and values of the earlier positions
    assert rows == [6] * 5 + [3] * 5 + [3] * 9


def test_attention_of_similar_lengths_is_computed_for_the_whole_batch(rng, models, monkeypatch):
    """The same decoder then continues shorter prompts, and prompts of very different lengths, one call for each."""
    model, sizes, decoders = models[0], [], {}
    weighted_sum = token_step_module.weighted_sum

    def counted(q, *arguments):
        sizes.append(len(q) if q.ndim == 3 else 1)
        return weighted_sum(q, *arguments)

    for lengths in (40, 50, 44), (3, 5, 4), (1, 60, 2):
        prompts = [rng.integers(0, 37, length).tolist() for length in lengths]
        alone = [list(generate(model, prompt, 6)) for prompt in prompts]
        with monkeypatch.context() as patch:
            patch.setattr(token_step_module, "weighted_sum", counted)
            together = list(generate_batch(model, prompts, 6, [Greedy()] * 3, decoders))
        assert np.transpose(together).tolist() == alone
        calls = 1 + 2 * 5  # for the last positions of the prompts in the last layer, and two layers of five tokens
        assert sizes == ([1] * 3 if lengths[0] == 1 else [3]) * calls
        sizes.clear()


def test_a_batch_does_not_compute_with_memory_that_was_not_written(rng, models, monkeypatch):
    """New arrays are full of infinities here; NumPy reports an invalid operation if a product reads them."""
    model = models[0]
    prompts = [rng.integers(0, 37, length).tolist() for length in (10, 14, 12)]
    alone = [list(generate(model, prompt, 4)) for prompt in prompts]
    empty = type(model.backend).empty
    monkeypatch.setattr(type(model.backend), "empty", lambda *sizes: fill_with_infinity(empty(*sizes)))
    with np.errstate(invalid="raise"):
        together = list(generate_batch(model, prompts, 4, [Greedy()] * 3))
    assert np.transpose(together).tolist() == alone


def fill_with_infinity(array):
    if array.dtype.kind == "f":
        array.fill(np.inf)
    return array


def test_ranks_that_share_the_layers_use_the_model(models):
    model = models[0]
    assert type(model.backend.decoder(model, 1)) is BatchDecoder
    model.group = SimpleNamespace(size=2)
    assert token_step(model) is None and model.backend.decoder(model, 1) is None

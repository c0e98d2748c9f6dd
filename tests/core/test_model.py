"""GPT-2 against transformers' GPT-2: logits, loss and every parameter's gradient; its sizes; its files."""

# B batch, T time, C channels, V vocabulary

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core import ops, primitives  # noqa: F401 - primitives defines slices
from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.architecture import GPT2Config, flops_per_token, parameter_count, parameter_shapes
from gpt2core.errors import ConfigError
from gpt2core.model import initial_parameters
from gpt2core.presets import PRESETS
from gpt2core.sampler import KVCache
from gpt2core.tensor import ShapeError, no_grad
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.torch_gpt2 import batch, check_finite_differences, model_of, random_parameters, relative

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")


def hugging_face(config, parameters):
    """transformers' model of the same sizes and weights, in their precision, every dropout off."""
    state = {name: torch.tensor(array) for name, array in parameters.items()}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, layer_norm_epsilon=config.layer_norm_epsilon, tie_word_embeddings=config.tied,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
            attn_implementation="eager",
        )
    )  # fmt: skip
    theirs.to(state["transformer.wte.weight"].dtype)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return theirs


# -- logits, loss, gradients ---------------------------------------------------------------------------------


# Relative norm, float64 on both sides. In fp32 no bound holds: some rows of four channels are nearly constant, and
# their LayerNorm divides rounding errors by a tiny deviation, in each layer.
MODEL = 1e-9


def gradient_error(name, got, want):
    """The relative error of a gradient; the keys' part of c_attn's bias is compared separately.

    The key bias adds q . b to all scores of a query alike, which softmax ignores: its gradient is exactly zero, and
    both programs compute the rounding of a sum whose terms cancel, which has no relative error. It is compared
    to the size of the terms that cancel: the norm of the whole bias's gradient.
    """
    if name.endswith("c_attn.bias"):
        (q, k, v), (want_q, _, want_v) = np.split(got, 3), np.split(want, 3)
        assert np.linalg.norm(k) <= MODEL * np.linalg.norm(want)
        got, want = np.concatenate([q, v]), np.concatenate([want_q, want_v])
    return relative(got, want)


@pytest.mark.fast
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trial", range(10))
def test_logits_loss_and_every_gradient_equal_transformers(rng, tied, trial):
    n_head = int(rng.choice([1, 2, 3, 4, 6]))
    config = GPT2Config(
        vocab_size=int(rng.integers(5, 400)),
        block_size=int(rng.integers(2, 97)),
        n_layer=int(rng.integers(1, 5)),
        n_head=n_head,
        n_embd=n_head * int(rng.choice([4, 7, 8, 16])),
        tied=tied,
        layer_norm_epsilon=float(rng.choice([1e-5, 1e-6])),
    )
    B, T = int(rng.integers(1, 5)), int(rng.integers(2, config.block_size + 1))
    print(config, B, T)
    parameters, (ids, targets) = random_parameters(config, rng, np.float64), batch(rng, config, B, T)
    ours, theirs = model_of(config, parameters, NumpyBackend("fp64")), hugging_face(config, parameters)

    want = theirs(torch.tensor(ids)).logits
    want_loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), torch.tensor(targets).flatten())
    want_loss.backward()
    with no_grad():
        assert relative(ours.logits(ids).numpy(), want.detach()) <= MODEL
    without_autograd = ours.without_autograd()
    assert relative(without_autograd.logits(ids), want.detach()) <= MODEL
    last = without_autograd.logits(ids, last_only=True)
    assert last.shape == (B, 1, config.vocab_size) and relative(last, want[:, -1:].detach()) <= MODEL
    loss = ours.loss(ids, targets)
    assert abs(loss.item() / want_loss.item() - 1) <= MODEL
    loss.backward()
    theirs = dict(theirs.named_parameters())
    assert set(theirs) == set(parameters)
    for name, tensor in ours.parameters.items():
        assert gradient_error(name, tensor.grad, theirs[name].grad.numpy()) <= MODEL, name


def test_cross_entropy_of_the_logits_equals_the_fused_loss(rng):
    """loss() and cross-entropy over logits() are the same function."""
    config = GPT2Config(29, 12, 2, 2, 8)
    parameters, (ids, targets) = random_parameters(config, rng, np.float64), batch(rng, config, 3, 12)
    one, other = (model_of(config, parameters, NumpyBackend("fp64")) for _ in range(2))
    loss = one.loss(ids, targets)
    loss.backward()
    same = ops.cross_entropy(other.logits(ids), targets)
    same.backward()
    assert loss.item() == pytest.approx(same.item(), rel=1e-12)
    for name in parameters:
        assert_allclose(one.parameters[name].grad, other.parameters[name].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_forward_pass_without_autograd_has_the_bits_of_the_model(rng, positions):
    """The same kernels in the same order. The last position alone is another product, with other rounding errors."""
    config = GPT2Config(29, 12, 2, 2, 8, positions=positions)
    parameters, ids = random_parameters(config, rng, np.float64), batch(rng, config, 3, 12)[0]
    model = model_of(config, parameters, NumpyBackend("fp64"))
    other = model.without_autograd()
    with no_grad():
        assert_array_equal(other.logits(ids), model.logits(ids).numpy())
    assert relative(other.logits(ids, last_only=True), other.logits(ids)[:, -1:]) <= 1e-12


def test_the_scale_of_the_loss_scales_loss_and_gradients(rng):
    config = GPT2Config(29, 12, 1, 2, 8)
    parameters, (ids, targets) = random_parameters(config, rng, np.float64), batch(rng, config, 3, 5)
    mean, total = (model_of(config, parameters, NumpyBackend("fp64")) for _ in range(2))
    a, b = mean.loss(ids, targets), total.loss(ids, targets, 2.0)
    a.backward(), b.backward()
    assert b.item() == pytest.approx(30 * a.item(), rel=1e-12)  # 15 targets, twice
    for name in parameters:
        assert_allclose(total.parameters[name].grad, 30 * mean.parameters[name].grad, rtol=0, atol=1e-11)


@pytest.mark.fast
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_finite_differences(rng, tied):
    config = GPT2Config(11, 6, 2, 2, 8, tied)
    parameters, (ids, targets) = random_parameters(config, rng, np.float64), batch(rng, config, 2, 6)
    check_finite_differences(model_of(config, parameters, NumpyBackend("fp64")), ids, targets, rng)


@pytest.mark.parametrize("pieces", [[1] * 9, [9], [4, 1, 1, 3]])
def test_logits_with_a_cache_equal_logits_at_once(rng, pieces):
    config, backend = GPT2Config(19, 12, 3, 2, 8), NumpyBackend("fp64")
    model = model_of(config, random_parameters(config, rng, np.float64), backend)
    ids, at = batch(rng, config, 2, 9)[0], 0
    cache = KVCache(config, backend, batch=2)
    with no_grad():
        whole = model.logits(ids).numpy()
        for length in pieces:
            got = model.without_autograd().logits(ids[:, at : at + length], cache)
            cache.length += length
            assert relative(got, whole[:, at : at + length]) <= 1e-12
            at += length


def test_a_sequence_longer_than_the_block_and_an_unknown_token_are_refused(rng):
    config = GPT2Config(19, 8, 1, 2, 8)
    model = model_of(config, random_parameters(config, rng), NumpyBackend())
    with pytest.raises(ShapeError, match=r"\(1, 9\).*8 positions"):
        model.logits(np.zeros((1, 9), np.int64))
    with pytest.raises(ShapeError, match="token 19 .* vocabulary of 19"):
        model.logits(np.full((1, 3), 19))
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        model.loss(np.zeros((2, 4), np.int64), np.zeros((2, 3), np.int64))


# -- sizes ---------------------------------------------------------------------------------------------------

PAPER_LAYER = 2 * 384 + (384 * 1152 + 1152) + (384 * 384 + 384) + 2 * 384 + (384 * 1536 + 1536) + (1536 * 384 + 384)
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "paper": 172 * 384 + 256 * 384 + 6 * PAPER_LAYER + 2 * 384 + 172 * 384,
    "small": 124_439_808 - (50257 - 10000) * 768,  # the same model with another vocabulary
    "medium": 354_823_168 - (50257 - 10000) * 1024,
    "large": 774_030_080 - (50257 - 10000) * 1280,
    "xl": 1_557_611_200 - (50257 - 10000) * 1600,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_its_published_number_of_parameters(name):
    assert parameter_count(PRESETS[name]) == COUNTS[name]


def test_every_preset_is_valid_and_2_7b_has_that_size():
    assert {"nano", "tiny", "paper", "gpt2", "2.7B"} <= set(PRESETS)
    assert abs(parameter_count(PRESETS["2.7B"]) / 2.55e9 - 1) < 0.02  # 12 L C^2 = 2.52e9 and the embeddings
    nano, tiny, paper = (PRESETS[name] for name in ("nano", "tiny", "paper"))
    assert nano == GPT2Config(172, 16, 2, 2, 32, False) and tiny == GPT2Config(172, 64, 2, 4, 64, False)
    assert paper == GPT2Config(172, 256, 6, 6, 384, False)


@pytest.mark.parametrize("name", ["nano", "tiny", "paper"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_transformers(name, tied):
    config = replace(PRESETS[name], tied=tied)
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd,
                n_layer=config.n_layer, n_head=config.n_head, tie_word_embeddings=tied,
            )
        )  # fmt: skip
        theirs.tie_weights()
    assert dict(parameter_shapes(config)) == {n: tuple(p.shape) for n, p in theirs.named_parameters()}


def test_flops_are_those_of_every_matrix_product():
    """Counted product by product: 2 operations a multiply-add forward, twice that backward."""
    for config in (PRESETS["paper"], PRESETS["gpt2"]):
        C, V, L, T = config.n_embd, config.vocab_size, config.n_layer, 200
        matrices = L * (C * 3 * C + C * C + C * 4 * C + 4 * C * C) + V * C
        attention = L * 2 * T * C  # q k' and p v over all T positions, as PaLM counts them
        want = 3 * 2 * (matrices + attention)
        assert want <= flops_per_token(config, T) <= want * 1.004  # biases and LayerNorms are counted as weights


@pytest.mark.parametrize("field", ["vocab_size", "block_size", "n_layer", "n_head", "n_embd"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", None])
def test_a_size_that_is_no_positive_number_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field) as error:
        replace(PRESETS["tiny"], **{field: value})
    assert repr(value) in str(error.value)


def test_a_width_that_the_heads_do_not_divide_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="n_embd 65 is not divisible by n_head 4"):
        replace(PRESETS["tiny"], n_embd=65)


# -- initial values ------------------------------------------------------------------------------------------


def test_initial_parameters_are_gpt2_s():
    config = PRESETS["tiny"]
    for name, value in initial_parameters(config, seed=3):
        assert value.dtype == np.float32
        if value.ndim == 1:
            assert_array_equal(value, np.full_like(value, not name.endswith("bias")))
            continue
        deviation = 0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02
        assert abs(value.std() / deviation - 1) < 4 / math.sqrt(2 * value.size), name  # four standard errors
        assert abs(value.mean()) < 4.5 * deviation / math.sqrt(value.size), name


def test_initial_parameters_depend_on_the_seed_and_on_nothing_else():
    config = PRESETS["nano"]
    first, again, other = (dict(initial_parameters(config, seed)) for seed in (5, 5, 6))
    assert list(first) == [name for name, _ in parameter_shapes(config)]
    for name, value in first.items():
        assert_array_equal(again[name], value)
        assert value.ndim == 1 or not np.array_equal(other[name], value)
    matrices = [value.ravel()[:100] for value in first.values() if value.ndim == 2]
    for i, value in enumerate(matrices):  # no two parameters share a stream
        assert all(abs(np.corrcoef(value, other)[0, 1]) < 0.6 for other in matrices[:i])
    rng = np.random.default_rng(0)
    rng.standard_normal(17)
    lazily = initial_parameters(config, 5)
    for name in first:  # drawn one at a time with other draws between them: each has its own stream
        rng.standard_normal(3)
        assert_array_equal(next(lazily)[1], first[name])


def test_the_first_loss_is_that_of_a_uniform_guess(rng):
    config = PRESETS["nano"]
    model = model_of(config, dict(initial_parameters(config, 0)), NumpyBackend())
    ids, targets = batch(rng, config, 64, 16)
    # A logit deviates by 0.02 sqrt(32) = 0.113: half of its square is what a guess of such logits costs, and over 1024
    # targets the mean of the targets' logits deviates by 0.0035. Twelve of that are left.
    with no_grad():
        assert abs(model.loss(ids, targets).item() - math.log(172)) < 0.05


# -- files ---------------------------------------------------------------------------------------------------


def our_logits(path, ids):
    loaded = load_checkpoint(path)
    with no_grad():
        return model_of(loaded.config, loaded.parameters, NumpyBackend()).logits(ids).numpy()


def their_logits(model, ids):
    with torch.no_grad():
        return model.float().eval()(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_of_ours_gives_transformers_our_logits(tmp_path, rng, tied, dtype):
    config = GPT2Config(53, 24, 3, 2, 16, tied)
    parameters = random_parameters(config, rng)
    ids = batch(rng, config, 2, 24)[0]
    save_checkpoint(tmp_path, 7, config=config, parameters=parameters, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    rounded = {name: array.astype(dtype).astype(np.float32) for name, array in parameters.items()}
    with no_grad():
        want = model_of(config, rounded, NumpyBackend()).logits(ids).numpy()
    assert relative(their_logits(theirs, ids), want) <= 1e-4  # fp32 arithmetic on equal weights
    assert relative(our_logits(tmp_path, ids), want) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_of_transformers_gives_us_its_logits(tmp_path, rng, tied, dtype):
    config = GPT2Config(53, 24, 3, 2, 16, tied)
    theirs = hugging_face(config, random_parameters(config, rng)).to(dtype)
    ids = batch(rng, config, 2, 24)[0]
    theirs.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path).config == config
    assert relative(our_logits(tmp_path, ids), their_logits(theirs, ids)) <= 1e-4

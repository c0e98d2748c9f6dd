"""Generation with a KV cache equals full recomputation; sampling draws only from the tokens that its rule allows."""

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.sampler import Decoder, Greedy, Sampling, chooser, generate, generate_batch
from gpt2core.tensor import Tensor, is_recording, no_grad
from stage0_serial.numpy_backend import NumpyBackend

BLOCK = 12


def random_model(rng, precision="fp64", tied=False, requires_grad=False):
    """A model with large weights: its tokens vary, so a wrong position or a stale key changes them."""
    config, backend = GPT2Config(43, BLOCK, 2, 2, 8, tied), NumpyBackend(precision)
    parameters = {
        name: Tensor((rng.standard_normal(shape) * 0.7).astype(backend.dtype), backend, requires_grad)
        for name, shape in parameter_shapes(config)
    }
    return GPT2(config, parameters)


def naive(model, prompt, new, choose):
    """The reference: recompute the whole window for every token, without a cache."""
    tokens = [int(token) for token in prompt]
    for _ in range(new):
        with no_grad():
            logits = model.logits(np.array([tokens[-BLOCK:]])).numpy()[0, -1]
        tokens.append(choose(logits))
    return tokens[len(prompt) :]


# -- the same tokens as without a cache ----------------------------------------------------------------------


# float64: cached and recomputed products differ by rounding, which could decide a near-tie in fp32
@pytest.mark.fast
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("new", [1, 3, 30])
@pytest.mark.parametrize("length", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_generation_equals_full_recomputation_token_for_token(rng, length, new, tied):
    model, prompt = random_model(rng, tied=tied), rng.integers(0, 43, length)
    greedy = list(generate(model, prompt, new))
    assert greedy == naive(model, prompt, new, lambda logits: int(np.argmax(logits)))
    options = dict(temperature=1.3, top_k=20, top_p=0.95, seed=9)
    assert list(generate(model, prompt, new, Sampling(**options))) == naive(model, prompt, new, Sampling(**options))
    assert all(type(token) is int and 0 <= token < 43 for token in greedy)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2 * BLOCK + 3), st.integers(0, 2 * BLOCK), st.integers(0, 2**32))
def test_generation_equals_full_recomputation_wherever_the_block_fills(length, new, seed):
    rng = np.random.default_rng(seed)
    model, prompt = random_model(rng), rng.integers(0, 43, length)
    assert list(generate(model, prompt, new, Sampling(seed=1))) == naive(model, prompt, new, Sampling(seed=1))


def test_only_the_last_block_of_a_long_prompt_matters(rng):
    model, prompt = random_model(rng), rng.integers(0, 43, 50).tolist()
    assert list(generate(model, prompt, 8)) == list(generate(model, prompt[-BLOCK:], 8))


def test_logits_of_the_cache_equal_recomputed_logits_in_fp32_too(rng):
    """In fp32, rounding may decide a near-tie, so the test compares the logits of each step."""
    model, seen = random_model(rng, "fp32"), []

    def choose(logits):
        seen.append(logits.copy())
        return int(logits.argmax())

    prompt = rng.integers(0, 43, 4).tolist()
    tokens = prompt + list(generate(model, prompt, 20, choose))
    for step, logits in enumerate(seen):
        with no_grad():
            want = model.logits(np.array([tokens[: len(prompt) + step][-BLOCK:]])).numpy()[0, -1]
        # a few roundings, amplified by two layers of large weights
        assert np.linalg.norm(logits - want) <= 1e-4 * np.linalg.norm(want)


def test_generate_yields_a_token_before_it_computes_the_next(rng):
    """Streaming: the caller gets each token when it is sampled, and stops the computation by not iterating further."""
    model, chosen = random_model(rng), []

    def choose(logits):
        chosen.append(int(logits.argmax()))
        return chosen[-1]

    stream = generate(model, [1, 2, 3], 1000, choose)
    for count, token in enumerate(islice(stream, 5), 1):
        assert len(chosen) == count and token == chosen[-1]


def test_one_position_is_computed_per_token_until_the_block_is_full_then_the_window(rng):
    model, lengths = random_model(rng), []
    embedding = model.backend.embedding_forward
    model.backend.embedding_forward = lambda ids, *rest: lengths.append(ids.shape[1]) or embedding(ids, *rest)
    list(generate(model, [5] * 4, 14, decoders={1: [Decoder(model)]}))  # not NumPy's, which computes a token elsewhere
    # 4 prompt positions, then one per step for positions 5 to 12; after that the window slides: 12 positions per step
    assert lengths == [4] + [1] * 8 + [BLOCK] * 5


def test_generation_records_no_graph_and_leaves_the_callers_recording_alone(rng):
    model = random_model(rng, requires_grad=True)
    for _ in generate(model, [1, 2, 3], 3):
        assert is_recording()
    assert all(tensor.grad is None for tensor in model.parameters.values())


def test_two_generations_at_once_do_not_disturb_each_other(rng):
    model = random_model(rng)
    one, two = list(generate(model, [1, 2], 20)), list(generate(model, [7, 8, 9], 20))
    streams = zip(generate(model, [1, 2], 20), generate(model, [7, 8, 9], 20), strict=True)
    assert [list(tokens) for tokens in zip(*streams, strict=True)] == [one, two]


@pytest.mark.parametrize("prompt", [[], (), np.array([], np.int64)])
def test_an_empty_prompt_is_refused(rng, prompt):
    with pytest.raises(ConfigError, match="prompt is empty"):
        next(generate(random_model(rng), prompt, 3))


def test_no_new_tokens_are_no_tokens(rng):
    assert list(generate(random_model(rng), [1], 0)) == []


# -- batches, and a backend's own decoder ---------------------------------------------------------------------


def test_a_batch_gives_the_tokens_of_each_prompt_generated_alone(rng):
    model, prompts = random_model(rng), [rng.integers(0, 43, length) for length in (3, 1, BLOCK, 20)]
    steps = list(generate_batch(model, prompts, 15, [Sampling(seed=seed) for seed in range(4)]))
    alone = [list(generate(model, prompt, 15, Sampling(seed=seed))) for seed, prompt in enumerate(prompts)]
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == alone


class CountingDecoder:
    """A decoder that counts its steps; two steps may be launched before the tokens of the first are read."""

    steps_ahead = 2

    def start(self, prompts, rules):
        self.prompts, self.steps, self.read = prompts, 0, 0

    def step(self):
        self.steps += 1

    def read_tokens(self):
        self.read += 1
        return [self.read]


def test_a_backend_s_decoder_takes_only_the_steps_that_are_needed_and_is_reused(rng):
    model, made, decoders = random_model(rng), [], {}
    model.backend.decoder = lambda model, batch: made.append((batch, CountingDecoder())) or made[-1][1]
    stream = generate(model, [40] * 2 * BLOCK, 4, decoders=decoders)
    launched = [(token, made[0][1].steps) for token in stream]
    assert launched == [(1, 2), (2, 4), (3, 4), (4, 4)]
    assert made[0][0] == 1 and [prompt.tolist() for prompt in made[0][1].prompts] == [[40] * BLOCK]
    assert list(generate(model, [1], 2, decoders=decoders)) == [1, 2] and len(made) == 1
    first, second = (generate(model, [1], 2, decoders=decoders) for _ in range(2))
    next(first), next(second)  # interleaved: two decoders
    assert len(made) == 2
    assert list(generate(model, [1], 2)) == [1, 2] and len(made) == 3  # without `decoders`: a new one


# -- which tokens may be drawn -------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def allowed(logits, temperature, top_k, top_p):
    """Brute force: {token: probability} after top-k and then top-p; of equal logits the lower token id comes first."""
    logits = np.asarray(logits, np.float64) / temperature
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    p = softmax(logits[ranked])
    kept, total = [], 0.0
    for token, probability in zip(ranked, p, strict=True):
        kept.append((token, probability))
        total += probability
        if total >= top_p:
            break
    return {token: probability / total for token, probability in kept}


class Uniform:
    """Replaces the random generator: n evenly spaced numbers in [0, 1), so that token counts are deterministic."""

    def __init__(self, n):
        self.values = ((i + 0.5) / n for i in range(n))

    def random(self):
        return next(self.values)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30), st.floats(0.2, 4), st.integers(0, 35), st.floats(0.05, 1, exclude_min=True),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_the_distribution_is_the_brute_force_one(V, temperature, top_k, top_p, ties, seed):
    rng, n = np.random.default_rng(seed), 2000
    logits = rng.standard_normal(V).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    want = allowed(logits, temperature, top_k, top_p)
    rule = Sampling(temperature, top_k, top_p)
    rule.random = Uniform(n)
    drawn = np.bincount([rule(logits) for _ in range(n)], minlength=V)
    assert set(np.flatnonzero(drawn)) <= set(want)
    for token, probability in want.items():  # an interval of length p contains n p of the n points, plus or minus 1
        assert abs(drawn[token] - n * probability) <= 1.5


def test_real_draws_have_the_probabilities_of_softmax(rng):
    logits, n = rng.standard_normal(6), 20_000
    rule = Sampling(temperature=0.8, seed=123)
    drawn = np.bincount([rule(logits) for _ in range(n)], minlength=6) / n
    p = softmax(logits / 0.8)
    # 6.5 standard errors of six binomials: a correct sampler fails about once in 10^9 runs
    assert (abs(drawn - p) <= 6.5 * np.sqrt(p * (1 - p) / n) + 1 / n).all()


def test_equal_seeds_draw_equal_tokens_and_other_seeds_draw_others(rng):
    logits = rng.standard_normal((50, 43))
    draws = [[rule(row) for row in logits] for rule in (Sampling(seed=4), Sampling(seed=4), Sampling(seed=5))]
    assert draws[0] == draws[1] != draws[2]


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(rng):
    for _ in range(50):
        logits = rng.standard_normal(43)
        want = Greedy()(logits)
        assert Sampling(temperature=5, top_k=1)(logits) == Sampling(temperature=5, top_p=1e-9)(logits) == want


def test_the_token_that_reaches_top_p_is_kept():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    rules = {top_p: set() for top_p in (0.4, 0.5, 0.51, 0.75, 0.76, 1.0)}
    for top_p, seen in rules.items():
        rule = Sampling(top_p=top_p - 1e-12 if top_p < 1 else 1.0)  # log and exp lose the last bit
        rule.random = Uniform(1000)
        seen.update(rule(logits) for _ in range(1000))
    assert [len(seen) for seen in rules.values()] == [1, 1, 2, 2, 3, 4]
    rule = Sampling(top_p=0.5)
    rule.random = Uniform(1000)
    assert {rule(np.zeros(4)) for _ in range(1000)} == {0, 1}  # the first two reach 0.5 exactly


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30])
def test_a_temperature_towards_zero_is_greedy(rng, temperature):
    with np.errstate(over="ignore"):  # a difference divided by 1e-30 may overflow to -inf, a probability of 0
        for precision in (np.float32, np.float64):
            logits = (rng.permutation(43) / 2).astype(precision)
            rule = Sampling(temperature, seed=1)
            assert [rule(logits) for _ in range(20)] == [Greedy()(logits)] * 20


def test_a_temperature_towards_infinity_is_uniform():
    rule, logits = Sampling(temperature=1e9), np.array([50.0, -50.0, 0.0, 7.0])
    rule.random = Uniform(400)
    assert_allclose(np.bincount([rule(logits) for _ in range(400)]), [100] * 4, atol=1)


def test_extreme_logits_are_drawn_without_overflow():
    with np.errstate(over="raise", invalid="raise"):
        for logits in (np.array([1e30, -1e30, 0], np.float32), np.array([-np.inf, 3, -np.inf]), np.full(5, 1e30)):
            assert logits[Sampling(seed=2)(logits)] == logits.max()


def test_greedy_takes_the_first_of_equals():
    assert Greedy()(np.array([1.0, 3.0, 3.0, 2.0])) == 1


def test_chooser_returns_the_rule_for_the_options():
    assert isinstance(chooser(), Greedy) and isinstance(chooser(0.0, 5, 0.5, 1), Greedy)
    rule = chooser(0.7, 5, 0.5, 1)
    assert (rule.temperature, rule.top_k, rule.top_p) == (0.7, 5, 0.5)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature=0), "`temperature=0"),
        (dict(temperature=-1.0), "`temperature=-1"),
        (dict(temperature=math.nan), "`temperature=nan"),
        (dict(temperature=math.inf), "`temperature=inf"),
        (dict(top_k=-1), "`top_k=-1`"),
        (dict(top_p=0), "`top_p=0"),
        (dict(top_p=1.1), "`top_p=1.1"),
        (dict(top_p=-0.5), "`top_p=-0.5"),
        (dict(top_p=math.nan), "`top_p=nan"),
    ],
)
def test_options_outside_their_range_are_refused_by_flag(options, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**options)
    if "temperature" not in options:
        with pytest.raises(ConfigError, match=words):
            chooser(**options | dict(temperature=1.0))

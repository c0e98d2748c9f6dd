"""A model divided over a tensor group is the serial model: loss, gradients, logits and tokens; and the bytes sent."""

# B batch, T time, C channels, V vocabulary, H heads, L layers, N = B*T rows, p ranks of the tensor group

import math
import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from gpt2core import ops
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.communicator import SOLO, Solo
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.parallel.tensor.shards import check_tensor_parallel, gather, is_replicated, shard, shard_shapes, unshard
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS
from gpt2core.sampler import KVCache, Sampling, generate
from gpt2core.tensor import ShapeError, Tensor, no_grad
from gpt2core.vocabulary import Vocabulary, own_slice
from stage0_serial import vocabulary
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.mpi import run_mpi

EXACT = 1e-12  # relative norm in float64: only the order of the sums differs


@pytest.fixture
def seed():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


def random_parameters(config, rng):
    """Large random weights: with deviation 0.02 the blocks are nearly the identity and many gradients nearly zero."""
    parameters = {}
    for name, shape in parameter_shapes(config):
        deviation = 0.5 / math.sqrt(shape[0]) if len(shape) == 2 and "wte" not in name and "head" not in name else 0.3
        parameters[name] = rng.standard_normal(shape) * deviation + (len(shape) == 1 and name.endswith("weight"))
    return parameters


def model_of(config, parameters, group=SOLO):
    """A float64 model of this rank's shards of `parameters`, with gradients."""
    backend = NumpyBackend("fp64")
    shards = {name: shard(name, array, group.rank, group.size).copy() for name, array in parameters.items()}
    return GPT2(config, {name: Tensor(array, backend, True) for name, array in shards.items()}, group)


def near(got, want, name=""):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, name
    assert np.linalg.norm(got - want) <= EXACT * np.linalg.norm(want), name


def near_gradient(name, got, want):
    """Like near(), but the key part of c_attn.bias is compared with its true gradient 0 (softmax ignores q . b)."""
    if name.endswith("c_attn.bias"):
        (q, k, v), (want_q, want_k, want_v) = np.split(got, 3), np.split(want, 3)
        assert max(np.linalg.norm(k), np.linalg.norm(want_k)) <= EXACT * np.linalg.norm(want), name
        got, want = np.concatenate([q, v]), np.concatenate([want_q, want_v])
    near(got, want, name)


# -- loss and gradients ------------------------------------------------------------------------------------------------


def loss_and_gradients_equal_serial(comm, config, B, T, seed, loss_of=GPT2.loss):
    """Every rank compares the whole gradients, gathered from the shards, with those of its own serial model."""
    rng = np.random.default_rng(seed)
    parameters, (ids, targets) = random_parameters(config, rng), rng.integers(0, config.vocab_size, (2, B, T))
    serial, model = model_of(config, parameters), model_of(config, parameters, comm)
    want, loss = loss_of(serial, ids, targets), loss_of(model, ids, targets)
    want.backward(), loss.backward()
    near(loss.numpy(), want.numpy(), "loss")
    shapes = shard_shapes(parameter_shapes(config), comm.rank, comm.size)
    assert list(shapes.items()) == [(name, tensor.shape) for name, tensor in model.parameters.items()]
    for name, tensor in model.parameters.items():
        want = serial.parameters[name].grad
        near_gradient(name, gather(name, [tensor.grad], want.shape, comm), want)
        if is_replicated(name):  # or replicas would drift apart, update by update
            assert_array_equal(comm.broadcast(tensor.grad), tensor.grad, name)
    assert_array_equal(comm.broadcast(loss.data), loss.data)


SIZES = [  # config, B, T
    (GPT2Config(36, 20, 2, 4, 16), 2, 17),
    (GPT2Config(4, 3, 1, 4, 8), 3, 1),  # the least, but for channels: of four, LayerNorm's gradient may all but vanish
    (GPT2Config(172, 70, 3, 8, 24), 3, 70),
    (GPT2Config(1000, 9, 1, 4, 8), 5, 3),  # most tokens of a rank do not occur
    (GPT2Config(37, 20, 2, 4, 16), 2, 17),  # 2 and 4 do not divide the vocabulary: the last rank has fewer tokens
]


@pytest.mark.fast
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "V{0.vocab_size}-L{0.n_layer}".format(*size))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_and_every_gradient_equal_the_serial_model_s(seed, ranks, tied, size):
    config, B, T = size
    run_ranks(ranks, loss_and_gradients_equal_serial, replace(config, tied=tied), B, T, seed)


@pytest.mark.parametrize("at_once", [1, 300])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_where_the_logits_are_computed_in_chunks(seed, ranks, at_once, monkeypatch):
    monkeypatch.setattr(vocabulary, "LOGITS", at_once)  # one row at a time, or a few with a remainder
    config, B, T = SIZES[0]
    run_ranks(ranks, loss_and_gradients_equal_serial, config, B, T, seed)


def loss_over_logits(model, ids, targets):
    return ops.cross_entropy(model.logits(ids), targets)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["V36", "V37"])
def test_gradients_through_gathered_logits_equal_the_serial_model_s(seed, ranks, tied, size):
    config, B, T = size
    run_ranks(ranks, loss_and_gradients_equal_serial, replace(config, tied=tied), B, T, seed, loss_over_logits)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_same_over_mpi(seed, ranks):
    config, B, T = SIZES[0]
    run_mpi(ranks, loss_and_gradients_equal_serial, config, B, T, seed)


class Copying(Solo):
    """A group of one that, like larger ones, never returns x itself."""

    def all_reduce_start(self, x, op="sum", out=None):
        return super().all_reduce_start(x, op, np.empty(x.shape, x.dtype) if out is None else out)


def test_a_group_of_one_gives_the_bits_of_no_group(seed):
    config, B, T = SIZES[2]
    rng = np.random.default_rng(seed)
    parameters, (ids, targets) = random_parameters(config, rng), rng.integers(0, config.vocab_size, (2, B, T))
    models = [model_of(config, parameters, group) for group in (SOLO, Solo(), Copying())]
    results = []
    for model in models:
        loss = model.loss(ids, targets)
        loss.backward()
        with no_grad():
            results.append((loss.item(), model.logits(ids).numpy(), [t.grad for t in model.parameters.values()]))
    (want, want_logits, gradients), *others = results
    for got, logits, others_gradients in others:
        assert got == want
        for array, wanted in zip([logits, *others_gradients], [want_logits, *gradients], strict=True):
            assert_array_equal(array, wanted)


# -- cross-entropy over a divided vocabulary ---------------------------------------------------------------------------


def cross_entropy_of_own_columns(comm, logits, targets, scale):
    """Loss, and the gradient of all columns."""
    V = logits.shape[-1]
    leaf = Tensor(logits[:, own_slice(V, comm.rank, comm.size)], NumpyBackend("fp64"), requires_grad=True)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss = ops.cross_entropy(leaf, targets, scale, Vocabulary(V, comm))
        loss.backward()
    return loss.item(), np.concatenate(comm.all_gather_object(leaf.grad), -1)


@pytest.mark.parametrize("kind", ["ordinary", "large", "one rank far above the others", "equal"])
@pytest.mark.parametrize("ranks, V", [(1, 24), (2, 24), (4, 24), (2, 23), (4, 22)])  # V / ranks is rounded up
def test_cross_entropy_equals_torch_with_targets_on_every_rank(seed, ranks, V, kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    targets = rng.permutation(np.arange(2 * V) % V)  # every token twice
    logits = rng.standard_normal((2 * V, V))
    if kind == "large":
        logits = rng.choice([-1e4, 1e4], logits.shape) + logits
    elif kind == "one rank far above the others":
        logits[np.arange(2 * V), rng.integers(0, V, 2 * V)] += 1e4
    elif kind == "equal":
        logits[...] = -1e4
    leaf = torch.tensor(logits, requires_grad=True)
    want = torch.nn.functional.cross_entropy(leaf, torch.tensor(targets), reduction="sum") * 0.37
    want.backward()
    for loss, gradient in run_ranks(ranks, cross_entropy_of_own_columns, logits, targets, 0.37):
        near(loss, want.item())
        near(gradient, leaf.grad.numpy())


def strange_tokens_are_refused(comm):
    config = GPT2Config(16, 8, 1, 4, 8)
    model = model_of(config, random_parameters(config, np.random.default_rng(0)), comm)
    for ids, targets in (([[3, 16]], [[0, 0]]), ([[0, 15]], [[-1, 5]])):
        with pytest.raises(ShapeError, match="token (16|-1) is outside the vocabulary of 16"):
            model.loss(np.array(ids), np.array(targets))


def test_a_token_is_checked_against_the_whole_vocabulary():
    run_ranks(4, strange_tokens_are_refused)


# -- logits and generation ---------------------------------------------------------------------------------------------


def logits_equal_serial(comm, config, seed):
    rng, backend = np.random.default_rng(seed), NumpyBackend("fp64")
    parameters, ids = random_parameters(config, rng), rng.integers(0, config.vocab_size, (2, 9))
    serial, model = model_of(config, parameters), load_model(config, parameters, backend, comm)
    with no_grad():
        near(model.logits(ids).numpy(), want := serial.logits(ids).numpy())
        near(model.without_autograd().logits(ids, last_only=True), want[:, -1:])
    cache = KVCache(config, backend, 2, comm)
    H, D = config.n_head // comm.size, config.n_embd // config.n_head
    assert {keys.shape for keys in cache.keys} == {(2, H, D, config.block_size)}
    assert {values.shape for values in cache.values} == {(2, H, config.block_size, D)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks, V", [(1, 44), (2, 44), (4, 44), (2, 43), (4, 42)])
def test_logits_equal_the_serial_model_s(seed, ranks, V, tied):
    run_ranks(ranks, logits_equal_serial, GPT2Config(V, 12, 2, 4, 16, tied), seed)


def tokens_equal_serial(comm, config, prompt, new, seed):
    parameters = random_parameters(config, np.random.default_rng(seed))
    serial = model_of(config, parameters)
    model = load_model(config, parameters, NumpyBackend("fp64"), comm)
    assert list(generate(model, prompt, new)) == list(generate(serial, prompt, new))
    rules = [Sampling(1.3, top_k=20, top_p=0.95, seed=9) for _ in range(2)]
    assert list(generate(model, prompt, new, rules[0])) == list(generate(serial, prompt, new, rules[1]))


@pytest.mark.parametrize("length", [1, 5, 12, 30])  # in a block of 12, with 20 new tokens: the window always slides
@pytest.mark.parametrize("ranks, V", [(2, 44), (4, 44), (4, 42)])
def test_generation_gives_the_serial_model_s_tokens(seed, ranks, V, length):
    prompt = np.random.default_rng(seed).integers(0, V, length).tolist()
    run_ranks(ranks, tokens_equal_serial, GPT2Config(V, 12, 2, 4, 16, tied=False), prompt, 20, seed)


# -- what is sent ------------------------------------------------------------------------------------------------------


def bytes_of_a_step(comm, config, B, T):
    """(forward, backward) bytes that this rank sends."""
    model = model_of(config, random_parameters(config, np.random.default_rng(0)), comm)
    loss = model.loss(*np.zeros((2, B, T), np.int64))
    forward = comm.bytes_sent
    loss.backward()
    return forward, comm.bytes_sent - forward


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_of_the_size_of_the_logits_is_sent(ranks):
    config, B, T = GPT2Config(4000, 16, 2, 4, 16), 3, 16
    L, N = config.n_layer, B * T

    def all_reduce(elements):
        return 2 * (ranks - 1) * elements * 8 // ranks  # bytes a rank, float64

    # forward: the embedding, two branches a layer; maxima, sums and target logits. backward: f of each branch and head
    stream, rows = all_reduce(N * config.n_embd), all_reduce(N) + all_reduce(2 * N)
    want = ((1 + 2 * L) * stream + rows, (2 * L + 1) * stream)
    assert run_ranks(ranks, bytes_of_a_step, config, B, T) == [want] * ranks
    assert sum(want) < N * config.vocab_size // ranks * 8  # all that a rank sends, and its own logits


# -- shards ------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 3), st.integers(1, 5), st.integers(31, 42), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_unshard_is_the_inverse_of_shard_bit_for_bit(parts, heads, D, V, tied, seed):
    config = GPT2Config(V, 5, 2, heads * parts, heads * parts * D, tied)
    rng, shapes = np.random.default_rng(seed), dict(parameter_shapes(config))
    local = [shard_shapes(parameter_shapes(config), rank, parts) for rank in range(parts)]
    assert all(list(each) == list(shapes) for each in local)
    for name, shape in shapes.items():
        whole = rng.standard_normal(shape).astype(np.float32)
        pieces = [shard(name, whole, rank, parts) for rank in range(parts)]
        assert [piece.shape for piece in pieces] == [each[name] for each in local]
        assert all(piece.flags.c_contiguous for piece in pieces)
        assert_array_equal(unshard(name, pieces), whole, strict=True)
    held = sum(math.prod(shape) for each in local for name, shape in each.items() if not is_replicated(name))
    assert held == sum(math.prod(shape) for name, shape in shapes.items() if not is_replicated(name))


def test_a_group_of_one_shards_and_gathers_without_a_copy():
    for name, shape in parameter_shapes(PRESETS["nano"]):
        whole = np.zeros(shape)
        piece = shard(name, whole, 0, 1)
        assert np.shares_memory(piece, whole) and np.shares_memory(gather(name, [piece], shape, Solo()), whole)


def test_a_rank_gets_the_same_heads_of_q_k_and_v():
    q, k, v = (np.char.add(letter, np.arange(8).astype(str)) for letter in "qkv")  # 4 heads of width 2
    piece = shard("transformer.h.0.attn.c_attn.bias", np.concatenate([q, k, v]), 1, 2)
    assert piece.tolist() == ["q4", "q5", "q6", "q7", "k4", "k5", "k6", "k7", "v4", "v5", "v6", "v7"]


def test_the_parameters_that_every_rank_holds_whole():
    names = [name for name, _ in parameter_shapes(GPT2Config(n_layer=1, tied=False)) if is_replicated(name)]
    norms = [f"{norm}.{kind}" for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f") for kind in ("weight", "bias")]
    others = ["wpe.weight", "h.0.attn.c_proj.bias", "h.0.mlp.c_proj.bias"]  # positions; biases added after a reduce
    assert sorted(names) == sorted(f"transformer.{name}" for name in norms + others)


@pytest.mark.parametrize(
    "config, parts, words",
    [
        (PRESETS["paper"], 4, "n_head 6 is not divisible by `tp` 4: use `tp` 1, 2, 3 or 6"),
        (PRESETS["small"], 8, "n_head 12 is not divisible by `tp` 8: use `tp` 1, 2, 3, 4, 6 or 12"),
        (PRESETS["tiny"], 0, "n_head 4 is not divisible by `tp` 0: use `tp` 1, 2 or 4"),
        (
            replace(PRESETS["tiny"], vocab_size=5), 4,
            "the vocabulary of 5 is too small for `tp` 4, which leaves a rank without a token: use `tp` 1 or 2",
        ),
    ],
)  # fmt: skip
def test_a_group_that_does_not_divide_the_model_is_refused_with_what_works(config, parts, words):
    with pytest.raises(ConfigError, match=f"^{words}$"):
        check_tensor_parallel(config, parts)


def test_a_group_that_divides_the_heads_is_accepted():
    for name, parts in (("paper", 1), ("paper", 2), ("tiny", 4), ("2.7B", 16), ("gpt2", 4)):
        check_tensor_parallel(PRESETS[name], parts)

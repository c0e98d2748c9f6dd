"""A GPT-2 with rotary positions: gradients against PyTorch, bits of every layout, generation, files of GPT-NeoX."""

# B batch, T time, C channels, H heads, D = C // H

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.architecture import GPT2Config, flops_per_token, parameter_count, parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.plain_backend import PlainBackend
from gpt2core.sampler import Greedy, KVCache, generate, generate_batch
from gpt2core.tensor import no_grad
from stage0_serial.generation.token_step import token_step
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.torch_gpt2 import (
    batch,
    check_finite_differences,
    model_of,
    random_parameters,
    relative,
    rotary_logits,
)
from tests.support.training import CONFIG, assert_same, train

torch = pytest.importorskip("torch")

ROTARY = replace(CONFIG, positions="rotary")
SMALL = GPT2Config(29, 12, 3, 2, 8, positions="rotary")


@pytest.mark.fast
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", [NumpyBackend, PlainBackend])
def test_logits_loss_and_every_gradient_equal_pytorch(rng, backend, tied):
    config = replace(SMALL, tied=tied)
    parameters, (ids, targets) = random_parameters(config, rng, np.float64), batch(rng, config, 3, 11)
    ours = model_of(config, parameters, backend("fp64"))
    theirs = {name: torch.tensor(array, requires_grad=True) for name, array in parameters.items()}
    want = rotary_logits(config, theirs, ids)
    want_loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), torch.tensor(targets).flatten())
    want_loss.backward()
    with no_grad():
        assert relative(ours.logits(ids).numpy(), want.detach()) <= 1e-9
    loss = ours.loss(ids, targets)
    assert abs(loss.item() / want_loss.item() - 1) <= 1e-9
    loss.backward()
    for name, tensor in ours.parameters.items():
        assert relative(tensor.grad, theirs[name].grad) <= 1e-9, name  # also of the keys' bias, which is rotated


def test_gradients_equal_finite_differences(rng):
    parameters, (ids, targets) = random_parameters(SMALL, rng, np.float64), batch(rng, SMALL, 2, 6)
    check_finite_differences(model_of(SMALL, parameters, NumpyBackend("fp64")), ids, targets, rng)


def test_the_order_of_earlier_tokens_matters(rng):
    """Without positions, the last logits of a model of one layer would be those of any order of the earlier tokens."""
    config = replace(SMALL, n_layer=1)
    model = model_of(config, random_parameters(config, rng, np.float64), NumpyBackend("fp64"))
    ids = np.stack([rng.permutation(config.vocab_size)[:8] for _ in range(16)])
    with no_grad():
        whole, swapped = (model.logits(x).numpy()[:, -1] for x in (ids, ids[:, [1, 0, *range(2, 8)]]))
    assert relative(swapped, whole) > 1e-3


def test_a_rotary_model_has_no_position_embedding():
    learned = replace(SMALL, positions="learned")
    C = SMALL.n_embd
    assert dict(parameter_shapes(learned)) == dict(parameter_shapes(SMALL)) | {"transformer.wpe.weight": (12, C)}
    assert parameter_count(learned) - parameter_count(SMALL) == 12 * C
    assert flops_per_token(learned, 5) == flops_per_token(SMALL, 5)  # looked up, not multiplied


@pytest.mark.parametrize(
    "sizes, words",
    [
        (dict(n_embd=6), "n_embd 6 and n_head 2 make heads of 3 channels"),
        (dict(positions="absolute"), "'absolute', but it must be one of learned, rotary"),
    ],
)
def test_an_odd_head_size_and_unknown_positions_are_refused_with_the_values(sizes, words):
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **sizes)


# -- every layout ------------------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(7).integers(0, 36, 1000)


@functools.cache
def serial(config):
    return train(Solo(), ParallelConfig(), TOKENS, steps=2, config=config)


LAYOUTS = [
    (1, dict(recompute="block")), (2, {}), (4, {}), (4, dict(zero=1)), (2, dict(zero=2)), (2, dict(zero=3)),
    (2, dict(pp=2)), (2, dict(pp=2, pp_schedule="zero-bubble", recompute="block")), (4, dict(pp=2, zero=1)),
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks, options", LAYOUTS, ids=str)
def test_every_layout_gives_the_serial_bits(ranks, options, tied):
    config = replace(ROTARY, tied=tied)
    for got in run_ranks(ranks, lambda comm: train(comm, ParallelConfig(**options), TOKENS, steps=2, config=config)):
        assert_same(got, serial(config))


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallel_ranks_compute_the_serial_loss(tied):
    config = replace(ROTARY, tied=tied)
    options = dict(steps=2, config=config, precision="fp64")
    want = train(Solo(), ParallelConfig(), TOKENS, **options)
    for more in ({}, dict(recompute="block")):
        for got in run_ranks(2, lambda comm, more=more: train(comm, ParallelConfig(tp=2, **more), TOKENS, **options)):
            np.testing.assert_allclose(got[0], want[0], rtol=1e-12)  # float64: only the order of the sums differs
            for name, moments in want[2].items():  # sums of gradients
                for mine, theirs in zip(got[2][name], moments, strict=True):
                    assert relative(mine, theirs) <= 1e-9, name


def test_worker_threads_give_the_serial_bits():
    assert_same(train(Solo(), ParallelConfig(), TOKENS, steps=2, config=ROTARY, threads=4), serial(ROTARY))


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1] * 9, [9], [4, 1, 1, 3]])
@pytest.mark.parametrize("backend", [NumpyBackend, PlainBackend])
def test_logits_with_a_cache_equal_logits_at_once(rng, backend, pieces):
    model = model_of(SMALL, random_parameters(SMALL, rng, np.float64), backend("fp64"))
    ids, at, cache = batch(rng, SMALL, 2, 9)[0], 0, KVCache(SMALL, model.backend, batch=2)
    with no_grad():
        whole = model.logits(ids).numpy()
        for length in pieces:
            got = model.without_autograd().logits(ids[:, at : at + length], cache)
            cache.length += length
            assert relative(got, whole[:, at : at + length]) <= 1e-12
            at += length


@pytest.mark.parametrize("block", [1, 2, 5, 12])
@pytest.mark.parametrize("backend", [NumpyBackend, PlainBackend])
def test_a_full_cache_slides_as_a_forward_pass_with_a_banded_mask(rng, backend, block):
    config = replace(SMALL, block_size=block)
    parameters, ids = random_parameters(config, rng, np.float64), batch(rng, config, 2, 3 * block + 4)[0]
    model, prompt = model_of(config, parameters, backend("fp64")), max(1, block - 2)
    tensors = {name: torch.tensor(array) for name, array in parameters.items()}
    want = rotary_logits(config, tensors, ids, block).numpy()
    cache, at = KVCache(config, model.backend, batch=2), 0
    with no_grad():
        for length in [prompt] + [1] * (ids.shape[1] - prompt):
            got = model.without_autograd().logits(ids[:, at : at + length], cache)
            cache.length += length
            assert relative(got, want[:, at : at + length]) <= 1e-9
            at += length


def test_several_positions_beyond_a_full_cache_are_refused(rng):
    model = model_of(SMALL, random_parameters(SMALL, rng, np.float64), NumpyBackend("fp64"))
    cache = KVCache(SMALL, model.backend)
    cache.length = 11
    with pytest.raises(ConfigError, match=r"\(1, 2, 24\) after 11 positions do not fit 12 positions"), no_grad():
        model.without_autograd().logits(np.zeros((1, 2), np.int64), cache)


@pytest.mark.parametrize("prompt", [1, 5, 12, 20])
def test_generated_tokens_are_the_most_probable_ones_of_the_whole_sequence(rng, prompt):
    """Greedy, past the end of the block; a prompt longer than the block is cut to it."""
    parameters, config = random_parameters(SMALL, rng, np.float64), SMALL
    model, tokens = model_of(config, parameters, NumpyBackend("fp64")), batch(rng, config, 1, prompt)[0, 0].tolist()
    tensors = {name: torch.tensor(array) for name, array in parameters.items()}
    want = tokens[-config.block_size :]
    for token in generate(model, tokens, 25):
        logits = rotary_logits(config, tensors, [want], config.block_size)[0, -1]
        assert logits[token] >= logits.max() - 1e-9  # one of equal logits
        want.append(token)


@pytest.mark.parametrize("prompts", [(1, 1), (2, 11, 5), (12, 12, 20, 1), (11, 11)], ids=str)
def test_several_sequences_get_the_tokens_that_each_gets_alone(rng, prompts):
    """At one position of each sequence, at different ones, and past the end of the block."""
    model = model_of(SMALL, random_parameters(SMALL, rng, np.float64), NumpyBackend("fp64"))
    sequences = [rng.integers(0, SMALL.vocab_size, length).tolist() for length in prompts]
    rules = [Greedy() for _ in sequences]
    together = list(zip(*generate_batch(model, sequences, 25, rules), strict=True))
    assert together == [tuple(generate(model, sequence, 25)) for sequence in sequences]


@pytest.mark.parametrize("block", [1, 2, 12])
def test_the_faster_decoder_has_the_logits_of_the_model(rng, block):
    config = replace(SMALL, block_size=block)
    model = model_of(config, random_parameters(config, rng, np.float64), NumpyBackend("fp64"))
    step, ids = token_step(model), rng.integers(0, config.vocab_size, 2 * block + 3).tolist()
    caches, at = [KVCache(config, model.backend) for _ in range(2)], 0
    for length in [block] + [1] * (len(ids) - block):
        piece = ids[at : at + length]
        assert relative(step(piece, caches[0]), model.without_autograd().next_logits(piece, caches[1])) <= 1e-10
        assert caches[0].length == caches[1].length == (at := at + length)


def test_ranks_that_divide_the_layers_generate_the_serial_tokens(rng):
    config = replace(SMALL, vocab_size=30)
    parameters = random_parameters(config, rng, np.float64)

    def tokens(comm):
        return list(generate(load_model(config, parameters, NumpyBackend("fp64"), comm), [3, 1, 4], 20))

    want = tokens(Solo())
    assert run_ranks(2, tokens) == [want, want]


# -- files: those of transformers' GPT-NeoX ----------------------------------------------------------------------------


def gpt_neox(config):
    transformers = pytest.importorskip("transformers")
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=config.vocab_size, max_position_embeddings=config.block_size, hidden_size=config.n_embd,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, intermediate_size=4 * config.n_embd,
            layer_norm_eps=config.layer_norm_epsilon, tie_word_embeddings=config.tied, hidden_act="gelu_new",
            rotary_pct=1.0, use_parallel_residual=False, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def their_logits(model, ids):
    with torch.no_grad():
        return model.float().eval()(torch.tensor(ids)).logits.numpy()


def our_logits(path, ids):
    loaded = load_checkpoint(path)
    with no_grad():
        return model_of(loaded.config, loaded.parameters, NumpyBackend()).logits(ids).numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_of_ours_gives_transformers_our_logits(tmp_path, rng, tied, dtype):
    transformers = pytest.importorskip("transformers")
    config = GPT2Config(53, 24, 3, 2, 16, tied, positions="rotary")
    parameters, ids = random_parameters(config, rng), batch(rng, config, 2, 24)[0]
    save_checkpoint(tmp_path, 7, config=config, parameters=parameters, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "GPTNeoXForCausalLM"
    rounded = {name: array.astype(dtype).astype(np.float32) for name, array in parameters.items()}
    with no_grad():
        want = model_of(config, rounded, NumpyBackend()).logits(ids).numpy()
    assert relative(their_logits(theirs, ids), want) <= 1e-4  # fp32 arithmetic on equal weights
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == config and list(loaded.parameters) == list(parameters)
    for name, array in rounded.items():
        np.testing.assert_array_equal(loaded.parameters[name], array, strict=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_of_transformers_gives_us_its_logits(tmp_path, rng, tied):
    config = GPT2Config(53, 24, 3, 2, 16, tied, positions="rotary")
    theirs, ids = gpt_neox(config), batch(rng, config, 2, 24)[0]
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3, mean=float(parameter.ndim == 1))
    theirs.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path).config == config
    assert relative(our_logits(tmp_path, ids), their_logits(theirs, ids)) <= 1e-4


@pytest.mark.parametrize("field, value, shown", [
    ("hidden_act", "gelu", "hidden_act is 'gelu'"), ("use_parallel_residual", True, "use_parallel_residual is True"),
    ("rotary_pct", 0.25, "rotary_pct is 0.25"), ("rotary_emb_base", 500000, "rotary_emb_base is 500000"),
    ("intermediate_size", 7, "intermediate_size is 7, but only 64"), ("hidden_size", 18, "heads of 9 channels"),
    ("rope_parameters", {"rope_type": "linear", "factor": 2.0}, "rope_scaling is 'linear'"),
    ("rope_parameters", {"partial_rotary_factor": 0.5}, "rotary_pct is 0.5"), ("num_hidden_layers", 2, "layers.2."),
    ("layer_norm_eps", 2, "layer_norm_eps is 2"), ("model_type", "llama", "only 'gpt2' or 'gpt_neox'"),
])  # fmt: skip
def test_a_gpt_neox_of_another_architecture_is_refused_by_name(tmp_path, rng, field, value, shown):
    config = GPT2Config(53, 24, 3, 2, 16, positions="rotary")
    save_checkpoint(tmp_path, 1, config=config, parameters=random_parameters(config, rng))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {field: value}
    if field == "hidden_size":
        values["intermediate_size"] = 4 * value
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=re.escape(shown)):
        load_checkpoint(tmp_path)
    del values[field]
    path.write_text(json.dumps(values))
    if field in ("hidden_act", "use_parallel_residual", "rotary_pct", "intermediate_size", "num_hidden_layers"):
        with pytest.raises(CheckpointError, match=field):  # its default is another architecture, or there is none
            load_checkpoint(tmp_path)

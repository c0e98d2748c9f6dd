"""Generation on the GPU gives stage 0's tokens: greedy and sampled, one sequence and many, in and beyond a block."""

# B sequences, V vocabulary

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core import architecture
from gpt2core.app import cli
from gpt2core.app.checkpoints import directory as checkpoint
from gpt2core.app.inference.group_sampler import GroupSampler
from gpt2core.app.shipped import CORPUS
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.presets import PRESETS
from gpt2core.sampler import Decoder, Greedy, Sampling, generate, generate_batch
from gpt2core.text.only_tokens import OnlyTokens
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import build_tokenizer
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.decoding import decode_stream, decoder, sampling
from stage2_cuda.decoding.batched import DecodeTiling, tiling_for
from stage2_cuda.runtime import triton_launch

gpu = pytest.mark.gpu
pytestmark = [] if triton_launch.interpreted() else [gpu]  # with a GPU, the tests run on it
CONFIG = GPT2Config(37, 12, 2, 2, 48, tied=True)
UNTIED = GPT2Config(29, 8, 1, 2, 32, tied=False)
RULES = {
    "greedy": lambda seed: Greedy(),
    "sampled": lambda seed: Sampling(1.5, seed=seed),
    "top-k": lambda seed: Sampling(2.0, top_k=9, seed=seed),
    "top-k, top-p": lambda seed: Sampling(1.3, 9, 0.8, seed),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """In the interpreter each program takes 10 ms: use large tiles."""
    if triton_launch.interpreted():
        tiling = DecodeTiling(block_n=256, split_k=3, split_block_n=256, block_keys=64, block_vocab=256)
        monkeypatch.setattr(CudaBackend, "decode_tiling", staticmethod(lambda batch: tiling))


def arrays_of(config, seed=0):
    """Initial weights, enlarged: the generated tokens vary, so a wrong position changes them."""
    return {
        name: array * np.float32(45 / math.sqrt(config.n_embd) if array.ndim > 1 else 1)
        for name, array in initial_parameters(config, seed)
    }


def models(config=CONFIG, **options):
    return [load_model(config, arrays_of(config), backend) for backend in (CudaBackend(**options), NumpyBackend())]


def generated(model, prompts, count, rule, decoders=None):
    """The new tokens of each prompt; prompt number i samples with seed i."""
    steps = generate_batch(model, prompts, count, [rule(seed) for seed in range(len(prompts))], decoders)
    return [list(tokens) for tokens in zip(*steps, strict=True)]


# -- stage 0's tokens --------------------------------------------------------------------------------------------------

# fp32 on both sides: rounding changes a greedy choice or a draw less often than once in 10^4 tokens of these models


@pytest.mark.parametrize("rule", [RULES["greedy"], RULES["top-k"]], ids=["greedy", "top-k"])
def test_tokens_equal_stage_0_s_before_and_after_the_block_is_full(rule):
    ours, stage0 = models(UNTIED)
    prompt = [1, 2, 3, 28]
    tokens = list(generate(ours, prompt, 7, rule(7)))
    assert tokens == list(generate(stage0, prompt, 7, rule(7))) and len(set(tokens)) > 3


@pytest.mark.parametrize("length", [1, 7, 8, 20])
def test_tokens_after_a_prompt_of_any_length_equal_stage_0_s(length):
    ours, stage0 = models(UNTIED)
    prompt = [(7 * i) % 29 for i in range(length)]
    assert list(generate(ours, prompt, 4)) == list(generate(stage0, prompt, 4))


@pytest.mark.parametrize("rule", [RULES["greedy"], RULES["sampled"]], ids=["greedy", "sampled"])
def test_a_batch_of_different_lengths_gives_stage_0_s_tokens(rule):
    ours, stage0 = models()
    prompts = [[1, 2, 3], [4] * 10, [9]]  # the second sequence fills the block first, so its window slides first
    assert generated(ours, prompts, 4, rule) == generated(stage0, prompts, 4, rule)


@pytest.mark.parametrize("rule, block, prompts", [
    ("top-k", 4, [[1, 2]]), ("sampled", 5, [[1, 2, 3], [4] * 7, [9]]),
    *(pytest.param(rule, block, prompts, marks=pytest.mark.long) for rule, block, prompts in [
        ("greedy", 1, [[5]]), ("greedy", 2, [[3, 1], [4]]), ("sampled", 4, [[9] * 11]), ("greedy", 7, [[1]] * 5),
    ]),
])  # fmt: skip
def test_tokens_with_rotary_positions_equal_stage_0_s_past_the_end_of_the_block(monkeypatch, rule, block, prompts):
    monkeypatch.setattr(decoder.GpuDecoder, "recompute_window", None)  # a step computes one position of each sequence
    (ours, stage0), decoders = models(replace(UNTIED, block_size=block, n_embd=48, positions="rotary")), {}
    for count in (2 * block + 1, 2):  # the second generation reuses the decoder
        tokens = generated(ours, prompts, count, RULES[rule], decoders)
        assert tokens == generated(stage0, prompts, count, RULES[rule])
    assert isinstance(decoders[len(prompts)][0], decoder.GpuDecoder)


@pytest.mark.parametrize("captured, prompts", [
    (0, [[3, 1, 4]]), (4096, [[1, 2, 3], [4] * 6, [9]]), (0, [[5] * 11]),
    *(pytest.param(captured, prompts, marks=pytest.mark.long)
      for captured, prompts in [(4096, [[3, 1, 4]]), (0, [[1, 2, 3], [4] * 6, [9]]), (4096, [[5] * 11])]),
])  # fmt: skip
def test_padded_prompts_give_stage_0_s_tokens(monkeypatch, prompts, captured):
    monkeypatch.setattr(decoder, "CAPTURED_PREFILL", captured)
    for stream in (decode_stream.EagerStream, decode_stream.DecodeStream):
        monkeypatch.setattr(stream, "prefill_multiple", 8)  # of a block of 12
    ours, stage0 = models()
    assert generated(ours, prompts, 3, RULES["sampled"]) == generated(stage0, prompts, 3, RULES["sampled"])


def test_the_readback_ring_buffer_wraps_around(monkeypatch):
    monkeypatch.setattr(sampling, "READBACK", decoder.STEPS_AHEAD + 2)
    ours, stage0 = models(GPT2Config(29, 32, 1, 2, 32, tied=False))
    prompts = [[1, 2, 3], [4] * 5]
    assert generated(ours, prompts, 15, RULES["greedy"]) == generated(stage0, prompts, 15, RULES["greedy"])


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4] * 5]], ids=["one", "two"])
def test_more_tokens_are_drawn_than_random_numbers_are_uploaded_at_a_time(monkeypatch, prompts):
    monkeypatch.setattr(decoder, "UNIFORMS", 2)
    ours, stage0 = models(GPT2Config(29, 32, 1, 2, 32, tied=False))
    assert generated(ours, prompts, 7, RULES["sampled"]) == generated(stage0, prompts, 7, RULES["sampled"])


def test_a_custom_rule_gets_the_logits_on_the_host(rng):
    ours, stage0 = models(UNTIED)
    seen = {ours: [], stage0: []}
    for model in (ours, stage0):

        def choose(logits, seen=seen[model]):
            seen.append(np.array(logits, np.float64))
            return int(logits.argsort()[-2])

        list(generate(model, [3, 1, 4, 1, 5], 5, choose))
    got, want = (np.array(seen[model]) for model in (ours, stage0))
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)  # fp32, one layer
    grouped = list(generate(ours, [3, 1, 4], 3, GroupSampler(Greedy(), Solo())))
    assert grouped == list(generate(ours, [3, 1, 4], 3))


def test_rules_with_different_options_sample_on_the_host():
    ours, stage0 = models(UNTIED)
    prompts, mixed = [[3, 1], [5, 9]], lambda: [Sampling(2.0, seed=1), Greedy()]
    assert list(generate_batch(ours, prompts, 3, mixed())) == list(generate_batch(stage0, prompts, 3, mixed()))


@pytest.mark.parametrize("name, B", [
    ("greedy", 1), *(pytest.param(name, 1, marks=pytest.mark.long) for name in RULES if name != "greedy"),
    ("top-k, top-p", 3),
])  # fmt: skip
def test_the_device_never_chooses_an_id_without_a_token(rng, name, B):
    rule = RULES[name]
    (ours, stage0), decoders = models(UNTIED), {}
    prompts = [rng.integers(0, 29, int(length)).tolist() for length in rng.integers(1, 8, B)]
    for count in (28, 5):  # the decoder is reused with other ids
        ids = np.sort(rng.choice(29, count, replace=False))

        def limited(seed, ids=ids):
            return OnlyTokens(rule(seed), ids)

        got, want = generated(ours, prompts, 2, limited, decoders), generated(stage0, prompts, 2, limited)
        assert got == want and np.isin(got, ids).all()
        (decoder,) = decoders[B]
        assert decoder.steps_ahead  # the device has chosen the tokens
    assert generated(ours, prompts, 2, rule, decoders) == generated(stage0, prompts, 2, rule)


def test_rules_with_different_ids_sample_on_the_host():
    ours, stage0 = models(UNTIED)
    rules = [OnlyTokens(Greedy(), np.arange(3)), OnlyTokens(Greedy(), np.arange(20, 29))]
    tokens = list(generate_batch(ours, [[3, 1], [5, 9]], 3, rules))
    assert tokens == list(generate_batch(stage0, [[3, 1], [5, 9]], 3, rules))
    assert all(first < 3 and second >= 20 for first, second in tokens)


# -- steps and decoders ------------------------------------------------------------------------------------------------


def test_steps_run_a_few_ahead_of_the_reader_and_none_is_computed_in_vain(monkeypatch):
    model, _ = models(UNTIED)
    taken = []
    step = decoder.GpuDecoder.step
    monkeypatch.setattr(decoder.GpuDecoder, "step", lambda self: taken.append(1) or step(self))
    assert decoder.STEPS_AHEAD == 4  # after the first tokens, which are read before more steps are launched
    assert [len(taken) for _ in generate(model, [1, 2], 9)] == [2, 4, 6, 8, 9, 9, 9, 9, 9]


def test_a_decoder_is_reused_and_interleaved_generations_have_one_each():
    (model, _), decoders = models(UNTIED), {}
    alone = [list(generate(model, prompt, 3, decoders=decoders)) for prompt in ([1, 2], [7, 8, 9])]
    assert len(decoders[1]) == 1
    streams = zip(*(generate(model, prompt, 3, decoders=decoders) for prompt in ([1, 2], [7, 8, 9])), strict=True)
    assert [list(tokens) for tokens in zip(*streams, strict=True)] == alone
    assert len(decoders[1]) == 2


def test_a_generation_that_is_not_read_to_its_end_does_not_affect_the_next():
    (model, stage0), decoders = models(UNTIED), {}
    stream = generate(model, [1, 2], 5, decoders=decoders)
    next(stream)
    stream.close()
    tokens = list(generate(model, [7, 8, 9], 3, decoders=decoders))
    assert tokens == list(generate(stage0, [7, 8, 9], 3)) and len(decoders[1]) == 1


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 3, 4, 5, 6, 7, 8]], ids=["decode steps", "window steps"])
def test_the_next_generation_reads_weights_that_were_changed_in_place(prompt):
    (model, stage0), decoders = models(UNTIED), {}
    list(generate(model, prompt, 2, decoders=decoders))
    for name, array in arrays_of(UNTIED, seed=1).items():
        for each in (model, stage0):
            each.parameters[name].data[...] = each.backend.asarray(array)
    tokens = list(generate(model, prompt, 3, decoders=decoders))
    assert tokens == list(generate(stage0, prompt, 3)) and len(decoders[1]) == 1


def test_a_large_batch_and_a_sharded_model_use_the_core_s_decoder():
    model, _ = models(UNTIED)
    backend = model.backend
    assert backend.decoder(model, backend.decoder_batch + 1) is None
    model.group = SimpleNamespace(size=2, rank=0)
    assert backend.decoder(model, 1) is None
    assert Decoder(model).steps_ahead == 0


@pytest.mark.parametrize("B", [1, 3])
def test_an_operation_without_kernels_is_refused(monkeypatch, B):
    first, second = architecture.SUBLAYERS
    monkeypatch.setattr(architecture, "SUBLAYERS", (first, second._replace(operation="silu")))
    with pytest.raises(ConfigError, match="the decoder of the GPU does not implement the operation 'silu'"):
        next(generate_batch(models()[0], [[1]] * B, 1, [Greedy()] * B))


def test_an_empty_prompt_is_refused():
    model, _ = models(UNTIED)
    with pytest.raises(ConfigError, match="prompt is empty"):
        next(generate_batch(model, [[1], []], 3, [Greedy(), Greedy()]))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint of preset nano, untrained."""
    path, config = tmp_path_factory.mktemp("weights") / "run", PRESETS["nano"]
    tokenizer = build_tokenizer("word", read_text(CORPUS))
    checkpoint.save_checkpoint(path, 1, config=config, parameters=arrays_of(config), tokenizer=tokenizer)
    return path


def same_output(ours, stage0):
    """Not stderr: where kernels have to be compiled, that is a line there."""
    return (ours.out, ours.code) == (stage0.out, 0)


def test_prompts_from_a_file_give_stage_0_s_text_up_to_the_stop_text(command, tmp_path, weights):
    (tmp_path / "prompts").write_text("the model\nthe model the model the\nthe\n")
    flags = ("--weights", weights, "--mode", "batch", "--prompts", tmp_path / "prompts", "--max-new-tokens", 4)
    ours, stage0 = (command(cli.infer, *flags, backend=backend) for backend in (CudaBackend, NumpyBackend))
    assert same_output(ours, stage0) and ours.out.count("Continuation:") == 3
    word = ours.out.split("Continuation:\n")[1].split()[1]
    ours, stage0 = (
        command(cli.infer, *flags, "--stop", word, backend=backend) for backend in (CudaBackend, NumpyBackend)
    )
    assert same_output(ours, stage0)


def test_a_stream_ends_with_the_stop_text(command, weights):
    flags = ("--weights", weights, "--prompt", "the model", "--max-new-tokens", 6, "--stream", "--stop", "e")
    ours, stage0 = (command(cli.infer, *flags, backend=backend) for backend in (CudaBackend, NumpyBackend))
    assert same_output(ours, stage0)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def paper(precision, captured=True, positions="learned"):
    config, backend = replace(PRESETS["paper"], positions=positions), CudaBackend(precision)
    if not captured:
        backend.decode_stream.capture = lambda function: function
    return load_model(config, arrays_of(config), backend)


EVEN = np.arange(0, 172, 2)
LIMITED = {
    "greedy, limited": lambda seed: OnlyTokens(Greedy(), EVEN),
    "top-k, limited": lambda seed: OnlyTokens(Sampling(2.0, 9, 0.9, seed), EVEN),
}


@gpu
@pytest.mark.parametrize("rule", (RULES | LIMITED).values(), ids=RULES | LIMITED)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("length", [5, 192, 250, 256])
@pytest.mark.parametrize("positions", architecture.POSITIONS)
def test_recorded_and_unrecorded_steps_give_the_same_tokens_every_time(rng, precision, rule, length, positions):
    prompt = rng.integers(0, 172, length).tolist()
    captured, uncaptured = (paper(precision, each, positions) for each in (True, False))
    decoders = {}
    first, *others = (list(generate(captured, prompt, 40, rule(5), decoders)) for _ in range(3))  # run, capture, replay
    assert others == [first, first] and first == list(generate(uncaptured, prompt, 40, rule(5)))
    assert rule not in LIMITED.values() or np.isin(first, EVEN).all()
    is_greedy = rule in (RULES["greedy"], LIMITED["greedy, limited"])
    # greedy tokens may repeat in a short cycle; without learned positions, the same text may give the same token
    assert len(set(first)) > (int(positions == "learned") if is_greedy else 3)
    shorter = prompt[: max(length - 30, 1)]  # replays the graph of the first prompt, or: run, capture, replay
    want = list(generate(uncaptured, shorter, 5, rule(6)))
    assert all(list(generate(captured, shorter, 5, rule(6), decoders)) == want for _ in range(3))


@gpu
@pytest.mark.parametrize("B", [1, 3])
def test_two_decoders_with_one_workspace_give_the_tokens_of_each_alone(rng, B):
    model, alone, decoders = paper("bf16"), paper("bf16", captured=False), {}
    for _ in range(3):  # run, capture, replay
        several = [[rng.integers(0, 172, int(n)).tolist() for n in rng.integers(3, 200, B)] for _ in range(2)]
        want = [generated(alone, prompts, 12, RULES["top-k"]) for prompts in several]
        streams = [
            generate_batch(model, prompts, 12, [RULES["top-k"](seed) for seed in range(B)], decoders)
            for prompts in several
        ]
        steps = zip(*zip(*streams, strict=True), strict=True)
        assert [[list(tokens) for tokens in zip(*each, strict=True)] for each in steps] == want


@gpu
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("B", [1, 5, 32])
def test_logits_with_rotary_positions_equal_those_of_the_core_s_decoder(rng, monkeypatch, precision, tolerance, B):
    """Past the end of the block. In 16 bits the two sets of kernels round at different places."""
    model, seen = paper(precision, positions="rotary"), []
    prompts = [rng.integers(0, 172, int(length)).tolist() for length in rng.integers(240, 257, B)]
    script = rng.integers(0, 172, (20, B))  # the tokens: so both decoders read the same text

    def choose(logits):
        seen.append(np.array(logits))
        number = (len(seen) - 1) % script.size
        return int(script.flat[number])

    for make in (CudaBackend.decoder, lambda *_: None):
        monkeypatch.setattr(CudaBackend, "decoder", make)
        list(generate_batch(model, prompts, len(script), [choose] * B))
    got, want = np.array(seen).reshape(2, -1, 172)
    assert (np.linalg.norm(got - want, axis=1) <= tolerance * np.linalg.norm(want, axis=1)).all()


@gpu
@pytest.mark.parametrize("B", [1, 5, 32])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("positions", architecture.POSITIONS)
def test_programmatic_dependent_launch_changes_no_token(rng, monkeypatch, precision, B, positions):
    prompts, found = [rng.integers(0, 172, int(n)).tolist() for n in rng.integers(3, 9, B)], []
    for pdl in (False, True):
        tiling = tiling_for(B)._replace(pdl=pdl)
        monkeypatch.setattr(CudaBackend, "decode_tiling", staticmethod(lambda batch, tiling=tiling: tiling))
        models = [paper(precision, captured, positions) for captured in (False, True)]
        found += [generated(model, prompts, 260, RULES["greedy"]) for model in models]
    assert all(each == found[0] for each in found)


@gpu
@pytest.mark.parametrize("length", [5, 250, 256])
def test_the_paper_s_model_gives_stage_0_s_tokens_in_fp32(rng, length):
    prompt = rng.integers(0, 172, length).tolist()
    stage0 = load_model(PRESETS["paper"], arrays_of(PRESETS["paper"]), NumpyBackend())
    assert list(generate(paper("fp32"), prompt, 20)) == list(generate(stage0, prompt, 20))


@gpu
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("B", [1, 5, 32])
def test_logits_of_decode_steps_equal_those_of_the_training_kernels(rng, precision, tolerance, B):
    """A custom rule receives the logits. In 16 bits the two sets of kernels round at different places."""
    model, seen = paper(precision), []
    prompts = [rng.integers(0, 172, int(length)).tolist() for length in rng.integers(3, 200, B)]

    def choose(logits):
        seen.append(logits.copy())
        return int(logits.argmax())

    chosen = list(zip(*generate_batch(model, prompts, 4, [choose] * B), strict=True))
    for b, (prompt, text) in enumerate(zip(prompts, chosen, strict=True)):
        y = model.logits(np.array([[*prompt, *text[:3]]])).numpy()[0, -1]
        got = seen[3 * B + b]
        assert np.linalg.norm(got - y) <= tolerance * np.linalg.norm(y)

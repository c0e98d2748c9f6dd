"""Generation on the device writes stage 0's texts: greedy and drawn, one and many, also when the window slides."""

# B texts, V vocabulary

import math

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core.app import checkpoint_directory as checkpoint
from gpt2core.app import cli
from gpt2core.app.presets import CORPUS, PRESETS
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2, GPT2Config
from gpt2core.parallel.whole_parameters import initial_parameters
from gpt2core.sampler import Decoder, Greedy, GroupSampler, Sampling, generate, generate_together
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import build_tokenizer
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.decoding import decoder as engine
from stage2_cuda.decoding import sampling
from stage2_cuda.decoding.batched import Tiles, tiles_for
from stage2_cuda.runtime import triton_launch

gpu = pytest.mark.gpu
pytestmark = [] if triton_launch.interpreted() else [gpu]  # where there is a GPU, all of this is about it
CONFIG = GPT2Config(37, 12, 2, 2, 48, tied=True)
UNTIED = GPT2Config(29, 8, 1, 2, 32, tied=False)
RULES = {
    "greedy": lambda seed: Greedy(),
    "drawn": lambda seed: Sampling(1.5, seed=seed),
    "top-k": lambda seed: Sampling(2.0, top_k=9, seed=seed),
    "top-k, top-p": lambda seed: Sampling(1.3, 9, 0.8, seed),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes 10 ms for each program."""
    if triton_launch.interpreted():
        tiles = Tiles(columns=256, parts=3, part_columns=256, keys=64, vocabulary=256)
        monkeypatch.setattr(CudaBackend, "tiles", staticmethod(lambda batch: tiles))


def arrays_of(config, seed=0):
    """Larger than they are initially, so that the text neither settles on one token nor hides a wrong position."""
    return {
        name: array * np.float32(45 / math.sqrt(config.n_embd) if array.ndim > 1 else 1)
        for name, array in initial_parameters(config, seed)
    }


def models(config=CONFIG, **options):
    return [GPT2.of_arrays(config, arrays_of(config), backend) for backend in (CudaBackend(**options), NumpyBackend())]


def texts(model, prompts, count, rule):
    steps = generate_together(model, prompts, count, [rule(seed) for seed in range(len(prompts))])
    return [list(text) for text in zip(*steps, strict=True)]


# -- stage 0's texts ---------------------------------------------------------------------------------------------------

# fp32 on both sides: the sums' rounding decides a tie or a draw less often than once in 10^4 tokens of these models


@pytest.mark.parametrize("rule", [RULES["greedy"], RULES["top-k"]], ids=["greedy", "top-k"])
def test_a_text_is_stage_0_s_until_the_block_is_full_and_beyond(rule):
    ours, stage0 = models(UNTIED)
    prompt = [1, 2, 3, 28]
    text = list(generate(ours, prompt, 7, rule(7)))
    assert text == list(generate(stage0, prompt, 7, rule(7))) and len(set(text)) > 3


@pytest.mark.parametrize("length", [1, 7, 8, 20])
def test_a_prompt_of_any_length_is_continued_as_stage_0_does(length):
    ours, stage0 = models(UNTIED)
    prompt = [(7 * i) % 29 for i in range(length)]
    assert list(generate(ours, prompt, 4)) == list(generate(stage0, prompt, 4))


@pytest.mark.parametrize("rule", [RULES["greedy"], RULES["drawn"]], ids=["greedy", "drawn"])
def test_texts_of_different_lengths_are_continued_together_as_each_by_itself(rule):
    ours, stage0 = models()
    prompts = [[1, 2, 3], [4] * 10, [9]]  # the second fills the block first, and its window slides before the others'
    assert texts(ours, prompts, 4, rule) == texts(stage0, prompts, 4, rule)


@pytest.mark.parametrize("prompts", [[[3, 1, 4]], [[1, 2, 3], [4] * 6, [9]], [[5] * 11]], ids=["one", "three", "long"])
@pytest.mark.parametrize("short", [0, 4096])
def test_prompts_that_are_filled_up_are_continued_as_stage_0_does(monkeypatch, prompts, short):
    monkeypatch.setattr(engine, "SHORT", short)
    for queue in (engine.Eager, engine.Queue):
        monkeypatch.setattr(queue, "bucket", 8)  # of a block of 12
    ours, stage0 = models()
    assert texts(ours, prompts, 3, RULES["drawn"]) == texts(stage0, prompts, 3, RULES["drawn"])


def test_more_tokens_are_written_than_there_are_places_for_those_that_were_not_read(monkeypatch):
    monkeypatch.setattr(sampling, "SENT", engine.AHEAD + 2)
    ours, stage0 = models(GPT2Config(29, 32, 1, 2, 32, tied=False))
    prompts = [[1, 2, 3], [4] * 5]
    assert texts(ours, prompts, 15, RULES["greedy"]) == texts(stage0, prompts, 15, RULES["greedy"])


def test_another_rule_gets_its_logits_on_the_host(rng):
    ours, stage0 = models(UNTIED)
    seen = {ours: [], stage0: []}
    for model in (ours, stage0):

        def choose(logits, seen=seen[model]):
            seen.append(np.array(logits, np.float64))
            return int(logits.argsort()[-2])

        list(generate(model, [3, 1, 4, 1, 5], 5, choose))
    got, want = (np.array(seen[model]) for model in (ours, stage0))
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)  # fp32, one layer
    together = list(generate(ours, [3, 1, 4], 3, GroupSampler(Greedy(), Solo())))
    assert together == list(generate(ours, [3, 1, 4], 3))


def test_rules_of_different_options_choose_on_the_host():
    ours, stage0 = models(UNTIED)
    prompts, mixed = [[3, 1], [5, 9]], lambda: [Sampling(2.0, seed=1), Greedy()]
    assert list(generate_together(ours, prompts, 3, mixed())) == list(generate_together(stage0, prompts, 3, mixed()))


# -- how it is done ----------------------------------------------------------------------------------------------------


def test_steps_are_a_few_ahead_of_what_is_read_and_none_is_taken_that_is_not_asked_for(monkeypatch):
    model, _ = models(UNTIED)
    taken = []
    step = engine.Engine.step
    monkeypatch.setattr(engine.Engine, "step", lambda self: taken.append(1) or step(self))
    stream = generate(model, [1, 2], 7)
    next(stream)
    assert len(taken) == 1 + engine.AHEAD
    list(stream)
    assert len(taken) == 7


def test_an_engine_is_kept_for_the_next_text_and_two_texts_at_once_have_two():
    model, _ = models(UNTIED)
    alone = [list(generate(model, prompt, 3)) for prompt in ([1, 2], [7, 8, 9])]
    assert len(model.decoders[1]) == 1
    streams = zip(generate(model, [1, 2], 3), generate(model, [7, 8, 9], 3), strict=True)
    assert [list(text) for text in zip(*streams, strict=True)] == alone
    assert len(model.decoders[1]) == 2


def test_a_text_that_nobody_reads_to_its_end_leaves_nothing_to_the_next():
    model, stage0 = models(UNTIED)
    stream = generate(model, [1, 2], 5)
    next(stream)
    stream.close()
    assert list(generate(model, [7, 8, 9], 3)) == list(generate(stage0, [7, 8, 9], 3))


def test_weights_that_change_in_place_are_seen_by_the_next_text():
    model, stage0 = models(UNTIED)
    list(generate(model, [1, 2], 2))
    for name, array in arrays_of(UNTIED, seed=1).items():
        for each in (model, stage0):
            each.parameters[name].data[...] = each.head.backend.asarray(array)
    assert list(generate(model, [1, 2], 3)) == list(generate(stage0, [1, 2], 3))


def test_more_texts_than_an_engine_takes_and_a_shard_of_a_model_go_the_core_s_way():
    model, _ = models(UNTIED)
    backend = model.head.backend
    assert backend.decoder(model, backend.decoder_batch + 1) is None
    model.parameters["lm_head.weight"] = type(model.head)(model.head.data[:10], backend)
    assert backend.decoder(model, 1) is None
    assert Decoder(model).ahead == 0


def test_an_empty_prompt_is_refused():
    model, _ = models(UNTIED)
    with pytest.raises(ConfigError, match="prompt is empty"):
        next(generate_together(model, [[1], []], 3, [Greedy(), Greedy()]))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint of an untrained nano, which says something all the same."""
    path, config = tmp_path_factory.mktemp("weights") / "run", PRESETS["nano"]
    tokenizer = build_tokenizer("word", read_text(CORPUS))
    checkpoint.save_checkpoint(path, 1, config=config, parameters=arrays_of(config), tokenizer=tokenizer)
    return path


def test_prompts_in_a_file_are_continued_as_stage_0_does_up_to_the_stop_text(command, tmp_path, weights):
    (tmp_path / "prompts").write_text("the model\nthe model the model the\nthe\n")
    flags = ("--weights", weights, "--mode", "batch", "--prompts", tmp_path / "prompts", "--max-new-tokens", 4)
    ours, stage0 = (command(cli.infer, *flags, backend=backend) for backend in (CudaBackend, NumpyBackend))
    assert ours == stage0 and ours.code == 0 and ours.out.count("Continuation:") == 3
    word = ours.out.split("Continuation:\n")[1].split()[1]
    ours, stage0 = (
        command(cli.infer, *flags, "--stop", word, backend=backend) for backend in (CudaBackend, NumpyBackend)
    )
    assert ours == stage0 and ours.code == 0


def test_a_stream_ends_with_the_stop_text(command, weights):
    flags = ("--weights", weights, "--prompt", "the model", "--max-new-tokens", 6, "--stream", "--stop", "e")
    ours, stage0 = (command(cli.infer, *flags, backend=backend) for backend in (CudaBackend, NumpyBackend))
    assert ours == stage0 and ours.code == 0


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def paper(precision, recorded=True):
    backend = CudaBackend(precision)
    if not recorded:
        backend.queue.record = lambda function: function
    return GPT2.of_arrays(PRESETS["paper"], arrays_of(PRESETS["paper"]), backend)


@gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("length", [5, 192, 250, 256])
def test_a_recorded_step_gives_the_tokens_of_one_that_is_not_and_twice_the_same(rng, precision, rule, length):
    prompt = rng.integers(0, 172, length).tolist()
    recorded, unrecorded = paper(precision), paper(precision, recorded=False)
    first, *others = (list(generate(recorded, prompt, 40, rule(5))) for _ in range(3))  # run, recorded, replayed
    assert others == [first, first] and first == list(generate(unrecorded, prompt, 40, rule(5)))
    assert len(set(first)) > 3
    shorter = prompt[: max(length - 30, 1)]  # of the graph that was recorded for another, or run, recorded, replayed
    want = list(generate(unrecorded, shorter, 5, rule(6)))
    assert all(list(generate(recorded, shorter, 5, rule(6))) == want for _ in range(3))


@gpu
@pytest.mark.parametrize("B", [1, 3])
def test_two_engines_that_take_turns_in_the_same_memory_write_what_each_writes_alone(rng, B):
    model, alone = paper("bf16"), paper("bf16", recorded=False)
    for _ in range(3):  # run, recorded, replayed
        several = [[rng.integers(0, 172, int(n)).tolist() for n in rng.integers(3, 200, B)] for _ in range(2)]
        want = [texts(alone, prompts, 12, RULES["top-k"]) for prompts in several]
        streams = [
            generate_together(model, prompts, 12, [RULES["top-k"](seed) for seed in range(B)]) for prompts in several
        ]
        steps = zip(*zip(*streams, strict=True), strict=True)
        assert [[list(text) for text in zip(*each, strict=True)] for each in steps] == want


@gpu
@pytest.mark.parametrize("B", [1, 5, 32])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_that_overlap_write_the_text_of_those_that_do_not(rng, monkeypatch, precision, B):
    prompts, found = [rng.integers(0, 172, int(n)).tolist() for n in rng.integers(3, 9, B)], []
    for overlap in (False, True):
        tiles = tiles_for(B)._replace(overlap=overlap)
        monkeypatch.setattr(CudaBackend, "tiles", staticmethod(lambda batch, tiles=tiles: tiles))
        found += [texts(paper(precision, recorded), prompts, 240, RULES["greedy"]) for recorded in (False, True)]
    assert all(each == found[0] for each in found)


@gpu
@pytest.mark.parametrize("length", [5, 250, 256])
def test_the_paper_s_model_writes_stage_0_s_text_in_fp32(rng, length):
    prompt = rng.integers(0, 172, length).tolist()
    stage0 = GPT2.of_arrays(PRESETS["paper"], arrays_of(PRESETS["paper"]), NumpyBackend())
    assert list(generate(paper("fp32"), prompt, 20)) == list(generate(stage0, prompt, 20))


@gpu
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("B", [1, 5, 32])
def test_logits_of_the_cache_are_those_of_the_training_kernels(rng, precision, tolerance, B):
    """By a rule of the host, which sees the logits; 16 bits round in other places."""
    model, seen = paper(precision), []
    prompts = [rng.integers(0, 172, int(length)).tolist() for length in rng.integers(3, 200, B)]

    def choose(logits):
        seen.append(logits.copy())
        return int(logits.argmax())

    chosen = list(zip(*generate_together(model, prompts, 4, [choose] * B), strict=True))
    for b, (prompt, text) in enumerate(zip(prompts, chosen, strict=True)):
        y = model.logits(np.array([[*prompt, *text[:3]]])).numpy()[0, -1]
        got = seen[3 * B + b]
        assert np.linalg.norm(got - y) <= tolerance * np.linalg.norm(y)

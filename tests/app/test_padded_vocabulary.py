"""A model may have more rows than its tokenizer has tokens: ids without a token are never generated."""

import io
import json
import sys

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.app.checkpoints.directory import save_checkpoint
from gpt2core.app.inference import inference_command
from gpt2core.app.inference.continuations import continue_prompts, text_pieces
from gpt2core.app.stage import Stage
from gpt2core.architecture import GPT2Config
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.sampler import Greedy, chooser, generate
from gpt2core.text.only_tokens import OnlyTokens
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(640, 16, 2, 2, 32)
PROMPTS = ["the whale", "and", "ship"]
NEW = 25  # more tokens than fit in the block
RULES = {
    "greedy": (),
    "temperature": ("--temperature", 1),
    "top-k": ("--top-k", 630),  # more than there are tokens
    "top-p": ("--top-p", 0.999),
    "both": ("--temperature", 3, "--top-k", 500, "--top-p", 0.99),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, with unused ids between them and after them, and an added token with the id 500; the largest id is 600."""
    description = json.loads(Tokenizer.byte_level().to_bytes())
    vocabulary = {token: id + 40 * (id > 99) for token, id in description["model"]["vocab"].items()}
    description["model"]["vocab"] = vocabulary | {"<|end|>": 500, "th": 600}
    description["model"]["merges"] = [["t", "h"]]
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description["added_tokens"] = [{"id": 500, "content": "<|end|>", "special": True, **options}]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def arrays():
    """Enlarged initial weights, with which generated tokens vary."""
    return {name: array * np.float32(8 if array.ndim > 1 else 1) for name, array in initial_parameters(CONFIG, 0)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory, tokenizer, arrays):
    path = tmp_path_factory.mktemp("weights") / "run"
    save_checkpoint(path, 1, config=CONFIG, parameters=arrays, tokenizer=tokenizer)
    return path


def tokens_without_limit(model, tokenizer, rule):
    return list(generate(model, tokenizer.encode("the whale").tolist(), 40, rule))


def test_the_ids_with_a_token_are_those_of_the_vocabulary_and_the_added_tokens(tokenizer):
    assert tokenizer.token_ids.tolist() == [*range(100), *range(140, 296), 500, 600]
    assert Tokenizer.byte_level().token_ids.tolist() == list(range(256))


@pytest.mark.parametrize("flags", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mode", ["replicate", "tensor"])
def test_every_mode_continues_a_prompt_with_the_same_tokens(infer, weights, monkeypatch, tmp_path, capsys, mode, flags):
    flags = ["--weights", weights, "--max-new-tokens", NEW, "--seed", 7, *flags]
    (tmp_path / "prompts").write_text("".join(f"{text}\n" for text in PROMPTS))
    batch = infer(*flags, "--mode", "batch", "--prompts", tmp_path / "prompts")
    assert (batch.code, batch.err, batch.out.count("Continuation:\n")) == (0, "", len(PROMPTS))
    for number, text in enumerate(PROMPTS):
        alone = infer(*flags[:4], "--seed", 7 + number, *flags[6:], "--prompt", text)
        assert alone.code == 0 and alone.out.split("Continuation:\n")[1] in batch.out
    monkeypatch.setattr(sys, "stdin", io.StringIO("the whale\n"))
    args = cli.inference_parser().parse_args(list(map(str, [*flags, "--interactive", "--mode", mode])))
    run = inference_command.inference_command
    assert run_ranks(2, lambda world: run(Stage(1, NumpyBackend, run_ranks), world, args, 1)) == [0, 0]
    assert capsys.readouterr().out == infer(*flags, "--prompt", "the whale").out.split("Continuation:\n")[1]


@pytest.mark.parametrize("options", [(), (1.0,), (1.0, 630), (2.0, 500, 0.99)], ids=lambda options: str(options))
def test_the_tokens_are_those_of_the_rule_for_the_logits_of_tokens(tokenizer, arrays, rng, options):
    seed, ids = int(rng.integers(1 << 30)), tokenizer.token_ids
    rule, unlimited = (chooser(*(options or (0.0,)), seed=seed) for _ in range(2))
    logits = rng.standard_normal((200, CONFIG.vocab_size)).astype(np.float32)
    logits[0, ids] = -np.inf  # no token is possible, but padding is
    got = [OnlyTokens(rule, ids)(row) for row in logits[1:]]
    assert got == [ids[unlimited(row[ids])] for row in logits[1:]]
    assert OnlyTokens(Greedy(), ids)(logits[0]) in ids
    model = load_model(CONFIG, arrays, NumpyBackend())
    assert not np.isin(tokens_without_limit(model, tokenizer, chooser(1.0, seed=seed)), ids).all()


def test_a_vocabulary_without_unused_ids_is_sampled_as_before(rng):
    config = GPT2Config(256, 8, 1, 2, 16)
    model, tokenizer = load_model(config, dict(initial_parameters(config, 0)), NumpyBackend()), Tokenizer.byte_level()
    seed, seen = int(rng.integers(1 << 30)), []
    choose = chooser(1.0, seed=seed)

    def rule(logits):
        seen.append(len(logits))
        return choose(logits)

    text = "".join(text_pieces(model, tokenizer, [1, 2], 9, rule, None))
    assert text == tokenizer.decode(list(generate(model, [1, 2], 9, chooser(1.0, seed=seed)))) and set(seen) == {256}
    assert continue_prompts(model, tokenizer, [[1, 2]], 9, [chooser(1.0, seed=seed)], None) == ([text], 9)


def test_the_sample_after_training_has_only_tokens(train, weights, corpus):
    flags = ("--init-from", weights, "--data", corpus, "--steps", 1, "--batch-size", 2, "--lr", 0)
    result = train(*flags, "--sample", 60)
    assert (result.code, result.err) == (0, "") and "Continuation:\n" in result.out


@pytest.mark.parametrize(
    "flags", [pytest.param(RULES["greedy"], marks=pytest.mark.long), RULES["top-k"]], ids=["greedy", "top-k"]
)
def test_the_gpu_s_text_is_that_of_stage_0(command, cuda_backend, weights, tmp_path, flags):
    (tmp_path / "prompts").write_text("the whale\nand\n")
    flags = ("--weights", weights, "--mode", "batch", "--prompts", tmp_path / "prompts", "--max-new-tokens", 3, *flags)
    ours, stage0 = (command(cli.infer, *flags, backend=backend) for backend in (cuda_backend, NumpyBackend))
    assert (ours.code, ours.out) == (0, stage0.out)

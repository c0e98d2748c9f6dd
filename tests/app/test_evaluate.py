"""--mode evaluate: loss, perplexity and bits per byte of a text, and questions with several endings."""

import json
import math
import re

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.app.inference.evaluation import BATCH, evaluate_file, read_questions
from gpt2core.architecture import GPT2Config
from gpt2core.errors import DataError
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.plain_backend import PlainBackend
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(vocab_size=256, block_size=8, n_layer=1, n_head=2, n_embd=16)
TEXT = "".join(np.random.default_rng(5).choice(list("abc \u00e9\n"), 8 * BATCH * 3 + 21))
TOKENIZER = Tokenizer.byte_level()


def a_model(backend=NumpyBackend):
    arrays = {name: 5 * array for name, array in initial_parameters(CONFIG, 3)}  # no uniform probabilities
    return load_model(CONFIG, arrays, backend())


def log_probability(ids):
    """The logarithm of the probability of each id after the ids before it, each from a forward pass of its own."""
    model, found = a_model(PlainBackend), []
    for end in range(1, len(ids)):
        logits = model.logits(np.array(ids[:end])[None]).data[0, -1].astype(np.float64)
        found.append(logits[ids[end]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return np.array(found)


def lines_of(path, ranks):
    def run(world):
        lines = []
        evaluate_file(world, a_model(), TOKENIZER, path, lines.append)
        return lines

    results = run_ranks(ranks, run)
    assert all(lines == results[0] for lines in results)
    return results[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_of_a_text_is_that_of_its_tokens_for_any_number_of_ranks(tmp_path, ranks):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    ids = TOKENIZER.encode(TEXT).tolist()
    count = (len(ids) - 1) // 8
    losses = [-log_probability(ids[8 * i : 8 * i + 9]).sum() for i in range(count)]
    mean, bits = sum(losses) / (8 * count), sum(losses) / math.log(2) / (8 * count)  # a token of this model is a byte
    first, second, third = lines_of(path, ranks)
    found = re.fullmatch(r"a.txt: loss ([\d.]+) nats per token, perplexity ([\d.e+]+)", first)
    assert float(found[1]) == pytest.approx(mean, abs=1e-4) and float(found[2]) == pytest.approx(
        math.exp(mean), rel=1e-3
    )
    assert float(second.removesuffix(" bits per byte")) == pytest.approx(bits, abs=1e-4)
    assert third == f"{8 * count} tokens in {count} windows of 8, {8 * count} bytes of text"


QUESTIONS = [
    {"ctx": "ab", "endings": ["c", "abca", "\u00e9", "b b"], "label": 2, "source": "not read"},
    {"ctx": "a longer text than the block", "endings": ["a", "bb", "ccc", "dddd"], "label": "0"},
    {"ctx": "b", "endings": ["x", "y"], "label": 1},
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_chosen_endings_are_the_most_likely_ones(tmp_path, ranks):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    right = [0, 0]
    for question in QUESTIONS:
        sums, means = [], []
        for ending in question["endings"]:
            context, ids = TOKENIZER.encode(question["ctx"]).tolist(), TOKENIZER.encode(f" {ending}").tolist()
            found = log_probability((context + ids)[-9:])[-len(ids) :]
            sums.append(found.sum())
            means.append(found.mean())
        right[0] += int(np.argmax(sums)) == int(question["label"])
        right[1] += int(np.argmax(means)) == int(question["label"])
    assert lines_of(path, ranks) == [
        "q.jsonl: 3 questions",
        f"right ending, by the product of probabilities: {right[0]} ({right[0] / 3:.4f})",
        f"right ending, by the mean of their logarithms: {right[1]} ({right[1] / 3:.4f})",
    ]


@pytest.mark.parametrize("line, words", [
    ("[1]", "line 2 is not an object with ctx, endings and label (TypeError"),
    ("no JSON", "line 2 is not an object with ctx, endings and label (JSONDecodeError"),
    ('{"ctx": "a", "endings": ["b"]}', "line 2 is not an object with ctx, endings and label (KeyError: 'label')"),
    ('{"ctx": "a", "endings": ["b"], "label": 1}', "line 2: label 1 is not one of 1 ending: use 0 to 0"),
    ('{"ctx": "a", "endings": ["b", "c"], "label": 1.5}', "line 2 is not an object with ctx, endings and label (Va"),
    ('{"ctx": "a", "endings": ["b", "c"], "label": true}', "line 2 is not an object with ctx, endings and label (Valu"),
    ("[" * 100_000, "line 2 is not an object with ctx, endings and label (RecursionError"),
    ('{"ctx": "a", "endings": [1], "label": 0}', "line 2: ctx must be a text, and endings a list of texts"),
    ('{"ctx": "a", "endings": "bc", "label": 0}', "line 2: ctx must be a text, and endings a list of texts"),
    ('{"ctx": "", "endings": ["b"], "label": 0}', "line 2: a text is empty, or an ending has more than 8 tokens"),
    ('{"ctx": "a", "endings": ["12345678"], "label": 0}', "line 2: a text is empty, or an ending has more than 8"),
])  # fmt: skip
def test_a_wrong_line_is_one_error_with_its_number(tmp_path, line, words):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(QUESTIONS[2]) + f"\n{line}\n")
    with pytest.raises(DataError, match=re.escape(f"{path}: {words}")):
        read_questions(path, TOKENIZER, 8)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no question"):
        read_questions(path, TOKENIZER, 8)


def test_the_command_prints_the_loss_and_refuses_flags_of_generation(command, corpus, tmp_path):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--val-data", corpus)
    flags += ("--log", tmp_path / "log.jsonl")
    trained = command(cli.train, *flags, "--out", tmp_path / "run", backend=NumpyBackend)
    assert trained.code == 0, trained.err
    loss = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["val_loss"]
    here = ("--weights", tmp_path / "run", "--mode", "evaluate")
    done = command(cli.infer, *here, "--data", corpus, backend=NumpyBackend)
    assert done.code == 0 and f"loss {loss:.4f} nats" in done.out, done.out
    for given, words in (
        ((), "--data, a text or questions, and --mode evaluate must be given together"),
        (("--data", corpus, "--top-k", 4), "--mode evaluate generates no text: omit --top-k"),
        (("--data", corpus, "--prompt", "a"), "--mode evaluate generates no text: omit --prompt"),
    ):
        done = command(cli.infer, *here, *given, backend=NumpyBackend)
        assert (done.code, done.err) == (2, f"error: {words}\n")

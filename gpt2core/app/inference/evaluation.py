"""--mode evaluate: the loss of a model on a text, or how often it chooses the right one of several endings.

The ranks divide the batches, or the questions. Their numbers are added in the order of the text, so the result does not
depend on the number of ranks.
"""

import json
import math

import numpy as np

from gpt2core.app.corpus import share_tokens
from gpt2core.app.output.run_log import perplexity
from gpt2core.data import Windows
from gpt2core.errors import DataError, counted
from gpt2core.parallel.all_or_raise import on_root, shared_error
from gpt2core.tensor import no_grad
from gpt2core.text.token_file import read_text
from gpt2core.text.token_files import load_tokens

BATCH = 8  # windows that are computed at once
QUESTIONS = ".jsonl"  # the end of the name of a file with questions


def evaluate_file(world, model, tokenizer, path, emit):
    """Emit the result for the file at `path`. All ranks must call it. emit: called like print().

    Raises DataError for a file that cannot be used.
    """
    evaluate = evaluate_questions if path.suffix.lower() == QUESTIONS else evaluate_text
    with no_grad():
        for line in evaluate(world, model, tokenizer, path):
            emit(line)


def divided(world, items, function):
    """[function(item) for each item], of which each rank computes a part; function returns numbers."""
    own = [function(item) for number, item in enumerate(items) if number % world.size == world.rank]
    parts = world.all_gather_object(own)
    return [parts[number % world.size][number // world.size] for number in range(sum(map(len, parts)))]


# -- a text ------------------------------------------------------------------------------------------------------------


def evaluate_text(world, model, tokenizer, path):
    """Yield lines with the mean loss of all windows of block_size tokens inside a text, as --val-data computes it."""
    tokens = share_tokens(world, path, on_root(world, lambda: load_tokens(path, tokenizer)[0]), tokenizer)
    length = model.config.block_size
    if len(tokens) <= length:
        raise shared_error(
            DataError(f"{path} has {counted(len(tokens), 'token')}, but one window of this model needs {length + 1}")
        )
    windows = Windows(tokens, length)
    sizes = np.array([len(token) for token in tokenizer.token_bytes])
    if tokenizer.end_of_text is not None:
        sizes[tokenizer.end_of_text] = 0  # it is not in a text

    def numbers(batch):
        inputs, targets = batch
        return sum_of_losses(model, inputs, targets), inputs.size, int(sizes[targets].sum())

    rows = divided(world, windows.once(BATCH), numbers)
    loss, count, size = (math.fsum(column) for column in zip(*rows, strict=True))
    yield f"{path.name}: loss {loss / count:.4f} nats per token, perplexity {perplexity(loss / count):.4g}"
    yield f"{loss / math.log(2) / size:.4f} bits per byte" if size else "no bits per byte: the tokens have no text"
    number = counted(int(count) // length, "window")
    yield f"{int(count):,} tokens in {number} of {length}, {int(size):,} bytes of text"


def sum_of_losses(model, inputs, targets):
    """The sum of the cross-entropy of targets (B, T) after inputs (B, T), a Python float."""
    prepare = model.backend.prepare_tokens
    return model.loss(prepare(inputs, model.config.vocab_size), prepare(targets), 1.0).item()


# -- questions ---------------------------------------------------------------------------------------------------------


def evaluate_questions(world, model, tokenizer, path):
    """Yield lines with the share of questions whose right ending is the most likely one (Zellers et al. 2019).

    A line of the file is a JSON object with `ctx`, a text, `endings`, a list of texts, and `label`, the index of the
    right one, as in HellaSwag. The probability of an ending is the product of those of its tokens; "by mean" takes the
    mean of their logarithms, because a longer ending is less likely.
    """
    questions = world.broadcast_object(on_root(world, lambda: read_questions(path, tokenizer, model.config.block_size)))

    def correct(question):
        rows, label = question
        sums, lengths = np.array([ending_loss(model, ids, length) for ids, length in rows]), [n for _, n in rows]
        return int(np.argmin(sums) == label), int(np.argmin(sums / lengths) == label)

    by_sum, by_mean = (sum(column) for column in zip(*divided(world, questions, correct), strict=True))
    count = len(questions)
    yield f"{path.name}: {counted(count, 'question')}"
    yield f"right ending, by the product of probabilities: {by_sum} ({by_sum / count:.4f})"
    yield f"right ending, by the mean of their logarithms: {by_mean} ({by_mean / count:.4f})"


def read_questions(path, tokenizer, block):
    """[([(ids of context and ending, number of tokens of the ending) of each ending], label) of each question].

    Of a question that is too long, the ids are the last block + 1. Raises DataError with the number of a wrong line.
    """
    questions = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                texts, label = parsed(line)
                questions.append((encoded(texts, tokenizer, block), label))
            except DataError as error:
                raise DataError(f"{path}: line {number}{error}") from None
    if not questions:
        raise DataError(f"{path} has no question: give at least one line with ctx, endings and label")
    return questions


def parsed(line):
    """([context, *endings], label) of a line; raises DataError, whose text follows the number of the line."""
    try:
        values = json.loads(line)
        context, endings, label = (values[name] for name in ("ctx", "endings", "label"))
        texts, label = [context, *endings], int(str(label))  # of a whole number, or of its text
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f" is not an object with ctx, endings and label ({reason})") from None
    if not isinstance(endings, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(": ctx must be a text, and endings a list of texts")
    if not 0 <= label < len(endings):
        raise DataError(f": label {label} is not one of {counted(len(endings), 'ending')}: use 0 to {len(endings) - 1}")
    return texts, label


def encoded(texts, tokenizer, block):
    """[(ids of context and ending, number of tokens of the ending) of each ending]; texts: of parsed()."""
    context, endings = texts[0], [f" {ending}" for ending in texts[1:]]
    try:
        first, *others = map(tokenizer.encode, (context, *endings))
    except DataError as error:
        raise DataError(f": {error}") from None
    if not len(first) or not all(0 < len(ids) <= block for ids in others):
        raise DataError(f": a text is empty, or an ending has more than {block} tokens")
    return [(np.concatenate([first, ids])[-block - 1 :], len(ids)) for ids in others]


def ending_loss(model, ids, length):
    """The sum of the cross-entropy of the last `length` of the token ids (n), each after those before it."""
    logits = model.logits(model.backend.prepare_tokens(ids[None, :-1], model.config.vocab_size)).data
    logits = model.backend.to_host(logits)[0, -length:].astype(np.float64)
    largest = logits.max(axis=1)
    log_sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return float((log_sums - logits[np.arange(length), ids[-length:]]).sum())

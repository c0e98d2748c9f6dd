"""Generate the continuations of prompts and print them as text."""

import sys
import time

import numpy as np

from gpt2core.app.command import warnings_after
from gpt2core.app.output.terminal import WordWrap, terminal_width, wrapped
from gpt2core.data import even_slices
from gpt2core.errors import counted
from gpt2core.sampler import Greedy, generate, generate_batch
from gpt2core.text.only_tokens import rules_for_tokens


def write_text(
    model, tokenizer, prompt, count, choose=None, stop=None, stream=False, stats=False, emit=print, width=None
):
    """Print a prompt and its continuation with emit(); the arguments are those of write_continuation."""
    title = f"Prompt ({counted(len(prompt), 'token')})"
    emit(f"{title}:\n{wrapped(tokenizer.decode(prompt), width)}\n\nContinuation:", flush=True)
    write_continuation(model, tokenizer, prompt, count, choose, stop, stream, stats, emit, width=width)


def write_continuation(
    model, tokenizer, prompt, count, choose=None, stop=None, stream=False, stats=False, emit=print, decoders=None,
    width=None,
):  # fmt: skip
    """Generate up to `count` tokens after `prompt` and print their text.

    choose: the sampling rule (default greedy). stop: end after this text. stream: print each token as soon as it is
    generated, as always on a terminal. stats: add a line with times. emit: is called like print(). decoders: a dict in
    which the decoder of this call is kept for later calls (see generate_batch). width: characters per line (default:
    those of the terminal).
    """
    start, times, text, wrap = time.perf_counter(), [], "", WordWrap(width or terminal_width())
    stream = stream or sys.stdout.isatty()  # a user who waits sees that tokens are generated
    with warnings_after():
        for piece in text_pieces(model, tokenizer, prompt, count, choose, stop, decoders):
            times.append(time.perf_counter() - start)
            text += piece
            if stream:
                emit(wrap.push(piece), end="", flush=True)
        emit(wrap.push("" if stream else text, is_last=True))
    new = max(0, len(times) - 1)  # number of new tokens; the last piece is not a token, see text_pieces()
    if stats and new:
        after_first = (times[new - 1] - times[0]) / max(1, new - 1) * 1e3
        emit(
            f"\nprompt tokens {len(prompt)} | new tokens {new} | time to first token {times[0] * 1e3:.1f} ms | "
            f"{after_first:.2f} ms/token | total {times[new - 1]:.3f} s"
        )


def text_pieces(model, tokenizer, prompt, count, choose, stop, decoders=None):
    """Yield the text of each new token, up to the token that completes the text `stop`, or that ends the document.

    One more piece follows, which is no new token: the rest of an incomplete last character, usually empty text.
    """
    text, decoder = "", tokenizer.stream()
    (rule,) = rules_for_tokens([choose or Greedy()], tokenizer, model.config.vocab_size)
    for token in generate(model, prompt, count, rule, decoders):
        if token == tokenizer.end_of_text:
            break
        piece = decoder.push(token)
        text += piece
        yield piece
        if stop and stop in text:
            break
    yield decoder.flush()


def write_batch(world, model, tokenizer, prompts, count, make_rule, stop, stats, emit):
    """Continue the prompts, each rank a part of them; print all continuations with emit() in the order of the prompts.

    A rank decodes Backend.decoder_batch prompts together. make_rule(i): a new sampling rule for prompt i, with its own
    random numbers. So a continuation depends on the number of ranks only through the rounding errors of the products,
    which depend on the prompts that are decoded together.
    """
    world.barrier()
    start, share = time.perf_counter(), even_slices(len(prompts), world.size)[world.rank]
    texts, tokens = continue_share(model, tokenizer, prompts, count, make_rule, stop, share)
    texts = [text for part in world.all_gather_object(texts) for text in part]
    seconds, tokens = time.perf_counter() - start, int(world.all_reduce(np.array([tokens])).item())
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        title = f"Prompt {number} ({counted(len(prompt), 'token')})"
        emit(wrapped(f"{title}:\n{tokenizer.decode(prompt)}\n\nContinuation:\n{text}\n"))
    if stats:
        emit(
            f"prompts {len(prompts)} | ranks {world.size} | new tokens {tokens} | total {seconds:.3f} s | "
            f"{tokens / seconds:,.1f} tokens/s"
        )


def continue_share(model, tokenizer, prompts, count, make_rule, stop, share):
    """(list of the continuations of prompts[share] as text, total number of new tokens); see write_batch()."""
    texts, tokens, decoders, batch = [], 0, {}, model.backend.decoder_batch
    for first in range(share.start, share.stop, batch):
        end = min(first + batch, share.stop)
        rules = [make_rule(i) for i in range(first, end)]
        continuations, new = continue_prompts(model, tokenizer, prompts[first:end], count, rules, stop, decoders)
        texts += continuations
        tokens += new
    return texts, tokens


def continue_prompts(model, tokenizer, prompts, count, rules, stop, decoders=None):
    """(list of the continuations as text, each up to the end of its document or of `stop`; total number of new tokens).

    All prompts are decoded together. rules: one sampling rule per prompt. decoders: as for write_continuation().
    """
    text_decoders, texts, new = [tokenizer.stream() for _ in prompts], [""] * len(prompts), 0
    unfinished, rules = range(len(prompts)), rules_for_tokens(rules, tokenizer, model.config.vocab_size)
    for chosen in generate_batch(model, prompts, count, rules, decoders):  # one token for each prompt
        unfinished = [i for i in unfinished if chosen[i] != tokenizer.end_of_text]
        for i in unfinished:
            texts[i] += text_decoders[i].push(chosen[i])
        new += len(unfinished)
        unfinished = [i for i in unfinished if not (stop and stop in texts[i])]
        if not unfinished:
            break
    return [text + decoder.flush() for text, decoder in zip(texts, text_decoders, strict=True)], new

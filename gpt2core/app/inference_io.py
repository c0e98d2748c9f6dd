"""Input and output of inference: read the tokenizer and the prompts, write the continuations."""

import codecs
import contextlib
import os
import re
import sys
import time

import numpy as np

from gpt2core.app.command import error_text, warnings_after
from gpt2core.app.output.terminal import WordWrap, terminal_width, wrapped
from gpt2core.app.presets import BOOK_WEIGHTS, CORPUS, OPENAI_NAMES, SHIPPED
from gpt2core.app.rank_agreement import print_nothing
from gpt2core.app.resume import saved_corpus
from gpt2core.data import even_slices
from gpt2core.errors import ConfigError, DataError, counted
from gpt2core.sampler import Greedy, generate, generate_batch
from gpt2core.text.only_tokens import rules_for_tokens
from gpt2core.text.token_file import first_tokens, read_text
from gpt2core.text.tokenizer import FILE_NAME, Tokenizer, UnknownWord, build_tokenizer

# A prompt file is longer only by mistake. Byte pairs of a text that cannot be divided need 200 bytes a character.
PROMPT_CHARACTERS = 1 << 23


def check_downloaded(path):
    """Raise ConfigError with a download command if `path`, a Path or None, is of OPENAI_NAMES and does not exist."""
    if path and path.name in OPENAI_NAMES and not path.exists():
        files = "config.json model.safetensors tokenizer.json"
        raise ConfigError(
            f"{path}: there is no such directory, and OpenAI's weights are not shipped; download them with: "
            f"hf download openai-community/{path.name} {files} --local-dir {path}"
        )


def load_tokenizer(spec, directory):
    """The Tokenizer that `spec` names; if `spec` is None, the tokenizer of the checkpoint in `directory`.

    Raises DataError if the tokenizer cannot be read.
    """
    if spec is None and not (directory / "tokenizer.json").exists():
        if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
            path = repr(str(directory))
            raise DataError(
                f"{directory}: has vocab.json and merges.txt, but no tokenizer.json: write it with transformers, "
                f"GPT2TokenizerFast.from_pretrained({path}).save_pretrained({path})"
            )
        # All steps of a run have the same tokenizer.
        files = sorted(directory.parent.glob(f"step-*/{FILE_NAME}")) if directory.name.startswith("step-") else []
        copy = f"copy {files[-1]} there, or " if files else ""
        advice = f"{copy}give --tokenizer word, byte or the path of the model's tokenizer.json"
        raise DataError(f"{directory}: has no tokenizer.json: {advice}")
    return build_tokenizer(spec, read_text(CORPUS)) if spec else Tokenizer.load(directory)


def check_tokenizer(tokenizer, checkpoint, prepared=None):
    """Raise ConfigError if a Checkpoint has a tokenizer of its own, with another number of tokens than `tokenizer`.

    The ids would then have another meaning than in the checkpoint. prepared: the Path of a corpus of token ids, or None
    if the tokens come from a text. A directory without a tokenizer that can be read is accepted.
    """
    try:
        own = Tokenizer.load(checkpoint.path)
    except DataError:
        return
    if own.vocab_size != tokenizer.vocab_size:
        file = checkpoint.path / FILE_NAME
        advice = f"prepare the text again with --tokenizer {file}" if prepared else "omit --tokenizer"
        name = f"the tokenizer of {prepared}" if prepared else "the tokenizer"
        raise ConfigError(
            f"{name} has {tokenizer.vocab_size} tokens, but {file} of the "
            f"checkpoint has {own.vocab_size}, so the ids would have another meaning: {advice}"
        )


def check_vocabulary(tokenizer, vocab_size, name):
    """Raise ConfigError if a tokenizer has more tokens than the vocabulary of the weights called `name`."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the vocabulary of {name} is {vocab_size}: give the "
            f"--tokenizer that was used to train them"
        )


def read_prompt(prompt, prompt_file, tokenizer, checkpoint):
    """The token ids of --prompt or --prompt-file; if neither is given, the first tokens of a corpus.

    The number of these tokens is 256, or the block size of the model if it is less. The corpus is the one that the
    Checkpoint was trained on; if this corpus is unknown or missing, it is dummy.txt. Raises ConfigError if both flags
    are given, DataError if the prompt is empty.
    """
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: give one of them")
    if prompt is None and prompt_file is None:
        shipped = SHIPPED.get(checkpoint.path.resolve(), CORPUS)
        corpus = saved_corpus(checkpoint) or shipped
        corpus = corpus if corpus.exists() else CORPUS
        try:
            return first_tokens(corpus, tokenizer, min(256, checkpoint.config.block_size)).tolist()
        except DataError as error:
            raise DataError(f"{corpus.name} cannot be the prompt of these weights: {error}; give --prompt") from None
    if prompt_file is None:
        check_decoded(prompt, "--prompt", sys.getfilesystemencoding())
        tokens = encode_prompt(tokenizer, prompt)
    else:
        text = read_prompt_file(prompt_file).removesuffix("\n").removesuffix("\r")
        tokens = encode_prompt(tokenizer, text, f"{prompt_file}: ")
    if not tokens:
        raise DataError("the prompt is empty: give at least one word to continue")
    return tokens


def read_prompt_file(path):
    """The text of a prompt file without a byte order mark, which some editors write; see read_text() for errors."""
    return read_text(path, PROMPT_CHARACTERS, pipes=True).removeprefix("\ufeff")


def check_decoded(text, name, encoding):
    """Raise DataError, with `name`, if `text` has a byte that Python could not decode from `encoding`.

    Python represents such a byte B by the lone surrogate U+DC00 + B (the error handler "surrogateescape").
    """
    if not (found := re.search("[\udc80-\udcff]", text)):
        return
    if codecs.lookup(encoding).name != "utf-8":
        raise DataError(f"{name} cannot be decoded as {encoding}, the encoding of the locale: set PYTHONUTF8=1")
    offset, byte = len(text[: found.start()].encode()), ord(found[0]) - 0xDC00
    raise DataError(f"{name} is not UTF-8: byte {offset} (0x{byte:02X}) cannot be decoded: give a text in UTF-8")


def encode_prompt(tokenizer, text, place=""):
    """A list of the token ids of a prompt; raises DataError, with `place` and advice, for an unknown word."""
    try:
        return tokenizer.encode_prompt(text).tolist()
    except UnknownWord as error:
        book = os.path.relpath(BOOK_WEIGHTS)
        raise DataError(f"{place}{error.problem}: {error.advice}, or --weights {book}") from None
    except DataError as error:
        raise DataError(f"{place}{error}") from None


def read_prompts(path, tokenizer):
    """A list with the token ids of each line of a file; raises DataError for an empty line.

    A line ends with LF or CR LF. Other characters that Python's str.splitlines() takes for line ends are text.
    """
    lines = enumerate(read_prompt_file(path).removesuffix("\n").split("\n"), 1)
    prompts = [encode_prompt(tokenizer, line.removesuffix("\r"), f"{path}: line {number}: ") for number, line in lines]
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt]
    if empty:
        raise DataError(f"{path}: line {empty[0]} is empty: give at least one word to continue on every line")
    return prompts


def typed_prompt(tokenizer):
    """The token ids of the next line of standard input; None if the line is empty or the input has ended.

    If the tokenizer cannot encode a line, this function prints the error and reads the next line.
    """
    while line := read_line():
        try:
            check_decoded(line, "the line", sys.stdin.encoding or "utf-8")
            return encode_prompt(tokenizer, line)
        except DataError as error:
            print(f"error: {error_text(error)}", file=sys.stderr, flush=True)
    return None


def read_line():
    """The next line of standard input without its line break, LF or CR LF, or "" at the end of the input.

    On a terminal, "> " is printed before the line is read, and Ctrl-C at this prompt ends the input, as Ctrl-D does.
    Raises DataError for a line of more than PROMPT_CHARACTERS.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  its import gives input() line editing and a history
    try:
        if terminal:
            return input("> ")
        line = sys.stdin.readline(PROMPT_CHARACTERS + 1).removesuffix("\n").removesuffix("\r")
        if len(line) > PROMPT_CHARACTERS:
            raise DataError(f"a line of standard input has more than {PROMPT_CHARACTERS:,} characters: type less")
        return line
    except (EOFError, KeyboardInterrupt) as error:
        if terminal:
            print()  # the shell's prompt begins on a new line
        elif isinstance(error, KeyboardInterrupt):
            raise
        return ""


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
    """Yield the text of each new token, up to the token that completes the text `stop`.

    One more piece follows, which is no new token: the rest of an incomplete last character, usually empty text.
    """
    text, decoder = "", tokenizer.stream()
    (rule,) = rules_for_tokens([choose or Greedy()], tokenizer, model.config.vocab_size)
    for token in generate(model, prompt, count, rule, decoders):
        piece = decoder.push(token)
        text += piece
        yield piece
        if stop and stop in text:
            break
    yield decoder.flush()


def continue_prompts(model, tokenizer, prompts, count, rules, stop, decoders=None):
    """(list of the continuations as text, each up to the token that completes `stop`; total number of new tokens).

    All prompts are decoded together. rules: one sampling rule per prompt. decoders: as for write_continuation().
    """
    text_decoders, texts, new = [tokenizer.stream() for _ in prompts], [""] * len(prompts), 0
    unfinished, rules = range(len(prompts)), rules_for_tokens(rules, tokenizer, model.config.vocab_size)
    for chosen in generate_batch(model, prompts, count, rules, decoders):  # one token for each prompt
        for i in unfinished:
            texts[i] += text_decoders[i].push(chosen[i])
        new += len(unfinished)
        unfinished = [i for i in unfinished if not (stop and stop in texts[i])]
        if not unfinished:
            break
    return [text + decoder.flush() for text, decoder in zip(texts, text_decoders, strict=True)], new


def write_batch(world, model, tokenizer, prompts, count, make_rule, stop, stats):
    """Continue the prompts, each rank a part of them; the root prints all continuations in the order of the prompts.

    A rank decodes Backend.decoder_batch prompts together. make_rule(i): a new sampling rule for prompt i, with its own
    random numbers. So a continuation depends on the number of ranks only through the rounding errors of the products,
    which depend on the prompts that are decoded together.
    """
    world.barrier()
    start, texts, tokens, decoders = time.perf_counter(), [], 0, {}
    share, batch = even_slices(len(prompts), world.size)[world.rank], model.head.backend.decoder_batch
    for first in range(share.start, share.stop, batch):
        end = min(first + batch, share.stop)
        rules = [make_rule(i) for i in range(first, end)]
        continuations, new = continue_prompts(model, tokenizer, prompts[first:end], count, rules, stop, decoders)
        texts += continuations
        tokens += new
    texts = [text for part in world.all_gather_object(texts) for text in part]
    seconds, tokens = time.perf_counter() - start, int(world.all_reduce(np.array([tokens])).item())
    emit = print if world.is_root else print_nothing
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        title = f"Prompt {number} ({counted(len(prompt), 'token')})"
        emit(wrapped(f"{title}:\n{tokenizer.decode(prompt)}\n\nContinuation:\n{text}\n"))
    if stats:
        emit(
            f"prompts {len(prompts)} | ranks {world.size} | new tokens {tokens} | total {seconds:.3f} s | "
            f"{tokens / seconds:,.1f} tokens/s"
        )

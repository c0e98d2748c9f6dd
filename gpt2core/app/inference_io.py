"""What inference reads and what it writes: a tokenizer, prompts, and the texts that follow them."""

import time
from pathlib import Path

import numpy as np

from gpt2core.app.presets import CORPUS, saved_arguments
from gpt2core.app.rank_agreement import silent
from gpt2core.errors import ConfigError, DataError, counted
from gpt2core.parallel.even_slices import even_slices
from gpt2core.sampler import generate, generate_batch
from gpt2core.text.token_file import first_tokens, read_text
from gpt2core.text.tokenizer import Tokenizer, build_tokenizer


def load_tokenizer(spec, weights):
    if spec is None and not (weights / "tokenizer.json").exists():
        raise DataError(f"{weights}: has no tokenizer.json: give --tokenizer word, byte or a file")
    return build_tokenizer(spec, read_text(CORPUS)) if spec else Tokenizer.load(weights)


def read_prompt(args, tokenizer, weights):
    """The prompt's tokens: --prompt, --prompt-file, or the first 256 of the corpus that the weights were trained on.

    Fewer where the block is shorter; the shipped corpus where the weights do not say, or theirs is gone.
    """
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: give one of them")
    if args.prompt is None and args.prompt_file is None:
        corpus = Path(saved_arguments(weights).get("data", CORPUS))
        corpus = corpus if corpus.exists() else CORPUS
        try:
            return first_tokens(corpus, tokenizer, min(256, weights.config.block_size)).tolist()
        except DataError as error:
            raise DataError(f"{corpus.name} is no prompt for these weights, so give --prompt: {error}") from None
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file).removesuffix("\n")
    tokens = tokenizer.encode_prompt(text).tolist()
    if not tokens:
        raise DataError("the prompt is empty: give at least one word to continue")
    return tokens


def read_prompts(path, tokenizer):
    """The tokens of each line of a file."""
    prompts = [tokenizer.encode_prompt(line).tolist() for line in read_text(path).splitlines()]
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt]
    if empty:
        raise DataError(f"{path}: line {empty[0]} is empty: give at least one word to continue on every line")
    return prompts


def write_text(model, tokenizer, prompt, count, choose=None, stop=None, stream=False, stats=False, say=print):
    """Say a prompt and its continuation; with `stream` token by token, with `stats` what it took."""
    say(f"Prompt ({counted(len(prompt), 'token')}):\n{tokenizer.decode(prompt)}\n\nContinuation:", flush=True)
    start, times, text = time.perf_counter(), [], ""
    for piece in pieces(model, tokenizer, prompt, count, choose, stop):
        times.append(time.perf_counter() - start)
        text += piece
        if stream:
            say(piece, end="", flush=True)
    say("" if stream else text)
    new = max(0, len(times) - 1)  # the last piece is what the decoder held back
    if stats and new:
        rest = (times[new - 1] - times[0]) / max(1, new - 1) * 1e3
        say(
            f"\nprompt tokens {len(prompt)} | new tokens {new} | time to first token {times[0] * 1e3:.1f} ms | "
            f"{rest:.2f} ms/token | total {times[new - 1]:.3f} s"
        )


def pieces(model, tokenizer, prompt, count, choose, stop):
    """Yield the text of each new token, and at the end what the decoder still holds; ends early with `stop`."""
    text, decoder = "", tokenizer.stream()
    for token in generate(model, prompt, count, choose):
        piece = decoder.push(token)
        text += piece
        yield piece
        if stop and stop in text:
            break
    yield decoder.flush()


def continuations(model, tokenizer, prompts, count, rules, stop, idle=None):
    """-> the texts that follow the prompts, each up to its `stop`, and the number of their tokens."""
    decoders, texts, tokens = [tokenizer.stream() for _ in prompts], [""] * len(prompts), 0
    going = range(len(prompts))
    for chosen in generate_batch(model, prompts, count, rules, idle):
        for number in going:
            texts[number] += decoders[number].push(chosen[number])
        tokens += len(going)
        going = [number for number in going if not (stop and stop in texts[number])]
        if not going:
            break
    return [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)], tokens


def write_batch(world, model, tokenizer, prompts, make_chooser, args):
    """Every rank continues its share of the prompts; the root prints them all, in their order.

    As many are continued together as the backend likes. Prompt number i draws with the seed --seed + i, so that no
    text depends on how many ranks there are.
    """
    world.barrier()
    start, mine, tokens, idle = time.perf_counter(), [], 0, {}
    share, batch = even_slices(len(prompts), world.size)[world.rank], model.head.backend.decoder_batch
    for first in range(share.start, share.stop, batch):
        numbers = range(first, min(first + batch, share.stop))
        rules = [make_chooser(args.seed + number) for number in numbers]
        texts, count = continuations(
            model, tokenizer, prompts[numbers.start : numbers.stop], args.max_new_tokens, rules, args.stop, idle
        )
        mine += texts
        tokens += count
    texts = [text for share in world.all_gather_object(mine) for text in share]
    seconds, tokens = time.perf_counter() - start, int(world.all_reduce(np.array([tokens])).item())
    say = print if world.is_root else silent
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        head = f"Prompt {number} ({counted(len(prompt), 'token')})"
        say(f"{head}:\n{tokenizer.decode(prompt)}\n\nContinuation:\n{text}\n")
    if args.stats:
        say(
            f"prompts {len(prompts)} | ranks {world.size} | new tokens {tokens} | total {seconds:.3f} s | "
            f"{tokens / seconds:,.1f} tokens/s"
        )

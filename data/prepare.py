"""Convert UTF-8 texts of any size to a token file and a tokenizer.json, with a constant amount of memory.

    python data/prepare.py shakespeare.txt --tokenizer byte --out shakespeare

writes shakespeare/tokens.bin, which the training maps into memory (--data shakespeare), and shakespeare/tokenizer.json.
The text is encoded in pieces. It is divided only at positions that no token crosses, so the tokens are equal to those
of the whole text. The vocabulary of --tokenizer word needs one more pass over the text. Between two texts is the token
<|endoftext|>, which ends the generation of a model. Each file is written to a temporary name, flushed to disk with
fsync and renamed.
"""

import os
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # so that it also runs without installation

from gpt2core.app.command import error_text, run_command
from gpt2core.app.settings.flag_parser import HelpPrinted, Parser, not_empty, to_path
from gpt2core.communicator import Solo
from gpt2core.errors import DataError, UserError
from gpt2core.text.token_file import TOKEN_FILE, replaced, text_chunks, write_token_file
from gpt2core.text.tokenizer import END_OF_TEXT, FILE_NAME, build_tokenizer


def chunks_with_bar(path, pass_name):
    """Yield the chunks of a text file; show a progress bar of the bytes read if standard error is a terminal."""
    from tqdm import tqdm  # not at the top: gpt2core.app must be imported before, as it reports missing packages

    size = path.stat().st_size
    with tqdm(total=size, unit="B", unit_scale=True, desc=pass_name, leave=False, disable=None) as bar:
        for chunk in text_chunks(path):
            yield chunk
            bar.update(len(chunk.encode("utf-8")))


def ids_of(texts, tokenizer):
    """Yield arrays, the ids of the text files, with the id of END_OF_TEXT between two files."""
    import numpy as np  # not at the top, as in chunks_with_bar()

    for number, text in enumerate(texts):
        if number:
            yield np.array([tokenizer.end_of_text], tokenizer.dtype)
        yield from tokenizer.encode_chunks(chunks_with_bar(text, "tokens"))


def prepare(texts, tokenizer_spec, out, overwrite=False):
    """Write out/tokens.bin and out/tokenizer.json from a list of text files; return (number of tokens, Tokenizer).

    Raises DataError if a text, the tokenizer or the output directory cannot be used, and, unless `overwrite`, if one
    of the two files exists.
    """
    for text in texts:
        if not text.is_file():
            raise DataError(f"{text} is not a file: give a UTF-8 text file")
    if len(texts) > 1 and tokenizer_spec in ("word", "byte"):
        raise DataError(
            f"--tokenizer {tokenizer_spec} has no token {END_OF_TEXT} to put between {len(texts)} texts: give a "
            f"tokenizer.json that has it, such as GPT-2's, or one text"
        )
    existing = [name for name in (TOKEN_FILE, FILE_NAME) if (out / name).exists()]
    if existing and not overwrite:
        raise DataError(f"{out / existing[0]} exists: choose another --out, or add --overwrite to replace it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create the directory {out}: {error.strerror}; choose another --out") from None
    tokenizer = build_tokenizer(tokenizer_spec, chunks_with_bar(texts[0], "vocabulary"))
    if len(texts) > 1 and tokenizer.end_of_text is None:
        raise DataError(f"{tokenizer_spec} has no token {END_OF_TEXT} to put between {len(texts)} texts: give one text")
    count = write_token_file(out / TOKEN_FILE, ids_of(texts, tokenizer), tokenizer)
    with replaced(out / FILE_NAME) as file:
        file.write(tokenizer.to_bytes())
    return count, tokenizer


def main(arguments=None):
    """Run the command line. Return the exit code: 0, 2 after an error (one line on stderr), or 130 after Ctrl-C."""
    corpus = shlex.quote(os.path.relpath(Path(__file__).with_name("dummy.txt")))
    examples = (
        (f"{corpus} --out out/words --overwrite", "then train_gpt2.py --data out/words"),
        (f"{corpus} --tokenizer byte --out out/bytes --overwrite", "a token for each byte"),
    )
    parser = Parser(__doc__.split("\n\n")[0], examples, usage="%(prog)s TEXT [TEXT ...] [flags]")
    parser.add_argument("texts", type=to_path, nargs="+", metavar="TEXT", help="UTF-8 text files, each a document")
    parser.add_argument(
        "--tokenizer",
        default="word",
        type=not_empty,
        help="word (each word of the text is a token), byte (each byte is a token), or the path of a tokenizer.json "
        "such as GPT-2's (default word)",
    )
    parser.add_argument(
        "--out", type=to_path, help="directory to write to (default: the path of the first TEXT with suffix .tokens)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files of an earlier run in --out (default: refuse)"
    )
    try:
        options = parser.parse_args(arguments)
        text = options.texts[0].absolute()  # because the relative path "." has no stem
        out = options.out or text.parent / f"{text.stem}.tokens"
        count, tokenizer = prepare(options.texts, options.tokenizer, out, options.overwrite)
    except HelpPrinted:
        return 0
    except UserError as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the output may be incomplete", file=sys.stderr)
        return 130
    print(f"{out}: {count:,} tokens, vocabulary of {tokenizer.vocab_size:,} ({tokenizer.kind})")
    return 0


if __name__ == "__main__":
    run_command(Solo, lambda world: main())

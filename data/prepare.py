"""Turn a UTF-8 text of any size into a token file and its tokenizer.json, in constant memory.

    python data/prepare.py shakespeare.txt --tokenizer byte --out shakespeare

writes shakespeare/tokens.bin, which the trainer maps into memory (--data shakespeare), and shakespeare/tokenizer.json.
The text is divided only at positions that no token crosses, so the tokens are equal to those of the whole text. A
word-level vocabulary needs one more pass over the text. Each file is written to a temporary name, fsynced and renamed.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # it also runs without installation

from tqdm import tqdm  # noqa: E402

from gpt2core.errors import DataError, UserError  # noqa: E402
from gpt2core.text.token_file import TOKEN_FILE, replaced, text_chunks, write_token_file  # noqa: E402
from gpt2core.text.tokenizer import FILE_NAME, build_tokenizer  # noqa: E402


def chunks_with_bar(path, pass_name):
    """Yield the chunks of a text file and show a progress bar of the bytes read."""
    with tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=pass_name, leave=False) as bar:
        for chunk in text_chunks(path):
            yield chunk
            bar.update(len(chunk.encode("utf-8")))


def prepare(text, tokenizer_spec, out):
    """Write out/tokens.bin and out/tokenizer.json from the text file `text`; return (tokens, tokenizer).

    Raises DataError if the text, the tokenizer or the output directory cannot be used.
    """
    if not text.is_file():
        raise DataError(f"{text} is not a file: give a UTF-8 text file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create the directory {out}: {error.strerror}; choose another --out") from None
    tokenizer = build_tokenizer(tokenizer_spec, chunks_with_bar(text, "vocabulary"))
    ids = tokenizer.encode_chunks(chunks_with_bar(text, "tokens"))
    count = write_token_file(out / TOKEN_FILE, ids, tokenizer)
    with replaced(out / FILE_NAME) as file:
        file.write(tokenizer.to_bytes())
    return count, tokenizer


def main(arguments=None):
    """Run the command line. Returns 0, 2 after an error (one line on standard error), or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", type=Path, help="the UTF-8 text file to read")
    parser.add_argument(
        "--tokenizer", default="word", help="word, byte, or the path of a tokenizer.json such as GPT-2's (default word)"
    )
    parser.add_argument(
        "--out", type=Path, help="directory to write (default: the path of the text with the suffix .tokens)"
    )
    options = parser.parse_args(arguments)
    text = options.text.absolute()  # "." has no stem
    out = options.out or text.parent / f"{text.stem}.tokens"
    try:
        count, tokenizer = prepare(options.text, options.tokenizer, out)
    except UserError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{out}: {count:,} tokens, vocabulary of {tokenizer.vocab_size:,} ({tokenizer.kind})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

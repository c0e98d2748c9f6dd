"""Write a large English text as a token file, from the book and the dictionary of the Debian package dict-gcide.

    apt-get download dict-gcide && dpkg-deb -x dict-gcide_*.deb gcide
    python data/make_english.py gcide/usr/share/dictd/gcide.dict.dz --out out/english

The text is data/moby_dick.txt, then the dictionary: an entry is one line, without pronunciations, etymologies and marks
of sources. The tokenizer is a byte-pair encoding that is trained on this text.
"""

import gzip
import re
import sys
import tempfile
import zlib
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # so that it also runs without installation

from make_weights import byte_pairs
from prepare import prepare

from gpt2core.app.command import error_text, run_command
from gpt2core.app.settings.flag_parser import HelpPrinted, Parser, to_path
from gpt2core.app.shipped import BOOK
from gpt2core.communicator import Solo
from gpt2core.errors import DataError, UserError
from gpt2core.text.token_file import read_text

VOCAB_SIZE = 8192
MARKS = re.compile(r"\\[^\\]*\\|\[[^][]*\]|[{}]")  # of an entry: \pronunciation\, [etymology], {reference}


def entries(text):
    """The entries of the dictionary, one per line. In `text` an empty line is between two, and lines are indented."""
    joined = (" ".join(MARKS.sub("", " ".join(entry.split())).split()) for entry in text.split("\n\n"))
    return "\n".join(line for line in joined if line) + "\n"


def read_dictionary(path):
    """The dictionary of the gzip file `path` as text; its few characters beyond ASCII are omitted. Raises DataError."""
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii", "ignore")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}: give the file gcide.dict.dz of the package dict-gcide") from None
    if not text:
        raise DataError(f"{path} is empty: give the file gcide.dict.dz of the package dict-gcide")
    return text


def main(arguments=None):
    """Run the command line. Return the exit code: 0, or 2 after an error (one line on stderr)."""
    examples = (("gcide.dict.dz --out out/english", "then train_gpt2.py --data out/english"),)
    parser = Parser(__doc__.split("\n\n")[0], examples, usage="%(prog)s DICTIONARY --out DIR")
    parser.add_argument("dictionary", type=to_path, help="the file gcide.dict.dz of the package dict-gcide")
    parser.add_argument("--out", type=to_path, required=True, help="directory to write to")
    parser.add_argument("--overwrite", action="store_true", help="replace the files in --out (default: refuse)")
    try:
        options = parser.parse_args(arguments)
        text = read_text(BOOK) + entries(read_dictionary(options.dictionary))
        with tempfile.TemporaryDirectory() as folder:
            source, tokenizer = Path(folder) / "english.txt", Path(folder) / "tokenizer.json"
            source.write_text(text, encoding="utf-8")
            byte_pairs(text, VOCAB_SIZE).save(tokenizer)
            count, _ = prepare([source], str(tokenizer), options.out, options.overwrite)
    except HelpPrinted:
        return 0
    except UserError as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 2
    print(f"{options.out}: {count:,} tokens of {len(text):,} characters, vocabulary of {VOCAB_SIZE:,}")
    return 0


if __name__ == "__main__":
    run_command(Solo, lambda world: main())

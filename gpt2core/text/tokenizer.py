"""Convert text to token ids and back without loss: words, bytes, or GPT-2's byte pairs, stored as tokenizer.json.

The Hugging Face `tokenizers` library encodes, and it can read the files written here. Decoding needs only a table with
the bytes of every token: the bytes of a text are the bytes of its tokens, concatenated. A token may end inside a
character. TokenStream, which decodes one token at a time, returns a character when all its bytes have been decoded.
"""

import codecs
import functools
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpt2core.errors import DataError
from gpt2core.text.input_file import read_file
from gpt2core.text.tokenizer_json import WORD_PATTERN, byte_alphabet, kind_of, splits_at_words

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"  # GPT-2's token between two documents

LARGEST = 1 << 28  # bytes of a tokenizer.json
MAX_IDS = 1 << 22  # ids are less than this: a larger id in a file is almost certainly an error, and makes tables large
INVISIBLE = {  # word of one invisible character: (its name in the error if it is unknown, what to do)
    "\ufeff": ("a byte order mark (U+FEFF)", "save the file as UTF-8 without it"),
    "\r": ("a line end of Windows (CR LF)", "convert the file with tr -d '\\r' < old.txt > new.txt"),
    " ": (
        "a space that no word follows (two spaces in a row, or one at the end of a line)",
        "write one space before each word",
    ),
}
PIECE = 1 << 16  # characters that are encoded at once: the library needs about 200 bytes per token while it encodes


def cut_at_words(chunks, inside=frozenset()):
    """Yield the text of `chunks` (an iterable of str) in pieces, so that no token crosses the end of a piece.

    The text is cut between a letter or digit and a following space or newline, but not if a token could contain both:
    `inside` is the set of the pairs of bytes that occur in a token (see pairs_inside). A text in which no cut is
    possible is one piece.
    """
    uncut = []  # the text after the last cut
    for chunk in chunks:
        cut = last_cut(chunk, inside)
        if cut:
            yield "".join([*uncut, chunk[:cut]])
            uncut = []
        uncut.append(chunk[cut:])
    if uncut:
        yield "".join(uncut)


def last_cut(text, inside):
    """The last index at which cut_at_words() may cut `text`, or 0 if there is none."""
    for i in range(len(text) - 1, 0, -1):
        if text[i] in " \n" and text[i - 1].isalnum() and text[i - 1 : i + 1].encode("utf-8")[-2:] not in inside:
            return i
    return 0


def pairs_inside(token_bytes):
    """The set of all pairs of adjacent bytes that are part of a token and end with a space or a newline.

    If such a pair is not in the set, a text may be cut between its two bytes: no token contains both.
    """
    pairs = (token[i - 1 : i + 1] for token in token_bytes for i in range(1, len(token)) if token[i] in b" \n")
    return frozenset(pairs)


def slices(text):
    """Yield `text` in slices of PIECE characters."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def utf8(text):
    """Return `text`; raises DataError if it has a lone surrogate, which UTF-8 cannot encode, and names it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X}"
        raise DataError(f"the text has the lone surrogate {surrogate}, which UTF-8 cannot encode: remove it") from None
    return text


class UnknownWord(DataError):
    """A word, or a space, that is not in the vocabulary. Callers can make another error from `problem` and `advice`."""

    def __init__(self, problem, advice):
        super().__init__(f"{problem}: {advice}, or train a new model with `tokenizer=byte`")
        self.problem, self.advice = problem, advice


class Tokenizer:
    """A `tokenizers.Tokenizer` of the library, its kind ("word", "byte" or "bpe"), and the bytes of every token.

    Use word_level(), byte_level() or load() to create one. `dtype` of ids is uint16 if all ids fit, otherwise uint32.
    """

    def __init__(self, library_tokenizer, kind, whole=False):
        """whole: encode each text as one piece, because the pre-tokenizer may not split where cut_at_words() cuts."""
        self.library, self.kind, self.whole = library_tokenizer, kind, whole
        self.ids = library_tokenizer.get_vocab(with_added_tokens=True)  # token -> id
        self.vocab_size = max(self.ids.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        self.token_bytes = [b""] * self.vocab_size  # an id without a token decodes to nothing
        added = {id: token.content for id, token in library_tokenizer.get_added_tokens_decoder().items()}
        self.added = (
            re.compile("(" + "|".join(map(re.escape, sorted(added.values(), key=len, reverse=True))) + ")")
            if added
            else None
        )  # self.added.split(text) gives the added tokens and the text between them
        for token, id in self.ids.items():
            in_alphabet = kind != "word" and id not in added and all(character in byte_of for character in token)
            self.token_bytes[id] = bytes(map(byte_of.get, token)) if in_alphabet else token.encode("utf-8")
        self.inside = pairs_inside(self.token_bytes)

    @classmethod
    def word_level(cls, text):
        """Return the paper's tokenizer, whose tokens are the distinct words of `text`, sorted by count, then by text.

        text: a str, or an iterable of str for a text that is larger than memory. Raises DataError if it is empty.
        """
        splitter = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERN), behavior="isolated")
        count = Counter()
        for piece in cut_at_words(slices(text) if isinstance(text, str) else text):
            count.update(word for word, _ in splitter.pre_tokenize_str(utf8(piece)))
        if not count:
            raise DataError("an empty text has no word vocabulary: give a corpus with at least one word")
        order = sorted(count, key=lambda word: (-count[word], word))
        library = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(order)}))
        library.pre_tokenizer, library.decoder = splitter, decoders.Fuse()
        return cls(library, "word")

    @classmethod
    def byte_level(cls):
        """Return the tokenizer with 256 ids: the id of a byte of the UTF-8 text is its value."""
        alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}
        library = tokenizers.Tokenizer(models.BPE(alphabet, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return cls(library, "byte")

    @classmethod
    def load(cls, path):
        """Return the tokenizer of a tokenizer.json; path: this file, or a directory that contains it.

        Accepts the tokenizers of word_level() and byte_level(), and byte-level BPE without a prefix space (GPT-2's).
        Truncation and padding in the file are ignored. Raises DataError if the file is missing or corrupt, or if
        decode(encode(text)) could differ from text.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            library = tokenizers.Tokenizer.from_str(read_file(path, LARGEST).decode("utf-8"))
        except OSError as error:
            advice = f"give word, byte or a {FILE_NAME}"
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}; {advice}") from None
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from None
        largest = max(library.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= MAX_IDS:
            raise DataError(f"{path} has the token id {largest}, but ids must be below {MAX_IDS:,}: use another copy")
        library.no_truncation()
        library.no_padding()
        description = json.loads(library.to_str())  # the JSON that the library writes has every field
        return cls(library, kind_of(description, path), not splits_at_words(description))

    def save(self, path):
        """Write tokenizer.json to the file or into the directory `path`. Raises DataError if that fails."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            path.write_bytes(self.to_bytes())
        except OSError as error:
            raise DataError(f"cannot write the tokenizer {path}: {error.strerror}") from None

    def to_bytes(self):
        """Return the contents of tokenizer.json; equal tokenizers give equal bytes."""
        return self.library.to_str(pretty=True).encode("utf-8")

    @functools.cached_property
    def token_ids(self):
        """The ids that have a token, an increasing array. Ids between them, and above them, may have none."""
        return np.unique(list(self.ids.values()))

    @property
    def end_of_text(self):
        """The id of the token that ends a document, END_OF_TEXT, or None if the vocabulary has none."""
        return self.ids.get(END_OF_TEXT)

    @property
    def fingerprint(self):
        """A 32-bit checksum of all tokens in the order of their ids; equal for equal vocabularies."""
        return zlib.crc32(b"".join(len(token).to_bytes(4, "little") + token for token in self.token_bytes))

    def encode(self, text):
        """Return the ids of `text`: (number of tokens,) of self.dtype. decode(encode(text)) is equal to text.

        Raises UnknownWord for a word outside the vocabulary, and names it; DataError if UTF-8 cannot encode the text.
        """
        return np.concatenate([np.empty(0, self.dtype), *self.encode_chunks(slices(text))])

    def encode_chunks(self, chunks):
        """Yield arrays, the ids of the concatenated `chunks` in order. If self.whole, all chunks are read first."""
        encode = {"word": self._encode_words, "byte": self._encode_bytes, "bpe": self._encode_pairs}[self.kind]
        pieces = map(utf8, ["".join(chunks)] if self.whole else cut_at_words(chunks, self.inside))
        for piece in pieces:
            yield encode(piece, pieces)

    def encode_prompt(self, text):
        """Encode a prompt. If the vocabulary has the first word only with a space before it, this space is added.

        Most words of a corpus follow a space, so the vocabulary often has " word" but not "word".
        """
        if self.kind == "word" and text:
            first = self._words(utf8(text[:PIECE]))[0]
            if first not in self.ids and " " + first in self.ids:
                text = " " + text
        return self.encode(text)

    def decode(self, ids):
        """Return the text of `ids`, a sequence of integers; bytes that are not UTF-8 become U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        return b"".join(map(self._bytes_of, np.asarray(ids).tolist())).decode("utf-8", errors="replace")

    def stream(self):
        """Return a TokenStream, which decodes one id at a time."""
        return TokenStream(self._bytes_of)

    def _bytes_of(self, id):
        if not 0 <= id < self.vocab_size:
            raise DataError(
                f"token id {id} is outside the vocabulary of {self.vocab_size}: use the tokenizer that made these ids"
            )
        return self.token_bytes[id]

    def _words(self, piece):
        """Return the list of the words of a text, in which each added token is one word."""
        parts = self.added.split(piece) if self.added else [piece]  # the parts 1, 3, ... are added tokens
        words = []
        for i, part in enumerate(parts):
            words += [part] if i % 2 else [word for word, _ in self.library.pre_tokenizer.pre_tokenize_str(part)]
        return words

    def _encode_words(self, piece, rest):
        """Return the ids of a piece of text. rest: the later pieces, to count the unknown words for the error."""
        words = self._words(piece)
        try:
            return np.array([self.ids[word] for word in words], self.dtype)
        except KeyError as error:
            if error.args[0] in INVISIBLE:
                name, advice = INVISIBLE[error.args[0]]
                problem = f"the text has {name}, and the vocabulary of {self.vocab_size} tokens has no token for it"
                raise UnknownWord(problem, advice) from None
            unknown = sum(word not in self.ids for word in words)
            unknown += sum(word not in self.ids for later_piece in rest for word in self._words(later_piece))
            raise UnknownWord(
                f"the word {error.args[0]!r} is not in the vocabulary of {self.vocab_size} tokens "
                f"({unknown} unknown in total)",
                "use words of the corpus",
            ) from None

    def _encode_bytes(self, piece, rest):
        return np.frombuffer(piece.encode("utf-8"), np.uint8).astype(self.dtype)

    def _encode_pairs(self, piece, rest):
        return np.array(self.library.encode(piece, add_special_tokens=False).ids, self.dtype)


class TokenStream:
    """Decodes one id at a time. The results of all push() calls and of flush(), concatenated, are decode(all ids)."""

    def __init__(self, bytes_of):
        self.bytes_of = bytes_of
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id):
        """Return the characters that `id` completes, or "" if the last character is still incomplete."""
        return self.decoder.decode(self.bytes_of(int(id)))

    def flush(self):
        """Return U+FFFD if the last character is incomplete, otherwise ""."""
        return self.decoder.decode(b"", final=True)


def build_tokenizer(spec, text):
    """Return the tokenizer that `spec` names: "word" (its vocabulary is that of `text`), "byte", or a tokenizer.json.

    text: a str or an iterable of str, which is read only for "word".
    """
    if spec == "word":
        return Tokenizer.word_level(text)
    return Tokenizer.byte_level() if spec == "byte" else Tokenizer.load(spec)

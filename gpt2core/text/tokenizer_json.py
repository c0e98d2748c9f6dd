"""Find the kind of the tokenizer in a tokenizer.json, and reject files with options that could lose text."""

from gpt2core.errors import DataError

# A token is a word or one punctuation mark, each with the space before it, or one whitespace character. Every character
# of a text belongs to exactly one token, so decode(encode(text)) == text.
WORD_PATTERN = r" ?\w+| ?[^\w\s]|\s"


def byte_alphabet():
    """Return GPT-2's 256 printable characters, of which number b represents byte b (`bytes_to_unicode` of GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def kind_of(description, path):
    """Return the kind, "word", "byte" or "bpe", of a parsed tokenizer.json that the library has written.

    Raises DataError, with the name of the option, if decode(encode(text)) could differ from text, or if encoding is
    random. path: of the file, for the messages.
    """
    model, steps, added = description["model"], steps_of(description["pre_tokenizer"]), description["added_tokens"]
    if not model["vocab"]:
        raise DataError(f"{path} has a tokenizer without tokens: train it first")
    if problem := next(problems(description), None):
        raise DataError(f"{path} has {problem}: remove it from the file, or use a tokenizer without it, like GPT-2's")
    if model["type"] == "WordLevel" and [step.get("pattern") for step in steps] == [{"Regex": WORD_PATTERN}]:
        return "word"
    if model["type"] != "BPE" or not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        raise DataError(
            f"{path} has a {model['type']} tokenizer that may lose text: use word-level, byte-level, "
            "or byte-level BPE without a prefix space, like GPT-2's"
        )
    missing = sum(character not in model["vocab"] for character in byte_alphabet())
    if missing:
        raise DataError(
            f"{path} lacks {missing} of the 256 byte tokens, so it would lose text: "
            "train it with initial_alphabet=ByteLevel.alphabet()"
        )
    ids_are_bytes = [model["vocab"][character] for character in byte_alphabet()] == list(range(256))
    return "byte" if ids_are_bytes and len(model["vocab"]) == 256 and not added else "bpe"


# Pre-tokenizers that divide a text and keep every character. ByteLevel must be the last: it replaces all characters.
DIVIDING = ("Split", "Digits", "Punctuation", "UnicodeScripts", "FixedLength")


def problems(description):
    """Yield a description of each option of a parsed tokenizer.json that could change text or make ids random."""
    model, steps = description["model"], steps_of(description["pre_tokenizer"])
    for step in steps_of(description["normalizer"]):
        yield f"the normalizer {step['type']}, which changes text"
    for i, step in enumerate(steps):
        is_final_bytes = i == len(steps) - 1 and step["type"] == "ByteLevel"
        if step.get("behavior") == "Removed" or not (is_final_bytes or step["type"] in DIVIDING):
            removing = " that removes" if step.get("behavior") == "Removed" else ""
            yield f"the pre-tokenizer {step['type']}{removing}, which may lose text"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            yield f"{option} {model[option]!r}, which " + (
                "makes ids random" if option == "dropout" else "changes text"
            )
    for token in description["added_tokens"]:
        yield from problems_of_added_token(token, model)


def problems_of_added_token(token, model):
    """As problems(), for one of the added tokens. model: the field of this name."""
    content, alphabet = token["content"], set(byte_alphabet())
    for option in ("lstrip", "rstrip") + ("single_word",) * (model["type"] == "WordLevel"):
        if token[option]:
            yield f"the added token {content!r} with {option}, which may lose text"
    if model["type"] == "BPE" and content in model["vocab"] and not content.isascii() and alphabet >= set(content):
        yield f"the added token {content!r}, which has the id of other bytes"


def steps_of(part):
    """The list of normalizers or pre-tokenizers in a field of tokenizer.json; a Sequence is replaced by its items."""
    if part is None or part["type"] != "Sequence":
        return [part] if part else []
    return [step for inner in part.get("pretokenizers", part.get("normalizers")) for step in steps_of(inner)]


def splits_at_words(description):
    """Whether a cut between a letter or digit and a space or newline leaves the tokens of a text unchanged.

    This is known for some pre-tokenizers; for Split only with the pattern of the word tokenizer. Otherwise: False.
    """
    words = {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    known = all(
        step["type"] in ("ByteLevel", "Digits", "Punctuation") or step == words
        for step in steps_of(description["pre_tokenizer"])
    )
    # single_word depends on the character before the token; after a cut this character is in another piece
    return known and not any(
        token["single_word"] and token["content"][0] in " \n" for token in description["added_tokens"]
    )

"""Find the kind of tokenizer in a tokenizer.json, and reject a file with options that could lose text."""

from gpt2core.errors import DataError

# A token is a word or one punctuation mark, each with the space before it, or one whitespace character. Every character
# of a text belongs to exactly one token, so decode(encode(text)) == text.
WORD_PATTERN = r" ?\w+| ?[^\w\s]|\s"


def byte_alphabet():
    """Return GPT-2's 256 printable characters; the one at index b represents byte b (`bytes_to_unicode` of GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def kind_of(description, path):
    """The kind, "word", "byte" or "bpe", of a parsed tokenizer.json in which the library has filled every field.

    Raises DataError, naming the option, if decode(encode(text)) could differ from text, or if the ids are random.
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
    plain = [model["vocab"][character] for character in byte_alphabet()] == list(range(256))
    return "byte" if plain and len(model["vocab"]) == 256 and not added else "bpe"


# Pre-tokenizers that divide a text and keep every character. ByteLevel changes all of them, so it must be the last.
DIVIDING = ("Split", "Digits", "Punctuation", "UnicodeScripts", "FixedLength")


def problems(description):
    """Yield a description of each option of a parsed tokenizer.json that may change text or make ids random."""
    model, steps, alphabet = description["model"], steps_of(description["pre_tokenizer"]), set(byte_alphabet())
    for step in steps_of(description["normalizer"]):
        yield f"the normalizer {step['type']}, which changes text"
    for i, step in enumerate(steps):
        last = i == len(steps) - 1 and step["type"] == "ByteLevel"
        if step.get("behavior") == "Removed" or not (last or step["type"] in DIVIDING):
            removing = " that removes" if step.get("behavior") == "Removed" else ""
            yield f"the pre-tokenizer {step['type']}{removing}, which may lose text"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            yield f"{option} {model[option]!r}, which " + (
                "makes ids random" if option == "dropout" else "changes text"
            )
    for token in description["added_tokens"]:
        content = token["content"]
        for option in ("lstrip", "rstrip") + ("single_word",) * (model["type"] == "WordLevel"):
            if token[option]:
                yield f"the added token {content!r} with {option}, which may lose text"
        if model["type"] == "BPE" and content in model["vocab"] and not content.isascii() and alphabet >= set(content):
            yield f"the added token {content!r}, which has the id of other bytes"


def steps_of(part):
    """The normalizers or pre-tokenizers of a field of tokenizer.json, with those inside a Sequence, in order."""
    if part is None or part["type"] != "Sequence":
        return [part] if part else []
    return [step for inner in part.get("pretokenizers", part.get("normalizers")) for step in steps_of(inner)]


def splits_at_words(description):
    """Whether a text can be cut between a letter or digit and a space or newline without a change of its tokens.

    For the pre-tokenizer Split the answer is True only with the pattern of the word tokenizer.
    """
    words = {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    known = all(
        step["type"] in ("ByteLevel", "Digits", "Punctuation") or step == words
        for step in steps_of(description["pre_tokenizer"])
    )
    # single_word depends on the character before the token, which a cut would hide
    return known and not any(
        token["single_word"] and token["content"][0] in " \n" for token in description["added_tokens"]
    )

"""Every kind of tokenizer decodes its ids to the same text, at once or as a stream, and reports what it cannot do."""

import json
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from gpt2core.errors import DataError
from gpt2core.text import tokenizer as tokenizer_module
from gpt2core.text.tokenizer import FILE_NAME, PIECE, Tokenizer, build_tokenizer, byte_alphabet, cut_at_words, slices

STORY = "The loss went down. It's 2,048 tokens;\tthe naïve café — 東京 🙂!\r\n\r\n  Two  spaces and a last.  \n"

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
hard_text = st.lists(st.sampled_from(" |  |\n|\r\n|\t|a|bc|'s|9|.|é|e\u0301|\x85|🙂".split("|"))).map("".join)


def trained_pairs(vocab_size=400, before=(), **byte_level):
    """A byte-level BPE tokenizer as GPT-2's, trained on a short text; `before`: pre-tokenizers before ByteLevel."""
    library = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **byte_level})
    library.pre_tokenizer = pre_tokenizers.Sequence([*before, last]) if before else last
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    library.train_from_iterator([STORY * 3, "the tokens of the tokenizer took the train to the station"], trainer)
    return library


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "tokenizer.json"
    trained_pairs().save(str(path))
    return Tokenizer.load(path)


@pytest.fixture(params=["word", "byte", "bpe"])
def tokenizer(request, pairs):
    return {"word": Tokenizer.word_level(STORY), "byte": Tokenizer.byte_level(), "bpe": pairs}[request.param]


@settings(deadline=None)
@given(any_text | hard_text)
def test_word_level_round_trip_is_exact_over_its_own_vocabulary(text):
    if text:
        tokenizer = Tokenizer.word_level(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(any_text | hard_text)
def test_byte_level_round_trip_is_exact_and_the_ids_are_the_bytes(text):
    tokenizer = Tokenizer.byte_level()
    assert tokenizer.encode(text).tobytes() == text.encode("utf-8").decode("latin-1").encode("utf-16-le")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=any_text | hard_text)
def test_byte_pair_round_trip_is_exact_and_the_ids_are_the_librarys(pairs, text):
    assert pairs.encode(text).tolist() == pairs.library.encode(text).ids
    assert pairs.decode(pairs.encode(text)) == text


@settings(deadline=None)
@given(text=hard_text, size=st.integers(1, 7))
def test_cutting_a_text_changes_no_token_of_any_kind(pairs, text, size):
    if text:
        word = Tokenizer.word_level(text)
        for tokenizer in (word, Tokenizer.byte_level(), pairs):
            chunks = [text[start : start + size] for start in range(0, len(text), size)]
            pieces = [*tokenizer.encode_chunks(chunks)]
            assert np.concatenate(pieces).tolist() == tokenizer.library.encode(text).ids
    assert "".join(cut_at_words(text[start : start + size] for start in range(0, len(text), size))) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 255)))
def test_stream_of_any_bytes_equals_decoding_them_at_once(ids):
    tokenizer = Tokenizer.byte_level()
    stream = tokenizer.stream()
    streamed = "".join([stream.push(id) for id in ids]) + stream.flush()
    assert streamed == tokenizer.decode(ids) == bytes(ids).decode("utf-8", errors="replace")


@settings(deadline=None)
@given(data=st.data())
def test_stream_of_any_byte_pairs_equals_the_librarys_decoding(pairs, data):
    ids = data.draw(st.lists(st.integers(0, pairs.vocab_size - 1)))
    stream = pairs.stream()
    streamed = "".join([stream.push(id) for id in ids]) + stream.flush()
    assert streamed == pairs.decode(ids) == pairs.library.decode(ids, skip_special_tokens=False)


def test_stream_never_shows_half_a_character(tokenizer):
    stream = tokenizer.stream()
    shown = [stream.push(id) for id in tokenizer.encode(STORY)]
    assert "�" not in "".join(shown) and "".join(shown) == STORY and stream.flush() == ""


def test_saved_file_opens_in_the_library_and_here_and_encodes_alike(tokenizer, tmp_path):
    tokenizer.save(tmp_path)  # a directory
    tokenizer.save(tmp_path / "again.json")
    assert (tmp_path / FILE_NAME).read_bytes() == (tmp_path / "again.json").read_bytes()
    library = tokenizers.Tokenizer.from_file(str(tmp_path / FILE_NAME))
    assert library.encode(STORY).ids == tokenizer.encode(STORY).tolist()
    for path in (tmp_path, tmp_path / "again.json", str(tmp_path)):
        again = Tokenizer.load(path)
        assert (again.kind, again.vocab_size, again.fingerprint) == (
            tokenizer.kind,
            tokenizer.vocab_size,
            tokenizer.fingerprint,
        )
        assert again.encode(STORY).tolist() == tokenizer.encode(STORY).tolist()


def test_library_decodes_what_we_encode(tokenizer):
    assert tokenizer.library.decode(tokenizer.encode(STORY).tolist(), skip_special_tokens=False) == STORY


def test_vocabulary_is_ordered_by_falling_count_then_text():
    ids = Tokenizer.word_level("b a a c b a\n").ids
    assert sorted(ids, key=ids.get) == [" a", "\n", " b", " c", "b"]


def test_vocabulary_of_chunks_is_that_of_the_whole_text():
    chunks = [STORY[start : start + 5] for start in range(0, len(STORY), 5)]
    assert Tokenizer.word_level(iter(chunks)).to_bytes() == Tokenizer.word_level(STORY).to_bytes()


def test_word_level_splits_into_words_marks_and_whitespace_with_the_space_before():
    tokenizer = Tokenizer.word_level("It's two,  three .\r\n")
    words = [tokenizer.decode([id]) for id in tokenizer.encode("It's two,  three .\r\n")]
    assert words == ["It", "'", "s", " two", ",", " ", " three", " .", "\r", "\n"]


@pytest.mark.parametrize("size, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_small_as_the_vocabulary_allows(size, dtype):
    library = tokenizers.Tokenizer(models.WordLevel({f" {number}": number for number in range(size)}))
    library.pre_tokenizer = Tokenizer.word_level("x").library.pre_tokenizer
    tokenizer = Tokenizer(library, "word")
    ids = tokenizer.encode(f" {size - 1} 0")
    assert ids.dtype == dtype and ids.tolist() == [size - 1, 0] and tokenizer.vocab_size == size


def test_the_largest_id_of_a_file_is_below_the_limit(tmp_path, monkeypatch):
    for size in (6, 7):  # the largest id is 5, 6
        Tokenizer.word_level(" ".join("abcdefg"[:size])).save(tmp_path / f"{size}.json")
    monkeypatch.setattr(tokenizer_module, "MAX_IDS", 6)
    assert Tokenizer.load(tmp_path / "6.json").vocab_size == 6
    with pytest.raises(DataError, match="7.json has the token id 6, but ids must be below 6"):
        Tokenizer.load(tmp_path / "7.json")


def test_empty_text_has_no_tokens(tokenizer):
    assert tokenizer.encode("").shape == (0,) and tokenizer.decode([]) == "" and tokenizer.encode_prompt("").size == 0


def test_prompt_may_open_with_a_word_known_only_after_a_space():
    tokenizer = Tokenizer.word_level("In the loss we trust\nloss of trust")
    assert tokenizer.decode(tokenizer.encode_prompt("we trust")) == " we trust"
    assert tokenizer.decode(tokenizer.encode_prompt("loss we")) == "loss we"  # the vocabulary has both: as written
    assert tokenizer.decode(tokenizer.encode_prompt("In the")) == "In the"  # in the vocabulary without a space
    with pytest.raises(DataError, match="'dragon'.*vocabulary of 8"):
        tokenizer.encode_prompt("dragon loss")


def test_prompts_of_the_other_kinds_are_encoded_without_a_space(pairs):
    for tokenizer in (Tokenizer.byte_level(), pairs):
        assert tokenizer.encode_prompt("loss").tolist() == tokenizer.encode("loss").tolist()


def test_unknown_words_are_named_and_counted(monkeypatch):
    tokenizer = Tokenizer.word_level("the loss went down\n" * 20)
    text = "the loss went down\n" * 10 + "the dragon went down\n" + "the loss met the dragon\n" * 10
    # 31: 11 dragons, 10 " met", 10 " the"
    wanted = r"' dragon' is not in the vocabulary of 5 tokens \(31 unknown in total\): .*byte"
    for size in (PIECE, 40):  # in one piece and in many
        monkeypatch.setattr("gpt2core.text.tokenizer.PIECE", size)
        with pytest.raises(DataError, match=wanted):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("\ufeffthe loss", "byte order mark .*: save the file as UTF-8 without it"),
        ("the loss\r\nwent", "line end of Windows .*: convert the file with tr"),
        ("the  loss", "space that no word follows .*: write one space"),
    ],
)
def test_an_invisible_unknown_word_is_described_and_says_what_to_do(text, wanted):
    with pytest.raises(DataError, match=wanted):
        Tokenizer.word_level("the loss went down\n").encode(text)


def test_lone_surrogate_is_named(tokenizer):
    with pytest.raises(DataError, match=r"U\+D800"):
        tokenizer.encode("the \ud800")
    with pytest.raises(DataError, match=r"U\+D800"):
        Tokenizer.word_level("the \ud800")


@pytest.mark.parametrize("bad", [-1, 10_000])
def test_id_outside_the_vocabulary_is_named(tokenizer, bad):
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
        tokenizer.decode([bad])
    with pytest.raises(DataError, match=f"token id {bad} "):
        tokenizer.stream().push(bad)


def test_empty_corpus_has_no_vocabulary():
    with pytest.raises(DataError, match="empty text"):
        Tokenizer.word_level("")


def test_spec_names_the_tokenizer(tmp_path, pairs):
    pairs.save(tmp_path)
    assert [build_tokenizer(spec, STORY).kind for spec in ("word", "byte", tmp_path)] == ["word", "byte", "bpe"]


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}/none.json: No such file"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(DataError, match=f"{tmp_path}/{FILE_NAME}: No such file"):
        Tokenizer.load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_corrupt_tokenizer_is_named_or_still_round_trips(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("corrupt") / FILE_NAME
    whole = Tokenizer.word_level("the loss went down").to_bytes()
    damage = data.draw(st.binary(min_size=1, max_size=3))
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] if cut else whole[:at] + damage + whole[at + len(damage) :])
    try:
        tokenizer = Tokenizer.load(path)
        assert tokenizer.decode(tokenizer.encode(tokenizer.decode([0]))) == tokenizer.decode([0])
    except DataError as error:
        assert cut or FILE_NAME in str(error) or "vocabulary" in str(error)


@pytest.mark.parametrize(
    "junk", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": null}', json.dumps({"version": "1.0"}).encode()]
)
def test_file_that_is_no_tokenizer_is_named(tmp_path, junk):
    path = tmp_path / FILE_NAME
    path.write_bytes(junk)
    with pytest.raises(DataError, match=f"{path} is not a tokenizer.json"):
        Tokenizer.load(path)


def test_tokenizers_that_would_lose_text_are_refused(tmp_path):
    path = tmp_path / FILE_NAME
    foreign = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.save(str(path))
    with pytest.raises(DataError, match="may lose text"):
        Tokenizer.load(path)
    trained_pairs(add_prefix_space=True).save(str(path))
    with pytest.raises(DataError, match="prefix space"):
        Tokenizer.load(path)
    bare = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.save(str(path))
    with pytest.raises(DataError, match="lacks 254 of the 256 byte tokens"):
        Tokenizer.load(path)


# -- options of a tokenizer.json ---------------------------------------------------------------------------------------


def with_added(*tokens, **byte_level):
    library = trained_pairs(**byte_level)
    library.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return library


VARIANTS = {  # tokenizers whose tokens can contain a space after a letter, or that divide a text in another way
    "added with spaces": lambda: with_added("the New York", "down. It", "a  bc", "bc\n", " a", "a bc 9"),
    "no regex": lambda: trained_pairs(600, use_regex=False),
    "no regex, added": lambda: with_added("a bc", "9 ", vocab_size=600, use_regex=False),
    "digits": lambda: trained_pairs(600, [pre_tokenizers.Digits(True)], use_regex=False),
    "punctuation": lambda: trained_pairs(600, [pre_tokenizers.Punctuation("merged_with_next")], use_regex=False),
    "a split": lambda: trained_pairs(600, [pre_tokenizers.Split(tokenizers.Regex(r"\w+ \w+"), "isolated")]),
    "a split without regex": lambda: trained_pairs(
        600, [pre_tokenizers.Split(tokenizers.Regex(r"\w+ \w+"), "isolated")], use_regex=False
    ),
    "nested": lambda: trained_pairs(600, [pre_tokenizers.Sequence([pre_tokenizers.Digits(False)])]),
    "one word only": lambda: with_single_word(" a"),
}


def with_single_word(token):
    library = trained_pairs()
    library.add_tokens([AddedToken(token, normalized=False, single_word=True)])
    return library


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """{name: Tokenizer} of VARIANTS."""
    loaded = {}
    for name, make in VARIANTS.items():
        path = tmp_path_factory.mktemp("variants") / FILE_NAME
        make().save(str(path))
        loaded[name] = Tokenizer.load(path)
    return loaded


spaced_text = st.lists(
    st.sampled_from([*"a9.\n", "bc", " ", " ", "the", " New York", "down. It", "é", "\n\n", "The loss", "went"])
).map("".join)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=50, deadline=None)
@given(text=spaced_text | hard_text, size=st.integers(1, 7))
def test_a_text_is_cut_only_where_the_library_divides_it(variants, name, text, size):
    tokenizer = variants[name]
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    ids = [id for piece in tokenizer.encode_chunks(chunks) for id in piece.tolist()]
    assert ids == tokenizer.library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_a_long_text_of_a_tokenizer_without_regex_still_comes_in_pieces(variants, monkeypatch):
    monkeypatch.setattr("gpt2core.text.tokenizer.PIECE", 40)
    text = "a quiz of jazz and fizz\n" * 20  # no token has a space after z
    for name, tokenizer in variants.items():
        pieces = [*tokenizer.encode_chunks(slices(text))]
        assert np.concatenate(pieces).tolist() == tokenizer.library.encode(text, add_special_tokens=False).ids
        assert (len(pieces) == 1) == ("split" in name or name == "one word only")


def test_an_added_token_has_the_bytes_of_its_text(tmp_path):
    with_added("café", "the  end").save(str(tmp_path / FILE_NAME))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a café, the  end")
    assert ids.tolist() == tokenizer.library.encode("a café, the  end").ids and len(ids) < 7
    assert tokenizer.decode(ids) == "a café, the  end"


def test_added_tokens_of_a_word_tokenizer_are_found_as_the_library_finds_them(tmp_path):
    library = Tokenizer.word_level("the New York times of a New day  ").library
    library.add_tokens(["New York", "New", "<pad>", "a New"])
    library.save(str(tmp_path / FILE_NAME))
    tokenizer, text = Tokenizer.load(tmp_path), "the New York times of a New<pad> day"
    assert tokenizer.kind == "word" and tokenizer.decode(tokenizer.encode(text)) == text
    for size in (3, len(text)):
        pieces = tokenizer.encode_chunks(text[start : start + size] for start in range(0, len(text), size))
        assert np.concatenate([*pieces]).tolist() == library.encode(text).ids


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=trained_pairs(), pad_token="<|endoftext|>")
    saved("the loss", truncation=True, max_length=4, padding="max_length")
    saved.save_pretrained(tmp_path)
    described = json.loads((tmp_path / FILE_NAME).read_text())
    assert described["truncation"]["max_length"] == described["padding"]["strategy"]["Fixed"] == 4
    tokenizer, want = Tokenizer.load(tmp_path), trained_pairs()
    for text in ("a", STORY * 3):
        assert tokenizer.encode(text).tolist() == want.encode(text).ids
    assert json.loads(tokenizer.to_bytes())["truncation"] is None is json.loads(tokenizer.to_bytes())["padding"]


def changed(edit):
    """A function that saves a tokenizer after edit(its JSON)."""

    def make():
        values = json.loads(trained_pairs().to_str())
        edit(values)
        return tokenizers.Tokenizer.from_str(json.dumps(values))

    return make


def normalized(normalizer):
    def make():
        library = trained_pairs()
        library.normalizer = normalizer
        return library

    return make


def split_first(*pre_tokenizer):
    return lambda: trained_pairs(before=pre_tokenizer)


def added(token, **options):
    def make():
        library = trained_pairs()
        library.add_tokens([AddedToken(token, **options)])
        return library

    return make


LOSSES = {
    "the normalizer Lowercase": normalized(normalizers.Lowercase()),
    "the normalizer NFC": normalized(normalizers.NFC()),
    "the normalizer NFKC": normalized(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "the normalizer Strip": normalized(normalizers.Strip()),
    "the normalizer Replace": normalized(normalizers.Replace("a", "b")),
    "the normalizer Prepend": normalized(normalizers.Prepend("a")),
    "the pre-tokenizer Whitespace": split_first(pre_tokenizers.Whitespace()),
    "the pre-tokenizer WhitespaceSplit": split_first(pre_tokenizers.Digits(), pre_tokenizers.WhitespaceSplit()),
    "the pre-tokenizer BertPreTokenizer": split_first(pre_tokenizers.BertPreTokenizer()),
    "the pre-tokenizer Metaspace": split_first(pre_tokenizers.Metaspace()),
    "the pre-tokenizer CharDelimiterSplit": split_first(pre_tokenizers.CharDelimiterSplit("a")),
    "the pre-tokenizer Split that removes": split_first(pre_tokenizers.Split(" ", "removed")),
    "the pre-tokenizer Punctuation that removes": split_first(
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed")])
    ),
    "the pre-tokenizer ByteLevel": split_first(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "the added token 'x' with lstrip": added("x", lstrip=True),
    "the added token 'y' with rstrip": added("y", rstrip=True),
    "the added token 'é', which has the id of other bytes": added("é"),
    "dropout 0.5, which makes ids random": changed(lambda values: values["model"].update(dropout=0.5)),
    "continuing_subword_prefix '##'": changed(
        lambda values: values["model"].update(continuing_subword_prefix="##", merges=[])
    ),
    "end_of_word_suffix '</w>'": changed(lambda values: values["model"].update(end_of_word_suffix="</w>", merges=[])),
}


@pytest.mark.parametrize("option", LOSSES)
def test_an_option_that_loses_text_is_refused_by_name(tmp_path, option):
    LOSSES[option]().save(str(tmp_path / FILE_NAME))
    with pytest.raises(DataError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / FILE_NAME} has {option}") and "\n" not in str(caught.value)


def test_tokenizer_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot write the tokenizer"):
        Tokenizer.byte_level().save(tmp_path / "missing" / FILE_NAME)


def test_byte_alphabet_is_gpt2s():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_alphabet()[ord("A")] == "A" and byte_alphabet()[ord(" ")] == "Ġ" and byte_alphabet()[10] == "Ċ"


def test_time_to_encode_grows_with_the_text_and_not_with_its_square():
    line = "the loss went down, step after step\n"
    tokenizer = Tokenizer.word_level(line)
    seconds = {}
    for lines in (8_000, 64_000):  # 290 KB, the shipped corpus's size, and 8 times that
        text = line * lines
        seconds[lines] = min(timed(lambda text=text: tokenizer.encode(text)) for _ in range(2))
    assert seconds[64_000] < 4 * 8 * seconds[8_000]  # a quadratic algorithm takes 8 * 8 times as long


def timed(work):
    """Return the CPU seconds of this thread, which other processes do not change."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def test_text_without_a_cut_comes_in_one_piece_in_linear_time():
    text = "x" * 3_000_000
    assert [*cut_at_words(slices(text))] == [text]
    assert len(Tokenizer.byte_level().encode(text)) == len(text)

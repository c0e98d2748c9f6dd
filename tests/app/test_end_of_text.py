"""A continuation ends before the token that ends a document, alone and in a batch."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from gpt2core.app.inference.continuations import continue_prompts, text_pieces
from gpt2core.architecture import GPT2Config
from gpt2core.model import initial_parameters
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.text.tokenizer import END_OF_TEXT, Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(vocab_size=257, block_size=8, n_layer=1, n_head=2, n_embd=16)


@pytest.fixture
def tokenizer(tmp_path):
    """Bytes, and one more token, END_OF_TEXT, with the id 256."""
    library = Library.from_str(Tokenizer.byte_level().library.to_str())
    library.add_special_tokens([END_OF_TEXT])
    library.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.load(tmp_path)
    assert (found.end_of_text, Tokenizer.byte_level().end_of_text) == (256, None)
    return found


def chooser(*tokens):
    """A sampling rule that chooses these tokens, one after another."""
    following = iter(tokens)
    return lambda logits: next(following)


@pytest.mark.parametrize("tokens, text", [((97, 98, 256, 99), "ab"), ((256, 97), ""), ((97, 98, 99), "abc")])
def test_a_continuation_ends_before_the_token(tokenizer, tokens, text):
    model = load_model(CONFIG, dict(initial_parameters(CONFIG, 0)), NumpyBackend())
    rule = chooser(*tokens, *[120] * 9)
    assert "".join(text_pieces(model, tokenizer, [97], len(tokens), rule, None)) == text
    prompts, rules = [np.array([97]), np.array([98, 97])], [chooser(*tokens, *[120] * 9), chooser(*[100] * 9)]
    texts, new = continue_prompts(model, tokenizer, prompts, len(tokens), rules, None)
    assert texts == [text, "d" * len(tokens)] and new == len(text) + len(tokens)

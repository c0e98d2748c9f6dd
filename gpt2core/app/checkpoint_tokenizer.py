"""The tokenizer of a checkpoint: read it, and check that the ids of another one have the same meaning."""

from gpt2core.app.shipped import CORPUS
from gpt2core.errors import ConfigError, DataError
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import FILE_NAME, Tokenizer, build_tokenizer


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

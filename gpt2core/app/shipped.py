"""The shipped corpora and weights, and the directories of OpenAI's weights."""

from pathlib import Path

from gpt2core.errors import ConfigError

# In a clone, data/ is beside the package. A plain `pip install .` copies it into the package (pyproject.toml).
INSTALLED = Path(__file__).resolve().parents[1] / "shipped"
DATA = INSTALLED if INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "data"
CORPUS, WEIGHTS = DATA / "dummy.txt", DATA / "gpt2-paper"
NANO_WEIGHTS = DATA / "gpt2-nano"
BOOK, BOOK_WEIGHTS = DATA / "moby_dick.txt", DATA / "gpt2-book"
SHIPPED = {WEIGHTS: CORPUS, NANO_WEIGHTS: CORPUS, BOOK_WEIGHTS: BOOK}  # {weights: the corpus that they were trained on}
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # directories of OpenAI's weights; they are not shipped
TOKENIZERS = {"book": BOOK_WEIGHTS / "tokenizer.json"}  # {preset: its default tokenizer}; other presets: word


def check_downloaded(path):
    """Raise ConfigError with a download command if `path`, a Path or None, is of OPENAI_NAMES and does not exist."""
    if path and path.name in OPENAI_NAMES and not path.exists():
        files = "config.json model.safetensors tokenizer.json"
        raise ConfigError(
            f"{path}: there is no such directory, and OpenAI's weights are not shipped; download them with: "
            f"hf download openai-community/{path.name} {files} --local-dir {path}"
        )


def shipped_weights(preset, stage):
    """The Path of the shipped weights of a preset, by default of paper; raises ConfigError if there are none.

    stage: the name of the stage, in which no run of this preset was found.
    """
    shipped = {"paper": WEIGHTS, "book": BOOK_WEIGHTS, "nano": NANO_WEIGHTS}
    if (preset or "paper") not in shipped:
        raise ConfigError(
            f"{stage} has no run of preset {preset}, and its weights are not shipped: train this preset first, or "
            f"choose one of {', '.join(shipped)}"
        )
    return shipped[preset or "paper"]

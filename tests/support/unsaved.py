"""Most tests of train_gpt2.py need no checkpoint: add --no-save to a command line that does not say where to save."""

SAVING = {"--out", "--save", "--no-save", "--dry-run"}


def unsaved(words):
    """The arguments of train_gpt2.py, with --no-save unless one of them is in SAVING."""
    words = [*words]
    return words if SAVING & {str(word).partition("=")[0] for word in words} else [*words, "--no-save"]

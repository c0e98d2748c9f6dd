"""The mistakes a user can mend: each is one sentence on standard error and exit code 2, never a traceback."""


class UserError(Exception):
    """Raised at the border, with a message that names both values and says what to do; the command line exits 2."""

    shared = False  # whether every rank raises it at the same place: then the root alone tells it, and all just end


class ConfigError(UserError):
    """An option, a shape or a combination of options that cannot work."""


class DataError(UserError):
    """A corpus, a token file, a prompt or a tokenizer that cannot be used."""


class DeviceMemoryError(MemoryError):
    """The device has no room for what was asked; the message says what would fit. Any rank may meet it alone."""


class CheckpointError(UserError):
    """A checkpoint that is missing, truncated, corrupted or of another model, or that cannot be written."""


class Diverged(UserError):
    """The loss or the gradient is not finite, or replicas differ; the parameters are those before the step."""

    shared = True  # all ranks have the same numbers, so all raise it


def counted(count, noun):
    """A number with its noun: 1 rank, 2 ranks, 3 micro-batches."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"

"""How the copy of the parameters in bf16 is rounded: to nearest, or stochastically with a key of each step."""

import numpy as np

from gpt2core.errors import ConfigError


def rounding_key(seed, step):
    """(1) int64: the key of one step's random numbers for stochastic rounding."""
    return np.random.SeedSequence((seed, step)).generate_state(1, np.uint64).view(np.int64)


def check_rounding(rounding, backend):
    """Raise ConfigError for an unknown `rounding`, or if it is stochastic and this backend cannot round so."""
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"`rounding={rounding}` is unknown: use nearest or stochastic")
    if rounding == "stochastic" and not backend.rounds_stochastically:
        raise ConfigError(
            f"`rounding=stochastic` applies to the bf16 copy of the parameters, and `precision={backend.precision}` "
            f"has no such copy in this stage: use `precision=bf16` in stage 2 or 3, or `rounding=nearest`"
        )

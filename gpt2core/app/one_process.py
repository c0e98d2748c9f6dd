"""Refuse, in a stage that is one process, a launcher of several processes and the flags for many ranks.

The argument `stage` is the name of the stage that a message advises to use: it has many ranks, and the same kind of
device.
"""

from gpt2core.app.setting_fields import flag, names_of
from gpt2core.app.settings import RANKS, TrainSettings
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import shared_error
from gpt2core.parallel.launcher_env import read_launcher_env


def check_one_process(world, stage):
    """Raise ConfigError if a launcher started several processes of a stage that is one process.

    These processes cannot communicate, so each raises the error.
    """
    variable, count, process_number = read_launcher_env()
    if world.one_process and count > 1:
        raise ConfigError(
            f"rank {process_number}: {count} processes were started ({variable}), but this stage is one process, "
            f"so each would do all of the work: use {stage}, or start it without a launcher. If each process is a run "
            f"of its own, remove {variable} from its environment"
        )


def check_rank_flags(world, args, stage):
    """Raise ConfigError if this stage is one process and a setting of the group RANKS is given."""
    for name in names_of(TrainSettings, group=RANKS, stage=None):  # with `stage`, another function checks it
        if getattr(args, name) is not None:
            check_many_ranks(world, name, getattr(args, name), stage)


def check_many_ranks(world, name, value, stage):
    """Raise ConfigError if this stage is one process: the flag `name`, given with `value`, is only for many ranks."""
    if world.one_process:
        given = f"{flag(name)} {value}"
        if isinstance(value, bool):
            given = flag(name) if value else flag(f"no_{name}")
        raise shared_error(ConfigError(f"{given} is for many ranks, and this stage is one process: use {stage}"))

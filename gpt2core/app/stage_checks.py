"""Checks of a stage: refuse flags that it does not have, and a launcher of several processes if it is one process."""

from gpt2core.app.settings.definitions import RANKS, TrainSettings
from gpt2core.app.settings.setting_fields import flag, names_of
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import shared_error
from gpt2core.parallel.launcher_env import read_launcher_env


def check_one_process(stage, world):
    """Raise ConfigError if a launcher started several processes of a stage that is one process.

    These processes cannot communicate, so each raises the error.
    """
    variable, count, process_number = read_launcher_env()
    if world.one_process and count > 1:
        raise ConfigError(
            f"rank {process_number}: {count} processes were started ({variable}), but this stage is one process, "
            f"so each would do all of the work: use {stage.many_ranks}, or start it without a launcher. If each "
            f"process is a run of its own, remove {variable} from its environment"
        )


def check_rank_flags(stage, world, args):
    """Raise ConfigError if a setting of the group RANKS is given that this stage does not have."""
    for name in names_of(TrainSettings, group=RANKS, stage=None):
        if getattr(args, name) is not None:
            check_many_ranks(stage, world, name, getattr(args, name))
    check_transport(stage, args)


def check_many_ranks(stage, world, name, value):
    """Raise ConfigError if this stage is one process: the flag `name`, given with `value`, is only for many ranks."""
    if world.one_process:
        given = f"{flag(name)} {value}"
        if isinstance(value, bool):
            given = flag(name) if value else flag(f"no_{name}")
        text = f"{given} is for many ranks, and this stage is one process: use {stage.many_ranks}"
        raise shared_error(ConfigError(text))


def check_transport(stage, args):
    """Raise ConfigError if --transport is given and this stage has no transports."""
    if args.transport is not None and not stage.has_transports:
        text = f"--transport {args.transport}: only stage 3 (one GPU for each rank) has transports; omit the flag"
        raise shared_error(ConfigError(text))

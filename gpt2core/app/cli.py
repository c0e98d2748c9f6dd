"""train() and infer(), the commands that a stage's train_gpt2.py and inference.py call, and their parsers.

The flags are the settings of settings/definitions.py.
"""

import gpt2core
from gpt2core.app.command import run_command
from gpt2core.app.inference.inference_command import inference_command
from gpt2core.app.rank_agreement import agree_on_start
from gpt2core.app.settings.config_file import with_config_file
from gpt2core.app.settings.definitions import InferenceSettings, TrainSettings
from gpt2core.app.settings.flag_parser import HelpPrinted, Parser
from gpt2core.app.settings.setting_fields import add_flags
from gpt2core.app.stage import Stage


class SettingsParser(Parser):
    """The parser with the flags of a class of settings; parse_args() returns an object of this class.

    Settings that are not given can be in the file of --config, if the class has this setting.
    """

    def __init__(self, settings):
        super().__init__(settings.summary, settings.examples)
        self.settings = settings
        self.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
        add_flags(self, settings)

    def parse_args(self, arguments=None):
        return with_config_file(self.settings(**vars(super().parse_args(arguments))))


def train_parser():
    """The parser of train_gpt2.py."""
    return SettingsParser(TrainSettings)


def inference_parser():
    """The parser of inference.py."""
    return SettingsParser(InferenceSettings)


def train(stage, backend, world, argv=None):
    """The command of a stage's train_gpt2.py: parse the flags, train, exit.

    stage, backend, world: the number and the classes of a Stage. argv: a list of command-line arguments; None:
    sys.argv[1:].
    """
    # here, because inference.py starts faster without them
    from gpt2core.app.planning.dry_run import dry_run
    from gpt2core.app.training.command import train_command

    stage = Stage(stage, backend, world)

    def command(ranks):
        args, cores = parse(train_parser(), ranks, argv)
        return (dry_run if args.dry_run else train_command)(stage, ranks, args, cores)

    run_command(world, command, TrainSettings.memory_advice)


def infer(stage, backend, world, argv=None):
    """The command of a stage's inference.py: parse the flags, generate, exit. The arguments are those of train()."""

    stage = Stage(stage, backend, world)

    def command(ranks):
        return inference_command(stage, ranks, *parse(inference_parser(), ranks, argv))

    run_command(world, command, InferenceSettings.memory_advice)


def parse(parser, world, argv):
    """(parsed flags, number of cores for this rank); raises HelpPrinted after --help.

    All ranks must call it. Raises ConfigError unless the flags are equal on all ranks.
    """
    parser.is_root = world.is_root

    def parse_args():
        try:
            return parser.parse_args(argv)
        except HelpPrinted:
            return None

    args, cores = agree_on_start(world, parse_args)
    if args is None:
        raise HelpPrinted
    return args, cores

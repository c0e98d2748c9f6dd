"""train() and evaluate(): training with the settings of the command, and the loss of a model on a text."""

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import threadpoolctl

from gpt2core.app.output.run_log import RunLog
from gpt2core.app.rank_agreement import agree_on_start
from gpt2core.app.settings.config_file import with_config_file
from gpt2core.app.settings.definitions import InferenceSettings, TrainSettings
from gpt2core.app.settings.setting_fields import complete
from gpt2core.app.stop_signals import StopSignals
from gpt2core.app.training.command import prepared_run, run_steps
from gpt2core.data import Windows
from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.evaluation import mean_loss
from gpt2core.parallel.whole_parameters import named_parameters
from gpt2core.text.token_file import load_tokens
from gpt2core.trainer import Step
from staged_gpt2.arguments import checked, python_errors, warn
from staged_gpt2.gpt2 import GPT2
from staged_gpt2.loss_plot import LossPlot
from staged_gpt2.stages import chosen_stage, stage_of

OF_THE_COMMAND = {  # {setting: what a program does instead}
    "sample": "call run.model.generate()",
    "sample_every": "call run.model.generate() after training",
    "dry_run": "use the command, `python -m stage0_serial.train_gpt2`",
    "schedule_picture": "use the command, `mpirun -n 2 python -m stage1_mpi.train_gpt2`",
}


@dataclass(frozen=True)
class Run:
    """The result of train().

    model: the trained GPT2. steps: the Step of each step that this call made, with its loss, gradient norm, learning
    rate and time. validation: [(number of the step, loss)]. interrupted: whether Ctrl-C ended the training early.
    """

    model: GPT2
    steps: list[Step]
    validation: list[tuple[int, float]]
    interrupted: bool

    @property
    def losses(self) -> list[float]:
        """The loss of each step: the mean cross-entropy of its batch before the update, in nats per token."""
        return [step.loss for step in self.steps]

    def __repr__(self):
        last = f", last loss {self.losses[-1]:.4f}" if self.steps else ""
        return f"Run({counted(len(self.steps), 'step')}{last}{', interrupted' * self.interrupted})"


class QuietLog(RunLog):
    """A RunLog that prints nothing, except a progress bar if `progress`; notes are warnings."""

    def __init__(self, *arguments, progress):
        self.hides_bar = not progress
        super().__init__(*arguments)

    def print(self, text):
        pass

    def print_error(self, text):
        warn(text)


class Recorder:
    """Records the steps on each rank, and calls on_step on the root. An error of on_step ends training after a step.

    signals: the StopSignals of this rank, through which all ranks end training together.
    """

    def __init__(self, on_step, signals):
        self.on_step, self.signals = on_step, signals
        self.steps, self.validation, self.error = [], [], None

    def __call__(self, step, validation_loss):
        self.steps.append(step)
        if validation_loss is not None:
            self.validation.append((step.step, validation_loss))
        if self.on_step and not self.error:
            try:
                self.on_step(step)
            except BaseException as error:
                self.error, self.signals.received = error, signal.SIGINT


def train(
    data: str | Path | None = None, *, stage: int | str = "auto", on_step: Callable[[Step], object] | None = None,
    progress: bool = False, **settings,
) -> Run:  # fmt: skip
    """Train a model on a text, as the command train_gpt2.py does, and return the Run.

    data: a UTF-8 text file, or the output of data/prepare.py; None: the corpus of the preset. stage: see
    GPT2.from_pretrained. on_step: called with the Step after each step, of several ranks only on the first one; a
    LossPlot draws the losses in a notebook.
    progress: show a progress bar. settings: those of the command by their names, such as preset="tiny", steps=100,
    batch_size=8, init_from="data/gpt2-book", out="out/mine" (docs/USAGE.md lists all). The losses are those of the
    command with the same settings. Nothing is saved without `out`, or save=True, which saves to a new folder of out/.

    Ctrl-C (in a notebook: interrupt) ends training after the current step and returns the run so far; a second one
    raises KeyboardInterrupt at once. Of several ranks, all must call this function with equal settings.

    Raises ConfigError for a setting that is unknown, of a wrong type or out of range, DataError for a text that cannot
    be used, CheckpointError for files of a checkpoint, Diverged if a loss is not finite, DeviceMemoryError if a GPU has
    too little memory, and any exception of on_step after training has ended.
    """
    with python_errors():
        stage = chosen_stage(stage)
        settings = checked_training(data, on_step, progress, settings)
        with threadpoolctl.threadpool_limits(1, user_api="blas"):  # restores what training changes
            recorder, stopped, arrays, corpus, config = run_training(stage_of(stage), on_step, progress, settings)
        if isinstance(on_step, LossPlot):
            on_step.draw()
        if recorder.error and not isinstance(recorder.error, KeyboardInterrupt):
            raise recorder.error
        options = complete(InferenceSettings(precision=config.precision, threads=config.threads, blas=config.blas))
        model = GPT2(stage, config.model, arrays, corpus.tokenizer, options)
        return Run(model, recorder.steps, recorder.validation, bool(stopped))


def run_training(stage, on_step, progress, settings):
    """(Recorder, number of the signal that ended training or None, {name: array} of the parameters, Corpus, RunConfig).

    stage: a Stage. settings: TrainSettings. The other arguments are those of train(). All ranks must call it.
    """
    world = stage.world()
    settings, cores = agree_on_start(world, lambda: settings)
    signals = StopSignals(prints=False, numbers=(signal.SIGINT,))
    recorder = Recorder(on_step if world.is_root else None, signals)
    make_log = functools.partial(QuietLog, progress=progress)
    with prepared_run(stage, world, settings, cores, make_log, recorder) as outputs:
        for note in outputs.notes if world.is_root else ():
            warn(note)
        try:
            stopped, _ = run_steps(outputs, signals)
        finally:
            signals.restore()  # also that of a signal that has ended training on another rank
        return recorder, stopped, named_parameters(outputs.trainer), outputs.corpus, outputs.config


def checked_training(data, on_step, progress, settings):
    """The TrainSettings of the arguments of train(); raises ConfigError for one that cannot be used."""
    for name, advice in OF_THE_COMMAND.items():
        if settings.get(name) is not None:
            raise ConfigError(f"`{name}={settings[name]!r}` prints a text, which only the command does: {advice}")
    if on_step is not None and not callable(on_step):
        raise ConfigError(f"`on_step={on_step!r}` must be a function of one argument, the Step")
    if not isinstance(progress, bool):
        raise ConfigError(f"`progress={progress!r}` must be true or false")
    saves = {} if settings.get("out") else {"save": False}
    return with_config_file(checked(TrainSettings, data=data, **saves | settings))


def evaluate(model: GPT2, data: str | Path, *, batch_size: int = 16, seq_len: int | None = None) -> float:
    """The mean cross-entropy of a text, in nats per token, over all its windows of seq_len tokens.

    data: a UTF-8 text file, or the output of data/prepare.py with the model's tokenizer. batch_size: windows that are
    computed at once. seq_len: None is the model's block size. Raises ConfigError for an argument of a wrong type or out
    of range, DataError for a text that cannot be read or is too short.
    """
    if not isinstance(model, GPT2):
        raise ConfigError(f"`model={model!r:.60}` must be a GPT2: use GPT2.from_pretrained(path)")
    with python_errors():
        settings = checked(TrainSettings, data=data, batch_size=batch_size, seq_len=seq_len)
        if settings.data is None:
            raise ConfigError("`data=None` must be the path of a text")
        length, longest = settings.seq_len or model.config.block_size, model.config.block_size
        if length > longest:
            raise ConfigError(
                f"`seq_len={length}` exceeds the model's block of {longest} tokens: use `seq_len={longest}`"
            )
        tokens, _ = load_tokens(settings.data, model.tokenizer)
        return mean_loss(Windows(tokens, length), settings.batch_size, model.sum_of_losses)

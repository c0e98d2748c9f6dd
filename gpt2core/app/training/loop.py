"""The training loop of the command line: steps in flight, evaluation and checkpoints between steps, and signals."""

import math
import time
from dataclasses import KW_ONLY, dataclass

from gpt2core.errors import ConfigError, UserError
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.whole_parameters import check_finite, verify
from gpt2core.training_loop import read_batch

LOG_LOST = 255  # a rank that cannot write its log sends this to the other ranks instead of a signal number

# With its losses a rank sends 2 * (the number of a signal, LOG_LOST or 0) + (1 if a checkpoint is due by the clock of
# the root, else 0). All ranks get the largest of these numbers, so they stop and save after the same steps.


class LogLost(UserError):
    """The report of a step could not be written. No update is undone, and if `save` was given, run() has saved all."""

    def __init__(self, error, steps, shared):
        text = f"{error.filename or 'the output'}: {error.strerror or error}" if isinstance(error, OSError) else error
        super().__init__(text or "another rank could not write its log")
        self.steps, self.shared = steps, shared  # updates made; whether every rank raises this error


def run(trainer, windows, schedule, steps, **options):
    """Train until `steps` updates are made in total; returns the number of a signal that ended training early, or None.

    schedule(i) is the learning rate of step number i (from 0). options: the other fields of Loop. If on_step raises
    ConfigError or OSError, training ends as after a signal, and run() raises LogLost, or the error itself if it is
    BrokenPipeError.
    """
    loop = Loop(trainer, windows, schedule, steps, **options)
    while loop.goes_on():
        loop.step()
    return loop.finish()


@dataclass(eq=False)
class Loop:
    """What run() does, and when; the attributes of __post_init__ are its state.

    After each step, on_step(step, validation_loss, last) reports it. step: a Step; validation_loss: a number or None;
    last: whether it is the last step. save(trainer, last), if given, writes a checkpoint every `save_every` steps,
    after the first step that ends `save_seconds` or more after the last save or the start, by the clock of rank 0, and
    at the end, where `last` is true. If a parameter is not finite, Diverged is raised instead of saving. The
    `validation` windows are evaluated every `eval_every` steps and at the end. The replicas of the parameters are
    compared every `verify_every` steps and at the end. An interval of 0 means only at the end. sample(trainer) is
    called every `sample_every` steps, but not at the end; 0: never. received_signal() is the number of the signal that
    this rank has received, or 0.
    """

    trainer: object
    windows: object
    schedule: object
    steps: int
    _: KW_ONLY
    on_step: object
    validation: object = None
    eval_every: int = 0
    save: object = None
    save_every: int = 0
    save_seconds: float = math.inf
    verify_every: int = 0
    sample: object = None
    sample_every: int = 0
    received_signal: object = lambda: 0

    def __post_init__(self):
        self.intervals = {"verify": self.verify_every}  # steps between two pauses of a kind; 0: only at the end
        if self.validation is not None:
            self.intervals["evaluate"] = self.eval_every
        if self.save is not None:
            self.intervals["save"] = self.save_every
        if self.sample_every:
            self.intervals["sample"] = self.sample_every
        if self.save is None or not self.trainer.world.is_root:
            self.save_seconds = math.inf  # the root's clock decides
        self.last_save = time.monotonic()
        self.save_is_due = False  # by the clock of the root; equal on all ranks
        self.batch = None  # the batch that was read last; it may be that of the newest step in flight
        self.stopping = 0  # the number of a signal, LOG_LOST, or 0; equal on all ranks
        self.log_error = None  # the first error of on_step on this rank

    def goes_on(self):
        return self.trainer.steps < self.steps and (self.trainer.in_flight or not self.stopping)

    def step(self):
        """Wait for the oldest step in flight, which is begun now unless it was before, and report it."""
        trainer = self.trainer
        if not trainer.in_flight:
            self.begin(self.batch or read_batch(trainer, self.windows))
        # while the device works:
        self.batch = read_batch(trainer, self.windows, ahead=1) if trainer.steps + 1 < self.steps else None
        if trainer.overlaps and not self.pauses_after_next():
            self.begin(self.batch)
        oldest = trainer.in_flight[0]
        late = time.monotonic() - self.last_save >= self.save_seconds
        step = oldest.result(2 * (LOG_LOST if self.log_error else self.received_signal()) + late)
        stopping, save_is_due = divmod(oldest.request, 2)
        self.stopping, self.save_is_due = stopping or self.stopping, self.save_is_due or bool(save_is_due)
        last = not self.goes_on()
        if self.due("verify", last):
            verify(trainer)
        self.report(step, evaluate(trainer, self.validation) if self.due("evaluate", last) else None, last)
        if self.due("save", last) and not last:
            self.save_checkpoint(last=False)
        if self.due("sample", last) and not last:
            self.sample(self.trainer)

    def begin(self, batch):
        """Begin the step after the steps in flight, with this batch."""
        self.trainer.begin(batch, self.schedule(self.trainer.steps + len(self.trainer.in_flight)))

    def pauses_after_next(self):
        """Whether training ends after the next result, or the parameters are compared, evaluated or saved then."""
        steps = self.trainer.steps + 1
        if self.stopping or self.save_is_due:
            return True
        return steps >= self.steps or any(n and steps % n == 0 for n in self.intervals.values())

    def due(self, kind, last):
        every = self.intervals.get(kind)
        if kind == "save" and self.save_is_due and not self.trainer.in_flight:
            return True
        return every is not None and (last or (every > 0 and self.trainer.steps % every == 0))

    def report(self, *arguments):
        try:
            self.on_step(*arguments)  # also after log_error: on_step may call collectives, which need all ranks
        except (ConfigError, OSError) as error:
            self.log_error = self.log_error or error

    def save_checkpoint(self, last):
        check_finite(self.trainer)
        self.save(self.trainer, last)
        self.last_save, self.save_is_due = time.monotonic(), False

    def finish(self):
        """Save, and raise the error of a log that was lost; return the number of a signal, or None."""
        if self.save is not None:
            self.save_checkpoint(last=True)
        if isinstance(self.log_error, BrokenPipeError):  # the program that reads the output has closed the pipe
            raise self.log_error
        if self.log_error or self.stopping == LOG_LOST:
            raise LogLost(self.log_error, self.trainer.steps, shared=self.stopping == LOG_LOST)
        return self.stopping or None

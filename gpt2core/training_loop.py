"""The training loop: steps, evaluation and checkpoints between them, and the ways in which training ends."""

from gpt2core.errors import ConfigError, UserError
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.whole_parameters import check_finite, verify

LOG_LOST = 255  # in place of a signal's number: the log cannot be written


class LogLost(UserError):
    """The report of a step could not be written; all updates are kept, and saved if `save` is given."""

    def __init__(self, error, steps, shared):
        text = f"{error.filename or 'the output'}: {error.strerror or error}" if isinstance(error, OSError) else error
        super().__init__(text or "another rank could not write its log")
        self.steps, self.shared = steps, shared  # shared: every rank raises it


def run(
    trainer, windows, schedule, steps, *, on_step, validation=None, eval_every=0, save=None, save_every=0,
    verify_every=0, received_signal=lambda: 0,
):  # fmt: skip
    """Train until `steps` updates are made in total; returns the number of a signal that ended training early, or None.

    schedule(step) is the learning rate of step number `step` (from 0). on_step(step, validation loss or None, last)
    reports each step. save(trainer), if given, writes a checkpoint every `save_every` steps and at the end, if all
    parameters are finite. `validation` windows are evaluated every `eval_every` steps and at the end; the replicas are
    compared every `verify_every` steps and at the end. If on_step raises ConfigError or OSError, the run ends as after
    a signal and raises LogLost (or BrokenPipeError). received_signal(): the signal that this rank received, or 0.
    """

    def due(every, last):
        return last or (every and trainer.steps % every == 0)

    pauses = [verify_every, eval_every if validation is not None else 0, save_every if save else 0]

    def begin(batch):
        """Begin the step after those in flight, with this batch."""
        return trainer.begin(batch, schedule(trainer.steps + len(trainer.in_flight)))

    def works_ahead():
        """Whether the next step may begin before the result of this one is read: nothing is to be done between them."""
        after = trainer.steps + 1
        pause = stopping or after >= steps or any(every and after % every == 0 for every in pauses)
        return trainer.overlaps and not pause

    def report(*arguments):
        nonlocal lost
        try:
            on_step(*arguments)  # also after a failure: on_step may call collectives for the last line
        except (ConfigError, OSError) as error:
            lost = lost or error

    def save_finite():
        check_finite(trainer)
        save(trainer)

    stopping, lost, batch = 0, None, None
    while trainer.steps < steps and (trainer.in_flight or not stopping):
        if not trainer.in_flight:
            begin(batch or read_batch(trainer, windows))
        batch = read_batch(trainer, windows, ahead=1) if trainer.steps + 1 < steps else None  # while the device works
        if works_ahead():
            begin(batch)
        step = trainer.in_flight[0].result(LOG_LOST if lost else received_signal())
        stopping = trainer.stopped_by or stopping  # the same on every rank: all end with the same step
        last = trainer.steps >= steps or bool(stopping) and not trainer.in_flight
        if due(verify_every, last):
            verify(trainer)
        validate = validation is not None and due(eval_every, last)
        report(step, evaluate(trainer, validation) if validate else None, last)
        if save and save_every and trainer.steps % save_every == 0 and not last:
            save_finite()
    if save:
        save_finite()
    if isinstance(lost, BrokenPipeError):  # the reader of the output has closed the pipe
        raise lost
    if lost or stopping == LOG_LOST:
        raise LogLost(lost, trainer.steps, shared=stopping == LOG_LOST)
    return stopping or None


def read_batch(trainer, windows, ahead=0):
    """This rank's batch of the step that is `ahead` steps after the next step of `trainer`."""
    position = trainer.position + ahead * trainer.batch_size
    rows = trainer.rows
    return trainer.prepare(*windows.batch(position + rows.start, rows.stop - rows.start))

"""The training loop: it runs the steps, evaluates and saves between them, and ends after the last step or a signal."""

from gpt2core.errors import ConfigError, UserError
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.whole_parameters import check_finite, verify

LOG_LOST = 255  # a rank that cannot write its log sends this to the other ranks instead of a signal number


class LogLost(UserError):
    """The report of a step could not be written. No update is undone, and if `save` was given, run() has saved all."""

    def __init__(self, error, steps, shared):
        text = f"{error.filename or 'the output'}: {error.strerror or error}" if isinstance(error, OSError) else error
        super().__init__(text or "another rank could not write its log")
        self.steps, self.shared = steps, shared  # updates made; whether every rank raises this error


def run(
    trainer, windows, schedule, steps, *, on_step, validation=None, eval_every=0, save=None, save_every=0,
    verify_every=0, received_signal=lambda: 0,
):  # fmt: skip
    """Train until `steps` updates are made in total; returns the number of a signal that ended training early, or None.

    schedule(i) is the learning rate of step number i (from 0). After each step, run() calls on_step(step,
    validation_loss, last), which reports the step. step: a Step; validation_loss: a number or None; last: whether it
    is the last step. save(trainer), if given, writes a checkpoint every `save_every` steps and at the end; if a
    parameter is not finite, Diverged is raised instead of saving. The `validation` windows are evaluated every
    `eval_every` steps and at the end. The replicas of the parameters are compared every `verify_every` steps and at the
    end. An interval of 0 means only at the end.

    received_signal() is the number of the signal that this rank has received, or 0. If on_step raises ConfigError or
    OSError, training ends as after a signal, and run() raises LogLost, or the error itself if it is BrokenPipeError.
    """

    def due(every, last):
        return last or (every and trainer.steps % every == 0)

    # the interval of each pause, in steps; 0: there is none before the end
    intervals = [verify_every, eval_every if validation is not None else 0, save_every if save else 0]

    def begin(batch):
        """Begin the next step, which follows the steps in flight, with this batch."""
        return trainer.begin(batch, schedule(trainer.steps + len(trainer.in_flight)))

    def may_begin_next():
        """Whether the next step may begin before the result of this step is read.

        It may not if training ends after this step, or if the parameters are compared, evaluated or saved then.
        """
        steps_after = trainer.steps + 1  # the number of updates after this step
        pause = stopping or steps_after >= steps or any(every and steps_after % every == 0 for every in intervals)
        return trainer.overlaps and not pause

    def report(*arguments):
        nonlocal log_error
        try:
            on_step(*arguments)  # also after log_error: on_step may call collectives, which need all ranks
        except (ConfigError, OSError) as error:
            log_error = log_error or error

    def save_finite():
        check_finite(trainer)
        save(trainer)

    stopping, log_error, batch = 0, None, None  # stopping: the number of a signal, LOG_LOST, or 0
    while trainer.steps < steps and (trainer.in_flight or not stopping):
        if not trainer.in_flight:
            begin(batch or read_batch(trainer, windows))
        batch = read_batch(trainer, windows, ahead=1) if trainer.steps + 1 < steps else None  # while the device works
        if may_begin_next():
            begin(batch)
        step = trainer.in_flight[0].result(LOG_LOST if log_error else received_signal())
        stopping = trainer.stopped_by or stopping  # equal on all ranks, so all ranks end with the same step
        last = trainer.steps >= steps or (bool(stopping) and not trainer.in_flight)
        if due(verify_every, last):
            verify(trainer)
        validate = validation is not None and due(eval_every, last)
        report(step, evaluate(trainer, validation) if validate else None, last)
        if save and save_every and trainer.steps % save_every == 0 and not last:
            save_finite()
    if save:
        save_finite()
    if isinstance(log_error, BrokenPipeError):  # the program that reads the output has closed the pipe
        raise log_error
    if log_error or stopping == LOG_LOST:
        raise LogLost(log_error, trainer.steps, shared=stopping == LOG_LOST)
    return stopping or None


def read_batch(trainer, windows, ahead=0):
    """The batch of this rank, from Trainer.prepare(), for step number trainer.steps + ahead (from 0)."""
    position = trainer.position + ahead * trainer.batch_size
    rows = trainer.rows
    return trainer.prepare(*windows.batch(position + rows.start, rows.stop - rows.start))

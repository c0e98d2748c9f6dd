"""The only training loop: step after step, what comes between two of them, and the ways in which it ends."""

from gpt2core.errors import ConfigError, UserError

LOG_LOST = 255  # in the place of a signal's number


class LogLost(UserError):
    """What reports the steps could not be written; the steps until then are made, and saved if the others are."""

    def __init__(self, error, steps, shared):
        text = f"{error.filename or 'the output'}: {error.strerror or error}" if isinstance(error, OSError) else error
        super().__init__(text or "another rank could not write its log")
        self.steps, self.shared = steps, shared  # shared: all ranks know, and raise it too


def run(
    trainer, windows, schedule, steps, *, on_step, validation=None, eval_every=0, save=None, save_every=0,
    verify_every=0, received_signal=lambda: 0,
):  # fmt: skip
    """Train until `steps` updates are made in all; returns the number of the signal that stopped it early, or None.

    on_step(step, validation loss or None, last) reports each step; save(trainer) writes a checkpoint, always at the
    end where it is given, never of parameters that have diverged. `validation` windows are evaluated every `eval_every`
    steps and at the end; the ranks' parameters are compared every `verify_every` steps and at the end. Where on_step
    cannot write what it has to, the run ends as at a signal, and then with LogLost. received_signal() is the number of
    the signal that this rank has received, or 0.
    """

    def due(every, last):
        return last or (every and trainer.steps % every == 0)

    pauses = [verify_every, eval_every if validation is not None else 0, save_every if save else 0]

    def rates():
        """Of the next step, and of the one behind it if nothing is to be done between the two."""
        after = trainer.steps + 1
        pause = stopping or after >= steps or any(every and after % every == 0 for every in pauses)
        return [schedule(step) for step in range(trainer.steps, after + (not pause))]

    def save_sound():
        trainer.check_parameters()
        save(trainer)

    def report(*arguments):
        nonlocal lost
        try:
            on_step(*arguments)  # also when something was lost before: all ranks take part in what the last line says
        except (ConfigError, OSError) as error:
            lost = lost or error

    stopping, lost = 0, None
    trainer.asked_to_stop = lambda: LOG_LOST if lost else received_signal()
    while trainer.steps < steps and (trainer.under_way or not stopping):
        step = trainer.step(windows, *rates())
        stopping = trainer.stopped_by or stopping  # the same on every rank: all end with the same step
        last = trainer.steps >= steps or bool(stopping) and not trainer.under_way
        if due(verify_every, last):
            trainer.verify()
        validate = validation is not None and due(eval_every, last)
        report(step, trainer.evaluate(validation) if validate else None, last)
        if save and save_every and trainer.steps % save_every == 0 and not last:
            save_sound()
    if save:
        save_sound()
    if isinstance(lost, BrokenPipeError):  # there is nobody to tell
        raise lost
    if lost or stopping == LOG_LOST:
        raise LogLost(lost, trainer.steps, shared=stopping == LOG_LOST)
    return stopping or None

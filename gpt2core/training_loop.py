"""The training loop in its simplest form. That of the commands, app/training/loop.py, also saves and obeys signals."""


def run(trainer, windows, schedule, steps, on_step=print):
    """Train until `steps` updates are made in total; return the Step of each.

    trainer: a Trainer. windows: the Windows of the training text. schedule(i) is the learning rate of step number i
    (from 0). on_step(step) is called after each step.
    """
    log = []
    while trainer.steps < steps:
        log.append(trainer.step(read_batch(trainer, windows), schedule(trainer.steps)))
        on_step(log[-1])
    return log


def read_batch(trainer, windows, ahead=0):
    """The batch of this rank for the next step, or for the step `ahead` steps after it, from Trainer.prepare()."""
    position, rows = trainer.position + ahead * trainer.batch_size, trainer.rows
    return trainer.prepare(*windows.batch(position + rows.start, rows.stop - rows.start))

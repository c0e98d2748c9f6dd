"""The validation loss of a trainer over all ranks."""

import math

from gpt2core.errors import Diverged


def evaluate(trainer, windows):
    """The mean cross-entropy, in nats per token, of all windows inside the corpus. All ranks must call this function.

    Raises Diverged if the mean is not finite, and ValueError if a step is in flight.
    """
    trainer.check_idle()
    trainer.optimizer.gather()
    rows = trainer.rows

    def sum_of_losses(inputs, targets):
        losses = trainer.accumulator.losses(inputs[rows], targets[rows], 1.0, rows.stop - rows.start)
        return trainer.mesh.total_loss(losses)[0]

    mean = mean_loss(windows, trainer.batch_size, sum_of_losses)
    if not math.isfinite(mean):
        raise Diverged(f"step {trainer.steps - 1}: the validation loss is {mean}: lower `lr` or set `clip`")
    return mean


def mean_loss(windows, batch_size, sum_of_losses):
    """The mean cross-entropy, in nats per token, of all windows inside the corpus, `batch_size` windows at a time.

    sum_of_losses(inputs, targets): the sum of the cross-entropy over all tokens of a batch, (B, T) each, as a number.
    """
    total, count = 0.0, 0
    for inputs, targets in windows.once(batch_size):
        total += sum_of_losses(inputs, targets)
        count += inputs.size
    return total / count

"""The validation loss of a trainer over all ranks."""

import math

from gpt2core.errors import Diverged
from gpt2core.parallel.losses import total_loss


def evaluate(trainer, windows):
    """The mean cross-entropy, in nats per token, of all windows inside the corpus. All ranks must call this function.

    Raises Diverged if the mean is not finite, and ValueError if a step is in flight.
    """
    trainer.check_idle()
    trainer.optimizer.gather()
    total, count, rows = 0.0, 0, trainer.rows
    for inputs, targets in windows.once(trainer.batch_size):
        losses = trainer.accumulator.losses(inputs[rows], targets[rows], 1.0, rows.stop - rows.start)
        total += total_loss(trainer, losses)[0]
        count += inputs.size
    if not math.isfinite(total):
        raise Diverged(f"step {trainer.steps - 1}: the validation loss is {total / count}: lower `lr` or set `clip`")
    return total / count

"""PendingStep, a training step that a FastTrainer has launched.

If the device replays a captured step (a CUDA graph), the host launches step n + 1 before it reads the loss of step n.
Then the device does not wait for the host between two steps:

    device   | step n      | step n + 1               | step n + 2
    host     | begin n + 1 | result of n, begin n + 2 | ...
"""

import time


class PendingStep:
    """A launched training step; result() waits for it.

    trainer: its FastTrainer. batch: from prepare(). lr: learning rate. number: the number of the update, from 1.
    results: the runtime.Results of its last launch. sent: the bytes that this rank has sent for it. repeats: how often
    it was launched again (fp16). request: after result(), the largest request of all ranks, or 0.
    """

    def __init__(self, trainer, batch, lr, number):
        self.trainer, self.batch, self.lr, self.number = trainer, batch, lr, number
        self.began, self.results = time.perf_counter(), None
        self.sent, self.repeats, self.request = 0, 0, 0

    def result(self, request=0):
        """Return the Step, or raise Diverged: see FastTrainer.finish_step().

        request: a whole number that this rank sends with its losses: what the loop shall do after the step, or 0.
        """
        return self.trainer.finish_step(self, request)

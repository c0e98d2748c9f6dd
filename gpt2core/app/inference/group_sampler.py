"""Sampling for several ranks that generate one sequence together: every rank must continue with the same token."""

import numpy as np


class GroupSampler:
    """A sampling rule for a group: it averages the logits of all ranks, samples, and returns the root's token.

    All ranks compute the same logits, possibly with other rounding errors. choose: this rank's sampling rule
    (sampler.py), logits (V) -> token; every rank calls it.
    """

    def __init__(self, choose, group):
        self.choose, self.group = choose, group

    def __call__(self, logits):
        mean = self.group.all_reduce(logits) / self.group.size
        return int(self.group.broadcast(np.array([self.choose(mean)]))[0])

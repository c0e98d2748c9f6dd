"""Sampling by several ranks that decode the same prompt: every rank must continue with the same token."""

import numpy as np


class GroupSampler:
    """One token for all ranks of a group: average the ranks' logits, sample on the root, broadcast the token."""

    def __init__(self, choose, group):
        self.choose, self.group = choose, group

    def __call__(self, logits):
        mean = self.group.all_reduce(logits) / self.group.size
        return int(self.group.broadcast(np.array([self.choose(mean)]))[0])

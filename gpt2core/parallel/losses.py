"""The loss of the global batch, from the losses of all ranks."""

import numpy as np

from gpt2core.tree_sum import tree_sum


def total_loss(trainer, losses, signal=0):
    """Return (the sum of all ranks' losses in the canonical order, the largest signal number), as Python numbers.

    The ranks of a tensor-parallel group have equal losses, so only the losses of its first rank are added. In a
    pipeline, only the last rank has losses.
    """
    own, mesh = np.array([signal, *losses], np.float64), trainer.mesh
    gathered = trainer.world.all_gather(own).reshape(mesh.pipeline.size, mesh.data.size, mesh.tensor.size, len(own))
    return tree_sum([float(loss) for loss in gathered[-1, :, 0, 1:].ravel()]), int(gathered[..., 0].max())

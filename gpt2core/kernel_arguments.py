"""Arguments of kernels of a Backend that only a faster backend, or a faster trainer, reads or passes."""

from typing import NamedTuple


class ParameterCopy(NamedTuple):
    """A copy of parameters in compute_dtype, which adamw_step writes: rounded to nearest, or stochastically with a key.

    offset: the index of the first parameter in the arena, which selects the random numbers.
    """

    array: object
    key: object = None  # (1) int64 on the host, from rounding_key() of parallel/divided/rounding.py
    offset: int = 0


class Guard(NamedTuple):
    """What Backend.clip reads and updates on the device, so that later steps need no answer of the host.

    stop: an array (1), initially 0. The first norm that is not finite sets it to NaN, and then every later factor is
    NaN. Or loss_scale, interval: `state` and `interval` of a LossScale (engine/loss_scale.py). The norm is divided by
    the loss scale before clipping, the factor after clipping, and the state is updated.
    """

    stop: object = None
    loss_scale: object = None
    interval: int = 0


class HeadGradient(NamedTuple):
    """What unembed_cross_entropy_forward must know to compute the gradients before backward() is called.

    scale: that of the loss. vocabulary: the number of tokens of all ranks, because the gradients need the maximum and
    the sum of a whole row. dloss: the array of shape () with which backward() will be called. It is 1, except in fp16,
    where it scales the loss: a kernel multiplies by it before it rounds the gradients to fp16.
    """

    scale: float
    vocabulary: int
    dloss: object

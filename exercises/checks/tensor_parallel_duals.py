"""Checks of exercise 1.5: the dual operations in float64, and a model that is divided over 2 ranks."""

import numpy as np

from exercises.checks.common import CURVE, losses, on_ranks, random
from exercises.compare import Mismatch, expect
from gpt2core.communicator import Solo
from gpt2core.parallel.config import ParallelConfig
from gpt2core.tensor import Tensor
from stage0_serial.numpy_backend import NumpyBackend

FP64 = 1e-12  # relative norm: a few roundings of 1e-16


def through(operation, xs, dys):
    """[(forward, backward) of the student's operation on each rank] for the inputs xs and output gradients dys."""

    def run(comm):
        x = Tensor(xs[comm.rank].copy(), NumpyBackend("fp64"), requires_grad=True)
        y = operation(x, comm)
        if not isinstance(y, Tensor) or not y.requires_grad:
            raise Mismatch("the result is not a Tensor with a gradient", "Return Tensor.from_op(y, (x,), backward).")
        data = np.array(y.data)
        if data.shape == dys[comm.rank].shape:
            y.backward(dys[comm.rank].copy())
        return data, x.grad

    return on_ranks(len(xs), run)


def arrays(p, *shape, seed=0):
    return [random(seed + rank).standard_normal(shape) for rank in range(p)]


def copy_to_group():
    from gpt2core.ops import copy_to_group

    x, dys = arrays(1, 3, 4)[0], arrays(3, 3, 4, seed=10)
    for rank, (y, dx) in enumerate(through(copy_to_group, [x] * 3, dys)):
        wrong = [(3 * x, "The forward pass adds the ranks' x: it must return x, which is equal on all ranks.")]
        expect(f"copy_to_group(x) on rank {rank}", y, x, FP64, wrong, "the forward pass of copy_to_group")
        wrong = [
            (dys[rank], "The gradient of rank r is only its own dy: backward must add the gradients of all ranks."),
            (np.mean(dys, axis=0), "The gradients are averaged: backward must add them."),
        ]
        expect(
            f"the gradient on rank {rank}", dx, np.sum(dys, axis=0), FP64, wrong, "the backward pass of copy_to_group"
        )


def reduce_from_group():
    from gpt2core.ops import reduce_from_group

    xs, dy = arrays(3, 3, 4), arrays(1, 3, 4, seed=10)[0]
    for rank, (y, dx) in enumerate(through(reduce_from_group, xs, [dy] * 3)):
        wrong = [
            (xs[rank], "The result of rank r is only its own x: the forward pass must add the x of all ranks."),
            (np.mean(xs, axis=0), "The inputs are averaged: the forward pass must add them."),
        ]
        expect(
            f"reduce_from_group(x) on rank {rank}",
            y,
            np.sum(xs, axis=0),
            FP64,
            wrong,
            "the forward pass of reduce_from_group",
        )
        wrong = [(3 * dy, "backward adds the gradients of the ranks: dy is equal on all ranks, so return dy.")]
        expect(f"the gradient on rank {rank}", dx, dy, FP64, wrong, "the backward pass of reduce_from_group")


def gather_from_group():
    from gpt2core.ops import gather_from_group

    gather_columns_of(4, 12, gather_from_group)
    gather_columns_of(4, 10, lambda x, group: gather_from_group(x, group, 10))  # rank 2 has 2 columns


def gather_columns_of(K, total, gather):
    """Check gather(x, group) on 3 ranks, whose columns are K, K and total - 2 K of y (2, 5, total)."""
    want, dy = random(0).standard_normal((2, 5, total)), random(10).standard_normal((2, 5, total))
    edges = [slice(K * rank, min(K * (rank + 1), total)) for rank in range(3)]
    xs = [want[..., own] for own in edges]
    even = total == 3 * K
    for rank, (y, dx) in enumerate(through(gather, xs, [dy] * 3)):
        wrong = [(np.concatenate(xs[::-1], axis=-1), "The ranks are in reverse order.")]
        if even:
            mixed = "The ranks' columns are mixed: all_gather joins along axis 0, so swap the axes of ranks and rows."
            wrong.append((np.concatenate(xs).reshape(want.shape), mixed))
        what = "x" if even else f"x of {' + '.join(str(x.shape[-1]) for x in xs)} columns"
        name = f"gather_from_group({what}) on rank {rank}"
        expect(name, y, want, FP64, wrong, "the forward pass of gather_from_group")
        own = dy[..., edges[rank]]
        wrong = [
            (dy[..., edges[0]], "Every rank returns the columns of rank 0: use group.rank."),
            (3 * own, "backward adds the gradients of the ranks: dy is equal on all ranks, so take its columns."),
            (dy[..., rank::3], "The columns are taken with a stride: a rank has neighbouring columns."),
        ]
        expect(f"the gradient on rank {rank}", dx, own, FP64, wrong, "the backward pass of gather_from_group")


def tensor_parallel_model():
    want = losses(Solo(), NumpyBackend())
    parallel = ParallelConfig(tp=2)
    for rank, got in enumerate(on_ranks(2, lambda world: losses(world, NumpyBackend(), parallel))):
        look = "the backward passes: an all-reduce is missing or superfluous in copy_to_group or reduce_from_group"
        expect(f"on rank {rank}, the loss of step 0 to 2", got[:, 0], want[:, 0], CURVE, look=look)
        expect(f"on rank {rank}, the gradient norm of step 0 to 2", got[:, 1], want[:, 1], 10 * CURVE, look=look)

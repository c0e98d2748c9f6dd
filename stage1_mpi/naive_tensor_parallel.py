"""Naive tensor parallelism: all ranks gather the input and the output of a projection. Megatron's scheme sends less.

This file needs only NumPy and an mpi4py communicator. The example is fc_o, the output projection of attention. The
heads are divided over mp_size ranks, so on each rank the input of fc_o is x (batch, seq, in_dim / mp_size), the
features of its own heads. If the weight is divided by columns, w (in_dim, out_dim / mp_size), a rank needs the features
of all ranks to compute x @ w, and then the columns of all ranks for the output (d x is the gradient of x):

    forward    x -> naive_collect_forward_input -> @ w -> naive_collect_forward_output -> out, complete on every rank
    backward   d out -> naive_collect_backward_output -> @ w.T -> naive_collect_backward_x -> d x, own features

Megatron-LM (Shoeybi et al. 2019, section 3) divides the same weight by rows, w (in_dim / mp_size, out_dim). Then x @ w
needs no gather, and one all-reduce of the result replaces the two all-gathers of forward and the reduce-scatter of
backward. So the output of fc_o is collected in one of two ways, and the shape of `out` shows which one is right:

    columns of w   out (batch, seq, out_dim / p) is a part of the columns      naive_collect_forward_output_gather
    rows of w      out (batch, seq, out_dim) is a term of the sum over ranks   naive_collect_forward_output_sum

tests/stage1/test_naive_tensor_parallel.py trains both, checks that the numbers agree, and counts the bytes.
"""
# A replica of the model has p = mp_size ranks (model-parallel index mp_idx); there are dp_size replicas (index dp_idx).
# rank = dp_idx * p + mp_idx

import numpy as np

COLUMNS = ("fc_q", "fc_k", "fc_v")  # projections whose output dimension is divided
ROWS = ("fc_o",)  # projections whose input dimension is divided by get_info(), as in Megatron-LM
MPI_TYPES = "bBhHiIlLqQfdFD"  # NumPy's dtype.char of the types that every MPI library has; float16 is not one of them


def split_data(x, y, mp_size, dp_size, rank):
    """Return this rank's part of the samples x and labels y: axis 0 is divided into dp_size equal parts.

    All ranks of a replica get the same part, number rank // mp_size. Raises ValueError if x and y differ in length, or
    if dp_size does not divide the length.
    """
    check_rank(rank, mp_size, dp_size)
    x, y = with_axes(x, "x"), with_axes(y, "y")
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} samples, but y has {len(y)}")
    rows = divide("the number of samples,", len(x), "dp_size", dp_size)
    block = slice(rank // mp_size * rows, (rank // mp_size + 1) * rows)
    return np.ascontiguousarray(x[block]), np.ascontiguousarray(y[block])


def get_info(comm, rank, mp_size, dp_size, fc_layer, in_dim, out_dim):
    """Return (mp_idx, dp_idx, mp_comm, dp_comm, part_in_dim, part_out_dim) of this rank for the projection `fc_layer`.

    mp_comm contains the ranks of this replica; dp_comm contains the ranks with the same mp_idx, one of each replica.
    part_in_dim, part_out_dim: the shape of this rank's weight. "fc_q", "fc_k" and "fc_v" divide out_dim by mp_size,
    "fc_o" divides in_dim. This is Megatron's division by rows; the naive scheme above divides fc_o by columns instead.
    All ranks of `comm` must call this function. Raises ValueError if the sizes do not fit the communicator, if mp_size
    does not divide the dimension, or for an unknown layer.
    """
    if comm.Get_size() != mp_size * dp_size:
        raise ValueError(f"mp_size {mp_size} x dp_size {dp_size} is not the communicator's size {comm.Get_size()}")
    check_rank(rank, mp_size, dp_size)
    if fc_layer in COLUMNS:
        out_dim = divide(f"the output dimension of {fc_layer},", out_dim, "mp_size", mp_size)
    elif fc_layer in ROWS:
        in_dim = divide(f"the input dimension of {fc_layer},", in_dim, "mp_size", mp_size)
    else:
        raise ValueError(f"unknown layer {fc_layer!r}: choose one of {', '.join(COLUMNS + ROWS)}")
    mp_idx, dp_idx = rank % mp_size, rank // mp_size
    mp_comm = comm.Split(color=dp_idx, key=mp_idx)
    dp_comm = comm.Split(color=mp_idx, key=dp_idx)
    return mp_idx, dp_idx, mp_comm, dp_comm, in_dim, out_dim


# -- forward -----------------------------------------------------------------------------------------------------------


def naive_collect_forward_input(x, mp_comm, mp_size):
    """All-gather of x (batch, seq, part_in_dim) along the last axis -> (batch, seq, part_in_dim * mp_size)."""
    return all_gather(x, mp_comm, mp_size)


def naive_collect_forward_output_gather(out, mp_comm, mp_size):
    """All-gather of out (batch, seq, part_out_dim) along the last axis -> (batch, seq, part_out_dim * mp_size).

    For a weight that is divided by columns: each rank has some columns of the output, and they are complete.
    """
    return all_gather(out, mp_comm, mp_size)


def naive_collect_forward_output_sum(out, mp_comm, mp_size):
    """All-reduce sum of out (batch, seq, out_dim) -> the same shape.

    For a weight that is divided by rows: each rank has all columns, each with the terms of its own rows only. An
    all-gather would give mp_size times too many columns, and none of them would be complete.
    """
    return all_reduce(out, mp_comm, mp_size)


naive_collect_forward_output = naive_collect_forward_output_gather  # the form for the columns in the figure above


# -- backward: the dual operations, in reverse order -------------------------------------------------------------------


def naive_collect_backward_output(output_grad, mp_group_idx, mp_size):
    """This rank's columns of output_grad (batch, seq, out_dim) -> (batch, seq, out_dim / mp_size).

    Nothing is collected or sent, because every rank has the whole output_grad. The name of the function and of
    mp_group_idx, which is this rank's mp_idx, are those of a course assignment (CSE 234, UC San Diego).
    """
    grad = with_axes(output_grad, "output_grad")
    if mp_group_idx not in range(mp_size):
        raise ValueError(f"mp_group_idx {mp_group_idx} is not in a group of {mp_size}")
    part = divide("the last axis of output_grad,", grad.shape[-1], "mp_size", mp_size)
    return np.array(grad[..., mp_group_idx * part : (mp_group_idx + 1) * part], order="C")


def naive_collect_backward_x(grad_x, mp_comm, mp_size):
    """Reduce-scatter of grad_x (batch, seq, in_dim) along the last axis -> (batch, seq, in_dim / mp_size)."""
    grad = with_axes(grad_x, "grad_x")
    check_group(mp_comm, mp_size)
    part = divide("the last axis of grad_x,", grad.shape[-1], "mp_size", mp_size)
    parts = grad.reshape(*grad.shape[:-1], mp_size, part)
    return reduce_scatter(np.ascontiguousarray(np.moveaxis(parts, -2, 0)), mp_comm)  # (p, batch, seq, part)


# -- three collectives on arrays ---------------------------------------------------------------------------------------


def all_gather(x, comm, p):
    """Concatenate the x of all p ranks, which must have equal shapes, along the last axis."""
    x = np.ascontiguousarray(with_axes(x, "the array"))
    check_group(comm, p)
    gathered = np.empty((p, *x.shape), x.dtype)
    comm.Allgather(as_mpi_type(x), as_mpi_type(gathered))
    return np.concatenate(gathered, axis=-1, dtype=x.dtype)


def all_reduce(x, comm, p):
    """The sum over p ranks of x, equal in shape; every rank gets the same bits."""
    x = np.ascontiguousarray(with_axes(x, "the array"))
    check_group(comm, p)
    total = np.empty_like(x)
    if mpi_has_type(x.dtype):
        comm.Allreduce(x, total)
        return total
    check_summable(x.dtype)
    gathered = np.empty((p, *x.shape), x.dtype)
    comm.Allgather(as_mpi_type(x), as_mpi_type(gathered))
    return wide_sum(gathered)


def reduce_scatter(parts, comm):
    """parts (p, ...) -> (...): on rank r the sum of parts[r] over all ranks."""
    names = ("Reduce_scatter_block", "Reduce_scatter") if mpi_has_type(parts.dtype) else ()
    method = next((getattr(comm, name) for name in names if hasattr(comm, name)), None)
    if method:
        own_sum = np.empty(parts.shape[1:], parts.dtype)
        method(parts, own_sum)
        return own_sum
    check_summable(parts.dtype)  # MPI cannot add this type: send the parts by all-to-all and add them here
    received = np.empty_like(parts)
    comm.Alltoall(as_mpi_type(parts), as_mpi_type(received))
    return wide_sum(received)


def wide_sum(parts):
    """The sum of parts (p, ...) over axis 0: floats are added in at least float32 and rounded once."""
    # NumPy's kind "V" includes bfloat16 of the package ml_dtypes
    sum_dtype = np.promote_types(parts.dtype, np.float32) if parts.dtype.kind in "fV" else parts.dtype
    return parts.astype(sum_dtype).sum(axis=0, dtype=sum_dtype).astype(parts.dtype)


def mpi_has_type(dtype):
    """Whether every MPI library can send and add arrays of this dtype."""
    return dtype.isnative and dtype.char in MPI_TYPES


def as_mpi_type(array):
    """The array itself, or a view of its bytes if MPI lacks its dtype; raises ValueError for Python objects."""
    if array.dtype.hasobject:
        raise ValueError(f"an array of {array.dtype} cannot be sent")
    return array if mpi_has_type(array.dtype) else array.view(np.uint8)


def check_summable(dtype):
    if dtype.kind not in "iufcV":
        raise ValueError(f"an array of {dtype} cannot be summed over ranks")


# -- arguments ---------------------------------------------------------------------------------------------------------


def with_axes(x, name):
    """x as an array; raises ValueError if it has no axis."""
    x = np.asarray(x)
    if not x.ndim:
        raise ValueError(f"{name} has shape {x.shape}: it needs at least one axis to divide")
    return x


def divide(what, size, divisor_name, divisor):
    """size // divisor; raises ValueError, with both names, if the division has a remainder."""
    if divisor < 1 or size % divisor:
        raise ValueError(f"{what} {size}, is not divisible by {divisor_name} {divisor}")
    return size // divisor


def check_rank(rank, mp_size, dp_size):
    if mp_size < 1 or dp_size < 1 or rank not in range(mp_size * dp_size):
        raise ValueError(f"rank {rank} is not in a grid of mp_size {mp_size} x dp_size {dp_size}")


def check_group(comm, p):
    if comm.Get_size() != p:
        raise ValueError(f"mp_size {p} is not the communicator's size {comm.Get_size()}")

"""The Communicator protocol: collectives and messages of a group of ranks. Solo is the group of one rank.

Communicators are passed as arguments. A group of one is Solo(), so no caller tests the number of ranks.
"""
# p ranks in a group. In shapes, rows is the length of a part of axis 0, and ... are the other axes.

import pickle
import sys

import numpy as np

from gpt2core.errors import ConfigError

REDUCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class CommunicatorError(RuntimeError):
    """The group failed: its ranks made different calls, a rank ended, or a rank waited longer than the timeout."""


class Handle:
    """A pending operation. wait() completes it and returns the result; a second wait() returns the same result.

    progress() transfers what can be transferred now, and does not wait. A rank that computes calls it from time to time
    for a message: an MPI library may transfer data only inside its own functions.
    """

    def __init__(self, result=None):
        self._result = result

    def wait(self):
        return self._result

    def progress(self):
        pass


class Communicator:
    """The protocol. An implementation defines the `_start` forms, `barrier` and `split`; the other methods call them.

    x, the input, is a NumPy array, or a CuPy array if the implementation accepts these too. A `_start` method returns a
    Handle; "Handle of y" means that the wait() of this Handle returns y.

    Order      All ranks of a group start the same collectives in the same order, with equal dtypes and shapes.
               Several operations may be pending, and their handles may be waited for in any order. Two threads of a
               rank must not call a communicator at the same time.
    Ownership  Between the `_start` call and the return of wait(), do not write to x or out, and do not read out.
               The operation leaves x unchanged unless x shares memory with out. x may be non-contiguous.
    Result     A new array, or `out` if given: a C-contiguous array of the result's shape and dtype. `out` may be x or
               share its memory (all_reduce(x, out=x) needs no second buffer). A group of one returns x itself; pass a
               separate `out` if you change x or the result later.
    Sum        In x's dtype, elementwise, in the canonical order: a fixed binary tree over the ranks
               (tree_sum.py). An implementation may offer a faster order; use_collectives() selects it.
    bytes_sent Bytes that this rank has sent through this communicator, without those of groups split from it. The
               number is computed by the textbook formula of the algorithm that is used.
    Errors     ConfigError for an invalid argument, CommunicatorError for a group that failed.
    """

    rank: int
    size: int
    bytes_sent: int
    local_rank: int  # rank among the ranks of this group on the same host
    local_size: int  # number of ranks of this group on the same host, which share its cores
    one_process = False  # whether this class always has exactly one rank
    native_algorithm = "canonical"  # the name by which use_collectives() selects the sums of the library (MPI, NCCL)
    capturable = True  # whether calls on device arrays can be captured in a CUDA graph

    @property
    def is_root(self):
        """Whether this is rank 0, which reads, logs, saves and prints for all ranks."""
        return self.rank == 0

    def use_collectives(self, name):
        """Select the algorithm of all later sums in this group, and in groups that are split from it later.

        Raises ConfigError for an unknown name. Every implementation has "canonical".
        """
        if name != "canonical":
            raise ConfigError(f"`collectives={name}`: this communicator has only canonical; omit the flag")

    def use_transport(self, name):
        """Select the transport of device arrays; name None selects the best one available. Returns its name.

        All ranks call this method before they allocate device memory, because it also binds each rank to its device.
        Raises ConfigError for an unknown or unavailable transport. A class without transports returns None, as here.
        """
        if name is not None:
            raise ConfigError(f"`transport={name}`: this communicator has no transports; omit the flag")

    def plan_transport(self, name):
        """use_transport() for a plan of training, which needs no device: the best transport if each rank has one."""
        return self.use_transport(name)

    def sent(self, call, size, rank):
        """The bytes by which bytes_sent of rank `rank` of a group of `size` ranks grows in a call.

        call: an object with the name of the method (`name`), the elements of x and their bytes (`elements`,
        `itemsize`), the root of a broadcast (`root`), and whether x is in host memory (`on_host`). The groups are those
        that are split from this one, with its algorithm.
        """
        return textbook_bytes(call.name, call.elements * call.itemsize, size, rank == call.root)

    def abort(self, code):
        """End all ranks of the job immediately with this exit code; does not return."""
        raise NotImplementedError

    def all_reduce_start(self, x, op="sum", out=None):
        """Handle of the elementwise "sum", "min" or "max" of all ranks' x, equal on every rank; x (...) -> (...)."""
        raise NotImplementedError

    def all_gather_start(self, x, out=None):
        """Handle of all ranks' x, concatenated along axis 0 in rank order; x (rows, ...) -> (p * rows, ...)."""
        raise NotImplementedError

    def reduce_scatter_start(self, x, op="sum", out=None):
        """Handle of all_reduce(x)[rank * rows : (rank + 1) * rows], bitwise equal if canonical; x (p * rows, ...)."""
        raise NotImplementedError

    def all_to_all_start(self, x, out=None):
        """Handle of every rank's x[rank * rows : (rank + 1) * rows], concatenated in rank order; x (p * rows, ...)."""
        raise NotImplementedError

    def broadcast_start(self, x, root=0, out=None):
        """Handle of root's x. The other ranks' x gives only shape and dtype; broadcast(x, out=x) receives into x."""
        raise NotImplementedError

    def send_start(self, x, to, tag=0):
        """Handle of a send; wait() may block until rank `to` receives. Messages with the same tag keep their order."""
        raise NotImplementedError

    def recv_start(self, out, source, tag=0):
        """Handle of the next message of rank `source` with `tag`, received into `out` of equal shape and dtype."""
        raise NotImplementedError

    def barrier(self):
        """Return after every rank has called it."""
        raise NotImplementedError

    def split(self, color, key=0):
        """A communicator of the ranks with the same color (int >= 0), ordered by (key, rank); None if color is None."""
        raise NotImplementedError

    def all_reduce(self, x, op="sum", out=None):
        return self.all_reduce_start(x, op, out).wait()

    def all_gather(self, x, out=None):
        return self.all_gather_start(x, out).wait()

    def reduce_scatter(self, x, op="sum", out=None):
        return self.reduce_scatter_start(x, op, out).wait()

    def all_to_all(self, x, out=None):
        return self.all_to_all_start(x, out).wait()

    def broadcast(self, x, root=0, out=None):
        return self.broadcast_start(x, root, out).wait()

    def send(self, x, to, tag=0):
        return self.send_start(x, to, tag).wait()

    def recv(self, out, source, tag=0):
        return self.recv_start(out, source, tag).wait()

    def broadcast_object(self, obj, root=0):
        """A copy of root's `obj`, which must be picklable; other ranks' `obj` is ignored."""
        payload = np.frombuffer(pickle.dumps(obj if self.rank == root else None), np.uint8)
        length = self.broadcast(np.array([payload.size], np.int64), root)
        return pickle.loads(self.broadcast(np.resize(payload, length), root))

    def all_gather_object(self, obj):
        """A list of copies of all ranks' `obj`, which must be picklable, in rank order."""
        payload = np.frombuffer(pickle.dumps(obj), np.uint8)
        lengths = self.all_gather(np.array([payload.size], np.int64))
        padded = self.all_gather(np.resize(payload, lengths.max())).reshape(self.size, -1)
        return [pickle.loads(row[:length]) for row, length in zip(padded, lengths, strict=True)]

    def check_rank(self, rank, role):
        """Raise ConfigError unless `rank` is a rank of this group; `role` ("root", "to", "source"): the argument."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"{role} {rank} is not a rank of a group of {self.size}: choose 0 to {self.size - 1}")

    def check_peer(self, peer, role):
        """Raise ConfigError unless `peer` is another rank of this group; `role` as in check_rank."""
        self.check_rank(peer, role)
        if peer == self.rank:
            raise ConfigError(f"{role} {peer} is rank {self.rank} itself: a message needs two different ranks")


def textbook_bytes(call, nbytes, size, is_root=True):
    """The bytes that a rank of a group of `size` sends in a collective or message whose input x has `nbytes`.

    Every algorithm with as few bytes as possible sends so many. is_root: whether this rank is the root of a broadcast.
    """
    p = size
    return {
        "all_reduce": 2 * (p - 1) * nbytes // p,
        "reduce_scatter": (p - 1) * nbytes // p,
        "all_to_all": (p - 1) * nbytes // p,
        "all_gather": (p - 1) * nbytes,
        "broadcast": (p - 1) * nbytes * is_root,
        "send": nbytes,
    }[call]


def check_op(op):
    """The NumPy function of `op`; raises ConfigError for an unknown `op`."""
    if op not in REDUCTIONS:
        raise ConfigError(f"unknown reduction {op!r}: choose one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[op]


def check_out(out, shape, dtype):
    """Raise ConfigError unless `out` is None or C-contiguous with this shape and dtype."""
    if out is not None and (out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous):
        order = "C-contiguous" if out.flags.c_contiguous else "non-contiguous"
        given, wanted = f"{out.dtype} {out.shape} {order}", f"{dtype} {shape} C-contiguous"
        raise ConfigError(f"out is {given}, but the result is {wanted}: pass an out of that form")


def rows_per_part(x, parts=1):
    """The length of each of `parts` equal parts of axis 0; raises ConfigError if `parts` does not divide axis 0."""
    if not x.shape:
        raise ConfigError("a 0-dimensional array has no axis 0 to gather or divide: reshape it to (1,)")
    if x.shape[0] % parts:
        padded = x.shape[0] + -x.shape[0] % parts
        raise ConfigError(f"axis 0 of length {x.shape[0]} is not divisible by {parts} ranks: pad it to {padded}")
    return x.shape[0] // parts


def address(array):
    """The memory address of the first element of a NumPy or CuPy array."""
    return (getattr(array, "__cuda_array_interface__", None) or array.__array_interface__)["data"][0]


class Solo(Communicator):
    """The group of one: every collective returns x itself, of any array type, or copies x to `out`."""

    rank, size, bytes_sent, local_rank, local_size = 0, 1, 0, 0, 1
    one_process = True

    def use_collectives(self, name):
        pass  # a group of one adds nothing

    def abort(self, code):
        sys.exit(code)

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        if out is None or out is x:
            return Handle(x)
        if not (x.flags.c_contiguous and address(x) == address(out)):  # equal addresses: out shares the memory of x
            out[...] = x
        return Handle(out)

    def all_gather_start(self, x, out=None):
        rows_per_part(x)
        return self.all_reduce_start(x, out=out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        rows_per_part(x)
        return self.all_reduce_start(x, op, out)

    def all_to_all_start(self, x, out=None):
        return self.all_gather_start(x, out)

    def broadcast_start(self, x, root=0, out=None):
        self.check_rank(root, "root")
        return self.all_reduce_start(x, out=out)

    def send_start(self, x, to, tag=0):
        self.check_peer(to, "to")

    def recv_start(self, out, source, tag=0):
        self.check_peer(source, "source")

    def barrier(self):
        pass

    def split(self, color, key=0):
        return None if color is None else Solo()


SOLO = Solo()  # for default arguments

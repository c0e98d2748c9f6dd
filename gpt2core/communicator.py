"""How ranks talk: one protocol, the group of one (Solo), and the dp x tp x pp grid of groups (Mesh).

Communicators are passed as arguments, and a group of one is Solo(): no caller ever asks how many ranks there are.
"""
# p ranks in a group; a row is one index of axis 0

import pickle
import sys

import numpy as np

from gpt2core.errors import ConfigError

REDUCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class CommunicatorError(RuntimeError):
    """The group cannot go on: ranks called different things, a rank ended, or nobody came within the timeout."""


class Handle:
    """A call under way. wait() completes it and returns its result, and returns the same when called again."""

    def __init__(self, result=None):
        self._result = result

    def wait(self):
        return self._result


class Communicator:
    """The protocol: a runtime writes the `_start` forms, `barrier` and `split`; the rest follows from these.

    x is an array of the runtime's own kind; a runtime whose kind is not NumPy's also writes the two object calls.

    Order      All ranks of a group start the same collectives in the same order, with equal dtypes and shapes.
               Several may be under way, and handles may be waited for in any order. One thread a rank at a time.
    Ownership  Until wait() returns, x and out are lent to the communicator: write neither, do not read out. The moment
               it returns, as when a blocking call returns, x is the caller's again, and unchanged unless `out` shares
               its memory. x may be non-contiguous.
    Result     A new array, or `out` filled and returned: a C-contiguous array of the result's shape and dtype, which
               may be x or share its memory (all_reduce(x, out=x) needs no second buffer). A group of one returns
               x itself: whoever then overwrites x or the result passes an `out` of its own.
    Sum        In x's dtype, elementwise, in the canonical tree over ranks (gpt2core.parallel.tree_sum). A runtime that
               offers a faster order too must be asked for it.
    bytes_sent What this rank handed to others through this communicator (not its sub-groups), by the textbook volume
               of the algorithm used.
    Errors     ConfigError for an argument that cannot work, CommunicatorError for a group that cannot go on.
    """

    rank: int
    size: int
    bytes_sent: int
    local_rank: int  # among the ranks of this group on the same host
    local_size: int  # how many those are: they share its cores
    one_process = False  # whether this can never be the world of more than one rank
    native = "canonical"  # what use_collectives() calls the library's own sums, which are the fastest where it has any
    recordable = True  # whether its calls on arrays of a device may be recorded along with the kernels around them
    shares_updates = False  # whether ZeRO-1 is what a run takes, where no flag says otherwise
    times_buckets = False  # whether the least size of a bucket is measured, where no flag says it: see bucket_size.py

    @property
    def is_root(self):
        """Whether this is the one rank that reads, logs, saves and prints for all."""
        return self.rank == 0

    def use_collectives(self, name):
        """Sum by the algorithm called `name` from here on, in this group and those split from it later.

        Raises ConfigError for a name that this runtime does not know; every one knows "canonical".
        """
        if name != "canonical":
            raise ConfigError(f"--collectives {name} is unknown here: these ranks sum in the canonical order alone")

    def use_transport(self, name):
        """Move the arrays of devices by the way called `name`, None for the best there is; returns the one chosen.

        All ranks call it, before anything is put on a device: where each rank has one, this is what binds it. Raises
        ConfigError where there is no such way.
        """
        if name is not None:
            raise ConfigError(f"--transport {name} has no meaning here: it is about many GPUs, which stage 3 has")

    def abort(self, code):
        """End every rank of the job at once with this exit code; does not return."""
        raise NotImplementedError

    def all_reduce_start(self, x, op="sum", out=None):
        """Handle of the elementwise "sum", "min" or "max" over ranks, the same on every rank; x (...) -> (...)."""
        raise NotImplementedError

    def all_gather_start(self, x, out=None):
        """Handle of all ranks' x along axis 0 in rank order; x (rows, ...) -> (p * rows, ...)."""
        raise NotImplementedError

    def reduce_scatter_start(self, x, op="sum", out=None):
        """Handle of part `rank` of all_reduce(x), bit for bit; x (p * rows, ...) -> (rows, ...)."""
        raise NotImplementedError

    def all_to_all_start(self, x, out=None):
        """Handle of part `rank` of every rank's x, in rank order; x (p * rows, ...) -> (p * rows, ...)."""
        raise NotImplementedError

    def broadcast_start(self, x, root=0, out=None):
        """Handle of root's x; on other ranks x gives shape and dtype only, so broadcast(x, out=x) receives in place."""
        raise NotImplementedError

    def send_start(self, x, to, tag=0):
        """Handle of a message; it may not complete before rank `to` receives it. Messages of a tag keep their order."""
        raise NotImplementedError

    def recv_start(self, out, source, tag=0):
        """Handle of the next message of `tag` from rank `source`, put into `out`, which has its shape and dtype."""
        raise NotImplementedError

    def barrier(self):
        """Return when every rank has come here."""
        raise NotImplementedError

    def split(self, color, key=0):
        """A communicator of the ranks with the same color (int >= 0), ordered by (key, rank); None for color None."""
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
        """Root's `obj`, anything that pickles, as a copy of one's own; other ranks pass anything, or None."""
        payload = np.frombuffer(pickle.dumps(obj if self.rank == root else None), np.uint8)
        length = self.broadcast(np.array([payload.size], np.int64), root)
        return pickle.loads(self.broadcast(np.resize(payload, length), root))

    def all_gather_object(self, obj):
        """List of every rank's `obj`, anything that pickles, as copies of one's own."""
        payload = np.frombuffer(pickle.dumps(obj), np.uint8)
        lengths = self.all_gather(np.array([payload.size], np.int64))
        padded = self.all_gather(np.resize(payload, lengths.max())).reshape(self.size, -1)
        return [pickle.loads(row[:length]) for row, length in zip(padded, lengths, strict=True)]


def check_op(op):
    """The NumPy function of `op`; ConfigError when there is none."""
    if op not in REDUCTIONS:
        raise ConfigError(f"unknown reduction {op!r}: choose one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[op]


def check_rank(rank, size, role):
    """ConfigError unless `rank`, named by its role ("root", "to", "source"), is in a group of `size`."""
    if not 0 <= rank < size:
        raise ConfigError(f"{role} {rank} is not a rank of a group of {size}: choose 0 to {size - 1}")


def check_peer(peer, me, size, role):
    """ConfigError unless `peer` is another rank of a group of `size`."""
    check_rank(peer, size, role)
    if peer == me:
        raise ConfigError(f"{role} {peer} is rank {me} itself: a message needs two ranks")


def check_out(out, shape, dtype):
    """ConfigError unless `out` is None or can take a result of `shape` and `dtype`."""
    if out is not None and (out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous):
        order = "C-contiguous" if out.flags.c_contiguous else "non-contiguous"
        raise ConfigError(f"out is {out.dtype} {out.shape} {order}, the result {dtype} {shape} C-contiguous: match it")


def rows_of(x, parts=1):
    """Rows in each of `parts` equal parts of axis 0; ConfigError unless they come out even."""
    if not x.shape:
        raise ConfigError("a 0-dimensional array has no axis 0 to gather or divide: reshape it to (1,)")
    if x.shape[0] % parts:
        padded = x.shape[0] + -x.shape[0] % parts
        raise ConfigError(f"axis 0 of length {x.shape[0]} is not divisible by {parts} ranks: pad it to {padded}")
    return x.shape[0] // parts


def address(array):
    """Where an array of the host or of a device begins."""
    return (getattr(array, "__cuda_array_interface__", None) or array.__array_interface__)["data"][0]


class Solo(Communicator):
    """The group of one: every collective is the identity, on any kind of array, and copies only into another `out`."""

    rank, size, bytes_sent, local_rank, local_size = 0, 1, 0, 0, 1
    one_process = True

    def use_collectives(self, name):
        pass  # there is nothing to sum

    def abort(self, code):
        sys.exit(code)

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        if out is None or out is x:
            return Handle(x)
        if not (x.flags.c_contiguous and address(x) == address(out)):  # else they are the same memory
            out[...] = x
        return Handle(out)

    def all_gather_start(self, x, out=None):
        rows_of(x)
        return self.all_reduce_start(x, out=out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        rows_of(x)
        return self.all_reduce_start(x, op, out)

    def all_to_all_start(self, x, out=None):
        return self.all_gather_start(x, out)

    def broadcast_start(self, x, root=0, out=None):
        check_rank(root, 1, "root")
        return self.all_reduce_start(x, out=out)

    def send_start(self, x, to, tag=0):
        check_peer(to, 0, 1, "to")

    def recv_start(self, out, source, tag=0):
        check_peer(source, 0, 1, "source")

    def barrier(self):
        pass

    def split(self, color, key=0):
        return None if color is None else Solo()

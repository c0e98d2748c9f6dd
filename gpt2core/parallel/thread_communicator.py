"""N ranks as N threads of one process, for tests and demonstrations without MPI, NCCL or a launcher.

In every operation (a collective, or a message) each rank that takes part posts a copy of its array and continues. The
rank that posts last combines the arrays. In wait(), each rank copies its own result from the combination.
"""
# p ranks in a group, n bytes of x on one rank

import collections
import threading

import numpy as np

from gpt2core.communicator import Communicator, CommunicatorError, Handle, Solo, check_op, check_out, rows_per_part
from gpt2core.errors import ConfigError
from gpt2core.tree_sum import tree_reduce


class ThreadCommunicator(Communicator):
    """One rank of a group of threads; run_ranks and split create it.

    It is stricter than MPI and NCCL in order to find mistakes in tests. It raises CommunicatorError for calls that
    differ between ranks, for a send that is never received, and if x is changed before wait(). A send completes only
    when it is received.

    bytes_sent counts the bytes of the direct algorithm, in which rank r reduces part r and sends it to the other ranks:
    all_reduce 2 (p-1)/p n (rounded down), reduce_scatter and all_to_all (p-1)/p n, all_gather (p-1) n, broadcast
    (p-1) n on root and 0 on the other ranks.
    """

    def __init__(self, rank, group):
        self.rank, self.size, self.bytes_sent = rank, len(group.members), 0
        self.local_rank, self.local_size = self.rank, self.size
        self._group, self._posted = group, collections.Counter()  # channel (see _post) -> operations posted

    def abort(self, code):
        raise SystemExit(code)  # run_ranks then ends the other ranks

    def all_reduce_start(self, x, op="sum", out=None):
        x, p, add = np.asarray(x), self.size, check_op(op)
        self.bytes_sent += 2 * (p - 1) * x.nbytes // p
        return self._collective(f"all_reduce({op})", x, lambda parts: tree_reduce(parts, add), ..., x.shape, out)

    def all_gather_start(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p * rows_per_part(x), *x.shape[1:])
        self.bytes_sent += (p - 1) * x.nbytes
        return self._collective("all_gather", x, np.concatenate, ..., shape, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        x, p, add = np.asarray(x), self.size, check_op(op)
        shape = (rows_per_part(x, p), *x.shape[1:])

        def combine(parts):
            return tree_reduce(parts, add).reshape(p, *shape)

        self.bytes_sent += (p - 1) * x.nbytes // p
        return self._collective(f"reduce_scatter({op})", x, combine, self.rank, shape, out)

    def all_to_all_start(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p, rows_per_part(x, p), *x.shape[1:])

        def combine(parts):
            return np.concatenate([part.reshape(shape) for part in parts], axis=1)  # (p, p * rows, ...)

        self.bytes_sent += (p - 1) * x.nbytes // p
        return self._collective("all_to_all", x, combine, self.rank, x.shape, out)

    def broadcast_start(self, x, root=0, out=None):
        x, p = np.asarray(x), self.size
        self.check_rank(root, "root")
        self.bytes_sent += (p - 1) * x.nbytes if self.rank == root else 0
        return self._collective(f"broadcast(root {root})", x, lambda parts: parts[root], ..., x.shape, out)

    def send_start(self, x, to, tag=0):
        x = np.asarray(x)
        self.check_peer(to, "to")
        self.bytes_sent += x.nbytes
        return self._message(self.rank, to, tag, x, np.array(x, order="C"), _nothing, original=x)

    def recv_start(self, out, source, tag=0):
        self.check_peer(source, "source")
        check_out(out, out.shape, out.dtype)
        return self._message(source, self.rank, tag, out, None, lambda parts: _copied(parts[source], out))

    def barrier(self):
        self._post("collective", range(self.size), "barrier", None, _nothing, _nothing).wait()

    def split(self, color, key=0):
        def combine(parts):
            members = collections.defaultdict(list)
            for rank in sorted(parts, key=lambda rank: (parts[rank][1], rank)):
                members[parts[rank][0]].append(self._group.members[rank])
            return {color: _Group(self._group.world, ranks) for color, ranks in members.items()}

        def take(groups):
            return None if color is None else groups[color].communicator(self._group.members[self.rank])

        return self._post("collective", range(self.size), "split", (color, key), combine, take).wait()

    def _collective(self, name, x, combine, index, shape, out):
        """Handle of combine([x of rank 0, x of rank 1, ...])[index], which has `shape`; index `...` takes all of it."""
        check_out(out, shape, x.dtype)

        def in_rank_order(parts):
            return combine([parts[rank] for rank in range(self.size)])

        def take(combined):
            return _copied(combined[index], out)

        call = f"{name} of {x.dtype} {x.shape}"
        return self._post("collective", range(self.size), call, np.array(x, order="C"), in_rank_order, take, original=x)

    def _message(self, source, to, tag, x, part, take, original=None):
        """Handle of one end of a message that has x's shape and dtype. part: a copy of x; None on the receiver."""
        ranks = f"rank {self._group.members[source]} to {self._group.members[to]}"
        call = f"message from {ranks}, tag {tag}, of {x.dtype} {x.shape}"
        return self._post((source, to, tag), (source, to), call, part, dict, take, original)

    def _post(self, channel, ranks, call, part, combine, take, original=None):
        """Post this rank's `part` of an operation between `ranks`; return its Handle without waiting for other ranks.

        channel: "collective", or (source, to, tag) of a message. The n-th operations that the ranks post in a channel
        belong together; `call` describes the operation and must be equal on all ranks. The rank that posts last
        computes combined = combine({rank: part}); take(combined) is this rank's result. `part` is a copy of the
        caller's array `original`; wait() compares the two, because the caller must not change its array before wait().
        """
        group, world, me = self._group, self._group.world, self._group.members[self.rank]
        with world.changed:
            world.check()
            number, self._posted[channel] = self._posted[channel], self._posted[channel] + 1
            members = [group.members[rank] for rank in ranks]
            operation = group.pending.setdefault((channel, number), _Operation(members, call, world.lock))
            if call != operation.call:
                calls = f"rank {min(operation.posted)} called {operation.call}, rank {me} called {call}"
                world.fail(f"{calls}: all ranks of a group must make the same calls in order")
                world.check()
            operation.posted.add(me)
            operation.parts[self.rank] = part
            is_last = len(operation.posted) == len(members)
        if is_last:  # combine outside the lock, so that other groups can continue
            operation.combined = combine(operation.parts)
            with world.changed:
                del group.pending[channel, number]
                operation.done = True
                operation.changed.notify_all()
        return _PendingOperation(world, me, operation, take, part, original)


class _PendingOperation(Handle):
    """One rank's handle of an operation."""

    def __init__(self, world, rank, operation, take, part, original):
        super().__init__()
        self._open = world, rank, operation, take, part, original

    def wait(self):
        if self._open:
            world, rank, operation, take, part, original = self._open
            world.wait_for(operation, rank)
            if original is not None and original.tobytes() != part.tobytes():
                raise CommunicatorError(f"rank {rank} overwrote x before wait() of its {operation.call}: copy it first")
            self._result, self._open = take(operation.combined), None  # frees the parts, which may be large
        return self._result


class _Operation:
    """One collective or one message: the parts posted so far, and later their combination.

    members, posted: the ranks that take part, and those that have posted, as ranks of the world. changed: a Condition
    of its own, so that the end of an operation wakes only the threads that wait for this operation.
    """

    def __init__(self, members, call, lock):
        self.members, self.call, self.posted, self.parts = members, call, set(), {}
        self.combined, self.done, self.changed = None, False, threading.Condition(lock)


class _Group:
    """State shared by the ranks of one group: its members as ranks of the world, and its pending operations."""

    def __init__(self, world, members):
        self.world, self.members, self.pending = world, members, {}

    def communicator(self, member):
        return Solo() if len(self.members) == 1 else ThreadCommunicator(self.members.index(member), self)


class _World:
    """State shared by all groups of a run_ranks() call: the lock, the operations that ranks wait for, the failure."""

    def __init__(self, size, timeout):
        self.size, self.timeout, self.lock = size, timeout, threading.RLock()
        self.changed = threading.Condition(self.lock)  # that a rank has returned or failed
        self.waiting = collections.defaultdict(list)  # rank -> operations that its threads wait for
        self.returned = set()  # ranks whose function has ended
        self.failure = None  # message of the CommunicatorError that every rank raises at its next call, or None
        self.origin = None  # (rank, exception) of the first rank that failed, which run_ranks raises, or None

    def check(self):
        if self.failure:
            raise CommunicatorError(self.failure) from (self.origin[1] if self.origin else None)

    def fail(self, message):
        with self.changed:
            self.failure = self.failure or message
            self.notify_all()

    def end(self, rank, error=None):
        """Record that rank `rank` has returned, or that it has raised `error`."""
        with self.changed:
            if error is not None:
                self.origin = self.origin or (rank, error)
                self.fail(f"rank {rank} ended with {type(error).__name__}: {error}")
            self.returned.add(rank)
            self.notify_all()

    def notify_all(self):
        """Wake run_ranks() and every thread that waits for an operation."""
        for condition in [self.changed, *(each.changed for waiting in self.waiting.values() for each in waiting)]:
            condition.notify_all()

    def wait_for(self, operation, rank):
        """Wait in rank `rank` until `operation` is done; raises CommunicatorError after a failure or the timeout."""

        def is_over():
            never_completes = self.returned.intersection(operation.members) - operation.posted
            return self.failure or operation.done or never_completes

        with self.changed:
            self.waiting[rank].append(operation)
            in_time = operation.changed.wait_for(is_over, self.timeout)
            if not (self.failure or operation.done):
                why = "a rank waits for one that has returned" if in_time else f"a rank waited for {self.timeout} s"
                self.fail(f"{why}: " + "; ".join(map(self.state_of, range(self.size))))
            self.waiting[rank].remove(operation)
            if not operation.done:  # after a failure, a finished operation still has a result; the next call raises
                self.check()

    def state_of(self, rank):
        if self.waiting[rank]:
            operation = self.waiting[rank][0]
            missing = sorted(set(operation.members) - operation.posted)
            return f"rank {rank} waits in {operation.call} for ranks {missing}"
        return f"rank {rank} has returned" if rank in self.returned else f"rank {rank} computes"


def _nothing(_):
    """The function `combine` or `take` of an operation without a result."""


def _copied(result, out):
    """`result` copied into `out`, or into a new array."""
    if out is None:
        return np.array(result)
    out[...] = result
    return out


def run_ranks(size, fn, *args, timeout=60.0):
    """Return [fn(communicator, *args) of each rank], computed by one thread for each rank.

    The first exception of a rank ends the other ranks at their current or next call in any group. run_ranks then waits
    up to `timeout` seconds for each rank that is still computing, and raises this exception with a note that names the
    rank. A rank that waits longer than `timeout` seconds, or for a rank whose function has returned, raises
    CommunicatorError. Its message lists what each rank waits for. Raises ConfigError for size < 1.
    """
    if size < 1:
        raise ConfigError(f"a group of {size} ranks cannot run: give at least 1")
    world, results = _World(size, timeout), [None] * size
    group = _Group(world, range(size))

    def run(rank):
        try:
            results[rank] = fn(group.communicator(rank), *args)
            world.end(rank)
        except BaseException as error:  # pytest's skip and fail are not Exceptions; they too must end the other ranks
            world.end(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        with world.changed:
            world.changed.wait_for(lambda: world.origin or len(world.returned) == size)
    except BaseException as error:
        world.fail(f"run_ranks was interrupted by {type(error).__name__}")
        raise
    for thread in threads:
        thread.join(timeout)
    if world.origin:
        rank, error = world.origin
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results

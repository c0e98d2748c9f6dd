"""N ranks as N threads of one process: the test double for MPI and NCCL, and a demonstration that needs no launcher.

Everything is a meeting: the ranks of a collective, or the two ends of a message, post their parts and go on; the last
to come combines the parts; each takes its own result from what was made of them.
"""
# p ranks in a group, n bytes of x on one rank

import collections
import threading

import numpy as np

from gpt2core.communicator import (
    Communicator,
    CommunicatorError,
    Handle,
    Solo,
    check_op,
    check_out,
    check_peer,
    check_rank,
    rows_of,
)
from gpt2core.errors import ConfigError
from gpt2core.parallel.tree_sum import tree_reduce


class ThreadCommunicator(Communicator):
    """One rank's end of a group of threads, made by run_ranks and by split.

    Stricter than MPI and NCCL, so that a mistake shows here first: calls that differ between ranks, a send that nobody
    receives (it completes only then), an x overwritten before wait(). bytes_sent counts what the direct algorithm hands
    over, in which rank r reduces part r and gives it to the others: all_reduce 2 (p-1)/p n (rounded down),
    reduce_scatter and all_to_all (p-1)/p n, all_gather (p-1) n, broadcast (p-1) n on root and 0 elsewhere.
    """

    def __init__(self, rank, group):
        self.rank, self.size, self.bytes_sent = rank, len(group.members), 0
        self.local_rank, self.local_size = self.rank, self.size
        self._group, self._issued = group, collections.Counter()

    def abort(self, code):
        raise SystemExit(code)  # run_ranks ends the others

    def all_reduce_start(self, x, op="sum", out=None):
        x, p, add = np.asarray(x), self.size, check_op(op)
        self.bytes_sent += 2 * (p - 1) * x.nbytes // p
        return self._collective(f"all_reduce({op})", x, lambda parts: tree_reduce(parts, add), ..., x.shape, out)

    def all_gather_start(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p * rows_of(x), *x.shape[1:])
        self.bytes_sent += (p - 1) * x.nbytes
        return self._collective("all_gather", x, np.concatenate, ..., shape, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        x, p, add = np.asarray(x), self.size, check_op(op)
        shape = (rows_of(x, p), *x.shape[1:])

        def combine(parts):
            return tree_reduce(parts, add).reshape(p, *shape)

        self.bytes_sent += (p - 1) * x.nbytes // p
        return self._collective(f"reduce_scatter({op})", x, combine, self.rank, shape, out)

    def all_to_all_start(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p, rows_of(x, p), *x.shape[1:])

        def combine(parts):
            return np.concatenate([part.reshape(shape) for part in parts], axis=1)  # (p, p * rows, ...)

        self.bytes_sent += (p - 1) * x.nbytes // p
        return self._collective("all_to_all", x, combine, self.rank, x.shape, out)

    def broadcast_start(self, x, root=0, out=None):
        x, p = np.asarray(x), self.size
        check_rank(root, p, "root")
        self.bytes_sent += (p - 1) * x.nbytes if self.rank == root else 0
        return self._collective(f"broadcast(root {root})", x, lambda parts: parts[root], ..., x.shape, out)

    def send_start(self, x, to, tag=0):
        x = np.asarray(x)
        check_peer(to, self.rank, self.size, "to")
        self.bytes_sent += x.nbytes
        return self._message(self.rank, to, tag, x, np.array(x, order="C"), lambda parts: None, lent=x)

    def recv_start(self, out, source, tag=0):
        check_peer(source, self.rank, self.size, "source")
        check_out(out, out.shape, out.dtype)
        return self._message(source, self.rank, tag, out, None, lambda parts: _deliver(parts[source], out))

    def barrier(self):
        self._meet("collective", range(self.size), "barrier", None, dict, dict).wait()

    def split(self, color, key=0):
        def combine(parts):
            members = collections.defaultdict(list)
            for rank in sorted(parts, key=lambda rank: (parts[rank][1], rank)):
                members[parts[rank][0]].append(self._group.members[rank])
            return {color: _Group(self._group.world, ranks) for color, ranks in members.items()}

        def take(groups):
            return None if color is None else groups[color].communicator(self._group.members[self.rank])

        return self._meet("collective", range(self.size), "split", (color, key), combine, take).wait()

    def _collective(self, name, x, combine, mine, shape, out):
        """Handle of combine([x of rank 0, x of rank 1, ...])[mine], which has `shape`."""
        check_out(out, shape, x.dtype)

        def in_rank_order(parts):
            return combine([parts[rank] for rank in range(self.size)])

        def take(combined):
            return _deliver(combined[mine], out)

        call = f"{name} of {x.dtype} {x.shape}"
        return self._meet("collective", range(self.size), call, np.array(x, order="C"), in_rank_order, take, lent=x)

    def _message(self, source, to, tag, x, part, take, lent=None):
        call = f"message from rank {self._group.members[source]} to {self._group.members[to]}, tag {tag}"
        return self._meet((source, to, tag), (source, to), f"{call}, of {x.dtype} {x.shape}", part, dict, take, lent)

    def _meet(self, channel, parties, call, part, combine, take, lent=None):
        """Post this rank's part of a call and go on; the last of the parties to come combines the parts of all.

        combine({rank: part}) is what the parties share from then on; take(that) is this rank's own result of it.
        `part` is a copy of `lent`, the caller's array.
        """
        group, world, me = self._group, self._group.world, self._group.members[self.rank]
        with world.changed:
            world.check()
            number, self._issued[channel] = self._issued[channel], self._issued[channel] + 1
            members = [group.members[rank] for rank in parties]
            meeting = group.meetings.setdefault((channel, number), _Meeting(members, call))
            if call != meeting.call:
                first = f"rank {min(meeting.came)} called {meeting.call}"
                world.fail(f"{first}, rank {me} called {call}: all ranks of a group must make the same calls in order")
                world.check()
            meeting.came.add(me)
            meeting.parts[self.rank] = part
            is_last = len(meeting.came) == len(members)
        if is_last:  # outside the lock: other groups go on meanwhile
            meeting.combined = combine(meeting.parts)
            with world.changed:
                del group.meetings[channel, number]
                meeting.done = True
                world.changed.notify_all()
        return _Pending(world, me, meeting, take, part, lent)


class _Pending(Handle):
    """This rank's end of a meeting."""

    def __init__(self, world, rank, meeting, take, part, lent):
        super().__init__()
        self._open = world, rank, meeting, take, part, lent

    def wait(self):
        if self._open:
            world, rank, meeting, take, part, lent = self._open
            world.wait_for(meeting, rank)
            if lent is not None and lent.tobytes() != part.tobytes():
                raise CommunicatorError(f"rank {rank} overwrote x before wait() of its {meeting.call}: copy it first")
            self._result, self._open = take(meeting.combined), None  # drops the parts: they may be large
        return self._result


class _Meeting:
    """One collective or one message: what its parties have brought so far, and then what they made of it."""

    def __init__(self, members, call):
        self.members, self.call, self.came, self.parts = members, call, set(), {}
        self.combined, self.done = None, False


class _Group:
    """What the ranks of one group share: its members as ranks of the world, and the meetings not all have come to."""

    def __init__(self, world, members):
        self.world, self.members, self.meetings = world, members, {}

    def communicator(self, member):
        return Solo() if len(self.members) == 1 else ThreadCommunicator(self.members.index(member), self)


class _World:
    """What all groups of one run_ranks share: one lock, who waits for what, and the failure that ends them all."""

    def __init__(self, size, timeout):
        self.size, self.timeout, self.changed = size, timeout, threading.Condition()
        self.waiting, self.returned = collections.defaultdict(list), set()  # a rank's threads may wait side by side
        self.failure = None  # the sentence that every rank raises from then on
        self.origin = None  # (rank, exception) that ended a rank first: what run_ranks raises

    def check(self):
        if self.failure:
            raise CommunicatorError(self.failure) from (self.origin[1] if self.origin else None)

    def fail(self, sentence):
        with self.changed:
            self.failure = self.failure or sentence
            self.changed.notify_all()

    def end(self, rank, error=None):
        """Rank `rank` has returned, or raised `error`."""
        with self.changed:
            if error is not None:
                self.origin = self.origin or (rank, error)
                self.fail(f"rank {rank} ended with {type(error).__name__}: {error}")
            self.returned.add(rank)
            self.changed.notify_all()

    def wait_for(self, meeting, rank):
        def hopeless():
            return self.returned.intersection(meeting.members) - meeting.came

        with self.changed:
            self.waiting[rank].append(meeting)
            arrived = self.changed.wait_for(lambda: self.failure or meeting.done or hopeless(), self.timeout)
            if not (self.failure or meeting.done):
                why = "a rank waits for one that has returned" if arrived else f"a rank waited for {self.timeout} s"
                self.fail(f"{why}: " + "; ".join(map(self.whereabouts, range(self.size))))
            self.waiting[rank].remove(meeting)
            if not meeting.done:  # what all have come to counts even after a failure: it is the next call that raises
                self.check()

    def whereabouts(self, rank):
        if self.waiting[rank]:
            meeting = self.waiting[rank][0]
            return f"rank {rank} waits in {meeting.call} for ranks {sorted(set(meeting.members) - meeting.came)}"
        return f"rank {rank} has returned" if rank in self.returned else f"rank {rank} computes"


def _deliver(result, out):
    """`result` in `out`, or in an array of this rank's own."""
    if out is None:
        return np.array(result)
    out[...] = result
    return out


def run_ranks(size, fn, *args, timeout=60.0):
    """[fn(communicator, *args) of each rank], every rank a thread of its own.

    The first exception on a rank ends the others at their next or present call of any group, and is raised here with
    the rank noted. A rank that waits longer than `timeout` seconds raises CommunicatorError and says who waits where;
    it comes at once when a rank has returned without the call. After a failure a rank that computes is given `timeout`
    seconds to notice, then left behind. Raises ConfigError for size < 1.
    """
    if size < 1:
        raise ConfigError(f"a group of {size} ranks cannot run: give at least 1")
    world, results = _World(size, timeout), [None] * size
    group = _Group(world, range(size))

    def run(rank):
        try:
            results[rank] = fn(group.communicator(rank), *args)
            world.end(rank)
        except BaseException as error:  # a test's skip or fail is no Exception, and must end the others too
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

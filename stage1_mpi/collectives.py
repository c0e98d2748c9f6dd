"""Collectives made of messages alone: what an MPI library does behind Allreduce, on any communicator's send and recv.

Every function works on any communicator of the protocol, for any number of ranks and any length, zero included. The
cost model is Hockney's: a message of m bytes takes alpha + m beta seconds, and a rank sends and receives at once.

    all-reduce          rounds                 bytes a rank sends      seconds (without the additions)
    root                2 (p-1) at root        (p-1) n at root         2 (p-1) (alpha + n beta)
    tree                2 log2 p               n log2 p at root        2 log2 p (alpha + n beta), less when in chunks
    ring                2 (p-1)                2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta
    halving-doubling    2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, p = 2^k  2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, else     p                      2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta

No all-reduce can send less than 2 (p-1)/p n (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters
of workstations, 2009). The other algorithms and their costs: Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005.
"""
# p ranks in a group, n bytes of x on one rank; arrays below the public functions are flat: (length,)

import numpy as np

from gpt2core.communicator import Handle, Solo, check_op, check_out, check_rank, rows_per_part
from gpt2core.errors import ConfigError
from gpt2core.parallel.tree_sum import tree_reduce

CHUNK = 1 << 20  # bytes of a message that is added to something: with less the messages cost more than the cache gains


def all_reduce(comm, x, op="sum", out=None, algorithm="ring"):
    """The elementwise "sum", "min" or "max" over ranks, the same bits on every rank; x (...) -> (...)."""
    x, add, reduce = np.asarray(x), check_op(op), check_algorithm(algorithm)
    check_out(out, x.shape, x.dtype)
    if comm.size == 1:
        return Solo().all_reduce(x, op, out)
    x, out = _source(x, out, overwritten=True), _result(out, x.shape, x.dtype)
    reduce(comm, x.reshape(-1), out.reshape(-1), add)
    return out


def reduce_scatter(comm, x, op="sum", out=None, algorithm="ring"):
    """Part `rank` of all_reduce(x, op, algorithm=algorithm), bit for bit; x (p * rows, ...) -> (rows, ...).

    "ring" and "canonical" send (p-1)/p n bytes, half of their all-reduce. The others are all-reduces of which every
    rank keeps its part: what they add up is not divided by ranks.
    """
    x, add = np.asarray(x), check_op(op)
    check_algorithm(algorithm)
    shape = (rows_per_part(x, comm.size), *x.shape[1:])
    check_out(out, shape, x.dtype)
    if comm.size == 1:
        return Solo().reduce_scatter(x, op, out)
    if algorithm not in REDUCE_SCATTER:
        mine = all_reduce(comm, x, op, algorithm=algorithm).reshape(comm.size, *shape)[comm.rank]
        return _deliver(mine, out)
    x = np.ascontiguousarray(x)
    parts = _segments(x.reshape(-1), comm.size)
    usable = out is not None and (not np.may_share_memory(x, out) or _same_place(parts[comm.rank], out))
    result = out if usable else np.empty(shape, x.dtype)
    REDUCE_SCATTER[algorithm](comm, parts, result.reshape(-1), add)
    return _deliver(result, out)


def all_gather(comm, x, out=None):
    """Every rank's x along axis 0 in rank order; x (rows, ...) -> (p * rows, ...).

    Ring: p-1 rounds; in each a rank hands to its right what it got from its left. (p-1) n bytes a rank, n of x;
    (p-1) (alpha + n beta).
    """
    x = np.asarray(x)
    shape = (comm.size * rows_per_part(x), *x.shape[1:])
    check_out(out, shape, x.dtype)
    out = _result(out, shape, x.dtype)
    out.reshape(comm.size, *x.shape)[comm.rank] = x
    _ring_gather(comm, _segments(out.reshape(-1), comm.size))
    return out


def all_to_all(comm, x, out=None):
    """Part `rank` of every rank's x, in rank order; x (p * rows, ...) -> (p * rows, ...).

    Pairwise exchange: p-1 rounds; in round k a rank sends to the k-th on its right and receives from the k-th on its
    left, so that no rank is ever the target of two. (p-1)/p n bytes a rank; (p-1) alpha + (p-1)/p n beta.
    """
    x, p, r = np.asarray(x), comm.size, comm.rank
    rows_per_part(x, p)
    check_out(out, x.shape, x.dtype)
    x, out = _source(x, out), _result(out, x.shape, x.dtype)
    parts, places = _segments(x.reshape(-1), p), _segments(out.reshape(-1), p)
    places[r][...] = parts[r]
    for step in range(1, p):
        to, source = (r + step) % p, (r - step) % p
        _swap(comm, parts[to], to, places[source], source)
    return out


def broadcast(comm, x, root=0, out=None):
    """Root's x; elsewhere x gives shape and dtype only; x (...) -> (...).

    Binomial tree: the ranks that have it double in each of log2 p rounds. n log2 p bytes at root;
    log2 p (alpha + n beta), less in chunks, which follow each other down the tree.
    """
    x = np.asarray(x)
    check_rank(root, comm.size, "root")
    check_out(out, x.shape, x.dtype)
    out = _result(out, x.shape, x.dtype)
    if comm.rank == root:
        out[...] = x
    _tree_broadcast(comm, out.reshape(-1), root)
    return out


# -- all-reduce -------------------------------------------------------------------------------------------------------


def _root(comm, x, out, add):
    """Rank 0 receives from every rank, adds, and sends the result to every rank: right, and as slow as it gets."""
    if comm.rank != 0:
        _wait(_send_chunks(comm, x, 0))
        _receive(comm, out, 0).wait()
        return
    mine = x
    for source in range(1, comm.size):
        _reduce_from(comm, source, mine, out, add)
        mine = out
    _wait([_send(comm, out, to) for to in range(1, comm.size)])


def _tree(comm, x, out, add):
    """Binomial tree: sums of neighbours, then sums of those, up to rank 0; then the result down the same tree.

    The order is the canonical one, in fewest rounds; but the whole of x travels in each.
    """
    children, parent = _tree_around(comm.rank, comm.size)
    mine, sends = x, []
    for child in children:
        sends = _reduce_from(comm, child, mine, out, add, onward=parent if child == children[-1] else None)
        mine = out
    if not children:
        sends = _send_chunks(comm, x, parent)
    _wait(sends)
    _tree_broadcast(comm, out, 0)


def _ring(comm, x, out, add):
    """Reduce-scatter around the ring, then all-gather around the ring: every link carries 2 (p-1)/p n, none idles."""
    segments = _segments(out, comm.size)
    _ring_reduce(comm, _segments(x, comm.size), segments, add)
    _ring_gather(comm, segments)


def _halving_doubling(comm, x, out, add):
    """Rabenseifner: halve with partners ever nearer, each adding up its half; then double the sums back.

    With p no power of two, the first ranks fold in pairs: an even one hands x to its right neighbour, sits out, and is
    given the result, at 2 alpha + 2 n beta more.
    """
    r, core = comm.rank, 1 << (comm.size.bit_length() - 1)  # core: the ranks that go on, a power of two
    folded = 2 * (comm.size - core)
    if r < folded and r % 2 == 0:
        _wait(_send_chunks(comm, x, r + 1))
        _receive(comm, out, r + 1).wait()
        return
    mine = x
    if r < folded:
        _reduce_from(comm, r - 1, x, out, add)
        mine = out
    members = [*range(1, folded, 2), *range(folded, comm.size)]
    _halve_and_double(comm, mine, out, add, members, sorted(_powers(core), reverse=True))
    if r < folded:
        _send(comm, out, r - 1).wait()


def _canonical(comm, x, out, add):
    """The bits of gpt2core.parallel.tree_sum.tree_reduce over ranks, for any p, and no more bytes than any other order.

    A power of two halves and doubles, but nearest partner first: rank 0 adds 0+1, then (0+1)+(2+3), and so on. Other
    numbers go by the direct algorithm: rank j gets everyone's part j, adds up the tree, and passes the sum around.
    """
    p = comm.size
    if p & (p - 1) == 0:
        _halve_and_double(comm, x, out, add, range(p), _powers(p))
    else:
        segments = _segments(out, p)
        _direct_reduce(comm, _segments(x, p), segments[comm.rank], add)
        _ring_gather(comm, segments)


def _halve_and_double(comm, x, out, add, members, distances):
    """Reduce-scatter by halves n/2, n/4, ..., n/p, then all-gather back; `members` are a power of two of ranks.

    In each round two partners split what they are both responsible for: each sends one half and adds up the other.
    """
    me = members.index(comm.rank)
    mine, low, high, rounds = x, 0, x.size, []
    for distance in distances:
        partner, middle = members[me ^ distance], (low + high) // 2
        keep, give = slice(low, middle), slice(middle, high)
        if me & distance:
            keep, give = give, keep
        sends = _send_chunks(comm, mine[give], partner)
        _reduce_from(comm, partner, mine[keep], out[keep], add)
        _wait(sends)
        rounds.append((partner, keep, give))
        mine, low, high = out, keep.start, keep.stop
    for partner, keep, give in reversed(rounds):
        _swap(comm, out[keep], partner, out[give], partner)


def _powers(p):
    """1, 2, 4, ... below p."""
    return [1 << k for k in range((p - 1).bit_length())]


ALL_REDUCE = {
    "root": _root,
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "tree": _tree,
    "canonical": _canonical,
}


def check_algorithm(name):
    """The all-reduce called `name`; ConfigError when there is none."""
    if name not in ALL_REDUCE:
        raise ConfigError(f"unknown algorithm {name!r}: choose one of {', '.join(ALL_REDUCE)}")
    return ALL_REDUCE[name]


# -- reduce-scatter ---------------------------------------------------------------------------------------------------


def _ring_scatter(comm, parts, out, add):
    """The first half of the ring all-reduce in room for three parts: my own, one that comes, and one that goes on."""
    spare = np.empty((2, out.size), out.dtype)
    homes = [out if j == comm.rank else spare[(comm.rank - j) % comm.size % 2] for j in range(comm.size)]
    _ring_reduce(comm, parts, homes, add)


def _ring_reduce(comm, parts, homes, add):
    """Part j starts at rank j+1, and every rank on its way around adds its own, until rank j has the sum.

    p-1 rounds, (p-1)/p n bytes a rank. homes[j] is where my sum of part j goes; every other one may be the same place.
    """
    p, r = comm.size, comm.rank
    earlier, sends = [], _send_chunks(comm, parts[r - 1], (r + 1) % p)
    for step in range(2, p + 1):
        j = (r - step) % p
        _wait(earlier)
        onward = None if j == r else (r + 1) % p
        earlier, sends = sends, _reduce_from(comm, (r - 1) % p, parts[j], homes[j], add, onward)
    _wait(earlier + sends)


def _direct_reduce(comm, parts, out, add):
    """Send part j to rank j, all at once; out = the canonical tree over everyone's part `rank`.

    One round of p-1 messages, (p-1)/p n bytes a rank; (p-1) alpha + (p-1)/p n beta.
    """
    p, r = comm.size, comm.rank
    peers = [(r + step) % p for step in range(1, p)]  # each rank begins with another one
    sends = [send for to in peers for send in _send_chunks(comm, parts[to], to)]
    landing = np.empty((2, p, min(out.size, _step(out))), out.dtype)
    chunks = _chunks(out)

    def receive(k):
        length = chunks[k].stop - chunks[k].start
        return [comm.recv_start(landing[k % 2, peer, :length], peer) for peer in peers]

    coming = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        _wait(coming[k])
        mine, total = parts[r][chunk], out[chunk]

        def into_place(left, right, mine=mine, total=total):
            has_mine = any(array is mine or array is total for array in (left, right))
            return add(left, right, out=total if has_mine else left)

        tree_reduce((mine if rank == r else landing[k % 2, rank, : total.size] for rank in range(p)), into_place)
        if k + 2 < len(chunks):
            coming.append(receive(k + 2))
    _wait(sends)


REDUCE_SCATTER = {"ring": _ring_scatter, "canonical": _direct_reduce}


# -- moving data ------------------------------------------------------------------------------------------------------


def _ring_gather(comm, segments):
    """Rank r brings segment r; p-1 rounds later all have all. (p-1)/p of the whole a rank."""
    p, r = comm.size, comm.rank
    for step in range(p - 1):
        _swap(comm, segments[(r - step) % p], (r + 1) % p, segments[(r - step - 1) % p], (r - 1) % p)


def _tree_broadcast(comm, out, root):
    """Root's `out` to everyone's, chunk after chunk down the binomial tree."""
    p = comm.size
    children, parent = _tree_around((comm.rank - root) % p, p)
    sends = []
    for chunk in _chunks(out):
        if parent is not None:
            comm.recv_start(out[chunk], (parent + root) % p).wait()
        sends += [comm.send_start(out[chunk], (child + root) % p) for child in reversed(children)]
    _wait(sends)


def _tree_around(rank, p):
    """(children, nearest first; parent) in the binomial tree: of 8 ranks, 4 has 5 and 6 below and 0 above."""
    below = [distance for distance in _powers(p) if distance < (rank & -rank or p)]
    parent = rank - (rank & -rank) if rank else None
    return [rank + distance for distance in below if rank + distance < p], parent


# -- messages ---------------------------------------------------------------------------------------------------------


def _reduce_from(comm, source, mine, home, add, onward=None):
    """home = mine + what `source` sends, chunk by chunk: one is added, still in the cache, while the next travels.

    Each chunk of the sum is sent `onward` at once, unless that is None; returns the handles. Lower rank's part on the
    left: min and max of +0 and -0, and the bits of a NaN, depend on it.
    """
    chunks, sends = _chunks(home), []
    landing = np.empty((2, min(home.size, _step(home))), home.dtype)

    def receive(k):
        return comm.recv_start(landing[k % 2, : chunks[k].stop - chunks[k].start], source)

    coming = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        coming[k].wait()
        pair = mine[chunk], landing[k % 2, : chunk.stop - chunk.start]
        add(*(pair if comm.rank < source else pair[::-1]), out=home[chunk])
        if k + 2 < len(chunks):
            coming.append(receive(k + 2))
        if onward is not None:
            sends.append(comm.send_start(home[chunk], onward))
    return sends


def _send_chunks(comm, x, to):
    """Handles of x in the messages that _reduce_from and _direct_reduce expect."""
    return [comm.send_start(x[chunk], to) for chunk in _chunks(x)]


def _swap(comm, gone, to, come, source):
    """Send `gone` while `come` is received, each in one message: nothing is done with the parts."""
    receive, send = _receive(comm, come, source), _send(comm, gone, to)
    receive.wait()
    send.wait()


def _send(comm, x, to):
    return comm.send_start(x, to) if x.size else Handle()


def _receive(comm, out, source):
    return comm.recv_start(out, source) if out.size else Handle()


def _wait(handles):
    for handle in handles:
        handle.wait()


def _step(x):
    """Elements in a chunk."""
    return max(1, CHUNK // x.itemsize)


def _chunks(x):
    """Slices of at most CHUNK bytes that make up x; none when it is empty."""
    return [slice(start, min(start + _step(x), x.size)) for start in range(0, x.size, _step(x))]


def _segments(x, p):
    """x in p pieces as equal as they come; when p divides its length, piece j is part j."""
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


# -- arguments --------------------------------------------------------------------------------------------------------


def _source(x, out, overwritten=False):
    """x as messages can take it: contiguous, and not under `out`, unless both are one place that may be overwritten."""
    if out is not None and np.may_share_memory(x, out) and not (overwritten and _same_place(x, out)):
        return np.array(x, order="C")
    return np.ascontiguousarray(x)


def _same_place(x, out):
    """Whether two arrays of one size lie in the same memory in the same order."""
    return x.flags.c_contiguous and x.ctypes.data == out.ctypes.data


def _result(out, shape, dtype):
    return np.empty(shape, dtype) if out is None else out


def _deliver(result, out):
    """`result` in `out`, or in an array of this rank's own."""
    if out is None:
        return result if result.base is None else np.array(result)
    if out is not result:
        out[...] = result
    return out

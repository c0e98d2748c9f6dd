"""Collectives built from send and receive only, with the algorithms that MPI libraries use for Allreduce and others.

Every function works on any Communicator, for any number of ranks and any length, zero included. Costs are given in the
alpha-beta model (Hockney): a message of m bytes takes alpha + m beta seconds, and a rank can send and receive at the
same time.

    all-reduce          rounds                 bytes a rank sends      seconds (without the additions)
    root                2 (p-1) at root        (p-1) n at root         2 (p-1) (alpha + n beta)
    tree                2 log2 p               n log2 p at root        2 log2 p (alpha + n beta), less with chunks
    ring                2 (p-1)                2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta
    halving-doubling    2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, p = 2^k  2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, else     p                      2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta

In every all-reduce some rank sends at least 2 (p-1)/p n (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms
for clusters of workstations, 2009). The other algorithms and their costs: Thakur, Rabenseifner and Gropp,
Optimization of collective communication operations in MPICH, 2005.
"""
# p: number of ranks in the group; r: this rank; n: bytes of x on one rank. Private functions take flat arrays

import numpy as np

from gpt2core.communicator import Handle, Solo, check_op, check_out, check_rank, rows_per_part
from gpt2core.errors import ConfigError
from gpt2core.parallel.tree_sum import tree_reduce

CHUNK = 1 << 20  # most bytes of a chunk; smaller ones fit the cache better, but their alpha costs more than this gains


def all_reduce(comm, x, op="sum", out=None, algorithm="ring"):
    """The elementwise "sum", "min" or "max" of x over ranks; x (...) -> (...). Every rank gets the same bits."""
    x, add, reduce = np.asarray(x), check_op(op), check_algorithm(algorithm)
    check_out(out, x.shape, x.dtype)
    if comm.size == 1:
        return Solo().all_reduce(x, op, out)
    x, out = _source(x, out, in_place=True), _result(out, x.shape, x.dtype)
    reduce(comm, x.reshape(-1), out.reshape(-1), add)
    return out


def reduce_scatter(comm, x, op="sum", out=None, algorithm="ring"):
    """Part `rank` of all_reduce(x, op, algorithm=algorithm), bit for bit; x (p * rows, ...) -> (rows, ...).

    "ring" and "canonical" send (p-1)/p n bytes, half as many as in an all-reduce. The other algorithms run the
    whole all-reduce, of which every rank then keeps its part.
    """
    x, add = np.asarray(x), check_op(op)
    check_algorithm(algorithm)
    shape = (rows_per_part(x, comm.size), *x.shape[1:])
    check_out(out, shape, x.dtype)
    if comm.size == 1:
        return Solo().reduce_scatter(x, op, out)
    if algorithm not in REDUCE_SCATTER:
        mine = all_reduce(comm, x, op, algorithm=algorithm).reshape(comm.size, *shape)[comm.rank]
        return _copied(mine, out)
    x = np.ascontiguousarray(x)
    parts = _segments(x.reshape(-1), comm.size)
    usable = out is not None and (not np.may_share_memory(x, out) or _same_memory(parts[comm.rank], out))
    result = out if usable else np.empty(shape, x.dtype)
    REDUCE_SCATTER[algorithm](comm, parts, result.reshape(-1), add)
    return _copied(result, out)


def all_gather(comm, x, out=None):
    """Every rank's x along axis 0 in rank order; x (rows, ...) -> (p * rows, ...).

    Ring: p-1 rounds. A rank first sends its own x to its right neighbour, then in each round what it received from its
    left neighbour in the previous round. A rank sends (p-1) n bytes; (p-1) (alpha + n beta) seconds.
    """
    x = np.asarray(x)
    shape = (comm.size * rows_per_part(x), *x.shape[1:])
    check_out(out, shape, x.dtype)
    out = _result(out, shape, x.dtype)
    out.reshape(comm.size, *x.shape)[comm.rank] = x
    _ring_all_gather(comm, _segments(out.reshape(-1), comm.size))
    return out


def all_to_all(comm, x, out=None):
    """Part `rank` of every rank's x, in rank order; x (p * rows, ...) -> (p * rows, ...).

    Pairwise exchange: p-1 rounds; in round k, rank r sends to rank r+k and receives from rank r-k (mod p), so every
    rank receives one message a round. A rank sends (p-1)/p n bytes; (p-1) alpha + (p-1)/p n beta seconds.
    """
    x, p, r = np.asarray(x), comm.size, comm.rank
    rows_per_part(x, p)
    check_out(out, x.shape, x.dtype)
    x, out = _source(x, out), _result(out, x.shape, x.dtype)
    parts, received = _segments(x.reshape(-1), p), _segments(out.reshape(-1), p)
    received[r][...] = parts[r]
    for step in range(1, p):
        to, source = (r + step) % p, (r - step) % p
        _sendrecv(comm, parts[to], to, received[source], source)
    return out


def broadcast(comm, x, root=0, out=None):
    """Root's x on every rank; x (...) -> (...). On the other ranks only the shape and dtype of x are used.

    Binomial tree: the number of ranks that have x doubles in each of log2 p rounds. Root sends n log2 p bytes;
    log2 p (alpha + n beta) seconds, less with chunks, which pass down the tree as a pipeline.
    """
    x = np.asarray(x)
    check_rank(root, comm.size, "root")
    check_out(out, x.shape, x.dtype)
    out = _result(out, x.shape, x.dtype)
    if comm.rank == root:
        out[...] = x
    _binomial_broadcast(comm, out.reshape(-1), root)
    return out


# -- all-reduce --------------------------------------------------------------------------------------------------------


def _root(comm, x, out, add):
    """Rank 0 receives from every rank, adds, and sends the result to every rank: simple, and the slowest.

    2 (p-1) (alpha + n beta) seconds.
    """
    if comm.rank != 0:
        _wait_all(_send_chunks(comm, x, 0))
        _recv(comm, out, 0).wait()
        return
    mine = x
    for source in range(1, comm.size):
        _recv_and_add(comm, source, mine, out, add)
        mine = out
    _wait_all([_send(comm, out, to) for to in range(1, comm.size)])


def _tree(comm, x, out, add):
    """Binomial tree: reduce up to rank 0, then broadcast down the same tree.

    2 log2 p (alpha + n beta) seconds: few rounds, but each sends the whole of x. Adds in the canonical order.
    """
    children, parent = _binomial_neighbours(comm.rank, comm.size)
    mine, sends = x, []
    for child in children:
        sends = _recv_and_add(comm, child, mine, out, add, forward_to=parent if child == children[-1] else None)
        mine = out
    if not children:
        sends = _send_chunks(comm, x, parent)
    _wait_all(sends)
    _binomial_broadcast(comm, out, 0)


def _ring(comm, x, out, add):
    """Ring: a reduce-scatter phase, then an all-gather phase, p-1 rounds each.

    2 (p-1) alpha + 2 (p-1)/p n beta seconds: the fewest bytes possible, and all links are used in every round.
    """
    segments = _segments(out, comm.size)
    _ring_reduce_scatter(comm, _segments(x, comm.size), segments, add)
    _ring_all_gather(comm, segments)


def _halving_doubling(comm, x, out, add):
    """Rabenseifner: a reduce-scatter phase by recursive halving, then an all-gather phase by recursive doubling.

    2 log2 p alpha + 2 (p-1)/p n beta seconds if p is a power of two. For any other p the first ranks form pairs: the
    even rank of a pair sends x to the odd rank, takes no part in the two phases, and then receives the result. This
    costs 2 alpha + 2 n beta more.
    """
    r, core = comm.rank, 1 << (comm.size.bit_length() - 1)  # core: how many ranks take part, a power of two
    paired = 2 * (comm.size - core)
    if r < paired and r % 2 == 0:
        _wait_all(_send_chunks(comm, x, r + 1))
        _recv(comm, out, r + 1).wait()
        return
    mine = x
    if r < paired:
        _recv_and_add(comm, r - 1, x, out, add)
        mine = out
    members = [*range(1, paired, 2), *range(paired, comm.size)]
    rounds = _recursive_halving(comm, mine, out, add, members, sorted(_powers_below(core), reverse=True))
    _recursive_doubling(comm, out, rounds)
    if r < paired:
        _send(comm, out, r - 1).wait()


def _canonical(comm, x, out, add):
    """The sum in the order of gpt2core.parallel.tree_sum.tree_reduce, for any p; sends as many bytes as the ring.

    If p is a power of two: halving and doubling, but with the nearest partner first, so rank 0 adds 0+1, then
    (0+1)+(2+3), and so on. Any other p: rank j receives part j from every rank and adds these parts in the order of the
    tree; an all-gather then sends the sums to all ranks. Costs: see the top of the file.
    """
    p = comm.size
    if p & (p - 1) == 0:
        rounds = _recursive_halving(comm, x, out, add, range(p), _powers_below(p))
        _recursive_doubling(comm, out, rounds)
    else:
        segments = _segments(out, p)
        _direct_reduce_scatter(comm, _segments(x, p), segments[comm.rank], add)
        _ring_all_gather(comm, segments)


ALL_REDUCE = {
    "root": _root,
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "tree": _tree,
    "canonical": _canonical,
}


def check_algorithm(name):
    """The all-reduce called `name`; raises ConfigError for an unknown one."""
    if name not in ALL_REDUCE:
        raise ConfigError(f"unknown algorithm {name!r}: choose one of {', '.join(ALL_REDUCE)}")
    return ALL_REDUCE[name]


# -- the reduce-scatter phase ------------------------------------------------------------------------------------------


def _ring_reduce_scatter(comm, parts, sums, add):
    """The partial sum of part j is sent around the ring from rank j+1 to rank j; each rank adds its own part j to it.

    p-1 rounds, (p-1)/p n bytes a rank; (p-1) alpha + (p-1)/p n beta seconds. This rank writes its partial sum of part j
    into sums[j]. sums[r] is the result; the other partial sums may share two buffers in turn.
    """
    p, r = comm.size, comm.rank
    earlier, sends = [], _send_chunks(comm, parts[r - 1], (r + 1) % p)
    for step in range(2, p + 1):
        j = (r - step) % p
        _wait_all(earlier)
        forward_to = None if j == r else (r + 1) % p
        earlier, sends = sends, _recv_and_add(comm, (r - 1) % p, parts[j], sums[j], add, forward_to)
    _wait_all(earlier + sends)


def _ring_scatter(comm, parts, out, add):
    """The reduce-scatter phase of the ring with two buffers of one part each: out = this rank's part of the sum."""
    buffers = np.empty((2, out.size), out.dtype)
    sums = [out if j == comm.rank else buffers[(comm.rank - j) % comm.size % 2] for j in range(comm.size)]
    _ring_reduce_scatter(comm, parts, sums, add)


def _recursive_halving(comm, x, out, add, members, distances):
    """Reduce-scatter among the ranks `members`, whose number is a power of two; returns the rounds.

    In each round two partners divide the range that both still reduce: each sends one half to its partner, and receives
    and adds the other half. The rounds, (partner, half kept, half sent), are passed to _recursive_doubling.
    n/2 + n/4 + ... = (p-1)/p n bytes a rank; log2 p alpha + (p-1)/p n beta seconds.
    """
    me = members.index(comm.rank)
    mine, low, high, rounds = x, 0, x.size, []
    for distance in distances:
        partner, middle = members[me ^ distance], (low + high) // 2
        keep, give = slice(low, middle), slice(middle, high)
        if me & distance:
            keep, give = give, keep
        sends = _send_chunks(comm, mine[give], partner)
        _recv_and_add(comm, partner, mine[keep], out[keep], add)
        _wait_all(sends)
        rounds.append((partner, keep, give))
        mine, low, high = out, keep.start, keep.stop
    return rounds


def _direct_reduce_scatter(comm, parts, out, add):
    """Every rank sends part j to rank j; out = the sum of every rank's part r, in the order of the canonical tree.

    One round of p-1 messages, (p-1)/p n bytes a rank; (p-1) alpha + (p-1)/p n beta seconds.
    """
    p, r = comm.size, comm.rank
    peers = [(r + step) % p for step in range(1, p)]  # each rank starts with a different peer
    sends = [send for to in peers for send in _send_chunks(comm, parts[to], to)]
    buffers = np.empty((2, p, min(out.size, _chunk_length(out))), out.dtype)  # double buffering
    chunks = _chunks(out)

    def receive(k):
        length = chunks[k].stop - chunks[k].start
        return [comm.recv_start(buffers[k % 2, peer, :length], peer) for peer in peers]

    receives = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        _wait_all(receives[k])
        mine, total = parts[r][chunk], out[chunk]

        def add_in_place(left, right, mine=mine, total=total):
            has_mine = any(array is mine or array is total for array in (left, right))
            return add(left, right, out=total if has_mine else left)  # x is not overwritten

        tree_reduce((mine if rank == r else buffers[k % 2, rank, : total.size] for rank in range(p)), add_in_place)
        if k + 2 < len(chunks):
            receives.append(receive(k + 2))
    _wait_all(sends)


REDUCE_SCATTER = {"ring": _ring_scatter, "canonical": _direct_reduce_scatter}


# -- the all-gather phase, and broadcast -------------------------------------------------------------------------------


def _ring_all_gather(comm, segments):
    """Rank r has segment r; after p-1 rounds every rank has all segments.

    A rank sends (p-1)/p n bytes, where n is the bytes of all segments; (p-1) alpha + (p-1)/p n beta seconds.
    """
    p, r = comm.size, comm.rank
    for step in range(p - 1):
        _sendrecv(comm, segments[(r - step) % p], (r + 1) % p, segments[(r - step - 1) % p], (r - 1) % p)


def _recursive_doubling(comm, out, rounds):
    """All-gather: the rounds of _recursive_halving in reverse order; partners exchange their finished halves.

    (p-1)/p n bytes a rank; log2 p alpha + (p-1)/p n beta seconds.
    """
    for partner, keep, give in reversed(rounds):
        _sendrecv(comm, out[keep], partner, out[give], partner)


def _binomial_broadcast(comm, out, root):
    """Send root's `out` to every rank, one chunk after another down the binomial tree."""
    p = comm.size
    children, parent = _binomial_neighbours((comm.rank - root) % p, p)
    sends = []
    for chunk in _chunks(out):
        if parent is not None:
            comm.recv_start(out[chunk], (parent + root) % p).wait()
        sends += [comm.send_start(out[chunk], (child + root) % p) for child in reversed(children)]
    _wait_all(sends)


def _binomial_neighbours(rank, p):
    """(children, nearest first; parent or None) in the binomial tree with root 0; ([5, 6], 0) for p = 8, rank 4."""
    distances = [distance for distance in _powers_below(p) if distance < (rank & -rank or p)]
    parent = rank - (rank & -rank) if rank else None
    return [rank + distance for distance in distances if rank + distance < p], parent


def _powers_below(p):
    """The powers of two that are less than p: [1, 2, 4, ...]."""
    return [1 << k for k in range((p - 1).bit_length())]


# -- messages ----------------------------------------------------------------------------------------------------------


def _recv_and_add(comm, source, mine, out, add, forward_to=None):
    """out = mine + the array that `source` sends, in chunks: one chunk is added while the next one is received.

    If `forward_to` is a rank, each chunk of the sum is sent to it immediately. Returns the handles of these sends. The
    array of the lower rank is the left operand, because the order of the operands determines min and max of +0 and -0
    and the bits of a NaN.
    """
    chunks, sends = _chunks(out), []
    buffers = np.empty((2, min(out.size, _chunk_length(out))), out.dtype)  # double buffering

    def receive(k):
        return comm.recv_start(buffers[k % 2, : chunks[k].stop - chunks[k].start], source)

    receives = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        receives[k].wait()
        pair = mine[chunk], buffers[k % 2, : chunk.stop - chunk.start]
        add(*(pair if comm.rank < source else pair[::-1]), out=out[chunk])
        if k + 2 < len(chunks):
            receives.append(receive(k + 2))
        if forward_to is not None:
            sends.append(comm.send_start(out[chunk], forward_to))
    return sends


def _send_chunks(comm, x, to):
    """Send x in chunks, as _recv_and_add and _direct_reduce_scatter receive it; returns the handles."""
    return [comm.send_start(x[chunk], to) for chunk in _chunks(x)]


def _sendrecv(comm, x, to, out, source):
    """Send x to one rank while receiving `out` from another, each as one message."""
    receive, send = _recv(comm, out, source), _send(comm, x, to)
    receive.wait()
    send.wait()


def _send(comm, x, to):
    return comm.send_start(x, to) if x.size else Handle()


def _recv(comm, out, source):
    return comm.recv_start(out, source) if out.size else Handle()


def _wait_all(handles):
    for handle in handles:
        handle.wait()


def _chunk_length(x):
    """Elements in a chunk of at most CHUNK bytes; at least 1."""
    return max(1, CHUNK // x.itemsize)


def _chunks(x):
    """Slices of at most CHUNK bytes that cover x; none for an empty x."""
    return [slice(start, min(start + _chunk_length(x), x.size)) for start in range(0, x.size, _chunk_length(x))]


def _segments(x, p):
    """x in p contiguous segments whose lengths differ by at most one element."""
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


# -- arguments ---------------------------------------------------------------------------------------------------------


def _source(x, out, in_place=False):
    """x as a contiguous array; a copy if x and `out` overlap. With in_place, x may be exactly the memory of `out`."""
    if out is not None and np.may_share_memory(x, out) and not (in_place and _same_memory(x, out)):
        return np.array(x, order="C")
    return np.ascontiguousarray(x)


def _same_memory(x, out):
    """Whether two arrays of equal size have the same address and the same element order."""
    return x.flags.c_contiguous and x.ctypes.data == out.ctypes.data


def _result(out, shape, dtype):
    return np.empty(shape, dtype) if out is None else out


def _copied(result, out):
    """`result` copied into `out`, or as an array that owns its memory."""
    if out is None:
        return result if result.base is None else np.array(result)
    if out is not result:
        out[...] = result
    return out

"""Collectives built only from send and receive. MPI libraries use the same algorithms, except "canonical".

Every function works on any Communicator, for any number of ranks and for arrays of any length, also of length 0.
Costs are given in the alpha-beta model (Hockney): a message of m bytes takes alpha + m beta seconds. Alpha is the
start-up time of a message; beta is the time per byte. A rank can send and receive at the same time. For p ranks and an
array of n bytes:

    all-reduce          rounds                 bytes a rank sends      seconds (without the additions)
    root                2 (p-1) at root        (p-1) n at root         2 (p-1) (alpha + n beta)
    tree                2 log2 p               n log2 p at root        2 log2 p (alpha + n beta), less with chunks
    ring                2 (p-1)                2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta
    halving-doubling    2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, p = 2^k  2 log2 p               2 (p-1)/p n             2 log2 p alpha + 2 (p-1)/p n beta
    canonical, else     p                      2 (p-1)/p n             2 (p-1) alpha + 2 (p-1)/p n beta

Lower bound: in every all-reduce at least one rank sends 2 (p-1)/p n bytes or more (Patarasuk and Yuan, Bandwidth
optimal all-reduce algorithms for clusters of workstations, 2009). "canonical" adds in the order of
gpt2core/tree_sum.py. The other algorithms and their costs: Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH, 2005.
"""
# p: number of ranks in the group; r: this rank; n: bytes of x on one rank. Private functions take flat arrays.
# add(a, b, out=c): the NumPy function of the reduction, np.add for op "sum"

import numpy as np

from gpt2core.communicator import Handle, Solo, check_op, check_out, rows_per_part
from gpt2core.errors import ConfigError
from gpt2core.tree_sum import tree_reduce

CHUNK = 1 << 20  # maximum bytes of a chunk. Smaller chunks fit the cache better, but each further message costs alpha


def all_reduce(comm, x, op="sum", out=None, algorithm="ring"):
    """The elementwise "sum", "min" or "max" of x over ranks; x (...) -> (...). Every rank gets the same bits."""
    x, add, run_algorithm = np.asarray(x), check_op(op), check_algorithm(algorithm)
    check_out(out, x.shape, x.dtype)
    if comm.size == 1:
        return Solo().all_reduce(x, op, out)
    x, out = _contiguous_input(x, out, in_place=True), _output(out, x.shape, x.dtype)
    run_algorithm(comm, x.reshape(-1), out.reshape(-1), add)
    return out


def reduce_scatter(comm, x, op="sum", out=None, algorithm="ring"):
    """Part `rank` of all_reduce(x, op, algorithm=algorithm), bit for bit; x (p * rows, ...) -> (rows, ...).

    "ring" and "canonical" send (p-1)/p n bytes, half as many as an all-reduce. The other algorithms run the whole
    all-reduce; every rank then keeps only its part of the result.
    """
    x, add = np.asarray(x), check_op(op)
    check_algorithm(algorithm)
    shape = (rows_per_part(x, comm.size), *x.shape[1:])
    check_out(out, shape, x.dtype)
    if comm.size == 1:
        return Solo().reduce_scatter(x, op, out)
    if algorithm not in REDUCE_SCATTER:
        own_part = all_reduce(comm, x, op, algorithm=algorithm).reshape(comm.size, *shape)[comm.rank]
        return _copied(own_part, out)
    x = np.ascontiguousarray(x)
    parts = _parts(x.reshape(-1), comm.size)
    # Writing into `out` must not overwrite parts of x that are still to be sent.
    writes_to_out = out is not None and (not np.may_share_memory(x, out) or _same_memory(parts[comm.rank], out))
    result = out if writes_to_out else np.empty(shape, x.dtype)
    REDUCE_SCATTER[algorithm](comm, parts, result.reshape(-1), add)
    return _copied(result, out)


def all_gather(comm, x, out=None):
    """Every rank's x along axis 0 in rank order; x (rows, ...) -> (p * rows, ...).

    Ring: p-1 rounds. In the first round a rank sends its own x to its right neighbour, rank r+1. In each later round it
    sends the array that it received from its left neighbour in the previous round. A rank sends (p-1) n bytes;
    (p-1) (alpha + n beta) seconds.
    """
    x = np.asarray(x)
    shape = (comm.size * rows_per_part(x), *x.shape[1:])
    check_out(out, shape, x.dtype)
    out = _output(out, shape, x.dtype)
    out.reshape(comm.size, *x.shape)[comm.rank] = x
    _ring_all_gather(comm, _parts(out.reshape(-1), comm.size))
    return out


def all_to_all(comm, x, out=None):
    """Part `rank` of every rank's x, in rank order; x (p * rows, ...) -> (p * rows, ...).

    Pairwise exchange: p-1 rounds. In round k, rank r sends to rank r+k and receives from rank r-k (mod p), so each rank
    receives one message per round. A rank sends (p-1)/p n bytes; (p-1) alpha + (p-1)/p n beta seconds.
    """
    x, p, r = np.asarray(x), comm.size, comm.rank
    rows_per_part(x, p)
    check_out(out, x.shape, x.dtype)
    x, out = _contiguous_input(x, out), _output(out, x.shape, x.dtype)
    parts, received = _parts(x.reshape(-1), p), _parts(out.reshape(-1), p)
    received[r][...] = parts[r]
    for step in range(1, p):
        to, source = (r + step) % p, (r - step) % p
        _sendrecv(comm, parts[to], to, received[source], source)
    return out


def broadcast(comm, x, root=0, out=None):
    """Root's x on every rank; x (...) -> (...). On the other ranks only the shape and dtype of x are used.

    Binomial tree: the number of ranks that have x doubles in each of log2 p rounds. Root sends n log2 p bytes. This
    takes log2 p (alpha + n beta) seconds, or less because x is sent in chunks: a rank forwards one chunk while it
    receives the next.
    """
    x = np.asarray(x)
    comm.check_rank(root, "root")
    check_out(out, x.shape, x.dtype)
    out = _output(out, x.shape, x.dtype)
    if comm.rank == root:
        out[...] = x
    _binomial_broadcast(comm, out.reshape(-1), root)
    return out


# -- all-reduce --------------------------------------------------------------------------------------------------------


def _root(comm, x, out, add):
    """Rank 0 receives x from every rank, adds, and sends the result to every rank. Simple, but the slowest algorithm.

    2 (p-1) (alpha + n beta) seconds.
    """
    if comm.rank != 0:
        _wait_all(_send_chunks(comm, x, 0))
        _recv(comm, out, 0).wait()
        return
    partial_sum = x
    for source in range(1, comm.size):
        _recv_and_add(comm, source, partial_sum, out, add)
        partial_sum = out
    _wait_all([_send(comm, out, to) for to in range(1, comm.size)])


def _tree(comm, x, out, add):
    """Binomial tree: reduce up to rank 0, then broadcast down the same tree. Adds in the canonical order.

    2 log2 p (alpha + n beta) seconds: few rounds, but each round sends all of x.
    """
    children, parent = _binomial_neighbours(comm.rank, comm.size)
    partial_sum, sends = x, []
    for child in children:
        forward_to = parent if child == children[-1] else None  # the sum is complete after the last child
        sends = _recv_and_add(comm, child, partial_sum, out, add, forward_to)
        partial_sum = out
    if not children:
        sends = _send_chunks(comm, x, parent)
    _wait_all(sends)
    _binomial_broadcast(comm, out, 0)


def _ring(comm, x, out, add):
    """Ring: a reduce-scatter phase, then an all-gather phase, p-1 rounds each.

    2 (p-1) alpha + 2 (p-1)/p n beta seconds: as few bytes as possible, and all links are used in every round.
    """
    parts = _parts(out, comm.size)
    _ring_reduce_scatter(comm, _parts(x, comm.size), parts, add)
    _ring_all_gather(comm, parts)


def _halving_doubling(comm, x, out, add):
    """Rabenseifner's algorithm: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    2 log2 p alpha + 2 (p-1)/p n beta seconds if p is a power of two. For any other p, the first ranks form pairs, so
    that the number of participants is a power of two: the even rank of a pair sends x to the odd rank, takes no part in
    the two phases, and receives the result after them. This costs 2 alpha + 2 n beta more.
    """
    r, participants = comm.rank, 1 << (comm.size.bit_length() - 1)  # the largest power of two <= p
    paired = 2 * (comm.size - participants)  # ranks 0 to paired - 1 form pairs
    if r < paired and r % 2 == 0:
        _wait_all(_send_chunks(comm, x, r + 1))
        _recv(comm, out, r + 1).wait()
        return
    partial_sum = x
    if r < paired:
        _recv_and_add(comm, r - 1, x, out, add)
        partial_sum = out
    members = [*range(1, paired, 2), *range(paired, comm.size)]
    farthest_first = _powers_below(participants)[::-1]
    rounds = _recursive_halving(comm, partial_sum, out, add, members, farthest_first)
    _recursive_doubling(comm, out, rounds)
    if r < paired:
        _send(comm, out, r - 1).wait()


def _canonical(comm, x, out, add):
    """The sum in the order of gpt2core.tree_sum.tree_reduce, for any p; sends as many bytes as the ring.

    If p is a power of two: recursive halving and doubling, but the nearest partner comes first. So the data of ranks
    0 and 1 are added first, then (0+1) + (2+3), and so on. For any other p: rank j receives part j from every rank and
    adds these parts in the order of the tree; an all-gather then sends the sums to all ranks. Costs: see the top of
    this file.
    """
    p = comm.size
    if p & (p - 1) == 0:
        rounds = _recursive_halving(comm, x, out, add, range(p), _powers_below(p))
        _recursive_doubling(comm, out, rounds)
    else:
        parts = _parts(out, p)
        _direct_reduce_scatter(comm, _parts(x, p), parts[comm.rank], add)
        _ring_all_gather(comm, parts)


ALL_REDUCE = {
    "root": _root,
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "tree": _tree,
    "canonical": _canonical,
}


def check_algorithm(name):
    """The all-reduce function called `name`; raises ConfigError for an unknown name."""
    if name not in ALL_REDUCE:
        raise ConfigError(f"unknown algorithm {name!r}: choose one of {', '.join(ALL_REDUCE)}")
    return ALL_REDUCE[name]


# -- the number of elements that a rank sends ------------------------------------------------------------------------


def all_reduce_elements(algorithm, n, p, r):
    """The elements that rank r of p sends in all_reduce() of n elements."""
    after = (r + 1) % p
    if algorithm == "root":
        return n if r else (p - 1) * n
    if algorithm == "tree":
        children, parent = _binomial_neighbours(r, p)
        return n * len(children) + n * (parent is not None)
    if algorithm == "ring" or (algorithm == "canonical" and p & (p - 1)):
        return 2 * n - _part_length(n, p, r) - _part_length(n, p, after)
    if algorithm == "canonical":
        return _halving_doubling_elements(n, r, _powers_below(p))
    participants = 1 << (p.bit_length() - 1)
    paired = 2 * (p - participants)
    if r < paired and r % 2 == 0:
        return n
    position = r // 2 if r < paired else r - paired // 2
    return _halving_doubling_elements(n, position, _powers_below(participants)[::-1]) + n * (r < paired)


def reduce_scatter_elements(algorithm, n, p, r):
    """The elements that rank r of p sends in reduce_scatter() of n elements."""
    if algorithm in REDUCE_SCATTER:
        return n - _part_length(n, p, r)
    return all_reduce_elements(algorithm, n, p, r)


def _halving_doubling_elements(n, position, distances):
    """The elements that _recursive_halving and _recursive_doubling send."""
    low, high, elements = 0, n, 0
    for distance in distances:
        middle = (low + high) // 2
        elements += high - low  # one half now, the other half in _recursive_doubling
        low, high = (middle, high) if position & distance else (low, middle)
    return elements


def _part_length(n, p, j):
    """The length of part j of _parts()."""
    return n * (j + 1) // p - n * j // p


# -- the reduce-scatter phase ------------------------------------------------------------------------------------------


def _ring_reduce_scatter(comm, parts, sums, add):
    """The partial sum of part j is sent around the ring from rank j+1 to rank j; each rank adds its own part j to it.

    p-1 rounds, (p-1)/p n bytes per rank; (p-1) alpha + (p-1)/p n beta seconds. parts: the p parts of this rank's x.
    This rank writes its partial sum of part j into sums[j]; sums[r] is the result. Consecutive partial sums need
    different buffers, so two buffers that alternate are sufficient for all j other than r.
    """
    p, r = comm.size, comm.rank
    previous_sends, sends = [], _send_chunks(comm, parts[r - 1], (r + 1) % p)
    for step in range(2, p + 1):
        j = (r - step) % p
        _wait_all(previous_sends)
        forward_to = None if j == r else (r + 1) % p
        previous_sends, sends = sends, _recv_and_add(comm, (r - 1) % p, parts[j], sums[j], add, forward_to)
    _wait_all(previous_sends + sends)


def _ring_with_two_buffers(comm, parts, out, add):
    """The reduce-scatter phase of the ring, with two temporary buffers. Writes this rank's part of the sum to `out`."""
    buffers = np.empty((2, out.size), out.dtype)
    sums = [out if j == comm.rank else buffers[(comm.rank - j) % comm.size % 2] for j in range(comm.size)]
    _ring_reduce_scatter(comm, parts, sums, add)


def _recursive_halving(comm, x, out, add, members, distances):
    """Reduce-scatter among the ranks in the list `members`, a power of two of ranks; returns the rounds.

    In each round two partners divide the range of elements that both still reduce. Each sends one half to its partner,
    and receives and adds the other half. The partner is `distance` positions away in `members`; `distances` has one
    power of two for each round. A round is (partner, slice kept, slice sent); _recursive_doubling needs the rounds.
    n/2 + n/4 + ... = (p-1)/p n bytes per rank; log2 p alpha + (p-1)/p n beta seconds.
    """
    position = members.index(comm.rank)
    partial_sum, low, high, rounds = x, 0, x.size, []
    for distance in distances:
        partner, middle = members[position ^ distance], (low + high) // 2
        kept, sent = slice(low, middle), slice(middle, high)
        if position & distance:
            kept, sent = sent, kept
        sends = _send_chunks(comm, partial_sum[sent], partner)
        _recv_and_add(comm, partner, partial_sum[kept], out[kept], add)
        _wait_all(sends)
        rounds.append((partner, kept, sent))
        partial_sum, low, high = out, kept.start, kept.stop
    return rounds


def _direct_reduce_scatter(comm, parts, out, add):
    """Every rank sends part j to rank j. Writes the sum of every rank's part r, in the canonical order, to `out`.

    One round of p-1 messages, (p-1)/p n bytes per rank; (p-1) alpha + (p-1)/p n beta seconds.
    """
    p, r = comm.size, comm.rank
    peers = [(r + step) % p for step in range(1, p)]  # in this order, no two ranks send first to the same peer
    sends = [send for to in peers for send in _send_chunks(comm, parts[to], to)]
    buffers = np.empty((2, p, min(out.size, _chunk_length(out))), out.dtype)  # double buffering
    chunks = _chunks(out)

    def receive(k):
        length = chunks[k].stop - chunks[k].start
        return [comm.recv_start(buffers[k % 2, peer, :length], peer) for peer in peers]

    receives = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        _wait_all(receives[k])
        own, total = parts[r][chunk], out[chunk]

        def add_in_place(left, right, own=own, total=total):
            includes_own = any(array is own or array is total for array in (left, right))
            return add(left, right, out=total if includes_own else left)  # never into `own`, which belongs to x

        tree_reduce((own if rank == r else buffers[k % 2, rank, : total.size] for rank in range(p)), add_in_place)
        if k + 2 < len(chunks):
            receives.append(receive(k + 2))
    _wait_all(sends)


REDUCE_SCATTER = {"ring": _ring_with_two_buffers, "canonical": _direct_reduce_scatter}


# -- the all-gather phase, and broadcast -------------------------------------------------------------------------------


def _ring_all_gather(comm, parts):
    """Rank r has part r; after p-1 rounds every rank has all parts.

    A rank sends (p-1)/p n bytes, where n is the bytes of all parts; (p-1) alpha + (p-1)/p n beta seconds.
    """
    p, r = comm.size, comm.rank
    for step in range(p - 1):
        _sendrecv(comm, parts[(r - step) % p], (r + 1) % p, parts[(r - step - 1) % p], (r - 1) % p)


def _recursive_doubling(comm, out, rounds):
    """All-gather: the rounds of _recursive_halving in reverse order; partners exchange their finished slices of `out`.

    (p-1)/p n bytes per rank; log2 p alpha + (p-1)/p n beta seconds.
    """
    for partner, kept, sent in reversed(rounds):
        _sendrecv(comm, out[kept], partner, out[sent], partner)


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
    """(children, nearest first; parent, None for rank 0) in the tree with root 0. For p = 8 and rank 4: ([5, 6], 0)."""
    lowest_bit = rank & -rank  # the distance to the parent; the children are nearer
    distances = [distance for distance in _powers_below(p) if distance < (lowest_bit or p)]
    parent = rank - lowest_bit if rank else None
    return [rank + distance for distance in distances if rank + distance < p], parent


def _powers_below(p):
    """The powers of two that are less than p: [1, 2, 4, ...]."""
    return [1 << k for k in range((p - 1).bit_length())]


# -- messages ----------------------------------------------------------------------------------------------------------


def _recv_and_add(comm, source, own, out, add, forward_to=None):
    """Write own + (the array that rank `source` sends) to `out`, in chunks: add one chunk while receiving the next.

    If `forward_to` is a rank, each chunk of the sum is sent to that rank immediately. Returns the handles of these
    sends. The array of the lower rank is the left operand: the order of the operands decides whether min and max of +0
    and -0 return +0 or -0, and which bits a NaN has.
    """
    chunks, sends = _chunks(out), []
    buffers = np.empty((2, min(out.size, _chunk_length(out))), out.dtype)  # double buffering

    def receive(k):
        return comm.recv_start(buffers[k % 2, : chunks[k].stop - chunks[k].start], source)

    receives = [receive(k) for k in range(min(2, len(chunks)))]
    for k, chunk in enumerate(chunks):
        receives[k].wait()
        operands = own[chunk], buffers[k % 2, : chunk.stop - chunk.start]
        add(*(operands if comm.rank < source else operands[::-1]), out=out[chunk])
        if k + 2 < len(chunks):
            receives.append(receive(k + 2))
        if forward_to is not None:
            sends.append(comm.send_start(out[chunk], forward_to))
    return sends


def _send_chunks(comm, x, to):
    """Send x in the chunks that _recv_and_add and _direct_reduce_scatter receive; returns the handles."""
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
    """The number of elements in a chunk of at most CHUNK bytes; at least 1."""
    return max(1, CHUNK // x.itemsize)


def _chunks(x):
    """Slices of at most CHUNK bytes that cover x; none for an empty x."""
    return [slice(start, min(start + _chunk_length(x), x.size)) for start in range(0, x.size, _chunk_length(x))]


def _parts(x, p):
    """x in p contiguous parts whose lengths differ by at most one element."""
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


# -- arguments ---------------------------------------------------------------------------------------------------------


def _contiguous_input(x, out, in_place=False):
    """x as a C-contiguous array that does not overlap `out`. With in_place, x and `out` may be the same memory."""
    if out is not None and np.may_share_memory(x, out) and not (in_place and _same_memory(x, out)):
        return np.array(x, order="C")
    return np.ascontiguousarray(x)


def _same_memory(x, out):
    """Whether two arrays of equal size have the same address and the same element order."""
    return x.flags.c_contiguous and x.ctypes.data == out.ctypes.data


def _output(out, shape, dtype):
    """`out`, or a new array if `out` is None."""
    return np.empty(shape, dtype) if out is None else out


def _copied(result, out):
    """`result` copied into `out`, or as an array that owns its memory."""
    if out is None:
        return result if result.base is None else np.array(result)
    if out is not result:
        out[...] = result
    return out

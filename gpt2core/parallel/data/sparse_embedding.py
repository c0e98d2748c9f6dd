"""The sum over ranks of the token embedding's gradient: only the rows of tokens in the batch are exchanged.

The gradient (V, C) of an embedding that is not tied is zero except in the rows of the tokens that the rank has read.
Each rank sends the numbers and the values of these rows to all ranks, and adds what it has received. p ranks send

    dense    2 (p-1)/p V C numbers per rank: an all-reduce of all rows
    sparse   (p-1) R C numbers per rank: an all-gather of R rows, padded with zeros; and their row indices

R is the largest number of distinct tokens on one rank. So sparse sends fewer bytes if R < 2 V / p. A row that a rank
does not have counts as zero in the canonical order of the sum (tree_sum.py), so the bits are those of the dense sum.
"""
# p ranks; V rows of the table on this rank; R rows in a message; U of the rows that a rank has read; C channels

import numpy as np

from gpt2core.communicator import Handle
from gpt2core.tree_sum import tree_reduce

SUM_ROWS = 1024  # rows that are summed at a time, so that they stay in the cache
TABLE = "transformer.wte.weight"  # the first parameter of its arena


def tokens_read(batch_size, seq_len, ranks):
    """The largest number of tokens that one of `ranks` reads in a step."""
    return -(-batch_size // ranks) * seq_len


class SparseEmbedding:
    """Sums slices of the flat `gradients` over `group`: the table by its rows, all else by all_reduce_start(part).

    arena: the layout of `gradients`; on some ranks of a pipeline it has no table. tokens: see tokens_read(). first: the
    token of the table's first row, which is not 0 on every rank of a tensor-parallel group. all_reduce_start(part)
    starts the sum of a slice and returns its Handle.
    """

    def __init__(self, arena, gradients, group, backend, all_reduce_start, tokens, first):
        self.gradients, self.group, self.backend, self.all_reduce_start = gradients, group, backend, all_reduce_start
        self.shape, self.first = arena.shapes.get(TABLE, (0, 0)), first
        self.own, self.next = (arena.slices[TABLE], arena.padded(TABLE).stop) if TABLE in arena.shapes else (None, 0)
        self.longest = min(self.shape[0], tokens)  # rows that one rank can have
        self.rows = []  # of each rank: the sorted numbers, int32, of the rows that it has

    def begin(self, batch):
        """Called before backward with the result of prepare(): all-gather the row indices."""
        if self.own:
            ids = [self.backend.token_ids(x).ravel() for worker in batch for x, _ in worker]
            own, no_row = np.unique(np.concatenate(ids)) - self.first, self.shape[0]
            own = own[(own >= 0) & (own < no_row)]
            message = np.full(self.longest, no_row, np.int32)
            message[: own.size] = own
            self.rows = [rows[rows < no_row] for rows in self.group.all_gather(message).reshape(self.group.size, -1)]

    def reduce_start(self, part):
        """Start the sum of the slice `part` of the gradients, in place; return its Handle."""
        if not self.own or part.start != self.own.start:
            return self.all_reduce_start(part)
        rest = [self.all_reduce_start(slice(self.next, part.stop))] if part.stop > self.next else []
        xp, own = self.backend.xp, self.rows[self.group.rank]
        values = xp.zeros((max(1, *map(len, self.rows)), self.shape[1]), self.gradients.dtype)  # (R, C)
        values[: own.size] = self.table[xp.asarray(own)]
        return PendingRows(self, self.group.all_gather_start(values), rest)

    @property
    def table(self):
        """The gradient of the table (V, C), a view."""
        return self.gradients[self.own].reshape(self.shape)

    def finish(self, values):
        """Write the sum of the rows of all ranks to the table; values: theirs (p R, C)."""
        union, received = np.unique(np.concatenate(self.rows)), values.reshape(self.group.size, -1, self.shape[1])
        for start in range(0, union.size, SUM_ROWS):
            self.sum_rows(union[start : start + SUM_ROWS], received)

    def sum_rows(self, union, received):
        """Write the sum of these rows (U) of all ranks to the table; received: values (p, R, C)."""
        xp = self.backend.xp

        def with_zeros(rows, values):  # (R, C) -> (U, C)
            some = slice(*np.searchsorted(rows, (union[0], union[-1] + 1)))
            own = xp.zeros((union.size, self.shape[1]), values.dtype)
            own[xp.asarray(np.searchsorted(union, rows[some]))] = values[some]
            return own

        total = tree_reduce(map(with_zeros, self.rows, received), lambda a, b: xp.add(a, b, out=a))
        self.table[xp.asarray(union)] = total


class PendingRows(Handle):
    """The pending sum of a slice with the table; rest: the Handle, in a list, of the elements after the table."""

    def __init__(self, sparse, all_gather, rest):
        super().__init__()
        self.unfinished = sparse, all_gather, rest

    def wait(self):
        if self.unfinished:
            sparse, all_gather, rest = self.unfinished
            self.unfinished = None
            for handle in rest:
                handle.wait()
            sparse.finish(all_gather.wait())

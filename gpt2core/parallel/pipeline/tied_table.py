"""A tied table on the first and the last rank of a pipeline, with the bits of one rank.

A run with one rank adds, for each micro-batch, the gradient of the embedding to that of the head; the result enters the
sum over micro-batches. The last rank has the head, so it stores the table and its gradient. The first rank has a copy
of the table. It sends dy, the gradient (B, T, C) of the embedding's output, instead of the gradient (V, C) of the
table, and the last rank adds the rows of dy to the gradient of the head, which waits until dy has arrived.
"""

# B batch, T time, C channels, V vocabulary, p ranks of the tensor group

from gpt2core.tensor import Tensor
from gpt2core.vocabulary import Vocabulary


class TiedTable:
    """The table of this rank.

    tensor: on the last rank, that of the stored table; on the first rank, that of the copy; otherwise None.
    ends: Mesh.ends. stored: the Tensor (V/p, C) on the last rank, None on the others. group: the p ranks that divide
    the vocabulary, or a Slice, one of p slices.
    """

    def __init__(self, config, ends, group, stored, backend):
        self.ends, self.backend, self.tensor = ends, backend, stored
        self.first, self.last = bool(ends) and ends.is_root, stored is not None
        own = Vocabulary(config.vocab_size, group)
        if self.first:
            self.tensor = Tensor(backend.zeros((own.count, config.n_embd), backend.compute_dtype), backend)
        self.first_token = own.first
        self.waiting = []  # gradients of the head, oldest micro-batch first

    def refresh(self):
        """Copy the table from the last rank to the first; before each forward pass, after the table may have changed.

        Both ranks call this method.
        """
        self.waiting.clear()  # of a step that has failed
        if self.last:
            self.ends.send(self.tensor.data, 0)
        elif self.first:
            self.ends.recv(self.tensor.data, 1)

    def set_destination(self):
        """On the last rank, before backward of the head: it writes the gradient of the table to a new array."""
        self.waiting.append(self.backend.empty(self.tensor.shape, self.backend.dtype))
        self.tensor.send_to(self.waiting[-1])

    def add_embedding(self, ids, dy):
        """The gradient of the table for the oldest micro-batch that waits; ids (B, T), dy (B, T, C) are its own."""
        self.tensor.send_to(self.waiting.pop(0), accumulate=True)
        rows, _ = self.backend.embedding_backward(dy, ids, self.tensor.data, None, 0, self.first_token)
        self.tensor.receive(rows)
        return self.tensor.grad

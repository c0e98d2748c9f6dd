"""The messages between the chunks of a pipeline: activations and their gradients, arrays (B, T, C)."""

from gpt2core.communicator import Handle


class Messages:
    """The messages of one rank in a step. Their key is (kind, m, c) of the action that sends them.

    groups: {kind of an action: the group that sends its messages}: Mesh.pipeline for F and B, and if the model is tied
    Mesh.ends for E. last: the number of the last chunk. empty(m): a new array for a message of micro-batch m.

    Messages need no tags: in every schedule, the messages from one rank to another are received in the order in which
    they are sent. Only those of E are not, so they have a group of their own.
    """

    def __init__(self, groups, last, empty):
        self.groups, self.last, self.empty = groups, last, empty
        self.begin()

    def begin(self):
        """Called before the actions of a step: forget a step that has failed."""
        self.local, self.arriving, self.sent = {}, {}, {}  # {key: array, or Handle}

    def finish(self):
        """Return when all messages that were sent have been received."""
        for handle in self.sent.values():
            handle.wait()

    def key(self, kind, m, c):
        """The key of the message that an action reads, or None."""
        source = {"F": c - 1, "B": c + 1, "W": -1, "E": 0}[kind]
        return (kind, m, source) if 0 <= source <= self.last else None

    def expect(self, action):
        """Start to receive the message that an action reads, unless it was started, or this rank sends it."""
        key = self.key(*action)
        if key and key not in self.arriving:
            group, rank = self.peer(key[0], key[2])
            if rank != group.rank:
                self.arriving[key] = group.recv_start(self.empty(key[1]), rank)

    def receive(self, kind, m, c):
        """The array that the action (kind, m, c) reads."""
        key = self.key(kind, m, c)
        return self.local.pop(key) if key in self.local else self.arriving.pop(key).wait()

    def send(self, kind, m, c, to, array):
        """Start to send a result of the action (kind, m, c) to chunk `to`."""
        group, rank = self.peer(kind, to)
        if rank == group.rank:
            self.local[kind, m, c] = array
        else:
            self.sent[kind, m, c] = group.send_start(array, rank)

    def wait(self, kind, m, c):
        """Wait until the message of this action, if it was sent, was received; then its array is not kept any more."""
        self.sent.pop((kind, m, c), Handle()).wait()

    def progress(self):
        """Called while the rank computes: transfer what can be transferred of the pending messages."""
        for handle in [*self.sent.values(), *self.arriving.values()]:
            handle.progress()

    def peer(self, kind, c):
        """(the group that sends messages of this kind, the rank in it that has chunk c)."""
        group = self.groups[kind]
        return group, (1 if c else 0) if kind == "E" else c % group.size

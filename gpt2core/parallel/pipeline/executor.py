"""Run the actions of one rank of a pipeline: the same code for every schedule."""

from gpt2core.forward_arguments import ForwardArguments
from gpt2core.parallel.parameter import call
from gpt2core.parallel.part import forward_pass
from gpt2core.parallel.pipeline.messages import Messages
from gpt2core.tensor import no_grad


class Executor:
    """The chunks of one rank, and its messages to the ranks that have the chunks before and after them.

    work: the Workload of this rank. chunks: {chunk: its parts}; chunk c is on rank c % (ranks of the pipeline);
    `count`: the number of chunks on all ranks. groups: see Messages. gradients: an object with set_destinations(c),
    which is called before gradients of parameters of chunk c are computed, and for a tied model with
    add_embedding(ids, dy), which is called for an E action. peak: the largest number of graphs of one chunk and one
    micro-batch that were kept at the same time; what W actions still need is not counted. times: {action: (start, end)}
    of the last run(), where an action starts when its message is there, as results of Runtime.timestamp(); empty
    without record_times().
    """

    def __init__(self, work, chunks, count, groups, gradients):
        self.work, self.backend, self.dloss = work, work.backend, work.dloss
        self.chunks, self.last, self.gradients = chunks, count - 1, gradients
        self.messages, self.is_tied = Messages(groups, self.last, self.empty_message), "E" in groups
        self.actions = {"F": self.forward, "B": self.backward, "W": self.parameter_gradients, "E": self.embedding}
        self.peak, self.times, self.timestamp, self.started = 0, {}, None, None
        self.begin((), ())

    def empty_message(self, m):
        """A new array (B, T, C) for a message of micro-batch m."""
        shape = *self.batch[m][0].shape, self.work.config.n_embd
        return self.backend.empty(shape, self.backend.compute_dtype)

    def record_times(self):
        """From now on, run() records the time of each action in `times`; called before the first step."""
        self.timestamp = self.backend.runtime.timestamp

    def run(self, actions, batch, scale, key=None):
        """Run the actions, a list of one rank of a schedule -> {m: loss, an array of shape ()} on the last rank.

        batch: [(ids, targets) of each micro-batch]. A loss is `scale` times a sum over tokens. key: see
        Workload.training_arguments(). The message of the next action is received while an action is computed. Sends are
        waited for before the function returns: those of F(m, c) before B(m, c), and those of B(m, c) before the next
        gradient of chunk c is sent. So few of these arrays are kept; those of E are kept until the end.
        """
        arguments = [self.work.training_arguments(m, targets, scale, key) for m, (_, targets) in enumerate(batch)]
        self.begin(batch, arguments, splits=any(kind == "W" for kind, _, _ in actions))
        self.times = {}
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            self.messages.expect(action)
            if following:
                self.messages.expect(following)
            kind, m, c = action
            self.note_start()
            self.actions[kind](m, c)
            if self.timestamp:
                self.times[action] = self.started, self.timestamp()
        return self.finish()

    @no_grad()
    def evaluate(self, batch, scale):
        """{m: loss} on the last rank, without gradients and dropout; an empty micro-batch has none."""
        self.begin(batch, [ForwardArguments(targets=targets, scale=scale) for _, targets in batch])
        for m, (ids, _) in enumerate(batch):
            for c in sorted(self.chunks):
                if len(ids):
                    self.messages.expect(("F", m, c))
                    self.forward(m, c)
                    self.graphs.clear()
                else:
                    for part in self.chunks[c]:
                        part.skip()
        return self.finish()

    def begin(self, batch, arguments, splits=False):
        self.batch, self.arguments, self.splits, self.losses = batch, arguments, splits, {}
        self.graphs, self.later = {}, {}  # {(m, c): list}: graphs of the parts; functions for W
        self.messages.begin()

    def finish(self):
        self.messages.finish()
        return self.losses

    def note_start(self):
        self.started = self.timestamp() if self.timestamp else None

    def receive(self, kind, m, c):
        """The array that the action (kind, m, c) reads; the action starts when it is there."""
        array = self.messages.receive(kind, m, c)
        self.note_start()
        return array

    # -- actions -------------------------------------------------------------------------------------------------------

    def forward(self, m, c):
        x = self.receive("F", m, c) if c else self.batch[m][0]
        with self.backend.runtime.range("forward"):
            self.graphs[m, c], x = forward_pass(self.chunks[c], x, self.arguments[m])
        self.peak = max(self.peak, len(self.graphs))
        if c == self.last:
            self.losses[m] = x
        else:
            self.messages.send("F", m, c, c + 1, x)

    def backward(self, m, c):
        dx = self.dloss if c == self.last else self.receive("B", m, c)
        self.messages.wait("F", m, c)  # at once: the receiver has used the array
        graphs, later = self.graphs.pop((m, c)), []
        if not self.splits:
            self.gradients.set_destinations(c)
        with self.backend.runtime.range("backward"):
            while graphs:
                if self.is_tied and c == 0 and len(graphs) == 1:  # the last one left is that of the embedding
                    self.messages.send("E", m, c, self.last, self.before_dropout(m, dx))
                dx = graphs.pop().backward(dx, later.append if self.splits else call)
        if c:
            self.messages.wait("B", m - 1, c)
            self.messages.send("B", m, c, c - 1, dx)
        if self.splits:
            self.later[m, c] = later
        self.backend.runtime.join()  # frees the arrays of the pass, as in MicroBatches

    def parameter_gradients(self, m, c):
        self.gradients.set_destinations(c)
        with self.backend.runtime.after():
            pass  # the side stream may not write to a new destination before earlier readers of its memory are done
        with self.backend.runtime.range("backward"):
            for compute in self.later.pop((m, c)):
                compute()
        self.backend.runtime.join()

    def before_dropout(self, m, dx):
        """The gradient of the rows of the embedding from that of the stream, in which numbers of them are dropped."""
        mask = self.arguments[m].mask(0)
        return self.backend.dropout(dx, mask) if mask else dx

    def embedding(self, m, c):
        self.gradients.add_embedding(self.batch[m][0], self.receive("E", m, c))

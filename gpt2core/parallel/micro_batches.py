"""The gradient of a global batch is the sum over fixed micro-batches in one binary tree, whoever adds its subtrees."""

# A lane is a thread that owns a subtree: it runs its micro-batches one after another and adds each parameter's gradient
# into the tree the moment backward completes it, while it is still in the cache. The last lane to complete a parameter
# continues the tree over the lanes, and tells whoever continues it over the ranks: so the bits of the sum do not depend
# on how many of either there are. And a micro-batch's activations are all that exist at once: this is gradient
# accumulation as well.

import math
import threading

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.tree_sum import tree_reduce
from gpt2core.tensor import Tensor, no_grad

SUM_BLOCK = 1 << 15  # elements


class Lane:
    """One thread's model: shared parameters, its own backend, and the partial sums of its subtree.

    completed(name) is called when the sum over this lane's micro-batches of that parameter's gradient is complete.
    """

    def __init__(self, config, arena, parameters, backend, shards, group, completed):
        self.shards, self.backend, self.completed = shards, backend, completed
        depth = max(1, (shards - 1).bit_length())  # a counter of that many bits holds every partial sum
        self.partial = [backend.zeros((arena.size,), backend.dtype) for _ in range(depth)]
        self.views = [arena.views(flat) for flat in self.partial]
        losses = backend.zeros((shards,), np.float64)
        self.losses = [losses[number : number + 1].reshape(()) for number in range(shards)]
        self.tensors = {}
        for name, array in arena.views(parameters).items():
            tensor = self.tensors[name] = Tensor(array, backend, requires_grad=True)
            tensor.on_gradient = lambda gradient, name=name: self.collect(name, gradient)
        places = [(self.tensors[name].data, view) for name, view in self.views[0].items()]
        backend.place_gradients(places if shards == 1 else [])  # else something is added to a gradient
        self.done = 0  # micro-batches of this step that are in the sum
        self.model = GPT2(config, self.tensors, group)

    @property
    def gradients(self):
        """The flat sum over this lane's micro-batches, once all have run."""
        return self.partial[-1]

    def collect(self, name, gradient):
        """Add one parameter's gradient of the current micro-batch: a binary counter whose carries are additions."""
        levels = merged_levels(self.done, self.shards)
        if not levels and gradient is not self.views[0][name]:  # else it was written there
            self.views[0][name][...] = gradient
        for level in levels:
            # the last addition lands where the next level looks for it, the others where they stand
            target = min(level + 1, len(self.views) - 1) if level == levels[-1] else level
            total = self.views[target][name]
            self.backend.xp.add(self.views[level][name], gradient, out=total)
            gradient = total
        if self.done == self.shards - 1:
            self.completed(name)

    def run(self, shards, scale, seed=None):
        """[(inputs, targets)] -> `losses`, of each; leaves the gradients' sum in `gradients`.

        seed: an array of shape () that multiplies the gradients, or None for 1.
        """
        self.done = 0
        for inputs, targets in shards:
            with self.backend.span("forward"):
                loss = self.model.loss(inputs, targets, scale, seed)
            self.losses[self.done][...] = loss.data
            with self.backend.span("backward"):
                loss.backward(seed)
            del loss  # a pool has cut it out of where the logits were, and the next ones need all of that
            self.done += 1
        return self.losses


def merged_levels(done, shards):
    """Levels of the tree that micro-batch number `done` (from 0) completes: trailing ones, at the end all ones."""
    levels = [level for level in range(done.bit_length()) if done >> level & 1]
    if done < shards - 1:
        levels = [level for i, level in enumerate(levels) if level == i]
    return levels


class MicroBatches:
    """One rank's micro-batches over its workers, a lane each; the first lane's sum becomes the rank's gradient.

    parameters: the flat arena buffer that every lane shares; tensor_group: the ranks that share each layer, of which
    each lane gets a group of its own, because lanes talk at the same time. on_complete(name), where it is assigned, is
    called during backward as this rank's gradient of a parameter becomes complete: in the same order on every rank,
    one call after the other, from the thread of some lane.
    """

    def __init__(self, config, arena, parameters, workers, shards, tensor_group):
        if shards % workers.size:
            raise ConfigError(
                f"{shards} micro-batches a rank do not divide evenly over {workers.size} threads: "
                f"use --threads {math.gcd(shards, workers.size)} or another --micro-batches"
            )
        self.arena, self.workers, self.shards = arena, workers, shards
        self.on_complete, self.lock, self.arrived = None, threading.Lock(), dict.fromkeys(arena.slices, 0)
        each = shards // workers.size
        self.lanes = [
            Lane(config, arena, parameters, backend, each, tensor_group.split(0), self.lane_completed)
            for backend in workers.backends
        ]

    def deal(self, inputs, targets, rows):
        """inputs, targets (B, T) as one list of (inputs, targets) micro-batches for each lane, contiguous and in order.

        The shards are those of a batch of `rows`; where B is less, the last of them are short or empty.
        """
        shards = [(inputs[part], targets[part]) for part in even_slices(rows, self.shards)]
        return [shards[part] for part in even_slices(self.shards, self.workers.size)]

    def feed(self, inputs, targets):
        """The batch of the next backward(): inputs, targets (B, T) host arrays."""

        def take(lane, shards):
            return [tuple(lane.backend.tokens(x, (i, k)) for k, x in enumerate(pair)) for i, pair in enumerate(shards)]

        self.batch = self.workers.map(take, self.lanes, self.deal(inputs, targets, len(inputs)))

    def backward(self, scale, seed=None):
        """-> the losses of the micro-batches in order, arrays of shape () that the next call overwrites.

        Leaves the flat sum of their gradients, times `seed`, in `gradients`; to be read behind the backend's settle().
        """
        losses = self.workers.map(lambda lane, mine: lane.run(mine, scale, seed), self.lanes, self.batch)
        return [loss for lane in losses for loss in lane]

    def lane_completed(self, name):
        """The next levels of the tree, over lanes, once the last of them has come: block by cache-sized block."""
        # Every lane completes the parameters in the same order, and counts one only when its part of those before is
        # done: so the calls of on_complete never overtake each other, and no rank's order is another's.
        with self.lock:
            self.arrived[name] += 1
            if self.arrived[name] < len(self.lanes):
                return
            self.arrived[name] = 0
        xp, part = self.workers.backends[0].xp, self.arena.slices[name]
        for start in range(part.start, part.stop, SUM_BLOCK):
            block = slice(start, min(start + SUM_BLOCK, part.stop))
            tree_reduce([lane.gradients[block] for lane in self.lanes], lambda a, b: xp.add(a, b, out=a))
        if self.on_complete:
            self.on_complete(name)

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        """The losses of the micro-batches of a batch of `rows`, nothing recorded: validation. An empty one's is 0."""

        def run(lane, mine):
            return [lane.model.loss(x, y, scale).item() if len(x) else 0.0 for x, y in mine]

        each = self.workers.map(run, self.lanes, self.deal(inputs, targets, rows))
        return [loss for lane in each for loss in lane]

    @property
    def gradients(self):
        """The flat gradient of this rank's share of the global batch, after backward()."""
        return self.lanes[0].gradients

"""The only training step: batch, gradient, norm, update; the same lines for any threads, ranks and devices."""

# B sequences of the global batch, T tokens of each; a rank reads B / ranks of them

import contextlib
import hashlib
import math
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.arena import Arena
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, UserError
from gpt2core.model import GPT2, flops_per_token, initial_parameters, parameter_shapes
from gpt2core.optimizer import AdamW
from gpt2core.parallel import tensor_parallel
from gpt2core.parallel.bucket_size import measured_bucket
from gpt2core.parallel.compression import Compressed
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data_parallel import data_parallel
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.loss_scale import LossScale
from gpt2core.parallel.mesh import Mesh
from gpt2core.parallel.micro_batches import MicroBatches
from gpt2core.parallel.threads import Workers, limit_blas
from gpt2core.parallel.tree_sum import tree_sum
from gpt2core.parallel.zero import PIECE_MB, Arriving, check_gather
from gpt2core.tensor import Tensor


class Diverged(UserError):
    """The loss or the gradient is not finite, or ranks differ; the parameters are those before the step."""

    shared = True  # it is seen in numbers that all ranks have alike


@dataclass(frozen=True)
class Step:
    """What one training step reports; the fields of one line of the log."""

    step: int
    loss: float  # mean cross-entropy of the global batch before the update, in nats a token
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    loss_scale: float | None = None  # fp16: after the step
    skipped: int | None = None  # fp16: times that its gradient overflowed and it was made again
    mfu: float | None = None  # model FLOPs over the device's peak, where that is known
    bytes_sent: int | None = None  # by this rank, in all groups; None where there is nobody to send to


class Trainer:
    """A model, its optimizer and the threads and ranks that share the work.

    config: GPT2Config; backends: one for each thread of this rank; world: all ranks; parallel: how they share the
    work; optimizer and loss_scale: keyword arguments of AdamW and LossScale; record: let the backend record a step and
    replay it. The global batch is `batch_size` sequences of `seq_len` tokens, in `micro_batches` shards.
    """

    def __init__(
        self, config, backends, *, batch_size, seq_len, micro_batches, optimizer=None, world=None, parallel=None,
        seed=0, record=True, loss_scale=None,
    ):  # fmt: skip
        if seq_len > config.block_size:
            raise ConfigError(f"--seq-len {seq_len} is longer than the model's block of {config.block_size} positions")
        parallel = parallel or ParallelConfig()
        self.config, self.world, self.parallel, self.seed = config, world or Solo(), parallel, seed
        self.mesh = Mesh(self.world, self.world.size // parallel.tp, parallel.tp)
        data, tensor = self.mesh.data, self.mesh.tensor
        tensor_parallel.check_tensor_parallel(config, tensor.size)
        backends[0].check_model(config)
        self.batch_size, self.seq_len, self.micro_batches = batch_size, seq_len, micro_batches
        self.rows = even_slices(batch_size, data.size)[data.rank]
        self.batch_rows = self.rows.stop - self.rows.start
        self.workers = Workers(backends)
        limit_blas(1)  # of its own in each worker, however many the environment allows
        owners = {0: Solo(), 1: data}[parallel.zero]
        self.arena = Arena(tensor_parallel.shard_shapes(parameter_shapes(config), tensor.size), owners.size)
        backend = backends[0]
        self.parameters = backend.zeros((self.arena.size,), backend.dtype)
        self.compute = backend.compute_copy(self.parameters)
        self.shards = MicroBatches(config, self.arena, self.compute, self.workers, micro_batches // data.size, tensor)
        self.measured = self.measure(data, record) if parallel.bucket_mb is None else None
        self.data_parallel = self.reduction(data, owners)
        self.shards.on_complete = self.data_parallel.completed
        self.arriving = self.gathering(owners)
        replicated = filter(tensor_parallel.is_replicated, self.arena.slices)
        repeated = [] if tensor.is_root else [self.arena.padded(name) for name in replicated]
        self.optimizer = AdamW(
            self.arena, self.parameters, self.workers, owners=owners, tensor_group=tensor, repeated=repeated,
            copy=None if self.compute is self.parameters else self.compute, gathers=parallel.zero_gather == "end",
            **(optimizer or {}),
        )  # fmt: skip
        self.loss_scale = LossScale(backend, **(loss_scale or {}))
        self.position = 0  # windows consumed since the start of training
        self.fed = None, 0  # the windows and the position of the batch that is fed already
        self.under_way = None  # (windows, rate, finish) of the step that was begun before its turn
        self.asked_to_stop = lambda: 0  # the number of a signal that this rank has received
        self.stopped_by = 0  # and of one that any rank has
        self.update = backend.compile_step(self.compute_update, record and self.world.capturable)
        self.choices = None  # what the root's backend has chosen by timing, once the first step has
        self.fill(self.parameters, initial_parameters(config, seed) if self.world.is_root else None)
        backend.refresh(self.compute, self.parameters)
        backend.trim()
        self.adopt(self.world.broadcast_object(backend.choices))  # so that all ranks try out the same: what is left

    def measure(self, group, record):
        """The root's BucketSize, for everyone: it is chosen by timing."""
        step = self.backend, record and self.world.capturable
        return self.world.broadcast_object(measured_bucket(group, self.shards.gradients, *step))

    def reduction(self, group, owners):
        """The sum of the gradients over the data-parallel group, as the flags ask for it."""
        gradients, parallel = self.shards.gradients, self.parallel
        if parallel.compress != "none" and self.backend.scales_loss:
            raise ConfigError(
                f"--compress {parallel.compress} would keep what overflows in fp16 and send it again: use --precision "
                f"bf16 with it, or leave it away"
            )
        if parallel.compress != "none":
            xp = self.backend.xp
            reduce_start = Compressed(self.backend.codec(parallel.compress), gradients, group, xp).reduce_start
        elif parallel.dp == "flat" and parallel.zero:
            own = self.arena.part(owners.rank, owners.size)  # nobody needs more of the sum than it owns

            def reduce_start(_):
                return group.reduce_scatter_start(gradients, out=gradients[own])
        else:

            def reduce_start(part):
                return group.all_reduce_start(gradients[part], out=gradients[part])

        def behind_gradients(part):
            with self.backend.behind_gradients():
                return reduce_start(part)

        return data_parallel(parallel.dp, self.arena, behind_gradients, gradients.itemsize, self.bucket_mb)

    @property
    def bucket_mb(self):
        """The least size of a message that packs several parameters, in 10^6 bytes."""
        return self.parallel.bucket_mb if self.measured is None else self.measured.mb

    def gathering(self, owners):
        """The context of forward and backward: in it comes what kernels read, where it was not gathered before."""
        check_gather(self.parallel.zero_gather, self.parallel.zero)
        if self.parallel.zero_gather == "end":
            return contextlib.nullcontext()
        arriving = Arriving(self.arena, self.compute, owners, min(PIECE_MB, self.bucket_mb))
        for lane in self.shards.lanes:
            lane.model.parameters = arriving.watched(lane.model.parameters)
        return arriving

    @property
    def backend(self):
        """The backend of the first worker, which also computes what is done once a rank."""
        return self.workers.backends[0]

    @property
    def steps(self):
        """Updates made so far."""
        return self.optimizer.steps

    def named(self, flat):
        """{Hugging Face name: the whole array, gathered from its shards} of a flat buffer; views where none is."""
        views, group = self.arena.views(flat), self.mesh.tensor
        return {name: tensor_parallel.gather(name, view, group) for name, view in views.items()}

    def named_parameters(self):
        """{Hugging Face name: parameter} on the host; views where this rank holds all of it. All ranks must call it."""
        self.optimizer.gather_parameters()
        return self.on_host(self.named(self.parameters))

    def named_moments(self):
        """{Hugging Face name: (first, second moment)} on the host; all ranks must call it."""
        first, second = (self.on_host(self.named(flat)) for flat in self.optimizer.moments())
        return {name: (first[name], second[name]) for name in first}

    def on_host(self, arrays):
        return {name: self.backend.to_host(array) for name, array in arrays.items()}

    def fill(self, flat, arrays):
        """Copy the root's (name, whole array) pairs, in the model's order, into everyone's shards; None elsewhere."""
        backend, tensor, views = self.backend, self.mesh.tensor, self.arena.views(flat)
        dtype = np.dtype(backend.dtype)
        for name, shape in parameter_shapes(self.config):
            array = np.empty(shape, dtype) if arrays is None else np.ascontiguousarray(next(arrays)[1], dtype)
            array = self.world.broadcast(array, out=array)
            views[name][...] = backend.asarray(tensor_parallel.shard(name, array, tensor.rank, tensor.size))

    def load(self, parameters, moments=None, steps=0, position=0, loss_scale=None):
        """Copy the root's parameters {name: array} and moments {name: (first, second)}, and where training stood.

        The root's arguments count; other ranks pass None for the dictionaries, and all the same numbers.
        """
        names = self.arena.slices

        def ordered(values):
            return iter([(name, values(name)) for name in names]) if self.world.is_root else None

        backend = self.backend
        self.loss_scale.load(loss_scale)
        self.fill(self.parameters, ordered(lambda name: parameters[name]))
        if self.world.broadcast_object(moments is not None):
            flats = [backend.zeros((self.arena.size,), backend.dtype) for _ in "mv"]
            for which, flat in enumerate(flats):
                self.fill(flat, ordered(lambda name, which=which: moments[name][which]))
            self.optimizer.load_moments(*flats)
            del flats, flat
        self.optimizer.steps, self.position = steps, position
        self.optimizer.refresh_copy()
        backend.trim()

    def step(self, windows, lr, then=None):
        """One update from the next global batch of `windows`; returns a Step.

        Sets `stopped_by` to the number of the signal that has asked any rank to stop, or 0. Raises Diverged, leaving
        the parameters as they were, when the loss or the gradient is not finite. In fp16 a gradient that overflows is
        computed again with half the loss scale, so that no batch is lost and the curve has no holes.

        then: the rate of the step after this one, if nothing comes between the two. A device that can begins that one
        before it is asked for this one's numbers, and waits for nobody; `under_way` is then not None, and the
        parameters are already those of that step.
        """
        start, skipped, self.sent = time.perf_counter(), self.loss_scale.skipped, 0
        loss, norm = self.attempt(windows, lr, then)
        while self.loss_scale.skips(loss, norm):
            if (factor := self.loss_scale.value) < self.loss_scale.SMALLEST:
                raise Diverged(
                    f"step {self.steps}: the loss scale has collapsed to {factor:g}, and the gradient still overflows "
                    f"in fp16: use --precision bf16, or lower --lr (now {lr:g}); the parameters are still those of "
                    f"step {self.steps}"
                )
            loss, norm = self.attempt(windows, lr)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.abandon()
            raise Diverged(
                f"step {self.steps}: the loss is {loss} and the gradient's norm {norm}: training cannot go on. "
                f"Lower --lr (now {lr:g}) or set --clip; the parameters are still those of step {self.steps}"
            )
        self.optimizer.steps += 1
        self.position += self.batch_size
        seconds = time.perf_counter() - start
        rate = self.batch_size * self.seq_len / seconds
        scale = self.loss_scale.value
        skipped = None if scale is None else self.loss_scale.skipped - skipped
        mfu = self.utilisation(rate)
        return Step(self.steps - 1, loss, lr, norm, rate, seconds, scale, skipped, mfu, self.sent or None)

    def attempt(self, windows, lr, then=None):
        """An update by the next batch, which may be skipped -> its loss and norm as numbers, the same on all ranks."""
        if self.under_way and (self.under_way[0] is not windows or self.under_way[1] != lr):
            raise ValueError(f"another step is under way already, at rate {self.under_way[1]} and not {lr}")
        finish = self.under_way[2] if self.under_way else self.begin(windows, lr)
        self.under_way = None
        if then is not None and self.update.ahead and self.loss_scale.state is None:
            self.under_way = windows, then, self.begin(windows, then, ahead=1)
        else:
            self.feed(windows, self.position + self.batch_size)  # while a device works, the host brings the next batch
        *losses, norm = self.backend.numbers(finish())
        sent = self.bytes_sent() - self.sent_by_update
        loss, self.stopped_by = self.total(losses, self.asked_to_stop())
        self.sent += self.bytes_sent() - sent
        return loss, norm

    def begin(self, windows, lr, ahead=0):
        """Begin the next update, or the one that is `ahead` of it; returns what waits for its losses and norm."""
        self.optimizer.begin(lr, ahead)
        self.feed(windows, self.position + ahead * self.batch_size)
        finish = self.update()
        self.agree()
        return finish

    def abandon(self):
        """Let a step that is under way end: it updates nothing, as the gradient before it was not finite."""
        if self.under_way:
            self.under_way[2]()
            self.under_way = None
        self.optimizer.stop[...] = 0

    def feed(self, windows, position):
        """Bring this rank's rows of the batch at `position`, unless they are there already."""
        if not (self.fed[0] is windows and self.fed[1] == position):
            self.shards.feed(*windows.batch(position + self.rows.start, self.batch_rows))
            self.fed = windows, position

    def compute_update(self):
        """All of a step that a device does by itself: -> [*this rank's losses, norm]; what is not finite stops it.

        Nothing in it waits for a number, so that it can be recorded once and replayed.
        """
        sent = self.bytes_sent()
        with self.arriving:
            losses = self.shards.backward(1 / (self.batch_size * self.seq_len), self.loss_scale.factor)
        self.data_parallel.finish()
        self.backend.settle()
        with self.backend.span("optimizer"):
            stop = self.optimizer.stop if self.loss_scale.state is None else None  # fp16 repeats such a step
            norm, scale = self.optimizer.norm_and_scale(self.shards.gradients, self.loss_scale, stop)
            self.optimizer.update(self.shards.gradients, scale)
        self.sent_by_update = self.bytes_sent() - sent  # as much as any replay sends, which nobody counts
        return [*losses, norm]

    def agree(self):
        """After the first step: what the root's backend chose by timing is everyone's choice from here on."""
        if self.choices is None:
            self.choices = self.world.broadcast_object(self.backend.choices)
            self.adopt(self.choices, final=True)

    def adopt(self, choices, final=False):
        """Let all backends of this rank choose as `choices` have it: see Backend.adopt."""
        for backend in self.workers.backends:
            backend.adopt(choices, final)

    def total(self, losses, signal_received=0):
        """The canonical sum of all ranks' losses, and the largest signal number among them: it rides along.

        Tensor-parallel ranks have the same losses; those of the first of them count.
        """
        mine = np.array([signal_received, *losses], np.float64)
        everyones = self.world.all_gather(mine).reshape(-1, self.mesh.tensor.size, len(mine))  # (data, tensor, 1 + n)
        return tree_sum([float(loss) for loss in everyones[:, 0, 1:].ravel()]), int(everyones[:, :, 0].max())

    def bytes_sent(self):
        """What this rank has handed to others so far."""
        groups = (self.world, self.mesh.data, self.mesh.tensor, *(lane.model.group for lane in self.shards.lanes))
        return sum(group.bytes_sent for group in groups)

    def utilisation(self, tokens_per_second):
        peak = self.backend.peak_flops(self.backend.precision)
        return peak and tokens_per_second * flops_per_token(self.config, self.seq_len) / (peak * self.world.size)

    def evaluate(self, windows):
        """Mean cross-entropy over every whole window once, in nats a token; nothing is updated.

        Raises Diverged when it is not finite.
        """
        self.optimizer.gather()
        total, count = 0.0, 0
        for inputs, targets in windows.once(self.batch_size):
            losses = self.shards.losses(inputs[self.rows], targets[self.rows], 1.0, self.batch_rows)
            total += self.total(losses)[0]
            count += inputs.size
        if not math.isfinite(total):
            raise Diverged(f"step {self.steps - 1}: the validation loss is {total / count}: lower --lr or set --clip")
        return total / count

    def check_parameters(self):
        """Raise Diverged when an update has blown the parameters up: they must not take a good checkpoint's place."""
        norm = self.optimizer.gradient_norm(self.parameters)
        if not math.isfinite(norm):
            raise Diverged(
                f"step {self.steps - 1}: the norm of the parameters is {norm} after the update: lower --lr or set "
                f"--clip. They are not saved; the checkpoints before are as they were"
            )

    def model(self):
        """The current model, for generation by this rank alone; all ranks must call it."""
        self.optimizer.gather()
        backend = self.backend
        return GPT2(self.config, {name: Tensor(array, backend) for name, array in self.named(self.compute).items()})

    def parameter_hash(self):
        """SHA-256 of all parameters by name, in model order: equal exactly when every bit is. All ranks must call."""
        digest = hashlib.sha256()
        for name, array in self.named_parameters().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def verify(self):
        """Raise Diverged unless all replicas of a parameter have the same bits; all ranks must call it."""
        self.optimizer.gather_parameters()
        digest = hashlib.sha256()
        for flat in (self.parameters, self.compute):  # the copy that kernels read is what ZeRO-1 gathers at each step
            digest.update(self.backend.to_host(flat))
        mine = digest.hexdigest()
        everyones = self.world.all_gather_object((self.mesh.tensor.rank, mine))
        expected = {}  # tensor rank -> (the first rank that holds that shard, its hash)
        for rank, (shard, found) in enumerate(everyones):
            first, wanted = expected.setdefault(shard, (rank, found))
            if found != wanted:
                raise Diverged(
                    f"step {self.steps - 1}: the parameters of rank {rank} differ from those of rank {first} (SHA-256 "
                    f"{found[:12]} and {wanted[:12]}): a rank's memory or machine is at fault, or its software "
                    f"differs; the checkpoints before are as they were"
                )

"""The only training loop: batch, gradient, norm, update, log, checkpoint; the same lines for any threads and ranks."""

# B sequences of the global batch, T tokens of each; a rank reads B / ranks of them

import contextlib
import hashlib
import math
import signal
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.arena import Arena
from gpt2core.canonical import tree_sum
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, UserError
from gpt2core.model import GPT2, flops_per_token, initial_parameters, parameter_shapes
from gpt2core.optimizer import AdamW
from gpt2core.parallel.micro_shards import MicroShards, even_slices
from gpt2core.parallel.workers import Workers, limit_blas
from gpt2core.tensor import Tensor


class Diverged(UserError):
    """The loss or the gradient is not finite; the parameters are those before the step."""


@dataclass(frozen=True)
class Step:
    """What one training step reports; the fields of one line of the log."""

    step: int
    loss: float  # mean cross-entropy of the global batch before the update, in nats a token
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    mfu: float | None = None  # model FLOPs over the device's peak, where that is known


class Trainer:
    """A model, its optimizer and the threads and ranks that share the work.

    config: GPT2Config; backends: one for each thread of this rank; world: the data-parallel ranks; optimizer: keyword
    arguments of AdamW. The global batch is `batch_size` sequences of `seq_len` tokens, in `micro_shards` shards.
    """

    def __init__(self, config, backends, *, batch_size, seq_len, micro_shards, optimizer=None, world=None, seed=0):
        if seq_len > config.block_size:
            raise ConfigError(f"--seq-len {seq_len} is longer than the model's block of {config.block_size} positions")
        self.config, self.world, self.seed = config, world or Solo(), seed
        self.batch_size, self.seq_len, self.micro_shards = batch_size, seq_len, micro_shards
        self.rows = even_slices(batch_size, self.world.size)[self.world.rank]
        self.batch_rows = self.rows.stop - self.rows.start
        self.workers = Workers(backends)
        limit_blas(1)  # of its own in each worker, however many the environment allows
        self.arena = Arena(parameter_shapes(config))
        backend = backends[0]
        self.parameters = backend.zeros((self.arena.size,), backend.dtype)
        self.shards = MicroShards(
            config, self.arena, self.parameters, self.workers, micro_shards // self.world.size, Solo()
        )
        self.optimizer = AdamW(self.arena, self.parameters, self.workers, **(optimizer or {}))
        self.position = 0  # windows consumed since the start of training
        views = self.named_parameters()
        for name, array in initial_parameters(config, seed):
            views[name][...] = backend.asarray(array)

    @property
    def steps(self):
        """Updates made so far."""
        return self.optimizer.steps

    def named_parameters(self):
        """{Hugging Face name: view of the parameter}."""
        return self.arena.views(self.parameters)

    def named_moments(self):
        """{Hugging Face name: (first, second moment)}, views."""
        first, second = self.arena.views(self.optimizer.exp_avg), self.arena.views(self.optimizer.exp_avg_sq)
        return {name: (first[name], second[name]) for name in first}

    def load(self, parameters, moments=None, steps=0, position=0):
        """Copy parameters {name: array}, moments {name: (first, second)}, and where training stood."""
        asarray = self.workers.backends[0].asarray
        for name, view in self.named_parameters().items():
            view[...] = asarray(parameters[name])
        for name, pair in (moments or {}).items():
            for view, value in zip(self.named_moments()[name], pair, strict=True):
                view[...] = asarray(value)
        self.optimizer.steps, self.position = steps, position

    def step(self, windows, lr):
        """One update from the next global batch of `windows`; returns a Step.

        Raises Diverged, leaving the parameters as they were, when the loss or the gradient is not finite.
        """
        start = time.perf_counter()
        inputs, targets = windows.batch(self.position + self.rows.start, self.batch_rows)
        tokens = self.batch_size * self.seq_len
        losses = self.shards.backward(inputs, targets, 1 / tokens)
        gradients = self.world.all_reduce(self.shards.gradients, out=self.shards.gradients)
        loss = self.total(losses)
        norm = self.optimizer.gradient_norm(gradients)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"step {self.steps}: the loss is {loss} and the gradient's norm {norm}: training cannot go on. "
                f"Lower --lr (now {lr:g}) or set --clip; the parameters are still those of step {self.steps}"
            )
        self.optimizer.step(gradients, lr, norm)
        self.position += self.batch_size
        seconds = time.perf_counter() - start
        return Step(self.steps - 1, loss, lr, norm, tokens / seconds, seconds, self.utilisation(tokens / seconds))

    def total(self, losses):
        """The canonical sum of this rank's losses and all others'."""
        return tree_sum([float(loss) for loss in self.world.all_gather(np.array(losses, np.float64))])

    def utilisation(self, tokens_per_second):
        peak = self.workers.backends[0].peak_flops(self.workers.backends[0].precision)
        return peak and tokens_per_second * flops_per_token(self.config, self.seq_len) / (peak * self.world.size)

    def evaluate(self, windows):
        """Mean cross-entropy over every whole window once, in nats a token; nothing is updated.

        Raises Diverged when it is not finite.
        """
        total, count = 0.0, 0
        for inputs, targets in windows.once(self.batch_size):
            total += self.total(self.shards.losses(inputs[self.rows], targets[self.rows], 1.0, self.batch_rows))
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
        """The current model, for generation: parameters shared, no gradients."""
        backend = self.workers.backends[0]
        return GPT2(self.config, {name: Tensor(array, backend) for name, array in self.named_parameters().items()})

    def parameter_hash(self):
        """SHA-256 of all parameters by name, in model order: equal exactly when every bit is."""
        digest = hashlib.sha256()
        for name, array in self.named_parameters().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.workers.backends[0].to_host(array)))
        return digest.hexdigest()


def plan(batch_size, micro_shards, threads, ranks, deterministic):
    """(micro-shards of the global batch, threads a rank) from what was asked for; None: not asked.

    Deterministic: a power of two of micro-shards, 8 where the batch allows it, that threads and ranks divide. Else one
    for each thread. Raises ConfigError, naming the nearest number that works.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} must be at least 1")
    if batch_size % ranks:
        near = max(ranks, round(batch_size / ranks) * ranks)
        raise ConfigError(f"--batch-size {batch_size} is not divisible by {ranks} ranks: use {near}")
    if threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if not deterministic:
        if micro_shards is None:
            threads = min(threads, batch_size // ranks)
            return threads * ranks, threads
        if not 0 < micro_shards <= batch_size or micro_shards % ranks:
            raise ConfigError(
                f"--micro-shards {micro_shards} must be from 1 to --batch-size {batch_size} "
                f"and divisible by {ranks} ranks"
            )
        return micro_shards, max(n for n in range(1, threads + 1) if micro_shards // ranks % n == 0)
    if micro_shards is None:
        micro_shards = min(8, batch_size & -batch_size)
        if micro_shards % ranks:
            raise ConfigError(
                f"--batch-size {batch_size} makes {micro_shards} micro-shards, which {ranks} ranks do not divide: "
                f"use a power of two of ranks and a --batch-size divisible by {8 * ranks}, or --no-deterministic"
            )
    if micro_shards < 1 or micro_shards & (micro_shards - 1):
        below = 1 << max(0, micro_shards.bit_length() - 1)
        raise ConfigError(
            f"--micro-shards {micro_shards} is not a power of two: use {max(1, below)} or {2 * below}, "
            f"or --no-deterministic"
        )
    if batch_size % micro_shards:
        raise ConfigError(
            f"--batch-size {batch_size} is not divisible by --micro-shards {micro_shards}: "
            f"use --micro-shards {min(micro_shards, batch_size & -batch_size)} or "
            f"--batch-size {max(1, round(batch_size / micro_shards)) * micro_shards}"
        )
    if micro_shards % ranks:
        raise ConfigError(
            f"--micro-shards {micro_shards} is not divisible by {ranks} ranks: use a power of two of ranks, "
            f"or --no-deterministic"
        )
    each = min(threads, micro_shards // ranks)
    return micro_shards, 1 << each.bit_length() - 1  # a thread owns a whole subtree


class StopSignals(contextlib.AbstractContextManager):
    """SIGINT and SIGTERM set `received` so that the step in hand is finished; a second one acts at once."""

    def __enter__(self):
        self.received, self.previous = None, {}
        with contextlib.suppress(ValueError):  # signals belong to the main thread: Threads ranks run without
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, frame):
        self.received = number
        signal.signal(number, self.previous[number])

    def __exit__(self, *error):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def run(trainer, windows, schedule, steps, *, validation=None, eval_every=0, on_step, save=None, save_every=0):
    """Train until `steps` updates are made in all; returns the number of the signal that stopped it early, or None.

    on_step(step, validation loss or None, last) reports each step; save(trainer) writes a checkpoint, always at the
    end where it is given, never of parameters that have diverged. `validation` windows are evaluated every `eval_every`
    steps and at the end.
    """

    def save_sound():
        trainer.check_parameters()
        save(trainer)

    stopping = None
    with StopSignals() as stop:
        while trainer.steps < steps and not stopping:
            step = trainer.step(windows, schedule(trainer.steps))
            stopping = stop.received  # read once: a signal after this line belongs to the next step
            last = bool(stopping) or trainer.steps >= steps
            due = validation is not None and (last or (eval_every and trainer.steps % eval_every == 0))
            on_step(step, trainer.evaluate(validation) if due else None, last)
            if save and save_every and trainer.steps % save_every == 0 and not last:
                save_sound()
        if save:
            save_sound()
    return stopping

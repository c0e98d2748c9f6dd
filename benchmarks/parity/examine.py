"""Finds the first difference of a training run: the step, the layer, the operation and the tensor.

examine() trains with hooks around kernels and collectives. It compares

- each kernel call with the oracle in float64, on the inputs of this call, so that an error is found where it is made;
- each collective with the result computed from the arrays of all ranks;
- the results of the forward kernels and the gradient of each parameter with those of a whole model in float64, which
  finds errors between kernels, for example in autograd;
- the gradient that the optimizer reads with the sum of the gradients of all ranks.

To read the arrays, the host waits for the device after each kernel. This hides a kernel that does not wait for another
one, so examine() then trains two steps again, and does not wait in the second one.
"""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np

from benchmarks.parity.checks import (
    TOLERANCE,
    CollectiveRecorder,
    KernelChecker,
    check_collectives,
    difference,
    place_of,
    sum_remark,
)
from benchmarks.parity.oracle import reference
from gpt2core.communicator import Solo, address
from gpt2core.errors import Diverged
from gpt2core.tracing.hooks import Hooks, Modules, around_gradients, module_name
from gpt2core.tracing.trace import groups
from gpt2core.tree_sum import tree_sum

MODEL_FACTOR = 10  # the tolerance of a whole model: the errors of its layers add up
BETWEEN = "the kernel itself is right: its inputs or the operation that calls it are wrong"
RACE = "an event is missing, or a buffer is reused too early"


class Examination:
    """The hooks of one rank's Trainer, and the comparisons after each step."""

    def __init__(self, trainer, exact):
        self.trainer, self.exact, self.hooks = trainer, exact, Hooks()
        self.tolerance = TOLERANCE[trainer.backend.precision]
        self.checkers, self.recorders, self.own_gradients = [], {}, {}
        for worker in trainer.accumulator.workers:
            checker = KernelChecker(worker.backend, Modules(worker.tensors), self.tolerance)
            self.hooks.around_kernels(worker.backend, checker.around)
            self.checkers.append(checker)
        for title, group in groups(trainer):
            if group is not trainer.world and not group.one_process:
                recorder = self.recorders[title] = CollectiveRecorder(trainer.backend, self.part_of)
                self.hooks.around_collectives(group, recorder.around)
        sums = trainer.accumulator.sums
        self.hooks.set(sums, "on_complete", functools.partial(self.gradient_complete, sums.on_complete))
        watch_gradients(trainer, self.hooks, self)

    def part_of(self, x):
        """The parameters in the part of a flat buffer that `x` is, as text; "" for another array."""
        trainer = self.trainer
        for buffer, flat in (("gradients", trainer.accumulator.gradients), ("parameters", trainer.compute_parameters)):
            first = (address(x) - address(flat)) // flat.itemsize if type(x) is type(flat) and x.size else -1
            if 0 <= first < flat.size:
                names = [
                    module_name(name) + name[name.rindex(".") :]
                    for name, part in trainer.arena.slices.items()
                    if part.start < first + x.size and first < part.stop
                ]
                return f"{buffer} of {names[0]} to {names[-1]}" if names else buffer
        return ""

    def gradient_complete(self, on_complete, unit):
        """Called when this rank's gradient of a unit is complete, before it is sent."""
        self.trainer.backend.runtime.join()
        for name in reversed(self.trainer.arena.units[unit]):
            own = self.trainer.accumulator.gradients[self.trainer.arena.slices[name]]
            self.own_gradients[name] = np.array(self.trainer.backend.to_host(own))
        on_complete(unit)

    def after_step(self, step, batch, parameters):
        """The first Difference of this step on any rank, or None. All ranks call it.

        batch: (inputs, targets) of this rank. parameters: {name: float64 array} before the step.
        """
        trainer = self.trainer
        world = trainer.world
        calls = {title: recorder.calls for title, recorder in self.recorders.items()}
        gathered = world.all_gather_object(
            (calls, self.own_gradients, trainer.mesh.data.rank, trainer.mesh.tensor.rank)
        )
        found = next((checker.found for checker in self.checkers if checker.found), None)
        if not found:
            ranks = {title: members_of(title, gathered, world.rank) for title in self.recorders}
            of_ranks = [each[0] for each in gathered]
            found = check_collectives(self.recorders, of_ranks, ranks, step, self.tolerance, self.exact)
        if not found and parameters:
            found = self.compare_model(step, batch, parameters)
        if not found:
            own = [each[1] for each in gathered if each[3] == trainer.mesh.tensor.rank]
            found = self.compare_sums(step, own)
        for recorder in self.recorders.values():
            recorder.calls = []
        for checker in self.checkers:
            checker.activations.clear()
            checker.forwards.clear()
        all_found = world.all_gather_object(found)
        return next((found for found in all_found if found), None)

    def compare_model(self, step, batch, parameters):
        """Compare results of forward kernels, and this rank's gradients, with a model in float64."""
        trainer, tolerance = self.trainer, MODEL_FACTOR * self.tolerance
        scale = 1 / (trainer.batch_size * trainer.seq_len)
        activations, gradients = reference(trainer.config, parameters, *batch, scale)
        for (module, kernel), want in activations.items():
            got = [y for checker in self.checkers for y in checker.activations.get((module, kernel), [])]
            where = dict(step=step, place=place_of(module, kernel), tensor="y")
            if got and (found := difference(np.concatenate(got), want, tolerance, **where, remark=BETWEEN)):
                return found
        for name, own in self.own_gradients.items():  # in the order of backward
            want = gradients[name]
            where = dict(step=step, place=place_of(module_name(name), "backward"), tensor=f"gradient of {name}")
            least = np.linalg.norm(want) if not name.endswith("bias") else least_of_bias(gradients, name)
            if found := difference(own.reshape(want.shape), want, tolerance, least, **where, remark=BETWEEN):
                return found
        return None

    def compare_sums(self, step, own):
        """Compare the gradient that the optimizer reads with the sum over ranks; own: [{name: gradient} of each]."""
        parts, first = self.trainer.arena.slices, self.read_part.start
        for name in self.own_gradients:
            start, stop = max(parts[name].start, first), min(parts[name].stop, self.read_part.stop)
            if start >= stop:
                continue
            inside = slice(start - parts[name].start, stop - parts[name].start)
            want = tree_sum([gradients[name][inside] for gradients in own])
            got, mine = self.gradient[start - first : stop - first], self.own_gradients[name][inside]
            place = place_of(module_name(name), f"sum of the gradient over {len(own)} ranks")
            where = dict(step=step, place=place, tensor=f"gradient of {name}", remark=sum_remark(got, mine, want))
            if found := difference(got, want, self.tolerance, exact=self.exact, **where):
                return found
        return None


def least_of_bias(gradients, name):
    """The least norm for a bias: the gradient of its weight has the size of the terms that are summed."""
    return float(np.linalg.norm(gradients.get(name.replace("bias", "weight"), 0.0)))


def watch_gradients(trainer, hooks, target):
    """In each step set target.gradient, the flat gradient that the optimizer reads, and target.read_part, its slice."""
    norm_and_factor = trainer.optimizer.norm_and_factor

    def watched(gradients, *arguments, **options):
        target.read_part = trainer.optimizer.own
        target.gradient = np.array(trainer.backend.to_host(gradients[target.read_part]))
        return norm_and_factor(gradients, *arguments, **options)

    hooks.set(trainer.optimizer, "norm_and_factor", watched)


def members_of(title, gathered, rank):
    """(the ranks of the world in this rank's group `title`, the index of this rank among them)."""
    kind = 2 if title.startswith("tensor") else 3  # ranks of one tensor group have one data rank, and vice versa
    members = [other for other, each in enumerate(gathered) if each[kind] == gathered[rank][kind]]
    return members, members.index(rank)


def examine(make_trainer, windows, steps, lr, world, exact=False):
    """Train `steps` steps and return the first Difference, equal on all ranks, or None; all ranks call it.

    make_trainer(world) builds the Trainer, without CUDA graphs. exact: whether sums over ranks need equal bits.
    """
    trainer = make_trainer(world)
    examination = Examination(trainer, exact)
    whole = trainer.mesh.tensor.one_process  # a rank has whole parameters
    for step in range(steps):
        for checker in examination.checkers:
            checker.step = step
        rows, position = trainer.rows, trainer.position
        batch = windows.batch(position + rows.start, rows.stop - rows.start)
        trainer.optimizer.gather()  # with --zero-gather forward a rank has only its own part until the next step
        flat = np.array(trainer.backend.to_host(trainer.compute_parameters), np.float64)
        parameters = {name: np.array(view) for name, view in trainer.arena.views(flat).items()} if whole else None
        diverged = None
        try:
            trainer.step(trainer.prepare(*batch), lr)
        except Diverged as error:  # raised after the kernels and hooks of the step: their arrays are compared
            diverged = error
        if found := examination.after_step(step, batch, parameters):
            return found
        if diverged:
            raise diverged
    examination.hooks.remove()
    if not trainer.backend.runtime.uses_graphs:  # kernels run when they are called
        return None
    # first without other ranks: then a difference is one of kernels, not of collectives
    alone = race(make_trainer, windows, lr, Solo(), "backward") if whole else None
    own = race(make_trainer, windows, lr, world, f"sum of the gradient over {world.size} ranks")
    found = world.all_gather_object(alone) + world.all_gather_object(own)
    return next((found for found in found if found), None)


def race(make_trainer, windows, lr, world, operation):
    """The first Difference between the gradients of a step without and with waiting for each kernel, or None.

    Compared are the second steps of two trainers. In the first step both wait for each kernel: there kernels are
    compiled and ranks are connected, which takes the host so long that a missing wait would have no effect. operation:
    for the place of the Difference. All ranks of `world` call it.
    """
    gradients = []
    for waits in (True, False):
        trainer, hooks, target = make_trainer(world), Hooks(), SimpleNamespace()
        watch_gradients(trainer, Hooks(), target)  # its own Hooks, which stay in the second step
        wait_for_each_kernel(trainer, hooks)
        for step in range(2):
            if step and not waits:
                hooks.remove()
            batch = windows.batch(trainer.position + trainer.rows.start, trainer.rows.stop - trainer.rows.start)
            with contextlib.suppress(Diverged):  # gradients that are not finite are compared too
                trainer.step(trainer.prepare(*batch), lr)
        gradients.append(target.gradient)
    remark, tolerance = "only if the host does not wait for each kernel: " + RACE, TOLERANCE[trainer.backend.precision]
    for name, part in reversed(trainer.arena.slices.items()):
        start, stop = (min(max(at, target.read_part.start), target.read_part.stop) for at in (part.start, part.stop))
        inside = slice(start - target.read_part.start, stop - target.read_part.start)
        where = dict(step=1, place=place_of(module_name(name), operation), tensor=f"gradient of {name}", remark=remark)
        least = np.linalg.norm(gradients[0]) * 1e-3  # of a bias whose gradient is only rounding errors
        if found := difference(gradients[1][inside], gradients[0][inside], tolerance, least, **where):
            return found
    return None


def wait_for_each_kernel(trainer, hooks):
    """Let the host wait for the device after each kernel, and before each collective."""
    runtime = trainer.backend.runtime

    def around(name, kernel, arguments, options):
        return around_gradients(waited(kernel, *arguments, **options), waited)

    def waited(function, *arguments, **options):
        result = function(*arguments, **options)
        runtime.synchronize()
        return result

    def before(on_complete, unit):
        runtime.synchronize()
        on_complete(unit)

    for worker in trainer.accumulator.workers:
        hooks.around_kernels(worker.backend, around)
    sums = trainer.accumulator.sums
    hooks.set(sums, "on_complete", functools.partial(before, sums.on_complete))

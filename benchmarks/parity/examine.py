"""Finds the first difference of a training run: the step, the layer, the operation and the tensor.

examine() trains with hooks around kernels and collectives. It compares

- each kernel call with the oracle in float64, on the inputs of this call, so that an error is found where it is made;
- each collective with the result computed from the arrays of all ranks;
- the results of the forward kernels and the gradient of each parameter with those of a whole model in float64, which
  finds errors between kernels, for example in autograd;
- the gradient that the optimizer reads with the sum of the gradients of all ranks.

To read the arrays, the host waits for the device after each kernel. This hides a kernel that does not wait for another
one, so examine() then repeats the first step without hooks.
"""

import functools
import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from benchmarks.parity.oracle import ORACLES, reference
from gpt2core.backend import Backend
from gpt2core.communicator import Communicator, Handle, Solo, address
from gpt2core.parallel.tree_sum import tree_sum
from gpt2core.tracing.hooks import Hooks, Modules, module_name
from gpt2core.tracing.trace import groups

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # relative norms, of one kernel
MODEL_FACTOR = 10  # the tolerance of a whole model: the errors of its layers add up
# {kernel: names of the results in its tuple}; None: not compared. A kernel that is not listed has one result.
RESULTS = {
    "linear_backward": ("dx", "dw", "db"),
    "linear_gelu_forward": ("y", None),
    "linear_gelu_backward": ("dx", "dw", "db"),
    "mlp_forward": ("y", None),
    "mlp_backward": ("dx", "dw", "db", "dw2"),
    "layernorm_forward": ("y", None),
    "layernorm_backward": ("dx", "dw", "db"),
    "residual_layernorm_forward": ("s", "y", None),
    "residual_layernorm_backward": ("dx", "da_bias", "dw", "db"),
    "attention_forward": ("y", "logsumexp"),
    "embedding_backward": ("dwte", "dwpe"),
    "unembed_backward": ("dx", "dw"),
    "cross_entropy_forward": ("maxima", "sums", "target_logits", None),
    "unembed_cross_entropy_forward": ("maxima", "sums", "target_logits", None),
    "unembed_cross_entropy_backward": ("dx", "dw"),
    "clip": ("norm", "grad_scale"),
}


@dataclass(frozen=True)
class Difference:
    """The first difference beyond a tolerance."""

    step: int
    place: str  # the layer and the operation
    tensor: str
    error: float  # norm(got - expected) / norm(expected)
    tolerance: float
    element: tuple  # the index of the largest error
    got: float
    expected: float
    remark: str = ""

    def __str__(self):
        step = f"step {self.step}, " if self.step >= 0 else ""
        numbers = f"relative error {self.error:.2g} (tolerance {self.tolerance:g})"
        element = f"element {self.element}: {self.got:.4g}, expected {self.expected:.4g}"
        return f"{step}{self.place}, {self.tensor}: {numbers}, {element}" + f"; {self.remark}" * bool(self.remark)


def difference(got, expected, tolerance, least=0.0, step=-1, place="", tensor="", exact=False, remark=""):
    """The Difference of two arrays, or None if norm(got - expected) <= tolerance * max(norm(expected), least).

    exact: equal bits are needed. An element that is not finite is a difference.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        got = got.reshape(expected.shape)
    if exact and got.tobytes() == expected.astype(got.dtype).tobytes():
        return None
    errors = np.abs(got.astype(np.float64) - expected)
    scale = max(float(np.linalg.norm(expected)), least)
    error = float(np.linalg.norm(errors))
    if not exact and error <= tolerance * scale:
        return None
    at = np.unravel_index(np.argmax(np.where(np.isfinite(errors), errors, np.inf)), errors.shape) if errors.size else ()
    element = tuple(map(int, at))
    relative = error / scale if scale else np.inf
    values = float(got[at]), float(expected[at])
    return Difference(step, place, tensor, relative, 0.0 if exact else tolerance, element, *values, remark)


def place_of(module, operation=""):
    """ "layer 3, attn.c_proj, linear backward" for the module h.3.attn.c_proj and a kernel."""
    if module.startswith("h."):
        _, layer, *rest = module.split(".")
        module = f"layer {layer}, {'.'.join(rest)}"
    return ", ".join(part for part in (module, operation.replace("_", " ")) if part)


# -- kernels -----------------------------------------------------------------------------------------------------------

SIGNATURES = {name: inspect.signature(getattr(Backend, name)) for name in ORACLES}


class KernelChecker:
    """Compares each kernel call of a backend with its oracle. `found`: the first Difference, or None.

    modules: a Modules. activations: {(module, forward kernel): [its result in each call]}.
    """

    def __init__(self, backend, modules, tolerance):
        self.backend, self.modules, self.tolerance, self.step = backend, modules, tolerance, -1
        self.found, self.forwards, self.activations, self.depth = None, {}, {}, 0

    def around(self, name, kernel, arguments, options):
        module = self.modules.before(name, arguments)
        bound = SIGNATURES[name].bind(None, *arguments, **options) if name in SIGNATURES else None
        inputs = None
        if bound and self.found is None:
            bound.apply_defaults()
            inputs = self.inputs(bound.arguments)
        self.depth += 1
        result = kernel(*arguments, **options)
        self.depth -= 1
        if inputs is not None:
            self.backend.runtime.join()  # weight gradients may be computed on another stream
            self.compare(name, module, inputs, bound.arguments, result)
        self.modules.after(name, module, result)
        return result

    def inputs(self, arguments):
        """The arguments of a call on the host, floats as float64. They are copies: kernels may write to arguments."""
        inputs = {name: self.on_host(value) for name, value in arguments.items() if name not in ("self", "aux", "out")}
        if arguments.get("accumulate"):
            inputs["before"] = self.on_host(arguments["out"][0])
        if "hyper" in inputs:
            inputs["hyper"] = SimpleNamespace(scalars=self.on_host(arguments["hyper"].scalars))
        return SimpleNamespace(**inputs)

    def on_host(self, value):
        value = getattr(value, "ids", value)  # prepared tokens
        if not hasattr(value, "dtype"):
            return value
        host = np.array(self.backend.to_host(value))
        return host.astype(np.float64) if host.dtype.kind == "f" else host

    def compare(self, name, module, inputs, arguments, result):
        if name == "clip" and inputs.loss_scale is not None:
            return
        if name.endswith("_forward") and isinstance(result, tuple) and result[-1] is not None:
            self.forwards[id(result[-1])] = result[-1], inputs  # the reference to aux keeps its id unique
        forward = self.forwards.get(id(arguments.get("aux")), (None, SimpleNamespace()))[1]
        results = result if isinstance(result, tuple) else (result,)
        named = dict(zip(RESULTS.get(name, (None,)), results, strict=False))
        expected = ORACLES[name](inputs, forward)
        if name == "adamw_step":
            named = {key: arguments[key] for key in "mvp"}
        elif name not in RESULTS:
            named = {next(iter(expected)): results[0]}
        if self.depth == 0 and name.endswith("_forward"):
            main = named.get("y")
            if main is not None and "cross" not in name:
                self.activations.setdefault((module, name), []).append(self.on_host(main))
        for tensor, (want, least) in expected.items():
            got = named.get(tensor)
            if got is None or tensor == "logsumexp" and not same_shape(got, want):
                continue  # the backend keeps something else, or computes no such gradient
            where = dict(step=self.step, place=place_of(module, name), tensor=tensor)
            self.found = self.found or difference(self.on_host(got), want, self.tolerance, least, **where)


def same_shape(array, other):
    return getattr(array, "shape", None) == other.shape


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A collective of this rank: its name, its arguments except the arrays, and its arrays on the host."""

    name: str
    arguments: dict
    x: np.ndarray
    part: str  # the parameters of the flat buffer in which x is
    result: np.ndarray | None = None


class CollectiveRecorder:
    """Records the collectives of a group in `calls`, in order."""

    def __init__(self, backend, describe):
        self.backend, self.describe, self.calls = backend, describe, []

    def around(self, name, call, x, blocking):
        bound = inspect.signature(getattr(Communicator, name)).bind(None, *call.args, **call.keywords).arguments
        arguments = {key: value for key, value in bound.items() if key in ("op", "root")}
        record = Call(name, arguments, self.host(x), self.describe(x))
        self.calls.append(record)
        result = call()
        if not blocking:
            return RecordedHandle(result, functools.partial(self.finish, record))
        self.finish(record, result)
        return result

    def finish(self, record, result):
        record.result = None if result is None else self.host(result)

    def host(self, x):
        return np.array(self.backend.to_host(x))


class RecordedHandle(Handle):
    """A Handle that calls finished(result) when the first wait() returns."""

    def __init__(self, handle, finished):
        super().__init__()
        self.handle, self.finished = handle, finished

    def wait(self):
        result = self.handle.wait()
        if self.finished:
            self.finished(result)
            self.finished = None
        return result


def expected_result(call, xs, rank):
    """The result on `rank` of a collective of ranks with the arrays `xs`, or None if it is not checked."""
    if call.name in ("all_reduce", "reduce_scatter"):
        op = call.arguments.get("op", "sum")
        total = tree_sum(xs) if op == "sum" else functools.reduce(np.maximum if op == "max" else np.minimum, xs)
        return total if call.name == "all_reduce" else np.split(total, len(xs))[rank]
    if call.name == "all_gather":
        return np.concatenate(xs)
    if call.name == "all_to_all":
        return np.concatenate([np.split(x, len(xs))[rank] for x in xs])
    return xs[call.arguments.get("root", 0)] if call.name == "broadcast" else None


def check_collectives(recorders, gathered, ranks, step, tolerance, exact):
    """The first Difference of this rank's collectives, or None.

    recorders: {title: CollectiveRecorder} of this rank. gathered: the calls {title: [Call]} of all ranks of the world.
    ranks: {title: (the ranks of the world in this group, this rank's index)}.
    """
    for title, recorder in recorders.items():
        members, rank = ranks[title]
        for number, call in enumerate(recorder.calls):
            others = [gathered[member][title] for member in members]
            if call.result is None or any(len(calls) <= number for calls in others):
                continue
            xs = [calls[number].x for calls in others]
            want = expected_result(call, xs, rank)
            where = dict(step=step, place=f"{call.name} of the {title}, call {number}", tensor=call.part or "x")
            where["remark"] = sum_remark(call.result, None, want) if call.name == "all_reduce" else ""
            if want is not None and (found := difference(call.result, want, tolerance, exact=exact, **where)):
                return found
    return None


# -- a training run ----------------------------------------------------------------------------------------------------


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
        on_complete = trainer.accumulator.on_complete
        self.hooks.set(trainer.accumulator, "on_complete", functools.partial(self.gradient_complete, on_complete))
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

    def gradient_complete(self, on_complete, name):
        """Called when this rank's gradient of a parameter is complete, before it is sent."""
        self.trainer.backend.runtime.join()
        own = self.trainer.accumulator.gradients[self.trainer.arena.slices[name]]
        self.own_gradients[name] = np.array(self.trainer.backend.to_host(own))
        on_complete(name)

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


BETWEEN = "the kernel itself is right: its inputs or the operation that calls it are wrong"


def least_of_bias(gradients, name):
    """The least norm for a bias: the gradient of its weight has the size of the terms that are summed."""
    return float(np.linalg.norm(gradients.get(name.replace("bias", "weight"), 0.0)))


def sum_remark(got, own, want):
    """A guess at what is wrong with a sum over ranks."""
    if own is not None and np.array_equal(got, own) and not np.array_equal(own, want):
        return "it is this rank's own gradient: it was not summed"
    got, want = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    ratio = float(np.dot(got, want) / max(np.dot(want, want), 1e-300))
    twice = ratio > 1.5 and np.allclose(got, ratio * want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    return f"it is {ratio:.3g} times the sum: it was summed more than once" if twice else ""


def watch_gradients(trainer, hooks, target):
    """In each step set target.gradient, the flat gradient that the optimizer reads, and target.read_part, its slice."""
    norm_and_scale = trainer.optimizer.norm_and_scale

    def watched(gradients, *arguments, **options):
        target.read_part = trainer.optimizer.own
        target.gradient = np.array(trainer.backend.to_host(gradients[target.read_part]))
        return norm_and_scale(gradients, *arguments, **options)

    hooks.set(trainer.optimizer, "norm_and_scale", watched)


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
        trainer.step(trainer.prepare(*batch), lr)
        if found := examination.after_step(step, batch, parameters):
            return found
    examination.hooks.remove()
    if not trainer.backend.runtime.uses_graphs:  # kernels run when they are called
        return None
    # first without other ranks: then a difference is one of kernels, not of collectives
    alone = race(make_trainer, windows, lr, Solo(), "backward") if whole else None
    own = race(make_trainer, windows, lr, world, f"sum of the gradient over {world.size} ranks")
    found = world.all_gather_object(alone) + world.all_gather_object(own)
    return next((found for found in found if found), None)


def race(make_trainer, windows, lr, world, operation):
    """The first Difference between the gradients of one step without and with waiting for each kernel, or None.

    operation: for the place of the Difference. All ranks of `world` call it.
    """
    gradients = []
    for waits in (True, False):
        trainer, hooks, target = make_trainer(world), Hooks(), SimpleNamespace()
        watch_gradients(trainer, hooks, target)
        if waits:
            wait_for_each_kernel(trainer, hooks)
        rows = trainer.rows
        trainer.step(trainer.prepare(*windows.batch(rows.start, rows.stop - rows.start)), lr)
        gradients.append(target.gradient)
    remark, tolerance = "only if the host does not wait for each kernel: " + RACE, TOLERANCE[trainer.backend.precision]
    for name, part in reversed(trainer.arena.slices.items()):
        start, stop = (min(max(at, target.read_part.start), target.read_part.stop) for at in (part.start, part.stop))
        inside = slice(start - target.read_part.start, stop - target.read_part.start)
        where = dict(step=0, place=place_of(module_name(name), operation), tensor=f"gradient of {name}", remark=remark)
        least = np.linalg.norm(gradients[0]) * 1e-3  # of a bias whose gradient is only rounding errors
        if found := difference(gradients[1][inside], gradients[0][inside], tolerance, least, **where):
            return found
    return None


RACE = "an event is missing, or a buffer is reused too early"


def wait_for_each_kernel(trainer, hooks):
    """Let the host wait for the device after each kernel, and before each collective."""
    runtime = trainer.backend.runtime

    def around(name, kernel, arguments, options):
        result = kernel(*arguments, **options)
        runtime.synchronize()
        return result

    def before(on_complete, name):
        runtime.synchronize()
        on_complete(name)

    for worker in trainer.accumulator.workers:
        hooks.around_kernels(worker.backend, around)
    hooks.set(trainer.accumulator, "on_complete", functools.partial(before, trainer.accumulator.on_complete))

"""Compares kernel calls with their oracles, and collectives with the arrays of all ranks; describes a difference."""

import functools
import inspect
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from benchmarks.parity.oracle import ORACLES
from gpt2core.communicator import Communicator, Handle
from gpt2core.tree_sum import tree_sum

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # relative norms, of one kernel
# kernels of two matrix products, one after the other, which double the rounding error
TWO_PRODUCTS = "mlp", "attention", "unembed_cross_entropy"


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

    exact: equal bits are needed. An element that is not finite is a difference, and so is another number of elements.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    if got.size != expected.size:
        shapes = f"its shape is {got.shape} instead of {expected.shape}"
        return Difference(step, place, tensor, np.inf, tolerance, (), np.nan, np.nan, shapes)
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


class KernelChecker:
    """Compares each kernel call of a backend with its oracle. `found`: the first Difference, or None.

    A gradient that a kernel returns as a function is compared when the function has been called. modules: a Modules.
    activations: {(module, forward kernel): [its result in each call]}.
    """

    def __init__(self, backend, modules, tolerance):
        self.backend, self.modules, self.tolerance, self.step = backend, modules, tolerance, -1
        self.found, self.forwards, self.activations, self.depth = None, {}, {}, 0
        self.signatures = {name: inspect.signature(getattr(backend, name)) for name in ORACLES}

    def around(self, name, kernel, arguments, options):
        module = self.modules.before(name, arguments)
        bound = self.signatures[name].bind(*arguments, **options) if name in ORACLES else None
        inputs = None
        if bound and self.found is None:
            bound.apply_defaults()
            inputs = self.inputs(bound.arguments)
        self.depth += 1
        result = kernel(*arguments, **options)
        self.depth -= 1
        if inputs is not None:
            self.backend.runtime.join()  # kernels may run on another stream
            result = self.compare(name, module, inputs, bound.arguments, result)
        self.modules.after(name, module, result)
        return result

    def inputs(self, arguments):
        """The arguments of a call on the host, floats as float64. They are copies: kernels may write to arguments."""
        inputs = {name: self.on_host(value) for name, value in arguments.items() if name not in ("aux", "copy")}
        return SimpleNamespace(**inputs)

    def on_host(self, value):
        value = getattr(value, "ids", value)  # prepared tokens
        if not hasattr(value, "dtype"):
            return value
        host = np.array(self.backend.to_host(value))
        return host.astype(np.float64) if host.dtype.kind == "f" else host

    def compare(self, name, module, inputs, arguments, result):
        """Compare the arrays of a result; return the result, with functions that compare what they compute."""
        if name == "clip" and inputs.guard is not None and inputs.guard.loss_scale is not None:
            return result
        if name.endswith("_forward") and isinstance(result, tuple) and result[-1] is not None:
            self.forwards[id(result[-1])] = result[-1], inputs  # the reference to aux keeps its id unique
        _, forward = self.forwards.get(id(arguments.get("aux")), (None, None))
        of_forward = inspect.signature(ORACLES[name]).parameters.get("forward")
        if forward is None and of_forward and of_forward.default is of_forward.empty:
            return result  # aux is not that of a recorded call
        expected = ORACLES[name](inputs, forward) if of_forward else ORACLES[name](inputs)
        results = result if isinstance(result, tuple) else (result,)
        names = list(expected)[: len(results)]
        named = dict(zip(names, results, strict=False))  # without aux
        if result is None:  # the kernel writes to its arguments
            named = {tensor: arguments[tensor] for tensor in expected}
        if self.depth == 0 and name.endswith("_forward"):
            main = named.get("y")
            if main is not None and "cross" not in name:
                self.activations.setdefault((module, name), []).append(self.on_host(main))
        where = dict(step=self.step, place=place_of(module, name))
        tolerance = self.tolerance * (2 if name.startswith(TWO_PRODUCTS) else 1)

        def compare(tensor, got, before=0.0):
            want, least = expected[tensor]
            if tensor == "logsumexp" and not same_shape(got, want):
                return  # the backend keeps something else
            got = self.on_host(got) - before
            got = got.sum(0) if got.ndim > want.ndim and got.size > want.size else got  # of several micro-batches
            self.found = self.found or difference(got, want, tolerance, least, tensor=tensor, **where)

        def called(tensor, gradient, out):
            before = self.on_host(out.array) if out is not None and out.accumulate else 0.0
            array = gradient(out)
            if self.found is None:
                self.backend.runtime.join()
                added = out is not None and array is out.array  # the gradient of an input is always a new array
                compare(tensor, array, before if added else 0.0)
            return array

        for tensor in expected:  # a kernel may compute no such gradient
            if named.get(tensor) is not None and not callable(named[tensor]):
                compare(tensor, named[tensor])
        functions = [
            functools.partial(called, tensor, each) if callable(each) and tensor in expected else each
            for tensor, each in itertools.zip_longest(names, results)
        ]
        return tuple(functions) if isinstance(result, tuple) else functions[0]


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
        handle = RecordedHandle(Handle(call()) if blocking else call(), record, self.host)
        return handle.wait() if blocking else handle

    def host(self, x):
        return np.array(self.backend.to_host(x))


class RecordedHandle(Handle):
    """A Handle whose first wait() writes the result to the record of the Call, on the host."""

    def __init__(self, handle, record, host):
        super().__init__()
        self.handle, self.record, self.host = handle, record, host

    def wait(self):
        result = self.handle.wait()
        if self.record.result is None and result is not None:
            self.record.result = self.host(result)
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


def sum_remark(got, own, want):
    """A guess at what is wrong with a sum over ranks."""
    if own is not None and np.array_equal(got, own) and not np.array_equal(own, want):
        return "it is this rank's own gradient: it was not summed"
    got, want = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    ratio = float(np.dot(got, want) / max(np.dot(want, want), 1e-300))
    twice = ratio > 1.5 and np.allclose(got, ratio * want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    return f"it is {ratio:.3g} times the sum: it was summed more than once" if twice else ""

"""A model that is cut into parts, at any places, has the bits of the whole model."""

import functools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.architecture import GPT2Config, unit_of
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel import part as part_module
from gpt2core.parallel.parameter import call
from gpt2core.parallel.part import Part
from gpt2core.plain_backend import PlainBackend
from gpt2core.tensor import Tensor
from stage0_serial.numpy_backend import NumpyBackend

B, T = 3, 16
LAYERS = 3
HOOKS = "before", "before_backward", "completed"
CUTS = [[*range(1, LAYERS + 2)], *([cut] for cut in range(1, LAYERS + 2)), [1, 3]]  # numbers of units that begin a part


def config(tied=True):
    return GPT2Config(vocab_size=37, block_size=T, n_layer=LAYERS, n_head=2, n_embd=32, tied=tied)


def model_and_tokens(backend, tied=True):
    """A model with large parameters, so that every gradient matters, and tokens that the backend has prepared."""
    sizes, rng = config(tied), np.random.default_rng(5)
    arrays = {name: (10 * array).astype(backend.compute_dtype) for name, array in initial_parameters(sizes, 1)}
    tensors = {name: Tensor(backend.asarray(array), backend, requires_grad=True) for name, array in arrays.items()}
    ids, targets = rng.integers(0, 37, (2, B, T))
    return GPT2(sizes, tensors), backend.prepare_tokens(ids, 37), backend.prepare_tokens(targets)


def gradients(model):
    backend = model.backend
    backend.runtime.join()
    return {name: np.array(backend.to_host(tensor.grad)) for name, tensor in model.parameters.items()}


def run_parts(parts, ids, targets, dloss, later=None):
    """Forward and backward through consecutive parts -> the loss. With `later`, its functions are called at the end."""
    x, graphs, dy = ids, [], dloss
    for part in parts:
        graphs.append(part.forward(x, ForwardArguments(targets=targets)) if part is parts[-1] else part.forward(x))
        x = graphs[-1].y.data
    value = x
    for graph in reversed(graphs):
        dy = graph.backward(dy, call if later is None else later.append)
    for function in later or ():
        function()
    return value


def parts_of(model, cuts, completed=lambda name: None):
    edges = [0, *cuts, len(model.units)]
    return [
        Part(model.units[start:stop], model.backend, completed=completed)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]


@pytest.fixture(params=[NumpyBackend, PlainBackend])
def backend(request):
    return request.param("fp32")


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("deferred", [False, True])
def test_parts_have_the_bits_of_the_whole_model(backend, cuts, tied, deferred):
    whole, ids, targets = model_and_tokens(backend, tied)
    want_loss = whole.loss(ids, targets)
    want_loss.backward()
    dloss = backend.ones((), np.float64)
    model, *_ = model_and_tokens(backend, tied)
    loss = run_parts(parts_of(model, cuts), ids, targets, dloss, [] if deferred else None)
    assert_array_equal(backend.to_host(loss), want_loss.numpy(), strict=True)
    want = gradients(whole)
    for name, got in gradients(model).items():
        assert_array_equal(got, want[name], strict=True, err_msg=name)


def test_a_part_can_hold_only_the_embedding_or_only_the_head(backend):
    model, ids, targets = model_and_tokens(backend)
    parts, dloss = parts_of(model, [1, LAYERS + 1]), backend.ones((), np.float64)
    first = parts[0].forward(ids)
    middle = parts[1].forward(first.y.data)
    last = parts[2].forward(middle.y.data, ForwardArguments(targets=targets))
    assert first.y.shape == middle.y.shape == (B, T, 32) and last.y.shape == ()
    dy = np.ones_like(middle.y.data)
    assert last.backward(dloss).shape == middle.backward(dy).shape == (B, T, 32)
    assert first.backward(dy) is None


def test_a_part_can_have_the_graphs_of_several_micro_batches_at_the_same_time(backend):
    model, ids, targets = model_and_tokens(backend)
    part, dloss = parts_of(model, [])[0], backend.ones((), np.float64)
    want = []
    for other in (ids, ids[::-1]):
        part.forward(other, ForwardArguments(targets=targets)).backward(dloss)
        want.append(gradients(model))
        for tensor in model.parameters.values():
            tensor.grad = None
    graphs = [part.forward(other, ForwardArguments(targets=targets)) for other in (ids, ids[::-1])]
    for graph, arrays in zip(graphs, want, strict=True):
        graph.backward(dloss)
        for name, got in gradients(model).items():
            assert_array_equal(got, arrays[name], err_msg=name)
            model.parameters[name].grad = None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("cuts", [[], [2]], ids=str)
def test_a_unit_is_completed_when_all_of_its_gradients_are_computed_last_units_first(backend, cuts, deferred):
    model, ids, targets = model_and_tokens(backend, tied=False)
    names = {}  # {unit: its parameters}
    for name in model.parameters:
        names.setdefault(unit_of(name), []).append(name)
    order, complete = [], {}

    def completed(unit):
        order.append(unit)
        complete[unit] = {name: np.array(model.parameters[name].grad) for name in names[unit]}

    dloss = backend.ones((), np.float64)
    run_parts(parts_of(model, cuts, completed), ids, targets, dloss, [] if deferred else None)
    assert order == ["head", "h.2", "h.1", "h.0", "embedding"]
    final = gradients(model)
    for arrays in complete.values():
        for name, array in arrays.items():
            assert_array_equal(array, final[name], err_msg=name)


def test_with_later_no_gradient_is_written_before_its_function_is_called(backend):
    model, ids, targets = model_and_tokens(backend)
    part, dloss, later = parts_of(model, [])[0], backend.ones((), np.float64), []
    part.forward(ids, ForwardArguments(targets=targets)).backward(dloss, later.append)
    assert all(tensor.grad is None for tensor in model.parameters.values())
    for function in later:
        function()
    assert all(tensor.grad is not None for tensor in model.parameters.values())


@pytest.mark.parametrize("recompute, forward_again", [("none", []), ("block", ["h.1", "h.0"])])
@pytest.mark.parametrize("separate", [False, True])
def test_hooks_are_called_before_and_after_the_passes_of_a_unit(backend, recompute, forward_again, separate):
    """With several units in a part, before_backward is called for all of them first."""
    model, ids, targets = model_and_tokens(backend)
    calls, dloss = [], backend.ones((), np.float64)
    hooks = {name: functools.partial(lambda kind, unit: calls.append((kind, unit)), name) for name in HOOKS}
    run_parts(part_module.parts_of(model.units, backend, recompute, separate, **hooks), ids, targets, dloss)
    units = ["embedding", "h.0", "h.1", "h.2", "head"]
    for kind in HOOKS:
        want = [*units, *forward_again] if kind == "before" else units[::-1]
        assert [unit for each, unit in calls if each == kind] == want
    for unit in units:
        assert calls.index(("before_backward", unit)) < calls.index(("completed", unit))
        if separate and unit != "head":
            after = units[units.index(unit) + 1]
            assert calls.index(("completed", after)) < calls.index(("before_backward", unit))

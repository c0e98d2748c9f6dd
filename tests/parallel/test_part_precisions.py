"""A model that is cut into parts has the bits of the whole model in every precision of every backend."""

# B batch, T time, C channels, V vocabulary

import numpy as np
import pytest

from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import GPT2
from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.part import Part
from gpt2core.plain_backend import PlainBackend
from stage0_serial.numpy_backend import NumpyBackend

gpu = pytest.mark.gpu
SCALE = 2**-6  # of the sum of the losses: in fp16, gradients of the mean over many rows are nearly all zero


def cuda(precision):
    pytest.importorskip("triton")
    from stage2_cuda.cuda_backend import CudaBackend
    from stage2_cuda.runtime import triton_launch

    if precision == "tf32" and triton_launch.interpreted():
        pytest.skip("the interpreter computes tf32 as fp32")
    return CudaBackend(precision)


# backend, precision, (B, T, V, C, heads); rows that are no multiple of a tile
CASES = [(PlainBackend, "fp32"), (NumpyBackend, "fp32"), (NumpyBackend, "fp64"), (cuda, "fp32"), (cuda, "fp16")]
CASES = [(*case, (3, 15, 37, 48, 3)) for case in CASES]
CASES += [
    pytest.param(cuda, precision, sizes, marks=gpu)
    for precision in ("fp32", "tf32", "bf16", "fp16")
    for sizes in [(3, 333, 64, 384, 6), (64, 1024, 64, 768, 12)]
]


def random_parameters(config, rng, dtype):
    """Biases that are not zero: in 16 bits the rounding of a sum of three numbers depends on them."""
    for name, shape in parameter_shapes(config):
        scale = 0.3 if len(shape) == 1 else 0.5 / np.sqrt(shape[0])
        shift = len(shape) == 1 and name.endswith("weight")
        yield name, (rng.standard_normal(shape) * scale + shift).astype(np.float32).astype(dtype)


def cases():
    """CASES in new arrays and in buffers; in the interpreter, where each takes seconds, one of both is long."""
    for each in CASES:
        make, precision, _ = values = getattr(each, "values", each)
        for buffers in (False, True):
            slow = make is cuda and values is each and buffers == (precision == "fp16")
            marks = [*getattr(each, "marks", ()), *[pytest.mark.long] * slow]
            yield pytest.param(*values, buffers, marks=marks)


@pytest.mark.parametrize("make, precision, sizes, buffers", cases())
def test_a_model_that_is_cut_between_its_units_has_equal_bits(rng, make, precision, buffers, sizes):
    B, T, V, C, heads = sizes
    backend, config = make(precision), GPT2Config(V, T, 2, heads, C)
    parameters = list(random_parameters(config, rng, backend.compute_dtype))
    batches = [rng.integers(0, V, (2, B, T)) for _ in range(1 + buffers)]  # the second batch adds to the buffers

    def run(cuts):
        """Losses and gradients of a model whose parts begin with the units 0, *cuts."""
        leaves = {name: Parameter(backend.asarray(array), backend) for name, array in parameters}
        for leaf in leaves.values():
            if buffers:
                leaf.send_to(backend.empty(leaf.shape, backend.dtype))
        units, losses, edges = GPT2(config, leaves).units, [], [0, *cuts, None]
        parts = [Part(units[start:stop], backend) for start, stop in zip(edges, edges[1:], strict=False)]
        for ids, targets in batches:
            x, graphs = backend.prepare_tokens(ids, V), []
            for part in parts:
                graphs.append(part.forward(x, ForwardArguments(targets=backend.prepare_tokens(targets), scale=SCALE)))
                x = graphs[-1].y.data
            losses.append(x)
            dy = backend.ones((), x.dtype)
            for graph in reversed(graphs):
                dy = graph.backward(dy)
        backend.runtime.join()
        arrays = {name: leaf.grad for name, leaf in leaves.items()} | dict(enumerate(losses))
        return {name: backend.to_host(array) for name, array in arrays.items()}

    # The last LayerNorm has no ds, so dx is a product. In 32 bits the compiler adds it to the sum of the fused kernel
    # before it is rounded (fused multiply-add), and the separate sum differs in its last bits.
    contracted = backend.xp is not np and backend.compute_dtype.itemsize == 4
    whole, cut = run([]), run(range(1, config.n_layer + 2 - contracted))
    assert all(np.isfinite(array).all() for array in whole.values())
    assert [name for name in whole if cut[name].tobytes() != whole[name].tobytes()] == []

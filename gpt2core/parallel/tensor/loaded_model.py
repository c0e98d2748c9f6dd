"""A model that generates text, from whole arrays on the host, on one rank or divided over a tensor group."""

from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.communicator import SOLO
from gpt2core.inference_model import InferenceModel
from gpt2core.parallel.tensor.shards import shard, shard_shapes


def load_inference_model(config, arrays, backend, group=SOLO):
    """An InferenceModel. arrays: {name: whole host array}; it gets this rank's shards, copied to one arena.

    Kernels read weights faster from one large buffer than from many small buffers.
    """
    backend.check_model(config)
    arena = Arena(shard_shapes(parameter_shapes(config), group.rank, group.size))
    views = arena.views(backend.zeros((arena.size,), backend.compute_dtype))
    for name, view in views.items():
        view[...] = backend.asarray(shard(name, arrays[name], group.rank, group.size))
    return InferenceModel(config, views, backend, group)


def load_model(config, arrays, backend, group=SOLO):
    """A GPT2 with the arrays of load_inference_model()."""
    from gpt2core.model import GPT2  # here, because a program that only generates text does not import autograd
    from gpt2core.tensor import Tensor

    views = load_inference_model(config, arrays, backend, group).arrays
    return GPT2(config, {name: Tensor(view, backend) for name, view in views.items()}, group)

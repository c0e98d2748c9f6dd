"""The whole parameters of a trainer, whose ranks may hold shards: initialise, load, gather, hash and compare them.

A function with an argument `trainer`, a ParallelTrainer, calls collectives, so all ranks must call it. It raises
ValueError if a step is in flight.
"""

import hashlib
import math

import numpy as np

from gpt2core.architecture import parameter_shapes
from gpt2core.errors import Diverged
from gpt2core.model import GPT2
from gpt2core.parallel.tensor import shards
from gpt2core.tensor import Tensor


def fill(trainer, flat, arrays):
    """Copy `arrays`, the root's (name, whole array) pairs in model order, to the shards in each rank's buffer `flat`.

    Other ranks pass None for `arrays`.
    """
    backend, tensor, slices = trainer.backend, trainer.mesh.tensor, trainer.parallel.slices
    dtype = np.dtype(backend.dtype)
    for name, shape in parameter_shapes(trainer.config):
        array = np.empty(shape, dtype) if arrays is None else np.ascontiguousarray(next(arrays)[1], dtype)
        array = trainer.world.broadcast(array, out=array)
        for each, part in shards.own_slices(name, tensor.rank, slices):
            trainer.layout.put(flat, each, shards.shard(name, array, part, tensor.size * slices))


def load(trainer, parameters, moments=None, steps=0, position=0):
    """Load the root's parameters {name: array} and moments {name: the arrays of the rule's STATES}, and the progress.

    Other ranks pass None for the two dictionaries, and the same values as the root for the other arguments. If the
    root's `moments` is None, the moments are not changed.
    """

    def in_model_order(array_of):
        """The argument `arrays` of fill(); array_of(name) returns the whole array of a parameter."""
        return iter([(name, array_of(name)) for name in trainer.placement]) if trainer.world.is_root else None

    backend = trainer.backend
    trainer.check_idle()
    trainer.pool.wait()  # for threads of an interrupted update
    fill(trainer, trainer.parameters, in_model_order(lambda name: parameters[name]))
    if trainer.world.broadcast_object(moments is not None):
        flats = [backend.zeros((trainer.layout.size,), backend.dtype) for _ in trainer.optimizer.states]
        for index, flat in enumerate(flats):
            fill(trainer, flat, in_model_order(lambda name, index=index: moments[name][index]))
        trainer.optimizer.load_states(flats)
        del flats, flat  # so that release_cached_memory() can free their memory
    trainer.steps, trainer.position = steps, position
    trainer.optimizer.refresh_copy(steps)
    backend.runtime.release_cached_memory()


def gathered(trainer, flat):
    """{name: whole array}, gathered from the shards in all ranks' buffers `flat`; a view if nothing is divided."""
    trainer.check_idle()
    views, mesh, whole = trainer.arena.views(trainer.layout.whole(flat)), trainer.mesh, {}
    place = mesh.tensor.rank, mesh.tensor.size, trainer.parallel.slices
    for name, shape in parameter_shapes(trainer.config):
        arrays = []
        for each, own in shards.shard_shapes([(name, shape)], *place).items():
            array = views[each] if each in views else trainer.backend.empty(own, flat.dtype)
            arrays.append(mesh.pipeline.broadcast(array, trainer.placement[name], out=array))
        whole[name] = shards.gather(name, arrays, shape, mesh.tensor)
    return whole


def whole(trainer, flat, to_host):
    """The result of gathered(), on the host if `to_host`."""
    convert = trainer.backend.to_host if to_host else lambda array: array
    return {name: convert(array) for name, array in gathered(trainer, flat).items()}


def named_parameters(trainer, to_host=True):
    """{Hugging Face name: parameter} on the host; or on the device, as views of the trainer's if nothing is divided."""
    trainer.optimizer.gather_parameters()
    return whole(trainer, trainer.parameters, to_host)


def named_moments(trainer, to_host=True):
    """{Hugging Face name: (first, second moment)}: the arrays of the rule's STATES. See named_parameters()."""
    states = [whole(trainer, flat, to_host) for flat in trainer.optimizer.gathered_states(to_host)]
    return {name: tuple(state[name] for state in states) for name in trainer.placement}


def current_model(trainer):
    """A GPT2 over the current parameters, for generation on this rank only."""
    trainer.optimizer.gather()
    arrays = gathered(trainer, trainer.compute_parameters)
    return GPT2(trainer.config, {name: Tensor(array, trainer.backend) for name, array in arrays.items()})


def parameter_hash(trainer):
    """SHA-256 of the names and bytes of all parameters, in model order, as hexadecimal digits."""
    digest = hashlib.sha256()
    for name, array in named_parameters(trainer).items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def check_finite(trainer):
    """Raise Diverged if a parameter is not finite after the last update, because such parameters must not be saved.

    Nor must those of an interrupted update: see ParallelTrainer.check_interrupted().
    """
    trainer.check_idle()
    trainer.check_interrupted()
    norm = trainer.optimizer.norm(trainer.parameters)
    if not math.isfinite(norm):
        raise Diverged(
            f"step {trainer.steps - 1}: the norm of the parameters is {norm} after the update: lower `lr` or set "
            f"`clip`. They are not saved; the earlier checkpoints are unchanged"
        )


def verify(trainer):
    """Raise Diverged unless all replicas of a parameter have the same bits."""
    trainer.check_idle()
    trainer.optimizer.gather_parameters()
    digest = hashlib.sha256()
    for flat in (trainer.parameters, trainer.compute_parameters):  # the copy too: ZeRO-1 gathers it at each step
        digest.update(trainer.backend.to_host(flat))
    mesh, owner = trainer.mesh, trainer.layout.owner
    shard = mesh.tensor.rank, mesh.pipeline.rank, owner  # equal on the ranks that hold the same parameters
    digests = trainer.world.all_gather_object((shard, digest.hexdigest()))
    expected = {}  # shard -> (the first rank that holds it, its digest)
    for rank, (shard, found) in enumerate(digests):
        first, wanted = expected.setdefault(shard, (rank, found))
        if found != wanted:
            raise Diverged(
                f"step {trainer.steps - 1}: the parameters of rank {rank} differ from those of rank {first} (SHA-256 "
                f"{found[:12]} and {wanted[:12]}): check the memory and the software versions of these machines; the "
                f"earlier checkpoints are unchanged"
            )

"""FSDP computes modules that read, return, keep or replace weights in unusual ways, or says what it cannot do."""

import copy
import dataclasses
import functools
import io
import math
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.support.torch_models import batches, build, rows  # noqa: E402
from torch_bridge.ddp import NaiveDDP  # noqa: E402
from torch_bridge.fsdp import FSDP  # noqa: E402
from torch_bridge.sharded_optimizer import ShardedOptimizer  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
WIDE = 8


class Inner(nn.Module):
    """x (N, 6) -> y (N, 3) by layers a, b, c."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


class Checkpointed(Inner):
    """A unit with activation checkpointing inside its forward, which also reads a weight itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def part(self, x):
        return torch.tanh(F.linear(torch.relu(self.a(x)), self.b.weight, self.b.bias))

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x  # without it, reentrant checkpoints have no gradients
        return self.c(checkpoint(self.part, x, use_reentrant=self.reentrant))


class Keeps(Inner):
    """A unit whose result is in an attribute."""

    def forward(self, x):
        self.kept = super().forward(x)


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    unused: object = None


class ReturnsDataclass(Inner):
    def forward(self, x):
        return Output(super().forward(x))


class Reader(nn.Module):
    """x -> the result of the model, by read(model, model(x))."""

    def __init__(self, inner, read):
        super().__init__()
        self.inner, self.read = inner(), read

    def forward(self, x):
        return self.read(self.inner, self.inner(x))


class ReadsElsewhere(Inner):
    """A layer without a forward, whose weight is read by another module, also under a checkpoint."""

    def part(self, x):
        return torch.tanh(F.linear(x, self.b.weight, self.b.bias))

    def forward(self, x):
        x = self.part(torch.relu(self.a(x)))
        return F.linear(checkpoint(self.part, x, use_reentrant=False), self.c.weight)


class Twice(Inner):
    """A layer that runs three times, once under a checkpoint, with gradients of its weight from each."""

    def forward(self, x):
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(self.b(checkpoint(self.b, x, use_reentrant=False)))


class Positions(nn.Module):
    """A unit that returns a view of its weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, WIDE))

    def forward(self, n):
        return self.table[:n]


class AddsPositions(Inner):
    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        return self.c(torch.tanh(self.a(x) * self.positions(1)))


class Normalised(Inner):
    """Layers whose weights a forward pre-hook or a parametrization computes from other parameters."""

    def __init__(self, *functions):
        super().__init__()
        for layer, function in zip((self.a, self.b), functions, strict=False):
            function(layer)


class Encoder(Inner):
    """A layer of PyTorch, which reads the weights of its layers itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDE, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.c(self.layer(self.a(x)[:, None])[:, 0])


class Recurrent(Inner):
    """A layer of PyTorch, which is no unit."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, WIDE, batch_first=True)

    def forward(self, x):
        return self.c(self.layer(x[:, None])[0][:, 0])


class InPlace(Inner):
    """Results of units change in place; a weight is not contiguous."""

    def __init__(self):
        super().__init__()
        self.b.weight = nn.Parameter(torch.randn(WIDE, WIDE).t())

    def forward(self, x):
        y = self.a(x).relu_()
        y = self.b(y)
        y += 1
        return self.c(y)


class Hooked(Inner):
    """Hooks of the user read a weight before and after the hooks of FSDP."""

    def __init__(self):
        super().__init__()
        for layer in (self.a, self.b):
            layer.register_forward_pre_hook(lambda m, x: (x[0] * m.weight.sum(),))
            layer.register_forward_hook(lambda m, x, y: y * m.weight.mean())


def with_late_hooks(model):
    """A wrapper: FSDP with hooks on its layers that run before and after those of FSDP."""
    for layer in (model.c, model.b):
        layer.register_forward_pre_hook(lambda m, x: (x[0] * m.weight.sum(),), prepend=True)
        layer.register_forward_hook(lambda m, x, y: y * m.weight.mean())
    return model


class Frozen(Inner):
    def __init__(self):
        super().__init__()
        self.b.requires_grad_(False)


class Half(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return torch.tanh(self.layers(x))


class SharesLayer(nn.Module):
    """Two units that have one layer in common."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(WIDE, WIDE)
        self.one, self.two = Half(nn.Linear(6, WIDE), shared), Half(shared, nn.Linear(WIDE, 3))

    def forward(self, x):
        return self.two(self.one(x))


def weight_norm(layer):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)


BLOCK = (Inner,)
MODULES = {  # name: (model, types of the units)
    "checkpoint inside": (lambda: Checkpointed(False), BLOCK),
    "reentrant checkpoint inside": (lambda: Checkpointed(True), BLOCK),
    "checkpoint inside, layers": (lambda: Checkpointed(False), None),
    "kept result": (lambda: Reader(Keeps, lambda m, _: m.kept), BLOCK),
    "dataclass": (lambda: Reader(ReturnsDataclass, lambda m, out: out.y), BLOCK),
    "read elsewhere": (ReadsElsewhere, None),
    "three times": (Twice, None),
    "view of a weight": (AddsPositions, (nn.Linear, Positions)),
    "weight_norm, spectral_norm": (lambda: Normalised(weight_norm, nn.utils.spectral_norm), None),
    "weight_norm in a block": (lambda: Normalised(weight_norm, nn.utils.spectral_norm), BLOCK),
    "parametrizations": (lambda: Normalised(parametrizations.weight_norm, parametrizations.spectral_norm), None),
    "encoder layer": (Encoder, None),
    "lstm": (Recurrent, None),
    "lstm as unit": (Recurrent, (nn.Linear, nn.LSTM)),
    "in place": (InPlace, None),
    "in place, block": (InPlace, BLOCK),
    "hooks": (Hooked, None),
    "late hooks": (Inner, None),
    "frozen": (Frozen, None),
    "shared by two blocks": (SharesLayer, (Half,)),
}
# These compute in fp32 with a weight or a buffer of a layer whose results are bf16. PyTorch reports the two dtypes.
FP32_ONLY = {"checkpoint inside, layers", "read elsewhere"} | {name for name in MODULES if "norm" in name}
FP32_ONLY |= {"parametrizations"}


def train(model, samples, finish=lambda: None):
    """The losses of two steps, and of evaluations without gradients."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in list(batches())[:2]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[samples]).float(), y[samples])  # PyTorch 2.11 has no gradient for two dtypes on CUDA
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            losses.append(F.mse_loss(model(x[samples]), y[samples]).item())
    return torch.tensor(losses)


def train_modules(dtype):
    """{name: (mean losses, whole parameters)} of each module."""
    found = {}
    for name, (model, types) in MODULES.items():
        if dtype is None or name not in FP32_ONLY:
            fsdp = FSDP(build(model, seed=0), dtype, types or (nn.Linear, nn.Embedding))
            if name == "late hooks":
                with_late_hooks(fsdp.module)
            losses = train(fsdp, rows(), fsdp.finish_gradient_synchronization)
            dist.all_reduce(losses)
            assert all(shard.full is None for shard in fsdp.shards.values())
            found[name] = losses / dist.get_world_size(), fsdp.gather_full_params()
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_fsdp_trains_modules_that_use_weights_in_unusual_ways_as_one_process(run, dtype):
    ranks = run(train_modules, dtype)
    for name in ranks[0]:
        reference = build(MODULES[name][0], seed=0)
        if name == "late hooks":
            with_late_hooks(reference)
        wanted = train(reference, slice(None))
        for each in ranks:
            losses, parameters = each[name]
            # fp32: the order of the sums differs. bf16: weights and activations have 8 bits.
            tolerance = dict(rtol=1e-5 if dtype is None else 0.03, atol=1e-5)
            torch.testing.assert_close(losses, wanted, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
            for key, tensor in reference.named_parameters() if dtype is None else ():
                torch.testing.assert_close(parameters[key], tensor.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.long  # PyTorch's compiler needs seconds to start
def test_compiled_modules_have_the_gradients_of_the_plain_module():
    x, plain = torch.randn(4, 6), build(Inner, 0)
    F.mse_loss(plain(x), x[:, :3]).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layers in ("a", "b"), ("",):
            fsdp = FSDP(build(Inner, 0))
            fsdp.module.a = torch.compile(fsdp.module.a, backend="eager") if "a" in layers else fsdp.module.a
            fsdp.module.b = torch.compile(fsdp.module.b, backend="eager") if "b" in layers else fsdp.module.b
            model = torch.compile(fsdp, backend="eager") if "" in layers else fsdp
            F.mse_loss(model(x), x[:, :3]).backward()
            fsdp.finish_gradient_synchronization()
            for got, wanted in zip(fsdp.parameters(), plain.parameters(), strict=True):
                gradient = got.grad.to_local() if got in fsdp.shards else got.grad
                torch.testing.assert_close(gradient.reshape(wanted.shape), wanted.grad)
    finally:
        dist.destroy_process_group()


def in_memory(storages):
    """The number of storages that exist, once gloo's threads have released those of the collectives that have ended."""
    for _ in range(500):
        if all(each.expired() for each in storages):
            break
        time.sleep(0.01)
    return sum(not each.expired() for each in storages)


def count_whole_weights():
    """[(whole weights gathered in forward, in memory after it, gathered in the step, in memory at its end)]."""
    [x, y], found = next(batches()), []
    for model, types in (
        (Inner, (nn.Linear,)),
        (Inner, BLOCK),
        (Twice, (nn.Linear,)),
        (lambda: Checkpointed(False), BLOCK),
    ):
        fsdp, storages = FSDP(build(model, 0), shard=types), []
        for shard in fsdp.shards.values():

            def all_gather(*args, of=shard.all_gather, storages=storages, **options):
                full, *others = of(*args, **options)
                storages.append(StorageWeakRef(full.untyped_storage()))
                return full, *others

            shard.all_gather = all_gather
        loss = F.mse_loss(fsdp(x), y)
        counts = [len(storages), in_memory(storages)]
        loss.backward()
        fsdp.finish_gradient_synchronization()
        found.append((*counts, len(storages), in_memory(storages)))
    return found


def test_no_whole_weight_is_in_memory_between_forward_and_backward_and_after_it(run):
    for found in run(count_whole_weights):
        assert [(forward > 0, kept, backward > forward, left) for forward, kept, backward, left in found] == [
            (True, 0, True, 0)
        ] * 4


# -- steps -------------------------------------------------------------------------------------------------------------


def whole_gradients(fsdp):
    """{name: whole gradient} of FSDP."""
    found = {}
    for name, p in fsdp.module.named_parameters():
        found[name] = p.grad
        if p in fsdp.shards:
            parts = [torch.empty_like(p.grad.to_local()) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.grad.to_local())
            found[name] = torch.cat([part.reshape(-1) for part in parts])[: p.whole_shape.numel()].view(p.whole_shape)
    return found


def accumulate(model, x, y, finish):
    for samples in (slice(0, 5), slice(5, None)):
        F.mse_loss(model(x[samples]), y[samples]).backward()
    finish()


def finish_twice(model, x, y, finish):
    for samples in (slice(0, 5), slice(5, None)):
        F.mse_loss(model(x[samples]), y[samples]).backward()
        finish()


def retain(model, x, y, finish):
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    finish()


def penalty(model, x, y, finish):
    """The norm of the gradient of the input: the backward of a backward."""
    x = x.clone().requires_grad_()
    [slope] = torch.autograd.grad(F.mse_loss(model(x), y), x, create_graph=True)
    slope.square().sum().backward()
    finish()


def two_forwards(model, x, y, finish):
    one, two = model(x[:5]), model(x[5:])
    with torch.no_grad():
        model(x)
    (F.mse_loss(two, y[5:]) + F.mse_loss(one, y[:5])).backward()
    finish()


def keep_zeros(model, x, y, finish):
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        finish()


def clip(model, x, y, finish, norm_type):
    F.mse_loss(model(x), y).backward()
    finish()
    own = getattr(model, "clip_grad_norm_", functools.partial(nn.utils.clip_grad_norm_, model.parameters()))
    return own(0.03, norm_type, error_if_nonfinite=True)


def clip_values(model, x, y, finish):
    F.mse_loss(model(x), y).backward()
    finish()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


STEPS = [clip_values, accumulate, finish_twice, retain, penalty, two_forwards, keep_zeros]
STEPS += [functools.partial(clip, norm_type=kind) for kind in (0.5, 1, 2.0, 3, math.inf, "inf")]
OPTIMIZERS = [
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    functools.partial(torch.optim.Adam, lr=0.1, weight_decay=0.1, foreach=True),
    functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    functools.partial(torch.optim.RMSprop, lr=0.1),
    *[functools.partial(kind, foreach=True) for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop)],
    *[functools.partial(kind, foreach=False) for kind in (torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax)],
    functools.partial(torch.optim.ASGD, t0=1),
]


def saved_and_loaded(state):
    """A state_dict from a file, in which parts are plain tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def take_steps():
    """[(results, gradients or parameters) of FSDP and of the plain module], all ranks with the same samples."""
    [x, y], found = next(batches()), []
    for step in STEPS:
        for types in (nn.Linear,), BLOCK:
            plain, pair = build(Inner, 3), []
            fsdp = FSDP(copy.deepcopy(plain), shard=types)
            pair.append((step(fsdp, x, y, fsdp.finish_gradient_synchronization), whole_gradients(fsdp)))
            pair.append((step(plain, x, y, lambda: None), {name: p.grad for name, p in plain.named_parameters()}))
            found.append(pair)
    for optimizer in OPTIMIZERS:
        plain, pair = build(Inner, 4), []
        wrapped = FSDP(copy.deepcopy(plain))
        for model in (wrapped, copy.deepcopy(wrapped), plain):  # a copy has its own weights and gradients
            finish = getattr(model, "finish_gradient_synchronization", lambda: None)
            groups = [[p for p in model.parameters() if decay == (p.dim() >= 2)] for decay in (True, False)]
            decays = [dict(params=groups[0], weight_decay=0.2), dict(params=groups[1], weight_decay=0.0)]
            stepped = optimizer(decays)
            for _ in range(3):
                stepped.zero_grad()
                F.mse_loss(model(x), y).backward()
                finish()
                stepped.step()
            whole = model.gather_full_params() if model is not plain else dict(model.named_parameters())
            pair.append((None, {name: p.detach() for name, p in whole.items()}))
            stepped.load_state_dict(saved_and_loaded(stepped.state_dict()))
        found += [pair[:1] + pair[2:], pair[1:]]
    shapes = {name: tuple(p.whole_shape) for name, p in wrapped.module.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in plain.named_parameters()}
    wrapped.load_state_dict(saved_and_loaded(wrapped.state_dict()))
    return found


def test_gradients_norms_and_optimizers_of_fsdp_are_those_of_one_process(run):
    ranks = run(take_steps)
    for found in ranks:
        for place, ((norm, got), (wanted_norm, wanted)) in enumerate(found):
            torch.testing.assert_close(norm, wanted_norm)
            assert norm is None or torch.equal(norm, ranks[0][place][0][0])  # or the ranks would scale differently
            for name, tensor in wanted.items():  # the order of the sums over the ranks differs; Adam divides by it
                torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=2e-6, msg=f"{place}: {name}")


def scale_gradients():
    """[(scale, whether the parameters changed, whether they are those of the plain module)] of steps with a scaler."""
    [x, y], found = next(batches()), []
    for fused, unscale in ((False, False), (False, True), (True, False)):
        plain = build(Inner, 3)
        fsdp = FSDP(copy.deepcopy(plain))
        scalers = [torch.amp.GradScaler(x.device.type, init_scale=4.0) for _ in range(2)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (fsdp, plain)]
        for overflow in (True, False):
            before = fsdp.gather_full_params()
            finishes = fsdp.finish_gradient_synchronization, lambda: None
            for m, scaler, optimizer, finish in zip((fsdp, plain), scalers, optimizers, finishes, strict=True):
                optimizer.zero_grad()
                scaler.scale(F.mse_loss(m(x), y)).backward()
                finish()
                if overflow and (m is plain or dist.get_rank() == dist.get_world_size() - 1):
                    next(m.parameters()).grad[0] = math.inf  # of FSDP, in the part of one rank
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            whole = fsdp.gather_full_params()
            changed = not torch.equal(whole["a.weight"], before["a.weight"])
            for name, p in plain.named_parameters():
                torch.testing.assert_close(whole[name], p.detach(), rtol=1e-4, atol=2e-6)
            found.append((scalers[0].get_scale(), scalers[1].get_scale(), changed))
    return found


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all_ranks(run):
    for found in run(scale_gradients):
        assert found == [(2.0, 2.0, False), (2.0, 2.0, True)] * 3


# -- errors ------------------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return F.embedding(x[:, 0].long().clamp(0, 4), self.table, sparse=True)


class Changes(Inner):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)
        return super().forward(x)


class Refers(Inner):
    """A weight is read from a list."""

    def __init__(self):
        super().__init__()
        self.weights = [self.b.weight]

    def forward(self, x):
        return self.c(F.linear(self.a(x), self.weights[0]))


class Special(nn.Parameter):
    """A class of parameters that FSDP does not know."""


def special():
    layer = nn.Linear(6, 3)
    layer.weight = Special(layer.weight.data)
    return layer


def hooked():
    layer = nn.Linear(6, 3)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


MIXING = {  # functions that would take a part, a flat piece of the weight, for the whole weight
    "index": lambda p: p.data[0].zero_(),
    "set a row": lambda p: p.data.__setitem__(0, 0.0),
    "set a row of the gradient": lambda p: p.grad.__setitem__(0, 0.0),
    "iterate": lambda p: list(p),
    "norm": lambda p: p.norm(dim=0),
    "mean": lambda p: p.mean(0),
    "sum": lambda p: p.sum(0),
    "amax": lambda p: p.abs().amax(0),
    "logsumexp": lambda p: p.logsumexp(0),
    "max": lambda p: p.max(0),
    "normalize": lambda p: F.normalize(p),
    "renorm": lambda p: p.renorm(2, 0, 1.0),
    "layer_norm": lambda p: F.layer_norm(p, p.shape[-1:]),
    "softmax": lambda p: p.softmax(-1),
    "cumsum": lambda p: p.cumsum(-1),
    "sort": lambda p: p.sort(),
    "flip": lambda p: p.flip(0),
    "roll": lambda p: p.roll(1),
    "triu": lambda p: p.triu(),
    "tril": lambda p: p.data.tril_(),
    "index_fill": lambda p: p.index_fill(0, torch.tensor([0]), 0.0),
    "unique": lambda p: p.unique(),
    "T": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(),
    "item": lambda p: p.grad.item(),
    "bool": lambda p: bool(p.grad),
    "cat": lambda p: torch.cat([p, p]),
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, p),
    "where": lambda p: torch.where(p > 0),
    "rand_like": lambda p: torch.rand_like(p),
    "matmul": lambda p: p @ p,
    "foreach": lambda p: torch._foreach_max([p]),
    "foreach with another shape": lambda p: torch._foreach_add([p], [torch.ones(3, *p.shape)]),
    "another shape": lambda p: p * torch.ones(3, *p.shape),
    "another weight": lambda p: p.data.copy_(torch.ones(p.whole_shape)),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
}


def call_mixing_functions():
    """{function: the message of its error}, and whether no element of the weight and of its gradient has changed."""
    [x, y], found = next(batches()), {}
    fsdp = FSDP(build(Inner, 0))
    F.mse_loss(fsdp(x), y).backward()
    fsdp.finish_gradient_synchronization()
    part = fsdp.module.b.weight
    before = [t.to_local().clone() for t in (part, part.grad)]
    for name, function in MIXING.items():
        try:
            found[name] = f"no error: {type(function(part))}"
        except RuntimeError as error:
            found[name] = str(error)
    return found, all(torch.equal(t.to_local(), b) for t, b in zip((part, part.grad), before, strict=True))


def test_a_function_that_needs_the_whole_weight_is_refused_for_a_part(run):
    for found, unchanged in run(call_mixing_functions):
        assert {name: text for name, text in found.items() if "FSDP:" not in text or "b.weight" not in text} == {}
        assert unchanged


class Penalises(Inner):
    """A penalty is computed from parameters() in forward."""

    def forward(self, x):
        return super().forward(x) + sum(p.pow(2).sum() for p in self.parameters())


def make_mistakes():
    """{mistake: the message of its error} on this rank."""
    [x, y], found = next(batches()), {}

    def attempt(name, function, *kinds):
        try:
            function()
            found[name] = "no error"
        except (RuntimeError, ValueError, TypeError) as error:
            found[name] = str(error)

    def ready(model=Inner, types=(nn.Linear,), finish=True):
        """FSDP after a backward."""
        fsdp = FSDP(build(model, 0), shard=types)
        F.mse_loss(fsdp(x), y).backward()
        if finish:
            fsdp.finish_gradient_synchronization()
        return fsdp

    fsdp = ready()
    part = fsdp.module.b.weight
    attempt("clip_grad_norm_ of PyTorch", lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1.0))
    attempt("norm", lambda: part.grad.data.norm())
    attempt("square", lambda: (part.grad**2).sum())
    attempt("foreach norm", lambda: torch._foreach_norm([part.grad]))
    attempt("isfinite", lambda: part.grad.isfinite().all())
    attempt("vector", lambda: nn.utils.parameters_to_vector(fsdp.parameters()).norm())
    attempt("Adafactor", torch.optim.Adafactor(fsdp.parameters()).step)
    attempt("Muon", torch.optim.Muon([p for p in fsdp.parameters() if p.dim() == 2]).step)
    attempt("LBFGS", lambda: torch.optim.LBFGS(fsdp.parameters()).step(lambda: torch.ones(())))
    attempt("read outside", lambda: F.linear(torch.ones(2, WIDE), part))
    attempt("init", lambda: nn.init.xavier_uniform_(part))
    attempt("double", fsdp.double)
    attempt("replace", lambda: setattr(fsdp.module.b, "weight", nn.Parameter(torch.ones(2, 2))))
    attempt("hook", lambda: part.register_hook(print))
    attempt("pickle", lambda: torch.save(fsdp, io.BytesIO()))
    attempt("norm type", lambda: fsdp.clip_grad_norm_(1.0, 0))
    attempt("nested", lambda: FSDP(nn.Sequential(fsdp)))
    attempt("DDP", lambda: NaiveDDP(fsdp))
    attempt("ShardedOptimizer", lambda: ShardedOptimizer(fsdp.parameters(), torch.optim.SGD, lr=0.1))
    part.grad.fill_(math.nan)
    attempt("not finite", lambda: fsdp.clip_grad_norm_(1.0, error_if_nonfinite=True))
    with warnings.catch_warnings(action="ignore"):
        attempt("create_graph", lambda: fsdp(x).sum().backward(create_graph=True))
    fsdp = ready(finish=False)
    small = torch.optim.SGD([p for p in fsdp.parameters() if p.dim() < 2])
    attempt("step before finish", torch.optim.SGD(fsdp.parameters()).step)
    attempt("step of replicated parameters before finish", small.step)
    attempt("clip before finish", lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1.0))
    attempt("own clip before finish", lambda: fsdp.clip_grad_norm_(1.0))
    attempt("zero_grad before finish", fsdp.zero_grad)
    fsdp = ready(Frozen)
    fsdp.requires_grad_(True)
    attempt("thawed", fsdp.finish_gradient_synchronization)
    for name, types in (("layer", (nn.Linear,)), ("block", BLOCK)):
        fsdp = ready(types=types)
        loss = fsdp(x).sum()
        torch.optim.SGD(fsdp.parameters()).step()
        attempt(f"step before backward, {name}", loss.backward)
    attempt("changed in place", lambda: ready(ChangesSaved, (ChangesSaved,)))
    attempt("changes its weight", lambda: ready(Changes, BLOCK))
    attempt("reference", lambda: ready(Refers))
    attempt("penalty", lambda: ready(Penalises))
    attempt("sparse", lambda: ready(Sparse, (Sparse,)))
    for options in ({"sparse": True}, {"max_norm": 1.0}):
        attempt(f"{options}", lambda options=options: FSDP(nn.Sequential(nn.Embedding(4, 3, **options))))
    attempt("class", lambda: FSDP(special()))
    attempt("hook before", lambda: FSDP(hooked()))
    attempt("lazy", lambda: FSDP(nn.Sequential(nn.LazyLinear(3))))
    attempt("meta", lambda: FSDP(nn.Linear(6, 3, device="meta")))
    attempt("lazy DDP", lambda: NaiveDDP(nn.LazyLinear(3)))
    return found


class ChangesSaved(Inner):
    """An operation changes a tensor in place that backward needs."""

    def forward(self, x):
        y = torch.sigmoid(self.a(x))
        y += 1
        return self.c(y)


MESSAGES = {
    "clip_grad_norm_ of PyTorch": "norm of a.weight would be computed from the elements",
    "norm": "FSDP: norm of b.weight would be computed from the elements that this rank has, not from the whole (8, 8)",
    "square": "FSDP: sum of b.weight",
    "foreach norm": "FSDP: _foreach_norm of b.weight",
    "isfinite": "FSDP: all of b.weight",
    "vector": "FSDP: view of a.weight",
    "Adafactor": "an optimizer or a function that needs the whole weight cannot be used",
    "Muon": "FSDP: norm of a.weight would be computed from the elements",
    "LBFGS": "would be computed from the elements that this rank has",
    "read outside": "FSDP: linear of b.weight would be computed from the elements that this rank has",
    "init": "FSDP: uniform_ would fill this rank's part of b.weight",
    "double": "FSDP: a.weight cannot become torch.float64",
    "replace": "FSDP: b.weight is sharded: replace parameters before FSDP(module)",
    "hook": "FSDP: a hook on the gradient of b.weight would never run",
    "pickle": "FSDP cannot be pickled",
    "norm type": "norm_type is 0.0, and FSDP computes norms above 0",
    "nested": "FSDP: 0.module.a.weight is a part of a weight that is divided over the ranks already",
    "DDP": "NaiveDDP: module.a.weight is a part of a weight that is divided over the ranks already",
    "ShardedOptimizer": "ShardedOptimizer: a.weight is divided over the ranks by FSDP",
    "create_graph": "FSDP: the gradient of c.weight has no gradient itself: omit create_graph=True",
    "not finite": "the norm of order 2.0 of the gradients is nan",
    "step before finish": "is not synchronized: call finish_gradient_synchronization() after backward",
    "step of replicated parameters before finish": "is not synchronized: call finish_gradient_synchronization()",
    "clip before finish": "FSDP: the gradient of a.weight is not synchronized",
    "own clip before finish": "is not synchronized",
    "zero_grad before finish": "FSDP: the gradient of a.weight is not synchronized",
    "thawed": "b.bias was frozen when FSDP was built",
    "step before backward, layer": "FSDP: the weight c.weight was changed after the forward",
    "step before backward, block": "FSDP: the weight c.weight was changed after the forward",
    "changed in place": "needs was changed in place: replace the operation in place",
    "changes its weight": "FSDP: the forward of Changes has changed its weight a.weight in place",
    "reference": "read the weight as an attribute of its module, as in module.weight, not from parameters()",
    "penalty": "FSDP: sum of a.weight would be computed from the elements that this rank has, not from the whole",
    "sparse": "FSDP: the gradient of table is sparse",
    "{'sparse': True}": "FSDP: Embedding 0 has sparse=True, which FSDP does not support: build it with sparse=False",
    "{'max_norm': 1.0}": "FSDP: Embedding 0 has max_norm=1.0, which FSDP does not support: build it with max_norm=None",
    "class": "FSDP: weight of Linear is a Special",
    "hook before": "FSDP: weight of Linear has a hook on its gradient, which would never run",
    "lazy": "FSDP: 0.weight has no shape yet: run one forward of the lazy module",
    "meta": "FSDP: weight is on the device meta and has no values",
    "lazy DDP": "NaiveDDP: weight has no shape yet",
}


def test_what_fsdp_cannot_compute_is_an_error_that_names_the_weight_and_what_to_do(run):
    for found in run(make_mistakes):
        assert {name: text for name, text in found.items() if MESSAGES[name] not in text} == {}
        assert found.keys() == MESSAGES.keys()

"""FSDP trains as one process does, and each rank has a part of the weights."""

import functools

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from tests.support.torch_models import BATCH, MODELS, STEPS, WORDS, Words, batches, build, rows  # noqa: E402
from torch_bridge.fsdp import FSDP, IN_FLIGHT  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
del MODELS["Unused"]  # FSDP needs the same units on every rank; a layer that no rank uses is in Spare


class Spare(Words):
    """A model of tokens with a layer that no rank uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 7)


class Block(Words):
    """The whole model is one unit."""


TOKEN_MODELS = {
    "plain": Words,
    "tied": functools.partial(Words, tied=True),
    "checkpointed": functools.partial(Words, checkpoint=True),
    "tied and checkpointed": functools.partial(Words, tied=True, checkpoint=True),
    "spare": Spare,
    "block": Block,
}
SHARD = {"block": (Block,)}
TOKENS = torch.randint(0, WORDS, (STEPS, BATCH, 6), generator=torch.Generator().manual_seed(2))


def examples(kind):
    """(inputs, targets, loss function) of each step for a model of tokens or of numbers."""
    if kind == "numbers":
        return [(x, y, nn.functional.mse_loss) for x, y in batches()]
    tokens = TOKENS.to(torch.get_default_device())
    return [(t[:, :-1], t[:, 1:], lambda y, t: nn.functional.cross_entropy(y.float().mT, t)) for t in tokens]


def train(model, kind, samples, finish=lambda: None):
    """The losses of a training run with AdamW, whose eps is so large that the scale of a gradient matters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.03, eps=0.01, weight_decay=0.3)
    losses = []
    for x, y, loss_of in examples(kind):
        optimizer.zero_grad()
        loss = loss_of(model(x[samples]), y[samples])
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cases():
    """(name, model, kind) of all models."""
    return [(n, m, "numbers") for n, m in MODELS.items()] + [(n, m, "words") for n, m in TOKEN_MODELS.items()]


def train_sharded(dtype):
    """{name: (mean losses, whole parameters, elements of the parts of this rank)}."""
    rank, found = dist.get_rank(), {}
    for name, model, kind in cases():
        fsdp = FSDP(build(model, seed=rank), compute_dtype=dtype, shard=SHARD.get(name, (nn.Linear, nn.Embedding)))
        losses = torch.tensor(train(fsdp, kind, rows(), fsdp.finish_gradient_synchronization))
        dist.all_reduce(losses)
        assert all(shard.full is None for shard in fsdp.shards.values())
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in fsdp.parameters() if p.grad is not None)
        found[name] = (
            losses / dist.get_world_size(),
            fsdp.gather_full_params(),
            sum(p.numel() for p in fsdp.parameters()),
        )
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_fsdp_trains_every_model_as_one_process(run, dtype):
    found = run(train_sharded, dtype)
    for name, model, kind in cases():
        reference = build(model, seed=0)
        sizes = [(p.dim(), p.numel()) for p in reference.parameters()]
        losses = torch.tensor(train(reference, kind, slice(None)))
        for each in found:
            got, parameters, held = each[name]
            # fp32: the order of the sums differs. bf16: weights and activations have 8 bits.
            torch.testing.assert_close(got, losses, rtol=1e-5 if dtype is None else 0.02, atol=1e-5, msg=str)
            wanted = dict(reference.named_parameters(remove_duplicate=False))
            assert parameters.keys() == wanted.keys()
            for key, tensor in wanted.items() if dtype is None else ():
                torch.testing.assert_close(parameters[key], tensor.detach(), rtol=1e-3, atol=1e-4)
                assert torch.equal(parameters[key], found[0][name][1][key])
            assert held == sum(-(-n // len(found)) if axes > 1 else n for axes, n in sizes)


def save_and_load():
    """Whole parameters on one rank, the error for parts of all ranks there, and an evaluation between two steps."""
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]
    fsdp = FSDP(build(Words, seed=0))
    train(fsdp, "words", rows(), fsdp.finish_gradient_synchronization)
    whole, tokens = fsdp.gather_full_params(), TOKENS[0].to(torch.get_default_device())
    with torch.no_grad():
        logits = fsdp(tokens)
    assert all(shard.full is None for shard in fsdp.shards.values())
    fsdp(tokens).sum().backward()
    assert len(fsdp.in_flight) == IN_FLIGHT < len(fsdp.shards)  # the sums of earlier gradients have ended
    fsdp.finish_gradient_synchronization()
    plain, single = build(Words, 9), FSDP(build(Words, 7), process_group=own)
    plain.load_state_dict(whole)
    single.load_full_params(whole)
    again = FSDP(build(Words, 8))
    again.load_state_dict(fsdp.state_dict())
    errors = []
    for load, state in (
        (single.load_state_dict, fsdp.state_dict()),
        (single.load_full_params, {k: v for k, v in whole.items() if k != "up.weight"}),
        (single.load_full_params, whole | {"up.weight": torch.zeros(2, 2)}),
        (lambda shard: FSDP(plain, shard=shard), (nn.Conv1d, nn.Conv2d)),
        (lambda dtype: FSDP(plain, compute_dtype=dtype), torch.int8),
    ):
        try:
            load(state)
        except ValueError as error:
            errors.append(str(error))
    with torch.no_grad():
        results = logits, plain(tokens), single(tokens), again(tokens)
    return results, errors


def test_whole_parameters_load_on_another_number_of_ranks_and_parts_do_not(run):
    found = run(save_and_load)
    for rank, ((logits, *others), errors) in enumerate(found):
        for other in others:
            torch.testing.assert_close(other, logits)
        assert f"parts of rank {rank} of {len(found)}, and this is rank 0 of 1: save gather_full_params()" in errors[0]
        assert "parameter up.weight is missing, and this model needs (24, 8)" in errors[1]
        assert "parameter up.weight is (2, 2), and this model needs (24, 8)" in errors[2]
        assert "Words has no module of the types Conv1d, Conv2d, so nothing would be sharded" in errors[3]
        assert "compute_dtype is torch.int8, and weights are floating-point: use torch.bfloat16" in errors[4]


def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="FSDP needs a process group.*init_process_group first"):
        FSDP(Words())

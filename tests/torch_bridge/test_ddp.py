"""Every schedule of torch_bridge.ddp trains as one process does, on two to four ranks."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from tests.support.torch_models import MODELS, Toy, Unused, batches, build, rows  # noqa: E402
from torch_bridge.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, planned  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
MIB = 2**20  # bytes; not imported, because it is what the class is tested with
SMALL = 150 / MIB  # MiB of a bucket that holds some of the parameters of Toy

WAYS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed, each alone": lambda module: BucketedDDP(module, 1 / MIB),
    "bucketed, some": lambda module: BucketedDDP(module, SMALL),
    "bucketed, one": lambda module: BucketedDDP(module, None),
}


def train(model, samples, finish=lambda: None, clear=True):
    """Train two steps with AdamW, whose weight decay changes a parameter that has a gradient of 0, but not one without.

    With a large eps an update depends on the scale of the gradient, so a sum in place of a mean is found.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.03, eps=0.01, weight_decay=0.3)
    for x, y in list(batches())[:2]:
        optimizer.zero_grad(set_to_none=clear)
        nn.functional.mse_loss(model(x[samples]), y[samples]).backward()
        finish()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in getattr(model, "module", model).state_dict().items()}


def train_every_way(clear, ways):
    """{(model, way): (state after training, its unused parameters)} of this rank, for the names `ways` of WAYS."""
    rank, found = dist.get_rank(), {}
    for name, model in MODELS.items():
        for way in ways:
            ddp = WAYS[way](build(model, seed=rank))
            state = train(ddp, rows(), ddp.finish_gradient_synchronization, clear)
            found[name, way] = state, ddp.unused
    return found


@pytest.mark.parametrize("clear, ways", [
    (True, [*WAYS]), (False, ["overlap", "bucketed, some"]), pytest.param(False, [*WAYS], marks=pytest.mark.long),
], ids=["True", "False, two", "False"])  # fmt: skip
def test_every_schedule_trains_every_model_as_one_process(run, clear, ways):
    found = run(train_every_way, clear, ways)
    for name, model in MODELS.items():
        want = train(build(model, seed=0), slice(None), clear=clear)
        for way in ways:
            for each in found:
                state, unused = each[name, way]
                assert state.keys() == want.keys()
                for key in want:  # the order of the sum over the samples differs
                    torch.testing.assert_close(state[key], want[key], rtol=1e-4, atol=1e-5, msg=f"{name}, {way}, {key}")
                    assert torch.equal(state[key], found[0][name, way][0][key])
                # the second step of clear=False has gradients of 0 only where there were gradients before
                never = ["never.weight", "never.bias"] if model is Unused else []
                assert sorted(unused) == sorted(never)


def accumulate():
    """Gradients of two micro-batches under no_sync(), then as one batch, and the messages of the first."""
    [x, y], rank, found = next(batches()), dist.get_rank(), {}
    x, y = x[rows()], y[rows()]
    sent = []
    send, dist.all_reduce = dist.all_reduce, lambda *args, **options: sent.append(1) or send(*args, **options)
    try:
        for way, wrap in WAYS.items():
            ddp = wrap(build(Toy, seed=rank))
            gradients = []
            for parts in ((slice(0, 2), slice(2, None)), (slice(None),)):
                ddp.zero_grad()
                with ddp.no_sync():
                    for part in parts[:-1]:
                        nn.functional.mse_loss(ddp(x[part]), y[part], reduction="sum").backward()
                    assert not sent
                nn.functional.mse_loss(ddp(x[parts[-1]]), y[parts[-1]], reduction="sum").backward()
                assert bool(sent) == ddp.eager  # only these schedules send during backward
                ddp.finish_gradient_synchronization()
                sent.clear()
                gradients.append([p.grad.clone() for p in ddp.parameters()])
            found[way] = gradients
    finally:
        dist.all_reduce = send
    return found


def test_no_sync_accumulates_and_sends_nothing(run):
    for found in run(accumulate):
        for accumulated, at_once in found.values():
            torch.testing.assert_close(accumulated, at_once)


def make_mistakes():
    """{mistake: the message of its error} on this rank."""
    rank, found = dist.get_rank(), {}

    def attempt(name, function):
        try:
            function()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)

    attempt("other model", lambda: NaiveDDP(nn.Linear(2, 2 + rank)))
    attempt("fewer parameters", lambda: FlatDDP(nn.Linear(2, 2, bias=rank == 0)))
    for size in (0, -1, float("nan")):
        attempt(f"bucket {size}", lambda size=size: BucketedDDP(Toy(), size))
    twice = OverlapDDP(build(Toy, 0))
    attempt("twice", lambda: [twice(torch.ones(2, 6)).sum().backward() for _ in range(2)])
    for way, wrap in WAYS.items():
        ddp = wrap(build(Toy, 0))
        sgd = torch.optim.SGD(ddp.parameters())
        before = ddp.module.one.weight.detach().clone()
        ddp(torch.ones(2, 6)).sum().backward()
        attempt(f"{way}: step", sgd.step)
        assert torch.equal(ddp.module.one.weight, before)
        if ddp.eager:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
            attempt(f"{way}: clip", ddp.finish_gradient_synchronization)
    thawed = OverlapDDP(nn.Linear(2, 2).requires_grad_(False))
    thawed.module.requires_grad_(True)
    attempt("thawed", thawed.finish_gradient_synchronization)
    sparse = NaiveDDP(nn.Embedding(3, 2, sparse=True))
    sparse(torch.tensor([1])).sum().backward()
    attempt("sparse", sparse.finish_gradient_synchronization)
    return found


def test_a_mistake_is_an_error_that_names_both_values(run):
    for found in run(make_mistakes):
        assert "rank 1 differs from that of rank 0: ('weight', (3, 2)" in found["other model"]
        assert "1 parameters instead of 2 parameters" in found["fewer parameters"]
        for size in (0, -1, float("nan")):
            assert f"bucket_size_mb is {size}, and a bucket needs a size above 0" in found[f"bucket {size}"]
        assert "call finish_gradient_synchronization() after each backward" in found["twice"]
        for way in WAYS:
            assert "is not synchronized: call finish_gradient_synchronization()" in found[f"{way}: step"]
        assert sum("was changed while it was sent: clip or scale" in text for text in found.values()) == len(WAYS) - 2
        assert "weight was frozen when OverlapDDP was built" in found["thawed"]
        assert "gradient of weight is sparse: build its module with sparse=False" in found["sparse"]


@pytest.mark.parametrize("way", [NaiveDDP, FlatDDP, OverlapDDP, lambda module: BucketedDDP(module, 1)])
def test_without_a_process_group_the_error_says_what_to_call(way):
    with pytest.raises(RuntimeError, match="DDP needs a process group.*init_process_group first"):
        way(Toy())


def count_buckets():
    """Numbers of buckets of two layers of 2^17 fp32 weights each, for a bucket size around the 2^20 bytes of both."""
    layers = nn.Sequential(*(nn.Linear(2**9, 2**8, bias=False) for _ in range(2)))
    return [len(BucketedDDP(layers, size).gradients.buckets) for size in (1 - 2**-19, 1, 2)]


def test_bucket_size_mb_is_in_units_of_2_to_the_20_bytes(run):
    for found in run(count_buckets):
        assert found == [2, 1, 1]


def parameters_of(**elements):
    return {name: nn.Parameter(torch.zeros(number)) for name, number in elements.items()}


@pytest.mark.parametrize(
    "most, plan",
    [
        (4, [["e"], ["d"], ["c"], ["b"], ["a"]]),
        (16, [["e", "d"], ["c"], ["b", "a"]]),  # c is larger than a bucket
        (24, [["e", "d"], ["c"], ["b", "a"]]),
        (40, [["e", "d", "c"], ["b", "a"]]),
        (float("inf"), [["e", "d", "c", "b", "a"]]),
    ],
)
def test_a_bucket_has_at_most_its_size_in_reverse_order(most, plan):
    assert planned(parameters_of(a=1, b=2, c=7, d=2, e=1), True, most) == plan


def test_a_bucket_has_one_dtype_and_is_sent_when_its_last_gradient_is_complete():
    parameters = parameters_of(a=1, b=1, c=1, d=1)
    parameters |= {"b": parameters["b"].bfloat16(), "d": parameters["d"].bfloat16()}
    assert planned(parameters, True, float("inf")) == [["d", "b"], ["c", "a"]]
    assert planned(parameters, False, float("inf")) == [["d"], ["c"], ["b"], ["a"]]

"""The benchmark of products, as far as it runs without a GPU: both sides compute the three products, and its table."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.gpu import products as gpu_products
from benchmarks.harness import ours
from benchmarks.harness.contenders import print_table, timed_turn
from stage2_cuda.runtime.triton_launch import interpreted

in_the_interpreter = pytest.mark.skipif(not interpreted(), reason="on a GPU the benchmark itself compares the two")
WAIT = SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=int))


@pytest.fixture
def numpy_s(monkeypatch):
    """Ours on NumPy's arrays, without graphs."""

    class Arrays:
        cuda = WAIT

        def __getattr__(self, name):
            return getattr(np, name)

    monkeypatch.setattr(ours.Graphs, "__init__", lambda self: vars(self).update(cupy=Arrays()))


def few(turned):
    return [(some[:300], shape) for some, shape in gpu_products.numbers(20, 24, 40, turned)]  # which are repeated


@in_the_interpreter
@pytest.mark.parametrize("turned", [False, True])
def test_ours_are_the_three_products(numpy_s, turned):
    numbers = few(turned)
    x, w, dy = (np.resize(*each) for each in numbers)
    linear = gpu_products.Linear(numbers, turned, "fp32")
    for call in linear.calls.values():
        call()
    plain = w.T if turned else w
    wanted = x @ plain, dy @ plain.T, (x.T @ dy).T if turned else x.T @ dy
    for got, want in zip(linear.results, wanted, strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert linear.norms() == pytest.approx([np.linalg.norm(want) for want in wanted], rel=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_the_peer_s_are_the_same(monkeypatch, turned):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import torch_graphs, torch_products

    monkeypatch.setattr(torch_graphs.Graphs, "__init__", lambda self: vars(self).update(results={}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = torch.get_float32_matmul_precision()
    numbers = few(turned)
    x, w, dy = (np.resize(*each) for each in numbers)
    try:
        linear = torch_products.Linear(numbers, turned, "fp32", device="cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    linear.results = {kind: call() for kind, call in linear.calls.items()}
    plain = w.T if turned else w
    wanted = x @ plain, dy @ plain.T, x.T @ dy
    assert linear.norms() == pytest.approx([np.linalg.norm(want) for want in wanted], rel=1e-5)


def test_the_table_has_rates_and_ratios_within_rounds(capsys):
    noise = np.array([1.0, 3.0, 2.0])  # a neighbour that slows both of a round alike
    pair = [
        {"name": name, "precision": "bf16", "shape": [1000, 500, 2000, False], "norms": [1.0, 2.0, norm],
         "ms": {kind: (factor * noise).tolist() for kind in gpu_products.KINDS}}
        for name, factor, norm in (("ours", 1.0, 3.0), ("torch.matmul", 1.5, 3.001))
    ]  # fmt: skip
    row = gpu_products.summarise(pair)
    assert list(row.values()) == ["1000 x 500 x 2000", *["1", "1", "1.500"] * 3]
    print_table([row])
    assert "do not compute" not in capsys.readouterr().out
    pair[1]["norms"][2] = 3.3
    gpu_products.summarise(pair)
    assert "do not compute the same" in capsys.readouterr().out


def test_flags_have_defaults():
    args = gpu_products.parser().parse_args([])
    assert args.save_as == "products" and args.preset == ["gpt2", "paper"] and not args.no_save


def test_a_turn_is_one_graph_of_each_kind():
    counts, spent = {"forward": 4, "weight": 5}, {"forward": 8.0, "weight": 20.0}
    graphs = SimpleNamespace(calls=counts, record=lambda kind, _: counts[kind], replay=spent.get, norms=lambda: [7.0])
    assert timed_turn(graphs, 20) == {"forward": 2.0, "weight": 4.0, "norms": [7.0]}

"""The products benchmark without a GPU: both sides compute the three products, and the table shows their rates."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.gpu import products as gpu_products
from benchmarks.harness import ours
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import GraphTimer
from stage2_cuda.runtime.triton_launch import interpreted

in_the_interpreter = pytest.mark.skipif(not interpreted(), reason="on a GPU the benchmark itself compares the two")
WAIT = SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=int))


@pytest.fixture
def on_numpy(monkeypatch):
    """Our products on NumPy arrays, without graphs."""

    class Arrays:
        cuda = WAIT

        def __getattr__(self, name):
            return getattr(np, name)

    monkeypatch.setattr(ours.Graphs, "__init__", lambda self: vars(self).update(cupy=Arrays()))


def few(transposed):
    return gpu_products.random_inputs(20, 24, 40, transposed)


@in_the_interpreter
@pytest.mark.parametrize("transposed", [False, True])
def test_ours_are_the_three_products(on_numpy, transposed):
    inputs = few(transposed)
    x, w, dy = inputs
    linear = gpu_products.Linear(inputs, transposed, "fp32")
    for call in linear.calls.values():
        call()
    plain = w.T if transposed else w
    wanted = x @ plain, dy @ plain.T, (x.T @ dy).T if transposed else x.T @ dy
    for got, want in zip(linear.results, wanted, strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert linear.norms() == pytest.approx([np.linalg.norm(want) for want in wanted], rel=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_pytorch_computes_the_same_products(monkeypatch, transposed):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import torch_graphs, torch_products

    monkeypatch.setattr(torch_graphs.Graphs, "__init__", lambda self: vars(self).update(results={}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = torch.get_float32_matmul_precision()
    inputs = few(transposed)
    x, w, dy = inputs
    try:
        linear = torch_products.Linear(inputs, transposed, "fp32", device="cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    linear.results = {kind: call() for kind, call in linear.calls.items()}
    plain = w.T if transposed else w
    wanted = x @ plain, dy @ plain.T, x.T @ dy
    assert linear.norms() == pytest.approx([np.linalg.norm(want) for want in wanted], rel=1e-5)


def test_the_table_has_rates_and_ratios_within_rounds(capsys):
    noise = np.array([1.0, 3.0, 2.0])  # a disturbance that slows both sides of a round equally
    pair = [
        {"name": name, "precision": "bf16", "shape": [1000, 500, 2000, False], "norms": [1.0, 2.0, norm],
         "ms": {kind: (factor * noise).tolist() for kind in gpu_products.KINDS}}
        for name, factor, norm in (("ours", 1.0, 3.0), ("torch.matmul", 1.5, 3.001))
    ]  # fmt: skip
    gpu_products.summarise(pair)
    (row,) = TABLES["gpu-products"].cells([{"results": pair}])
    assert list(row.values()) == ["1000 x 500 x 2000", "1 (1.50), 1 (1.50), 1 (1.50)"]
    assert "different results" not in capsys.readouterr().out
    pair[1]["norms"][2] = 3.3
    gpu_products.summarise(pair)
    assert "give different results" in capsys.readouterr().out


def test_a_round_replays_one_graph_of_each_kind():
    class Graphs(GraphTimer):
        captures = 0

        def milliseconds(self, call):
            return call()

        def captured(self, kind, count):
            self.captures += 1
            return lambda: count * self.calls[kind]() / 2  # a call in a graph takes half as long as a single one

        def norms(self):
            return [7.0]

    graphs = Graphs()
    graphs.calls = {"forward": lambda: 4.0, "weight": lambda: 8.0}
    for _ in range(2):
        assert graphs.run_round(20) == {"forward": 2.0, "weight": 4.0, "norms": [7.0]}
    assert graphs.captures == 2 and [count for _, count in graphs.graphs.values()] == [5, 2]

"""The arithmetic of benchmarks/torch: the bucket-size model, the fit, and what a rank reports."""

import math

import pytest

torch = pytest.importorskip("torch")

from benchmarks.harness.assignment_tables import TABLES  # noqa: E402
from benchmarks.torch import ddp, ddp_model  # noqa: E402
from benchmarks.torch.groups import Groups  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402
from testing.torch_ranks import RanksFailed, TorchRanks  # noqa: E402

S, W, CALL = 6e9, 5e10, 2e-5  # bytes, bytes per second, seconds
SIZES = (10**6, 10**7, 10**8, 10**9)


def test_the_best_bucket_size_is_where_the_overhead_is_smallest():
    best = ddp_model.best_size(S, W, CALL)
    assert best == pytest.approx(math.sqrt(S * W * CALL))
    for other in (0.9 * best, 1.1 * best):
        assert ddp_model.overhead(S, W, CALL, S / best) < ddp_model.overhead(S, W, CALL, S / other)


@pytest.mark.parametrize("n", [1, 7, 300])
def test_if_backward_takes_as_long_as_the_messages_only_the_last_one_is_exposed(n):
    message = CALL + S / (n * W)
    assert ddp_model.pipelined(S, W, CALL, n, n * message) == pytest.approx(message)
    assert ddp_model.pipelined(S, W, CALL, n, 100 * n * message) == pytest.approx(message)  # a fast network
    assert ddp_model.pipelined(S, W, CALL, n, 0.0) == pytest.approx(n * message)  # nothing hides the messages


def all_reduce_rows(backend="nccl"):
    names = ((size, f"{backend}, 2 ranks, {size / 1e6:g} MB") for size in SIZES)
    return [{"name": name, "bytes": size, "time": {"mean": 1e3 * (CALL + size / W)}} for size, name in names]


def test_the_fit_finds_bandwidth_and_overhead_of_one_backend():
    slow = [row | {"time": {"mean": 9e9}} for row in all_reduce_rows("nccl-sockets")]
    assert ddp_model.fit(all_reduce_rows() + slow, "nccl", 2) == pytest.approx((W, CALL), rel=1e-6)
    with pytest.raises(ConfigError, match="0 rows of gloo on 4 ranks, and a fit needs two sizes: run python -m"):
        ddp_model.fit(all_reduce_rows(), "gloo", 4)


def test_the_measured_overhead_is_the_difference_from_a_step_without_synchronisation():
    measured = [{"name": "xl, none", "way": "none", "step": {"mean": 400.0}, "backward": {"mean": 1e3 * S / W}}]
    for mb, n in ((1000, 6), (10, 600)):
        extra = 1e3 * ddp_model.overhead(S, W, CALL, n)
        values = {"way": f"bucketed {mb} MB", "step": {"mean": 400.0 + extra}, "MB": S / 1e6, "buckets": n}
        measured.append({"name": f"xl, bucketed {mb} MB", **values})
    found, _, s = ddp_model.compare(measured, "xl", W, CALL)
    assert [each["bucket MB"] for each in found] == [10, 1000] and s == S
    assert all(each["closed form / measured"] == pytest.approx(1) for each in found)
    with pytest.raises(ConfigError, match="no row small, none"):
        ddp_model.compare(measured, "small", W, CALL)


@pytest.mark.parametrize(
    "message, kind", [("torch.OutOfMemoryError: CUDA", torch.OutOfMemoryError), ("x", RanksFailed)]
)
def test_too_little_memory_on_a_rank_is_that_error_here(monkeypatch, message, kind):
    def fail(*args):
        raise RanksFailed(f"rank 1: {message}")

    monkeypatch.setattr(TorchRanks, "run", fail)
    with Groups() as groups, pytest.raises(kind):
        groups.run("gloo", 2, print)


@pytest.mark.parametrize(
    "gpus, share, message",
    [
        (2, False, "NCCL with 4 ranks needs 4 GPUs, but PyTorch found 2: use fewer ranks$"),
        (0, False, "NCCL with 4 ranks needs 4 GPUs, but PyTorch found 0: use gloo on the CPU"),
        (0, True, "NCCL with 4 ranks needs 1 GPU, but PyTorch found 0: use gloo on the CPU"),
    ],
)
def test_too_few_gpus_for_the_ranks_are_an_error_that_names_both_numbers(monkeypatch, gpus, share, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=message), TorchRanks(4, "nccl", share_gpus=share) as ranks:
        ranks.run(print)


def test_ranks_that_share_gpus_name_a_host_for_each_group(monkeypatch):
    """Four ranks on two GPUs; the processes are not started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    started = []

    class Process:
        def __init__(self, target, args, daemon):
            started.append(args)

        def start(self):
            pass

    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", Process)
    TorchRanks(4, "nccl", environment={"A": "1"}, share_gpus=True).start()
    hosts = ["host 0", "host 0", "host 1", "host 1"]
    assert [args[5] for args in started] == [{"A": "1", "NCCL_HOSTID": host} for host in hosts]


def test_intervals_of_a_lane_with_a_small_gap_are_joined():
    found = [("b", 0.5, 0.6), ("a", 1.0, 2.0), ("a", 0.0, 0.995), ("a", 2.5, 3.0), ("a", 1.2, 1.3)]
    assert ddp.joined(found) == [("a", 0.0, 2.0), ("a", 2.5, 3.0), ("b", 0.5, 0.6)]


def test_the_exposed_time_is_a_difference_of_steps():
    times = ("none", 80.0), ("naive", 100.0)
    rows = [{"name": f"xl, {way}", "step": {"mean": ms, "std": 1.0}, "buckets": 1} for way, ms in times]
    rows.append({"name": "xl, overlap", "oom": True})
    cells = TABLES["ddp"].cells([{"results": rows}])
    assert [row["share of step"] for row in cells] == ["", "20.0 %", ""]
    assert [row["ms per step"] for row in cells] == ["80 ± 1", "100 ± 1", "out of memory"]
    assert [row["added, ms"] for row in TABLES["ddp"].cells([{"results": rows[1:]}])] == ["", ""]  # without none

"""Ranks for the tests of data parallelism, started once per session: on gloo, and on nccl with two GPUs.

With three ranks, the parts of a weight have different lengths; two ranks on gloo are long tests. With four ranks on two
GPUs, two ranks share a GPU.
"""

import functools

import pytest

from testing.torch_ranks import TorchRanks
from tests.support.torch_models import on_gpu

RANKS = [
    pytest.param(dict(size=2, backend="gloo"), id="gloo-2", marks=pytest.mark.long),
    pytest.param(dict(size=3, backend="gloo"), id="gloo-3"),
    pytest.param(dict(size=2, backend="nccl"), id="nccl-2", marks=pytest.mark.gpu),
    pytest.param(dict(size=4, backend="nccl", share_gpus=True), id="nccl-shared-4", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", params=RANKS)
def run(request):
    """run(function, *args) -> [function(*args) of each rank]; on nccl new tensors are on the rank's GPU."""
    import torch

    on_gpus = request.param["backend"] == "nccl"
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with TorchRanks(**request.param) as ranks:
        yield functools.partial(ranks.run, on_gpu) if on_gpus else ranks.run

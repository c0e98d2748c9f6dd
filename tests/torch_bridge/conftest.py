"""Two ranks for the tests of data parallelism, started once per session: on gloo, and on nccl with two GPUs."""

import functools

import pytest

from benchmarks.harness.torch_ranks import TorchRanks
from tests.support.torch_models import on_gpu


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def run(request):
    """run(function, *args) -> [function(*args) of each of two ranks]; on nccl new tensors are on the rank's GPU."""
    import torch

    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with TorchRanks(2, request.param) as ranks:
        yield functools.partial(ranks.run, on_gpu) if request.param == "nccl" else ranks.run

"""Two gloo processes for the tests of data parallelism, started once per session."""

import pytest

from benchmarks.harness.torch_ranks import TorchRanks


@pytest.fixture(scope="session")
def gloo():
    """gloo.run(function, *args) -> [function(*args) of each of two ranks]."""
    with TorchRanks(2) as ranks:
        yield ranks

"""Two gloo processes for the tests of data parallelism, started once per session."""

import pytest

from tests.support.gloo import Gloo


@pytest.fixture(scope="session")
def gloo():
    """gloo.run(function, *args) -> [function(*args) of each of two ranks]."""
    with Gloo(2) as group:
        yield group

"""Every misuse of the tables prints its one line, ends with its exit code, and changes no file."""

import shutil

import pytest

from tests.support.fork_server import ForkServer
from tests.support.misuse_places import fill, snapshot
from tests.support.misuse_tables import misuses


@pytest.fixture(scope="module")
def server():
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    return fill(tmp_path_factory.mktemp("home"), corpus)


@pytest.fixture(scope="module")
def before(home):
    return snapshot(home)


@pytest.mark.parametrize("misuse", misuses("training", "resuming", "inference", "files", "outputs"))
def test_a_misuse_is_one_line_and_changes_no_file(server, home, before, misuse):
    done = server.run(misuse.words(dir=home, byte="\udcff"), cwd=home)  # a byte that is not UTF-8
    shutil.rmtree(home / "new", ignore_errors=True)  # the only directory that a misuse may create: its own --out
    misuse.check(done.code, done.out, done.err)
    assert snapshot(home) == before

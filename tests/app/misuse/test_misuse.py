"""Every misuse of the tables prints its one line, ends with its exit code, and changes no file."""

import contextlib
import os
import shutil
import socket

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
    home = fill(tmp_path_factory.mktemp("home"), corpus)
    os.mkfifo(home / "pipe")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(home):  # the length of a socket's path is limited
        listener.bind("socket")
    (home / "link").symlink_to("new")
    (home / "to_run").symlink_to("run")
    (home / "to_state").symlink_to("new/state.json")
    return home


@pytest.fixture(scope="module")
def before(home):
    return snapshot(home)


@pytest.fixture(scope="module", autouse=True)
def large_files(home, before):
    """Files without content on the disk; made after the snapshot, which reads every file."""
    for name, size in (("long.txt", 1 << 40), ("large.json", 1 << 40)):
        (home / name).touch()
        os.truncate(home / name, size)


@pytest.mark.parametrize("misuse", misuses("training", "resuming", "inference", "files", "outputs"))
def test_a_misuse_is_one_line_and_changes_no_file(server, home, before, misuse):
    done = server.run(misuse.words(dir=home, byte="\udcff"), cwd=home)  # a byte that is not UTF-8
    shutil.rmtree(home / "new", ignore_errors=True)  # the only directory that a misuse may create: its own --out
    misuse.check(done.code, done.out, done.err)
    assert snapshot(home, without=("long.txt", "large.json")) == before

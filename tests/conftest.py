"""The two commands of stage 0, in this process: `train("--steps", 3)` returns exit code, standard output and error."""

from dataclasses import dataclass

import pytest

from gpt2core import cli
from gpt2core.communicator import Solo
from stage0_serial.numpy_backend import NumpyBackend

WORDS = "the model reads one token, then another; it learns what follows and forgets nothing of café and naïve text."


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """command(cli.train or cli.infer, *argv) -> Result, as the stage's script would give it."""

    def run(entry, *argv):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            entry(backend=NumpyBackend, world=Solo, argv=[str(word) for word in argv])
        return Result(exit.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def train(command):
    """train(*argv) -> Result of train_gpt2.py."""
    return lambda *argv: command(cli.train, *argv)


@pytest.fixture
def infer(command):
    """infer(*argv) -> Result of inference.py."""
    return lambda *argv: command(cli.infer, *argv)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text of a thousand words that is learnt in seconds; some of its letters are two bytes long."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = WORDS.split()
    lines = (" ".join(words[i % 7 :] + words[: i % 5]) for i in range(60))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path

"""A changed input file gives right results with exit code 0, or one line with exit code 2; nothing else is written.

Each case changes one file of a checkpoint, a token file, a corpus, a prompt, a log or a host file, and runs the command
that reads it, in this process. --mutations N sets the number of cases, --mutation-seed S repeats a case that failed.
"""

import contextlib
import io
import json
import os
import random
import re
import secrets
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.communicator import Solo
from gpt2core.errors import UserError
from gpt2core.text.token_file import HEADER, MAGIC, load_tokens, write_token_file
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.host_file import MPICH, OPEN_MPI, check_hosts
from tests.support.misuse_places import snapshot
from tests.support.mutations import mutate

PARTS = 10  # the cases are divided among so many tests, which pytest-xdist can run in parallel
LIMIT = 30  # seconds of one case, which usually takes 0.03
NANO = ("--preset", "nano", "--threads", "1", "--sample", "0")
STEP = "step-00000004"
HOSTS = {
    MPICH.mpi: b"# two hosts\none:4\n10.0.0.2:16 binding=user:0\n\nthree user=me\n",
    OPEN_MPI.mpi: b"# two hosts\none slots=4\n10.0.0.2 slots=16 max_slots=20 # big\n\nthree\nfe80::1\n",
}


class Hang(BaseException):
    """A case ran longer than LIMIT: not an Exception, so that no handler of the commands catches it."""


class Wrong(Exception):
    """The result of a case with exit code 0 is not that of the unchanged file."""


@dataclass(frozen=True)
class Inputs:
    """A directory with unchanged inputs, and what the commands print and save with them."""

    home: Path
    text: str
    checkpoint: object  # Checkpoint
    tokenizer: Tokenizer
    resumed: tuple  # (step, loss, hash of the parameters) of the last step
    started: tuple
    continuation: str


def run(entry, *argv):
    """(exit code, standard output, standard error) of a command in this process; another exception is not caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            entry(stage=0, backend=NumpyBackend, world=Solo, argv=[str(word) for word in argv])
        except SystemExit as exit:
            return exit.code, out.getvalue(), err.getvalue()
    raise Wrong("the command did not exit")


def resume(home):
    flags = ("--resume", home / "run", "--steps", 6, "--checkpoint-every", 0, "--sample", 0, "--threads", 1)
    return run(cli.train, *flags, "--out", home / "out", "--log", home / "log.jsonl")


def start(home):
    flags = ("--init-from", home / "run", "--data", home / "corpus.txt", "--steps", 1, "--out", home / "out")
    return run(cli.train, *flags, *NANO, "--log", home / "out.jsonl")


def infer(home, *prompt):
    prompt = prompt or ("--prompt", "the model reads")
    return run(cli.infer, "--weights", home / "run", "--threads", 1, "--max-new-tokens", 3, *prompt)


def last_row(log):
    row = json.loads(log.read_text().splitlines()[-1])
    return row["step"], row["loss"], row["parameters_sha256"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, corpus):
    home = tmp_path_factory.mktemp("inputs")
    text = corpus.read_text(encoding="utf-8")
    shutil.copy(corpus, home / "corpus.txt")
    (home / "prompt.txt").write_text("the model reads one token\n")
    (home / "tokens").mkdir()
    tokenizer = Tokenizer.byte_level()
    write_token_file(home / "tokens" / "tokens.bin", [tokenizer.encode(text)], tokenizer)
    tokenizer.save(home / "tokens" / "tokenizer.json")
    flags = ("--data", home / "corpus.txt", "--steps", 4, "--out", home / "run", "--log", home / "log.jsonl")
    assert run(cli.train, *NANO, *flags)[0] == 0
    copy = Path(shutil.copytree(home, tmp_path_factory.mktemp("copy") / "home", symlinks=True))
    assert resume(copy)[0] == 0 and last_row(copy / "log.jsonl")[0] == 5
    resumed = last_row(copy / "log.jsonl")
    shutil.rmtree(copy / "out")
    assert start(copy)[0] == 0
    code, continuation, _ = infer(home)
    assert code == 0
    loaded = load_checkpoint(home / "run", with_optimizer=True)
    tokenizer = Tokenizer.load(home / "run")
    return Inputs(home, text, loaded, tokenizer, resumed, last_row(copy / "out.jsonl"), continuation)


# -- one kind of file each: change a copy of the inputs, run a command, compare with the unchanged inputs --------------
# Each returns (what was changed, exit code, error text).


def expect(right, what):
    if not right:
        raise Wrong(what)


def change(rng, file):
    """Change a file -> what was changed."""
    roll = rng.random()
    if roll < 0.02:
        file.unlink()
        what = "removed"
    elif roll < 0.04:
        file.unlink()
        file.mkdir()
        what = "a directory"
    elif roll < 0.06:
        file.unlink()
        file.symlink_to(file.name)
        what = "a link to itself"
    else:
        what, content = mutate(rng, file.name, file.read_bytes())
        file.write_bytes(content)
    return f"{file.parent.name}/{file.name}: {what}"


def case_checkpoint(rng, home, inputs, files=None):
    names = ("config.json", "state.json", "tokenizer.json", "model.safetensors", "optimizer.safetensors")
    what = change(rng, home / "run" / STEP / rng.choice(files or names))
    entry = rng.choice([resume, start, infer])
    before = snapshot(home / "run")
    yield f"{entry.__name__}: {what}"
    code, out, err = entry(home)
    yield code, err
    expect(snapshot(home / "run") == before, "the checkpoint was changed")
    if code == 0:
        loaded = load_checkpoint(home / "run", with_optimizer=entry is resume)
        if os.path.exists(home / "run" / STEP / "state.json"):  # weights without it are those of another program
            expect(loaded.state == inputs.checkpoint.state, "another state")
        expect_equal(loaded, inputs.checkpoint)
        expect(Tokenizer.load(home / "run").to_bytes() == inputs.tokenizer.to_bytes(), "another tokenizer")
        if entry is infer:
            expect(out == inputs.continuation, "another continuation")
        else:
            log, right = ("log", inputs.resumed) if entry is resume else ("out", inputs.started)
            expect(last_row(home / f"{log}.jsonl") == right, "another result")


def expect_equal(loaded, right):
    expect(loaded.config == right.config, "another configuration")
    expect(loaded.parameters.keys() == right.parameters.keys(), "other parameters")
    for name, array in right.parameters.items():
        expect(np.array_equal(loaded.parameters[name], array), f"another {name}")
        for moment in (0, 1) if loaded.moments else ():
            expect(
                np.array_equal(loaded.moments[name][moment], right.moments[name][moment]), f"other moments of {name}"
            )


def case_latest(rng, home, inputs):
    latest = home / "run" / "latest"
    latest.unlink()
    what = rng.choice(["", "\0", STEP, f"{STEP}\n\n", "step-00000001", ".", "..", "/", "é" * 300, "link", "directory"])
    if what == "directory":
        latest.mkdir()
    elif what == "link":
        latest.symlink_to("latest")
    else:
        latest.write_text(what)
    yield f"latest: {what!r}"
    code, out, err = infer(home)
    yield code, err
    expect(code or out == inputs.continuation, "another continuation")


def case_foreign(rng, home, inputs):
    """config.json of a checkpoint without digests: what is loaded must be what the file says."""
    for name in ("state.json", "optimizer.safetensors"):
        (home / "run" / STEP / name).unlink()
    file = home / "run" / STEP / "config.json"
    what = change(rng, file)
    yield f"foreign {what}"
    code, out, err = infer(home)
    yield code, err
    if code == 0:
        values, config = json.loads(file.read_bytes()), inputs.checkpoint.config
        sizes = [values[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer")]
        expect(sizes == [config.vocab_size, config.block_size, config.n_embd, config.n_layer], "other sizes")
        loaded = load_checkpoint(home / "run").config
        expect(loaded.n_head == values["n_head"] and type(values["n_head"]) is int, "another n_head than the file's")


def case_tokens(rng, home, inputs):
    file = home / "tokens" / rng.choice(["tokens.bin", "tokens.bin", "tokenizer.json"])
    what = change(rng, file)
    yield what
    code, out, err = run(cli.train, *NANO, "--data", home / "tokens", "--steps", 1, "--out", home / "out")
    yield code, err
    if code == 0:
        content = (home / "tokens" / "tokens.bin").read_bytes()
        expect(content.startswith(MAGIC), "not a token file")
        ids, tokenizer = load_tokens(home / "tokens")
        expect(np.array_equal(ids, np.frombuffer(content[HEADER.size :], "<u2")) and ids.max() < 256, "other ids")
        expect_round_trip(tokenizer, inputs.text)


def expect_round_trip(tokenizer, text):
    expect(tokenizer.decode(tokenizer.encode(text)) == text, "the tokenizer loses text")


def case_corpus(rng, home, inputs):
    what = change(rng, home / "corpus.txt")
    yield what
    flags = ("--data", home / "corpus.txt", "--steps", 1, "--out", home / "out")
    code, out, err = run(cli.train, *NANO, *flags, "--tokenizer", rng.choice(["word", "byte"]))
    yield code, err
    if code == 0:
        expect_round_trip(Tokenizer.load(home / "out"), (home / "corpus.txt").read_bytes().decode("utf-8"))


def case_prompt(rng, home, inputs):
    what = change(rng, home / "prompt.txt")
    yield what
    code, out, err = infer(home, "--prompt-file", home / "prompt.txt")
    yield code, err
    if code == 0:
        prompt = (home / "prompt.txt").read_bytes().decode("utf-8-sig").removesuffix("\n")  # without a byte order mark
        expect(prompt.strip() in out or err.startswith("note: the prompt has "), "another prompt")


def case_log(rng, home, inputs):
    file, right = home / "log.jsonl", (home / "log.jsonl").read_bytes()
    what = change(rng, file)
    changed = file.read_bytes() if file.is_file() else b""
    yield what
    code, out, err = resume(home)
    yield code, err
    if code == 0:
        expect(last_row(file) == inputs.resumed, "another result")
        lines = file.read_bytes().splitlines(keepends=True)
        expect([json.loads(line)["step"] for line in lines][-2:] == [4, 5], "other steps")
        intact = os.path.commonprefix([right, changed])
        intact = intact[: intact.rfind(b"\n") + 1]
        expect(file.read_bytes().startswith(intact), "lost a row before the change")
    elif file.is_file():
        expect(file.read_bytes() == changed, "the log was changed")


def case_hosts(rng, home, inputs):
    grammar = rng.choice([MPICH, OPEN_MPI])
    file = home / "hosts"
    file.write_bytes(HOSTS[grammar.mpi])
    what = change(rng, file)
    yield f"{grammar.mpi} {what}"
    try:
        check_hosts(file, grammar)
    except UserError as error:
        yield 2, f"error: {error}\n"
        return
    yield 0, ""
    lines = [line.strip() for line in file.read_bytes().decode().split("\n")]
    if grammar is MPICH:
        form, option = r"[\w.@-]+(:0*[1-9]\d*)?", r"\s+(user|binding)=[\w:.,+-]+"
    else:
        form = r"[\w.@:-]+"
        option = r"\s+((max[-_])?(slots|count|cpu)([-_]max)?|port)\s*=\s*0*[1-9]\d*|\s+user[-_]?name\s*=\s*[\w.-]+"
        lines = [line.split("#")[0].strip() for line in lines]
    for line in lines:
        if line and not line.startswith("#"):
            expect(re.fullmatch(rf"({form})({option})*", line, re.A), f"the line {line!r} is accepted")


CASES = {  # how often
    case_checkpoint: 10, case_latest: 1, case_foreign: 2, case_tokens: 3, case_corpus: 1, case_prompt: 1, case_log: 3,
    case_hosts: 3,
}  # fmt: skip


def problem(seed, home, inputs):
    """Run the case of a seed -> what is wrong with it, or None."""
    rng, what = random.Random(seed), "not started"
    case = rng.choices(list(CASES), CASES.values())[0](rng, home, inputs)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        what = next(case)
        before = snapshot(home)
        code, err = next(case)
        allowed = {"out.jsonl", "log.jsonl"}
        after = {name: content for name, content in snapshot(home).items() if name.split("/")[0] not in {"out"}}
        touched = {name for name in before | after if before.get(name) != after.get(name)} - allowed
        expect(not touched, f"files outside --out: {touched}")
        expect(code in (0, 2), f"exit code {code}")
        expect(code == 0 or (err.startswith("error: ") and err.count("\n") == err.endswith("\n") == 1), f"{err!r}")
        next(case, None)
    except Wrong as error:
        return f"{what}: {error}"
    except Hang:
        return f"{what}: hangs"
    except Exception as error:
        return f"{what}: a traceback of {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def hang(number, frame):
    raise Hang


@pytest.mark.parametrize("part", range(PARTS))
def test_a_changed_file_gives_right_results_or_one_line(pytestconfig, monkeypatch, inputs, tmp_path, part):
    count, seed = pytestconfig.getoption("--mutations"), pytestconfig.getoption("--mutation-seed")
    seed = secrets.randbits(32) if seed is None else seed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    previous = signal.signal(signal.SIGALRM, hang)
    problems = {}
    for i in range(part, count, PARTS):
        home = Path(shutil.copytree(inputs.home, tmp_path / "home", symlinks=True))
        if found := problem(seed + i, home, inputs):
            problems[seed + i] = found
        shutil.rmtree(home)
    signal.signal(signal.SIGALRM, previous)
    assert os.listdir() == [], "files in the working directory"
    if problems:
        lines = [f"{seed}: {ascii(found)}" for seed, found in problems.items()]
        advice = "repeat one with --mutations 1 --mutation-seed SEED:"
        pytest.fail("\n".join([f"{len(lines)} of {count // PARTS} cases are wrong; {advice}", *lines]), pytrace=False)

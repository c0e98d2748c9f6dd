"""No run damages a file: logs are continued or refused, older runs are renamed, --out is locked. The screen."""

import fcntl
import importlib.util
import itertools
import json
import os
import platform
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import cli, exclusive_paths
from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.app.checkpoints.out_flag import resume_command
from gpt2core.app.checkpoints.run_lock import RunLock
from gpt2core.app.exclusive_paths import rename_with_number
from gpt2core.app.output.loss_plot import Curve, write_plot
from gpt2core.app.output.output_files import continue_log, is_plot
from gpt2core.app.output.run_log import RunLog, rarely_changing_lines, read_log, step_line
from gpt2core.app.output.run_summary import duration
from gpt2core.app.output.terminal import WordWrap
from gpt2core.app.stage import Stage
from gpt2core.app.training.command import train_command
from gpt2core.engine.fast_trainer import FastStep as Step
from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.checkpoints import edit_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nano(train, corpus):
    """nano(*flags) -> Result of a run of two steps of preset nano, without a sample."""
    return lambda *flags: train("--preset", "nano", "--data", corpus, "--sample", 0, "--steps", 2, *flags)


def assert_refused(result, *words):
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for word in words:
        assert str(word) in result.err


def lines_of_log(steps, rng):
    """The lines of a log of these steps, as bytes; some have more fields."""
    for step in steps:
        row = {"step": int(step), "loss": rng.random(), "lr": 1e-3, "grad_norm": rng.random() * 9}
        row |= {"tokens_per_second": rng.random() * 1e5, "seconds": rng.random()}
        row |= {"val_loss": rng.random()} if rng.random() < 0.2 else {}
        yield json.dumps(row).encode() + b"\n"


# -- the log ----------------------------------------------------------------------------------------------------------


def test_a_log_is_continued_after_the_rows_that_precede_the_step_and_these_are_never_written_again(tmp_path, rng):
    for trial in range(20):
        path, every = tmp_path / str(trial), int(rng.integers(1, 4))
        lines = list(lines_of_log(range(0, int(rng.integers(1, 60)), every), rng))
        if trial % 2:  # the rows of an attempt that began again at step 0
            lines += lines_of_log(range(0, int(rng.integers(1, 60)), every), rng)
        first = int(rng.integers(0, 70))
        kept = b"".join(itertools.takewhile(lambda line, first=first: json.loads(line)["step"] < first, lines))
        cut = int(rng.integers(0, len(lines[-1])))  # a crash may cut the last line anywhere
        path.write_bytes(b"".join(lines) + next(lines_of_log([99], rng))[:cut])
        inode = path.stat().st_ino
        file, rows = continue_log(path, first)
        with file:
            assert path.read_bytes() == kept and path.stat().st_ino == inode
            assert rows == [json.loads(line) for line in kept.splitlines()]
            file.write("next\n")
        assert path.read_bytes() == kept + b"next\n"


def test_a_last_line_without_its_line_break_is_kept(tmp_path, rng):
    path = tmp_path / "log"
    text = b"".join(lines_of_log(range(3), rng))
    path.write_bytes(text[:-1])
    with continue_log(path, 3)[0]:
        assert path.read_bytes() == text
    path.write_bytes(text[:-1])
    with continue_log(path, 2)[0]:
        assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)), b"the corpus", b"[1]\n{}\n", b'{"step": 3, "loss": 1.5}\n', b'{"step": 1, "lo\n', b"\n", b"{]"],
)
def test_a_file_that_is_not_a_log_is_refused_and_unchanged(tmp_path, rng, content):
    path = tmp_path / "file"
    rows = b"".join(lines_of_log(range(2), rng))
    for text, line in ((content, 1), (rows + content, 3)):
        path.write_bytes(text)
        for read in (lambda: continue_log(path, 1), lambda: read_log(path), lambda: RunLog(path, None, 1, 0, 3)):
            with pytest.raises(ConfigError, match=f"line {line} is not a line of a training log: choose another file"):
                read()
        assert path.read_bytes() == text


def test_a_new_run_refuses_the_log_of_another_and_renames_it_with_overwrite(nano, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("")  # an empty file is accepted
    assert nano("--log", log).code == 0
    older = log.read_bytes()
    assert_refused(nano("--log", log), f"--log {log}: holds 2 steps of another run", "--resume", "--overwrite")
    assert log.read_bytes() == older
    for number in (1, 2):
        result = nano("--log", log, "--overwrite", "--seed", number)
        assert result.code == 0
        assert f"note: {log} was the log of an earlier run: it is now {log}.{number} " in result.words
        assert [row["step"] for row in read_log(log)] == [0, 1]
    assert Path(f"{log}.1").read_bytes() == older != Path(f"{log}.2").read_bytes()


@pytest.mark.parametrize("logged", [True, False])
def test_a_resumed_run_refuses_the_log_of_another_run_and_leaves_it_unchanged(nano, tmp_path, rng, logged):
    out, own, other = tmp_path / "run", tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    assert nano("--out", out, *(("--log", own) if logged else ())).code == 0
    resume = ("--resume", out, "--out", out, "--steps", 3, "--log")
    why = (
        "is the log of another run: step 1 of the resumed run had loss "
        if logged
        else "lacks steps of the resumed run, because its checkpoint was saved without --log; "
    )
    for steps in (range(300), range(1), range(2, 300)):
        other.write_bytes(b"".join(lines_of_log(steps, rng)))
        before = other.read_bytes()
        for more in ((), ("--overwrite",)):
            texts = f"--log {other}: {why}", "another file"
            assert_refused(nano(*resume, other, *more), *texts)
        assert other.read_bytes() == before
    other.write_bytes(b"")  # an empty file is accepted
    log, steps = (own, [0, 1, 2]) if logged else (other, [2])
    assert nano(*resume, log).code == 0 and [row["step"] for row in read_log(log)] == steps


def test_a_resume_without_a_log_keeps_the_log_of_the_run_only_if_it_trains_no_step(nano, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    assert nano("--out", out, "--log", log).code == 0
    resume = ("--resume", out, "--out", out, "--steps")
    assert nano(*resume, 1).code == 0  # nothing is left to train, but the checkpoint is saved again
    assert nano(*resume, 3, "--log", log).code == 0 and [row["step"] for row in read_log(log)] == [0, 1, 2]
    assert nano(*resume, 4).code == 0  # step 3 is in no log
    assert_refused(nano(*resume, 5, "--log", log), "lacks steps of the resumed run", "choose another file")


def test_a_checkpoint_without_a_recorded_row_accepts_any_log(nano, tmp_path, rng):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    assert nano("--out", out).code == 0
    edit_json(out / "latest" / "state.json", last_log_row=None)
    log.write_bytes(b"".join(lines_of_log(range(5), rng)))
    assert nano("--resume", out, "--steps", 3, "--log", log).code == 0
    assert [row["step"] for row in read_log(log)] == [0, 1, 2]
    for damaged in (3, [], {"step": 1}, "x"):
        edit_json(out / "latest" / "state.json", last_log_row=damaged)
        assert_refused(nano("--resume", out, "--steps", 3), "state.json: last_log_row is ", "cannot be resumed")


def test_a_log_that_another_run_writes_is_refused_and_unchanged(nano, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    assert nano("--out", out, "--log", log).code == 0
    before, message = log.read_bytes(), f"--log {log}: another run is writing to it: wait until it ends"
    with continue_log(log, 2)[0]:
        for flags in ((), ("--overwrite",), ("--resume", out, "--steps", 3)):
            assert_refused(nano("--log", log, *flags), message)
            assert log.read_bytes() == before and not Path(f"{log}.1").exists()
    assert nano("--log", log, "--resume", out, "--steps", 3).code == 0


@pytest.mark.parametrize("flag", ["--log", "--plot", "--trace"])
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_the_corpus_as_log_plot_or_trace_is_refused_and_unchanged(train, corpus, tmp_path, flag, more):
    data = Path(shutil.copy(corpus, tmp_path / "c.txt"))
    result = train("--preset", "nano", "--data", data, flag, data, "--steps", 1, *more)
    assert_refused(result, data, "choose another file")
    assert data.read_bytes() == corpus.read_bytes()


def test_a_plot_replaces_a_plot_of_this_program_only(nano, tmp_path):
    plot, png = tmp_path / "curve.png", tmp_path / "other.png"
    write_plot([Curve("a run", [0, 1], [5.0, 4.5], {})], "an older plot", plot)
    older = plot.read_bytes()
    assert nano("--plot", plot).code == 0 and is_plot(plot) and plot.read_bytes() != older
    png.write_bytes(plot.read_bytes().replace(b"staged-gpt2", b"Another one"))
    assert_refused(nano("--plot", png), f"{png}: is not a plot of this program")
    new = tmp_path / "new"
    assert_refused(nano("--plot", new, "--log", new), f"--log {new} and --plot {new} are one file")


def test_the_folders_of_log_plot_and_trace_are_created_also_in_a_directory_that_is_renamed(nano, tmp_path):
    out = tmp_path / "run"
    files = [out / "logs" / "log.jsonl", tmp_path / "a" / "b" / "curve.png", out / "traces" / "trace.json"]
    flags = [word for pair in zip(("--log", "--plot", "--trace"), files, strict=True) for word in pair]
    for more in ((), ("--overwrite",)):
        result = nano("--out", out, *flags, *more)
        assert (result.code, result.err) == (0, "") and all(file.stat().st_size for file in files)
    assert (tmp_path / "run.1" / "traces" / "trace.json").stat().st_size


def test_after_an_error_no_folder_is_left(nano, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    flags = ("--log", tmp_path / "a" / "b" / "log.jsonl", "--plot", tmp_path / "a" / "c" / "curve.png")
    assert_refused(nano(*flags, "--trace", tmp_path / "file" / "trace.json"), "cannot be written (Not a directory)")
    assert [path.name for path in tmp_path.iterdir() if path.name in ("a", "file")] == ["file"]


# -- the directory ----------------------------------------------------------------------------------------------------


def test_a_new_run_refuses_a_directory_with_checkpoints_and_names_them(nano, tmp_path):
    out = tmp_path / "run"
    assert nano("--out", out).code == 0
    before = sorted(path.name for path in out.iterdir())
    words = (f"--out {out}: holds step-00000002 (20", ") of another run", f"--resume {out}", "--overwrite")
    assert_refused(nano("--out", out), *words)
    other = tmp_path / "other"
    assert nano("--out", other).code == 0
    assert_refused(nano("--out", out, "--resume", other), *words)  # it continues another run
    assert sorted(path.name for path in out.iterdir()) == before
    for resumed in (out, out / "latest", out / "step-00000002"):
        assert nano("--out", out, "--resume", resumed, "--overwrite").code == 0
    assert not Path(f"{out}.1").exists()


def test_overwrite_renames_the_directory_of_the_older_run(nano, tmp_path):
    out = tmp_path / "run"
    flags = ("--out", out, "--log", out / "log.jsonl", "--overwrite")
    assert nano("--out", out).code == 0
    for number in (1, 2):
        result = nano(*flags, "--seed", number)
        assert result.code == 0 and result.words.count("note: ") == 1
        assert re.search(rf"note: {out} held step-00000002 .* run: it is now {out}.{number} ", result.words)
        assert [load_checkpoint(path).state["seed"] for path in (out, f"{out}.{number}")] == [number, number - 1]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    assert not list(tmp_path.glob("*/.*")) and len(read_log(f"{out}.2/log.jsonl")) == 2


def test_a_mistake_leaves_no_new_directory(nano, tmp_path):
    assert_refused(nano("--out", tmp_path / "run", "--lr", "nan"), "--lr nan")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_renamed_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="missing: cannot be renamed to .*missing.1 .No such file"):
        rename_with_number(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.: cannot be renamed to "):
        rename_with_number(Path("."))


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_a_second_run_into_a_directory_is_refused_with_process_and_host_and_readers_are_not(nano, infer, tmp_path):
    out = tmp_path / "run"
    assert nano("--out", out).code == 0
    with RunLock(out) as lock:
        holder = f"{out}: process {os.getpid()} on host {platform.node()} is writing checkpoints there"
        for flags in ((), ("--resume", out), ("--overwrite",)):
            assert_refused(nano("--out", out, *flags), holder)
        assert infer("--weights", out, "--prompt", "the model", "--max-new-tokens", 2).code == 0
        assert lock.notes == [] and load_checkpoint(out, with_optimizer=True)
    assert nano("--out", out, "--resume", out).code == 0 and not (out / ".lock").exists()


def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path):
    program = f"from gpt2core.app.checkpoints.run_lock import RunLock; lock = RunLock({str(tmp_path)!r}); print(1)"
    command = [sys.executable, "-c", f"{program}; import sys, time; sys.stdout.flush(); time.sleep(60)"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"1"
        with pytest.raises(CheckpointError, match=f"process {process.pid} on host "):
            RunLock(tmp_path)
        process.send_signal(signal.SIGKILL)
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on host {platform.node()}"


def test_a_lock_file_that_its_run_has_just_removed_does_not_count(tmp_path, monkeypatch):
    first, original = RunLock(tmp_path), RunLock.lock_or_raise

    def lock(self, file):  # the first run ends between the opening of its lock file and the attempt to lock it
        first.__exit__(None, None, None)
        monkeypatch.setattr(RunLock, "lock_or_raise", original)
        original(self, file)

    monkeypatch.setattr(RunLock, "lock_or_raise", lock)
    with RunLock(tmp_path), pytest.raises(CheckpointError, match="is writing checkpoints there"):
        RunLock(tmp_path)


def test_a_file_system_without_locks_is_noted(nano, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(exclusive_paths.fcntl, "flock", flock)
    result = nano("--out", tmp_path / "run")
    assert (result.code, result.err) == (0, "") and "this file system has no locks (No locks available)" in result.words


# -- the screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        Step(0, 10.987654, 6e-4, 23.4567, 9e3, 1.6871),
        Step(123456, 3.141592, 2.5e-5, 0.1234, 2e6, 0.1062, mfu=0.453, bytes_sent=248_000_000),
        Step(9999, 5.5, 1e-3, 1.5, 2e6, 9.99, loss_scale=65536.0, skipped=2, mfu=0.05, bytes_sent=123),
    ],
)
def test_a_line_has_at_most_79_characters(step, capsys):
    assert len(step_line(step)) <= 79
    RunLog(None, None, 1, 0, 3)(step, 9.9, None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 79


def test_what_seldom_changes_is_printed_when_it_changes(capsys):
    log = RunLog(None, None, 1, 0, 9)
    scales = [(65536.0, 0), (65536.0, 0), (32768.0, 1), (32768.0, 0), (32768.0, 0)]
    for number, (scale, skipped) in enumerate(scales):
        log(Step(number, 5.0, 1e-3, 1.0, 1e4, 0.1, scale, skipped, bytes_sent=1_500_000), None, None)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    repeated = "loss scale 32768; repetitions of this step because of overflow: 1"
    sizes = ["loss scale 65536", repeated, "loss scale 32768"]
    assert lines == ["rank 0 sends 1.50 MB per step", *sizes]
    assert rarely_changing_lines(Step(0, 5.0, 1e-3, 1.0, 1e4, 0.1)) == []


def test_the_header_says_that_nothing_is_saved_and_the_last_line_how_long_it_took(nano, tmp_path):
    result = nano()
    header, _, rest = result.out.partition("step     0 ")
    assert "nothing will be saved\n" in header
    assert re.fullmatch(r"trained 2 steps in [\d.]+ s \(nothing was saved\)", rest.splitlines()[-1])
    result = nano("--out", tmp_path / "run")
    assert "nothing will be saved" not in result.out
    assert re.fullmatch(rf"trained 2 steps in [\d.]+ s, saved in {tmp_path}/run", result.out.splitlines()[-1])


def test_a_duration_has_two_digits_or_more():
    times = {0.04: "0.0 s", 9.94: "9.9 s", 92.3: "92 s", 119.9: "120 s", 130: "2 min", 7180: "2 h 0 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_words_are_wrapped_in_pieces_as_in_one_text(rng):
    for width in (1, 7, 20, 200):
        words = ["x" * int(n) for n in rng.integers(1, 12, 80)]
        text = "".join(word + str(rng.choice([" ", " ", " ", "\n", "  "])) for word in words)
        whole = WordWrap(width).push(text, is_last=True)
        assert whole.split() == words
        for line in whole.split("\n"):
            assert len(line.rstrip()) <= width or " " not in line.strip()
        wrap, cuts = WordWrap(width), sorted(rng.integers(0, len(text), 30))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert "".join(wrap.push(piece) for piece in pieces) + wrap.push("", is_last=True) == whole
    assert WordWrap(None).push(text) + WordWrap(None).push("", is_last=True) == text


def test_on_a_terminal_no_line_is_longer_than_it_and_a_pipe_gets_the_text_unchanged(nano, infer, tmp_path, monkeypatch):
    out = tmp_path / "run"
    sample = nano("--out", out, "--sample", 60).out.split("Prompt")[1]
    assert 60 < max(map(len, sample.splitlines())) <= 79  # in a pipe too: ranks of mpirun have no terminal
    flags = ("--weights", out, "--prompt", "the model reads one token, then another;", "--max-new-tokens", 60)
    plain = infer(*flags).out
    assert max(map(len, plain.splitlines())) > 200
    monkeypatch.setattr("gpt2core.app.output.terminal.terminal_width", lambda: 39)
    monkeypatch.setattr("gpt2core.app.inference.continuations.terminal_width", lambda: 39)
    for wrapped in (infer(*flags).out, infer(*flags, "--stream").out):
        assert max(map(len, wrapped.splitlines())) <= 39
        assert wrapped.split() == plain.split()


@pytest.mark.parametrize("columns, width", [(80, 79), (0, None)], ids=["a terminal", "an Open MPI rank"])
def test_the_width_of_a_terminal_is_used_if_it_is_known(columns, width):
    controller, terminal = pty.openpty()
    with os.fdopen(controller, "rb", buffering=0), os.fdopen(terminal, "w") as out:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        text = "import sys; from gpt2core.app.output.terminal import terminal_width; "
        text += "print(terminal_width(), file=sys.stderr)"
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        options = dict(stdout=out, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        assert subprocess.run([sys.executable, "-c", text], **options).stderr == f"{width}\n"


def test_the_header_of_a_run_with_many_ranks_fits_80_columns(corpus, tmp_path, capsys):
    words = ["--preset", "nano", "--data", str(corpus), "--steps", "1", "--threads", "1", "--sample", "0"]
    args = cli.train_parser().parse_args([*words, "--no-save"])
    assert run_ranks(2, lambda world: train_command(Stage(1, NumpyBackend, run_ranks), world, args, 1)) == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("2 ranks: 2 data x 1 tensor parallel") for line in lines)
    assert max(map(len, lines)) <= 79


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_finite_is_not_blamed_on_the_learning_rate(nano, corpus, tmp_path):
    out = tmp_path / "run"
    assert nano("--out", out).code == 0
    loaded = load_checkpoint(out, with_optimizer=True)
    for array in loaded.parameters.values():
        array *= np.float32(1e30)
    save_checkpoint(
        tmp_path / "huge", 2, config=loaded.config, parameters=loaded.parameters, moments=loaded.moments,
        tokenizer=Tokenizer.load(loaded.path), state=loaded.state,
    )  # fmt: skip
    result = nano("--resume", tmp_path / "huge", "--steps", 4)
    assert (result.code, result.err.count("\n")) == (2, 1) and "not finite before the first update" in result.err
    assert "lr" not in result.err and "use an earlier one" in result.err


def test_the_command_that_resumes_has_the_flags_that_no_checkpoint_holds(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", [f"{tmp_path}/.venv/bin/python", "train_gpt2.py"])
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    words = "--preset tiny --lr 1e-3 --out run --log a'b.jsonl --sample 0 --no-graph --tp 2 --init-from x --overwrite"
    args = cli.train_parser().parse_args([*words.split(), "--autotune", "--local-shuffle"])
    flags = """--resume run --out run --log 'a'"'"'b.jsonl' --sample 0 --no-graph --autotune --tp 2 --local-shuffle"""
    assert resume_command(args) == f".venv/bin/python train_gpt2.py {flags}"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("gpt2core.errors"))
    assert resume_command(args, 4) == f"mpirun -n 4 .venv/bin/python -m gpt2core.errors {flags}"
    parsed = cli.train_parser().parse_args(shlex.split(flags))
    assert {name for name, value in vars(parsed).items() if value != vars(args)[name]} == {
        "resume", "preset", "lr", "init_from", "overwrite",
    }  # fmt: skip

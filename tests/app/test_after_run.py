"""Work after the last step, and notes beside the text, never turn a finished run into a failure."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.inference import continuations
from gpt2core.app.output import run_log
from gpt2core.app.output.run_log import RunLog
from gpt2core.app.training import command as train_command
from gpt2core.engine.fast_trainer import FastStep as Step
from gpt2core.runtime import Runtime

NAME = os.fsdecode(b"t\xebxt $x_1$")  # not UTF-8; with the characters of a formula


def fails(error):
    def function(*arguments, **options):
        raise error

    return function


ERRORS = {
    "no space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "text": UnicodeEncodeError("utf-8", "\udceb", 0, 1, "surrogates not allowed"),
    "broken": ImportError("libpng.so:\ncannot open"),
    "memory": MemoryError(),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize(
    "module, name, said",
    [
        (run_log, "write_plot", "--plot {plot}: cannot be written"),
        (train_command, "write_text", "the sample text is missing"),
        (train_command, "report_end", "the last lines of the run are missing"),
    ],
)
def test_an_error_after_the_last_step_is_a_note(train, corpus, tmp_path, monkeypatch, module, name, said, error):
    monkeypatch.setattr(module, name, fails(error))
    out, plot = tmp_path / "run", tmp_path / "loss.png"
    result = train("--preset", "nano", "--data", corpus, "--steps", 2, "--out", out, "--plot", plot)
    assert result.code == 0 and load_checkpoint(out).state["step"] == 2
    assert re.fullmatch(re.escape(f"note: {said.format(plot=plot)}: ") + r"\S.*\n", result.err)


def test_a_folder_of_the_plot_that_is_removed_during_the_run_is_a_note(train, corpus, tmp_path, monkeypatch):
    plot, write_plot = tmp_path / "plots" / "loss.png", run_log.write_plot
    plot.parent.mkdir()
    monkeypatch.setattr(run_log, "write_plot", lambda *words: [shutil.rmtree(plot.parent), write_plot(*words)])
    result = train("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--plot", plot)
    note = f"note: --plot {plot}: cannot be written: No such file or directory\n"
    assert (result.code, result.err) == (0, note)


def test_a_reader_that_exits_after_the_last_step_is_no_failure(train, corpus, monkeypatch):
    monkeypatch.setattr(train_command, "report_end", fails(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    result = train("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0)
    assert (result.code, result.err) == (0, "")


def test_every_file_may_have_a_name_that_is_not_utf_8(train, infer, corpus, tmp_path):
    data, out, log = (tmp_path / f"{NAME}{suffix}" for suffix in (".txt", "", ".jsonl"))
    shutil.copy(corpus, data)
    files = ("--out", out, "--log", log, "--plot", tmp_path / f"{NAME}.png")
    flags = ("--preset", "nano", "--data", data, "--val-data", data, "--trace", tmp_path / f"{NAME}.json")
    for steps, words in ((2, flags), (4, ("--resume", out))):
        result = train(*words, *files, "--steps", steps)
        assert (result.code, result.err) == (0, "") and "t?xt $x_1$.txt" in result.words
    assert len(log.read_bytes().split(b"\n")) == 5 and (tmp_path / f"{NAME}.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((tmp_path / f"{NAME}.json").read_text())["traceEvents"]
    assert load_checkpoint(out).state["arguments"]["data"] == str(data.resolve())
    result = infer("--weights", out, "--max-new-tokens", 1)  # the prompt is the beginning of the corpus
    assert (result.code, result.err) == (0, "")


# -- the log ---------------------------------------------------------------------------------------------------------


def step(number):
    return Step(number, 1.5, 1e-3, 2.0, 10.0, 0.1)


@pytest.mark.parametrize("lose", ["remove", "replace", "cut", "remove the folder"])
def test_a_log_that_is_removed_or_changed_during_the_run_is_noted_once(tmp_path, capsys, lose):
    path = tmp_path / "logs" / "log.jsonl"
    path.parent.mkdir()
    log = RunLog(path, None, 1, 0, 4)
    log(step(0), None, None)
    assert capsys.readouterr().err == ""
    match lose:
        case "remove":
            path.unlink()
        case "replace":
            path.write_text("")
            os.replace(shutil.copy(path, tmp_path / "other"), path)
        case "cut":
            os.truncate(path, 0)
        case "remove the folder":
            shutil.rmtree(path.parent)
    for number in (1, 2, 3):
        log(step(number), None, {})
    log.close()
    assert capsys.readouterr().err == f"note: --log {path}: was removed or changed during the run: rows are lost\n"


def test_a_log_can_be_a_pipe_that_a_program_reads(train, corpus, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        writer = os.open(pipe, os.O_WRONLY)  # waits for the reader, which then reads to the end of both writers
        result = train("--preset", "nano", "--data", corpus, "--steps", 3, "--sample", 0, "--log", pipe)
        os.close(writer)
        rows = [json.loads(line) for line in reader.stdout]
    assert (result.code, result.err) == (0, "") and [row["step"] for row in rows] == [0, 1, 2]


# -- notes beside the text -------------------------------------------------------------------------------------------

WARNINGS = """
import sys, warnings
from gpt2core.app.command import run_command, warnings_after
from gpt2core.communicator import Solo

def body(world):
    print("first", flush=True)
    with warnings_after():
        for number in range(2):
            warnings.warn("a note", stacklevel=number + 1)
        print("text", flush=True)
    warnings.warn("a note")
    print("last", flush=True)
    return 0

run_command(Solo, body)
"""


def test_a_warning_is_one_line_once_and_not_inside_the_text():
    done = subprocess.run([sys.executable, "-c", WARNINGS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode, done.stdout) == (0, "first\ntext\nnote: a note\nlast\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_on_a_terminal_each_token_is_printed_when_it_is_generated(monkeypatch, terminal):
    monkeypatch.setattr(continuations, "text_pieces", lambda *_: iter(["one", " two", " three", ""]))
    monkeypatch.setattr(continuations.sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    printed = []
    continuations.write_continuation(None, None, [1], 3, emit=lambda text, **options: printed.append(text), width=70)
    assert "".join(printed) == "one two three" and (len(printed) > 2) == terminal


def test_an_error_of_the_log_on_one_rank_comes_after_what_all_ranks_do_together(monkeypatch):
    """Otherwise the other ranks would wait for this rank in the collectives of the trace and of the last row."""
    together = []

    def log(*_):
        raise OSError("no space")

    monkeypatch.setattr(train_command, "final_fields", lambda trainer: together.append("hash") or {})
    trace = SimpleNamespace(step_ended=lambda step, last: together.append("trace") or ["a line"])
    config = SimpleNamespace(schedule_picture=False, out=None)
    trainer = SimpleNamespace(steps=0, backend=SimpleNamespace(runtime=Runtime()))
    training = SimpleNamespace(config=config, corpus=None, trainer=trainer, trace=trace)
    outputs = train_command.Outputs(training, log, settings_text="", notes=[])
    with pytest.raises(OSError, match="no space"):
        outputs.report(SimpleNamespace(step=0), None, last=True)
    assert sorted(together) == ["hash", "trace"]

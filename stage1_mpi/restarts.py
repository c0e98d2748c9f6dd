"""Start a failed job again from its last checkpoint, without the hosts that cannot be reached any more."""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.launcher_env import read_facts
from stage1_mpi import host_file

# Exit codes after which a job is not started again: success, a user's mistake, and a signal to the launcher.
FINAL = 0, 2, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM

ANSWER = 30  # seconds in which mpiexec must start a process on a host, and end


@dataclass(frozen=True)
class Job:
    """How the launcher starts the ranks of a program."""

    line: Callable  # line(count, hostfile) is the command line of mpiexec, without what it starts
    rank: list  # the command line of a rank, without the program
    run: Callable  # run(words) runs a command line and returns its exit code
    host_format: host_file.HostFileFormat


def run_again(job, command, count, hostfile, restarts, file, signals):
    """Run a program on `count` ranks, up to `restarts` times again after it failed; returns the last exit code.

    job: a Job. command: the program. hostfile: a Path or None. file: a Path that does not exist; the program writes
    there how it can be continued: see tell_launcher() in launcher_env.py. signals: the numbers of signals that
    job.run() forwards; between two runs they end this process.
    """
    code = job.run([*job.line(count, hostfile), *job.rank, "--", *command])
    for number in range(1, restarts + 1):
        if code in FINAL:
            break
        facts, size, hosts, notes = read_facts(file), count, hostfile, []
        if hostfile:
            for each in signals:
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
            start_one = functools.partial(job.line, 1)
            try:
                size, hosts, notes = without_unreachable(
                    count, hostfile, facts.get("ranks"), job.host_format, start_one, file.parent
                )
            except ConfigError as error:
                print(error, file=sys.stderr)
                break
        if "command" in facts:
            command = shlex.split(facts["command"])[1:]  # without the path of Python
        where = "from the last checkpoint" if "command" in facts else "from its beginning, because nothing is saved"
        note = f"note: the job ended with exit code {code}: it is started again {where} ({number} of {restarts})"
        print("\n".join([note, *notes]), file=sys.stderr, flush=True)
        code = job.run([*job.line(size, hosts), *job.rank, "--started-again", "--", *command])
    return code


# -- hosts that cannot be reached --------------------------------------------------------------------------------------


def without_unreachable(count, hostfile, possible, grammar, start_one, folder):
    """(number of ranks, host file, lines to print) for a job that had `count` ranks on the hosts of `hostfile`.

    possible: the numbers of ranks that the program can have, or None: any. grammar: the HostFileFormat. start_one(path)
    is the command line of mpiexec that starts one process on the host of the file `path`. folder: a Path for new files.
    If all hosts can be reached, the first two results are the arguments. Raises ConfigError if the hosts that are left
    are not enough.
    """
    hosts = host_file.check_hosts(hostfile, grammar)
    lines = host_file.read_lines(hostfile)
    texts = {host: lines[number - 1] for host, number in hosts.items()}
    reasons = unreachable(texts, start_one, folder)
    if not reasons:
        return count, hostfile, []
    notes = [
        f"note: {hostfile}, line {hosts[host]}: {host} cannot be reached ({reason}): it is left out"
        for host, reason in reasons.items()
    ]
    left = {host: text for host, text in texts.items() if host not in reasons}
    slots, all_slots = (sum(slots_of(text) for text in each.values()) for each in (left, texts))
    limit = min(count, slots) if count <= all_slots else count * slots // all_slots  # more ranks than slots before
    fitting = [number for number in possible or range(1, limit + 1) if number <= limit]
    if not fitting:
        needed = f", and the program needs {min(possible)} or more" if left and possible else ""
        raise ConfigError(
            "\n".join([*notes, f"error: {hostfile}: the hosts that are left have {counted(slots, 'slot')}{needed}"])
        )
    path = folder / "hosts"
    path.write_text("\n".join(left.values()) + "\n")
    fewer = f"{counted(max(fitting), 'rank')} instead of {count}, on {counted(slots, 'slot')}"
    return max(fitting), path, [*notes, f"note: the job has {fewer}"]


def slots_of(line):
    """The number of ranks in a line of a host file that host_file.check_hosts() accepts; 1 if there is none."""
    word, *options = host_file.SPACED_EQUALS.sub("=", line.partition("#")[0]).split()
    for option in options:
        name, _, value = option.partition("=")
        if host_file.OPTIONS.get(name) == "slots":
            return int(value)
    count = "" if host_file.is_ipv6(word) else word.partition(":")[2]
    return int(count or 1)


def unreachable(texts, start_one, folder):
    """{host: reason} of the hosts on which mpiexec cannot start a process; texts: {host: its line of the host file}."""

    def reason(number, text):
        path = folder / f"host{number}"
        path.write_text(f"{text}\n")
        return problem_of([*start_one(path), sys.executable, "-c", ""])

    with ThreadPoolExecutor(32) as pool:
        reasons = pool.map(reason, range(len(texts)), texts.values())
        return {host: each for host, each in zip(texts, reasons, strict=True) if each}


def problem_of(command):
    """The reason why a command line fails, or None. It gets ANSWER seconds."""
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True)
    try:
        text = process.communicate(timeout=ANSWER)[1]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no answer in {ANSWER} s"
    if process.returncode:
        return next((line.strip() for line in text.splitlines() if line.strip()), f"exit code {process.returncode}")
    return None

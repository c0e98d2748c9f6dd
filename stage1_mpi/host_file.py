"""Check a host file by the grammar of the mpiexec that will read it, and report the first wrong line.

The launchers report a wrong line in many lines of their own, and MPICH's mpiexec crashes or hangs on some, for example
"localhost:0", "localhost:-1" and "localhost user". So this check accepts no line that the launcher in use refuses. No
library reads these files: ClusterShell and python-hostlist read lists such as node[1-4].
"""

import contextlib
import ipaddress
import re
import socket
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpt2core.errors import ConfigError

LARGEST_FILE = 1 << 20  # bytes of a host file
LONGEST_LINE = 1000  # characters; MPICH's mpiexec reads parts of 65,535 bytes of a longer line as lines of their own
HOST = r"(\w[\w.-]*@)?[a-z0-9_][\w.-]*"  # host or user@host
RANKS = "0*[1-9][0-9]{0,5}"  # a larger number makes MPICH's mpiexec hang
NAME = r"\w[\w.-]*"
SPACED_EQUALS = re.compile(r"\s*=\s*")
CPUS = r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*(x[1-9]\d{0,3})?"
BINDING = rf"none|rr|user:{CPUS}(,{CPUS})*|(machine|package|socket|numa|core|hwthread|l[1-5]cache)(:[1-9]\d{{0,3}})?"
OPTIONS = {  # name of an option in `name=value` after a host: its meaning
    **dict.fromkeys(("slots", "count", "cpu"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max"), "max_slots"),
    **dict.fromkeys(("username", "user_name", "user-name"), "username"),
    **dict.fromkeys(("port", "user", "binding"), None),
}


@dataclass(frozen=True)
class HostFileFormat:
    """The grammar of the host files of one launcher."""

    mpi: str  # the name of the MPI implementation
    host: str  # a line of a host file; {host} and {n} stand for the host and its number of ranks
    options: dict  # meaning of an option, see OPTIONS: the regular expression of its values
    relaxed: bool  # spaces beside "=", a comment after a host, and IPv6 addresses are allowed
    crlf: bool  # lines may end with CR LF

    def line(self, host, n=4):
        """A line of a host file: `n` ranks on `host`."""
        return self.host.format(host=host, n=n)


MPICH = HostFileFormat("MPICH", "{host}:{n}", {"user": NAME, "binding": BINDING}, relaxed=False, crlf=True)
OPEN_MPI = HostFileFormat(
    mpi="Open MPI",
    host="{host} slots={n}",
    options={"slots": RANKS, "max_slots": RANKS, "username": NAME, "port": RANKS},
    relaxed=True,
    crlf=False,
)


def check_hosts(path, grammar):
    """{host: line number} of a host file; `grammar`: a HostFileFormat.

    Raises ConfigError if the file cannot be read or has no hosts. Raises ConfigError with the line for a host that is
    listed twice, and for a line that the launcher cannot read.
    """
    hosts = {}
    for i, line in enumerate(read_lines(path), 1):
        if len(line) > LONGEST_LINE:
            raise ConfigError(f"{path}, line {i} has {len(line):,} characters, more than {LONGEST_LINE:,}: shorten it")
        where = f"{path}, line {i}: {line.strip()!r}"
        if line.endswith("\r") and not grammar.crlf:
            problem = f"ends with CR LF, which the mpiexec of {grammar.mpi} refuses"
            raise ConfigError(f"{path}, line {i}: {problem}: save the file with LF line ends")
        line, comment, _ = line.partition("#")
        if strange := re.search(r"[^\t\v\f\r -~]" if grammar.crlf else r"[^\t\v\f -~]", line):
            raise ConfigError(f"{where} has the character {strange[0]!r}; remove it")
        if comment and line.strip() and not grammar.relaxed:
            problem = f"has a comment after the host, which the mpiexec of {grammar.mpi} cannot read"
            raise ConfigError(f"{where} {problem}: write the comment in a line of its own")
        if line.strip():
            host = check_host(where, line.strip(), grammar)
            if host in hosts:
                advice = f"write each host once, with the number of its ranks: {grammar.line(host)}"
                raise ConfigError(f"{path}, line {i}: {host} is in line {hosts[host]} too; {advice}")
            hosts[host] = i
    if not hosts:
        raise ConfigError(f"--hostfile {path}: contains no host; write one host per line, for example localhost")
    return hosts


def read_lines(path):
    """The lines of a host file; raises ConfigError if it cannot be read, or is not a text of a reasonable size."""
    where = "" if Path(path).is_absolute() else f", in the directory {Path.cwd()}"
    advice = "give the path of a host file"
    try:
        found = Path(path).stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # reading a pipe or /dev/zero may not end
            problem = "is not a regular file, and a host file is read more than once"
            raise ConfigError(f"--hostfile {path}: {problem}: save it to a file first")
        if stat.S_ISREG(found.st_mode) and found.st_size > LARGEST_FILE:
            raise ConfigError(f"--hostfile {path}: has {found.st_size:,} bytes, too many for a host file: {advice}")
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--hostfile {path}: is not UTF-8 at byte {error.start}: {advice}") from None
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: cannot be read ({error.strerror}{where}): {advice}") from None
    if text.startswith("\ufeff"):
        problem = "begins with a byte order mark (U+FEFF), which the launcher reads as part of the first host"
        raise ConfigError(f"--hostfile {path}: {problem}: save the file as UTF-8 without it")
    return text.split("\n")


def check_host(where, line, grammar):
    """The host in one line of a host file. Raises ConfigError for an invalid line; the message starts with `where`."""
    if grammar.relaxed:
        line = SPACED_EQUALS.sub("=", line)
    word, *options = line.split()
    host, colon, count = (word, "", "") if is_ipv6(word) else word.partition(":")
    brackets = re.match(r"\[(.*)\]", word)  # as in the address of a web page: [::1]:4
    if (is_ipv6(host) or (brackets and is_ipv6(brackets[1]))) and not grammar.relaxed:
        problem = f"is an IPv6 address, in which the mpiexec of {grammar.mpi} reads a number of ranks after a colon"
        raise ConfigError(f"{where} {problem}; write the name of the host")
    if not is_ipv6(host) and (not re.fullmatch(HOST, host, re.A | re.I) or host.isdigit()):
        raise ConfigError(f"{where} has no host; write {grammar.line('localhost')}")
    advice = f"write {grammar.line(host)}"
    numbers = [("the colon", count)] if colon else []  # (what stands before the number of ranks, the number as text)
    found = {}  # meaning of an option: its value
    for option in options:
        name, _, value = option.partition("=")
        meaning = OPTIONS.get(name) or name
        if meaning in ("slots", "max_slots"):
            numbers.append((f"{name}=", value))
        elif meaning not in grammar.options:
            raise ConfigError(f"{where} has {option!r} after the host; {advice}")
        elif not re.fullmatch(grammar.options[meaning], value, re.A):
            problem = f"has an unknown value after {name}=" if value else f"has no value directly after {name}="
            raise ConfigError(f"{where} {problem}; {advice}, or correct the value")
        if meaning in found:
            raise ConfigError(f"{where} gives {name} twice; {advice}")
        found[meaning] = value
    for before, number in numbers:
        if not re.fullmatch(RANKS, number, re.A):
            raise ConfigError(f"{where} has no number of ranks from 1 to 999999 after {before}; {advice}")
    if colon if "slots" in grammar.options else found.keys() & {"slots", "max_slots"}:
        example = grammar.line(host, count or found.get("slots") or found["max_slots"])
        raise ConfigError(f"{where} is not in the format of {grammar.mpi}; write {example!r}")
    if int(found.get("max_slots", 1 << 30)) < int(found.get("slots", 1)):
        raise ConfigError(f"{where} has a max_slots below slots {found['slots']}; raise max_slots")
    return host


def is_ipv6(text):
    """Whether `text` is an IPv6 address."""
    with contextlib.suppress(ValueError):
        return ":" in text and bool(ipaddress.ip_address(text))
    return False


def check_names(path, hosts):
    """Raise ConfigError with the line if the name of a host has no address; `hosts` is the result of check_hosts()."""
    for host, i in hosts.items():
        name = host.rpartition("@")[2]  # user@host
        reason = unresolved(name)
        if reason and unresolved(name_for_ssh(name)):
            advice = "correct the name, or write the address of the host"
            raise ConfigError(f"{path}, line {i}: {host} cannot be resolved ({reason}); {advice}")


def unresolved(name):
    """The reason why a host name has no address, or None if it has an address."""
    try:
        socket.getaddrinfo(name, None)
    except ValueError:
        return "not a host name"
    except OSError as error:
        return error.strerror or str(error)
    return None


def name_for_ssh(name):
    """The HostName that the configuration of ssh gives for `name`, else `name`. Launchers connect to hosts by ssh."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        shown = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=10).stdout
        return (re.findall(r"^hostname (.+)$", shown, re.M) or [name])[0]
    return name

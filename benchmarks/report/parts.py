"""The measured parts of the report: each is one JSON file, so that an interrupted report continues where it ended."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.report import commit, cpu, hardware, to_json
from benchmarks.harness.speedups import OtherPrograms
from gpt2core.errors import ConfigError, UserError
from stage1_mpi.launch import choose, launch_line
from testing.jobs import ROOT, end

POLL_SECONDS = 0.2  # between two tests whether a command has ended
BUSY = 0.5  # a load average or a number of used cores above this means that other programs run


class Skipped(Exception):
    """A part that this machine cannot run; the message says why."""


class PartFailed(Exception):
    """A command of a part ended with an error; the message has its last line."""


@dataclass(frozen=True)
class Part:
    """One part. measure(progress, **options) returns its results as JSON data; progress(text) shows how far it is.

    A saved part is used again only with equal options, at the same commit and on the same processor. times: whether the
    results are times of this machine; a part without times is run even if nothing is to be measured.
    """

    name: str
    title: str
    measure: Callable
    options: dict = field(default_factory=dict)
    times: bool = True


class PartFiles:
    """The directory of the parts. fresh: ignore the files of earlier runs."""

    def __init__(self, folder, fresh=False):
        self.folder, self.fresh = Path(folder), fresh
        self.load_average = os.getloadavg()[0]  # before this program measures
        self.origin = {"commit": commit(), "cpu": cpu(), "cores": os.cpu_count()}

    def path(self, part):
        return self.folder / f"{part.name}.json"

    def load(self, part):
        """The saved record of a part, or None if there is none, or none that fits."""
        try:
            record = json.loads(self.path(part).read_text(encoding="utf-8"))
            fits = record["options"] == part.options and record["origin"] == self.origin and "results" in record
        except (OSError, ValueError, KeyError, TypeError):  # no file, or an incomplete one
            return None
        return record if fits and not self.fresh else None

    def measure(self, part, bar):
        """Measure a part; save and return its record. Raises Skipped, PartFailed or UserError."""
        started, others = time.monotonic(), OtherPrograms()
        results = part.measure(bar.set_postfix_str, **part.options)
        seconds, other_cores = time.monotonic() - started, others.cores()
        record = {
            "name": part.name, "title": part.title, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "times": part.times, "seconds": seconds, "options": part.options, "origin": self.origin,
            "hardware": hardware(), "load_average": self.load_average, "other_cores": other_cores,
            "results": results,
        }  # fmt: skip
        bar.set_postfix_str("")
        temporary = self.path(part).with_suffix(".part")
        temporary.write_text(to_json(record), encoding="utf-8")
        temporary.replace(self.path(part))  # in one operation, so that a reader never sees half a file
        return record


def run_parts(parts, files, bar, only_saved=False):
    """Measure the parts that no file has. Returns ({name: record}, {name: reason of a part that is missing}, failures).

    bar: a tqdm progress bar. A part that is skipped or that fails does not stop the others; failures has the names of
    those that failed. only_saved: run no part with times.
    """
    records, missing, failures = {}, {}, []
    for part in parts:
        bar.set_description_str(part.title)
        try:
            if record := files.load(part):
                said = f"measured on {record['date'][:10]}, used again"
            elif only_saved and part.times:
                raise Skipped("--no-measure was given")
            else:
                record = files.measure(part, bar)
                cores = record["other_cores"]
                busy = f", other programs used {cores:.1f} cores" if part.times and (cores or 0) > BUSY else ""
                said = f"{record['seconds']:.0f} s{busy}"
            records[part.name] = record
        except Skipped as error:
            missing[part.name] = str(error)
            said = f"skipped: {error}"
        except (PartFailed, UserError) as error:
            missing[part.name] = f"it failed: {error}"
            failures.append(part.name)
            said = f"FAILED: {error}"
        bar.write(f"{part.title}: {said}")
        bar.update()
    return records, missing, failures


# -- commands ---------------------------------------------------------------------------------------------------------


def python_command(ranks, *words):
    """The command line of `python -m WORDS`, on many ranks with mpiexec. Raises Skipped if there is no MPI."""
    if ranks is None:
        return [sys.executable, "-m", *words]
    try:
        launcher = launch_line(*choose(), ranks)
    except (ConfigError, ImportError) as error:
        raise Skipped(f"{error}") from None
    return [*launcher, sys.executable, "-m", *words]


def run_command_line(command, timeout, tick=lambda: None, **environment):
    """Run a command and return its standard output. Raises PartFailed if it fails or takes more than `timeout` seconds.

    tick: called several times a second. environment: more environment variables.
    """
    words = [str(word) for word in command]
    shown = " ".join(["python", *words[words.index("-m") :]] if "-m" in words else words)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + timeout
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise PartFailed(f"{shown} was stopped after {timeout} s")
                tick()
                time.sleep(POLL_SECONDS)
        finally:
            end(process)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            lines = [line.strip() for line in errors if line.strip()] or ["no message"]
            message = next((line for line in lines if line.startswith("error:")), lines[-1])
            raise PartFailed(f"{shown} ended with code {process.returncode}: {message}")
        return out.read()

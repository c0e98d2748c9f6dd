"""The measured parts of the report: each is one JSON file, so that an interrupted report continues where it ended."""

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from benchmarks.harness.processes import BenchmarkFailed
from benchmarks.harness.report import commit, cpu, to_json
from benchmarks.harness.speedups import OtherPrograms
from gpt2core.errors import ConfigError, UserError

BUSY = 0.5  # other programs that use more cores than this may slow a measurement


@dataclass(frozen=True)
class Part:
    """One part. measure(*arguments) returns its results as JSON data.

    A saved part is used again only with equal arguments, at the same commit and on the same processor. times: whether
    the results are times of this machine; a part without times is run even if nothing is to be measured.
    """

    name: str
    title: str
    measure: Callable
    arguments: list = field(default_factory=list)
    times: bool = True


@functools.cache
def origin():
    return {"commit": commit(), "cpu": cpu(), "cores": os.cpu_count()}


def load(folder, part):
    """The record of a part in the folder, or None if there is none, or none that fits."""
    try:
        record = json.loads((folder / f"{part.name}.json").read_text(encoding="utf-8"))
        fits = record["arguments"] == part.arguments and record["origin"] == origin() and "results" in record
    except (OSError, ValueError, KeyError, TypeError):  # no file, or an incomplete one
        return None
    return record if fits else None


def measure(folder, part):
    """Measure a part; save and return its record. Raises what the part raises."""
    started, others = time.monotonic(), OtherPrograms()
    results = part.measure(*part.arguments)
    record = {
        "title": part.title, "date": datetime.now(UTC).isoformat(timespec="seconds"), "times": part.times,
        "seconds": time.monotonic() - started, "other_cores": others.cores(), "arguments": part.arguments,
        "origin": origin(), "results": results,
    }  # fmt: skip
    temporary = folder / f"{part.name}.part"
    temporary.write_text(to_json(record), encoding="utf-8")
    temporary.replace(folder / f"{part.name}.json")  # in one operation, so that a reader never sees half a file
    return record


def disturbance(record):
    """ "while other programs used 1.7 cores", or "" if a part has no times or ran on an idle machine."""
    cores = record["other_cores"] or 0  # None if it is not known
    return f"while other programs used {cores:.1f} cores" * (record["times"] and cores > BUSY)


def run_parts(parts, folder, only_saved=False, fresh=False):
    """Measure the parts that no file has. Returns ({name: record}, {name: reason of a part that is missing}, failures).

    Prints a line for each part. A part that is skipped or that fails does not stop the others; failures has the names
    of those that failed. only_saved: run no part with times. fresh: measure all parts again.
    """
    records, missing, failures = {}, {}, []
    for number, part in enumerate(parts, 1):
        print(f"{number}/{len(parts)} {part.title}: ", end="", flush=True)
        try:
            if not fresh and (record := load(folder, part)):
                said = f"measured on {record['date'][:10]}, used again"
            elif only_saved and part.times:
                raise ConfigError("--no-measure was given")
            else:
                record = measure(folder, part)
                said = f"{record['seconds']:.0f} s {disturbance(record)}".strip()
            records[part.name] = record
        except (ConfigError, ImportError) as error:  # for example, there is no MPI
            missing[part.name] = str(error)
            said = f"skipped: {error}"
        except (BenchmarkFailed, UserError, AssertionError) as error:
            first, *others = str(error).splitlines() or [type(error).__name__]
            reason = next((line for line in others if line.startswith("error:")), others[-1] if others else "")
            missing[part.name] = said = f"it failed: {first} {reason}".strip()
            failures.append(part.name)
        print(said, flush=True)
    return records, missing, failures

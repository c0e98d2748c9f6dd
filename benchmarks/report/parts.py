"""The measured parts of the report: each is one JSON file, so that an interrupted report continues where it ended."""

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

    def identity(self):
        """What a saved record of this part must have."""
        origin = {"commit": commit(), "cpu": cpu(), "cores": os.cpu_count()}
        return {"title": self.title, "times": self.times, "arguments": self.arguments, "origin": origin}

    def load(self, folder):
        """The record of this part in the folder, or None if there is none, or none that fits."""
        try:
            record = json.loads((folder / f"{self.name}.json").read_text(encoding="utf-8"))
            return record if record.items() >= self.identity().items() and "results" in record else None
        except (OSError, ValueError, AttributeError):  # no file, or an incomplete one
            return None

    def run(self, folder):
        """Measure this part; save and return its record."""
        started, others = time.monotonic(), OtherPrograms()
        results = self.measure(*self.arguments)
        found = {"results": results, "other_cores": others.cores(), "seconds": time.monotonic() - started}
        record = self.identity() | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | found
        temporary = folder / f"{self.name}.part"
        temporary.write_text(to_json(record), encoding="utf-8")
        temporary.replace(folder / f"{self.name}.json")  # in one operation: a reader never sees half a file
        return record


def remark(record):
    """Why a part was not measured, or that other programs used cores meanwhile, or ""."""
    if "missing" in record:
        return f"not measured: {record['missing']}"
    cores = record["other_cores"] or 0  # None if it is not known
    return f"measured while other programs used {cores:.1f} cores" * (record["times"] and cores > BUSY)


def run_parts(parts, folder, only_saved=False, fresh=False):
    """Measure the parts that no file has. Returns ({name: record}, names of those that failed).

    Prints a line for each part. A part that cannot run here or that fails does not stop the others: its record is only
    {"title", "missing": the reason}. only_saved: run no part with times. fresh: measure all parts again.
    """
    records, failures = {}, []
    for number, part in enumerate(parts, 1):
        print(f"{number}/{len(parts)} {part.title}: ", end="", flush=True)
        try:
            if not fresh and (record := part.load(folder)):
                said = f"measured on {record['date'][:10]}, used again"
            elif only_saved and part.times:
                raise ConfigError("--no-measure was given")
            else:
                record = part.run(folder)
                said = ", ".join(filter(None, (f"{record['seconds']:.0f} s", remark(record))))
        except (ConfigError, ImportError) as error:  # for example, there is no MPI
            record, said = {"title": part.title, "missing": f"{error}"}, f"skipped: {error}"
        except (BenchmarkFailed, UserError, AssertionError) as error:
            first, *others = str(error).splitlines() or [type(error).__name__]
            reason = next((line for line in others if line.startswith("error:")), others[-1] if others else "")
            said = f"it failed: {first} {reason}".strip()
            record = {"title": part.title, "missing": said}
            failures.append(part.name)
        records[part.name] = record
        print(said, flush=True)
    return records, failures

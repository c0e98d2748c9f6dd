"""Write a trace in Chrome's format, a JSON object with `traceEvents`, which ui.perfetto.dev and Chrome open."""

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from gpt2core.errors import ConfigError

PROGRAM = "staged-gpt2"
START = b'{"otherData": {"program": "staged-gpt2"'  # the first bytes of each trace of this program
UNIT = "displayTimeUnit"


class Span(NamedTuple):
    """One bar of a trace; start and duration in microseconds."""

    name: str
    start: float
    duration: float
    category: str = ""  # Perfetto searches for it
    details: dict | None = None  # shown if the bar is selected


class Process(NamedTuple):
    """The bars of one process of a trace, for example of a rank."""

    name: str
    lanes: dict[str, list[Span]]  # {title of a lane: its bars}; the lanes are shown in this order


def trace_events(processes):
    """Yield the events of a trace: for each process and lane its names, then one complete event ("X") for each Span.

    The index of a process in the list is its pid, the index of a lane is its tid.
    """
    for pid, process in enumerate(processes):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, (title, spans) in enumerate(process.lanes.items()):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for span in sorted(spans, key=lambda span: (span.start, -span.duration)):
                times = {"ts": round(span.start, 3), "dur": round(span.duration, 3)}
                event = {"ph": "X", "name": span.name, "pid": pid, "tid": tid, **times}
                labels = {"cat": span.category, "args": span.details}
                yield event | {key: value for key, value in labels.items() if value}


def write_trace(path, processes, **details):
    """Write the trace of `processes`, a list of Process, with one event per line. details: entries of `otherData`.

    Raises ConfigError if the file cannot be written; a part that was written is removed.
    """
    other = json.dumps({"program": PROGRAM, **details})
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(processes))
    text = f'{{"otherData": {other},\n"{UNIT}": "ms",\n"traceEvents": [\n{events}\n]}}\n'
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):  # a part of a trace cannot be opened, and would fill the disk
            os.truncate(path, 0)
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): free some space") from None


def check_trace_file(path):
    """Raise ConfigError unless `path` is a trace of this program, an empty file, or no regular file."""
    if path.is_file():
        with open(path, "rb") as file:
            first_bytes = file.read(len(START))
        if first_bytes and first_bytes != START:
            raise ConfigError(f"{path}: is not a trace of this program: choose another file")

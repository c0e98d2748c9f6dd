"""Read one training step from a trace, for the step player."""

import json
from collections import defaultdict
from pathlib import Path

MICROSECONDS = 1e-6


def read_step(path):
    """The last step of a trace that `--trace` wrote: {"name", "seconds", "lanes": [{"rank", "name", "events"}]}.

    An event is [name, start, duration, category, module, bytes], in microseconds from the start of the step.
    """
    return step_of(json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"])


def step_of(events):
    """read_step() of a list of Chrome trace events."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    step = max((e for e in spans if e.get("cat") == "step" and e["pid"] == 0), key=lambda event: event["ts"])
    begin, length, lanes = step["ts"], step["dur"], defaultdict(list)
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):  # an outer one before those inside it
        start, duration, category = event["ts"] - begin, event["dur"], event.get("cat", "")
        if category != "step" and 0 <= start < length and start + duration <= 1.05 * length:
            details = {"module": "", "bytes": 0} | event.get("args", {})
            fields = round(start, 1), round(duration, 1), category, details["module"], details["bytes"]
            lanes[event["pid"], event["tid"]].append([event["name"], *fields])
    lanes = [{"rank": key[0], "name": names.get(key, ""), "events": found} for key, found in sorted(lanes.items())]
    return {"name": step["name"], "seconds": length * MICROSECONDS, "lanes": lanes}

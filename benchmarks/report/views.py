"""The views of the step player, as JSON data: recorded collectives, pipeline schedules, training steps."""

from benchmarks.report import shipped
from benchmarks.report.trace import MICROSECONDS, shipped_steps
from benchmarks.report.units import seconds
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.pipeline.simulator import LIVE, simulate, splits

SHORTEST = 5000  # a bar that is shorter than this part of the step is not drawn; so a phone stays fast
PIPELINE = 4, 8  # ranks and micro-batches of the schedules
KINDS = {"F": "forward", "B": "backward", "W": "weights"}


def views(runs):
    """[view], in the order of the list."""
    found = [*(runs.results("recordings") or []), *(pipeline(name, *PIPELINE) for name in SCHEDULES)]
    for name, record in runs.records.items():
        if name.startswith("trace"):
            title = record["title"].removeprefix("trace of a step, ")
            found.append(training_step(f"{title}, preset {runs.preset}, this machine", record["results"]))
    if not runs.results("trace3"):
        for step in shipped_steps():
            text = f"stage 3, {step['name']}, GPT-2 124M, rank 0"
            found.append(training_step(text, step, f"Shipped result: {shipped.origin('gpus/timeline')}. "))
    return found


def pipeline(name, ranks, count):
    """A simulated schedule: a lane of actions for each rank, and its live activations after each action."""
    schedule = SCHEDULES[name](ranks, count)
    timeline, lanes = simulate(schedule), []
    changes = LIVE | {"B": -0.5, "W": -0.5} if splits(schedule) else LIVE
    for rank, actions in enumerate(schedule):
        events, live = [], [[0, 0]]
        for kind, batch, chunk in actions:
            start, end = timeline.times[kind, batch, chunk]
            title = f"{KINDS[kind]} of micro-batch {batch}, chunk {chunk}"
            events.append([title, start, end - start, KINDS[kind], "", 0, str(batch)])
            live.append([start if kind == "F" else end, live[-1][1] + changes[kind]])
        lanes.append({"rank": rank, "name": "", "events": events, "live": [*live, [timeline.seconds, live[-1][1]]]})
    text = (
        f"{ranks} ranks, {count} micro-batches (the numbers), one unit of time for F, B and W: {timeline.seconds:g} "
        f"units, bubble {100 * timeline.bubble:.0f} %, at most {', '.join(f'{peak:g}' for peak in timeline.peaks)} "
        f"live activations on the ranks (the curve below the bars)."
    )
    trace = {"lanes": lanes, "length": timeline.seconds, "unit": "unit"}
    return {"group": "pipeline schedules", "title": f"pipeline {name}", "text": text} | trace


def training_step(title, step, origin=""):
    """A step of trace.py without the bars that are too short to be seen."""
    length = step["seconds"] / MICROSECONDS
    least = length / SHORTEST
    lanes = [lane | {"events": [event for event in lane["events"] if event[2] > least]} for lane in step["lanes"]]
    text = (
        f"{origin}The step takes {seconds(step['seconds'])}, without bars below {seconds(least * MICROSECONDS)}. Pale "
        f"bars have not begun. + and − zoom at the line of the present time."
    )
    return {"group": "training steps", "title": title, "text": text, "lanes": lanes, "length": length}

"""The measured times of the actions of a pipeline, beside those that the simulator computes from their means."""

import itertools
import statistics

from gpt2core.parallel.pipeline.simulator import needs, simulate, splits, timeline


def measured(micro_batches, pipeline):
    """(the Timeline of the last step, that of simulate() with the mean times of its actions and of a message).

    micro_batches: the PipelineMicroBatches of this rank, whose Executor records times. All ranks of the group
    `pipeline` must call this function. The times of several hosts cannot be compared, because each has its own clock.
    """
    recorded, runtime = micro_batches.executor.times, micro_batches.backend.runtime
    own = iter(runtime.seconds([time for pair in recorded.values() for time in pair]))
    times = {}
    for each in pipeline.all_gather_object({action: (next(own), next(own)) for action in recorded}):
        times |= each
    first = min(start for start, _ in times.values())
    times = {action: (start - first, end - first) for action, (start, end) in times.items()}
    durations = {}  # {(kind, chunk): the seconds of its actions}
    for (kind, _, chunk), (start, end) in times.items():
        durations.setdefault((kind, chunk), []).append(end - start)
    means = {key: statistics.fmean(values) for key, values in durations.items()}
    schedule = micro_batches.schedule
    simulated = simulate(schedule, lambda kind, chunk: means.get((kind, chunk), 0.0), message_seconds(schedule, times))
    return timeline(schedule, times), simulated


def message_seconds(schedule, times):
    """The mean time of a message for which a rank waits, from the end of an action to the start of the one it reads.

    schedule: the actions of each rank. times: {action: (start, end)} in seconds. 0 if no rank waits for a message.
    """
    rank_of = {chunk: rank for rank, actions in enumerate(schedule) for _, _, chunk in actions}
    last, split, found = max(rank_of), splits(schedule), []
    for rank, actions in enumerate(schedule):
        for previous, action in itertools.pairwise([None, *actions]):
            ends = [times[each][1] for each in needs(*action, last, split) if rank_of[each[2]] != rank]
            if ends and (previous is None or times[previous][1] < max(ends)):
                found.append(times[action][0] - max(ends))
    return max(0.0, statistics.fmean(found)) if found else 0.0


def pictures(micro_batches, pipeline, width):
    """The two Timelines of measured() as lines of at most `width` characters."""
    texts = "measured, the last step", "simulated, with the mean times of these actions and of a message"
    for text, each in zip(texts, measured(micro_batches, pipeline), strict=True):
        yield f"pipeline {text}: {1000 * each.seconds:.1f} ms, bubble {each.bubble:.1%}"
        yield from each.picture(width - len("rank 0 ||")).splitlines()

"""When the actions of a pipeline schedule run, simulated: their times, the bubble, the peak of live activations."""

from dataclasses import dataclass

LIVE = {"F": 1.0, "B": -1.0, "W": 0.0, "E": 0.0}  # change of live activations, without W actions


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs: simulated, or measured (measured.py)."""

    schedule: list  # for each rank its actions
    times: dict  # {action: (start, end)} in seconds
    seconds: float  # of the step
    busy: list  # of each rank: the seconds in which it computes
    peaks: list  # of each rank: the largest number of live activations of one chunk and one micro-batch

    @property
    def bubble(self):
        """The fraction of the time of all ranks in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)

    def picture(self, width=100):
        """A text with one line for each rank, in which each column is a `width`-th of the step.

        F is the last digit of its micro-batch, B a letter (a for micro-batch 0), W is w, E is e if its time is not 0,
        and a dot is a wait.
        """
        lines = []
        for rank, actions in enumerate(self.schedule):
            line = ["."] * width
            for kind, m, chunk in actions:
                start, end = (round(time * width / self.seconds) for time in self.times[kind, m, chunk])
                mark = {"F": str(m % 10), "B": chr(ord("a") + m % 26), "W": "w", "E": "e"}[kind]
                line[start:end] = mark * (end - start)
            lines.append(f"rank {rank} |{''.join(line)}|")
        return "\n".join(lines)


def unit_times(kind, chunk):
    """F, B and W take one unit of time each, as in the papers; E takes none."""
    return 0.0 if kind == "E" else 1.0


def simulate(schedule, seconds=unit_times, message=0.0, kept=0.5, reaction=0.0):
    """The Timeline of a schedule (schedules.py).

    seconds(kind, chunk): the time of an action; without W actions, a B action takes the time of B and W. message: the
    seconds until another rank can read a result. kept: see timeline(). reaction: seconds that a rank reacts later for
    each second that it has waited for a result. Raises ValueError, with the actions that wait, if the ranks would wait
    forever.
    """
    split = splits(schedule)

    def duration(kind, chunk):
        with_parameters = kind == "B" and not split
        return seconds(kind, chunk) + (seconds("W", chunk) if with_parameters else 0)

    return timeline(schedule, timed(schedule, split, duration, message, reaction), kept)


def splits(schedule):
    """Whether there are W actions, so that B computes only the gradient of the input."""
    return any(kind == "W" for actions in schedule for kind, _, _ in actions)


def timeline(schedule, times, kept=0.5):
    """The Timeline of these times, {action: (start, end)}. kept: the part of an activation that is live from B to W."""
    busy = [sum(times[action][1] - times[action][0] for action in actions) for actions in schedule]
    seconds = max(end for _, end in times.values())
    changes = LIVE | dict(B=kept - 1, W=-kept) if splits(schedule) else LIVE
    return Timeline(schedule, times, seconds, busy, [peak_of(actions, changes) for actions in schedule])


def timed(schedule, split, duration, message, reaction):
    """{action: (start, end)}; split: whether there are W actions. message, reaction: see simulate()."""
    rank_of = {chunk: rank for rank, actions in enumerate(schedule) for _, _, chunk in actions}
    times, free, left = {}, [0.0] * len(schedule), [list(actions) for actions in schedule]
    while any(left):
        done = len(times)
        for rank, actions in enumerate(left):
            while actions and times.keys() >= (inputs := needs(*actions[0], max(rank_of), split)):
                action = kind, _, chunk = actions.pop(0)
                ends = [times[each][1] for each in inputs if rank_of[each[2]] != rank]
                late = [message + reaction * max(0.0, end - free[rank]) for end in ends]
                start = max([free[rank], *map(sum, zip(ends, late, strict=True))])
                free[rank] = start + duration(kind, chunk)
                times[action] = start, free[rank]
        if len(times) == done:
            waiting = [actions[0] for actions in left if actions]
            raise ValueError(f"the ranks wait forever for each other: the next actions are {waiting}")
    return times


def needs(kind, m, chunk, last, split):
    """The set of the actions whose results an action reads. last: the number of the last chunk; split: see timed()."""
    if kind == "F":
        return {("F", m, chunk - 1)} if chunk else set()
    if kind == "B":
        return {("F", m, chunk)} | ({("B", m, chunk + 1)} if chunk < last else set())
    return {("B", m, chunk)} if kind == "W" else {("B", m, 0), ("W" if split else "B", m, chunk)}


def peak_of(actions, changes):
    """The largest sum of the changes {kind: change of live activations} of the first actions, for any number."""
    live = peak = 0.0
    for kind, _, _ in actions:
        live += changes[kind]
        peak = max(peak, live)
    return peak

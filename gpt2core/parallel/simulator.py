"""The prediction of a pipeline schedule: the time of each action, the bubble, and the peak of live activations."""

from dataclasses import dataclass

LIVE = {"F": 1.0, "B": -1.0, "W": 0.0, "E": 0.0}  # change of live activations, without W actions


@dataclass(frozen=True)
class Prediction:
    """The result of simulate()."""

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

        F is the last digit of its micro-batch, B a letter (a for micro-batch 0), W is w, E is e, and a dot is a wait.
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


def simulate(schedule, seconds=unit_times, message=0.0, kept=0.5):
    """The Prediction of a schedule (schedules.py).

    seconds(kind, chunk): the time of an action; without W actions, a B action takes the time of B and W. message: the
    seconds until another rank can read a result. kept: the part of an activation that is live between B and W. Raises
    ValueError, with the actions that wait, if the ranks would wait forever.
    """
    split = any(kind == "W" for actions in schedule for kind, _, _ in actions)
    last = max(chunk for actions in schedule for _, _, chunk in actions)
    rank_of = {chunk: rank for rank, actions in enumerate(schedule) for _, _, chunk in actions}

    def duration(kind, chunk):
        with_parameters = kind == "B" and not split
        return seconds(kind, chunk) + (seconds("W", chunk) if with_parameters else 0)

    times, free, position = {}, [0.0] * len(schedule), [0] * len(schedule)
    while any(at < len(actions) for at, actions in zip(position, schedule, strict=True)):
        before = list(position)
        for rank, actions in enumerate(schedule):
            for action in actions[position[rank] :]:
                kind, _, chunk = action
                inputs = needs(*action, last, split)
                if any(each not in times for each in inputs):
                    break
                sent = [times[each][1] + message * (rank_of[each[2]] != rank) for each in inputs]
                start = max([free[rank], *sent])
                free[rank] = start + duration(kind, chunk)
                times[action] = start, free[rank]
                position[rank] += 1
        if position == before:
            waiting = [actions[at] for at, actions in zip(position, schedule, strict=True) if at < len(actions)]
            raise ValueError(f"the ranks wait forever for each other: the next actions are {waiting}")
    busy = [sum(times[action][1] - times[action][0] for action in actions) for actions in schedule]
    peaks = [peak_of(actions, LIVE | dict(B=kept - 1, W=-kept) if split else LIVE) for actions in schedule]
    return Prediction(schedule, times, max(free), busy, peaks)


def needs(kind, m, chunk, last, split):
    """The actions whose results an action reads. last: the number of the last chunk; split: with W actions."""
    if kind == "F":
        return [("F", m, chunk - 1)] if chunk else []
    if kind == "B":
        return [("F", m, chunk), *([("B", m, chunk + 1)] if chunk < last else [])]
    return [("B", m, chunk)] if kind == "W" else [("B", m, 0), ("W" if split else "B", m, chunk)]


def peak_of(actions, changes):
    """The largest sum of the changes {kind: change of live activations} of the first actions, for any number."""
    live = peak = 0.0
    for kind, _, _ in actions:
        live += changes[kind]
        peak = max(peak, live)
    return peak

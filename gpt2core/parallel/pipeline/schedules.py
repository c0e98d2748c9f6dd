"""Pipeline schedules as data: for each rank the list of its actions (kind, micro-batch, chunk), in order.

kind   F  forward
       B  backward: the gradient of the input, and without W actions also the gradients of the parameters
       W  the gradients of the parameters (zero-bubble); those that are arrays, as with PlainBackend, are computed in B
       E  tied models, on the rank of the head: add the embedding's gradient to that of the head (tied_table.py)
chunk  consecutive units of the model; chunk c is on rank c % P. The first chunk begins with the embedding, the last
       ends with the head.

In every schedule, the actions of one kind of a chunk are in the order of the micro-batches. So the sum of gradients has
the canonical order (tree_sum.py), with few partial sums in memory.
"""

# P ranks, M micro-batches, V chunks on each rank

from gpt2core.errors import ConfigError
from gpt2core.parallel.config import PP_SCHEDULES
from gpt2core.parallel.pipeline.simulator import simulate


def gpipe(P, M, V=1):
    """All forward actions, then all backward actions; activations of M micro-batches are live (Huang et al. 2019)."""
    return [[(kind, m, r) for kind in "FB" for m in range(M)] for r in range(P)]


def one_f_one_b(P, M, V=1):
    """P - r - 1 forward actions on rank r, then forward and backward in turn (PipeDream, Narayanan et al. 2019).

    Activations of at most P - r micro-batches are live. The bubble is that of gpipe.
    """
    order = [[[(kind, m, r) for m in range(M)] for kind in "FB"] for r in range(P)]
    return [alternate(P - r - 1, *order[r]) for r in range(P)]


def interleaved(P, M, V=2):
    """1F1B with V chunks on each rank: the bubble is V times smaller (Narayanan et al. 2021). P must divide M."""
    if M % P:
        raise ConfigError(f"the schedule interleaved needs micro-batches, here {M}, that are divisible by {P} ranks")

    def order(kind, r):
        """P micro-batches through chunk after chunk of rank r, then the next P micro-batches."""
        chunks = range(r, V * P, P) if kind == "F" else range(V * P - P + r, -1, -P)
        return [(kind, first + m, chunk) for first in range(0, M, P) for chunk in chunks for m in range(P)]

    return [alternate(2 * (P - r - 1) + (V - 1) * P, order("F", r), order("B", r)) for r in range(P)]


def zero_bubble(P, M, V=1):
    """ZB-H1: 1F1B in which W actions fill the waits: on rank r, W is r micro-batches behind B (Qi et al. 2023)."""
    schedule = []
    for r, one in enumerate(one_f_one_b(P, M)):
        actions = []
        for action in one:
            actions.append(action)
            if action[0] == "B" and action[1] >= r:
                actions.append(("W", action[1] - r, r))
        schedule.append(actions + [("W", m, r) for m in range(max(0, M - r), M)])
    return schedule


def alternate(warm_up, forward, backward):
    """`warm_up` forward actions, then one forward and one backward action in turn, then the other backward actions."""
    actions, rest = forward[:warm_up], forward[warm_up:]
    for number, action in enumerate(backward):
        actions += [*rest[number : number + 1], action]
    return actions


def with_tied_embedding(schedule):
    """The schedule with E actions on the rank of the last chunk, each at a time when it does not wait.

    They follow from the simulated times (simulator.py), so the actions of all ranks still have an order in which each
    one is after those that it needs: no rank waits forever.
    """
    times = simulate(schedule).times
    last = max(chunk for _, _, chunk in times)
    gradient = "W" if ("W", 0, last) in times else "B"  # the kind of action that computes the head's gradient
    numbers = [m for kind, m, chunk in times if (kind, chunk) == ("B", 0)]
    due = [(max(times["B", m, 0][1], times[gradient, m, last][1]), m) for m in sorted(numbers)]
    actions = []
    for action in schedule[-1]:
        while due and due[0][0] <= times[action][0]:
            actions.append(("E", due.pop(0)[1], last))
        actions.append(action)
    return [*schedule[:-1], actions + [("E", m, last) for _, m in due]]


SCHEDULES = dict(zip(PP_SCHEDULES, (gpipe, one_f_one_b, interleaved, zero_bubble), strict=True))

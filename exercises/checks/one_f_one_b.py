"""Checks of exercise 1.6: the order of 1F1B, its simulated times, and training with it."""

# P ranks, M micro-batches

from exercises.checks.common import expect_same_training
from exercises.compare import Mismatch, expect_equal
from gpt2core.errors import counted
from gpt2core.parallel.config import ParallelConfig

SIZES = (4, 8), (3, 4), (4, 4), (2, 5), (2, 2), (1, 1)  # with many ranks, mistakes have different results


def sizes(P, M):
    return f"with {counted(P, 'rank')} and {counted(M, 'micro-batch')}"


def schedule(P, M):
    from gpt2core.parallel.pipeline.schedules import one_f_one_b

    got = one_f_one_b(P, M)
    if not isinstance(got, list | tuple) or len(got) != P:
        raise Mismatch(f"one_f_one_b({P}, {M}) is not a list with one list for each rank", "Return P lists of actions.")
    return [[tuple(action) for action in actions] for actions in got]


def in_turn(r, M, warm_up):
    """The actions of rank r after some forward actions, as strings such as "F0"."""
    order = [f"F{m}" for m in range(min(warm_up, M))]
    for m in range(M):
        order += [f"F{m + warm_up}"] * (m + warm_up < M) + [f"B{m}"]
    return order


def named(actions):
    return [f"{kind}{m}" for kind, m, _ in actions]


def schedule_order():
    for P, M in SIZES:
        for r, actions in enumerate(schedule(P, M)):
            chunks = {chunk for _, _, chunk in actions}
            expect_equal(f"{sizes(P, M)}, the chunks of rank {r}", chunks, {r}, look="the chunk of an action: it is r")
            wrong = [
                (in_turn(r, M, M), "All forward actions come first: this is gpipe. After the warm-up, alternate."),
                (in_turn(r, M, P - r), "There is one forward action too many before the first backward: P - r - 1."),
                (in_turn(r, M, r), "The warm-up grows with r: rank 0 has the longest one, P - r - 1."),
                (in_turn(r, M, 0), "The warm-up is missing: P - r - 1 forward actions."),
                (in_turn(r, M, P - r - 1)[:-1], "The last backward action is missing."),
                (
                    in_turn(r, M, P - r - 1)[: 2 * M - (P - r - 1)],
                    "The backward actions after the last forward action are missing.",
                ),
            ]
            name = f"{sizes(P, M)}, the actions of rank {r}"
            expect_equal(name, named(actions), in_turn(r, M, P - r - 1), wrong, "the warm-up and the loop of alternate")


def alternate_other_lists():
    from gpt2core.parallel.pipeline.schedules import alternate

    for warm_up, letters, want in ((0, "abc", "axbycz"), (1, "abc", "abxcyz"), (2, "ab", "abxy"), (5, "ab", "abxy")):
        given = list(letters), list("xyz"[: len(letters)])
        got = alternate(warm_up, *given)
        look = "alternate: its lists may have any actions, and interleaved() calls it too"
        expect_equal(f"alternate({warm_up}, {list(letters)}, ...)", list(got), list(want), (), look)
        unchanged = given == (list(letters), list("xyz"[: len(letters)]))
        expect_equal("whether the lists of the caller are unchanged", unchanged, True, (), "copy a list before `+=`")


def bubble_and_activations():
    from gpt2core.parallel.pipeline.simulator import simulate

    for P, M in SIZES:
        try:
            timeline = simulate(schedule(P, M))
        except ValueError as error:
            hint = "An action must come after those whose results it reads: B of a micro-batch after its F."
            raise Mismatch(str(error), hint) from error
        waits, bubble = round(timeline.bubble, 9), round((P - 1) / (M + P - 1), 9)
        wrong = [(waits, "The ranks wait too long: rank r needs P - r - 1 forward actions before it alternates.")]
        name = f"{sizes(P, M)}, the bubble"
        expect_equal(name, waits, bubble, wrong if waits > bubble else (), "the order of the actions")
        want = [float(min(P - r, M)) for r in range(P)]
        hint = "More activations are live than necessary: rank r keeps those of at most P - r micro-batches."
        wrong = [([float(M)] * P, hint)]
        name = f"{sizes(P, M)}, the live activations of each rank"
        expect_equal(name, timeline.peaks, want, wrong, "the warm-up of one_f_one_b")


def pipeline_training():
    look = "one_f_one_b and alternate: each rank needs every F and every B of its chunk exactly once"
    expect_same_training(ParallelConfig(pp=2), look)

"""Simulated schedules have the bubbles and the memory of the papers' formulas, and a deadlock is found."""

import re

import pytest

from gpt2core.parallel.pipeline.schedules import SCHEDULES, with_tied_embedding
from gpt2core.parallel.pipeline.simulator import simulate

SIZES = [(P, M) for P in (2, 3, 4) for M in (P, 2 * P, 4 * P)]


# P - 1 ranks wait for one F and one B with W, 3 units of time; a rank computes 3 M units
@pytest.mark.parametrize("P, M", SIZES)
@pytest.mark.parametrize("name, bubble", [
    ("gpipe", lambda P, M: 3 * (P - 1)),
    ("1f1b", lambda P, M: 3 * (P - 1)),
    ("interleaved", lambda P, M: 3 * (P - 1) / 2),
    ("zero-bubble", lambda P, M: P - 1),
])  # fmt: skip
def test_the_bubble_is_that_of_the_formula(name, bubble, P, M):
    V = 2 if name == "interleaved" else 1
    prediction = simulate(SCHEDULES[name](P, M, V), lambda kind, chunk: 1 / V)
    wait = bubble(P, M)
    assert prediction.seconds == pytest.approx(3 * M + wait)
    assert prediction.bubble == pytest.approx(wait / (3 * M + wait))
    assert prediction.busy == pytest.approx([3 * M] * P)


def test_live_activations_are_all_in_gpipe_and_at_most_the_number_of_later_stages_in_1f1b():
    peaks = {name: simulate(SCHEDULES[name](4, 8)).peaks for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")}
    assert peaks["gpipe"] == [8, 8, 8, 8] and peaks["1f1b"] == [4, 3, 2, 1]
    assert peaks["interleaved"] == [11, 9, 7, 5]  # of half the size


def test_messages_and_unequal_chunks_take_their_time():
    schedule = SCHEDULES["gpipe"](2, 1)
    seconds = {"F": (1, 2), "B": (3, 4), "W": (5, 6)}
    prediction = simulate(schedule, lambda kind, chunk: seconds[kind][chunk], message=0.5)
    assert prediction.times == {
        ("F", 0, 0): (0, 1), ("F", 0, 1): (1.5, 3.5), ("B", 0, 1): (3.5, 13.5), ("B", 0, 0): (14, 22),
    }  # fmt: skip


def test_a_rank_that_has_waited_longer_reacts_later():
    seconds = {"F": 1, "B": 2, "W": 1}
    prediction = simulate(SCHEDULES["gpipe"](2, 1), lambda kind, chunk: seconds[kind], message=0.5, reaction=0.25)
    assert prediction.times == {
        ("F", 0, 0): (0, 1), ("F", 0, 1): (1.75, 2.75), ("B", 0, 1): (2.75, 5.75), ("B", 0, 0): (7.4375, 10.4375),
    }  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_additions_of_the_embedding_take_no_time_of_the_step(name):
    schedule = SCHEDULES[name](4, 8)
    assert simulate(with_tied_embedding(schedule)).seconds == simulate(schedule).seconds


def test_ranks_that_would_wait_forever_are_found():
    schedule = SCHEDULES["gpipe"](2, 2)
    schedule[0].insert(1, ("B", 0, 0))
    schedule[1].insert(0, ("F", 1, 1))
    text = "the ranks wait forever for each other: the next actions are [('B', 0, 0), ('F', 1, 1)]"
    with pytest.raises(ValueError, match=re.escape(text)):
        simulate(schedule)


def test_the_picture_has_a_line_for_each_rank():
    assert simulate(SCHEDULES["zero-bubble"](2, 2)).picture(14).splitlines() == [
        "rank 0 |0011..aawwbbww|",
        "rank 1 |..00aa11bbwwww|",
    ]

"""Every schedule has each action once, in the canonical order of the micro-batches, and no rank waits forever."""

import re

import pytest

from gpt2core.errors import ConfigError
from gpt2core.parallel.pipeline.schedules import SCHEDULES, interleaved, one_f_one_b, with_tied_embedding, zero_bubble
from gpt2core.parallel.pipeline.simulator import simulate

SIZES = [(name, P, M, V) for name in SCHEDULES for P in (1, 2, 3, 4) for M in (P, 12)
         for V in ((1, 2, 3) if name == "interleaved" else (1,))]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name, P, M, V", SIZES)
def test_a_schedule_has_each_action_once_in_the_order_of_the_micro_batches(name, P, M, V, tied):
    schedule = SCHEDULES[name](P, M, V)
    if tied:
        schedule = with_tied_embedding(schedule)
    kinds = "FBW" if name == "zero-bubble" else "FB"
    want = {(kind, m, chunk) for kind in kinds for m in range(M) for chunk in range(P * V)}
    want |= {("E", m, P * V - 1) for m in range(M) if tied}
    assert sorted(action for actions in schedule for action in actions) == sorted(want)
    for rank, actions in enumerate(schedule):
        assert {chunk % P for _, _, chunk in actions} == {rank}
        for kind in kinds + "E":
            for chunk in range(rank, P * V, P):
                assert [m for each, m, at in actions if (each, at) == (kind, chunk)] in ([*range(M)], [])
    assert len(simulate(schedule).times) == len(want)  # or ValueError


def test_1f1b_of_three_ranks_is_that_of_the_paper():
    text = ["".join(f"{kind}{m} " for kind, m, _ in actions).strip() for actions in one_f_one_b(3, 4)]
    assert text == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_sends_as_many_micro_batches_as_ranks_through_each_chunk():
    first = [(m, chunk) for kind, m, chunk in interleaved(2, 4)[0] if kind == "F"]
    assert first == [(0, 0), (1, 0), (0, 2), (1, 2), (2, 0), (3, 0), (2, 2), (3, 2)]


def test_weight_gradients_of_zero_bubble_are_behind_by_the_number_of_the_rank():
    for rank, actions in enumerate(zero_bubble(4, 8)):
        behind = [sum(kind == "B" for kind, _, _ in actions[:at]) - m - 1
                  for at, (kind, m, _) in enumerate(actions) if kind == "W"]  # fmt: skip
        assert behind == [min(rank, 7 - m) for m in range(8)]


def test_interleaved_refuses_micro_batches_that_the_stages_do_not_divide():
    with pytest.raises(ConfigError, match=re.escape("micro-batches, here 6, that are divisible by 4 ranks")):
        interleaved(4, 6)

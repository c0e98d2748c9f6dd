"""The time of incomplete waves, in the planner: by hand, and in its effect on predictions for GPUs."""

import pytest

from benchmarks.gpus import plan
from gpt2core.app.planning.machine import h100
from gpt2core.app.planning.step_time import step_seconds
from gpt2core.app.planning.waves import idle_flops, time_of_waves
from gpt2core.presets import PRESETS


@pytest.mark.parametrize("rows, columns, time", [
    (128 * 132, 256, 1.0),  # one tile for each of 132 multiprocessors
    (128 * 132, 512, 1.0),
    (128 * 133, 256, 2 * 132 / 133),  # the second wave has one tile
    (128 * 66, 256, 2.0),
    (128 * 132, 128, 2.0),  # half of each tile is outside the result
])  # fmt: skip
def test_the_time_of_the_waves_of_a_product(rows, columns, time):
    assert time_of_waves(rows, columns, 132) == pytest.approx(time, rel=1e-12)


def test_a_cpu_has_no_waves_and_a_gpu_waits_more_with_fewer_tokens():
    config = PRESETS["gpt2"]
    assert idle_flops(config, 1, 1024, None) == (0, 0)
    products = 2 * 12 * config.n_embd**2  # operations of the products of a block for one token
    shares = [idle_flops(config, 1, 1024 * n, 132)[0] / (1024 * n * products) for n in (64, 16, 4)]
    assert 0 < shares[0] < shares[1] < shares[2]
    assert idle_flops(config, 2, 4096, 132)[0] > idle_flops(config, 1, 4096, 132)[0] / 2  # narrower products


def test_the_predicted_steps_are_near_the_steps_measured_on_gpus():
    """The bounds that the planner is to keep: 10 % on average, 20 % at most."""
    errors = [
        abs(sum(step_seconds(layout, h100("bf16")).values()) / measured - 1)
        for _, measured, layout in plan.measured_steps()
    ]
    assert len(errors) > 20 and sum(errors) / len(errors) < 0.1 and max(errors) < 0.2

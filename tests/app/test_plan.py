"""The command that plans: it lists only layouts that training accepts, and refuses in one line."""

import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2core.app import plan as command
from gpt2core.app.cli import train_parser
from gpt2core.app.planning import machine as machines
from gpt2core.app.planning.layout import Layout
from gpt2core.app.planning.layouts import Devices, Estimate, estimate, estimates, layouts
from gpt2core.app.planning.machine import Link, Machine, Rate, h100, host_machine, save_calibration
from gpt2core.app.planning.step_time import step_seconds, unit_seconds, update_seconds
from gpt2core.app.settings.final_values import resolve_flags, resolve_rank_flags
from gpt2core.architecture import GPT2Config, flops_per_token
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS
from stage1_mpi import calibrate
from tests.support.training import make_trainer

MODEL = GPT2Config(vocab_size=36, block_size=16, n_layer=4, n_head=4, n_embd=16, tied=True)
CPU = Devices(4, 1e9, True, "fp32")
CONSTANTS = {
    "block_forward": [1e-4, 2e10, 5e9, 2e-5, 1e-9, 1e-9], "block_backward": [2e-4, 3e10, 5e9, 2e-5, 1e-9, 1e-9],
    "ends_forward": [1e-4, 1e10, 5e9], "ends_backward": [1e-4, 1e10, 5e9], "inside": [5e-5, 5e-10],
    "collective": [4e-5, 2e-10], "gather": [2e-5, 3e-10], "message": [1e-5, 2e-10], "background": [1e-4, 3e-10],
    "embedding": [0.4], "bandwidth": [8e9], "micro_batch": [6e-5], "again": [1e-5], "weights": [1e-5],
    "action": [2e-5], "reaction": [0.03], "update": [1e-4], "step": [1e-3], "queries": [64],
}  # fmt: skip
FREE, FAST = Link(0.0, 0.0), Rate(0.0, float("inf"))


def simple(**options):
    """A Machine whose only cost is one FLOP per second, unless `options` have others."""
    rate, infinite = Rate(0.0, 1.0), float("inf")
    links, times = [FREE] * 6, [0.0, infinite, *[0.0] * 7, infinite]
    return replace(Machine("test", rate, rate, rate, rate, *links, *times, 8, False, None), **options)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run(*flags) -> (exit code, standard output, standard error), with the constants CONSTANTS of this machine."""
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(command, "calibration_file", lambda: path)

    def run(*flags, calibrated=True):
        if calibrated:
            save_calibration(CONSTANTS, path, 2)
        with pytest.raises(SystemExit) as exit:
            command.main([str(each) for each in flags])
        return exit.value.code, *capsys.readouterr()

    return run


# -- the command -------------------------------------------------------------------------------------------------------


def test_it_lists_the_fastest_layouts_and_recommends_the_first(run):
    code, out, err = run("--preset", "tiny", "--ranks", 2)
    assert (code, err) == (0, "")
    times = [float(number) for number in re.findall(r"([\d.]+) ms$", out, re.M)]
    assert len(times) == 5 and times == sorted(times)
    assert re.search(r"^recommended: --preset tiny --batch-size 16 --micro-batches \d+ --threads 1", out, re.M)
    why = re.search(r"^why: (.*)\.$", out, re.M)[1]
    assert why.startswith(("it has the shortest predicted step; ", "no layout is more than 1% faster, "))


def test_a_thousand_gpus_are_planned_without_one(run):
    code, out, err = run("--preset", "gpt2-xl", "--gpus", 1024)
    assert (code, err) == (0, "") and "1024 x 1024 tokens per step" in out
    flags = "^recommended: --preset gpt2-xl --batch-size 1024 --micro-batches 1024 --precision bf16 "
    assert re.search(flags + "--pp 8 --zero 2 --pp-sch", out, re.M), out


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--gpus", 8, "--ranks", 8), "--gpus and --ranks exclude each other: give --gpus N for stage 3, or --ranks N"),
        ((), "the number of ranks is missing: give --gpus N for stage 3, or --ranks N for stage 1"),
        (("--ranks", 0), "--ranks 0 must be at least 1"),
        (("--gpus", -1), "--gpus -1 must be at least 1"),
        (("--gpus", 10**9), "--gpus 1000000000 is too large: the largest value is 65536"),
        (("--gpus", 8, "--batch-size", 10**20), f"--batch-size {10**20} is too large: the largest value is 2147483647"),
        (("--gpus", 8, "--preset", "gpt5"), "--preset gpt5 is unknown: choose from nano, tiny"),
        (("--gpus", 8, "--batch-size", 0), "--batch-size 0 must be at least 1"),
        (("--gpus", 8, "--seq-len", 2000), "--seq-len 2000 exceeds the model's block of 1024 tokens: use --seq-len 10"),
        (("--ranks", 2, "--gpu-memory", 80), "--gpu-memory and --precision are for --gpus, and this plan is for --ra"),
        (("--gpus", 2, "--gpu-memory", 0), "--gpu-memory 0 must be above 0 and finite"),
        (("--gpus", 2, "--precision", "fp8"), "--precision fp8 is unknown: choose from fp32, tf32, bf16, fp16"),
        (
            ("--gpus", 5, "--batch-size", 2),
            "--batch-size 2 is not divisible by 5 data-parallel ranks: use --batch-size 5\n",
        ),
        (("--gpus", 1, "--gpu-memory", 4, "--preset", "gpt2-xl"), "gpt2-xl on 1 GPU needs at least 61.87 GB on each, "),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(run, flags, message):
    code, out, err = run(*flags)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith(f"error: {message}")


def test_what_fits_nowhere_names_both_values_and_what_to_do(run):
    err = run("--gpus", 1, "--gpu-memory", 4, "--preset", "gpt2-xl")[2]
    assert "but a GPU has 4.00 GB: use more --gpus or GPUs with more memory, a smaller --batch-size" in err


def test_ranks_need_a_calibration(run, monkeypatch):
    code, out, err = run("--ranks", 2, calibrated=False)
    assert (code, out) == (2, "") and "measure them with --calibrate" in err
    monkeypatch.setattr(command, "LAUNCH", ["-c", f"print({json.dumps(json.dumps(CONSTANTS))})"])
    monkeypatch.setattr(command, "cores_of_process", lambda: range(2))
    code, out, err = run("--ranks", 2, "--preset", "tiny", "--calibrate", calibrated=False)
    assert (code, err) == (0, "") and out.startswith("calibrated with 2 ranks in ") and "recommended: " in out
    monkeypatch.setattr(command, "LAUNCH", ["-c", "raise SystemExit('error: no MPI')"])
    assert run("--calibrate")[2] == "error: --calibrate: 2 ranks cannot run here: no MPI\n"


@pytest.fixture
def measures_nothing(monkeypatch):
    """A calibration that measures fails."""
    monkeypatch.setattr(command, "constants", lambda count: pytest.fail("this command must not measure"))


def test_a_calibration_alone_takes_no_other_flag(run, measures_nothing):
    code, out, err = run("--calibrate", "--preset", "tiny", calibrated=False)
    assert (code, out) == (2, "") and err.startswith(
        "error: --calibrate without --ranks and --gpus takes no other flag"
    )


def test_a_wrong_plan_is_refused_before_the_calibration(run, measures_nothing):
    code, out, err = run("--calibrate", "--ranks", 2, "--preset", "gpt5", calibrated=False)
    assert (code, out) == (2, "") and err.startswith("error: --preset gpt5 is unknown: ")


def test_a_calibration_that_cannot_be_saved_measures_nothing(run, measures_nothing, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "calibration_file", lambda: tmp_path / "file" / "x.json")
    code, out, err = run("--calibrate", calibrated=False)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"error: --calibrate: {tmp_path}/file/x.json cannot be written (") and "HOME" in err


def test_a_write_that_fails_leaves_no_file_and_the_earlier_constants(monkeypatch, tmp_path):
    path = tmp_path / "c.json"
    save_calibration(CONSTANTS, path, 2)
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"c.json cannot be written \(No space left on device\)"):
        save_calibration(CONSTANTS, path, 4)
    assert list(tmp_path.iterdir()) == [path] and host_machine(path, 4).message == Link(1e-5, 2e-10)


def test_each_number_of_ranks_has_constants_of_its_own(run, monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(command, "cores_of_process", lambda: range(4))
    monkeypatch.setattr(command, "constants", lambda count: CONSTANTS | {"step": [count]})
    assert run("--calibrate", calibrated=False)[1].startswith("calibrated with 2 and 4 ranks in ")
    assert [host_machine(path, ranks).step for ranks in (1, 2, 3, 4, 8)] == [2, 2, 2, 4, 4]


@pytest.mark.parametrize("ranks", machines.CALIBRATED)
def test_a_calibration_measures_all_constants_of_a_machine(monkeypatch, ranks):
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "SAMPLE", 1e-9)
    found, *_ = run_ranks(ranks, calibrate.measure)
    assert set(found) == set(machines.MEASURED) == set(CONSTANTS)
    machine = machines.machine_of(found, ranks)
    assert min(machine.block_forward.flops, machine.ends_backward.bandwidth, machine.bandwidth) > 0


def test_noise_makes_no_constant_negative_and_changes_the_others_least():
    rows, exact = np.random.default_rng().uniform(1, 2, (7, 3)), np.array([3.0, 1.0, 2.0])
    assert calibrate.solve(rows, rows @ exact, rows @ exact) == pytest.approx(exact)
    found = np.array(calibrate.solve(rows, rows @ [3.0, -0.1, 2.0], np.ones(7)))
    assert found[1] == 1e-15
    assert found[[0, 2]] == pytest.approx(np.linalg.lstsq(rows[:, [0, 2]], rows @ [3.0, -0.1, 2.0], rcond=None)[0])


def test_a_damaged_calibration_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "calibrated_for", lambda: "x")
    path = tmp_path / "c.json"
    assert host_machine(path, 2) is None
    save_calibration(CONSTANTS, path, 2)
    assert host_machine(path, 2).message == Link(1e-5, 2e-10)
    save_calibration({"message": [1.0]}, path, 2)
    assert host_machine(path, 2) is None


@pytest.mark.parametrize("name, constants", [
    ("bandwidth", [float("nan")]), ("reaction", [float("inf")]), ("message", [-1e-5, 2e-10]), ("bandwidth", [0.0]),
    ("queries", [0]), ("ends_forward", [1e-4, 0.0, 5e9]), ("block_backward", [1e-4, 1e10, 0.0]), ("embedding", [2.0]),
])  # fmt: skip
def test_constants_that_no_calibration_measures_are_none(tmp_path, name, constants):
    path = tmp_path / "c.json"
    save_calibration(CONSTANTS | {name: constants}, path, 2)
    assert host_machine(path, 2) is None
    save_calibration(CONSTANTS, path, 4)  # then the constants of another number of ranks are used
    assert host_machine(path, 2).message == Link(1e-5, 2e-10)


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [True, False])
def test_training_with_the_flags_of_a_layout_has_this_layout(on_host):
    devices = Devices(4, 80e9, on_host, "fp32" if on_host else "bf16")
    args = command.parser().parse_args(["--preset", "nano", "--seq-len", "7"])
    transport, world = None if on_host else "nccl", SimpleNamespace(size=4, native_algorithm="mpi")
    for layout in layouts(PRESETS["nano"], devices, 16, 7):
        given = train_parser().parse_args(command.flags_of(args, Estimate(layout, 0, {}), devices).split())
        settings, _ = resolve_flags(given, {}, deterministic=on_host)
        settings, _ = resolve_rank_flags(replace(settings, transport=transport), world)
        trained = {each.name: getattr(settings, each.name) for each in fields(ParallelConfig)}
        assert ParallelConfig(**trained) == layout.parallel
        assert (settings.preset, settings.seq_len, settings.batch_size) == ("nano", 7, 16)
        assert settings.micro_batches == layout.micro_batches and settings.precision == devices.precision
        assert settings.threads == (layout.threads if on_host else None)


def test_every_layout_of_4_ranks_can_be_trained():
    """A sample of one for each ParallelConfig: its trainer is made."""
    found = {each.parallel: each for each in layouts(MODEL, CPU, 16, 16)}
    assert {(p.tp, p.pp) for p in found} == {(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)}
    assert {p.zero for p in found} == {0, 1, 2, 3} and len(found) > 30
    for parallel, each in found.items():
        if parallel.recompute == "none":  # "block" refuses nothing
            run_ranks(4, made, parallel, each.micro_batches)


def test_plans_for_gpus_have_every_zero_and_each_needs_less_memory_than_the_one_before():
    gpus = Devices(4, 80e9, False, "bf16")
    found = [estimate(each, gpus, h100("bf16")) for each in layouts(PRESETS["gpt2"], gpus, 16, 1024)]
    plain = {}
    for each in found:
        zero = each.layout.parallel.zero
        if each.layout.parallel == ParallelConfig(zero=zero) and each.layout.count == 1:
            plain[zero] = each.memory
    assert list(plain) == [0, 1, 2, 3] and plain[0] > plain[1] > plain[2] > plain[3]


def made(comm, parallel, micro_batches):
    make_trainer(comm, parallel, MODEL, micro_batches=micro_batches)


def test_sizes_that_cannot_be_divided_are_refused():
    with pytest.raises(ConfigError, match="`batch_size=4` is not divisible by 5 data-parallel ranks"):
        list(layouts(MODEL, Devices(5, 1e9, True, "fp32"), 4, 16))


def test_those_that_do_not_fit_are_omitted():
    machine = simple()
    every, count, least = estimates(MODEL, CPU, machine, 16, 16)
    assert len(every) == count and least == min(each.memory for each in every)
    some, count, _ = estimates(MODEL, replace(CPU, memory=least), machine, 16, 16)
    assert 0 < len(some) < count and all(each.memory == least for each in some)
    assert estimates(MODEL, replace(CPU, memory=least - 1), machine, 16, 16)[0] == []


# -- time --------------------------------------------------------------------------------------------------------------


def layout(replicas=1, micro_batches=4, config=MODEL, **options):
    return Layout(config, ParallelConfig(**options), 8, 16, micro_batches, replicas)


def test_the_computation_of_a_step_is_its_flops_divided_by_the_rate():
    assert sum(step_seconds(layout(), simple()).values()) == pytest.approx(flops_per_token(MODEL, 16) * 8 * 16)
    assert sum(step_seconds(layout(2), simple()).values()) == pytest.approx(flops_per_token(MODEL, 16) * 4 * 16)


def test_alpha_is_counted_once_for_each_round_and_beta_for_each_byte():
    machine = simple(inside=Link(1.0, 0.0))
    all_reduces = 4 * (1 + 2 * 4 + 2 * 4 + 1 + 2)  # of 4 passes: embedding, forward, backward, head, cross-entropy
    terms = step_seconds(layout(tp=2), machine)
    assert terms["sums inside layers"] == 2 * all_reduces
    arena = layout(2)
    per_byte = simple(collective=Link(0.0, 1.0))
    assert step_seconds(arena, per_byte)["messages of gradients and parameters"] == pytest.approx(
        sum(-(-count // 1024) * 4096 for count in sizes(MODEL))
    )


def sizes(config):
    from math import prod

    from gpt2core.architecture import parameter_shapes

    return [prod(shape) for _, shape in parameter_shapes(config)]


def test_overlapped_gradients_cost_nothing_if_computation_hides_them():
    slow = simple(background=Link(0.0, 1e-3))
    bucket = layout(2, dp="bucket", bucket_mb=0.002)
    hidden = step_seconds(bucket, replace(slow, overlaps=True))
    assert "messages of gradients and parameters" not in hidden
    assert step_seconds(bucket, slow)["messages of gradients and parameters"] > 1


def test_the_bubble_of_a_pipeline_is_that_of_the_simulator():
    """Two equal ranks, one layer and no vocabulary to speak of: 1F1B waits (p - 1) / m of the computation."""
    config = GPT2Config(vocab_size=1, block_size=16, n_layer=2, n_head=1, n_embd=64, tied=False)
    terms = step_seconds(layout(config=config, pp=2), simple())
    assert terms["bubble and messages of the pipeline"] / terms["computation"] == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_each_action_of_a_pipeline_takes_time(schedule):
    machine = simple(block_forward=FAST, block_backward=FAST, ends_forward=FAST, ends_backward=FAST, action=1.0)
    terms = step_seconds(layout(pp=2, pp_schedule=schedule), machine)
    assert terms["computation"] == 8  # 4 micro-batches, forward and backward
    waits = step_seconds(layout(pp=2, pp_schedule=schedule), replace(machine, reaction=0.5))
    assert waits["bubble and messages of the pipeline"] > terms["bubble and messages of the pipeline"] >= 1


def test_each_block_that_is_computed_again_takes_time():
    one, two = (step_seconds(layout(recompute=how), simple(again=1e9))["computation"] for how in ("none", "block"))
    assert two - one == pytest.approx(4 * 3 * 1e9, rel=1e-3)  # all blocks but the last one, in 4 passes


def test_zero_1_divides_the_update_and_recomputation_adds_a_forward_pass():
    machine = simple(bandwidth=1.0)
    assert update_seconds(layout(4, zero=1), machine) == pytest.approx(update_seconds(layout(4), machine) / 4)
    once, twice = (step_seconds(layout(recompute=how), simple())["computation"] for how in ("none", "block"))
    assert 1 < twice / once < 4 / 3


def test_tensor_parallelism_divides_a_block_but_not_its_layernorms():
    machine = simple(block_forward=FAST._replace(bandwidth=1.0))
    whole, half = (unit_seconds(layout(tp=tp), machine, "h.0", 1).forward for tp in (1, 2))
    array = 4 * 16 * MODEL.n_embd  # bytes of one array (N, C): 16 of them, of which GELU has 8
    assert (whole, half) == (16 * array, (8 + 8 / 2) * array)


def test_merged_micro_batches_have_gradients_of_their_own():
    machine = simple(micro_batch=1e6)
    one, four = (step_seconds(replace(layout(), merged=merged), machine)["computation"] for merged in (1, 4))
    assert four - one == pytest.approx(3e6 * (MODEL.n_layer + 1))  # the blocks and the head


def test_each_collective_that_a_rank_starts_while_it_computes_takes_time():
    slow = simple(background=Link(3.0, 0.0))
    terms = step_seconds(layout(2, zero=2), slow)
    assert terms["messages of gradients and parameters"] == 3 * 2 * (MODEL.n_layer + 2)
    assert "messages of gradients and parameters" not in step_seconds(layout(2), slow)


def test_a_pass_reads_the_parameters_once_for_any_number_of_sequences():
    machine = simple(block_forward=FAST._replace(parameter=1.0))
    one, four = (unit_seconds(layout(), machine, "h.0", count).forward for count in (1, 4))
    assert one == four == pytest.approx(12 * MODEL.n_embd**2, rel=0.1)  # and the vectors


def test_attention_takes_time_for_each_sequence_and_each_score_that_is_not_skipped():
    machine = simple(block_forward=FAST._replace(sequence=1e9, score=1.0), queries=4)
    scores = 4 * (4 + 8 + 12 + 16)  # of 4 tiles of 4 queries; 16 tokens
    assert unit_seconds(layout(), machine, "h.0", 3).forward == 3 * (1e9 + MODEL.n_head * scores)
    assert unit_seconds(layout(tp=2), machine, "h.0", 3).forward == 3 * (1e9 + MODEL.n_head / 2 * scores)


def test_w_actions_compute_the_gradients_of_matrices_and_b_actions_the_rest():
    head = unit_seconds(layout(), simple(), "head", 2)
    assert head.backward == 2 * head.forward == 2 * head.weights
    block = unit_seconds(layout(), simple(), "h.0", 2)
    assert block.backward == 2 * block.forward > 2 * block.weights  # attention has no parameters


def test_the_embedding_has_a_part_of_the_overhead_of_both_ends():
    machine = simple(ends_forward=Rate(5.0, float("inf")), ends_backward=Rate(10.0, float("inf")), embedding=0.2)
    embedding, head = (unit_seconds(layout(), machine, unit, 1) for unit in ("embedding", "head"))
    assert embedding == (1.0, 2.0, 0.0) and head == (4.0, 8.0, 0.0)


def test_the_update_of_each_unit_takes_time_on_the_rank_that_has_it():
    machine = simple(update=1.0)
    units = MODEL.n_layer + 2
    assert update_seconds(layout(), machine) == units and update_seconds(layout(4, zero=1), machine) == units / 4
    assert (
        update_seconds(layout(2, zero=2), machine) == units / 2 and update_seconds(layout(pp=2), machine) == units / 2
    )


def test_a_step_on_an_h100_takes_the_time_of_its_products_and_more():
    devices = Devices(1, 80e9, False, "bf16")
    each = estimate(Layout(PRESETS["gpt2"], ParallelConfig(), 64, 1024, 1, compute_bytes=2), devices, h100("bf16"))
    products = flops_per_token(PRESETS["gpt2"], 1024) * 64 * 1024 / (0.7 * 989e12)
    assert products < each.total < 1.5 * products

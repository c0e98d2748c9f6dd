"""The report: its recorded collectives, its parts that are saved and used again, its page in a browser, its errors."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.harness import speedups, training_runs
from benchmarks.harness.processes import run_to_end
from benchmarks.ranks import parity
from benchmarks.report import __main__ as report
from benchmarks.report import (
    measure,
    parts,
    prompt,
    recording,
    sections,
    units,
    views,
)  # fmt: skip
from benchmarks.report.charts import Chart
from benchmarks.report.page import GENERATOR, write_report
from benchmarks.report.runs import STAGE_NAMES, Runs
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.shipped import BOOK_WEIGHTS
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.pipeline.simulator import simulate
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS
from gpt2core.tensor import Tensor
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend
from testing.jobs import ROOT
from tests.support.browser import ALT, CONTROL, META, NAMES, SHIFT, Browser, BrowserError, find_browser

RANKS = 4

# -- recorded collectives ---------------------------------------------------------------------------------------------


pytestmark = pytest.mark.xdist_group("report")  # one page, and one browser


def sent(recorded, rank):
    """The bytes that a rank sends in a recording."""
    return sum(m["bytes"] for frame in recorded["frames"] for m in frame["messages"] if m["from"] == rank)


@pytest.mark.parametrize(
    "name, sends",  # sends: bytes that a rank sends, in arrays of n bytes, from the table in stage1_mpi/collectives.py
    [
        ("ring all-reduce", 2 * (RANKS - 1) / RANKS),
        ("reduce-scatter", (RANKS - 1) / RANKS),
        ("ZeRO-1", 2 * (RANKS - 1) / RANKS),
    ],
)
def test_a_recording_ends_with_the_right_slices_and_has_sent_the_bytes_of_the_formula(name, sends):
    recorded = recording.record(name, RANKS)
    assert [sent(recorded, rank) for rank in range(RANKS)] == [sends * recorded["bytes"]] * RANKS
    everyone, last = list(range(RANKS)), recorded["frames"][-1]["ranks"]
    for rank, state in enumerate(last):
        if name == "ring all-reduce":
            assert state["cells"]["gradients"] == [(slice, everyone) for slice in range(RANKS)]
        elif name == "reduce-scatter":
            assert state["cells"]["own slice of the sum"] == [(rank, everyone)]
        else:
            assert state["cells"]["gradients"][rank] == (rank, everyone)
            assert state["cells"]["parameters"] == [(slice, [slice]) for slice in range(RANKS)]
    slices = {
        state["bytes"][recording.BUFFERS] * RANKS / recorded["bytes"]
        for f in recorded["frames"]
        for state in f["ranks"]
    }
    assert max(slices) == (2 if name == "ring all-reduce" else 4) and all(each.is_integer() for each in slices)
    assert json.loads(json.dumps(recorded)) and recorded == recording.record(name, RANKS)  # threads change nothing


def test_the_memory_of_zero_1_is_that_of_a_trainer_with_zero_1():
    def optimizer_bytes(comm):
        parallel = ParallelConfig(dp="flat", zero=1)
        sizes = {"batch_size": RANKS, "seq_len": 4, "micro_batches": RANKS}
        return Trainer(PRESETS["nano"], [NumpyBackend()], world=comm, parallel=parallel, **sizes).optimizer.nbytes

    recorded = recording.record("ZeRO-1", RANKS)
    held = [state["bytes"]["AdamW moments of the own slice"] for state in recorded["frames"][0]["ranks"]]
    assert held == run_ranks(RANKS, optimizer_bytes) == [2 * recorded["bytes"] // RANKS] * RANKS


def test_a_slice_with_elements_of_two_slices_is_an_error():
    with pytest.raises(ValueError, match="several slices"):
        recording.decoded(np.array([1.0, 2.0], np.float32), RANKS)


def test_zero_3_has_two_whole_units_at_most_and_ends_with_the_shards_of_the_sum():
    recorded = recording.record("ZeRO-3", RANKS)
    frames, everyone = recorded["frames"], list(range(RANKS))
    phases = [frame["phase"] for frame in frames]
    units = [unit for unit, *_ in frames[0]["ranks"][0]["cells"]["parameters"]]
    assert [phase for phase in phases if phase.startswith("forward")] == [f"forward of {unit}" for unit in units]
    assert [phase for phase in phases if phase.startswith("backward")] == [
        f"backward of {unit}" for unit in units[::-1]
    ]
    for rank in everyone:
        states = [frame["ranks"][rank] for frame in frames]
        for state in states[1:-1]:
            whole = [unit for unit, ranks, part in state["cells"]["parameters"] if (ranks, part) == (everyone, None)]
            assert len(whole) == 1 and state["bytes"]["whole parameters"] > 0
        assert states[-1]["cells"]["gradients"] == [(unit, everyone, rank) for unit in units]
        assert states[-1]["bytes"]["whole parameters"] == states[-1]["bytes"]["whole gradients"] == 0
    gathered = {(m["slice"], m["array"]) for frame in frames for m in frame["messages"]}
    assert {unit for unit, array in gathered if array == "gradients"} == set(units)


@pytest.mark.parametrize(  # with 8 micro-batches on 4 ranks: forward takes 1, backward 2
    "name, chunks, length", [("gpipe", 1, 33), ("1f1b", 1, 33), ("interleaved", 2, 28.5), ("zero-bubble", 1, 27)]
)
def test_pipeline_views_have_the_times_and_peaks_of_the_simulator_in_units_of_all_layers_of_a_rank(
    name, chunks, length
):
    view, timeline = views.pipeline(name, 4, 8), simulate(SCHEDULES[name](4, 8), lambda kind, chunk: 1 / chunks)
    assert view["length"] == length
    assert [max(count for _, count in lane["live"]) * chunks for lane in view["lanes"]] == timeline.peaks
    assert all(lane["live"][-1] == [timeline.seconds, 0] for lane in view["lanes"])
    times = [(start, start + span) for lane in view["lanes"] for _, start, span, *_ in lane["events"]]
    assert sorted(times) == sorted(timeline.times.values())


def test_the_kernels_of_a_shipped_step_have_a_phase():
    for step in views.shipped_steps():
        events = [event for lane in step["lanes"] for event in lane["events"]]
        assert {event[3] for event in events} == {"forward", "backward", "optimizer", "collective"}
        assert {event[3] for event in events if "adamw" in event[0]} == {"optimizer"}


# -- the prompt -------------------------------------------------------------------------------------------------------


def test_the_recorded_prompt_has_the_numbers_of_the_model():
    recorded = prompt.record_prompt()
    checkpoint, tokenizer = load_checkpoint(BOOK_WEIGHTS), Tokenizer.load(BOOK_WEIGHTS / "tokenizer.json")
    backend = NumpyBackend()
    tensors = {name: Tensor(backend.asarray(np.float32(p)), backend) for name, p in checkpoint.parameters.items()}
    ids = np.array([tokenizer.encode(prompt.PROMPT)])
    want = GPT2(checkpoint.config, tensors).logits(ids).data[0]
    logits, scores = np.array(recorded["logits"]), np.array(recorded["scores"])
    np.testing.assert_allclose(logits[-1], want, atol=0.0051)  # rounded to two digits; the kernels differ
    assert "".join(recorded["tokens"]) == prompt.PROMPT and scores.shape == (4, 6, ids.size, ids.size)
    assert np.array(recorded["norms"]).shape == (9, ids.size)


def test_without_the_shipped_weights_the_page_says_why_there_is_no_prompt(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "record_prompt", lambda: prompt.record_prompt(weights=tmp_path))
    (part,) = (part for part in measure.parts_of("nano", 2) if part.name == "prompt")
    records, failures = parts.run_parts([part], tmp_path)
    assert failures == ["prompt"] and records["prompt"]["missing"].startswith(f"it failed: {tmp_path}")


# -- traces -----------------------------------------------------------------------------------------------------------


def event(name, start, duration, category, lane=0, rank=0, **details):
    return {
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": duration,
        "cat": category,
        "pid": rank,
        "tid": lane,
        "args": details,
    }


EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
    for rank in (0, 1)
    for lane, name in enumerate(("worker 0", "all ranks"))
] + [
    event("step 0", 0, 100, "step", lane=2),
    event("embedding_forward", 10, 5, "forward"),
    event("step 1", 100, 100, "step", lane=2),
    *(
        each
        for rank in (0, 1)
        for each in (
            event("forward", 100, 40, "phase", rank=rank),
            event("mlp_forward", 105, 30, "forward", rank=rank, module="h.0.mlp"),
            event("linear_forward", 110, 20, "forward", rank=rank, module="h.0.mlp.c_fc"),
            event("attention_backward", 145, 20, "backward", rank=rank),
            event("wait: all_reduce", 165, 15, "wait", rank=rank, bytes=400),
            event("all_reduce", 150, 30, "collective", lane=1, rank=rank, bytes=400, ranks=2),
        )
    ),
]  # fmt: skip


def test_the_last_step_of_a_trace_is_read():
    step = views.step_of(EVENTS)
    assert (step["name"], round(1e6 * step["seconds"]), len(step["lanes"])) == ("step 1", 100, 4)
    assert step["lanes"][0]["events"][0] == ["forward", 0, 40, "phase", "", 0]
    view = views.training_step("", step)
    assert [lane["name"] for lane in view["lanes"]] == ["worker 0", "collectives of all ranks"] * 2
    assert "; bars shorter than 0.0200" in view["text"]


def test_the_trace_that_training_writes_can_be_read(train, corpus, tmp_path):
    flags = ("--preset", "nano", "--sample", 0, "--data", corpus, "--steps", 2, "--threads", 2)
    assert train(*flags, "--trace", tmp_path / "trace.json").code == 0
    step = views.read_step(tmp_path / "trace.json")
    assert step["name"] == "step 1" and [lane["name"] for lane in step["lanes"]] == ["worker 0", "worker 1"]
    names = {name for lane in step["lanes"] for name, *_ in lane["events"]}
    assert {"linear_forward", "attention_backward", "adamw_step"} <= names


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_saved_part_is_used_again_unless_its_arguments_or_its_file_changed(capsys, tmp_path):
    calls = []

    def count(*arguments):
        calls.append(arguments)
        return {"value": len(calls)}

    def value(part, fresh=False):
        records, failures = parts.run_parts([part], tmp_path, fresh=fresh)
        assert not failures
        return records[part.name]["results"]["value"]

    part = parts.Part("a", "part a", count, [2])
    assert [value(part), value(part)] == [1, 1] and "used again" in capsys.readouterr().out
    assert value(parts.Part("a", "part a", count, [3])) == 2
    assert value(part) == 3
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text()[:-30])  # an interrupted copy
    assert value(part) == 4
    assert value(part, fresh=True) == 5


def test_a_skipped_and_a_failed_part_do_not_stop_the_others(capsys, tmp_path):
    def skip():
        raise ConfigError("no MPI was found")

    def fail():
        run_to_end("training", [sys.executable, "-c", "raise SystemExit('error: no memory')"], 1, 60)

    chosen = [
        parts.Part("a", "part a", skip),
        parts.Part("b", "part b", fail),
        parts.Part("c", "part c", lambda: 3),
    ]
    records, failures = parts.run_parts(chosen, tmp_path)
    assert records["c"]["results"] == 3 and failures == ["b"] and records["a"]["missing"] == "no MPI was found"
    why = records["b"]["missing"]
    assert why.startswith("it failed: 'training' ended with status 1; ") and "error: no memory" in why
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "1/3 part a: skipped: no MPI was found" and second.startswith("2/3 part b: it failed: ")


def test_without_mpi_the_parts_that_need_it_are_skipped(capsys, tmp_path, monkeypatch):
    def no_mpi():
        raise ConfigError("mpi4py is not installed; pip install mpi4py mpich")

    monkeypatch.setattr(training_runs, "choose", no_mpi)
    chosen = [part for part in measure.parts_of("nano", 2) if "1" in part.name]
    records, failures = parts.run_parts(chosen, tmp_path)
    assert len(chosen) == 4 and records.keys() == {part.name for part in chosen} and not failures
    assert {each["missing"] for each in records.values()} == {"mpi4py is not installed; pip install mpi4py mpich"}


def test_with_gpus_stages_2_and_3_are_measured(monkeypatch):
    names = [part.name for part in measure.parts_of("paper", 50)]
    monkeypatch.setattr(measure, "nvidia_smi", lambda *fields: [["NVIDIA H200"]] * 3)
    with_gpus = {part.name: part.arguments for part in measure.parts_of("paper", 50)}
    assert with_gpus.keys() - set(names) == {
        f"{kind}{stage}" for kind in ("train", "infer", "trace") for stage in (2, 3)
    }
    assert with_gpus.keys() > set(names) and with_gpus["train3"][1] == 2  # a power of two


def test_the_new_tokens_are_found_in_the_output_of_a_command():
    assert (
        measure.continuation("Prompt (2 tokens):\na b\n\nContinuation:\nc d\ne\n\nprompt tokens 2 | new\n") == "c d e"
    )


# -- disturbed measurements -------------------------------------------------------------------------------------------


def test_a_speed_up_above_its_ideal_is_marked_and_not_stated_as_a_result():
    records = small_records()
    records["ranks"]["results"] = [3.96, 1.0]  # seconds of a step
    for name, seconds in {"infer0": 7.48, "infer1": 1.0}.items():
        records[name] = records["infer0"] | {"results": {"ranks": 2, "seconds": seconds, "sample": ""}}
    runs = Runs(records, "nano", 4)
    chart, *_ = sections.gain_chart(runs)
    rows = {row.label.partition(" (")[0]: row for row in chart.rows}
    above = "disturbed: the ratio {} of the times is above the ideal {}".format
    assert rows["serial to MPI, training"].marks[-1] == (3.96, above(3.96, 2), "c1", "X")
    assert rows["serial to MPI, inference"].marks[-1] == (7.48, above(7.48, 1), "c1", "X")
    assert rows["serial to MPI, training"].text.endswith("→ disturbed (3.96)")
    assert "disturbed (" in rows["serial to CUDA, inference"].text  # also relative to the disturbed run of stage 0
    assert "X" in {mark for row in chart.rows for *_, mark in row.marks} and "disturbed (3.96)" in chart.inline()


def test_speed_ups_up_to_their_ideals_are_results_beside_their_ideals():
    runs = Runs(small_records(), "nano", 4)
    row = sections.gain_chart(runs)[0].rows[0]
    assert row.marks[2:] == [(2, "ideal: 2", "ink", "|"), (2.0 / 1.05, "ours: 1.9 times as fast", "c0", "o")]
    assert row.text == "11.9 or 1.19 → 1.90"
    hardware = {"memory_bytes": 1}
    assert len(sections.machine(hardware, runs)[1].rows) == len(runs.records)
    for cores in (0.1, None):
        for record in runs.records.values():
            record["other_cores"] = cores
        assert len(sections.machine(hardware, runs)) == 1
    noise = speedups.speedups(2.0, {"two ranks": (0.96, 2)})  # 2.08: noise of less than 5 %
    assert str(noise["two ranks"]) == "2.08 times as fast (ideal: 2)" and noise["two ranks"].cell("2.08") == "2.08"
    assert speedups.Speedup(float("nan"), 2).disturbed


@pytest.mark.parametrize("factor, lines", [(1 + 1e-4, 1), (1.1, 2)])
def test_curves_of_ours_that_cover_each_other_are_one_line_of_the_chart(factor, lines):
    records = small_records()
    records["train1"]["results"]["losses"] = [factor * loss for loss in records["train0"]["results"]["losses"]]
    runs = Runs(records, "nano", 4)
    drawn = [line.label for line in sections.loss_chart(runs)[0].lines]
    assert drawn[:4] == [f"paper, {name}" for name in ("serial", "MPI", "CUDA", "MPI and CUDA")]
    assert len(drawn[4:]) == lines and (drawn[4:] == ["our 2 programs: equal curves"]) == (lines == 1)
    assert "difference between our curves is" in sections.equality(runs)


def test_a_training_with_fewer_steps_than_the_papers_is_marked_in_table_1_and_in_the_chart():
    table = sections.table_1(Runs(small_records(), "paper", 4))
    assert [cell.text for cell in table.rows[1][1:3]] == ["1,288 or 12,878", "9.50"]
    assert table.head[1:3] == ["paper, 50 steps (s)", "ours, 4 steps (s)"]
    lines = sections.loss_chart(Runs(small_records(), "paper", 4))[0].lines
    assert [len(line.y) for line in lines] == [50] * 4 + [4, 4, 50, 50]  # the shipped runs show how ours continue


@pytest.mark.parametrize("most", [1, 2])
def test_a_fresh_record_of_gpu_parity_has_the_curves_of_stages_2_and_3(capsys, monkeypatch, most):
    trained, saved, draw = {}, [], np.random.default_rng().random

    def train(title, *arguments, **options):
        trained[title, options["precision"]] = losses = list(1 + 1e-4 * draw(3))
        log = [{"step": k, "loss": each, "seconds": 1.0, "parameters_sha256": ""} for k, each in enumerate(losses)]
        return log, ""

    monkeypatch.setattr(parity, "train", train)
    monkeypatch.setattr(parity, "save", lambda results, *arguments, **options: saved.append(results))
    parity.main(["--stage", "3", "--presets", "tiny", "paper", "--ranks", *["1", "2"][:most]])
    record = {"machine": "a GPU", "date": "", "commit": "", "results": saved[0]}
    monkeypatch.setattr("benchmarks.report.runs.load", lambda name: record)
    curves = {label: run.value for label, run in Runs({}, "paper", 50).curves().items()}
    want = {"stage 2": "paper, stage2_cuda", "stage 3": "paper, 2 ranks --dp bucket --deterministic"}
    assert curves == {label: trained[title, "fp32"] for label, title in list(want.items())[:most]}


@pytest.mark.skipif(speedups.busy_seconds() is None, reason="this system has no /proc/stat")
def test_the_cpu_time_of_other_programs_is_counted_and_that_of_own_programs_is_not():
    burn = [sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"]
    others = speedups.OtherPrograms()
    subprocess.run(burn, check=True)
    own, elapsed = sum(os.times()[:4]) - others.own, time.monotonic() - others.started
    everything = (speedups.busy_seconds() - others.all) / elapsed
    assert own > 0.95  # the child is counted as own
    # /proc/stat counts ticks of 10 ms, and the values are read one after another
    assert others.cores() == pytest.approx(max(0, everything - own / elapsed), abs=0.2)


def test_the_load_of_a_part_is_saved_and_printed(capsys, tmp_path, monkeypatch):
    for cores, printed in ((1.26, "part a: 0 s, measured while other programs used 1.3 cores"), (None, "part a: 0 s")):
        monkeypatch.setattr(parts.OtherPrograms, "cores", lambda self, cores=cores: cores)
        parts.run_parts([parts.Part("a", "part a", lambda: 3)], tmp_path, fresh=True)
        assert json.loads((tmp_path / "a.json").read_text())["other_cores"] == cores
        assert capsys.readouterr().out == f"1/1 {printed}\n"


# -- the page in a browser --------------------------------------------------------------------------------------------


def small_records():
    """{name: record} with made-up measurements of every part."""
    losses = [5.0 - 0.1 * step for step in range(4)]
    training = {
        "ranks": 2,
        "losses": losses,
        "seconds": 9.5,
        "sample": "the <b>cats</b> & all",
    }
    inference = {"ranks": 2, "seconds": 1.5, "sample": "the loss"}
    step = views.step_of(EVENTS)
    results = {
        "recordings": recording.record_all(),
        "prompt": prompt.record_prompt(),
        **{name: training for name in ("train0", "train1")},
        **{name: inference for name in ("infer0", "infer1")},
        **{name: step for name in ("trace0", "trace1", "trace1-bucket")},
        "ranks": [2.0, 1.05],
    }
    common = {"times": True, "other_cores": 1.7}
    return {
        name: {"title": f"title of {name}", "results": json.loads(json.dumps(each)), **common}
        for name, each in results.items()
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The path of a report with small_records(); one part is missing."""
    folder = tmp_path_factory.mktemp("report")
    missing = {"infer2": {"title": "inference, stage 2", "missing": "no MPI was found <here>"}}
    return write_report(folder, Runs(small_records() | missing, "nano", 4))


@pytest.fixture(scope="module")
def browser():
    try:
        opened = Browser().__enter__()
    except BrowserError as error:
        pytest.skip(str(error))
    with contextlib.closing(opened):
        yield opened


# the number of pictures that are visible in each visible figure
PICTURES = """[...document.querySelectorAll("figure, .drawing, [data-part=head], .heads button")]
  .filter(each => each.checkVisibility()).map(each => [...each.querySelectorAll("svg, .ranks")].filter(picture => {
    const box = picture.getBoundingClientRect();
    return box.width > 0 && box.height > 0;
  }).length)"""
CHOOSE = """(number => { const choice = document.getElementById("player-view"); choice.value = number;
  choice.dispatchEvent(new Event("change")); return choice.options[number].text; })"""
FRAME = 'Number(document.getElementById("step-player").dataset.frame)'
LAST = 'Number(document.querySelector("#step-player input").max)'
PLAY = """new Promise((done, fail) => {
  const root = document.getElementById("step-player"), frames = [], slider = root.querySelector("input");
  root.dataset.milliseconds = 1;
  new MutationObserver(() => {
    frames.push(Number(root.dataset.frame));
    if (frames.at(-1) === Number(slider.max)) done(frames);
  }).observe(root, { attributeFilter: ["data-frame"] });
  setTimeout(() => fail(new Error("stopped at frame " + frames.at(-1))), 30000);
  root.querySelector("[data-action=play]").click();
})"""


@pytest.mark.parametrize("width, dark", [pytest.param(1280, False, marks=pytest.mark.long), (390, True)])
def test_the_page_shows_every_picture_without_errors_and_outside_requests(browser, page, width, dark):
    browser.open(page.as_uri(), width, dark=dark)
    pictures = browser.evaluate(PICTURES)
    assert len(pictures) > 24 and set(pictures) == {1}
    assert browser.errors() == [] and browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") == width  # no horizontal scroll of the page
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


# the texts of all charts that are outside of their chart, and the pairs of texts that touch
TOUCHING = """[...document.querySelectorAll(".chart")].filter(each => each.checkVisibility()).flatMap(chart => {
  const frame = chart.getBoundingClientRect();
  const boxes = [...chart.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
  const outside = boxes.filter(([, a]) => a.left < frame.left - 1 || a.right > frame.right + 1);
  const touch = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3; // a box is higher than its letters
  const pairs = boxes.flatMap(([name, a], k) => boxes.slice(k + 1).filter(([, b]) => touch(a, b)).map(([other]) =>
    `${name} / ${other}`));
  return [...outside.map(([name]) => name), ...pairs];
})"""


@pytest.mark.parametrize("width", [1400, 390])
def test_the_texts_of_a_chart_are_inside_and_do_not_touch(browser, page, width):
    browser.open(page.as_uri(), width)
    browser.evaluate("document.querySelectorAll('.panel').forEach(each => { each.style.display = 'block' })")
    assert browser.evaluate(TOUCHING) == []


@pytest.mark.parametrize("stage", range(4))
def test_a_tab_shows_the_data_flow_of_a_stage_and_marks_what_it_adds(browser, page, stage):
    browser.open(page.as_uri(), 1280)
    browser.evaluate('document.getElementById("figures").scrollIntoView()')
    browser.evaluate('document.getElementById("tab0").focus()')
    for _ in range(stage):
        browser.press("ArrowRight")
    panel = f'document.getElementById("panel{stage}")'
    shown = '[...document.querySelectorAll("#figures .panel")].map(each => each.checkVisibility())'
    assert browser.evaluate(shown) == [number == stage for number in range(4)]
    assert browser.evaluate(f'{panel}.querySelector("h3").textContent') == f"Figure {stage + 2}: {STAGE_NAMES[stage]}"
    added = browser.evaluate(f'[...{panel}.querySelectorAll(".added b")].map(each => each.textContent)')
    assert set(added) == [set(), {"MPI"}, {"CUDA"}, {"MPI", "CUDA", "MPI and CUDA"}][stage]
    rows = sum(len(rows) for rows in sections.flow(stage).values())
    assert browser.evaluate(f'{panel}.querySelectorAll("li").length') == rows


def test_the_player_plays_views_of_each_kind_from_the_first_to_the_last_frame(browser, page):
    browser.open(page.as_uri())
    count = browser.evaluate('document.getElementById("player-view").options.length')
    titles = [browser.evaluate(f"{CHOOSE}({number})") for number in range(count)]
    assert {"ring all-reduce", "reduce-scatter", "ZeRO-1", "ZeRO-3", "pipeline 1f1b"} <= set(titles) and count >= 8 + 3
    for number in [titles.index("ZeRO-3"), titles.index("pipeline 1f1b"), count - 1, *range(3)]:  # of each kind
        browser.evaluate(f"{CHOOSE}({number})")
        last = browser.evaluate(LAST)
        assert browser.evaluate(PLAY) == list(range(1, last + 1))
        assert browser.evaluate('document.querySelector("[data-action=play]").textContent') == "Play"  # it has stopped
    assert browser.errors() == []


def test_the_player_is_used_with_the_keyboard_and_shows_slices_and_memory(browser, page):
    browser.open(page.as_uri())
    titles = browser.evaluate('[...document.getElementById("player-view").options].map(each => each.text)')
    browser.evaluate(f"{CHOOSE}({titles.index('ring all-reduce')})")
    browser.evaluate('document.getElementById("step-player").focus()')
    outline = 'getComputedStyle(document.getElementById("step-player")).outlineStyle'
    frames = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
        browser.press(key)
        frames.append(browser.evaluate(FRAME))
    assert frames == [1, 2, 1, 6, 6, 0] and browser.evaluate(outline) == "solid"
    text = browser.evaluate('document.getElementById("step-player").textContent')
    assert "rank 0 to rank 1: slice 3 of rank 0, 65.54 kB" in text and "in memory: 393.2 kB" in text  # also in SVG
    browser.evaluate(f"{CHOOSE}({titles.index('reduce-scatter')})")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    drawn = '[...document.querySelectorAll("#step-player .rank")].map(each => each.querySelectorAll(".cell").length)'
    tips = '[...document.querySelectorAll("#step-player progress")].map(each => each.dataset.tip).join()'
    assert browser.evaluate(drawn) == [RANKS + 1 + 4] * RANKS
    assert browser.evaluate(tips).count("temporary buffers 262.1 kB") == RANKS
    browser.evaluate(f"{CHOOSE}({titles.index('ring all-reduce')})")
    browser.press("End")
    sums = (
        '[...document.querySelectorAll("#step-player .cell")].filter(each => each.dataset.slice.endsWith(" 0,1,2,3"))'
    )
    assert browser.evaluate(f"{sums}.length") == RANKS * RANKS


PLAYER = 'document.getElementById("step-player")'
STATE = f"""[Number({PLAYER}.dataset.frame), {PLAYER}.querySelector("[data-action=play]").textContent,
  document.getElementById("player-view").selectedIndex, Math.round(scrollY)]"""


def opened_player(browser, page):
    """Open the page with the player in view and the focus on no element; returns the function pressed(*keys).

    pressed() presses the keys and returns [frame, text of the button play, number of the view, scroll position].
    """
    browser.open(page.as_uri())
    browser.evaluate(f"{PLAYER}.dataset.milliseconds = 1e6")  # a playing player stays at its frame
    browser.evaluate(f"{PLAYER}.scrollIntoView()")

    def pressed(*keys, **options):
        for key in keys:
            browser.press(key, **options)
        return browser.evaluate(STATE)

    return pressed


def assert_documented_keys(pressed):
    """The keys that the page documents, from frame 0 of the chosen view: no key changes the view or scrolls."""
    _, _, *place = start = pressed()
    assert start[:2] == [0, "Play"]
    last = pressed("End")[0]
    assert last > 1
    steps = {"Home": (0, "Play"), "ArrowRight": (1, "Play"), " ": (1, "Pause"), "ArrowLeft": (0, "Play")}
    assert {key: tuple(pressed(key)) for key in steps} == {key: (*state, *place) for key, state in steps.items()}
    assert [pressed(" ")[1], pressed(" ")[1]] == ["Pause", "Play"]
    assert pressed(*"  ", repeat=True) == start  # a held space bar does not change between playing and pausing


@pytest.mark.parametrize("element", [None, PLAYER, f"{PLAYER}.querySelector('input')"])
def test_the_keys_work_with_the_focus_on_the_page_the_player_and_the_slider(browser, page, element):
    pressed = opened_player(browser, page)
    browser.evaluate(f"{element}.focus({{ preventScroll: true }})" if element else "document.activeElement.blur()")
    assert_documented_keys(pressed)


def test_the_keys_work_right_after_a_link_leads_to_the_player(browser, page):
    pressed = opened_player(browser, page)
    browser.evaluate("scrollTo(0, 0)")
    browser.click('a[href="#player"]')
    assert_documented_keys(pressed)


def test_the_keys_work_after_a_choice_while_the_player_was_out_of_view(browser, page):
    pressed = opened_player(browser, page)
    browser.evaluate("scrollTo(0, 0)")
    browser.evaluate(f"{CHOOSE}(1)")
    assert browser.evaluate("document.activeElement === document.body")
    assert_documented_keys(pressed)


@pytest.mark.parametrize("how", ["mouse", "open list", "closed list"])
def test_the_keys_work_right_after_the_choice_of_a_view(browser, page, how):
    pressed = opened_player(browser, page)
    if how == "mouse":
        browser.click("#player-view")
    else:
        browser.evaluate('document.getElementById("player-view").focus({ preventScroll: true })')
    if how == "open list":
        browser.press("Enter")
    opened = browser.evaluate('document.getElementById("player-view").matches(":open")')
    assert opened == (how != "closed list")
    pressed("ArrowDown")
    if opened:
        pressed("ArrowDown", "Enter")
    assert pressed()[2] >= 1 and not browser.evaluate('document.getElementById("player-view").matches(":open")')
    assert_documented_keys(pressed)
    view = pressed()[2]
    assert [pressed("ArrowDown")[2], pressed("ArrowUp")[2]] == [view + 1, view]  # the list can still be used
    pressed("Enter")
    assert browser.evaluate('document.getElementById("player-view").matches(":open")')
    pressed("Escape")


def test_a_button_is_pressed_by_the_space_bar_and_after_a_click_the_space_bar_plays(browser, page):
    pressed = opened_player(browser, page)
    browser.click("[data-action=next]")
    assert [pressed()[:2], pressed(" ")[:2], pressed(" ")[:2]] == [[1, "Play"], [1, "Pause"], [1, "Play"]]
    browser.evaluate('document.querySelector("[data-action=next]").focus()')
    assert [pressed(" ")[:2], pressed("Enter")[:2], pressed("ArrowLeft")[:2]] == [[2, "Play"], [3, "Play"], [2, "Play"]]


def test_the_player_takes_no_key_with_a_modifier_of_another_element_or_out_of_view(browser, page):
    pressed = opened_player(browser, page)
    keys = "ArrowRight", "End", " "
    pressed("ArrowRight", "ArrowRight")
    for modifier in (ALT, CONTROL, META, SHIFT):
        for key in keys:
            assert pressed(key, modifiers=modifier)[:2] == [2, "Play"]
    for key in keys:
        browser.evaluate('scrollTo({top: 0, behavior: "instant"})')
        assert pressed(key)[:2] == [2, "Play"]
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    browser.open(page.as_uri())
    browser.evaluate(f"{PLAYER}.scrollIntoView()")
    for tag in ("input", "textarea", "a"):
        added = f'(each => {{ each.id = "other"; each.href = "#player"; {PLAYER}.before(each); each.focus() }})'
        browser.evaluate(f'{added}(document.createElement("{tag}"))')
        assert pressed(*keys)[:2] == [0, "Play"]
        browser.evaluate('document.getElementById("other").remove()')
    assert browser.errors() == []


# texts of the cells of the player that are wider than their cells
CLIPPED = """[...document.querySelectorAll("#step-player .cell")].filter(cell =>
  cell.scrollWidth > cell.clientWidth).map(cell => cell.textContent)"""


@pytest.mark.parametrize("title", ["ring all-reduce", "reduce-scatter", "ZeRO-1", "ZeRO-3"])
def test_all_ranks_and_the_messages_of_a_frame_fit_a_projector(browser, page, title):
    browser.open(page.as_uri(), 1280, 720)
    titles = browser.evaluate('[...document.getElementById("player-view").options].map(each => each.text)')
    browser.evaluate(f"{CHOOSE}({titles.index(title)})")
    root = 'document.getElementById("step-player")'
    browser.evaluate(f"{root}.focus()")
    for _ in range(browser.evaluate(LAST)):
        browser.press("ArrowRight")
        assert browser.evaluate(f"{root}.getBoundingClientRect().height") <= 720
        assert browser.evaluate(CLIPPED) == []


def test_the_table_of_a_training_step_counts_the_time_of_each_kernel_and_each_wait_once(browser, page):
    browser.open(page.as_uri(), 1280, 900)
    titles = browser.evaluate('[...document.getElementById("player-view").options].map(each => each.text)')
    browser.evaluate(f"{CHOOSE}({titles.index('title of trace1, preset nano, this machine')})")
    rows = """[...document.querySelectorAll("#step-totals tbody tr")].map(each =>
      [...each.cells].map(cell => cell.innerText.replaceAll("\u200b", "")))"""
    assert browser.evaluate(rows) == [  # mlp_forward without linear_forward, only the wait of all_reduce, mean of ranks
        ["linear_forward", "0.0200", "20.0", "1", ""],
        ["attention_backward", "0.0200", "20.0", "1", ""],
        ["wait: all_reduce", "0.0150", "15.0", "1", "400"],
        ["mlp_forward", "0.0100", "10.0", "1", ""],
    ]
    legend = '[...document.querySelectorAll("#step-player .legend > span")].map(each => each.textContent)'
    assert browser.evaluate(legend) == ["forward", "backward", "communication", "wait", "phase, around other bars"]
    browser.evaluate(f"{CHOOSE}(0)")
    assert browser.evaluate(rows) == []


TIP = 'document.querySelector(".tip.shown")?.textContent'


def point_at(browser, element):
    """Move the pointer to the centre of an element, and return the text of the tooltip."""
    x, y = browser.evaluate(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])({element}.getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    return browser.evaluate(TIP)


def test_pointing_at_a_chart_a_bar_or_a_slice_shows_its_numbers(browser, page):
    browser.open(page.as_uri(), 1280, 900)
    box = browser.evaluate('document.querySelector("#overview .chart.wide").getBoundingClientRect().toJSON()')
    x, y, text = json.loads(browser.evaluate('document.querySelector("#overview .chart.wide").dataset.points'))[3]
    place = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
    assert browser.evaluate(TIP) == text == "paper, serial: 4.498 at step 3"
    pressed = opened_player(browser, page)
    assert "rank 0, gradients, 2: rank 0" == point_at(browser, f'{PLAYER}.querySelectorAll(".cell")[2]')
    assert "in memory: 393.2 kB (gradients" in point_at(browser, f'{PLAYER}.querySelector("progress")')
    titles = browser.evaluate('[...document.getElementById("player-view").options].map(each => each.text)')
    browser.evaluate(f"{CHOOSE}({titles.index('pipeline gpipe')})")
    assert point_at(browser, f'{PLAYER}.querySelector(".track .event")') == "forward of micro-batch 0, chunk 0, 1 unit"
    inside = f'{PLAYER}.querySelector(".track > div").getBoundingClientRect().width'
    whole = browser.evaluate(inside)
    browser.click('[data-action="in"]')
    assert browser.evaluate(inside) == pytest.approx(2 * whole)
    pressed("End")
    left, right = (f'{PLAYER}.querySelector("{each}").getBoundingClientRect()' for each in (".later", ".track"))
    assert abs(browser.evaluate(f"{left}.left - {right}.right")) < 4  # the window follows the line
    browser.click('[data-action="out"]')
    assert browser.evaluate(inside) == whole and browser.errors() == []


MOVING = f"{PLAYER}.getAnimations({{ subtree: true }}).length"


@pytest.mark.parametrize("reduced", [False, True])
def test_slices_move_only_if_the_reader_did_not_ask_for_less_motion(browser, page, reduced):
    pressed = opened_player(browser, page)
    browser.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"}],
    )
    pressed("ArrowRight")
    assert (browser.evaluate(MOVING) > 0) != reduced


def test_the_controls_of_the_player_stay_in_view_on_a_phone(browser, page):
    browser.open(page.as_uri(), 390, 600)
    for kind in ("ZeRO-1", "title of trace1, preset nano, this machine"):
        titles = browser.evaluate('[...document.getElementById("player-view").options].map(each => each.text)')
        browser.evaluate(f"{CHOOSE}({titles.index(kind)})")
        browser.evaluate(f"{PLAYER}.scrollIntoView({{ behavior: 'instant' }})")
        for selector in ("[data-action=play]", ".controls input"):
            box = browser.evaluate(f'{PLAYER}.querySelector("{selector}").getBoundingClientRect().toJSON()')
            assert 0 <= box["top"] and box["bottom"] <= 600


PROBABILITIES = """[...document.querySelectorAll("#prompt-view .next li")].map(each => {
  const [token, , share] = each.children;
  return [token.textContent, parseFloat(share.textContent) / 100];
})"""
SET = """((name, value) => { const each = document.querySelector(`#prompt-view [name="${name}"]`); each.value = value;
  each.dispatchEvent(new Event("input", { bubbles: true })); })"""


def test_the_page_computes_the_probabilities_of_the_next_token(browser, page):
    browser.open(page.as_uri())
    browser.evaluate('document.getElementById("prompt").scrollIntoView()')
    recorded = small_records()["prompt"]["results"]
    for token, temperature, k in ((11, 1.0, 8), (2, 0.5, 8), (2, 1.6, 3)):
        browser.click(f'[data-token="{token}"]')
        browser.evaluate(f"{SET}('temperature', {temperature})")
        browser.evaluate(f"{SET}('k', {k})")
        logits = np.array(recorded["logits"])[-1, token]
        best = np.argsort(-logits, kind="stable")[: [1, 2, 3, 5, 10, 20, 50, 100, len(logits)][k]]
        shares = np.exp((logits[best] - logits.max()) / temperature)
        shares /= shares.sum()
        shown = browser.evaluate(PROBABILITIES)
        assert len(shown) == min(10, len(best))
        for (text, share), want, id in zip(shown, shares, best, strict=False):
            assert text == recorded["vocabulary"][id].replace(" ", "·").replace("\n", "↵")
            assert share == pytest.approx(want, rel=0.06)  # two digits
    assert browser.errors() == []


def test_the_mask_changes_the_attention_of_the_page_and_a_click_chooses_the_head(browser, page):
    browser.open(page.as_uri(), 1280, 1200)
    browser.evaluate('document.getElementById("prompt").scrollIntoView()')
    scores = np.array(small_records()["prompt"]["results"]["scores"])[2, 3]
    browser.click('[data-head="2,3"]')
    title = 'document.querySelector("[data-part=head-title]").textContent'
    assert browser.evaluate(title) == "layer 3, head 4"
    opacities = (
        '[...document.querySelectorAll("[data-part=head] [data-tip]")].map(each => each.getAttribute("fill-opacity"))'
    )
    for masked in (True, False):
        kept = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf) if masked else scores
        want = np.exp(kept - kept.max(1, keepdims=True))
        want /= want.sum(1, keepdims=True)
        got = np.array(browser.evaluate(opacities), float).reshape(want.shape)
        np.testing.assert_allclose(got, want, atol=0.0051)  # two digits
        browser.click('[name="mask"]')


def test_the_side_navigation_marks_the_section_in_view(browser, page):
    browser.open(page.as_uri(), 1400, 900)
    current = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
      done([...document.querySelectorAll("nav [aria-current]")].map(each => each.hash)))))"""
    assert browser.evaluate(current) == ["#overview"]
    browser.click('nav a[href="#gains"]')
    assert browser.evaluate(current) == ["#gains"]


def test_every_control_and_picture_has_a_name(browser, page):
    browser.open(page.as_uri())
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "link", "slider", "checkbox", "combobox", "radio", "image", "region", "navigation", "radiogroup"}
    found = [(node["role"]["value"], node["name"]["value"]) for node in nodes if node["role"]["value"] in named]
    assert {role for role, _ in found} == named and [role for role, name in found if not name] == []


def test_the_page_can_be_printed(browser, page):
    browser.open(page.as_uri())
    assert browser.call("Page.printToPDF")["data"].startswith("JVBER")  # "%PDF" in base 64


def test_the_page_and_its_picture_files_are_complete(page):
    text = page.read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert len(text) < 2e6
    assert "&lt;b&gt;cats&lt;/b&gt; &amp; all" in text and "no MPI was found &lt;here&gt;" in text  # escaped
    assert "4 training steps of preset nano" in text and "measured while other programs used 1.7 cores" in text
    assert "its Table 1 has 1,287.76 s" in text and "15.6 % less" in text
    assert "inference not measured: no GPU was found" in text and "there is no training of stage 2: no GPU was" in text
    assert "results/ has no run with this preset and number of steps" in text
    assert "Stage 0 and stage 1 on 2 ranks have the same losses, bit for bit." in text
    assert "paper&#39;s four differ by 19 % at" in text and text.count("<math ") > 4
    assert "disturbed (" not in text
    names = {path.name for path in page.parent.iterdir()}
    assert {"loss.svg", "loss.png", "loss-dark.png", "gains.svg"} <= names


def test_the_rows_of_table_1_have_the_names_of_the_stages(page):
    rows = page.read_text(encoding="utf-8").partition('id="table1"')[2].partition("</table>")[0].split("<tr")[2:]
    assert [re.search(r">([^<]+)</t[dh]>", row)[1] for row in rows][:4] == list(STAGE_NAMES.values())


def test_a_number_and_its_unit_are_in_one_line():
    texts = [units.seconds(95.23), units.seconds(1.234e-3), units.amount(43.6e6), units.amount(40)]
    assert [text.replace("\N{NO-BREAK SPACE}", "~") for text in texts] == ["95.2~s", "1.23~ms", "43.6~MB", "40~B"]


def test_a_missing_browser_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BrowserError, match="apt install chromium") as error:
        find_browser()
    assert all(name in str(error.value) for name in NAMES) and "\n" not in str(error.value)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv) -> (exit code, standard output, standard error) of the command, which writes no picture files."""
    monkeypatch.setattr(Chart, "write", lambda chart, folder: None)

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            report.main([str(word) for word in argv])
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_wrong_output_directory_is_one_line_and_changes_no_file(run, tmp_path):
    (tmp_path / "file").write_text("a text")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<!doctype html><title>my site</title>")
    for folder, message in (
        (tmp_path / "file", "cannot be written (Not a directory): choose another directory"),
        (tmp_path / "site", "is not a report of this program: choose another directory"),
    ):
        code, out, err = run("--out", folder, "--no-measure")
        assert code == 2 and out == "" and err.startswith(f"error: --out {folder}: ") and err.endswith(f"{message}\n")
        assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "a text"
    assert (tmp_path / "site" / "index.html").read_text() == "<!doctype html><title>my site</title>"


def test_a_missing_package_is_one_line_before_the_measurements(run, tmp_path, monkeypatch):
    for name, loaded in (("jinja2", None), ("latex2mathml.converter", None)):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, loaded)
            code, out, err = run("--out", tmp_path)
        assert (code, out) == (2, "") and err == f"error: {name} is not installed; pip install jinja2 latex2mathml\n"


def test_without_measurements_the_page_has_the_shipped_results_and_says_what_is_missing(run, tmp_path):
    (tmp_path / "index.html").write_text(f"<!doctype html>{GENERATOR}")  # an older report, which is replaced
    code, out, err = run("--out", tmp_path, "--no-measure")
    assert (code, err) == (0, "") and f"written: {tmp_path / 'index.html'}" in out
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '"title":"ring all-reduce"' in text and '"title":"ZeRO-1"' in text  # the player shows them without times
    assert re.sub("</?code>", "", text).count("--no-measure was given") > 10 and "4 x H200, 2026-" in text
    assert "bf16; 2 of 4 x H200, 2026-" in text


def test_an_interrupted_report_says_so_and_continues(tmp_path):
    command = [sys.executable, "-m", "benchmarks.report", "--preset", "nano", "--steps", "2", "--out", str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "parts" / "train0.json").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and not (tmp_path / "index.html").exists()
    assert f"parts are saved in {tmp_path / 'parts'}; run the same command again to continue" in err
    (part,) = (part for part in measure.parts_of("nano", 2) if part.name == "train0")
    assert len(part.load(tmp_path / "parts")["results"]["losses"]) == 2  # the next run uses it

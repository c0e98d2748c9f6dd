"""The GPU benchmarks without a GPU: tables, the profile, the trace, and variants of one job."""

import dataclasses
import functools
import json
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.cpu import classroom
from benchmarks.gpu import attention as gpu_attention
from benchmarks.gpu import choices as gpu_choices
from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu import fusions as gpu_fusions
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.profile import KERNELS, Launch, group_rows, kernel_rows, launches_of, match_launches
from benchmarks.gpus import collectives as gpu_collectives
from benchmarks.gpus import pipeline
from benchmarks.gpus import scaling as gpu_scaling
from benchmarks.gpus import sharding as gpu_sharding
from benchmarks.gpus import strategies as gpu_strategies
from benchmarks.gpus import timeline as gpu_timeline
from benchmarks.harness import ours, processes, report
from benchmarks.harness.processes import BenchmarkFailed, ProcessSpec
from benchmarks.harness.report import summarised
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import measure_variants
from benchmarks.ranks import kill, parity
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.arena import round_up
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError
from gpt2core.memory.gpu_sizes import LOGITS_ALIGNMENT
from gpt2core.model import initial_parameters
from gpt2core.parallel.data.bucket_size import best_bucket
from gpt2core.parallel.whole_parameters import fill
from gpt2core.presets import PRESETS
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.gemm import gluon_gelu
from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.cupti import Activity
from tests.support.mpi import run_mpi


def cells(name, results):
    """The rows of a table of results that are not saved."""
    return TABLES[name].cells([{"results": summarised(results), "hardware": {"gpu": "NVIDIA H100"}, "commit": ""}])


MODEL = GPT2Config(vocab_size=24, block_size=8, n_layer=1, n_head=2, n_embd=16, tied=False)


MODULES = gpu_scaling, gpu_sharding


@pytest.mark.parametrize("module", MODULES)
def test_every_flag_has_a_default_and_saves_under_the_module_s_name(module):
    args = module.main.parser.parse_args([])
    assert args.save_as == args.benchmark.rpartition(".")[2] and not args.save and args.commit is None
    saved = module.main.parser.parse_args(["--commit", "abc1234", "--save"])
    assert saved.commit == "abc1234" and saved.save


@pytest.mark.parametrize(
    "module, mode, name",
    [
        (gpu_attention, "--designs", "gluon_ladder"),
        (gpu_decode, "--variants", "decode_variants"),
        (gpu_fusions, "--gluon", "gelu_product"),
        (classroom, "--first", "first_run"),
    ],
)
def test_a_mode_does_not_write_to_the_file_of_another_table(module, mode, name):
    parse = module.main.parser.parse_args
    assert parse([mode]).save_as == name and parse([]).save_as == module.__name__.rpartition(".")[2]
    assert parse([mode, "--save-as", "x"]).save_as == parse(["--save-as", "x", mode]).save_as == "x"


def test_the_designs_of_attention_have_shapes_of_their_head_size():
    parse = gpu_attention.main.parser.parse_args
    assert gpu_attention.chosen_shapes(parse(["--designs"])) == [(1, 16, 16384, 64), (64, 12, 1024, 64)]
    assert len(gpu_attention.chosen_shapes(parse([]))) == 6
    with pytest.raises(ConfigError, match="--designs: .* head size 128 of --shape; use head size 64"):
        gpu_attention.chosen_shapes(parse(["--designs", "--shape", "4x16x4096x128"]))


def test_a_size_that_no_chosen_kernel_has_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)  # keep pytest's own handlers
    monkeypatch.setattr("sys.argv", ["gpu_tune", "--kernel", "gelu", "--shape", "long"])
    with pytest.raises(SystemExit) as ended:
        processes.run_main(gpu_tune.main)
    assert ended.value.code == 2 and "--shape long" in capsys.readouterr().err


# -- the profile of one step ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not triton_launch.interpreted(), reason="counts the bytes of NumPy arrays")
def test_the_work_of_each_launch_is_counted():
    B, H, T, C, vocab = 2, MODEL.n_head, MODEL.block_size, MODEL.n_embd, MODEL.vocab_size
    backend = CudaBackend("fp16")
    trainer = Trainer(MODEL, [backend], batch_size=B, seq_len=T, micro_batches=1)
    arguments = ours.update_arguments(trainer, *Windows(np.arange(100) % vocab, T).batch(0, B))
    launches = launches_of(functools.partial(trainer.compile_update(capture=False), *arguments), backend)
    work = {launch.title: launch for launch in launches}
    D = 16  # 8, padded to the minimum of tl.dot
    assert work["attention: forward"].flops == 2 * B * H * T * T * D
    assert work["attention: both"].flops == 7 * B * H * T * T * D and not work["attention: both"].bytes
    moved = (4 * 7 + 2) * trainer.arena.size  # p, m, v twice, g once, and a copy of 16 bits
    assert moved <= work["adamw: adamw"].bytes <= moved + 1000
    assert work["embedding: forward"].bytes == work["embedding: forward"].flops == 0
    padded = round_up(vocab, LOGITS_ALIGNMENT)  # the head reads a copy of its matrix with rows of zeros
    head = [launch for launch in launches if launch.kernel is None and f"({padded}, {C})'" in launch.title]
    assert padded == 4 * C  # so the second matrix of the MLP, in its backward pass, has the same shape
    assert [launch.flops for launch in head] == [2 * B * T * C * padded] * 2
    exact = CudaBackend()
    matrices = exact.asarray(np.ones((6, 9), np.float32)), exact.asarray(np.ones((9, 5), np.float32))
    assert [launch.flops for launch in launches_of(lambda: exact.product(*matrices), exact)] == [0, 0, 2 * 6 * 9 * 5]


@pytest.mark.skipif(not triton_launch.interpreted(), reason="the launches are the same")
@pytest.mark.parametrize("T", [320, 330])
def test_the_work_of_attention_s_backward_in_two_launches_is_counted(T):
    """lse is passed as an array, or for even T as a descriptor of another shape."""
    backend, H, D = CudaBackend("fp16"), 2, 64
    qkv, dy = (np.zeros((1, T, parts * H * D), np.float16) for parts in (3, 1))
    launches = launches_of(lambda: backend.attention_backward(dy, qkv, *backend.attention_forward(qkv, H), H), backend)
    assert [launch.title for launch in launches] == ["attention: forward", "attention: dq", "attention: dkdv"]
    assert [launch.flops for launch in launches] == [factor * H * T * T * D for factor in (2, 3, 4)]


@pytest.mark.skipif(not triton_launch.interpreted(), reason="on a GPU the search itself runs")
def test_the_tile_search_varies_each_part_and_a_few_combinations():
    rng, B, T, H, D = np.random.default_rng(), 1, 320, 1, 64
    of = SimpleNamespace(xp=np, normal=lambda *shape: rng.standard_normal(shape, np.float32).astype(np.float16))
    of.floats = lambda *shape: np.empty(shape, np.float32)
    cases = list(gpu_tune.attention_cases(of, B, T, H, D))
    assert len(cases) == 4 and all(candidates[0] == {} for *_, candidates, _ in cases)
    together = [candidate["DEFAULT_TILES"]["16 bits"][D, T] for candidate in cases[3][3][1:]]
    assert len(set(together)) == np.prod([len(tiles) for tiles in gpu_tune.SHORTLIST.values()]) == len(together)
    assert cases[2][3][-1] == dict(DESCRIPTOR_HEAD_SIZES=())
    module, prepare, outputs, *_ = cases[2]
    results = []
    for values in ({}, dict(DESCRIPTOR_HEAD_SIZES=())):
        with gpu_tune.replaced(module, values):
            prepare()()
        results.append(outputs[0].copy())
    np.testing.assert_array_equal(*results)


def test_the_profile_s_table_has_rates_and_their_share_of_the_ceiling():
    product = Launch(None, "product a b", flops=383 * 10**9)
    norm = Launch("forward_kernel", "layernorm: forward", bytes=10**9)
    listed = [
        ("product a b", Activity(0, 1000.0, "nvjet_hsh_128x128"), product),  # microseconds
        ("layernorm: forward", Activity(1000, 1000.0, "forward_kernel"), norm),
        ("Memcpy HtoD", Activity(2000, 500.0, "Memcpy HtoD"), None),
    ]
    rows = kernel_rows(listed, 1, "bf16")
    assert [(row["tflops"], row["tbps"]) for row in rows] == [(383, None), (None, 1), (None, None)]
    product, norm, _ = KERNELS.cells([{"results": rows}])
    assert [*product.values()] == ["`product a b`", "1", "1.000", "40.0 %", "383", "", "50 %"]
    assert [*norm.values()] == ["`layernorm: forward`", "1", "1.000", "40.0 %", "", "1.00", "23 %"]
    product, *_ = KERNELS.cells([{"results": kernel_rows(listed, 1, "fp32")}])
    assert [*product.values()][-3:] == ["383", "", ""]  # the ceiling of products is that of bf16
    times = {"idle_share": 0.25, "idle_share_profiled": None, "graph_step_seconds": 3e-3, "eager_step_seconds": 4e-3}
    result = {"preset": "gpt2", "precision": "bf16", "groups": list(group_rows({"graph": rows, **times}))}
    ms, limit = "gpt2, bf16, H200, ms", "gpt2, H200: share of the limit"
    found = TABLES["gpu-profile"].cells([{"results": result, "machine": "H200"}])
    assert [tuple(row.values()) for row in found] == [
        ("matrix products", "1.000 (40.0 %)", "50 %"),
        ("layernorm", "1.000 (40.0 %)", "23 %"),
        ("other kernels and copies", "0.500 (20.0 %)", ""),
        ("sum of the kernels", "2.500", ""),
        ("idle, by device clock", "25.0 %", ""),
        ("idle, by the kernels' time stamps", "", ""),
        ("whole step, graph replayed", "3.000", ""),
        ("whole step, launched from Python", "4.000", ""),
    ] and list(found[0]) == ["", ms, limit]


def test_a_product_that_python_did_not_launch_changes_only_the_rows_of_products():
    launches = [Launch("forward_kernel", "layernorm: forward", bytes=8), Launch(None, "product a b", flops=8)]
    launches.append(Launch("adamw_kernel", "adamw: adamw", bytes=8))
    names = "forward_kernel", "nvjet_hsh_128x128", "adamw_kernel"
    activities = [Activity(n, 1.0, name) for n, name in enumerate(names)]
    listed, agree = match_launches(activities, launches)
    assert agree and [(title, launch) for title, _, launch in listed] == [(each.title, each) for each in launches]
    listed, agree = match_launches([*activities, Activity(3, 1.0, "nvjet_other")], launches)
    assert not agree and [launch for *_, launch in listed] == [launches[0], None, launches[2], None]
    listed, agree = match_launches(activities[:2], launches)  # a kernel is missing
    assert not agree and [launch for *_, launch in listed] == [None, launches[1]]


def test_attention_is_compared_with_the_fastest_program_of_pytorch_in_each_direction():
    noise, shape = np.array([1.0, 3.0, 2.0]), [1, 2, 64, 32]  # noise slows all programs of a round equally
    ms = {"ours": (1.0, 4.0), "ours, plain Triton": (0.5, 1.0), "torch, FlashAttention-2": (1.5, 9.0)}
    ms["torch, cuDNN"] = (2.0, 6.0)
    results = [
        {"name": name, "shape": shape, "norms": [1.0, 1.0]}
        | {"ms": {"forward": (forward * noise).tolist(), "both": (both * noise).tolist()}}
        for name, (forward, both) in ms.items()
    ]
    gpu_attention.summarise(results)
    assert results[0]["peer"]["name"] == "torch, cuDNN" and "peer" not in results[1]
    (row,) = cells("gpu-attention", results)
    assert row["times as fast"] == "1.50; 1.50" and row["torch, cuDNN"] == "0; 0"


def test_a_tile_that_hangs_has_a_row_and_the_others_are_measured(monkeypatch, capsys):
    fast, *_ = tiles = gluon_gelu.FORWARD_TILES

    class Process:
        def __init__(self, spec, benchmark, timeout):
            self.version, self.timeout = spec.options["version"], timeout

        __enter__, __exit__ = lambda self: self, lambda *_: None

        def run_round(self, rounds):
            if self.version != fast.text():
                raise BenchmarkFailed(f"'{self.version}' did not answer within {self.timeout} s; the end:\nmore")
            return {"peak_bytes": 1, gpu_fusions.EPILOGUE: {"ms": 0.3}, self.version: {"ms": 0.2, "error": 0.0}}

    monkeypatch.setattr(gpu_fusions, "BenchmarkProcess", Process)
    monkeypatch.setattr(gpu_fusions, "gpu_model", lambda: ("", (9, 0)))
    monkeypatch.setattr(gpu_fusions, "gluon_kind", lambda *_: "hopper")
    rows = sum(gpu_fusions.gluon_rows(gpu_fusions.main.parser.parse_args(["--gluon", "--timeout", "7"])), [])
    assert len(rows) == len(tiles) + len(gluon_gelu.BACKWARD_TILES)
    measured = [row for row in rows if "error" not in row]
    assert {(row["variant"], row["us"], row["cublasLt us"]) for row in measured} == {(fast.text(), 200, 300)}
    assert all("did not answer within 7 s" in row["error"] for row in rows if row not in measured)
    table = TABLES["gpu-gelu"].cells([{"results": rows}])
    assert len(table) == len(measured) and table[0]["times as fast as cublasLt"] == "1.50"


# -- choices -----------------------------------------------------------------------------------------------------------


def test_an_optimisation_that_cannot_be_removed_is_an_error():
    for change in (gpu_choices.FULL_STEP, *gpu_choices.CHANGES):
        gpu_choices.leave_out(mock.MagicMock(), change)
    with pytest.raises(ValueError, match="'no graphs'"):
        gpu_choices.leave_out(mock.MagicMock(), "no graphs")


@pytest.mark.skipif(not triton_launch.interpreted(), reason="runs in the interpreter")
@pytest.mark.long
def test_removing_an_optimisation_changes_only_the_time():
    variants = gpu_choices.Variants(MODEL, 2, "fp16")
    want = variants.trainer(gpu_choices.FULL_STEP, 1).accumulator.gradients.copy()
    assert np.linalg.norm(want) > 0
    for change in set(gpu_choices.CHANGES) - {gpu_choices.UNTIMED}:  # needs cublasLt
        got = variants.trainer(change, 1).accumulator.gradients
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)  # the tolerance of fp16 kernels


# -- scaling and strategies --------------------------------------------------------------------------------------------


def measured(variants, side, seconds):
    """The results of measure() for these variants; seconds: {name: seconds of each round}."""
    sizes = {"bytes_sent": 10**6, "optimizer_bytes": 8 * 10**6, "messages": 3}
    sizes = sizes if side == "ours" else dict.fromkeys(sizes)
    return [
        {"name": name, "side": side, "seq_len": 1024, "seconds": seconds[name], "last_loss": 5.0, **options, **sizes}
        for name, options in variants.items()
    ]


def test_weak_scaling_counts_tokens_and_computes_ratios_within_rounds():
    own, peers = gpu_scaling.variants([1, 4], lambda count: 64 * count, [gpu_scaling.OUR_VARIANTS["bucket"]], 25.0)
    assert list(own) == ["ours, 1 GPU", "ours, 4 GPUs --dp bucket"] and own["ours, 1 GPU"]["batch_size"] == 64
    noise = np.array([1.0, 2.0, 1.5])  # a disturbance that slows all rows of a round equally
    of_ours = dict(zip(own, ((noise * 0.096).tolist(), (noise * 0.1).tolist()), strict=True))
    of_peers = dict(zip(peers, ((noise * 0.11).tolist(), (noise * 0.125).tolist()), strict=True))
    results = measured(own, "ours", of_ours) + measured(peers, "DDP", of_peers)
    gpu_scaling.summarise(results)
    four, ddp = results[1], results[3]
    assert four["efficiency"]["median"] == pytest.approx(0.96) and four["times_as_fast"]["median"] == pytest.approx(
        1.25
    )
    assert ddp["efficiency"]["median"] == pytest.approx(0.88) and ddp["times_as_fast"]["median"] == 1
    assert four["tokens_per_second"] == pytest.approx(4 * 64 * 1024 / 0.15)
    assert len(cells("gpus-scaling", {"scaling": [{"title": "title", "rows": results}]})) == 4


def test_an_efficiency_above_the_ideal_is_disturbed():
    own, peers = gpu_scaling.variants([1, 4], lambda count: 64 * count, [gpu_scaling.OUR_VARIANTS["bucket"]], 25.0)
    results = measured(own, "ours", dict(zip(own, ([0.2] * 3, [0.1] * 3), strict=True)))
    results += measured(peers, "DDP", dict(zip(peers, ([0.11] * 3, [0.125] * 3), strict=True)))
    gpu_scaling.summarise(results)
    rows = cells("gpus-scaling", {"scaling": [{"title": "title", "rows": results}]})
    found = [row["title"].split("; ", 1)[1] for row in rows]
    wanted = ["disturbed (100.0 %; ideal: 1)", "disturbed (200.0 %; ideal: 1)", "100.0 %", "88.0 %"]
    assert all(text.startswith(want) for text, want in zip(found, wanted, strict=True))


def test_strong_scaling_efficiency_is_relative_to_the_ideal_speed_up():
    one = {"batch_size": 64, "seconds": [1.0]}
    assert gpu_scaling.efficiency({"batch_size": 64, "ranks": 4, "seconds": [0.25]}, one)["median"] == 1
    assert gpu_scaling.efficiency({"batch_size": 64, "ranks": 4, "seconds": [0.5]}, one)["median"] == 0.5


def test_the_cost_of_communication_is_relative_to_ranks_without_it():
    chosen = gpu_strategies.variants(4, 64, 25.0)
    seconds = {
        name: [0.1, 0.2] if options.get("communicate", True) else [0.08, 0.16] for name, options in chosen.items()
    }
    results = measured(chosen, "ours", seconds)
    gpu_strategies.summarise(results)
    rows = cells("gpus-strategies", results)
    baselines = [result for result in results if not result.get("communicate", True)]
    assert len(baselines) == 2 and {each["communication_share"] for each in baselines} == {0}
    others = [result["communication_share"] for result in results if result not in baselines]
    np.testing.assert_allclose(others, 0.2)
    assert len(rows) == len(chosen)


def test_the_sweep_of_bucket_sizes_is_compared_with_the_same_baseline():
    chosen = gpu_strategies.variants(2, 8, 25.0, [1.0, 100.0])
    assert list(chosen)[-2:] == [f"ours, 2 GPUs --dp bucket --bucket-mb {mb}" for mb in (1, 100)]
    results = measured(chosen, "ours", {name: [0.1] for name in chosen})
    gpu_strategies.summarise(results)
    assert len(cells("gpus-strategies", results)) == 6
    assert all(result["times_baseline"]["median"] == 1 for result in results)


def trained(host, variants, draws=False):
    """{variant: loss} of a small model, trained by the ranks of a benchmark's job.

    draws: whether each trainer draws the initial parameters, instead of a copy of those that the job keeps.
    """
    from benchmarks.gpus import ours as ours_gpus
    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world = NcclCommunicator(host)
    world.use_transport(None)
    windows = Windows(np.random.default_rng(0).integers(0, MODEL.vocab_size, 200), MODEL.block_size)
    initial = functools.partial(initial_parameters, MODEL, 0) if draws else None
    trains = ours_gpus.make_variants(MODEL, world, windows, variants, "fp32", initial)
    steps = {name: train and train(1) for name, train in trains.items()}
    assert all((steps[name] is None) == (world.rank >= options["ranks"]) for name, options in variants.items())
    return {name: each["loss"] for name, each in steps.items() if each}


@pytest.mark.skipif(not triton_launch.interpreted(), reason="runs in the interpreter")
@pytest.mark.long
def test_all_variants_of_a_job_train_on_the_same_batches_from_the_same_parameters():
    ways = [dict(dp="bucket", bucket_mb=0.01), dict(dp="flat", zero=1, deterministic=True)]
    variants = {str(number): dict(ranks=2, batch_size=2, **way) for number, way in enumerate(ways)}
    variants["one"] = dict(ranks=1, batch_size=2)
    variants["alone"] = dict(ranks=2, batch_size=4, communicate=False)  # each rank on 2 sequences, as the others
    for losses in run_mpi(2, trained, variants):
        want = losses["0"]
        np.testing.assert_allclose(list(losses.values()), want, rtol=1e-5)  # only the order of the float32 sums differs
    sharded = {str(zero): dict(ranks=2, batch_size=2, zero=zero, recompute="block") for zero in (3, 2)}
    for losses in run_mpi(2, trained, sharded, True):
        np.testing.assert_allclose(list(losses.values()), want, rtol=1e-5)


@pytest.mark.long
def test_one_job_measures_pytorch_on_one_and_on_two_processes():
    pytest.importorskip("torch")
    sizes = {"preset": "nano", "seq_len": 16, "precision": "fp32", "compiled": False, "device": "cpu"}
    variants = {"one": dict(ranks=1, batch_size=2), "two": dict(ranks=2, batch_size=2)}
    options = dict(sizes, variants=variants)
    args = gpu_scaling.main.parser.parse_args(["--rounds", "1", "--timeout", "120"])
    spec = ProcessSpec("DDP", "benchmarks.peers.torch_ddp", 1, options, ranks=2, mpi=True)
    args.steps_per_round = 1
    one, two = measure_variants(args, [spec])
    assert one["last_loss"] != two["last_loss"]  # a rank of DDP returns the loss of its own rows
    assert (one["side"], two["ranks"]) == ("DDP", 2) and min(one["seconds"] + two["seconds"]) > 0


# -- sharding ----------------------------------------------------------------------------------------------------------


def sharding_results(**of_ours):
    """The results of measure() for our programs with --zero 3 and 0, and for PyTorch's; of_ours: changed fields."""
    own, peers = gpu_sharding.variants(2, 8, [3, 0], "none", 25.0)
    results = measured(own, "ours", dict.fromkeys(own, [0.1, 0.2])) + measured(
        peers, "fully_shard", dict.fromkeys(peers, [0.11, 0.22])
    )
    for result in results:
        result |= {"first_losses": [9.0, 8.0], "driver_bytes": 20 << 30, "held_bytes": 10 << 30, "allocated_bytes": 0}
    results[0] |= of_ours
    gpu_sharding.summarise(results)
    return results


def test_sharded_programs_are_compared_in_speed_memory_and_losses():
    results = sharding_results(driver_bytes=21 << 30, first_losses=[9.0, 8.01])
    names = [result["name"] for result in results]
    assert names == ["ours, 2 GPUs --dp flat --zero 3", "ours, 2 GPUs --dp bucket --zero 0", "fully_shard, 2 GPUs"]
    three, zero, _ = results
    assert three["times_as_fast"]["median"] == pytest.approx(1.1)
    assert three["memory_ratio"] == 1.05
    assert three["loss_difference"] == pytest.approx(0.00125) and gpu_sharding.agree(results)
    rows = cells("gpus-sharding", results)
    assert len(rows) == 3 and rows[0]["GPU memory, GiB"] == "21.00"


@pytest.mark.parametrize("vocab_size", [172, 10_000, 50_257])
def test_the_padded_columns_of_fully_shards_program_do_not_show_in_its_losses(vocab_size):
    torch = pytest.importorskip("torch")
    fsdp = import_module("benchmarks.peers.torch_fsdp_cuda")
    config = dataclasses.replace(PRESETS["nano"], vocab_size=vocab_size)
    plain, padded = fsdp.ShardedGPT2(config, 1), fsdp.ShardedGPT2(config, fsdp.pad_of(config))
    weights, rows = plain.state_dict(), padded.wte.weight.shape[0] - vocab_size
    for name in ("wte.weight", "lm_head.weight"):
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, rows))
    padded.load_state_dict(weights)
    ids, targets = torch.randint(vocab_size, (2, 4, config.block_size))
    wanted, found = (model(ids, targets).item() for model in (plain, padded))
    assert rows == -vocab_size % fsdp.PAD * (vocab_size > 172)
    # The check of the losses must be left with most of its tolerance for rounding errors.
    assert abs(found / wanted - 1) < gpu_sharding.MAX_DIFFERENCE / 4


@pytest.mark.parametrize("losses", [[9.0, 8.04], [9.0, float("nan")]])
def test_programs_with_other_losses_do_not_train_the_same_model(losses):
    assert not gpu_sharding.agree(sharding_results(first_losses=losses))


def test_sharded_programs_without_pytorch_or_without_a_gpu_are_not_compared():
    results = sharding_results(driver_bytes=0)[:2]
    gpu_sharding.summarise(results)
    assert gpu_sharding.agree(results) and results[0]["times_as_fast"] is None
    assert results[0]["memory_ratio"] is None and len(cells("gpus-sharding", results)) == 2


def test_programs_that_would_not_fit_in_memory_are_omitted(capsys):
    args = gpu_sharding.main.parser.parse_args(["--batch-size", "4"])
    assert gpu_sharding.fitting(args, [3, 2, 0], "none", 141 << 30) == [3, 2, 0]
    assert gpu_sharding.fitting(args, [3, 2, 0], "none", 80 << 30) == [3]
    assert "--zero 2 --recompute none: omitted" in capsys.readouterr().out
    assert gpu_sharding.fitting(args, [3, 2, 0], "block", 80 << 30) == [3, 2]


def test_the_first_call_is_observed_step_by_step():
    used, calls = iter([100, 300, 250, 270]), []

    def train(steps):
        calls.append(steps)
        return {"loss": 10 - sum(calls)}

    observed = gpu_sharding.observed(train, lambda: next(used))
    seen = {"first_losses": [9, 8, 7], "driver_bytes": 200}
    assert observed(3) == {"loss": 7, **seen} and observed(5) == {"loss": 2, **seen} and calls == [1, 1, 1, 5]


def test_the_quick_initial_parameters_have_the_deviation_of_gpt2():
    config = GPT2Config(vocab_size=20_000, block_size=8, n_layer=1, n_head=2, n_embd=96)
    arrays = dict(gpu_sharding.initial_parameters(config))
    assert {name: array.shape for name, array in arrays.items()} == dict(parameter_shapes(config))
    wte, bias, norm = (arrays[f"transformer.{name}"] for name in ("wte.weight", "ln_f.bias", "ln_f.weight"))
    assert wte.std() == pytest.approx(0.02, rel=0.01) and not bias.any() and (norm == 1).all()
    assert wte.size > gpu_sharding.PERIOD and len(np.unique(wte[:, 0])) > 0.9 * len(wte)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_fully_shard_trains_the_same_model_as_stage_0(recompute):
    pytest.importorskip("torch")
    preset, seq_len = "nano", 16
    args = gpu_sharding.main.parser.parse_args(["--rounds", "1", "--timeout", "120", "--no-compile", "--threads", "1"])
    args.preset, args.precision, args.seq_len = preset, "fp32", seq_len
    _, peers = gpu_sharding.variants(2, 2, [3], recompute, 25.0)
    (spec,) = gpu_sharding.specs_of(args, {}, peers)
    spec = dataclasses.replace(spec, options=spec.options | {"device": "cpu"})
    args.steps_per_round = 1
    (found,) = measure_variants(args, [spec])

    functions = {}

    def make_variants(config, world, windows, variants, initial):
        trainer = Trainer(
            config, [NumpyBackend()], batch_size=2, seq_len=seq_len, micro_batches=1, optimizer=ours.GPU_OPTIMIZER,
            seed=None,
        )  # fmt: skip
        fill(trainer, trainer.parameters, initial())
        functions["ours"] = lambda steps: {"loss": ours.overlapped_steps(trainer, windows, steps).loss}
        return functions

    module = SimpleNamespace(make_variants=make_variants)
    run_round = gpu_sharding.prepare(module, Solo(), preset, seq_len, {})
    run_round("ours", 1)
    want = run_round("ours", 1)
    assert found["side"] == "fully_shard" and found["driver_bytes"] == 0
    # float32: only the order of the sums differs; the steps of AdamW enlarge the difference of tiny gradients
    np.testing.assert_allclose(found["first_losses"], want["first_losses"], rtol=1e-5)
    assert found["last_loss"] == pytest.approx(want["last_loss"], rel=1e-4)
    assert want["last_loss"] < want["first_losses"][0] - 0.05  # the losses show the updates


# -- pipeline ----------------------------------------------------------------------------------------------------------


def test_bubbles_are_read_and_judged(monkeypatch):
    text = (
        "pipeline measured, the last step: 43.1 ms, bubble {}%\n"
        "pipeline simulated, with the mean times of\nthese actions: 40.0 ms, bubble {}%\n"
    )
    bubbles = {"gpipe": (24.5, 22.9), "1f1b": (21.7, 20.9), "interleaved": (19.9, 18.7), "zero-bubble": (17.7, 17.8)}
    log = [dict(seconds=9.0)] * 5 + [dict(seconds=0.5)] * 3
    monkeypatch.setattr(pipeline, "train", lambda schedule, *_, **__: (log, text.format(*bubbles[schedule])))
    args = pipeline.main.parser.parse_args(["--flags", "--seed 1"])
    results = [pipeline.measure(args, schedule) for schedule in bubbles]
    assert results[0] == dict(schedule="gpipe", median=0.5, measured=24.5, simulated=22.9)
    record = {"results": summarised(results), "hardware": {}, "commit": ""}
    assert len(TABLES["gpus-pipeline"].cells([record])) == 4
    assert pipeline.verdict(results)[0] and "up to 1.6 points" in pipeline.verdict(results)[1]
    assert not pipeline.verdict([dict(results[0], measured=28.0), *results[1:]])[0]
    assert "count as equal" in pipeline.verdict(results)[1]
    another = pipeline.verdict([dict(results[0], measured=21.0), *results[1:]])  # than the simulated 22.9 and 20.9
    assert not another[0] and "order of the schedules is not as predicted" in another[1]
    near = [dict(results[0], measured=21.0, simulated=21.8), *results[1:]]  # 0.9 points from 1f1b: equal
    assert pipeline.verdict(near)[0]
    assert not pipeline.verdict([dict(near[0], simulated=21.9), *results[1:]])[0]  # 1 point: not equal
    monkeypatch.setattr(pipeline, "train", lambda *_, **__: (log, "nothing"))
    with pytest.raises(BenchmarkFailed, match="gpipe: the output has no measured and simulated bubble: nothing"):
        pipeline.measure(args, "gpipe")


# -- parity ------------------------------------------------------------------------------------------------------------


def parity_flags(words):
    return parity.set_defaults(parity.main.parser.parse_args(words))


def test_only_the_fast_mode_may_differ_from_stage_2_within_its_tolerance():
    want = [{"step": step, "loss": 5.0, "grad_norm": 1.0, "seconds": 0.5} for step in range(8)]
    want[-1]["parameters_sha256"] = "abc"
    near = [dict(row, loss=5.0005) for row in want]
    args = parity_flags(["--stage", "3"])
    found = parity.cases(args, "paper")
    names = ["one process", *(" ".join([str(ranks), *flags]) for ranks, flags, _ in found)]
    assert [name[0] for name in names[1:]] == list("1224444") and sum("mpi" in name for name in names) == 1

    def judge(rows_of):
        results = [parity.result_of(name, 1, "fp32", rows_of(name), want) for name in names]
        rows = TABLES["parity"].cells([{"results": {"summary": list(parity.summary("title", results))}}])
        assert [row[""].removeprefix("title") for row in rows] == ["", ", without `--deterministic`"]
        assert [row["ranks"] for row in rows] == ["1", "1"]
        assert len(parity.RUNS.cells([{"results": results}])) == len(names)
        return parity.verdict(results)

    def fast(rows):
        return lambda name: want if "deterministic" in name or name == "one process" else rows

    good, sentence = judge(fast(near))
    assert good and sentence.startswith("6 of 6 deterministic runs") and "1.0e-04" in sentence
    assert not judge(fast([dict(row, loss=5.1) for row in want]))[0]
    good, sentence = judge(lambda name: near if "mpi" in name else want)
    assert not good and sentence.startswith("5 of 6 deterministic runs")


def test_stage_1_runs_every_strategy_with_and_without_zero():
    args = parity_flags([])
    assert (args.presets, args.precision, args.ranks) == (["tiny", "paper"], ["fp32"], [1, 2, 4, 8])
    tiny, paper = parity.cases(args, "tiny"), parity.cases(args, "paper")
    assert (len(tiny), len(paper)) == (32, 20) and all("--bucket-mb" in flags for _, flags, _ in tiny)
    for found in (tiny, paper):
        assert all(parity.DETERMINISTIC in flags for _, flags, _ in found) and len(set(found)) == len(found)


def test_the_runs_over_sockets_are_compared_with_the_usual_connections(monkeypatch):
    args = parity_flags(["--stage", "3", "--ranks", "2", "--sockets"])
    log = [{"loss": 5.0, "grad_norm": 1.0, "seconds": 0.5, "parameters_sha256": "abc"}]
    output, environments = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0", []

    def train(name, package, environment=None, **options):
        environments.append(environment)
        return log, output

    monkeypatch.setattr(parity, "train", train)
    results = parity.compare(args, "paper", "fp32")
    names = ["2 ranks --dp bucket --deterministic", "2 ranks --dp bucket"]
    assert [result["name"] for result in results[1:]] == [
        name + end for name in names for end in ("", ", NCCL over sockets")
    ]
    assert environments == [None, None, parity.SOCKETS, None, parity.SOCKETS]
    titles = [row["title"] for row in parity.summary("title", results)]
    assert titles == [f"title, NCCL over sockets{end}" for end in ("", ", without `--deterministic`")]
    met, sentence = parity.verdict(results)
    assert met and sentence.startswith("2 of 2 deterministic runs")
    output = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    with pytest.raises(BenchmarkFailed, match="over sockets: NCCL does not report that it uses sockets; .*\n.*P2P"):
        parity.compare(args, "paper", "fp32")


# -- collectives -------------------------------------------------------------------------------------------------------


def test_the_fit_recovers_alpha_and_beta():
    alpha, beta = 2e-5, 4e-12
    results, names = [], gpu_collectives.ALGORITHMS
    for size in gpu_collectives.SIZES:
        results += [{"name": name, "bytes": size, "seconds": [alpha + beta * size] * 3} for name in names]
    gpu_collectives.summarise(results, 4, dict.fromkeys(names, 1e-7))
    (nccl, _) = fits = gpu_collectives.fit_buckets(results, 4)
    rows = cells("gpus-collectives", {"all_reduce": results, "fits": fits})
    assert rows[1]["alpha, us; beta, ps per byte"] == "20.0; 4.00" and rows[1]["relative error at 10 MB"] == "1.0e-07"
    assert len(rows) == len(names) and {result["times_as_fast_as_torch"]["median"] for result in results} == {1}
    np.testing.assert_allclose([nccl["alpha"], nccl["beta"]], [alpha, beta], rtol=1e-6)
    assert results[0]["bus_bandwidth"] == pytest.approx(1.5 * 10**6 / (alpha + beta * 10**6))
    assert nccl["bucket_mb"] == pytest.approx(best_bucket(alpha, beta, 4 * 124.4e6) / 1e6, rel=0.01)


def test_the_job_of_two_ranks_is_saved_before_that_of_four(monkeypatch):
    saved = []

    def launch(ranks, *_, **options):
        if ranks == 4:
            raise BenchmarkFailed("there are no four GPUs")
        names, sizes = gpu_collectives.ALGORITHMS, gpu_collectives.SIZES
        results = [{"name": name, "bytes": size, "seconds": [1e-9 * size]} for size in sizes for name in names]
        return dict.fromkeys(names, 1e-7), results

    monkeypatch.setattr(gpu_collectives, "launch", launch)
    monkeypatch.setattr(gpu_collectives, "save", lambda results, args: saved.append(results))
    with pytest.raises(BenchmarkFailed):
        gpu_collectives.main([])
    assert [{row["ranks"] for row in found["all_reduce"]} for found in saved] == [{2}] and len(saved[0]["fits"]) == 2


def test_the_constants_of_a_case_are_saved_before_the_next_case(monkeypatch, tmp_path):
    def time_constants(args, case):
        if case == "eight":
            raise BenchmarkFailed("the GPU is gone")
        return [{"case": case, "us_per_token": 1.0}]

    monkeypatch.setattr(gpu_decode, "time_constants", time_constants)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    with pytest.raises(BenchmarkFailed):
        gpu_decode.main(["--variants", "--commit", "abc1234"])
    found = json.loads((tmp_path / "out" / "results" / "gpu" / "decode_variants.json").read_text())["results"]
    assert found == [{"case": "one", "us_per_token": 1.0}]


# -- the timeline ------------------------------------------------------------------------------------------------------

STEP = [
    Activity(100.0, 50.0, "void layernorm_kernel<float>(int)"),
    Activity(120.0, 20.0, "nvjet_hsh_128x128"),  # overlaps the first
    Activity(140.0, 30.0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    Activity(150.0, 10.0, "adamw_kernel"),
]


def test_the_second_step_begins_after_the_longest_gap():
    later = [each._replace(start=each.start + 500) for each in STEP]
    assert gpu_timeline.last_of_two(STEP + later) == later


def test_a_timeline_separates_streams_and_computes_hidden_communication(tmp_path):
    placed = gpu_timeline.lanes_of(STEP)
    assert [line for line, _ in placed] == [0, 1, 2, 0]
    times = gpu_timeline.times_of(placed)
    want = {"step_ms": 0.07, "compute_ms": 0.06, "communication_ms": 0.03, "hidden_ms": 0.02, "kernels": 4}
    assert times == pytest.approx(want)  # communication runs from 40 to 70, computation from 0 to 60
    assert cells("gpus-timeline", {"naive": times})[0]["4 GPUs: communication that overlaps"] == "67 %"
    steps = {"naive": placed, "bucket": placed}
    gpu_timeline.plot(steps, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    gpu_timeline.write_trace(tmp_path / "trace.json", gpu_timeline.processes_of(steps))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"naive", "bucket", *gpu_timeline.LANES}
    ran = [(event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert ran == [(0, 0, 50), (0, 50, 10), (1, 20, 20), (2, 40, 30)]


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, clean",
    [
        ({}, True),
        ({"code": 0}, False),
        ({"left": 1}, False),
        ({"on_gpus": "700 MiB on GPU 1"}, False),
        ({"cause": ""}, False),
        ({"seconds": 31.0}, False),
    ],
)
def test_an_end_is_clean_if_it_is_soon_and_reported_and_leaves_nothing(change, clean):
    row = dict(rank=1, moment=3.0, seconds=2.0, code=137, left=0, on_gpus="", cause="signal 9", step=20)
    assert kill.is_clean(row | change, 30) is clean


@pytest.mark.parametrize(
    "text",
    [
        "mpirun noticed that process rank 1 with PID 0 on node host exited on signal 9 (Killed).",
        "note\nerror: rank 0: rank 1 has sent no heartbeat for 20 s",
        "=   EXIT CODE: 9\n=   KILLED BY SIGNAL: 9 (Killed)",
    ],
)
def test_the_cause_is_found_in_the_output_of_launchers_and_ranks(text):
    assert kill.CAUSE.search(text)

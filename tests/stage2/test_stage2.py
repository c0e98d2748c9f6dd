"""Stage 2 gives stage 0's losses, gradients, tokens and checkpoints, on a GPU or in Triton's interpreter."""

# B batch, T time, C channels, V vocabulary

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from gpt2core import ops
from gpt2core.app import cli
from gpt2core.app.settings.definitions import recipe
from gpt2core.app.shipped import CORPUS
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.kernel_arguments import HeadGradient
from gpt2core.model import initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.parallel.whole_parameters import current_model, gathered, load, parameter_hash
from gpt2core.presets import PRESETS
from gpt2core.sampler import Greedy, generate
from gpt2core.tensor import AutogradError, Tensor
from gpt2core.text.only_tokens import OnlyTokens
from gpt2core.text.token_file import load_tokens
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda import fused_head
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch
from tests.support.gradients import arrays
from tests.support.training import assert_same, train
from tests.tools.sanitize import all_kernels, call_all_launches, name_of

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage2_cuda"
gpu = pytest.mark.gpu
# On a machine with a GPU every test uses it, except those of the interpreter.
pytestmark = [] if triton_launch.interpreted() else [gpu]
in_the_interpreter = pytest.mark.skipif(not triton_launch.interpreted(), reason="tests the interpreter")

# The second has a head size that is no power of two, an odd vocabulary, and fewer positions than a tile has rows.
UNTIED, TIED = GPT2Config(64, 16, 2, 2, 32, tied=False), GPT2Config(37, 12, 2, 2, 48, tied=True)
ROTARY = replace(TIED, positions="rotary")
BATCH = 6
ADAMW = dict(clip=0.5, weight_decay=0.1)


def parameters_of(config):
    """Initial parameters times a constant: attention is not nearly uniform, and no gradient is tiny."""
    for name, array in initial_parameters(config, 0):
        yield name, array * np.float32(45 / math.sqrt(config.n_embd) if array.ndim > 1 else 1)


def windows_of(config):
    """Windows in which one token is frequent, so that the embedding's gradient sums its rows in several chunks."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, 20 * config.block_size)
    tokens[rng.random(tokens.size) < 0.75] = 3
    return Windows(tokens, config.block_size)


def trainer_of(backend, config, micro_batches=1, batch=BATCH, **options):
    sizes = dict(batch_size=batch, seq_len=config.block_size, micro_batches=micro_batches)
    trainer = Trainer(config, [backend], **sizes, optimizer=ADAMW | options)
    load(trainer, dict(parameters_of(config)))
    return trainer


def gradients_of(trainer):
    return {name: trainer.backend.to_host(g) for name, g in gathered(trainer, trainer.accumulator.gradients).items()}


def bits_of(trainer):
    """Parameters, moments, and the copy that kernels read, as bytes."""
    arrays = trainer.parameters, *trainer.optimizer.states.values(), trainer.compute_parameters
    return [trainer.backend.to_host(array).tobytes() for array in arrays]


def losses_of(trainer, steps, lr=1e-3):
    windows = windows_of(trainer.config)
    return [trainer.step(read_batch(trainer, windows), lr).loss for _ in range(steps)]


def assert_near(got, want, tolerance, name):
    """Assert norm(got - want) <= tolerance * norm(want), which is false for NaN."""
    assert np.linalg.norm(got.astype(np.float64) - want) <= tolerance * np.linalg.norm(want.astype(np.float64)), name


# -- the step ---------------------------------------------------------------------------------------------------------

STEPS = [(UNTIED, 1), (TIED, 2), (ROTARY, 1), pytest.param(PRESETS["paper"], 1, marks=gpu)]


@pytest.mark.fast
@pytest.mark.parametrize("config, micro_batches", STEPS, ids=["untied", "tied, 2 micro-batches", "rotary", "paper"])
def test_a_training_step_has_stage_0_s_loss_norm_and_gradients(config, micro_batches):
    # fp32 in both, sums in another order; no comparison of the update: Adam amplifies rounding errors
    ours, stage0 = (trainer_of(backend(), config, micro_batches) for backend in (CudaBackend, NumpyBackend))
    step, expected = (trainer.step(read_batch(trainer, windows_of(config)), 1e-3) for trainer in (ours, stage0))
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    gradients, wanted = gradients_of(ours), gradients_of(stage0)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # in `paper` the rounding errors of six layers accumulate
        assert_near(gradients[name], gradient, 1e-4 if config is PRESETS["paper"] else 1e-5, name)


@pytest.mark.parametrize("config, micro_batches", [(UNTIED, 1), (TIED, 2)], ids=["untied", "tied, 2 micro-batches"])
def test_a_step_with_dropout_drops_the_numbers_of_stage_0(config, micro_batches):
    options = dict(batch_size=BATCH, seq_len=config.block_size, micro_batches=micro_batches, dropout=0.3)
    ours, stage0 = (Trainer(config, [each()], **options) for each in (CudaBackend, NumpyBackend))
    for trainer in (ours, stage0):
        load(trainer, dict(parameters_of(config)))
    for _ in range(2):  # a captured step has another key
        step, expected = (trainer.step(read_batch(trainer, windows_of(config)), 0.0) for trainer in (ours, stage0))
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        wanted = gradients_of(stage0)
        for name, gradient in gradients_of(ours).items():
            assert_near(gradient, wanted[name], 1e-5, name)


def test_three_steps_have_stage_0_s_losses_and_equal_bits_in_every_run():
    first, again, stage0 = (
        trainer_of(backend(), TIED, batch=1) for backend in (CudaBackend, CudaBackend, NumpyBackend)
    )
    losses = losses_of(first, 3)
    np.testing.assert_allclose(losses, losses_of(stage0, 3), rtol=1e-5)
    assert losses == losses_of(again, 3)
    assert parameter_hash(first) == parameter_hash(again)


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_fp16_gradients_are_close_to_fp32_and_an_overflow_changes_no_bit():
    # The gradients contain the loss scale. fp16 rounds to 2^-11, about ten times on the way to a gradient. Adam
    # amplifies these errors, so the losses after an update differ more.
    ours, stage0 = trainer_of(CudaBackend("fp16"), TIED, batch=1), trainer_of(NumpyBackend(), TIED, batch=1)
    step, expected = (trainer.step(read_batch(trainer, windows_of(TIED)), 1e-3) for trainer in (ours, stage0))
    assert (step.loss_scale, step.skipped) == (2.0**16, 0)
    assert step.loss == pytest.approx(expected.loss, rel=2e-3)
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    for name, gradient in gradients_of(stage0).items():
        assert_near(gradients_of(ours)[name] / step.loss_scale, gradient, 2e-2, name)
    ours.loss_scale.state[0] = 2.0**21  # times (p - 1) / 12 rows: beyond 65504
    before = bits_of(ours)
    batch, hyper = read_batch(ours, windows_of(TIED)), ours.optimizer.coefficients(2, 1e-3)
    *losses, norm = (each.item() for each in ours.compiled(batch, hyper).wait())
    loss = sum(losses)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert bits_of(ours) == before and ours.loss_scale.value == 2.0**20
    ours.loss_scale.state[0] = 2.0**15
    step, expected = (trainer.step(read_batch(trainer, windows_of(TIED)), 1e-3) for trainer in (ours, stage0))
    assert (step.loss_scale, step.skipped, ours.steps) == (2.0**15, 0, 2)
    assert step.loss == pytest.approx(expected.loss, rel=1e-2)


def test_the_core_s_decoder_generates_stage_0_s_tokens_past_the_end_of_the_block(monkeypatch):
    """With rotary positions; large batches use this decoder."""
    monkeypatch.setattr(CudaBackend, "decoder", lambda *_: None)
    ours, stage0 = (trainer_of(backend(), ROTARY) for backend in (CudaBackend, NumpyBackend))
    prompt = [1, 2, 3, 30, 3, 1, 2, 3, 30]  # the block is full after 3 more
    tokens = [list(generate(current_model(trainer), prompt, 6)) for trainer in (ours, stage0)]
    assert tokens[0] == tokens[1]


def test_the_validation_loss_is_stage_0_s():
    ours, stage0 = (trainer_of(backend(), TIED, batch=8) for backend in (CudaBackend, NumpyBackend))
    assert evaluate(ours, windows_of(TIED)) == pytest.approx(evaluate(stage0, windows_of(TIED)), rel=1e-5)


@pytest.mark.parametrize("in_forward", [True, False], ids=["gradients in forward", "gradients in backward"])
@pytest.mark.parametrize("logits", [1, 3 * 11, 1 << 29], ids=["single rows", "three rows", "all rows"])
def test_the_head_computes_the_logits_in_chunks_of_rows(rng, monkeypatch, in_forward, logits):
    """As with 64 x 1024 tokens of GPT-2. Gradients in backward: on ranks that divide the vocabulary."""
    monkeypatch.setattr(fused_head, "CHUNK_LOGITS", logits)
    x, w = rng.standard_normal((8, 16), np.float32), rng.standard_normal((11, 16), np.float32)
    targets, scale, found = rng.integers(0, 11, 8), 1 / 8, []
    for backend in (CudaBackend(), NumpyBackend("fp64")):
        operands = [backend.asarray(array.astype(backend.dtype)) for array in (x, w)]
        dy = backend.asarray(np.array(1.5))
        gradient = HeadGradient(scale, 11, dy) if in_forward else None
        *rows, aux = backend.unembed_cross_entropy_forward(*operands, targets, 0, gradient)
        gradients = backend.unembed_cross_entropy_backward(dy, *operands, targets, scale, *rows[:2], aux)
        found.append([backend.to_host(array).copy() for array in (*rows, *arrays(*gradients))])
    for name, got, want in zip(("maxima", "sums", "target logits", "dx", "dw"), *found, strict=True):
        assert_near(got, want, 1e-5, name)


def test_recomputed_blocks_give_the_same_bits(rng):
    options = dict(steps=2, micro_batches=1, batch_size=1, backend=CudaBackend, config=GPT2Config(36, 16, 2, 2, 32))
    tokens = rng.integers(0, 36, 500)
    got, want = (
        train(Solo(), ParallelConfig(recompute=recompute), tokens, **options) for recompute in ("block", "none")
    )
    assert_same(got, want)


@pytest.mark.parametrize("dloss", [None, 3.0], ids=["unknown", "known"])
def test_a_second_backward_through_the_head_gives_the_same_gradient(dloss):
    rng, gradients = np.random.default_rng(0), (2.0, 0.0, 1.0, 3.0)
    x, w, targets = rng.standard_normal((5, 8), np.float32), rng.standard_normal((11, 8), np.float32), np.arange(5)
    found = []
    for backend in (CudaBackend(), NumpyBackend()):
        leaves = [Tensor(backend.asarray(array), backend, requires_grad=True) for array in (x, w)]
        known = None if dloss is None else backend.asarray(np.array(dloss))
        gradient = None if dloss is None else HeadGradient(1 / targets.size, len(w), known)
        loss = ops.unembed_cross_entropy(*leaves, targets, gradient=gradient)
        others = [backend.asarray(np.array(dy)) for dy in gradients]
        each = []
        for dy in [None, *others] if dloss is None else [known, known]:
            for leaf in leaves:
                leaf.grad = None
            loss.backward(dy, retain_graph=True)
            each += [backend.to_host(leaf.grad) for leaf in leaves]
        if known is not None and isinstance(backend, CudaBackend):  # the gradient contains dloss: another is refused
            with pytest.raises(AutogradError, match="with the dloss that forward was given"):
                loss.backward(others[0], retain_graph=True)
        found.append(each)
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # fp32; gradients are about 0.1


# -- kernels ----------------------------------------------------------------------------------------------------------

# {kernel that no training step, evaluation or generation in fp32 launches: what launches it}
ELSEWHERE = {
    "kernels.fused_matmul.matmul_kernel": "torch_bridge.matmul and benchmarks",
    "attention.backward.both_kernel": "16 bits, T up to 256: dq, dk and dv in one launch",
    **{
        f"attention.hopper_{name}.{design}_kernel": "16 bits on a Hopper GPU"
        for name in ("forward", "dq", "dkdv")
        for design in ("pipelined", "specialized")
    },
    **{
        f"kernels.attention_fp16x3.{name}_kernel": "torch_bridge: attention of float32 arrays"
        for name in ("norms", "split", "forward", "backward")
    },
    "kernels.attention_parts.combine_kernel": "torch_bridge: attention with few programs",
    "kernels.attention_parts.add_parts_kernel": "torch_bridge: attention with few programs",
    "gemm.fp16x3.add_parts_kernel": "fp32: a product with 512 terms or more and few results",
    "gemm.gluon_gelu.gelu_kernel": "16 bits on a Hopper GPU",
    "kernels.cast.cast_kernel": "16 bits: the copy of the parameters that kernels read, when they are loaded",
    "kernels.rounding.rounding_kernel": "bf16 and --rounding stochastic: the copy of the parameters, after a resume",
    "kernels.rotary.rotary_kernel": "--positions rotary",
    "kernels.rotary.rotation_kernel": "--positions rotary",
    "kernels.dropout.dropout_kernel": "--dropout above 0",
    "kernels.cross_entropy.backward_kernel": "a vocabulary divided over ranks: stage 3",
    "decoding.cached_attention.cached_kernel": "layers divided over ranks: stage 3",
    "decoding.batched.linear_kernel": "generation of two or more sequences",
    "decoding.batched.attention_kernel": "generation of two or more sequences",
    "decoding.batched.split_k_kernel": "generation of two or more sequences",
    "decoding.sampling.append_given_kernel": "a sampling rule defined by the caller",
    "decoding.sampling.first_round_kernel": "top-k and top-p sampling",
    "decoding.sampling.search_kernel": "top-k and top-p sampling",
    "decoding.sampling.append_sampled_kernel": "top-k and top-p sampling",
}


def test_every_kernel_is_launched_by_a_step_a_validation_and_a_generated_token(monkeypatch):
    launched, runtime = set(), triton_launch.launcher()

    def launch(kernel, *arguments, original=runtime.launch):
        launched.add(name_of(kernel))
        return original(kernel, *arguments)

    monkeypatch.setattr(runtime, "launch", launch)
    trainer = trainer_of(CudaBackend(), UNTIED, batch=4)  # more than 64 rows of one token: a full chunk
    losses_of(trainer, 1)
    step = set(launched)
    evaluate(trainer, Windows(np.arange(UNTIED.block_size + 1), UNTIED.block_size))
    rule = OnlyTokens(Greedy(), np.arange(3))
    list(generate(current_model(trainer), [1] * 15, 3, rule))  # a prefill, a decode step, a window step
    single = "transpose", "fold_layernorm", "layernorm_linear", "split_keys", "combine_product", "linear_residual"
    generation = {
        "decoding.batched.layernorm",
        "decoding.batched.unembed",
        *(f"decoding.single_row.{name}" for name in single),
    }
    generation |= {"decoding.gather.last_rows", "decoding.gather.windows", "kernels.cross_entropy.forward"}
    generation |= {"decoding.sampling.append_greedy", "decoding.sampling.exclude"}
    assert launched - step == {f"{name}_kernel" for name in generation}
    assert set(all_kernels(stages=[2])) - launched == ELSEWHERE.keys()


@in_the_interpreter
def test_the_sanitizer_s_program_launches_every_kernel(monkeypatch):
    monkeypatch.setattr(triton_launch.launcher(), "launch", lambda *_: None)
    assert call_all_launches(np, ("float32", "float16")) == set()


@gpu
def test_the_sanitizer_s_program_runs():
    command = [sys.executable, "tests/tools/sanitize.py", "--program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- generation, checkpoints ------------------------------------------------------------------------------------------


def test_generated_tokens_equal_stage_0_s_also_after_the_window_slides():
    prompt, count = [1, 2, 3, 30, 3, 1, 2, 3, 30], 7  # the block is full after 3
    texts = []
    for backend in (CudaBackend(), NumpyBackend()):
        model = load_model(TIED, dict(parameters_of(TIED)), backend)
        texts.append(list(generate(model, prompt, count)))
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


def rows_of(log):
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


@pytest.mark.parametrize("backends", [
    (CudaBackend, NumpyBackend), pytest.param((NumpyBackend, CudaBackend), marks=pytest.mark.long),
], ids=["2, 0", "0, 2"])  # fmt: skip
def test_each_stage_resumes_the_other_s_run(command, corpus, tmp_path, backends):
    first, then = backends
    flags = ("--preset", "nano", "--data", corpus, "--micro-batches", 1, "--no-deterministic", "--sample", 0)
    flags += ("--log", tmp_path / "log", "--out", tmp_path / "run")
    assert command(cli.train, *flags, "--steps", 1, backend=first).code == 0
    done = command(cli.train, *flags, "--steps", 3, "--resume", tmp_path / "run", backend=then)
    assert done.code == 0 and "resumed after 1 step\n" in done.out, done.err
    losses = [row["loss"] for row in rows_of(tmp_path / "log")]
    flags = (*flags[:-2], "--steps", 3, "--log", tmp_path / "whole")
    assert command(cli.train, *flags).code == 0
    np.testing.assert_allclose(losses, [row["loss"] for row in rows_of(tmp_path / "whole")][-len(losses) :], rtol=1e-5)
    texts = [
        command(cli.infer, "--weights", tmp_path / "run", "--prompt", "the model", "--max-new-tokens", 3, backend=each)
        for each in (CudaBackend, NumpyBackend)
    ]
    texts = [(text.code, text.out) for text in texts]  # without stderr: it may say that kernels are compiled
    assert texts[0] == texts[1] and texts[0][0] == 0


# -- unsupported options ----------------------------------------------------------------------------------------------


def one_line(result):
    return result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1


@in_the_interpreter
def test_the_interpreter_refuses_to_train_a_large_model_before_it_is_built(train2):
    result = train2("--preset", "gpt2", "--steps", 1)
    assert one_line(result) and "parameters: use --preset nano, or a machine with a GPU" in result.err


@in_the_interpreter
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_interpreter_supports_only_fp32_and_fp16(train2, precision, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # installed only with the packages for a GPU
    result = train2("--preset", "nano", "--steps", 1, "--precision", precision)
    assert one_line(result) and f"--precision {precision}" in result.err and "use fp32 or fp16" in result.err


@pytest.mark.parametrize("flag", ["--graph", "--no-graph", "--nvtx"])
def test_cuda_graph_flags_are_errors_without_cuda_graphs(train, train2, flag):
    for run in (train, train2)[: 2 if triton_launch.interpreted() else 1]:
        result = run("--preset", "nano", "--steps", 1, flag)
        assert one_line(result) and result.err.startswith(f"error: {flag}") and "omit the flag" in result.err


@pytest.mark.parametrize(
    "flags",
    ["--tp 2", "--dp bucket", "--zero 1", "--compress int8", "--collectives ring", "--verify-every 5", "--bucket-mb 1"],
)
def test_flags_for_many_ranks_are_errors(train2, flags):
    result = train2("--preset", "nano", *flags.split())
    assert one_line(result) and f"{flags.split()[0]}" in result.err
    assert "this stage is one process: use stage 3" in result.err


def test_each_process_reports_that_a_one_process_stage_was_started_several_times(train, train2, infer, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    for run, stage in ((train, "stage 1"), (train2, "stage 3"), (infer, "stage 1")):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        result = run()
        assert one_line(result) and "3 processes were started (OMPI_COMM_WORLD_SIZE)" in result.err
        assert f"use {stage}, or start it without a launcher" in result.err
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
        assert one_line(other := run()) and other.err == result.err.replace("rank 0: ", "rank 2: ")


def test_threads_are_an_error(train2, infer2):
    for result in (train2("--preset", "nano", "--threads", 2), infer2("--threads", 2)):
        assert one_line(result) and "--threads 2" in result.err


def without_a_gpu(*argv, **variables):
    """Run a command with no visible GPU and without TRITON_INTERPRET."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "MAKEFLAGS", "ARGS")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_without_a_gpu_the_error_names_the_interpreter(train, corpus, tmp_path):
    train("--preset", "nano", "--data", corpus, "--steps", 1, "--sample", 0, "--out", tmp_path / "run")
    for words in (["train_gpt2.py", "--no-save"], ["inference.py", "--weights", tmp_path / "run"]):
        done = without_a_gpu(sys.executable, STAGE / words[0], *words[1:])
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: ")
        assert "TRITON_INTERPRET=1" in done.stderr and done.stderr.count("\n") == 1


@in_the_interpreter
@pytest.mark.parametrize("interactive", [False, True])
def test_generation_that_would_take_minutes_is_refused(command, interactive):
    """With the shipped weights one token takes seconds, so that the default number of tokens would print nothing."""
    flags = ["--interactive"] if interactive else ["--prompt", "the", "--max-new-tokens", 2]
    result = command(cli.infer, *flags, backend=CudaBackend)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "too slow to generate" in result.err and "use --max-new-tokens 1, --weights of a model of" in result.err


# -- make -------------------------------------------------------------------------------------------------------------

SMI = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: {} |"


@pytest.fixture
def make(tmp_path):
    """make(*words, cuda="13.0") -> the finished process, with a driver for this CUDA, or with no GPU."""
    if not shutil.which("make"):
        pytest.skip("there is no make")

    def run(*words, cuda=None, **variables):
        text = f"echo '{SMI.format(cuda)}'" if cuda else "echo 'No devices were found'; exit 6"
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        return without_a_gpu("make", "--no-print-directory", *map(str, filter(None, words)), PATH=path, **variables)

    return run


@pytest.mark.parametrize("cuda, extra", [("12.8", "cuda12"), ("13.0", "cuda13"), ("14.1", "cuda13")])
def test_make_installs_packages_for_the_driver_s_cuda(make, cuda, extra):
    done = make("-n", "-W", "pyproject.toml", "train", "STAGE=2", cuda=cuda)  # as if it had just changed
    assert done.returncode == 0, done.stderr
    assert f"--editable '.[{extra}]'" in done.stdout and "--preset paper" in done.stdout


def test_make_starts_the_ranks_of_stage_3_with_nccl_installed(make):
    done = make("-n", "-W", "pyproject.toml", "train", "STAGE=3", "N=2", cuda="12.8")
    assert done.returncode == 0, done.stderr
    assert "--editable '.[mpi,cuda12,nccl12]'" in done.stdout
    assert re.search(r"-m stage1_mpi.launch -n 2 .*-- -m stage3_mpi_cuda.train_gpt2 ", done.stdout)


@pytest.mark.parametrize(
    "goal, extras", [("test", ["mpi,report,test"]), ("test-gpu", ["mpi,report,test", "mpi,cuda13,nccl13"])]
)
def test_make_installs_the_packages_that_tests_need(make, goal, extras):
    done = make("-n", "-W", "pyproject.toml", goal, cuda="13.0")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"--editable '\.\[(.*)\]'", done.stdout) == extras


@pytest.mark.skipif(not triton_launch.interpreted(), reason="runs the interpreter, which may be too old beside a GPU")
def test_make_without_a_gpu_runs_nano_in_the_interpreter_with_a_note(make, corpus):
    arguments = f"ARGS=--steps 1 --sample 0 --batch-size 1 --data {corpus} --out {corpus.parent}/nano"
    done = make("train", "STAGE=2", "PRESET=nano", f"PYTHON={sys.executable}", arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no GPU was found: TRITON_INTERPRET=1" in done.stdout and "the Triton interpreter" in done.stdout


@pytest.mark.parametrize(
    "arguments, end",
    [
        ("", " --steps 10"),
        ("ARGS=--lr 0.1", " --steps 10 --lr 0.1"),
        ("ARGS=--steps 3", " --steps 3"),
        ("ARGS=--resume out/stage2-nano", " --resume out/stage2-nano"),
    ],
)
def test_make_without_a_gpu_trains_nano_for_10_steps_by_default(make, arguments, end):
    for stage in (2, 3):
        done = make("-n", "train", f"STAGE={stage}", "PRESET=nano", f"PYTHON={sys.executable}", arguments)
        assert done.stdout.rstrip().endswith(f' --out "out/stage{stage}-nano" --overwrite{end}'), (
            done.stdout + done.stderr
        )
    assert "--steps" not in make("-n", "train", "PRESET=nano", f"PYTHON={sys.executable}").stdout
    assert "--steps" not in make("-n", "train", "STAGE=2", f"PYTHON={sys.executable}", cuda="13.0").stdout


@pytest.mark.parametrize(
    "words, cuda, message",
    [
        ("train STAGE=2", None, "far too slow for PRESET=paper: use PRESET=nano"),
        ("generate STAGE=2 PRESET=tiny", None, "far too slow for PRESET=tiny: use PRESET=nano"),
        ("generate STAGE=2 PRESET=nano OUT=nowhere", None, "or omit OUT for the shipped weights"),
        ("train STAGE=2", "11.8", "supports CUDA 11, but stage 2 needs 12 or 13"),
        ("train STAGE=2 N=2", "13.0", "stage 2 is one process"),
        ("train STAGE=3 N=2", None, "far too slow for PRESET=paper: use PRESET=nano"),
        (
            "test-gpu",
            None,
            "no GPU was found (nvidia-smi lists none): run make test-gpu on a machine with",
        ),
        (
            "sanitize",
            None,
            "no GPU was found (nvidia-smi lists none): run make sanitize on a machine with",
        ),
        ("train STAGE=3 N=x", "13.0", "N=x is not a number of ranks"),
    ],
)
def test_make_reports_an_error_in_one_line(make, words, cuda, message):
    done = make(*words.split(), f"PYTHON={sys.executable}", cuda=cuda)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_with_the_variable_set_make_does_what_it_does_without_a_gpu(make, cuda):
    """The lessons of stages 2 and 3 ask for `export TRITON_INTERPRET=1`."""
    words, why = ("-n", "train", "STAGE=2", f"PYTHON={sys.executable}"), "TRITON_INTERPRET is set"
    done = make(*words, cuda=cuda, TRITON_INTERPRET="1")
    assert done.returncode == 2 and f"{why if cuda else 'no GPU was found'}, and Triton's interpreter is" in done.stderr
    done = make(*words, "PRESET=nano", cuda=cuda, TRITON_INTERPRET="1")
    assert done.returncode == 0 and "--preset nano" in done.stdout and "--steps 10" in done.stdout


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def train_paper(train2, log, *flags):
    result = train2("--preset", "paper", "--steps", 50, "--sample", 0, "--log", log, *flags)
    assert result.code == 0, result.err  # may contain the note that kernels are timed
    return [row["loss"] for row in rows_of(log)]


@pytest.fixture(scope="module")
def curve():
    """Stage 0's losses of preset paper, from benchmarks/cpu/curve.py."""
    return json.loads((ROOT / "results" / "cpu" / "curve.json").read_text())["results"]["losses"]


@gpu
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-3), ("tf32", 1e-2)])
@pytest.mark.parametrize("flags", [(), ("--deterministic",)], ids=["default", "deterministic"])
def test_fifty_steps_have_stage_0_s_losses(train2, tmp_path, curve, precision, tolerance, flags):
    losses = train_paper(train2, tmp_path / "log", "--precision", precision, *flags)
    np.testing.assert_allclose(losses, curve, rtol=tolerance)


@gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("flags", [(), ("--no-graph",)], ids=["captured", "eager"])
def test_the_last_loss_in_16_bits_is_close_to_fp32(train2, tmp_path, curve, precision, flags):
    losses = train_paper(train2, tmp_path / "log", "--precision", precision, *flags)
    assert losses[-1] == pytest.approx(curve[-1], rel=0.02)
    assert rows_of(tmp_path / "log")[-1]["peak_memory_bytes"] > 1 << 28


def paper_run(precision, steps=6, captured=True):
    """(losses, hash of the parameters) of preset paper's first steps; in fp16 the first ones overflow."""
    backend = CudaBackend(precision, deterministic=True)
    tokens, _ = load_tokens(CORPUS, None)
    values, config = recipe("paper"), PRESETS["paper"]
    sizes = dict(batch_size=values["batch_size"], seq_len=config.block_size, micro_batches=1)
    sizes |= dict(optimizer=ADAMW, capture=captured, loss_scale=dict(factor=2.0**30, interval=2))
    trainer, windows = Trainer(config, [backend], **sizes), Windows(tokens, config.block_size)
    # a changing learning rate, which every replay must read
    return [
        trainer.step(read_batch(trainer, windows), values["lr"] / (1 + i)).loss for i in range(steps)
    ], parameter_hash(trainer)


@gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_replayed_step_has_the_bits_of_a_direct_one_in_every_run(precision):
    runs = [paper_run(precision), paper_run(precision), paper_run(precision, captured=False)]
    assert runs[0] == runs[1] == runs[2]

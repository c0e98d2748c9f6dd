"""The rungs of the parity ladder: what is compared, with which tolerance, and where the first difference is.

A rung is a function of the options (see __main__.py) that returns an Outcome.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

import numpy as np

from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.training_runs import train
from benchmarks.parity import kernels
from benchmarks.parity.checks import difference, place_of
from benchmarks.parity.examine import examine
from benchmarks.ranks.parity import first_difference
from gpt2core.architecture import GPT2Config
from gpt2core.communicator import CommunicatorError, Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError, counted
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.tensor import Tensor
from gpt2core.training_loop import read_batch
from gpt2core.tree_sum import tree_sum
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi import collectives
from testing import jobs

MODEL = GPT2Config(vocab_size=36, block_size=16, n_layer=2, n_head=4, n_embd=32, tied=False)
SMALL = GPT2Config(vocab_size=24, block_size=8, n_layer=1, n_head=2, n_embd=16, tied=False)  # for the interpreter
LR = 3e-3
BUCKET_MB = 0.02  # small enough for several buckets in these models
LIMIT = 600  # seconds that a thread may wait for another one: the interpreter is slow
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Outcome:
    """The result of a rung. found: the first difference, as text, or None."""

    passed: bool
    measured: str
    found: str | None = None


@dataclass(frozen=True)
class Rung:
    """One row of the table. needs: see missing()."""

    name: str
    compared: str
    tolerance: str
    run: Callable
    needs: tuple = ()

    def reason(self):
        """Why this machine cannot run it, or None."""
        return next(filter(None, map(missing, self.needs)), None)


def outcome(found, measured):
    """The Outcome of a rung that searches for a Difference."""
    return Outcome(found is None, measured if found is None else "a difference", found and str(found))


# -- what this machine has ---------------------------------------------------------------------------------------------


@functools.cache
def gpu_count():
    """The number of GPUs, or 0 if Triton's interpreter was selected."""
    return 0 if os.environ.get("TRITON_INTERPRET", "0") != "0" else len(nvidia_smi("name"))


def missing(need):
    """Why this machine does not have a need of a rung (a package or one of the names below), or None."""
    if need == "MPI":
        return message_of(jobs.launcher)
    if need == "stage 2":  # its kernels, on a GPU or in Triton's interpreter
        from stage2_cuda.runtime import triton_launch

        return message_of(triton_launch.array_module)
    if need == "two GPUs":
        return f"needs two GPUs, and this machine has {gpu_count()}" if gpu_count() < 2 else None
    if need == "no GPU":
        return "fakes a GPU; rung stage-3 uses the real ones" if gpu_count() else None
    return None if find_spec(need) else f"needs {need}: pip install {need}"


def message_of(function):
    """The message of the ConfigError that function() raises, or None."""
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


# -- a small training run ----------------------------------------------------------------------------------------------


def windows_of(config):
    return Windows(np.random.default_rng(0).integers(0, config.vocab_size, 2000), config.block_size)


def trainer_maker(backend, config=MODEL, batch_size=8, micro_batches=4, **parallel):
    """make_trainer(world) of examine(): a Trainer of a small model without CUDA graphs."""

    def make_trainer(world):
        return Trainer(
            config, [backend()], batch_size=batch_size, seq_len=config.block_size, micro_batches=micro_batches,
            optimizer=dict(clip=0.5, weight_decay=0.1), world=world, seed=3, capture=False,
            parallel=ParallelConfig(bucket_mb=BUCKET_MB, **parallel),
        )  # fmt: skip

    return make_trainer


def trained(world, make_trainer, config, steps):
    """The log of a training run, a dictionary for each step as first_difference() compares them."""
    trainer, windows, log = make_trainer(world), windows_of(config), []
    for step in range(steps):
        report = trainer.step(read_batch(trainer, windows), LR)
        log.append({"step": step, "loss": report.loss, "grad_norm": report.grad_norm})
    log[-1]["parameters_sha256"] = parameter_hash(trainer)
    return log


def examined(make_trainer, config, steps, ranks=1, exact=True, world_of=lambda threads: threads):
    """The first Difference of a training run on `ranks` threads, or None."""

    def run(threads):
        return examine(make_trainer, windows_of(config), steps, LR, world_of(threads), exact)

    return run(Solo()) if ranks == 1 else run_ranks(ranks, run, timeout=LIMIT)[0]


# -- kernels, model, collectives ---------------------------------------------------------------------------------------


def kernels_of_stage_0(options):
    return outcome(kernels.first_difference(NumpyBackend()), f"{len(kernels.SHAPES)} shapes, forward and backward")


def kernels_of_stage_2(options):
    from stage2_cuda.cuda_backend import CudaBackend

    precisions = PRECISIONS if gpu_count() else ("fp32",)
    shapes = kernels.SHAPES if gpu_count() or options.full else kernels.SHAPES[:1]  # the interpreter is slow
    for precision in precisions:
        if found := kernels.first_difference(CudaBackend(precision), shapes):
            return Outcome(False, f"a difference in {precision}", str(found))
    return Outcome(True, ", ".join(precisions))


def model_against_transformers(options):
    """Logits, loss and the gradient of every parameter, of a tied and an untied model."""
    worst = 0.0
    for tied in (False, True):
        found, error = compare_with_transformers(GPT2Config(37, 24, 2, 4, 32, tied))
        worst = max(worst, error)
        if found:
            where = examined(trainer_maker(NumpyBackend), MODEL, 1) or found
            return Outcome(False, f"tied {tied}: {found.tensor} differs", str(where))
    return Outcome(True, f"largest relative error {worst:.1e}")


def compare_with_transformers(config, tolerance=1e-4):
    """(the first Difference or None, the largest relative error) of our model in fp32 and that of transformers."""
    import torch
    import transformers

    rng = np.random.default_rng(1)
    # five times as large as at the start of training: attention is not nearly uniform
    arrays = {name: array * np.float32(1 + 4 * (array.ndim > 1)) for name, array in initial_parameters(config, 0)}
    ids, targets = rng.integers(0, config.vocab_size, (2, 3, config.block_size))
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, tie_word_embeddings=config.tied, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None, attn_implementation="eager",
        )
    )  # fmt: skip
    theirs.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()}, strict=False)
    logits = theirs(torch.tensor(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    backend = NumpyBackend()
    ours = GPT2(config, {name: Tensor(array.copy(), backend, requires_grad=True) for name, array in arrays.items()})
    our_loss = ours.loss(ids, targets)
    our_loss.backward()
    pairs = {"logits": (ours.logits(ids).numpy(), logits.detach().numpy())}
    pairs["loss"] = our_loss.numpy(), loss.detach().numpy()
    for name, parameter in theirs.named_parameters():
        pairs[f"gradient of {name}"] = ours.parameters[name].grad, parameter.grad.numpy()
    found, worst = None, 0.0
    for tensor, (got, want) in pairs.items():
        place = place_of(tensor.removeprefix("gradient of transformer.").rpartition(".")[0])
        found = found or difference(got, want, tolerance, place=place or "model", tensor=tensor)
        worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return found, worst


def collectives_of_stage_1(options):
    """Every algorithm of stage1_mpi/collectives.py on 2, 3 and 4 threads, with the sum in float64."""
    for ranks in (2, 3, 4):
        for found in run_ranks(ranks, first_collective_difference, timeout=LIMIT):
            if found:
                return outcome(found, "")
    return Outcome(True, f"{', '.join(collectives.ALL_REDUCE)} on 2, 3 and 4 ranks")


def first_collective_difference(comm):
    """The first Difference of the collectives of stage 1 on this rank, or None."""
    p, r = comm.size, comm.rank
    xs = [np.random.default_rng(rank).standard_normal((p * 5, 3)).astype(np.float32) for rank in range(p)]
    total, mine = tree_sum([x.astype(np.float64) for x in xs]), slice(5 * r, 5 * r + 5)
    calls = [("all_reduce", total, dict(algorithm=name)) for name in collectives.ALL_REDUCE]
    calls += [("reduce_scatter", total[mine], dict(algorithm=name)) for name in collectives.REDUCE_SCATTER]
    calls += [("all_gather", np.concatenate(xs), {}), ("all_to_all", np.concatenate([x[mine] for x in xs]), {})]
    calls += [("broadcast", xs[p - 1], dict(root=p - 1))]
    found = None
    for name, want, options in calls:
        place = ", ".join([name, *(f"{key} {value}" for key, value in options.items())])
        try:  # every rank makes every call, so that no rank waits for another
            got = getattr(collectives, name)(comm, xs[r], **options)
        except CommunicatorError as error:
            raise CommunicatorError(f"{place}: {error}") from error
        found = found or difference(got, want, 1e-5, place=f"{place}, rank {r} of {p}", tensor="result")
    return found


# -- training steps ----------------------------------------------------------------------------------------------------


def gradients_of_stage_0(options):
    steps = steps_of(options, 2)
    found = examined(trainer_maker(NumpyBackend), MODEL, steps)
    return outcome(found, f"{counted(steps, 'step')}: each kernel, each gradient")


def gradients_of_stage_2(options):
    from stage2_cuda.cuda_backend import CudaBackend
    from stage2_cuda.runtime.triton_launch import GpuLauncher

    config, steps = (MODEL, steps_of(options, 2)) if gpu_count() else (SMALL, options.steps or 1)
    make = trainer_maker(CudaBackend, config, batch_size=4, micro_batches=1)
    # compile_ahead() calls a step that computes no results to compare
    with mock.patch.object(GpuLauncher, "compile_ahead", lambda *arguments: None):
        return outcome(examined(make, config, steps), f"{counted(steps, 'step')}: each kernel, each gradient")


def strategies_on_threads(options):
    """Losses, norms and parameters of every --dp and --zero on threads, with those of one rank; tp within 1e-5."""
    steps = steps_of(options, 3)
    wanted = trained(Solo(), trainer_maker(NumpyBackend), MODEL, steps)
    ways = [dict(dp=dp, zero=zero) for dp in STRATEGIES for zero in (0, 1)]
    ways += [dict(dp="bucket", zero=1, zero_gather="forward"), dict(tp=2)]
    cases = [(ranks, how, trainer_maker(NumpyBackend, **how), MODEL, steps) for ranks in (2, 4) for how in ways]
    return first_failure(cases, wanted)


def nccl_on_threads(options):
    """The calls of NCCL of stage 3, executed by a fake on threads, give stage 2's bits."""
    from stage2_cuda.cuda_backend import CudaBackend
    from testing.fake_gpu import OnFakeGpu

    sizes = dict(config=SMALL, batch_size=4, micro_batches=2)
    wanted = trained(Solo(), trainer_maker(CudaBackend, **sizes), SMALL, 2)
    ways = dict(dp="bucket"), dict(dp="flat", zero=1)
    cases = [(2, how, trainer_maker(CudaBackend, **sizes, **how), SMALL, 2) for how in ways]
    return first_failure(cases, wanted, OnFakeGpu)


def trained_on(threads, world_of, *options):
    return trained(world_of(threads), *options)


def first_failure(cases, wanted, world_of=lambda threads: threads):
    """The Outcome of training on threads, compared with `wanted`, from trained().

    cases: [(ranks, options of ParallelConfig, make_trainer, model, steps)]. world_of(threads): the communicator.
    """
    for ranks, how, make, config, steps in cases:
        got = run_ranks(ranks, trained_on, world_of, make, config, steps, timeout=LIMIT)[0]
        exact = "tp" not in how
        text = first_difference(got, wanted)
        if text and (exact or not max(loss_errors(got, wanted)) <= 1e-5):
            found = examined(make, config, steps, ranks, exact, world_of)
            flags = " ".join(f"--{name} {value}" for name, value in how.items())
            return Outcome(False, f"{ranks} ranks, {flags}: {text}", str(found or unlocated(text)))
    return Outcome(True, f"{len(cases)} runs of {cases[0][-1]} steps are equal")


def steps_of(options, default):
    """The number of steps of a small training run."""
    return options.steps or (10 if options.full else default)


def unlocated(text):
    return f"{text}; each kernel, collective and gradient of the examined steps is right up to rounding"


# -- the scripts ------------------------------------------------------------------------------------------------------
# They run in the current directory, which has the code to compare: it may be the working folder of a student.


def stage_1_curve(options):
    """The log of stage 1 on several ranks, with that of stage 0."""
    preset, steps = ("paper", 50) if options.full else ("tiny", 8)
    common = dict(timeout=options.timeout, cwd=os.getcwd(), preset=preset, steps=steps, threads=1)
    runs = [(1, {}), (2, {"dp": "bucket", "zero": 1}), (2, {}), (4, {}), *[(8, {})] * options.full]

    def locate(ranks, parallel):
        return examined(trainer_maker(NumpyBackend, **parallel), MODEL, steps_of(options, 3), max(2, ranks))

    return equal_curves("stage0_serial", "stage1_mpi", runs, common, locate, bucket_mb=0.1)


def stage_3_curve(options):
    """The log of stage 3 on several ranks, with that of stage 2, in deterministic mode."""
    common = curve_flags(options) | dict(words=["--deterministic"], micro_batches=4)
    if not (gpu_count() or options.full):
        common |= dict(n_layer=1, block_size=8)  # the interpreter is slow
    counts = [1, *(ranks for ranks in (2, 4) if ranks <= gpu_count())] if gpu_count() > 1 else [2]
    runs = [(ranks, {"dp": "bucket"}) for ranks in counts]
    return equal_curves("stage2_cuda", "stage3_mpi_cuda", runs, common, lambda ranks, _: locate_in_stage_3(ranks))


def equal_curves(one_process, package, runs, common, locate, **more):
    """The Outcome of comparing the logs of `runs`, [(ranks, flags)] of a package, with the log of one process.

    common, more: arguments of train(), `more` of the runs. locate(ranks, flags): the first Difference of a small
    training run, or None.
    """
    wanted, _ = train(one_process, one_process, **common)
    for ranks, flags in runs:
        log, _ = train(f"{ranks} ranks", package, ranks=ranks, **common, **more, **flags)
        if text := first_difference(log, wanted):
            return Outcome(False, f"{ranks} ranks: {text}", str(locate(ranks, flags) or unlocated(text)))
    counts = ", ".join(str(ranks) for ranks, _ in runs)
    return Outcome(True, f"{common['preset']}, {common['steps']} steps on {counts} ranks: equal")


def stage_2_curve(options):
    """The losses of stage 2, with those of stage 0, at every step; 16 bits: the last loss."""
    common = curve_flags(options)
    wanted, _ = train("stage 0", "stage0_serial", **common)
    tolerances = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2} if gpu_count() else {"fp32": 1e-3}
    measured = []
    for precision, tolerance in tolerances.items():
        got, _ = train(f"stage 2, {precision}", "stage2_cuda", precision=precision, **common)
        errors = loss_errors(got, wanted)
        compared = errors if tolerance < 2e-2 else errors[-1:]
        measured.append(f"{precision} {compared.max():.1e}")
        if not compared.max() <= tolerance:
            text = f"{precision}, step {int(np.argmax(errors > tolerance))}: loss differs by {compared.max():.1e}"
            return Outcome(False, text, gradients_of_stage_2(options).found or unlocated(text))
    return Outcome(True, f"{common['preset']}, {common['steps']} steps: {', '.join(measured)}")


def curve_flags(options):
    """The arguments of train() for the curves of stages 2 and 3."""
    preset, steps = ("paper", 50) if options.full else ("tiny", 20)
    if not gpu_count():
        preset, steps = "nano", 20 if options.full else 2
    return dict(timeout=options.timeout, cwd=os.getcwd(), preset=preset, steps=steps)


def loss_errors(log, wanted):
    """The relative deviation of the loss of each step."""
    return np.abs([line["loss"] / other["loss"] - 1 for line, other in zip(log, wanted, strict=True)])


def gradients_of_stage_3(options):
    return outcome(locate_in_stage_3(2), "2 ranks, 2 steps: each kernel, collective and gradient")


def locate_in_stage_3(ranks):
    """The first Difference of a training run of stage 3 on real GPUs, or on fake ones in the interpreter."""
    if not gpu_count():
        from stage2_cuda.cuda_backend import CudaBackend
        from testing.fake_gpu import OnFakeGpu

        make = trainer_maker(CudaBackend, SMALL, batch_size=4, micro_batches=2, dp="bucket")
        return examined(make, SMALL, 1, 2, True, OnFakeGpu)
    return jobs.run_mpi(ranks, examine_on_gpus)[0]


def examine_on_gpus(host):
    """examine() on the ranks of an MPI job. With one micro-batch, each of them uses the side stream of its GPU."""
    from stage2_cuda.cuda_backend import CudaBackend
    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world = NcclCommunicator(host)
    world.use_transport(None)  # NCCL if each rank has a GPU of its own
    make = trainer_maker(CudaBackend, MODEL, batch_size=8, micro_batches=world.size, dp="bucket")
    return examine(make, windows_of(MODEL), 2, LR, world, exact=True)


EQUAL = "equal bits"
RUNGS = [
    Rung("kernels-0", "stage 0: every kernel, with its formula in float64", "fp32 1e-5", kernels_of_stage_0),
    Rung("model", "stage 0: logits, loss, gradients, with transformers", "1e-4", model_against_transformers,
         ("torch", "transformers")),
    Rung("gradients-0", "stage 0: training steps, with a model in float64", "1e-4", gradients_of_stage_0),
    Rung("collectives", "stage 1: every collective, with its sum in float64", "1e-5", collectives_of_stage_1),
    Rung("strategies", "every --dp and --zero, --tp 2 on threads, with one rank", "equal bits; tp 1e-5",
         strategies_on_threads),
    Rung("stage-1", "stage 1 = stage 0: losses on 1, 2, 4 (8) ranks", EQUAL, stage_1_curve, ("MPI",)),
    Rung("kernels-2", "stage 2: every kernel, with its formula in float64", "fp32 1e-5, tf32 1e-3, 16 bits 1e-2",
         kernels_of_stage_2, ("stage 2",)),
    Rung("gradients-2", "stage 2: training steps, with a model in float64", "1e-4", gradients_of_stage_2,
         ("stage 2",)),
    Rung("stage-2", "stage 2 ~ stage 0: losses", "fp32 1e-3, tf32 1e-2, 16 bits 2e-2", stage_2_curve, ("stage 2",)),
    Rung("nccl", "stage 3: NCCL's calls, executed by a fake, with stage 2", EQUAL, nccl_on_threads,
         ("stage 2", "no GPU")),
    Rung("gradients-3", "stage 3: training steps on two GPUs, with a model in float64", "1e-4; sums equal bits",
         gradients_of_stage_3, ("stage 2", "MPI", "two GPUs")),
    Rung("stage-3", "stage 3 = stage 2: losses on 1, 2 (4) ranks", EQUAL, stage_3_curve, ("stage 2", "MPI")),
]  # fmt: skip

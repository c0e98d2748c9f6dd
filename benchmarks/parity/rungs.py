"""The rungs of the parity ladder: what is compared, with which tolerance, and where the first difference is.

A rung is a function of the options (see __main__.py) that returns an Outcome. Its `reason()` is the reason why this
machine cannot run it, or None.
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
    """One row of the table."""

    name: str
    compared: str
    tolerance: str
    run: Callable
    reason: Callable = lambda: None


def outcome(found, measured):
    """The Outcome of a rung that searches for a Difference."""
    return Outcome(found is None, measured if found is None else "a difference", found and str(found))


# -- what this machine has ---------------------------------------------------------------------------------------------


@functools.cache
def gpu_count():
    """The number of GPUs, or 0 if Triton's interpreter was selected."""
    return 0 if os.environ.get("TRITON_INTERPRET", "0") != "0" else len(nvidia_smi("name"))


def needs(*packages):
    """reason() of a rung that imports these packages."""

    def reason():
        missing = [name for name in packages if find_spec(name) is None]
        return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None

    return reason


def message_of(function):
    """The message of the ConfigError that function() raises, or None."""
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


def needs_mpi():
    """reason() of a rung that starts ranks."""
    return message_of(jobs.launcher)


def needs_stage_2():
    """reason() of a rung that runs the kernels of stage 2, on a GPU or in Triton's interpreter."""
    from stage2_cuda.runtime import triton_launch

    return message_of(triton_launch.array_module)


def needs_stage_3():
    return needs_stage_2() or needs_mpi()


def needs_no_gpu():
    return needs_stage_2() or ("fakes a GPU; rung stage-3 uses the real ones" if gpu_count() else None)


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
    """[(loss, gradient norm) of each step], and the hash of the parameters."""
    trainer, windows = make_trainer(world), windows_of(config)
    reports = [trainer.step(read_batch(trainer, windows), LR) for _ in range(steps)]
    return [(report.loss, report.grad_norm) for report in reports], parameter_hash(trainer)


def examined(make_trainer, config, steps, ranks=1, exact=True, world_of=lambda threads: threads):
    """The first Difference of a training run on `ranks` threads, or None."""

    def run(threads):
        return examine(make_trainer, windows_of(config), steps, LR, world_of(threads), exact)

    return run(Solo()) if ranks == 1 else run_ranks(ranks, run, timeout=LIMIT)[0]


def curve_difference(got, wanted):
    """What is different in two results of trained(), as text; None if they have equal bits."""
    for step, (one, other) in enumerate(zip(got[0], wanted[0], strict=True)):
        if one != other:
            return f"step {step}: loss and norm are {one} instead of {other}"
    return None if got[1] == wanted[1] else "the parameters after the last step differ"


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
    calls = []
    for name in collectives.ALL_REDUCE:
        call = functools.partial(collectives.all_reduce, comm, xs[r], algorithm=name)
        calls.append((f"all_reduce, algorithm {name}", total, call))
    for name in collectives.REDUCE_SCATTER:
        call = functools.partial(collectives.reduce_scatter, comm, xs[r], algorithm=name)
        calls.append((f"reduce_scatter, algorithm {name}", total[mine], call))
    calls += [("all_gather", np.concatenate(xs), lambda: collectives.all_gather(comm, xs[r]))]
    calls += [("all_to_all", np.concatenate([x[mine] for x in xs]), lambda: collectives.all_to_all(comm, xs[r]))]
    calls += [("broadcast", xs[p - 1], lambda: collectives.broadcast(comm, xs[r], p - 1))]
    found = None
    for place, want, call in calls:
        try:
            got = call()  # every rank makes every call, so that no rank waits for another
        except CommunicatorError as error:
            raise CommunicatorError(f"{place}: {error}") from error
        found = found or difference(got, want, 1e-5, place=f"{place}, rank {r} of {p}", tensor="result")
    return found


# -- training steps ----------------------------------------------------------------------------------------------------


def gradients_of_stage_0(options):
    steps = steps_of(options, 2)
    return outcome(
        examined(trainer_maker(NumpyBackend), MODEL, steps), f"{counted(steps, 'step')}: each kernel, each gradient"
    )


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
    steps, count = steps_of(options, 3), 0
    wanted = trained(Solo(), trainer_maker(NumpyBackend), MODEL, steps)
    ways = [dict(dp=dp, zero=zero) for dp in STRATEGIES for zero in (0, 1)]
    ways += [dict(dp="bucket", zero=1, zero_gather="forward"), dict(tp=2)]
    for ranks in (2, 4):
        for how in ways:
            make, exact, count = trainer_maker(NumpyBackend, **how), "tp" not in how, count + 1
            got = run_ranks(ranks, trained, make, MODEL, steps, timeout=LIMIT)[0]
            text = curve_difference(got, wanted)
            near = np.allclose([loss for loss, _ in got[0]], [loss for loss, _ in wanted[0]], rtol=1e-5, atol=0)
            if text and (exact or not near):
                found = examined(make, MODEL, steps, ranks, exact)
                flags = " ".join(f"--{name} {value}" for name, value in how.items())
                return Outcome(False, f"{ranks} ranks, {flags}: {text}", str(found or unlocated(text)))
    return Outcome(True, f"{count} runs of {steps} steps are equal")


def steps_of(options, default):
    """The number of steps of a small training run."""
    return options.steps or (10 if options.full else default)


def unlocated(text):
    return f"{text}; each kernel, collective and gradient of the examined steps is right up to rounding"


def nccl_on_threads(options):
    """The calls of NCCL of stage 3, executed by a fake on threads, give stage 2's bits."""
    from stage2_cuda.cuda_backend import CudaBackend
    from testing.fake_gpu import OnFakeGpu

    sizes = dict(config=SMALL, batch_size=4, micro_batches=2)
    wanted, count = trained(Solo(), trainer_maker(CudaBackend, **sizes), SMALL, 2), 0
    for how in (dict(dp="bucket"), dict(dp="flat", zero=1)):
        make, count = trainer_maker(CudaBackend, **sizes, **how), count + 1
        got = run_ranks(2, lambda threads, make=make: trained(OnFakeGpu(threads), make, SMALL, 2), timeout=LIMIT)[0]
        if text := curve_difference(got, wanted):
            return Outcome(False, text, str(examined(make, SMALL, 1, 2, True, OnFakeGpu) or unlocated(text)))
    return Outcome(True, f"{count} runs of 2 steps are equal")


# -- the scripts ------------------------------------------------------------------------------------------------------
# They run in the current directory, which has the code to compare: it may be the working folder of a student.


def stage_1_curve(options):
    """The log of stage 1 on several ranks, with that of stage 0."""
    preset, steps = ("paper", 50) if options.full else ("tiny", 8)
    common = dict(timeout=options.timeout, cwd=os.getcwd(), preset=preset, steps=steps, threads=1)
    wanted, _ = train("stage 0", "stage0_serial", **common)
    runs = [(1, {}), (2, {"dp": "bucket", "zero": 1}), (2, {}), (4, {})]
    for ranks, parallel in runs + [(8, {})] * options.full:
        log, _ = train(f"{ranks} ranks", "stage1_mpi", ranks=ranks, bucket_mb=0.1, **common, **parallel)
        if text := first_difference(log, wanted):
            found = examined(trainer_maker(NumpyBackend, **parallel), MODEL, steps_of(options, 3), max(2, ranks))
            return Outcome(False, f"{ranks} ranks: {text}", str(found or unlocated(text)))
    return Outcome(True, f"{preset}, {steps} steps: {len(runs) + options.full} runs are equal")


def stage_2_curve(options):
    """The losses of stage 2, with those of stage 0, at every step; 16 bits: the last loss."""
    common = curve_flags(options)
    wanted = losses_of(train("stage 0", "stage0_serial", **common))
    tolerances = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2} if gpu_count() else {"fp32": 1e-3}
    measured = []
    for precision, tolerance in tolerances.items():
        got = losses_of(train(f"stage 2, {precision}", "stage2_cuda", precision=precision, **common))
        errors = np.abs(np.divide(got, wanted) - 1)
        compared = errors if tolerance < 2e-2 else errors[-1:]
        measured.append(f"{precision} {compared.max():.1e}")
        if not compared.max() <= tolerance:
            text = f"{precision}, step {int(np.argmax(errors > tolerance))}: loss differs by {compared.max():.1e}"
            found = gradients_of_stage_2(options).found or unlocated(text)
            return Outcome(False, text, found)
    return Outcome(True, f"{common['preset']}, {common['steps']} steps: {', '.join(measured)}")


def curve_flags(options):
    """The arguments of train() for the curves of stages 2 and 3."""
    preset, steps = ("paper", 50) if options.full else ("tiny", 20)
    if not gpu_count():
        preset, steps = "nano", 20 if options.full else 2
    return dict(timeout=options.timeout, cwd=os.getcwd(), preset=preset, steps=steps)


def losses_of(run):
    """The losses of a result of train()."""
    return [line["loss"] for line in run[0]]


def stage_3_curve(options):
    """The log of stage 3 on several ranks, with that of stage 2, in deterministic mode."""
    common = curve_flags(options) | dict(words=["--deterministic"], micro_batches=4)
    if not (gpu_count() or options.full):
        common |= dict(n_layer=1, block_size=8)  # the interpreter is slow
    wanted, _ = train("stage 2", "stage2_cuda", **common)
    counts = [1, *(ranks for ranks in (2, 4) if ranks <= gpu_count())] if gpu_count() > 1 else [2]
    for ranks in counts:
        log, _ = train(f"{ranks} ranks", "stage3_mpi_cuda", ranks=ranks, dp="bucket", **common)
        if text := first_difference(log, wanted):
            return Outcome(False, f"{ranks} ranks: {text}", str(locate_in_stage_3(ranks) or unlocated(text)))
    steps, on = f"{common['preset']}, {common['steps']} steps", ", ".join(map(str, counts))
    return Outcome(True, f"{steps} on {on} ranks: equal")


def gradients_of_stage_3(options):
    found = locate_in_stage_3(2)
    return outcome(found, "2 ranks, 2 steps: each kernel, collective and gradient")


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


def needs_two_gpus():
    few = f"needs two GPUs, and this machine has {gpu_count()}" if gpu_count() < 2 else None
    return needs_stage_3() or few


EQUAL = "equal bits"
RUNGS = [
    Rung("kernels-0", "stage 0: every kernel, with its formula in float64", "fp32 1e-5", kernels_of_stage_0),
    Rung("model", "stage 0: logits, loss, gradients, with transformers", "1e-4", model_against_transformers,
         needs("torch", "transformers")),
    Rung("gradients-0", "stage 0: training steps, with a model in float64", "1e-4", gradients_of_stage_0),
    Rung("collectives", "stage 1: every collective, with its sum in float64", "1e-5", collectives_of_stage_1),
    Rung("strategies", "every --dp and --zero, --tp 2 on threads, with one rank", "equal bits; tp 1e-5",
         strategies_on_threads),
    Rung("stage-1", "stage 1 = stage 0: losses on 1, 2, 4 (8) ranks", EQUAL, stage_1_curve, needs_mpi),
    Rung("kernels-2", "stage 2: every kernel, with its formula in float64", "fp32 1e-5, tf32 1e-3, 16 bits 1e-2",
         kernels_of_stage_2, needs_stage_2),
    Rung("gradients-2", "stage 2: training steps, with a model in float64", "1e-4", gradients_of_stage_2,
         needs_stage_2),
    Rung("stage-2", "stage 2 ~ stage 0: losses", "fp32 1e-3, tf32 1e-2, 16 bits 2e-2", stage_2_curve, needs_stage_2),
    Rung("nccl", "stage 3: NCCL's calls, executed by a fake, with stage 2", EQUAL, nccl_on_threads, needs_no_gpu),
    Rung("gradients-3", "stage 3: training steps on two GPUs, with a model in float64", "1e-4; sums equal bits",
         gradients_of_stage_3, needs_two_gpus),
    Rung("stage-3", "stage 3 = stage 2: losses on 1, 2 (4) ranks", EQUAL, stage_3_curve, needs_stage_3),
]  # fmt: skip

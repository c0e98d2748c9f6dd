"""What does each optimisation of the GPU training step gain?

Each variant of the step leaves out one optimisation. The variants and the full step are measured in interleaved rounds,
and the time of a variant is divided by that of the full step in the same round.

    python -m benchmarks.gpu.choices                            # both models
    python -m benchmarks.gpu.choices --preset paper --rounds 1  # a quick trial
"""

import functools

import numpy as np

from benchmarks.harness.ours import GPU_OPTIMIZER, check_gpu, share_graph_memory, train_step
from benchmarks.harness.report import paired_ratio
from benchmarks.harness.rounds import SEED, interleaved, median_seconds, random_batch
from benchmarks.harness.script import benchmark
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.presets import PRESETS

FULL_STEP = "nothing"  # the name of the full step in results/, because it leaves out nothing
COPIED, UNTIMED = "gradients copied to the buffer", "product algorithms not chosen by timing"
UNPADDED = "vocabulary not padded"
CHANGES = "no graph", "one stream", COPIED, "GELU in separate kernels", UNTIMED, "logits computed twice", UNPADDED
SIZES = {"gpt2": (64, 10), "paper": (16, 100)}  # preset: (sequences per step, steps per round)


def leave_out(backend, change):
    """Remove one optimisation, one of CHANGES, from a backend; COPIED is in copy_gradients().

    Raises ValueError for another text, because its row would measure the full step.
    """
    from stage2_cuda.runtime.side_stream import NoStream
    from stage2_cuda.tuning.tuner import Tuner

    products, forward = backend.products, backend.unembed_cross_entropy_forward
    match change:
        case "no graph":
            backend.runtime.captures = False
        case "one stream":
            backend.runtime.side = NoStream()
        case "GELU in separate kernels":
            products.fuses_gelu = lambda n, k: False
        case "product algorithms not chosen by timing":  # but the first deterministic one that cublasLt proposes
            products.gemm.tuner, products.gemm._deterministic = Tuner(backend.xp), True
        case "logits computed twice":  # forward does not compute their gradients
            backend.unembed_cross_entropy_forward = lambda x, w, targets, first, *_: forward(x, w, targets, first)
        case "vocabulary not padded":
            backend.whole_rows = lambda w: w
        case _ if change not in (FULL_STEP, COPIED):
            raise ValueError(f"leave_out() does not know the change {change!r}")


def copy_gradients(trainer):
    """Write weight gradients to new arrays and copy these to the gradient buffer, instead of writing to it directly."""

    def receive_array(receive, gradient):
        receive(gradient(None) if callable(gradient) else gradient)

    for worker in trainer.accumulator.workers:
        for tensor in worker.tensors.values():
            tensor.receive = functools.partial(receive_array, tensor.receive)


class Variants:
    """Makes trainers that are measured in turn.

    Each has its own parameters and optimizer state; their captured steps share the memory of their intermediate arrays.
    """

    def __init__(self, config, batch_size, precision):
        self.batch = random_batch(np.random.default_rng(SEED), config.vocab_size, batch_size, config.block_size)
        self.sizes = dict(batch_size=batch_size, seq_len=config.block_size, micro_batches=1)
        self.config, self.precision = config, precision
        self.memory_owner = None  # the first captured step; the others use its memory

    def trainer(self, change, steps=4):
        """A trainer with a change, one of CHANGES or FULL_STEP, after `steps` untimed steps.

        The untimed steps compile kernels, choose algorithms, capture the graph and replay it.
        """
        from stage2_cuda.cuda_backend import CudaBackend

        backend = CudaBackend(self.precision, deterministic=False)
        leave_out(backend, change)
        trainer = Trainer(self.config, [backend], **self.sizes, optimizer=GPU_OPTIMIZER)
        if change == COPIED:
            copy_gradients(trainer)
        self.memory_owner = share_graph_memory(self.memory_owner, backend)
        self.median_step_seconds(trainer, steps)
        backend.runtime.release_cached_memory()
        return trainer

    def median_step_seconds(self, trainer, steps):
        """Run `steps` training steps; return the median of their seconds."""
        return median_seconds(functools.partial(train_step, trainer, *self.batch), steps)


def measure(preset, precision, rounds):
    """The results of FULL_STEP and of all changes, with the seconds of a step in each round."""
    batch_size, steps = SIZES[preset]
    variants = Variants(PRESETS[preset], batch_size, precision)
    trainers = {name: variants.trainer(name) for name in (FULL_STEP, *CHANGES)}

    def seconds(trainer):
        variants.median_step_seconds(trainer, 1)  # discarded, because the caches hold data of the previous variant
        return variants.median_step_seconds(trainer, steps)

    timers = {name: functools.partial(seconds, trainer) for name, trainer in trainers.items()}
    measured = interleaved(timers, rounds)
    return [
        {"preset": preset, "without": name, "seconds": each, "gain": paired_ratio(each, measured[FULL_STEP])}
        for name, each in measured.items()
    ]


@benchmark(
    "gpu-choices",
    common=dict(precision="bf16", rounds=5),
    preset=dict(choices=SIZES, nargs="+", default=list(SIZES), help="models (default both)"),
)
def main(args):
    check_gpu()
    for preset in args.preset:
        yield measure(preset, args.precision, args.rounds)

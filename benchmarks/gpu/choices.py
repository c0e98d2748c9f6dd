"""What does each optimisation of the GPU training step gain?

Each variant of the step leaves out one optimisation. The variants and the full step are measured in interleaved rounds,
and the time of a variant is divided by that of the full step in the same round.

    python -m benchmarks.gpu.choices                            # both models
    python -m benchmarks.gpu.choices --preset paper --rounds 1  # a quick trial
"""

import functools

import numpy as np

from benchmarks.harness.ours import GPU_OPTIMIZER, check_gpu, share_graph_memory, train_step
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser, paired_ratio, save_each
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED, interleaved, median_seconds, random_batch
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.presets import PRESETS

FULL_STEP = "nothing"  # the name of the full step in results/, because it leaves out nothing
SIZES = {"gpt2": (64, 10), "paper": (16, 100)}  # preset: (sequences per step, steps per round)


def no_graph(backend):
    """Launch every kernel from Python, not from a CUDA graph."""
    backend.runtime.captures = False


def one_stream(backend):
    """Compute weight gradients on the main stream instead of a second stream."""
    from stage2_cuda.runtime.side_stream import NoStream

    backend.runtime.side = NoStream()


def copied_gradients(trainer):
    """Write weight gradients to new arrays and copy these to the gradient buffer, instead of writing to it directly."""

    def receive_array(receive, gradient):
        receive(gradient(None) if callable(gradient) else gradient)

    for worker in trainer.accumulator.workers:
        for tensor in worker.tensors.values():
            tensor.receive = functools.partial(receive_array, tensor.receive)


def no_epilogues(backend):
    """Compute GELU and its derivative in separate kernels, not in the epilogue of a cublasLt product."""
    backend.products.fuses_gelu = lambda n, k: False


def untimed_algorithms(backend):
    """Use the first deterministic algorithm that cublasLt proposes, not the one that was fastest in a timing."""
    from stage2_cuda.tuning.tuner import Tuner

    backend.products.gemm.tuner, backend.products.gemm._deterministic = Tuner(backend.xp), True


def logits_twice(backend):
    """Compute the logits again in backward, instead of computing their gradient in forward."""
    forward = backend.unembed_cross_entropy_forward
    backend.unembed_cross_entropy_forward = lambda x, w, targets, first, *_: forward(x, w, targets, first)


def unpadded_vocabulary(backend):
    """Compute logits only for the tokens of the vocabulary (50257 for gpt2), without the padding by whole_rows()."""
    backend.whole_rows = lambda w: w


CHANGES = {
    "no graph": no_graph,
    "one stream": one_stream,
    "gradients copied to the buffer": copied_gradients,
    "GELU in separate kernels": no_epilogues,
    "product algorithms not chosen by timing": untimed_algorithms,
    "logits computed twice": logits_twice,
    "vocabulary not padded": unpadded_vocabulary,
}


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
        """Make a trainer, apply `change` to it, and run `steps` untimed steps; return the trainer.

        change: a function of CHANGES, or None for the full step. The untimed steps compile kernels, choose algorithms,
        capture the graph and replay it.
        """
        from stage2_cuda.cuda_backend import CudaBackend

        backend = CudaBackend(self.precision, deterministic=False)
        if change and change is not copied_gradients:
            change(backend)
        trainer = Trainer(self.config, [backend], **self.sizes, optimizer=GPU_OPTIMIZER)
        if change is copied_gradients:  # the only change that needs the trainer
            change(trainer)
        self.memory_owner = share_graph_memory(self.memory_owner, backend)
        self.median_step_seconds(trainer, steps)
        backend.runtime.release_cached_memory()
        return trainer

    def median_step_seconds(self, trainer, steps):
        """Run `steps` training steps; return the median of their seconds."""
        return median_seconds(functools.partial(train_step, trainer, *self.batch), steps)


def measure(preset, precision, rounds):
    """The results of FULL_STEP and of CHANGES, with the seconds of a step in each round."""
    batch_size, steps = SIZES[preset]
    variants = Variants(PRESETS[preset], batch_size, precision)
    trainers = {name: variants.trainer(change) for name, change in {FULL_STEP: None, **CHANGES}.items()}

    def seconds(trainer):
        variants.median_step_seconds(trainer, 1)  # discarded, because the caches hold data of the previous variant
        return variants.median_step_seconds(trainer, steps)

    timers = {name: functools.partial(seconds, trainer) for name, trainer in trainers.items()}
    measured = interleaved(timers, rounds)
    return [
        {"preset": preset, "without": name, "seconds": each, "gain": paired_ratio(each, measured[FULL_STEP])}
        for name, each in measured.items()
    ]


def main():
    parser = benchmark_parser("benchmarks.gpu.choices", __doc__)
    parser.add_argument("--preset", choices=SIZES, nargs="+", default=list(SIZES), help="models (default both)")
    parser.add_flags(precision="bf16", rounds=5)
    args = parser.parse_args()
    check_gpu()
    tables = (measure(preset, args.precision, args.rounds) for preset in args.preset)
    save_each(args, tables, TABLES["gpu-choices"].print)


if __name__ == "__main__":
    run_main(main)

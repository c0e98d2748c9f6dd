"""What does each optimisation of the GPU training step gain? A step without one of them against the full step.

The variants are measured in interleaved rounds, and each is compared with the full step of its round.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks.harness.ours import GPU_OPTIMIZER, share_workspace, train_step
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, paired_ratio, print_table, save
from gpt2core.app.presets import PRESETS
from gpt2core.errors import ConfigError
from gpt2core.trainer import Trainer

BENCHMARK = "benchmarks.gpu.choices"
SEED = 20260101
FULL = "nothing"  # the row of the full step: "without nothing"
SIZES = {"gpt2": (64, 10), "paper": (16, 100)}  # sequences per step, steps per round


# -- changes to a backend ---------------------------------------------------------------------------------------------


def no_graph(backend):
    """Every kernel launched from Python."""
    backend.runtime.uses_graphs = False


def one_stream(backend):
    """Weight gradients on the main stream instead of a second one."""
    from stage2_cuda.runtime.side_stream import NoStream

    backend.runtime.side = NoStream()


def copied_gradients(trainer):
    """Weight gradients in new arrays that are then copied to the gradient buffer."""
    for worker in trainer.accumulator.workers:
        for tensor in worker.tensors.values():
            tensor.grad_buffer = None


def no_epilogues(backend):
    """GELU and its derivative in separate kernels."""
    backend.products.fuses_gelu = lambda n, k: False


def first_algorithms(backend):
    """The first deterministic algorithm that cublasLt proposes, without timing and without saved choices."""
    from stage2_cuda.tuning.tuner import Tuner

    backend.products.gemm.tuner, backend.products.gemm._deterministic = Tuner(backend.xp), True


def logits_twice(backend):
    """Logits recomputed in backward, instead of computing their gradient in forward."""
    forward = backend.unembed_cross_entropy_forward
    backend.unembed_cross_entropy_forward = lambda x, w, targets, first, scale, dloss=None, out=None: forward(
        x, w, targets, first
    )


def odd_vocabulary(backend):
    """Matrix products with exactly as many columns as the vocabulary has tokens (50257 for gpt2)."""
    backend.with_padding_rows = lambda w: w


CHOICES = {
    "no graph": no_graph,
    "one stream": one_stream,
    "gradients copied to the buffer": copied_gradients,
    "GELU in separate kernels": no_epilogues,
    "products not timed": first_algorithms,
    "logits computed twice": logits_twice,
    "vocabulary not padded": odd_vocabulary,
}


# -- timing -----------------------------------------------------------------------------------------------------------


class Variants:
    """Makes trainers to measure alternately: each has its own state; their captured steps share one workspace."""

    def __init__(self, config, batch_size, precision):
        tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch_size, config.block_size + 1))
        self.batch = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        self.sizes = dict(batch_size=batch_size, seq_len=config.block_size, micro_batches=1)
        self.config, self.precision, self.first = config, precision, None

    def trainer(self, change, steps=4):
        """A new trainer that has run `steps` steps, which compile, choose algorithms, capture and replay."""
        from stage2_cuda.cuda_backend import CudaBackend

        backend = CudaBackend(self.precision, deterministic=False)
        if change and change is not copied_gradients:
            change(backend)
        trainer = Trainer(self.config, [backend], **self.sizes, optimizer=GPU_OPTIMIZER)
        if change is copied_gradients:
            change(trainer)
        self.first = share_workspace(self.first, backend)
        self.seconds(trainer, steps)
        backend.runtime.release_cached_memory()
        return trainer

    def seconds(self, trainer, steps):
        """The median seconds of `steps` steps."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            train_step(trainer, *self.batch)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def measure(preset, precision, rounds):
    """{optimisation left out: seconds of a step in each round}."""
    batch_size, steps = SIZES[preset]
    variants = Variants(PRESETS[preset], batch_size, precision)
    trainers = {name: variants.trainer(change) for name, change in {FULL: None, **CHOICES}.items()}
    found = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            variants.seconds(trainer, 1)  # untimed: the caches hold the data of the other variants
            found[name].append(variants.seconds(trainer, steps))
    return found


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=SIZES, nargs="+", default=list(SIZES), help="models (default both)")
    add("--precision", default="bf16", help="precision (default bf16)")
    add("--rounds", type=int, default=5, help="number of rounds; each round times every program (default 5)")
    add_save_flags(add)
    args = parser.parse_args()
    from stage2_cuda.runtime.triton_launch import array_module

    if array_module() is np:
        raise ConfigError("TRITON_INTERPRET is set; unset it, because this benchmark needs a GPU")
    results = []
    for preset in args.preset:
        found, rows = measure(preset, args.precision, args.rounds), []
        for name, seconds in found.items():
            gain = paired_ratio(seconds, found[FULL])
            results.append({"preset": preset, "without": name, "seconds": seconds, "gain": gain})
            row = {f"{preset}, {args.precision}, without": name, "ms/step": f"{1e3 * statistics.median(seconds):.4g}"}
            rows.append(row | {"times as slow": f"{gain['median']:.3f}"})
        print_table(rows)
        print(flush=True)
        # after each table, so that an interrupted run keeps its finished tables
        save(BENCHMARK, results, args)


if __name__ == "__main__":
    run_main(main)

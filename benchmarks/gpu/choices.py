"""What does each choice in the training step on a GPU gain? Steps without one of them against steps with all.

Each row is a step with one thing taken back. The rows take turns, and each is compared with the full step of its round.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks.harness.contenders import add_saving, paired_ratio, print_table, run, save
from benchmarks.harness.ours import GPU_OPTIMIZER, LR, Batch, take_turns
from gpt2core.app.presets import PRESETS
from gpt2core.errors import ConfigError
from gpt2core.trainer import Trainer

BENCHMARK = "benchmarks.gpu.choices"
SEED = 20260101
FULL = "all of them"
SIZES = {"gpt2": (64, 10), "paper": (16, 100)}  # sequences a step, steps in a turn


# -- what is taken back -----------------------------------------------------------------------------------------------


def no_graph(backend):
    """Every kernel launched from Python."""
    backend.records = False


def one_stream(backend):
    """The gradients of weights in the chain, not beside it."""
    from stage2_cuda.runtime.side_stream import NoStream

    backend.side = NoStream()


def no_places(backend):
    """The gradients of weights in new arrays, copied to their place."""
    backend.place_gradients = lambda places: None


def no_epilogues(backend):
    """GELU and its derivative as kernels of their own."""
    backend.products.fuses_gelu = lambda n, k: False


def first_algorithms(backend):
    """The first algorithm that cublasLt proposes, none timed, and none that was timed before looked up."""
    from stage2_cuda.tuning.tuner import Tuner

    backend.products.gemm.tuner, backend.products.gemm._deterministic = Tuner(backend.xp), True


def logits_twice(backend):
    """Logits computed again in backward, instead of their gradient at once in forward."""
    forward = backend.unembed_cross_entropy_forward
    backend.unembed_cross_entropy_forward = lambda x, w, targets, first, scale, seed=None: forward(x, w, targets, first)


def odd_vocabulary(backend):
    """Products with as many columns as there are tokens, 50257 of them."""
    backend.whole_rows = lambda w: w


CHOICES = {
    "no graph": no_graph,
    "one stream": one_stream,
    "gradients copied to their place": no_places,
    "GELU in kernels of its own": no_epilogues,
    "products not timed": first_algorithms,
    "logits computed twice": logits_twice,
    "vocabulary not padded": odd_vocabulary,
}


# -- timing -----------------------------------------------------------------------------------------------------------


class Variants:
    """Trainings that take turns: each has its state, and all record their steps in the memory of the first."""

    def __init__(self, config, batch_size, precision):
        tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch_size, config.block_size + 1))
        self.batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
        self.sizes = dict(batch_size=batch_size, seq_len=config.block_size, micro_batches=1)
        self.config, self.precision, self.first = config, precision, None

    def trainer(self, change, steps=4):
        """A training of its own, with the steps that compile, choose, record and replay behind it."""
        from stage2_cuda.cuda_backend import CudaBackend

        backend = CudaBackend(self.precision, deterministic=False)
        if change:
            change(backend)
        trainer = Trainer(self.config, [backend], **self.sizes, optimizer=GPU_OPTIMIZER)
        self.first = take_turns(self.first, backend)
        self.seconds(trainer, steps)
        backend.trim()
        return trainer

    def seconds(self, trainer, steps):
        """Median of so many steps."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            trainer.step(self.batch, LR)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def measure(preset, precision, rounds):
    """{choice: seconds of a step in each round}."""
    batch_size, steps = SIZES[preset]
    variants = Variants(PRESETS[preset], batch_size, precision)
    trainers = {name: variants.trainer(change) for name, change in {FULL: None, **CHOICES}.items()}
    found = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            variants.seconds(trainer, 1)  # what the others had in the caches is out of them
            found[name].append(variants.seconds(trainer, steps))
    return found


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=SIZES, nargs="+", default=list(SIZES), help="models (default both)")
    add("--precision", default="bf16", help="of the arithmetic (default bf16)")
    add("--rounds", type=int, default=5, help="turns of each (default 5)")
    add_saving(add)
    args = parser.parse_args()
    from stage2_cuda.runtime.triton_launch import array_module

    if array_module() is np:
        raise ConfigError("TRITON_INTERPRET is set: there is nothing to time on the CPU")
    results = []
    for preset in args.preset:
        found, rows = measure(preset, args.precision, args.rounds), []
        for name, seconds in found.items():
            gain = paired_ratio(seconds, found[FULL])
            results.append({"preset": preset, "without": name, "seconds": seconds, "gain": gain})
            row = {f"{preset}, {args.precision}, without": name, "ms/step": f"{1e3 * statistics.median(seconds):.4g}"}
            rows.append(row | {"times as slow": f"{gain:.3f}"})
        print_table(rows)
        print(flush=True)
        if not args.no_save:  # after each table: what cuts a long run off must not take all of it along
            save(BENCHMARK, results, args.commit)


if __name__ == "__main__":
    run(main)

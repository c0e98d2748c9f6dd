"""What does --sparse-embedding save: bytes and milliseconds of the sum of the embedding's gradient, and of a step?

The model is preset `paper` with two vocabularies. The sum is that of the gradient (V, C) of the token embedding: once
an all-reduce of all rows, and by its rows, if each rank has read a given number of distinct tokens. The steps train on
random tokens that are as frequent as words are in a text.

python -m benchmarks.ranks.sparse                               # two vocabularies on four ranks
python -m benchmarks.ranks.sparse --rounds 1 --vocabularies 172  # a quick trial
"""
# V vocabulary, C channels, R distinct tokens on a rank

from dataclasses import replace

import numpy as np

from benchmarks.harness.report import add_ratios
from benchmarks.harness.rounds import SEED, measure_jobs, timed_steps
from benchmarks.harness.script import benchmark
from gpt2core.arena import Arena
from gpt2core.parallel.data.sparse_embedding import TABLE, SparseEmbedding
from gpt2core.presets import PRESETS
from stage0_serial.numpy_backend import NumpyBackend

PRESET = "paper"
ALL_ROWS, ROWS = "the sum, all rows", "the sum, by rows"
STEP, SPARSE_STEP = "a step", "a step, `--sparse-embedding`"


def distinct_tokens(vocab_size, ranks):
    """The numbers R to measure: the R with which both sums send equally many bytes, less and more."""
    equal = 2 * vocab_size // ranks  # without row indices: (p-1) R = 2 (p-1)/p V
    return sorted({max(1, equal // 32), equal // 4, equal // 2, equal, min(2 * equal, vocab_size)})


def zipf_batch(rng, vocab_size, batch_size, seq_len):
    """(inputs, targets) of random tokens; the frequency of token n is proportional to 1 / (n + 3)."""
    frequency = 1 / (np.arange(vocab_size) + 3.0)
    tokens = rng.choice(vocab_size, (batch_size, seq_len + 1), p=frequency / frequency.sum())
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


class Sum:
    """The sum of a gradient (V, C) over the ranks of `world`; bytes_sent: by this rank in the latest call.

    tokens: those that this rank has read; None: all rows are sent.
    """

    def __init__(self, world, arena, gradients, tokens=None):
        self.world, self.part, self.tokens, self.bytes_sent = world, arena.padded(TABLE), tokens, None

        def all_reduce_start(part):
            return world.all_reduce_start(gradients[part], out=gradients[part])

        self.reduce_start = all_reduce_start
        if tokens is not None:
            rows = SparseEmbedding(arena, gradients, world, NumpyBackend(), all_reduce_start, tokens.size, first=0)
            self.begin, self.reduce_start = rows.begin, rows.reduce_start

    def __call__(self, *_):
        sent = self.world.bytes_sent
        if self.tokens is not None:
            self.begin([[(self.tokens, None)]])
        self.reduce_start(self.part).wait()
        self.bytes_sent = self.world.bytes_sent - sent


def prepare(module, world, vocab_size, batch_size, variants):
    """Called on every rank by harness/processes.py: returns `run_round(name, steps)`. module: harness.ours."""
    config = replace(PRESETS[PRESET], vocab_size=vocab_size)
    arena, rng = Arena([(TABLE, (vocab_size, config.n_embd))]), np.random.default_rng(SEED + world.rank)
    gradients = np.full(arena.size, 0, np.float32)  # zeros() would only reserve the memory
    tokens = {name: rng.permutation(vocab_size)[: each["distinct"]] for name, each in variants.items() if ROWS in name}
    calls = {name: Sum(world, arena, gradients, tokens.get(name)) for name in (ALL_ROWS, *tokens)}
    timed = {name: timed_steps(world, call, config, batch_size) for name, call in calls.items()}
    steps = {name: variants[name] for name in (STEP, SPARSE_STEP)}
    calls |= module.make_variants(config, batch_size, config.block_size, world, steps)
    timed |= {name: timed_steps(world, calls[name], config, batch_size, draw=zipf_batch) for name in steps}

    def run_round(name, steps):
        return dict(timed[name](steps), bytes_sent=world.all_gather_object(calls[name].bytes_sent))

    return run_round


def variants_of(vocab_size, ranks):
    """{name of a sum: {"distinct": R}, name of a step: options of build_trainer() of harness/ours.py}."""
    sums = {f"{ROWS}, {count}": {"distinct": count} for count in distinct_tokens(vocab_size, ranks)}
    return {ALL_ROWS: {}, **sums, STEP: {}, SPARSE_STEP: {"sparse_embedding": True}}


def summarise(results):
    """Add to the results of one vocabulary the time divided by that of the row with all rows; omit R in the names."""
    add_ratios(results, "times_all_rows", lambda name: STEP if name in (STEP, SPARSE_STEP) else ALL_ROWS)
    for result in results:
        result["name"] = ROWS if "distinct" in result else result["name"]


@benchmark(
    "ranks-sparse",
    common=dict(ranks=4, batch_size=16, rounds=7, steps_per_round=1, warm_up=1, timeout=900),
    vocabularies=dict(type=int, nargs="+", default=[172, 50257], help="tokens (default 172 50257)"),
)
def main(args):
    cases = [(args.ranks, variants_of(V, args.ranks), {"vocab_size": V}) for V in args.vocabularies]
    for results in measure_jobs(args, cases):
        summarise(results)
        yield results

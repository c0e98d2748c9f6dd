"""Does a step gain if AdamW updates each bucket as soon as it is summed, instead of all parameters after the last one?

Without clipping, AdamW on a bucket needs only the gradients of this bucket (section 10.2.4 of the paper). But the guard
against gradients that are not finite needs the norm of all of them before the first parameter changes. So the update
behind a bucket first copies what it overwrites, in order to undo it: three arrays more. The row "no copy" omits this,
and with it the guard. The row "update alone" is the most that a step could gain: norm and AdamW without anything else.

The trainers differ only in this file: the project has no such option, see docs/RESULTS.md for the reason.

python -m benchmarks.ranks.update_behind                                    # on two and four ranks
python -m benchmarks.ranks.update_behind --ranks 2 --preset tiny --rounds 1  # a quick trial
"""

import numpy as np

from benchmarks.harness.report import add_ratios
from benchmarks.harness.rounds import measure_jobs, timed_steps
from benchmarks.harness.script import benchmark
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.presets import PRESETS

AFTER, ALONE = "after the last bucket", "update alone"
NO_COPY, COPY = "behind each bucket, no copy", "behind each bucket"


class UpdateBehind:
    """Changes a FastTrainer with eager buckets and without clipping: it updates a bucket when its sum is complete.

    copies: whether parameters and moments are copied before, so that a step whose norm is not finite is undone.
    """

    def __init__(self, trainer, copies):
        self.trainer, self.optimizer, self.data_parallel = trainer, trainer.optimizer, trainer.data_parallel
        self.arrays = [trainer.parameters, *self.optimizer.states.values()]
        self.copies = [np.zeros_like(array) for array in self.arrays] if copies else []
        self.sums = np.zeros(trainer.arena.size // 1024, np.float32)  # one of each page
        self.one, self.coefficients = np.ones((), np.float32), None
        trainer.update, self.data_parallel.finish = self.update, self.finish

    def update(self, batch, coefficients):
        self.coefficients = coefficients
        losses = self.trainer.compute_gradients(batch)  # calls finish()
        layout, backend = self.optimizer.layout, self.optimizer.backend
        norm, _ = backend.clip(layout.join(self.sums), 0.0, self.optimizer.guard)
        if not np.isfinite(norm):
            for array, copy in zip(self.arrays, self.copies, strict=False):
                array[...] = copy
        return losses, norm

    def finish(self):
        dp = self.data_parallel
        for handle, part in zip(dp.handles, dp.parts, strict=True):
            handle.wait()
            self.update_part(part)
        dp.missing, dp.handles = list(dp.sizes), []

    def update_part(self, part):
        for array, copy in zip(self.arrays, self.copies, strict=False):
            copy[part] = array[part]
        optimizer, gradients = self.optimizer, self.trainer.gradients[part]
        pages = optimizer.layout.pages(part)
        self.sums[pages] = optimizer.backend.page_sums(gradients)
        states = {name: state[part] for name, state in optimizer.states.items()}
        arguments = optimizer.backend, self.trainer.parameters[part], gradients, states, self.coefficients.rule
        optimizer.rule.update(*arguments, self.one, optimizer.decays[pages])


def prepare(module, world, preset, batch_size, variants):
    """Called on every rank by harness/processes.py: returns `run_round(name, steps)`. module: harness.ours."""
    config = PRESETS[preset]
    calls = module.make_variants(config, batch_size, config.block_size, world, variants)
    trainers = {name: variant.trainer for name, variant in calls.items()}
    for name in (NO_COPY, COPY):
        UpdateBehind(trainers[name], copies=name == COPY)
    alone = trainers.pop(ALONE)
    optimizer = alone.optimizer

    def update_alone(*_):
        norm, factor = optimizer.norm_and_factor(alone.gradients)
        optimizer.update(alone.gradients, factor, optimizer.coefficients(1, 1e-3))
        optimizer.end_update()

    timed = {
        name: timed_steps(world, call, config, batch_size) for name, call in (calls | {ALONE: update_alone}).items()
    }

    def run_round(name, steps):
        result = timed[name](steps)
        return dict(result, hash=parameter_hash(trainers[name]) if name in trainers else None)

    return run_round


@benchmark(
    "ranks-update-behind",
    dict(
        preset="paper", ranks=[2, 4], batch_size=16, rounds=9, steps_per_round=1, warm_up=1, timeout=900, bucket_mb=4.0
    ),
)
def main(args):
    variants = dict.fromkeys((AFTER, NO_COPY, COPY, ALONE), {"dp": "bucket", "bucket_mb": args.bucket_mb})
    for results in measure_jobs(args, [(ranks, variants, {"preset": args.preset}) for ranks in args.ranks]):
        add_ratios(results, "times_after", lambda name: AFTER)
        equal = len({result["hash"] for result in results if result["hash"]}) == 1
        print(f"{results[0]['ranks']} ranks: the parameters are {'equal, bit for bit' if equal else 'DIFFERENT'}")
        yield results

"""How close are the predictions of the planner to what every layout of two and four ranks measures?

The constants of the prediction are those of `python -m gpt2core.app.plan --calibrate`, which measures other steps.
Memory, calls and bytes are those of the rank with most. The time is that of the fastest step of all rounds: other
programs on this machine can only make a step longer. A time is predicted only if each rank has a core. The CPU time of
a rank is compared with the predicted computation and update; it depends less on other programs, but a rank that polls
for a message computes too.

    python -m benchmarks.ranks.grid                      # two and four ranks
    python -m benchmarks.ranks.grid --ranks 2 --steps 3  # a quick trial
    python -m benchmarks.ranks.grid --ranks 2 --preset nano --n-layer 4 --steps 40 --calibrate  # short steps: many
"""

import itertools
import os
from dataclasses import replace

from benchmarks.harness.report import save
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from benchmarks.ranks.grid_ranks import MICRO_BATCHES, train_all
from gpt2core.app.plan import calibrate
from gpt2core.app.planning.machine import calibration_file, host_machine
from gpt2core.app.planning.memory import host_terms
from gpt2core.app.planning.step_time import pipeline_timeline, step_seconds
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import RECOMPUTE, ParallelConfig
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.tensor.shards import check_tensor_parallel
from gpt2core.presets import PRESETS
from testing.jobs import run_mpi

PUBLISHED = "Charon 3.7 % (training), vTrain 8.4 % on 8 GPUs and 14.7 % on up to 512"
FIELDS = ("memory", "calls", "bytes", "bubble", "cpu_ms", "ms")
LAYOUTS = Table("", """
    measured / predicted = {name} | memory, MB = {measured.memory:MB} / {predicted.memory:MB}
    calls = {measured.calls} / {predicted.calls} | bytes = {measured.bytes:,} / {predicted.bytes:,}
    bubble = {measured.bubble:percent} / {predicted.bubble:percent}
    CPU, ms = {measured.cpu_ms:.1f} / {predicted.cpu_ms:.1f}
    ms = {measured.ms:.1f} / {"%.1f" % predicted.ms if predicted.ms else "-"}""")  # fmt: skip


def layouts(ranks, model):
    """([the ParallelConfigs of every grid of so many ranks], [texts of those for which the model is too small])."""
    found, refused = [], []
    for tp, pp in itertools.product((1, 2, 4), repeat=2):
        if ranks % (tp * pp) == 0:
            replicas = ranks // (tp * pp)
            zeros = (0,) if replicas == 1 else (0, 1, 2, 3) if tp * pp == 1 else (0, 1)
            schedules = SCHEDULES if pp > 1 else ("1f1b",)
            for recompute, zero, schedule in itertools.product(RECOMPUTE, zeros, schedules):
                parallel = ParallelConfig(tp=tp, pp=pp, zero=zero, recompute=recompute, pp_schedule=schedule)
                try:
                    check_tensor_parallel(model, tp)
                    parallel.check_run(model, 1, MICRO_BATCHES // replicas, replicas)
                    found.append(parallel)
                except ConfigError as error:
                    refused.append(f"omitted: {name_of(ranks, parallel)}: {error}")
    return found, refused


def name_of(ranks, parallel):
    """Text such as "dp 1 tp 1 pp 2 zero 0 block zero-bubble"."""
    sizes = f"dp {ranks // (parallel.tp * parallel.pp)} tp {parallel.tp} pp {parallel.pp} zero {parallel.zero}"
    return sizes + f" {parallel.recompute}" + f" {parallel.pp_schedule}" * (parallel.pp > 1)


def compare(ranks, parallel, of_ranks, machine):
    """One result: what was measured on the rank with most, and what is predicted for it."""
    layout = of_ranks[0][0]
    pairs = {name: [each[name] for _, each in of_ranks] for name in of_ranks[0][1]}
    timeline = pipeline_timeline(layout, machine) if parallel.pp > 1 else None
    terms = step_seconds(layout, machine)
    predicted = {
        "memory": max(sum(host_terms(layout, place).values()) for place in layout.places()),
        "calls": max(pairs["predicted_calls"]),
        "bytes": max(pairs["predicted_bytes"]),
        "bubble": timeline.bubble if timeline else 0.0,
        "cpu_ms": 1e3 * (terms["computation"] + terms["update"]),
        "ms": 1e3 * sum(terms.values()) if ranks <= os.cpu_count() else None,
    }
    found = {name: max(pairs[name]) for name in ("memory", "calls", "bytes", "bubble")}
    found["cpu_ms"] = 1e3 * max(pairs["cpu"])
    found["ms"] = 1e3 * min(max(each) for each in zip(*pairs["seconds"], strict=True))
    exact = all(pairs[f"predicted_{name}"] == pairs[name] for name in ("calls", "bytes"))
    return {"name": name_of(ranks, parallel), "ranks": ranks, "measured": found, "predicted": predicted, "exact": exact}


def errors(results, name):
    """(mean absolute, largest) relative error of the predictions of a field; None if none was made.

    Of the bubble, which may be 0, it is the absolute error.
    """
    found = []
    for result in results:
        measured_value, predicted = result["measured"][name], result["predicted"][name]
        if predicted is not None and measured_value:
            found.append(abs(predicted - measured_value) / (1 if name == "bubble" else measured_value))
    return (sum(found) / len(found), max(found)) if found else None


@benchmark(
    common=dict(preset="tiny", ranks=[2, 4], batch_size=16, steps=10, timeout=500),
    n_layer=dict(type=int, default=8, help="layers of the model (default 8)"),
    rounds=dict(type=int, default=2, help="how often each layout is trained (default 2)"),
    calibrate=dict(action="store_true", help="measure the constants of this machine again"),
)
def main(args):
    if args.calibrate or host_machine(calibration_file(), 2) is None:
        calibrate()
    model, results = replace(PRESETS[args.preset], n_layer=args.n_layer), []
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for ranks in args.ranks:
        configs, refused = layouts(ranks, model)
        print("\n".join(refused), end="\n" * bool(refused))
        sizes = args.batch_size, args.steps, args.rounds
        of_ranks = zip(*run_mpi(ranks, train_all, configs, model, *sizes, timeout=args.timeout), strict=True)
        machine = host_machine(calibration_file(), ranks)
        found = [compare(ranks, *each, machine) for each in zip(configs, of_ranks, strict=True)]
        LAYOUTS.print(found, f"{ranks} ranks")
        results += [{"preset": args.preset, **result} for result in found]
        if ranks > os.cpu_count():
            print(f"{ranks} ranks share {os.cpu_count()} cores, so their times are not predicted")
    for name in FIELDS:
        if found := errors(results, name):
            unit = "percentage points" if name == "bubble" else "%"
            print(f"error of {name}: mean {100 * found[0]:.1f}, largest {100 * found[1]:.1f} {unit}")
    exact = sum(result["exact"] for result in results)
    print(f"calls and bytes are exact on every rank in {exact} of {len(results)} layouts")
    print(f"published errors of time: {PUBLISHED}")
    save(results, args)

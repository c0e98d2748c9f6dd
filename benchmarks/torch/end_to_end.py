"""How long do forward, backward and a whole training step of the assignment's models take?

A row is one model, context, precision and implementation, in its own process. Each kind (forward; forward + backward;
step) runs --warm-up times and is then measured --repeats times. The rows "warm-up" say what 0, 1, 2 or 5 warm-up steps
change: they are 10 consecutive steps after the first 0, 1, 2, 5 of a process.

Without flags for sizes, contexts, precisions or implementations, a selection is measured, which takes several minutes
on an H200, the most informative rows first. Run the command again until no row is missing.
"""

import functools
import itertools
import os
import shutil
import sys

from benchmarks.harness.assignment_tables import KINDS, STEP, WARM_UPS, print_tables
from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec
from benchmarks.harness.rows import mean_and_deviation, measured, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch.models import check_device, chosen_models, model_examples, model_flags
from benchmarks.torch.passes import BLOCKS, COMPILED, EAGER, IMPLEMENTATIONS, NAIVE, OURS, make_passes, times_of

AFTER_WARM_UP = 10  # measured steps
TIMEOUT = 500  # seconds of one row


def prepare(module, **model):
    """Called in each process. Return run_round(kinds, warm_up, repeats); module: torch/passes.py.

    run_round() returns {kind: milliseconds of each run, or {"oom": True}}, or {"oom": True} if the model is too large.
    """

    def run_round(kinds, warm_up, repeats):
        passes = module.make_passes(**model)
        times = functools.partial(times_of, passes, device=model["device"], warm_up=warm_up, repeats=repeats)
        return {kind: measured(functools.partial(times, kind)) for kind in kinds}

    return lambda **request: measured(lambda: run_round(**request))


def in_new_process(*model, args, **request):
    """The answer of run_round() in a new process."""
    names = "implementation", "size", "context", "precision", "device", "batch"
    options = dict(zip(names, (*model, args.device, args.batch), strict=True))
    spec = ProcessSpec(model[0], make_passes.__module__, os.cpu_count() or 1, options)
    with BenchmarkProcess(spec, args.benchmark, TIMEOUT) as process:
        return process.run_round(**request)


def kinds_row(*model, args):
    """{kind: time, or {"oom": True}} of one implementation, size, context and precision."""
    found = in_new_process(*model, args=args, kinds=KINDS, warm_up=args.warm_up, repeats=args.repeats)
    if "oom" in found:
        return {"oom": True}
    return {kind: found[kind] if "oom" in found[kind] else mean_and_deviation(found[kind]) for kind in KINDS}


def warm_up_row(*model, args):
    """{"warm-up N": time of the AFTER_WARM_UP steps after the first N of a new process}."""
    found = in_new_process(*model, args=args, kinds=[STEP], warm_up=0, repeats=max(WARM_UPS) + AFTER_WARM_UP)
    if "oom" in found or "oom" in found[STEP]:
        return {"oom": True}
    first, samples = found[STEP][0], found[STEP]
    after = {f"warm-up {count}": mean_and_deviation(samples[count:][:AFTER_WARM_UP]) for count in WARM_UPS}
    return {"first step": first} | after


def selected(args):
    """[(implementation, size, context, precision)] to measure, the most informative first."""
    if chosen := chosen_models(args):
        return [(name, *model) for model in chosen for name in args.implementations or IMPLEMENTATIONS]
    sizes, two = ("small", "medium", "large", "xl", "2.7B"), (EAGER, OURS)
    found = [(name, size, 512, precision) for precision in ("bf16", "fp32") for size in sizes for name in two]
    found += [(BLOCKS, size, 512, "bf16") for size in sizes]
    found += [(COMPILED, "small", 512, "bf16"), (NAIVE, "small", 512, "bf16"), (COMPILED, "medium", 512, "bf16")]
    found += [(name, *model, "bf16") for model in itertools.product(("small", "xl"), (1024, 128, 256)) for name in two]
    return [each for each in found if each[0] in (args.implementations or IMPLEMENTATIONS)]


def cases(args):
    """{name of a row: function that measures it}."""
    rows = [("", kinds_row, model) for model in selected(args)]
    first = (args.sizes or ["small"])[0], (args.contexts or [512])[0], (args.precisions or ["fp32"])[0]
    rows += [("warm-up / ", warm_up_row, (name, *first)) for name in args.implementations or [EAGER, OURS]]
    return {
        "{0}{2} / context {3} / {4} / {1}".format(kind, *model): functools.partial(function, *model, args=args)
        for kind, function, model in rows
        if not (args.device == "cpu" and model[0] == OURS and model[-1] != "fp32")  # stage 0 has no bf16
    }


def without_compiler(args):
    """Whether torch.compile would fail: on the CPU without a C++ compiler."""
    return args.device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")))


__doc__ += model_examples("end_to_end")


TITLES = "; ".join(f"{name}: {text}" for name, text in IMPLEMENTATIONS.items())


@benchmark(
    common=model_flags("fp32 is without TF32 (default: see above)")
    | dict(batch=4, device="cuda", warm_up=3, repeats=5),
    implementations=dict(nargs="+", choices=IMPLEMENTATIONS, metavar="NAME", help=f"{TITLES} (default: above)"),
)
def main(args):
    check_device(args)
    if without_compiler(args):
        print("note: there is no C++ compiler, so torch.compile runs in eager mode", file=sys.stderr)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read by the process of a row
    print_tables(run_rows(args, cases(args)), "end-to-end", "warm-up", "end-to-end-bf16")

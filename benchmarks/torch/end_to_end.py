"""How long do forward, backward and a whole training step of the assignment's models take?

A row is one model, context, precision and implementation. Each implementation runs in a process of its own; each kind
(forward; forward + backward; step) runs --warm-up times and is then measured --repeats times. The rows "warm-up" start
a new process, and say what 0, 1, 2 or 5 warm-up steps change: they are 10 consecutive steps after the first 0, 1, 2, 5.

Without flags for sizes, contexts, precisions or implementations, a selection is measured, which takes about three
minutes on an H200, the most informative rows first. Run the command again until no row is missing.
"""

import functools
import itertools
import os
import shutil
import sys
from contextlib import ExitStack

from benchmarks.harness.assignment_tables import KINDS, STEP, WARM_UPS, print_tables
from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, run_main
from benchmarks.harness.rows import mean_and_deviation, measured, run_rows
from benchmarks.torch.models import check_device, chosen_models, model_parser, release_memory
from benchmarks.torch.passes import (
    BLOCKS,
    COMPILED,
    EAGER,
    IMPLEMENTATIONS,
    NAIVE,
    OURS,
    make_passes,
    time_of,
    times_of,
)

AFTER_WARM_UP = 10  # measured steps
TIMEOUT = 500  # seconds of one row


def prepare(module, implementation, device, batch):
    """Called in each process. Return run_round(), which measures one row; module: benchmarks.torch.passes."""

    def run_round(size, context, precision, warm_up, repeats):
        try:
            return measured(lambda: kinds_row(size, context, precision, warm_up, repeats))
        finally:
            release_memory()  # for the processes of the other implementations

    def kinds_row(size, context, precision, warm_up, repeats):
        passes = module.make_passes(implementation, size, context, precision, device, batch)
        if warm_up is None:
            samples = times_of(passes, STEP, device, 0, repeats)
            return {"milliseconds": samples}
        return {kind: time_of(passes, kind, device, warm_up, repeats) for kind in KINDS}

    return run_round


class Processes(ExitStack):
    """A context manager that keeps the process of each implementation until the end."""

    def __init__(self, args):
        super().__init__()
        self.args, self.running = args, {}

    def start(self, implementation):
        options = dict(implementation=implementation, device=self.args.device, batch=self.args.batch)
        spec = ProcessSpec(implementation, make_passes.__module__, os.cpu_count() or 1, options)
        return BenchmarkProcess(spec, self.args.benchmark, TIMEOUT)

    def run(self, implementation, *settings):
        """The answer of the implementation's process to one request."""
        if implementation not in self.running:
            self.running[implementation] = self.enter_context(self.start(implementation))
        return answer(self.running[implementation], *settings)


def answer(process, *settings):
    names = "size", "context", "precision", "warm_up", "repeats"
    found = process.run_round(**dict(zip(names, settings, strict=True)))
    return {key: value for key, value in found.items() if key != "peak_bytes"}


def warm_up_row(processes, implementation, size, context, precision):
    """{"warm-up N": time of the AFTER_WARM_UP steps after the first N of a new process}."""
    with processes.start(implementation) as process:
        found = answer(process, size, context, precision, None, max(WARM_UPS) + AFTER_WARM_UP)
    if "oom" in found:
        return found
    samples = found["milliseconds"]
    first = {"first step": samples[0]}
    return first | {f"warm-up {count}": mean_and_deviation(samples[count:][:AFTER_WARM_UP]) for count in WARM_UPS}


def selected(args):
    """[(size, context, precision, implementation)] to measure, the most informative first."""
    if chosen := chosen_models(args):
        names = args.implementations or IMPLEMENTATIONS
        return [(*model, name) for model in chosen for name in names]
    sizes, two = ("small", "medium", "large", "xl", "2.7B"), (EAGER, OURS)
    found = list(itertools.product(sizes, (512,), ("bf16",), two)) + list(
        itertools.product(sizes, (512,), ("fp32",), two)
    )
    found += [(size, 512, "bf16", BLOCKS) for size in sizes]
    found += [("small", 512, "bf16", COMPILED), ("small", 512, "bf16", NAIVE), ("medium", 512, "bf16", COMPILED)]
    found += itertools.product(("small", "xl"), (1024, 128, 256), ("bf16",), two)
    return [each for each in found if each[-1] in (args.implementations or IMPLEMENTATIONS)]


def cases(processes, args):
    """{name of a row: function that measures it}."""
    found = {}
    for size, context, precision, name in selected(args):
        if args.device == "cpu" and name == OURS and precision != "fp32":
            continue  # stage 0 has no bf16
        row = functools.partial(processes.run, name, size, context, precision, args.warm_up, args.repeats)
        found[f"{size} / context {context} / {precision} / {name}"] = row
    size, context = (args.sizes or ["small"])[0], (args.contexts or [512])[0]
    precision = (args.precisions or ["fp32"])[0]
    for name in args.implementations or [EAGER, OURS]:
        if args.device == "cpu" and name == OURS and precision != "fp32":
            continue
        row = functools.partial(warm_up_row, processes, name, size, context, precision)
        found[f"warm-up / {size} / context {context} / {precision} / {name}"] = row
    return found


def without_compiler(args):
    """Whether torch.compile would fail: on the CPU without a C++ compiler."""
    return args.device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")))


def main():
    parser = model_parser("benchmarks.torch.end_to_end", __doc__, "fp32 is without TF32 (default: see above)")
    described = "; ".join(f"{name}: {text}" for name, text in IMPLEMENTATIONS.items())
    text = f"{described} (default: above)"
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME", help=text)
    parser.add_flags(warm_up=3, repeats=5)
    args = parser.parse_args()
    check_device(args)
    if without_compiler(args):
        print("note: there is no C++ compiler, so torch.compile runs in eager mode", file=sys.stderr)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read by the processes

    with Processes(args) as processes:
        rows = run_rows(args, cases(processes, args))
    print_tables(rows, "end-to-end", "warm-up", "end-to-end-bf16")


if __name__ == "__main__":
    run_main(main)

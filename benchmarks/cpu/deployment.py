"""How long does a program that generates one token take to start, how much memory does it use, what does it import?

It generates with data/gpt2-nano, so that nearly all of its time is its start. --before also measures another checkout
of this repository, in turn with this one.

    python -m benchmarks.cpu.deployment                                  # this checkout
    python -m benchmarks.cpu.deployment --rounds 1 --programs 'stage 0'  # a quick trial
    python -m benchmarks.cpu.deployment --before ../older                # beside another checkout
"""

import functools
import re
import sys

from benchmarks.cpu.classroom import measure
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.script import benchmark
from gpt2core.app.settings.flag_parser import to_path
from gpt2core.app.shipped import NANO_WEIGHTS
from testing.jobs import ROOT

FLAGS = ["--weights", str(NANO_WEIGHTS), "--prompt", "In the spring of", "--max-new-tokens", "1"]
API = f"import staged_gpt2 as s; print(s.GPT2.from_pretrained({str(NANO_WEIGHTS)!r}, stage=0).generate('In the', 1))"
PROGRAMS = {  # {name: arguments of Python}
    "stage 0": ["-m", "stage0_serial.inference", *FLAGS],
    "stage 2, Triton's interpreter": ["-m", "stage2_cuda.inference", *FLAGS],
    "staged_gpt2": ["-c", API],
}
OWN = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(gpt2core|stage\d_\w+|staged_gpt2)\b")


def run(arguments, checkout):
    """{"seconds", "peak_bytes", "modules", "ms"} of one program.

    modules: how many modules of this repository it imports. ms: of their imports, without those of other packages.
    """
    found = measure([sys.executable, "-X", "importtime", *arguments], checkout, TRITON_INTERPRET="1")
    own = [int(microseconds) for microseconds, _ in OWN.findall(found.pop("output"))]
    return found | {"modules": len(own), "ms": sum(own) / 1e3}


@benchmark(
    "cpu-deployment",
    common=dict(rounds=7),
    programs=dict(choices=PROGRAMS, nargs="+", default=list(PROGRAMS), help="programs to run (default all)"),
    before=dict(type=to_path, metavar="DIR", help="another checkout of this repository (default: none)"),
)
def main(args):
    checkouts = ({"before": args.before.resolve()} if args.before else {}) | {"now": ROOT}
    results = []
    for program in args.programs:
        arguments = PROGRAMS[program]
        functions = {version: functools.partial(run, arguments, path) for version, path in checkouts.items()}
        for function in functions.values():
            function()  # the first run writes compiled files
        for version, rounds in interleaved(functions, args.rounds).items():
            found = {name: [each[name] for each in rounds] for name in rounds[0]}
            found |= {"peak_bytes": max(found["peak_bytes"]), "modules": found["modules"][0]}
            results.append({"program": program, "version": version, **found})
    return results

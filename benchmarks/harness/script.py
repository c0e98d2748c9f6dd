"""The frame of a benchmark script: a main function that gets the parser of the script's flags."""

import functools
import sys

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.rows import add_row_flags


def benchmark(docstring, rows=False, **flags):
    """The decorator of main(parser), the last function of a script: `python -m` with the script's name calls it.

    docstring, flags: of benchmark_parser(). rows: whether to add the flags of run_rows(). main() may add flags of its
    own; it returns the exit code or None.
    """

    def decorated(function):
        @functools.wraps(function)
        def main():
            parser = benchmark_parser(sys.modules[function.__module__].__spec__.name, docstring, **flags)
            if rows:
                add_row_flags(parser)
            return function(parser)

        if function.__module__ == "__main__":
            run_main(main)
        return main

    return decorated

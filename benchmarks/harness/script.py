"""The decorator that makes a function a benchmark script: flags, --help, the printed table, the results file."""

import inspect

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser, save, save_each
from benchmarks.harness.result_tables import TABLES


def benchmark(table="", common=(), saves=True, measures_time=True, **flags):
    """Make function(args) the program of its file: main(argv=None), which returns the exit code; main.parser.

    The docstring of the file begins with the question, and has the examples of --help. table: the name of a table. If
    the function returns results, a list or a dictionary, they are printed with this table and saved. It may also yield
    lists, see save_each(). Otherwise it returns its exit code. saves: whether there are the flags of save().
    measures_time: see run_main(). common, flags: see add_flags(). If the file is started with `python -m`, the function
    runs at once: it is the last one of the file.
    """

    def decorate(function):
        module = function.__globals__
        parser = benchmark_parser(
            module["__spec__"].name.removesuffix(".__main__"), module["__doc__"], saves, **dict(common) | flags
        )

        def main(argv=None):
            args = parser.parse_args(argv)
            found = function(args)
            if inspect.isgenerator(found):
                save_each(args, found, TABLES[table].print)
                return 0
            if isinstance(found, list | dict):
                TABLES[table].print(found)
                save(found, args)
                return 0
            return found

        main.parser = parser
        if function.__module__ == "__main__":
            run_main(main, measures_time)
        return main

    return decorate

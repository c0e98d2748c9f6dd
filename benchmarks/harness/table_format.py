"""Tables of the documentation as descriptions: a Table has a template for each cell, and names its files in results/.

To add a table, describe it in TABLES of result_tables.py (or assignment_tables.py), write the lines
`<!-- table: NAME -->` and `<!-- end -->` into a page, and run `python -m benchmarks.harness.tables`. A script prints
the results that it has just measured with TABLES[NAME].print(results). A comparison with PyTorch also gets a line in
SUMMARY of result_tables.py.

A description is text: "title = cell" for each column, separated by | or new lines; only "name" is the same as
"name = {name}". Titles and cells are templates, as of str.format. Between the braces is a Python expression of the
fields of a row, without : and ! outside of brackets: "{case}, {name}", "{shape[0]}", "{ms.forward / ms.both}". A point
reads a field of a dictionary. `row` is the row itself: row.name or row["name"] may be missing, other names must exist.
`file` is the content of the file, with "name" and "machine". After the colon comes a format of Python, as in
"{us:.1f}", or one of FORMATS, as in "{seconds:ms 3}". The text of None, of a missing field and of what is computed from
them is "".
"""

import functools
import json
import os
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness.report import gpu_hardware, print_table, summarised
from testing.jobs import ROOT


@functools.cache
def load(name):
    """The content of results/<name>.json, a dictionary; {"results": []} if there is no such file."""
    path = ROOT / "results" / f"{name}.json"
    record = json.loads(path.read_text()) if path.exists() else {"results": []}
    return record | {"name": name, "machine": machine(name, record)}


MACHINES = {"zen3": "AMD Zen 3", "zen5": "AMD Zen 5", "intel": "Intel Xeon"}  # {end of the name of a file: machine}


def machine(name, record):
    """The machine of a file for a reader: "4 x H200", or the kind of the CPU.

    Hardware of an AMD server CPU does not name its generation: a file that is not of Zen 4 must end as in MACHINES.
    """
    found = record.get("hardware", {})
    if found.get("gpu") and not name.startswith(("cpu/", "ranks/")):
        return f"{found['gpus']} x " * (found["gpus"] > 1) + FORMATS["gpu"](found["gpu"])
    cpu = found.get("cpu", "AMD EPYC")
    kinds = {"Intel": "Intel Xeon", "AMD EPYC": "AMD Zen 4"}
    return MACHINES.get(name.split("_")[-1]) or next((kinds[word] for word in kinds if word in cpu), cpu)


def source(name):
    """One line: file, date, commit, hardware and command of results/<name>.json.

    If its rows were measured one by one, the line names the commits of all rows; date and command are of the last ones.
    """
    record = load(name)
    machine = record["hardware"]
    if machine.get("gpu") and not name.startswith(("cpu/", "ranks/")):
        system = f"{machine['gpus']} x {machine['gpu']}, PyTorch {machine['torch']}, Triton {machine['triton']}"
    else:
        system = f"{machine['cpu']}, {machine['cores']} cores, NumPy {machine['numpy']}, {machine['blas']}"
        system += f", PyTorch {machine['torch']}" if machine["torch"] else ""
    file = f"[`results/{name}.json`](../results/{name}.json)"
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted((row["date"], row["commit"]) for row in rows if "commit" in row) or [("", record["commit"])]
    commits = list(dict.fromkeys(commit for _, commit in commits))
    measured = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    return f"{file}: {record['date'][:10]}, {measured}, {system}; `{record['command']}`"


# -- formats: a summary is the dictionary {"median", "q1", "q3", "n"} that summary() in report.py returns --------------


def number(summary, scale=1.0, digits=4):
    """The median of a summary, times `scale`, with `digits` significant digits and without an exponent."""
    value = scale * summary["median"]
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def spread(summary, scale=1.0, digits=4):
    """The quartiles of a summary as "q1 to q3"; "" if there is only one sample."""
    if summary["n"] == 1:
        return ""
    return " to ".join(number({"median": summary[quartile]}, scale, digits) for quartile in ("q1", "q3"))


def percent(share, digits=1):
    """A share, or the median of a summary of shares, as text: "53.4 %" for 0.534."""
    share = share["median"] if isinstance(share, dict) else share
    return f"{100 * share:.{digits}f} %"


def cell(value, spec=".4g"):
    """The text of a value in a table: of {"mean", "std"} the mean and the standard deviation."""
    if isinstance(value, dict):
        return f"{value['mean']:.4g} ± {value['std']:.2g}" if "mean" in value else value["mean"].text
    return formatted(value, spec) if isinstance(value, int | float) else str(value)


SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6}
BYTES = {"GiB": 2.0**-30, "MiB": 2.0**-20, "MB": 1e-6, "GB": 1e-9}
FORMATS = {  # {name: function of the value and of the words after the name}
    **{unit: lambda value, digits=4, scale=scale: number(value, scale, int(digits)) for unit, scale in SECONDS.items()},
    **{unit: lambda count, spec=".2f", scale=scale: format(scale * count, spec) for unit, scale in BYTES.items()},
    "memory": lambda count: format(count / 2**20, ",.1f" if count < 1e9 else ",.0f"),  # MiB
    "number": number,
    "quartiles": lambda value, unit="s", digits=4: spread(value, SECONDS[unit], int(digits)),
    "ratio": lambda value, digits=2: f"{value['median']:.{digits}f}",
    "percent": percent,
    "list": lambda values, spec="": ", ".join(format(value, spec) for value in values),
    "gpu": lambda name: [*name.split(), name][1],  # "NVIDIA H100 80GB HBM3" is an H100
    "cell": cell,
}


def formatted(value, format_spec):
    """The text of a value: by one of FORMATS and the words after its name, or by a format of Python."""
    name, *words = format_spec.split() or [""]
    if value is None or isinstance(value, Missing):
        return value.text if value is OUT_OF_MEMORY and name == "cell" else ""
    return FORMATS[name](value, *words) if name in FORMATS else format(value, format_spec)


# -- templates --------------------------------------------------------------------------------------------------------


class Missing:
    """A value that was not measured; what is computed from it is missing too. text: with the format "cell"."""

    def __init__(self, text):
        self.text = text

    def __bool__(self):
        return False

    def itself(self, *_):
        return self

    __getattr__ = __getitem__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = itself
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = itself


NOT_MEASURED, OUT_OF_MEMORY = Missing(""), Missing("out of memory")


class Fields(dict):
    """A dictionary of results in a template: fields.name is fields["name"].

    A missing field is OUT_OF_MEMORY if the field "oom" is true, as run_rows() writes it, and else NOT_MEASURED.
    """

    def __missing__(self, name):
        return OUT_OF_MEMORY if self.get("oom") else NOT_MEASURED

    def __getitem__(self, name):
        return wrapped(super().__getitem__(name))

    __getattr__ = __getitem__


def wrapped(value):
    """A value of a file in results/ for a template: Fields instead of dictionaries, NOT_MEASURED instead of None."""
    if isinstance(value, list | tuple):
        return [wrapped(each) for each in value]
    return NOT_MEASURED if value is None else Fields(value) if isinstance(value, dict) else value


class Templates(string.Formatter):
    """str.format with expressions and FORMATS."""

    def get_field(self, expression, args, fields):
        return eval(compiled(expression), fields), expression

    def format_field(self, value, format_spec):
        return formatted(value, format_spec)


@functools.cache
def compiled(expression):
    return compile(expression, expression, "eval")


def fill(template, row, file=None):
    """The text of a template with the fields of a row of this file. Raises NameError for a name that is no field."""
    fields = {name: wrapped(value) for name, value in row.items()}
    return Templates().vformat(template, (), fields | {"row": Fields(row), "file": Fields(file or {})})


def columns_of(description):
    """{title: template} of a description."""
    columns = [column.strip() for column in re.split(r"[|\n]", description) if column.strip()]
    pairs = (column.partition("=") if "=" in column else (column, "", f"{{{column}}}") for column in columns)
    return {title.strip(): template.strip() for title, _, template in pairs}


def flat(results, *names):
    """A row for each value in nested dictionaries: {name: key of each level, "value": the value}."""
    name, *others = names
    for key, value in results.items():
        for row in flat(value, *others) if others else [{"value": value}]:
            yield {name: key, **row}


def beside(rows, is_base, *fields):
    """The rows, each with the first row that has the same fields and is_base(row) as "base"; None if there is none."""
    rows = [row | {"key": [row.get(field) for field in fields]} for row in rows]
    bases = [row for row in rows if is_base(row)]
    return (row | {"base": next((base for base in bases if base["key"] == row["key"]), None)} for row in rows)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of one or more files in results/; table() returns (rows {title: cell}, names of the files).

    files: names or patterns, as "cpu/decode*". description: of the columns; "" if the rows have the cells already.
    rows: function of the results of a file that returns the rows, whose fields the templates name. console: description
    of columns of print() only. merged: rows with the same first cell are one row; of two texts of a cell, the one of
    the later file remains. also: tables with the same first column, whose rows and columns belong to this one. order:
    the rows are sorted by this function of their cells.
    """

    files: str | tuple
    description: str = ""
    rows: Callable = list
    console: str = ""
    merged: bool = False
    also: tuple = ()
    order: Callable | None = None

    def __call__(self):
        found, names = {}, {}
        for table in (self, *self.also):
            files = list(dict.fromkeys(name for pattern in table.patterns for name in matching(pattern)))
            table.gather(map(load, files), found, self.merged)
            names |= dict.fromkeys(files)
        return filled_up(found, self.order), list(names)

    @property
    def patterns(self):
        return (self.files,) if isinstance(self.files, str) else self.files

    def cells(self, records, console=False):
        """[{title: cell}] of the contents of files. console: with the columns of print()."""
        found = {}
        self.gather(records, found, self.merged, console)
        return filled_up(found, self.order)

    def gather(self, records, found, merged, console=False):
        """Add the rows of the contents of files to found {key: row}."""
        columns = columns_of(self.description + f"\n{self.console}" * console)
        for record in filter(lambda record: record["results"], records):
            for row in self.rows(record["results"]):
                if columns:
                    row = {fill(title, row, record): fill(text, row, record) for title, text in columns.items()}
                key = next(iter(row.values())) if merged else len(found)
                before = found.setdefault(key, {})
                before.update({title: text for title, text in row.items() if text or title not in before})

    def print(self, results, title=""):
        """Print the rows of results that are not saved yet, below a title; nothing if there are no rows."""
        machine = {"cores": os.cpu_count(), "gpu": "no GPU", **gpu_hardware()}
        record = {"results": summarised(results), "hardware": machine, "commit": "", "name": "", "machine": "here"}
        if rows := self.cells([record], console=True):
            print(f"\n{title}\n\n" if title else "", end="")
            print_table(rows)
            print(flush=True)

    def kinds(self, name, *kinds):
        """{"NAME": this table, "NAME-KIND": the same of the file with the suffix _KIND, for each kind}."""
        files = {f"{name}-{kind}": f"{self.files}_{kind}" for kind in kinds}
        return {name: self, **{other: replace(self, files=file) for other, file in files.items()}}


def matching(pattern):
    """The names of the files of a pattern; the pattern itself if there are none."""
    paths = sorted((ROOT / "results").glob(f"{pattern}.json"), key=lambda path: path.stem)
    return [str(path.relative_to(ROOT / "results").with_suffix("")) for path in paths] or [pattern]


def filled_up(found, order):
    """The rows of found {key: row}, sorted, all with the same titles."""
    rows = sorted(found.values(), key=order) if order else found.values()
    titles = dict.fromkeys(title for row in rows for title in row)
    return [{title: row.get(title, "") for title in titles} for row in rows]

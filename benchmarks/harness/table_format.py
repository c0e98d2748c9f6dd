"""Tables of the documentation as descriptions: a Table names its files in results/, its rows and its columns.

To add a table, describe it in TABLES of result_tables.py (or assignment_tables.py), write the lines
`<!-- table: NAME -->` and `<!-- end -->` into a page, and run `python -m benchmarks.harness.tables`. A script prints
its results with TABLES[NAME].print(results). A comparison with PyTorch also gets an entry in SUMMARY of
result_tables.py. Ratios and groups are computed by the script, before it saves the results.

Columns are text: "title = cell" for each column, separated by | or new lines; only "name" is the same as
"name = {name}". Titles and cells are templates, as of str.format. Between the braces is a Python expression of the
fields of a row, without : and ! outside of square brackets: "{case}, {name}", "{shape[0]}", "{ms.forward / ms.both}". A
point reads a field of a dictionary. `row` is the row itself: row.name or row["name"] may be missing, other names must
exist. `file` is the content of the file, with "name" and "machine". After the colon comes a format of Python, as in
"{us:.1f}", or one of FORMATS, as in "{seconds:ms 3}". The text of None, and of what is computed from a missing field,
is "".
"""

import functools
import json
import os
import re
import string
from dataclasses import dataclass

from benchmarks.harness.report import print_table, summarised
from testing.jobs import ROOT

RESULTS = ROOT / "results"
MACHINES = {"zen3": "AMD Zen 3", "zen5": "AMD Zen 5", "intel": "Intel Xeon"}  # {end of the name of a file: machine}


@functools.cache
def load(name):
    """The content of results/<name>.json as Fields, with its name and machine; "results" is [] if there is no file.

    machine, for a reader: "4 x H200", or the kind of the CPU. The hardware of an AMD server CPU does not name its
    generation: a file that is not of Zen 4 must end as in MACHINES. on_gpu: whether GPUs were measured.
    """
    path = RESULTS / f"{name}.json"
    record = json.loads(path.read_text(), object_hook=Fields) if path.exists() else Fields(results=[], hardware={})
    hardware, gpu = record["hardware"], record["hardware"].get("gpu", "")
    if on_gpu := gpu and not name.startswith(("cpu/", "ranks/")):
        words = [*gpu.split(), gpu]  # "NVIDIA H100 80GB HBM3" is an H100
        machine = f"{hardware['gpus']} x " * (hardware["gpus"] > 1) + words[1]
    else:
        cpu, kinds = hardware.get("cpu", ""), {"Intel": "Intel Xeon", "AMD EPYC": "AMD Zen 4"}
        kind = next((kind for word, kind in kinds.items() if word in cpu), cpu)
        machine = MACHINES.get(name.split("_")[-1], kind)
    return Fields(record, name=name, machine=machine, on_gpu=bool(on_gpu))


def source(name):
    """One line: file, date, commit, hardware and command of results/<name>.json.

    If its rows were measured one by one, the line names the commits of all rows; date and command are of the last ones.
    """
    record, text = load(name), "{gpus} x {gpu}, PyTorch {torch}, Triton {triton}"
    if not record["on_gpu"]:
        text = "{cpu}, {cores} cores, NumPy {numpy}, {blas}" + ", PyTorch {torch}" * bool(record["hardware"]["torch"])
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted((row["date"], row["commit"]) for row in rows if "commit" in row) or [("", record["commit"])]
    commits = list(dict.fromkeys(commit for _, commit in commits))
    measured = f"{record['date'][:10]}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    file = f"[`results/{name}.json`](../results/{name}.json)"
    return f"{file}: {measured}, {text.format_map(record['hardware'])}; `{record['command']}`"


# -- formats: a summary is the dictionary {"median", "q1", "q3", "n"} that summary() in report.py returns --------------


def number(summary, digits=4, scale=1):
    """The median of a summary, times `scale`, with `digits` significant digits and without an exponent."""
    value, digits = scale * summary["median"], int(digits)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def percent(share, digits=1):
    """A share, or the median of a summary of shares, as text: "53.4 %" for 0.534."""
    share = share["median"] if isinstance(share, dict) else share
    return f"{100 * share:.{digits}f} %"


def cell(value, spec=".4g"):
    """The text of a value in a table: of {"mean", "std"} the mean and the standard deviation."""
    if isinstance(value, dict):
        return f"{value.mean:.4g} ± {value.std:.2g}" if "mean" in value else formatted(value.mean, "cell")
    return formatted(value, spec) if isinstance(value, int | float) else str(value)


UNITS = {"MB": 1e-6, "GB": 1e-9, "MiB": 2**-20, "GiB": 2**-30}
FORMATS = {  # {name: function of the value and of the words after the name}
    "number": number,
    **{name: functools.partial(number, scale=scale) for name, scale in {"s": 1, "ms": 1e3, "us": 1e6}.items()},
    **{name: lambda count, spec=".2f", unit=unit: format(unit * count, spec) for name, unit in UNITS.items()},
    "memory": lambda count: format(count / 2**20, ",.1f" if count < 1e9 else ",.0f"),  # MiB
    "ratio": lambda value, digits=2: f"{value['median']:.{digits}f}",
    "percent": percent,
    "cell": cell,
}


def formatted(value, format_spec):
    """The text of a value: by one of FORMATS and the words after its name, or by a format of Python."""
    name, *words = format_spec.split() or [""]
    if value is None or value is OUT_OF_MEMORY:
        return "out of memory" if value is OUT_OF_MEMORY and name == "cell" else ""
    return FORMATS[name](value, *words) if name in FORMATS else format(value, format_spec)


# -- templates --------------------------------------------------------------------------------------------------------


class Fields(dict):
    """A dictionary of a file in results/: fields.name is fields["name"].

    A missing field is None, or OUT_OF_MEMORY if the field "oom" is true, as run_rows() writes it.
    """

    def __missing__(self, name):
        return OUT_OF_MEMORY if self.get("oom") else None

    __getattr__ = dict.__getitem__


class OutOfMemory(Fields):
    """Its fields are itself, and it is false."""

    def __bool__(self):
        return False


OUT_OF_MEMORY = OutOfMemory(oom=True)


class Templates(string.Formatter):
    """str.format with expressions of the fields of a row, and FORMATS. Raises NameError for a name that is no field."""

    def get_field(self, expression, args, fields):
        try:
            return eval(expression, fields), expression
        except (AttributeError, TypeError) as error:  # it is computed from a missing value
            for name, value in {"OutOfMemory": OUT_OF_MEMORY, "NoneType": None}.items():
                if name in str(error):
                    return value, expression
            raise

    def format_field(self, value, format_spec):
        return formatted(value, format_spec)


def fill(template, fields):
    """The text of a template. fields: a row with the names "row" and "file"."""
    return Templates().vformat(template, (), fields)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of one or more files in results/; table() returns (rows {title: cell}, names of the files).

    files: names or patterns, as "cpu/decode*". columns: their description. The rows are the results of a file, a list
    or one dictionary. These change them, in this order:

    each: fields whose values are rows inside a row; "*" is the row itself. A row inside also has the fields of the row
    around it, and its "key" in a dictionary or "index" in a list. If it is not a dictionary, it is the field "value".
    name: template of the field "name", as "{size} / context {context}": its words become fields; a word has no "/".
    Rows with other names are omitted.
    base, same: expression, names of fields. Among the rows with the same fields, the first one for which `base` is true
    is the field "base" of all.
    where: expression; rows for which it is false are omitted.
    order: expression; the rows of all files are sorted by its value.

    merged: rows with the same first cell are one row; of two texts of a cell, the one of the later file remains. also:
    tables with the same first column, whose rows and columns belong to this one. choice: what the last column says, for
    the table "choices" of docs/RESULTS.md.
    """

    files: str | tuple
    columns: str
    each: str = ""
    name: str = ""
    base: str = ""
    same: str = ""
    where: str = "True"
    order: str = ""
    merged: bool = False
    also: tuple = ()
    choice: str = ""

    def __call__(self):
        names = {table: table.names() for table in (self, *self.also)}
        rows = [row for table in names for row in table.filled(map(load, names[table]))]
        return self.joined(rows), list(dict.fromkeys(sum(names.values(), [])))

    def names(self):
        """The names of the files; a pattern without files is a name."""
        found = []
        for pattern in (self.files,) if isinstance(self.files, str) else self.files:
            paths = sorted(RESULTS.glob(f"{pattern}.json"))
            found += [f"{path.parent.name}/{path.stem}" for path in paths] or [pattern]
        return list(dict.fromkeys(found))

    def filled(self, records):
        """[{title: cell}] of the contents of files, not joined yet."""
        rows = [dict(row, row=row, file=record) for record in records for row in self.rows_of(record)]
        rows = [fields for fields in rows if eval(self.where, fields)]
        if self.order:
            rows.sort(key=lambda fields: eval(self.order, fields))
        columns = columns_of(self.columns).items()
        return [{fill(title, fields): fill(text, fields) for title, text in columns} for fields in rows]

    def rows_of(self, record):
        """The rows of the content of a file: Fields."""
        rows = record["results"] if isinstance(record["results"], list) else [record["results"]]
        for field in self.each.split():
            inside = ((row, row if field == "*" else row.get(field) or [{}] * bool(row.oom)) for row in rows)
            rows = [Fields(row | each) for row, found in inside for each in inner_rows(found)]
        if self.name:
            pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(self.name)))
            matches = ((row, pattern.fullmatch(row["name"])) for row in rows)
            rows = [Fields(row, **match.groupdict()) for row, match in matches if match]
        if self.base:
            keys = [tuple(map(row.get, self.same.split())) for row in rows]
            pairs = [*zip(keys, rows, strict=True)]
            bases = {key: row for key, row in reversed(pairs) if eval(self.base, dict(row, row=row))}
            rows = [Fields(row, base=bases.get(key)) for key, row in pairs]
        return rows

    def joined(self, rows):
        """The rows, all with the same titles; those with the same first cell are one row if the table is merged."""
        found = {}
        for row in rows:
            before = found.setdefault(next(iter(row.values())) if self.merged else len(found), {})
            before.update({title: text for title, text in row.items() if text or title not in before})
        titles = dict.fromkeys(title for row in found.values() for title in row)
        return [{title: row.get(title, "") for title in titles} for row in found.values()]

    def cells(self, records):
        """[{title: cell}] of the contents of files, with the tables `also` of the same files."""
        records = json.loads(json.dumps(records), object_hook=Fields)
        tables = [self, *(each for each in self.also if each.files == self.files)]
        return self.joined([row for table in tables for row in table.filled(records)])

    def print(self, results, title=""):
        """Print the rows of results that are not saved yet, below a title; nothing if there are no rows."""
        here = {"hardware": {"cores": os.cpu_count()}, "commit": "", "machine": "here"}
        if rows := self.cells([{"results": summarised(results), **here}]):
            print(f"\n{title}\n\n" if title else "", end="")
            print_table(rows)
            print(flush=True)


def columns_of(description):
    """{title: cell} of the text that describes columns."""
    columns = [column.strip() for column in re.split(r"[|\n]", description) if column.strip()]
    pairs = (column.partition("=") if "=" in column else (column, "", f"{{{column}}}") for column in columns)
    return {title.strip(): text.strip() for title, _, text in pairs}


def inner_rows(found):
    """The rows of a list or dictionary inside a row; see Table."""
    place, pairs = ("key", found.items()) if isinstance(found, dict) else ("index", enumerate(found))
    return [{place: key} | (value if isinstance(value, dict) else {"value": value}) for key, value in pairs]

"""Formats for the tables in the documentation: numbers, and the line under a table that names its source."""

import functools
import json

from testing.jobs import ROOT


@functools.cache
def load(name):
    """The content of results/<name>.json, a dictionary."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


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


# In the functions below, a summary is the dictionary {"median", "q1", "q3", "n"} that summary() in report.py returns.


def number(summary, scale=1.0, digits=4):
    """The median of a summary, times `scale`, with `digits` significant digits and without an exponent."""
    value = scale * summary["median"]
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def spread(summary, scale=1.0, digits=4):
    """The quartiles of a summary as "q1 to q3"; "" if there is only one sample."""
    if summary["n"] == 1:
        return ""
    return " to ".join(number({"median": summary[quartile]}, scale, digits) for quartile in ("q1", "q3"))


def ratio(summary, digits=2):
    """The median of a summary of ratios; "" for None."""
    return "" if summary is None else f"{summary['median']:.{digits}f}"


def percent(share, digits=1):
    """A share as text: "53.4 %" for 0.534."""
    return f"{100 * share:.{digits}f} %"


def gib(count):
    """Bytes as GiB with two decimals; "" for None."""
    return "" if count is None else f"{count / 2**30:.2f}"


def mib(count):
    """Bytes as MiB, with one decimal below 10^9 bytes."""
    return f"{count / 2**20:,.1f}" if count < 1e9 else f"{count / 2**20:,.0f}"


def cell(value):
    """The text of a value in a table: of {"mean", "std"} the mean and the standard deviation, of a float 4 digits."""
    if isinstance(value, dict):
        return f"{value['mean']:.4g} ± {value['std']:.2g}" if "mean" in value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The tables of docs/ASSIGNMENT.md, which the commands of benchmarks/torch print too. This file imports no PyTorch.

A function of a command gets the rows of its results file and returns {title: rows of a table}. TABLES has a function
for each table of the page; it returns ([], files) if the rows do not exist yet.
"""

import functools

from benchmarks.harness import gpu_tables
from benchmarks.harness.jobs import ROOT
from benchmarks.harness.table_format import cell, load

KINDS = FORWARD, GRADIENTS, STEP = "forward", "forward + backward", "step"
WARM_UPS = 0, 1, 2, 5  # numbers of steps
ATTENTION_PARTS = PRODUCTS, SOFTMAX, OTHERS = "products", "softmax", "scale, mask, casts"
MIB, GIB = 2**20, 2**30


def keys_of(words):
    """{column: cell} of the first words of a row's name: size, context, precision."""
    size, context, precision = words[:3]
    return {"size": size, "context": context.removeprefix("context "), "precision": precision}


# -- end_to_end --------------------------------------------------------------------------------------------------------


def end_to_end_tables(rows):
    found = {}
    for row in rows:
        is_warm_up = row["name"].startswith("warm-up")
        words = row["name"].removeprefix("warm-up / ").split(" / ")
        columns = ["first step", *(f"warm-up {count}" for count in WARM_UPS)] if is_warm_up else KINDS
        cells = keys_of(words) | {"implementation": words[3]}
        for column in columns:
            value = {"oom": True} if row.get("oom") else row[column]
            cells[f"{column}, ms"] = "out of memory" if isinstance(value, dict) and value.get("oom") else cell(value)
        if not is_warm_up:
            cells["backward, ms"] = difference(row)
        found.setdefault("warm-up steps" if is_warm_up else "time of each kind", []).append(cells)
    return found


def difference(row):
    """The mean of forward + backward minus that of forward; "" without one of them."""
    both, forward = row.get(GRADIENTS, {}), row.get(FORWARD, {})
    return f"{both['mean'] - forward['mean']:.4g}" if "mean" in both and "mean" in forward else ""


# -- profile -----------------------------------------------------------------------------------------------------------


def profile_tables(rows):
    passes, attention = [], []
    for row in rows:
        words = row["name"].split(" / ")
        keys = keys_of(words) | {"implementation": words[3]}
        if row.get("oom"):
            passes.append(keys | {"pass": "out of memory"})
            continue
        for name, found in row["passes"].items():
            passes.append(keys | {"pass": name} | pass_cells(found))
        parts = row["attention"]
        ms = {part: parts[part]["ms"] for part in ATTENTION_PARTS}
        cells = {f"{part}, ms": f"{ms[part]:.4g}" for part in ATTENTION_PARTS}
        cells["time of softmax / products"] = f"{ms[SOFTMAX] / ms[PRODUCTS]:.2f}" if ms[PRODUCTS] else ""
        operations = parts[SOFTMAX]["operations"] / parts[PRODUCTS]["operations"]
        attention.append(keys | cells | {"operations of softmax / products": f"{operations:.3f}"})
    columns = dict.fromkeys(key for row in passes for key in row)
    passes = [{key: row.get(key, "") for key in columns} for row in passes]
    return {"passes": passes, "attention of one layer, forward": attention}


def pass_cells(found):
    """The cells of one pass."""
    none = {"name": "", "calls": 0, "share": 0.0}
    top, other = (next(iter(found[field]), none) for field in ("kernels", "others"))
    return {
        "wall ms": cell(found["wall"]),
        "sum of kernels, ms": f"{found['kernels_ms']:.4g}",
        "kernels": found["calls"],
        "products": f"{100 * found['product_share']:.1f} %",
        "longest kernel": f"`{top['name']}`",
        "its calls": top["calls"],
        "its share": f"{100 * top['share']:.1f} %",
        "longest other kernel": f"`{other['name']}`",
        "share of that": f"{100 * other['share']:.1f} %",
    }


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulation_tables(rows):
    found = {}
    for row in rows:
        kind, *keys = row["name"].split(" / ")
        if kind == "sum":
            cells = {"sum + number": keys[0], "result": f"{row['sum']:.7g}", "relative error": f"{row['error']:.1e}"}
        elif kind == "dtypes":
            cells = {"autocast": keys[0]} | {key: row[key] for key in row if key not in ("name", "commit", "date")}
        else:
            cells = {"dtype": keys[0], "input": keys[1]}
            for statistics, text in (("own dtype", "statistics in this dtype"), ("float32", "statistics in float32")):
                cells[f"error, {text}"] = f"{row[statistics]:.1e}"
        found.setdefault(kind, []).append(cells)
    return found


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_tables(rows):
    peaks, largest, residual, checkpoints, saved = [], [], {}, [], []
    for row in rows:
        kind = row["name"].split(" / ")[0]
        is_other = kind in ("timeline", "checkpoint", "saved")
        words = row["name"].split(" / ")[is_other:]
        keys = keys_of(words)
        if kind == "checkpoint":
            blocks = words[3].removesuffix(" blocks")
            checkpoints.append(keys | {"blocks of a checkpoint": blocks, f"{STEP}, GiB": gib(row, STEP)})
        elif kind == "saved" and not row.get("oom"):
            total = {"saved by": "sum of all lines", "MiB": f"{row['saved'] / MIB:.1f}", "share": "100 %"}
            for source, count in row["sources"].items():
                cells = {"saved by": f"`{source}`", "MiB": f"{count / MIB:.1f}"}
                saved.append(keys | cells | {"share": f"{100 * count / row['saved']:.1f} %"})
            gradients = {"saved by": "gradients of the parameters", "MiB": f"{row['gradients'] / MIB:.1f}", "share": ""}
            saved += [keys | total, keys | gradients]
        elif not is_other:
            cells = {"implementation": words[3]} | {f"{kind}, GiB": gib(row, kind) for kind in (FORWARD, STEP)}
            cells["step, held by the allocator, GiB"] = gib(row, STEP, "held")
            cells["step, predicted, GiB"] = f"{row['predicted'] / GIB:.2f}" if "predicted" in row else ""
            peaks.append(keys | cells)
            if "residual" in row:
                title = "one residual activation in fp32, MiB"
                cells = {"size": keys["size"], "context": keys["context"], title: f"{row['residual'] / MIB:.2f}"}
                residual[words[0], words[1]] = cells
        elif kind == "timeline" and not row.get("oom"):
            for each in row["largest"]:
                cells = {"kind": words[3], "implementation": words[4], "MiB": f"{each['bytes'] / MIB:.1f}"}
                largest.append(keys | cells | {"times": each["times"], "allocated by": f"`{each['source']}`"})
    found = {
        "peak memory": peaks,
        "residual stream": list(residual.values()),
        "checkpoints": checkpoints,
        "largest allocations": largest,
        "saved for backward by one block": saved,
    }
    return {title: each for title, each in found.items() if each}


def gib(row, kind, field="peak"):
    """A peak of a row of memory, in GiB."""
    found = {"oom": True} if row.get("oom") else row.get(kind, {"oom": True})
    if found.get("oom"):
        return "out of memory"
    return "" if found[field] is None else f"{found[field] / GIB:.2f}"


# -- several GPUs ------------------------------------------------------------------------------------------------------


def value_tables(rows):
    """One table with all columns of the rows; a time is its mean and standard deviation."""
    columns = dict.fromkeys(key for row in rows for key in row if key not in ("commit", "date"))
    return {"rows": [{key: cell(row.get(key, "")) for key in columns} for row in rows]}


def model_tables(results):
    """The rows of ddp_model: measured and predicted overhead of each bucket size."""
    return value_tables(results["rows"])


def timeline_tables(results):
    """How much of the communication of one step runs at the same time as computation, from the intervals of ddp."""
    rows = []
    for way, intervals in results["intervals"].items():
        spans = {lane: [(a, b) for each, a, b in intervals if each == lane] for lane in ("compute", "communication")}
        total = {lane: sum(b - a for a, b in found) for lane, found in spans.items()}
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["compute"] for c, d in spans["communication"])
        share = f"{100 * both / total['communication']:.0f} %" if total["communication"] else ""
        cells = {f"{lane}, ms": f"{spent:.1f}" for lane, spent in total.items()}
        rows.append({"": way} | cells | {"communication during computation": share})
    return {"rows": rows}


# -- the tables of the page --------------------------------------------------------------------------------------------


def attention_tables(rows):
    from benchmarks.torch.attention import table_rows  # imports no PyTorch before it measures

    return table_rows(rows)


def table(file, function, title, only=""):
    """(rows, [file]) of the table `title` that `function` makes of results/<file>.json; no rows without the file.

    only: a text in the names of the rows, where the results are a list.
    """
    if not (ROOT / "results" / f"{file}.json").exists():
        return [], [file]
    results = load(file)["results"]
    if only:
        results = [row for row in results if only in row["name"]]
    return function(results).get(title, []) if results else [], [file]


def tables_of(file, function, titles):
    """{name of a table of the page: its function}. titles: {name: title in the result of `function`}."""
    return {name: functools.partial(table, file, function, title) for name, title in titles.items()}


TABLES = {
    **tables_of("torch/end_to_end", end_to_end_tables, {"end-to-end": "time of each kind", "warm-up": "warm-up steps"}),
    **tables_of(
        "torch/profile",
        profile_tables,
        {"profile-passes": "passes", "profile-attention": "attention of one layer, forward"},
    ),
    **tables_of(
        "torch/accumulation", accumulation_tables, {"sums": "sum", "autocast": "dtypes", "layernorm": "layernorm"}
    ),
    **tables_of(
        "torch/memory",
        memory_tables,
        {
            "peaks": "peak memory",
            "residual": "residual stream",
            "checkpoints": "checkpoints",
            "largest": "largest allocations",
            "saved": "saved for backward by one block",
        },
    ),
    **tables_of(
        "torch/attention",
        attention_tables,
        {
            "naive-memory": "memory",
            **{f"grid-{kind}": f"grid, {kind}, ms" for kind in ("forward", "backward", "both")},
        },
    ),
    **tables_of("torch/all_reduce", value_tables, {"all-reduce": "rows"}),
    **tables_of("torch/ddp_timeline", timeline_tables, {"ddp-timeline": "rows"}),
    **tables_of("torch/ddp_sockets", value_tables, {"ddp-sockets": "rows"}),
    "core-buckets": lambda: gpu_tables.gpus_strategies("gpus/buckets"),
    **tables_of("torch/ddp_model", model_tables, {"ddp-model": "rows"}),
    **tables_of("torch/ddp_model_sockets", model_tables, {"ddp-model-sockets": "rows"}),
    **tables_of("torch/sharding", value_tables, {"sharding": "rows"}),
}

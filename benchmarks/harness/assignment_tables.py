"""The tables of docs/ASSIGNMENT.md, which the commands of benchmarks/torch print too. This file imports no PyTorch.

A function of a command gets the rows of its results file and returns {title: rows of a table}. TABLES has a function
for each table of the page; it returns ([], files) if the rows do not exist yet.
"""

import functools

from benchmarks.harness import gpu_tables
from benchmarks.harness.table_format import cell, load, percent
from testing.jobs import ROOT

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
    if speedups := bf16_speedups({row["name"]: row for row in rows}):
        found["time in fp32 / time in bf16"] = speedups
    return found


def bf16_speedups(rows):
    """The ratio of the mean times of each kind, for the models that were measured in both precisions.

    rows: {name: row}
    """
    found = []
    for name, row in rows.items():
        words = name.split(" / ")
        other = rows.get(name.replace(" / bf16 / ", " / fp32 / "), row)
        if other is not row and words[0] != "warm-up":
            cells = {"size": words[0], "context": words[1].removeprefix("context "), "implementation": words[3]}
            for kind in KINDS:
                times = [each.get(kind, {}).get("mean") for each in (other, row)]
                cells[kind] = f"{times[0] / times[1]:.2f}" if all(times) else ""
            found.append(cells)
    return found


def difference(row):
    """The mean of forward + backward minus that of forward; "" without one of them."""
    both, forward = row.get(GRADIENTS, {}), row.get(FORWARD, {})
    return f"{both['mean'] - forward['mean']:.4g}" if "mean" in both and "mean" in forward else ""


# -- profile -----------------------------------------------------------------------------------------------------------


def profile_tables(rows):
    passes, attention, shares, others = [], [], [], []
    for row in rows:
        words = row["name"].split(" / ")
        keys = keys_of(words) | {"implementation": words[3]}
        if row.get("oom"):
            passes.append(keys | {"pass": "out of memory"})
            continue
        for name, found in row["passes"].items():
            passes.append(keys | {"pass": name} | pass_cells(found))
        shares.append(keys | step_cells(row["passes"]))
        longest = (
            f"`{each['name']}` {each['calls']} x, {percent(each['share'])}"
            for each in row["passes"]["forward only"]["others"]
        )
        others.append(keys | {"kernels that are not products, forward only: calls, share": "; ".join(longest)})
        parts = row["attention"]
        ms = {part: parts[part]["ms"] for part in ATTENTION_PARTS}
        cells = {f"{part}, ms": f"{ms[part]:.4g}" for part in ATTENTION_PARTS}
        cells["time of softmax / products"] = f"{ms[SOFTMAX] / ms[PRODUCTS]:.2f}" if ms[PRODUCTS] else ""
        operations = parts[SOFTMAX]["operations"] / parts[PRODUCTS]["operations"]
        attention.append(keys | cells | {"operations of softmax / products": f"{operations:.3f}"})
    columns = dict.fromkeys(key for row in passes for key in row)
    passes = [{key: row.get(key, "") for key in columns} for row in passes]
    return {
        "passes": passes,
        "shares of the time of the kernels": shares,
        "other kernels": others,
        "attention of one layer, forward": attention,
    }


def step_cells(passes):
    """The share of the products in inference and in a training step, and how much of the wall time is kernels."""
    forward, step = passes["forward only"], [passes[name] for name in ("forward", "backward", "optimizer")]
    total = sum(each["kernels_ms"] for each in step)
    products = sum(each["kernels_ms"] * each["product_share"] for each in step)
    wall = sum(each["wall"]["mean"] for each in step)
    return {
        "products, forward only": percent(forward["product_share"]),
        "products, training step": percent(products / total),
        "optimizer, training step": percent(step[-1]["kernels_ms"] / total),
        "kernels / wall, forward only": percent(forward["kernels_ms"] / forward["wall"]["mean"]),
        "kernels / wall, training step": percent(total / wall),
    }


def pass_cells(found):
    """The cells of one pass."""
    none = {"name": "", "calls": 0, "share": 0.0}
    top, other = (next(iter(found[field]), none) for field in ("kernels", "others"))
    return {
        "wall ms": cell(found["wall"]),
        "sum of kernels, ms": f"{found['kernels_ms']:.4g}",
        "kernels": found["calls"],
        "products": percent(found["product_share"]),
        "longest kernel": f"`{top['name']}`",
        "its calls": top["calls"],
        "its share": percent(top["share"]),
        "longest other kernel": f"`{other['name']}`",
        "share of that": percent(other["share"]),
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
    peaks, largest, residual, checkpoints, saved, timelines = [], [], {}, [], [], []
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
            timelines.append(keys | {"kind": words[3], "implementation": words[4]} | timeline_cells(row))
            for each in row["largest"]:
                cells = {"kind": words[3], "implementation": words[4], "MiB": f"{each['bytes'] / MIB:.1f}"}
                largest.append(keys | cells | {"times": each["times"], "allocated by": f"`{each['source']}`"})
    found = {
        "peak memory": peaks,
        "residual stream": list(residual.values()),
        "checkpoints": checkpoints,
        "timelines": timelines,
        "largest allocations": largest,
        "saved for backward by one block": saved,
    }
    return {title: each for title, each in found.items() if each}


def timeline_cells(row):
    """GiB at the moments of a timeline. Each point is the largest value of some neighbouring allocations."""
    points = [float(value) for value in row["GiB"].split()]
    start = row["marks"].get("backward")
    return {
        "before, GiB": f"{row['before'] / GIB:.2f}",
        "lowest, GiB": f"{min(points):.2f}",
        "peak, GiB": f"{row['peak'] / GIB:.2f}",
        "start of backward, GiB": "" if start is None else f"{points[start]:.2f}",
        "end, GiB": f"{points[-1]:.2f}",
        "allocations": row["allocations"],
    }


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


def all_reduce_tables(rows):
    """The time of each library, and the times of stage 1's algorithms beside MPI's."""
    libraries, ours = [], []
    for row in rows:
        library = row["name"].split(",")[0]
        keys = {"ranks": row["ranks"], "MB": f"{row['bytes'] / 1e6:g}"} if "bytes" in row else {}
        if keys:
            speeds = {key: cell(row[key]) for key in ("GB/s", "bus GB/s")}
            libraries.append({"library": library} | keys | {"ms": cell(row["time"])} | speeds)
        if algorithms := {f"{key}, ms": cell(row[key]) for key in row if key.startswith("ours")}:
            ours.append(keys | {f"{library}, ms": cell(row["time"])} | algorithms)
    return {"libraries": libraries, "algorithms": ours}


def ddp_tables(rows):
    """The time that each schedule adds to a step without synchronisation."""
    base = next((row["step"]["mean"] for row in rows if row["way"] == "none"), None)
    found = []
    for row in rows:
        step = row["step"]["mean"]
        is_measured = base is not None and row["way"] != "none"
        after_backward = row["way"] in ("naive", "flat")  # of the others a part is sent during backward
        found.append(
            {
                "schedule": row["way"],
                "messages": row["buckets"] or "",
                "ms per step": cell(row["step"]),
                "added, ms": f"{step - base:.1f}" if is_measured else "",
                "share of step": percent(1 - base / step) if is_measured else "",
                "synchronisation after backward, ms": cell(row["finish"]) if after_backward else "",
            }
        )
    return {"rows": found}


def sharding_tables(rows):
    """Memory of a rank after three moments of the first step, and the time of a step."""
    found = []
    for row in rows:
        cells = {"": row["way"], "ranks": row["ranks"], "ms per step": cell(row["step"])}
        for moment in ("init", "before step", "after step"):
            counted, allocated = (f"{row[f'{prefix}GB {moment}']:.2f}" for prefix in ("counted ", ""))
            cells |= {f"{moment}, counted GB": counted, f"{moment}, GB": allocated}
        losses = {f"{each} loss": f"{row[f'{each} loss']:.4f}" for each in ("first", "last")}
        found.append(cells | {"peak, GB": f"{row['peak GB']:.2f}"} | losses)
    return {"rows": found}


def model_tables(results):
    """The rows of ddp_model: measured and predicted overhead of each bucket size."""
    found = []
    for row in results["rows"]:
        mean = results["bytes"] / row["buckets"] / MIB
        cells = {"largest bucket, MiB": f"{row['bucket MB']:g}", "buckets": row["buckets"]}
        cells |= {"mean bucket, MiB": f"{mean:.1f}", "measured, ms": f"{row['measured ms']:.2f}"}
        for name in ("closed form", "pipelined"):
            cells[f"{name}, ms"] = f"{row[f'{name} ms']:.2f}"
            cells[f"{name} / measured"] = f"{row[f'{name} / measured']:.2f}"
        found.append(cells)
    return {"rows": found}


def fits():
    """The two networks of ddp_model: what was fitted, and whether backward takes as long as the communication."""
    pairs = {"torch/ddp_model": "torch/ddp", "torch/ddp_model_sockets": "torch/ddp_sockets"}
    rows, files = [], [*pairs]
    for model, measured in pairs.items():
        if any(not (ROOT / "results" / f"{file}.json").exists() for file in (model, measured)):
            continue
        found, settings = load(model)["results"], load(model)["results"]["settings"]
        (base,) = (row for row in load(measured)["results"] if row["name"] == f"{settings}, none")
        s, w, o = found["bytes"], found["w"], found["o"]
        best = min(found["rows"], key=lambda row: row["measured ms"])
        cells = {
            "settings": settings,
            "s, MB": f"{s / 1e6:.0f}",
            "w, GB/s": f"{w / 1e9:.3g}",
            "o, us": f"{1e6 * o:.3g}",
        }
        cells |= {"s / w, ms": f"{1e3 * s / w:.1f}", "backward, ms": f"{base['backward']['mean']:.1f}"}
        cells |= {"sqrt(s w o), MiB": f"{found['best_bucket_bytes'] / MIB:.1f}"}
        rows.append(cells | {"largest bucket of the fastest, MiB": f"{best['bucket MB']:g}"})
    return rows, files


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


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION_GRID = "naive", "compiled", "sdpa", "ours", "ours, compiled backward"  # the implementations of its grid


def attention_tables(rows):
    """{title: the rows of a table}; the grid has a table for each kind, with a column for each implementation."""
    tables = {}
    for row in rows:
        part, *keys = row["name"].split(" / ")
        if part == "grid":
            *shape, implementation_name = keys
            for kind in ("forward", "backward", "both"):
                table = tables.setdefault(f"grid, {kind}, ms", {})
                cells = table.setdefault(tuple(shape), {"": ", ".join(shape), **dict.fromkeys(ATTENTION_GRID, "")})
                cells[implementation_name] = time_cell(row, kind)
        else:
            kinds = ("both",) if part == "leaderboard" else ("forward", "backward")
            cells = {"": ", ".join(keys), **{f"{kind} ms": time_cell(row, kind) for kind in kinds}}
            if part == "memory":
                for column, kind in (
                    ("GiB before backward", "bytes_before_backward"),
                    ("GiB of weights", "bytes_of_weights"),
                ):
                    cells[column] = "" if row.get("oom") else f"{row[kind] / 2**30:.2f}"
            tables.setdefault(part, {})[row["name"]] = cells
    return {title: list(table.values()) for title, table in tables.items()}


def time_cell(row, kind):
    """The mean and the standard deviation of a time in ms, as text."""
    return "out of memory" if row.get("oom") else cell(row[kind])


# -- the tables of the page --------------------------------------------------------------------------------------------


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
    **tables_of(
        "torch/end_to_end",
        end_to_end_tables,
        {
            "end-to-end": "time of each kind",
            "end-to-end-bf16": "time in fp32 / time in bf16",
            "warm-up": "warm-up steps",
        },
    ),
    **tables_of(
        "torch/profile",
        profile_tables,
        {
            "profile-passes": "passes",
            "profile-shares": "shares of the time of the kernels",
            "profile-others": "other kernels",
            "profile-attention": "attention of one layer, forward",
        },
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
            "timelines": "timelines",
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
    **tables_of("torch/all_reduce", all_reduce_tables, {"all-reduce": "libraries", "all-reduce-ours": "algorithms"}),
    **tables_of("torch/ddp", ddp_tables, {"ddp": "rows"}),
    **tables_of("torch/ddp_timeline", timeline_tables, {"ddp-timeline": "rows"}),
    **tables_of("torch/ddp_sockets", ddp_tables, {"ddp-sockets": "rows"}),
    "core-buckets": lambda: gpu_tables.gpus_strategies("gpus/buckets"),
    "ddp-fits": fits,
    **tables_of("torch/ddp_model", model_tables, {"ddp-model": "rows"}),
    **tables_of("torch/ddp_model_sockets", model_tables, {"ddp-model-sockets": "rows"}),
    **tables_of("torch/sharding", sharding_tables, {"sharding": "rows"}),
    **tables_of("torch/sharding_shared", sharding_tables, {"sharding-shared": "rows"}),
}

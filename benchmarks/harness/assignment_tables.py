"""The tables of docs/ASSIGNMENT.md, which the commands of benchmarks/torch print too. This file imports no PyTorch."""

from dataclasses import replace

from benchmarks.harness import result_tables
from benchmarks.harness.table_format import Table, beside, cell, fill, load

KINDS = FORWARD, GRADIENTS, STEP = "forward", "forward + backward", "step"
WARM_UPS = 0, 1, 2, 5  # numbers of steps
ATTENTION_PARTS = PRODUCTS, SOFTMAX, OTHERS = "products", "softmax", "scale, mask, casts"
OURS = "ours"
GRID = "naive", "compiled", "sdpa", OURS, "ours, compiled backward"
MOMENTS = "init", "before step", "after step"  # of sharding
GIB = 2**30

# -- rows: a name is "[PART / ] size / context T / precision / [more / ] implementation" -------------------------------


def models(results, part=None):
    """The rows of a part, with the fields of their names. None: rows without a part."""
    for row in results:
        words = row["name"].split(" / ")
        before = [words.pop(0)] if words[0] == part else []
        if bool(before) == bool(part) and words[1].startswith("context "):
            size, context, precision, *more = words
            keys = {"size": size, "context": context.removeprefix("context "), "precision": precision}
            yield row | keys | {"more": more[0], "implementation": more[-1]}


def measured(results, part=None):
    """models() without the rows for which the memory of the GPU was too small."""
    return (row for row in models(results, part) if not row.get("oom"))


def named(part):
    """A function of the results of a file: its rows of a part, with the other words of their names."""
    return lambda results: (
        row | {"words": row["name"].split(" / ")[1:]} for row in results if row["name"].startswith(f"{part} / ")
    )


def passes(results):
    """A row for each pass, with its kernels ("found"), and one for a model whose memory was too small."""
    for row in models(results):
        for name, found in row.get("passes", {"": None}).items():
            yield row | {"found": found} | ({"pass": name} if found else {})


def step_shares(results):
    """The share of the products in inference and in a training step, and how much of the wall time is kernels."""
    for row in measured(results):
        forward, *step = (row["passes"][name] for name in ("forward only", "forward", "backward", "optimizer"))
        total = sum(each["kernels_ms"] for each in step)
        yield row | {
            "forward": forward,
            "training": sum(each["kernels_ms"] * each["product_share"] for each in step) / total,
            "optimizer": step[-1]["kernels_ms"] / total,
            "busy_training": total / sum(each["wall"]["mean"] for each in step),
        }


def other_kernels(results):
    for row in measured(results):
        others = row["passes"]["forward only"]["others"]
        yield row | {"others": "; ".join(fill("`{name}` {calls} x, {share:percent}", each) for each in others)}


def dtypes(results):
    for row in named("dtypes")(results):
        skipped = "name", "commit", "date", "words"
        yield {"autocast": row["words"][0]} | {key: value for key, value in row.items() if key not in skipped}


def saved_tensors(results):
    """The lines that save tensors for backward, their sum, and the gradients of the parameters."""
    for row in measured(results, "saved"):
        for line, count in row["sources"].items():
            yield row | {"line": f"`{line}`", "count": count, "share": count / row["saved"]}
        yield row | {"line": "sum of all lines", "count": row["saved"], "share": "100 %"}
        yield row | {"line": "gradients of the parameters", "count": row["gradients"], "share": ""}


def timelines(results):
    """GiB at the moments of a timeline. Each point is the largest value of some neighbouring allocations."""
    for row in measured(results, "timeline"):
        points = [float(value) for value in row["GiB"].split()]
        start = row["marks"].get("backward")
        yield row | {"points": points, "start": None if start is None else points[start]}


def grid(kind):
    """The table of the times of one kind (forward, backward, both) of all implementations, a row for each shape."""
    columns = "\n".join(f"{name} = {{row.{kind} if words[-1] == '{name}' else '':cell}}" for name in GRID)
    return Table("torch/attention", "= {words[:-1]:list}\n" + columns, named("grid"), merged=True)


def algorithms(results):
    """The times of stage 1's algorithms beside MPI's."""
    for row in results:
        library = row["name"].split(",")[0]
        if ours := {f"{key}, ms": cell(row[key]) for key in row if key.startswith("ours")}:
            keys = {"ranks": row["ranks"], "MB": f"{row['bytes'] / 1e6:g}"}
            yield keys | {f"{library}, ms": cell(row["time"])} | ours


def schedules(results):
    """The rows of ddp beside the step that synchronises nothing, and whether they send after backward only."""
    ways = (row["name"].rpartition(", ")[2] for row in results)
    rows = (row | {"way": way, "after": way in ("naive", "flat")} for row, way in zip(results, ways, strict=True))
    return beside(rows, lambda row: row["way"] == "none" and "step" in row)


def networks(results):
    """What ddp_model fitted to a network, and whether backward takes as long as the communication."""
    rows = (row for file in ("torch/ddp", "torch/ddp_sockets") for row in load(file)["results"])
    best = min(results["rows"], key=lambda row: row["measured ms"])["bucket MB"]
    for base in (row for row in rows if row["name"] == f"{results['settings']}, none"):
        yield results | {"base": base, "best": best}


def overlaps(results):
    """How much of the communication of one step runs at the same time as computation, from the intervals of ddp."""
    for way, intervals in results["intervals"].items():
        spans = {lane: [(a, b) for each, a, b in intervals if each == lane] for lane in ("compute", "communication")}
        total = {lane: sum(b - a for a, b in found) for lane, found in spans.items()}
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["compute"] for c, d in spans["communication"])
        yield {"way": way, **total, "share": both / total["communication"] if total["communication"] else None}


# -- tables -----------------------------------------------------------------------------------------------------------

KEYS = "size | context | precision"
MODEL = f"{KEYS} | implementation"
STEP_GIB = "step, GiB = {row.step.peak:cell GiB}"


def in_ms(columns):
    """The description of columns with the mean and standard deviation of times."""
    return "\n".join(f'{column}, ms = {{row["{column}"]:cell}}' for column in columns)


TABLES = {
    "end-to-end": Table("torch/end_to_end", f"""{MODEL}
        {in_ms(KINDS)}
        backward, ms = {{row["{GRADIENTS}"].mean - row.forward.mean:.4g}}""", models),
    "end-to-end-bf16": Table(
        "torch/end_to_end",
        "size | context | implementation | "
        + " | ".join(f'{kind} = {{base["{kind}"].mean / row["{kind}"].mean:.2f}}' for kind in KINDS),
        lambda results: (
            row
            for row in beside(models(results), lambda row: row["precision"] == "fp32", "size", "context", "more")
            if row["precision"] == "bf16" and row["base"]
        )),
    "warm-up": Table(
        "torch/end_to_end", f"{MODEL}\n{in_ms(('first step', *(f'warm-up {count}' for count in WARM_UPS)))}",
        lambda results: models(results, "warm-up")),
    "profile-passes": Table("torch/profile", f"""{MODEL}
        pass = {{row["pass"]:cell}} | wall ms = {{found.wall:cell}} | sum of kernels, ms = {{found.kernels_ms:.4g}}
        kernels = {{found.calls}} | products = {{found.product_share:percent}}
        longest kernel = {{"`%s`" % found.kernels[0].name}} | its calls = {{found.kernels[0].calls}}
        its share = {{found.kernels[0].share:percent}} | longest other kernel = {{"`%s`" % found.others[0].name}}
        share of that = {{found.others[0].share:percent}}""", passes),
    "profile-shares": Table("torch/profile", f"""{MODEL}
        products, forward only = {{forward.product_share:percent}} | products, training step = {{training:percent}}
        optimizer, training step = {{optimizer:percent}}
        kernels / wall, forward only = {{forward.kernels_ms / forward.wall.mean:percent}}
        kernels / wall, training step = {{busy_training:percent}}""", step_shares),
    "profile-others": Table(
        "torch/profile", f"{MODEL} | kernels that are not products, forward only: calls, share = {{others}}",
        other_kernels),
    "profile-attention": Table("torch/profile", f"""{MODEL}
        products, ms = {{attention.products.ms:.4g}} | softmax, ms = {{attention.softmax.ms:.4g}}
        {OTHERS}, ms = {{attention["{OTHERS}"].ms:.4g}}
        time of softmax / products = {{attention.softmax.ms / (attention.products.ms or None):.2f}}
        operations of softmax / products = {{attention.softmax.operations / attention.products.operations:.3f}}""",
        measured),
    "sums": Table("torch/accumulation", """
        sum + number = {words[0]} | result = {sum:.7g} | relative error = {error:.1e}""", named("sum")),
    "autocast": Table("torch/accumulation", rows=dtypes),
    "layernorm": Table("torch/accumulation", """
        dtype = {words[0]} | input = {words[1]} | error, statistics in this dtype = {row["own dtype"]:.1e}
        error, statistics in float32 = {float32:.1e}""", named("layernorm")),
    "peaks": Table("torch/memory", f"""{MODEL}
        forward, GiB = {{row.forward.peak:cell GiB}} | {STEP_GIB}
        step, held by the allocator, GiB = {{row.step.held:cell GiB}} | step, predicted, GiB = {{row.predicted:GiB}}""",
        models),
    "residual": Table(
        "torch/memory", "size | context | one residual activation in fp32, MiB = {residual:MiB}",
        lambda results: {(row["size"], row["context"]): row for row in models(results) if "residual" in row}.values()),
    "checkpoints": Table(
        "torch/memory", f'{KEYS} | blocks of a checkpoint = {{more.removesuffix(" blocks")}} | {STEP_GIB}',
        lambda results: models(results, "checkpoint")),
    "timelines": Table("torch/memory", f"""{KEYS}
        kind = {{more}} | implementation | before, GiB = {{before:GiB}} | lowest, GiB = {{min(points):.2f}}
        peak, GiB = {{peak:GiB}} | start of backward, GiB = {{start:.2f}} | end, GiB = {{points[-1]:.2f}}
        allocations""", timelines),
    "largest": Table("torch/memory", f"""{KEYS}
        kind = {{more}} | implementation | MiB = {{bytes:MiB .1f}} | times | allocated by = `{{source}}`""",
        lambda results: (row | each for row in measured(results, "timeline") for each in row["largest"])),
    "saved": Table(
        "torch/memory", f"{KEYS} | saved by = {{line}} | MiB = {{count:MiB .1f}} | share = {{share:cell percent}}",
        saved_tensors),
    "naive-memory": Table("torch/attention", """
        = {words:list} | forward ms = {row.forward:cell} | backward ms = {row.backward:cell}
        GiB before backward = {row.bytes_before_backward:GiB} | GiB of weights = {row.bytes_of_weights:GiB}""",
        named("memory")),
    **{f"grid-{kind}": grid(kind) for kind in ("forward", "backward", "both")},
    "all-reduce": Table("torch/all_reduce", """
        library = {name.split(",")[0]} | ranks | MB = {bytes:MB g} | ms = {time:cell}
        GB/s = {row["GB/s"]:cell} | bus GB/s = {row["bus GB/s"]:cell}""",
        lambda results: (row for row in results if "bytes" in row)),
    "all-reduce-ours": Table("torch/all_reduce", rows=algorithms),
    **Table("torch/ddp", """
        schedule = {way} | messages = {row.buckets or ""} | ms per step = {row.step:cell}
        added, ms = {None if way == "none" else row.step.mean - base.step.mean:.1f}
        share of step = {None if way == "none" else 1 - base.step.mean / row.step.mean:percent}
        synchronisation after backward, ms = {row.finish if after else "":cell}""", schedules).kinds("ddp", "sockets"),
    "ddp-timeline": Table("torch/ddp_timeline", """
        = {way} | compute, ms = {compute:.1f} | communication, ms = {communication:.1f}
        communication during computation = {share:percent 0}""", overlaps),
    "core-buckets": replace(result_tables.GPU_STRATEGIES, files="gpus/buckets"),
    "ddp-fits": Table(("torch/ddp_model", "torch/ddp_model_sockets"), """
        settings | s, MB = {bytes:MB .0f} | w, GB/s = {w:GB .3g} | o, us = {o * 1e6:.3g}
        s / w, ms = {bytes / w * 1e3:.1f} | backward, ms = {base.backward.mean:.1f}
        sqrt(s w o), MiB = {best_bucket_bytes:MiB .1f} | largest bucket of the fastest, MiB = {best:g}""",
        networks),
    **Table("torch/ddp_model", """
        largest bucket, MiB = {row["bucket MB"]:g} | buckets | mean bucket, MiB = {file.results.bytes / buckets:MiB .1f}
        measured, ms = {row["measured ms"]:.2f} | closed form, ms = {row["closed form ms"]:.2f}
        closed form / measured = {row["closed form / measured"]:.2f} | pipelined, ms = {row["pipelined ms"]:.2f}
        pipelined / measured = {row["pipelined / measured"]:.2f}""", lambda results: results["rows"],
    ).kinds("ddp-model", "sockets"),
    **Table("torch/sharding", """
        = {name.rpartition(", ")[2]} | ranks = {row.ranks} | ms per step = {row.step:cell}
        """ + "\n".join(
            f'{at}, counted GB = {{row["counted GB {at}"]:.2f}} | {at}, GB = {{row["GB {at}"]:.2f}}' for at in MOMENTS
        ) + """
        peak, GB = {row["peak GB"]:.2f} | first loss = {row["first loss"]:.4f} | last loss = {row["last loss"]:.4f}""",
        console="\n".join(f'{at}, predicted GB = {{row["predicted GB {at}"]:.2f}}' for at in MOMENTS),
    ).kinds("sharding", "shared"),
}  # fmt: skip


def print_tables(rows, *names):
    """Print the tables with these names of rows that a command has measured."""
    for name in names:
        TABLES[name].print(rows, title=name)

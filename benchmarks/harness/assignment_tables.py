"""The tables of docs/ASSIGNMENT.md, which the commands of benchmarks/torch print too. This file imports no PyTorch."""

from benchmarks.harness import gpu_tables
from benchmarks.harness.table_format import Table, cell, load, percent

KINDS = FORWARD, GRADIENTS, STEP = "forward", "forward + backward", "step"
WARM_UPS = 0, 1, 2, 5  # numbers of steps
ATTENTION_PARTS = PRODUCTS, SOFTMAX, OTHERS = "products", "softmax", "scale, mask, casts"
OURS = "ours"
GRID = "naive", "compiled", "sdpa", OURS, "ours, compiled backward"
MOMENTS = "init", "before step", "after step"  # of sharding
MIB, GIB = 2**20, 2**30
OUT_OF_MEMORY = {"oom": True}

# -- rows: a name is "[PART / ] size / context T / precision / [more / ] implementation" -------------------------------


def models(part=None):
    """A function of a file's content: its rows of a part, with the fields of their names. None: rows without a part."""

    def rows(record):
        for row in record["results"]:
            words = row["name"].split(" / ")
            before = [words.pop(0)] if words[0] == part else []
            if bool(before) == bool(part) and words[1].startswith("context "):
                size, context, precision, *more = words
                keys = {"size": size, "context": context.removeprefix("context "), "precision": precision}
                yield row | keys | {"more": more[0], "implementation": more[-1]}

    return rows


def named(part):
    """A function of a file's content: its rows of a part, with the other words of their names."""

    def rows(record):
        for row in record["results"]:
            if row["name"].startswith(f"{part} / "):
                yield row | {"words": row["name"].split(" / ")[1:]}

    return rows


def or_out_of_memory(rows, columns):
    """The function `rows` of a file's content, with OUT_OF_MEMORY in these columns of a row that has no results."""
    return lambda record: (
        row | dict.fromkeys(columns, OUT_OF_MEMORY) if row.get("oom") else row for row in rows(record)
    )


def measured(rows):
    return lambda record: (row for row in rows(record) if not row.get("oom"))


# -- end_to_end --------------------------------------------------------------------------------------------------------


def kinds_of_passes(record):
    """The rows of end_to_end; "backward" is the mean of forward + backward minus that of forward."""
    for row in or_out_of_memory(models(), KINDS)(record):
        both, forward = row[GRADIENTS], row[FORWARD]
        yield row | {"backward": both["mean"] - forward["mean"] if "mean" in both and "mean" in forward else None}


def bf16_speedups(record):
    """The ratio of the mean times of each kind, for the models that were measured in both precisions."""
    by_name = {row["name"]: row for row in models()(record)}
    for name, row in by_name.items():
        other = by_name.get(name.replace(" / bf16 / ", " / fp32 / "), row)
        if other is not row:
            means = {kind: [each.get(kind, {}).get("mean") for each in (other, row)] for kind in KINDS}
            yield row | {kind: fp32 / bf16 if fp32 and bf16 else None for kind, (fp32, bf16) in means.items()}


# -- profile -----------------------------------------------------------------------------------------------------------


def passes(record):
    """A row for each pass, with its longest kernel and the longest one that is not a product."""
    none = {"name": "", "calls": 0, "share": 0.0}
    for row in models()(record):
        if row.get("oom"):
            yield row | {"pass": "out of memory"}
        for name, found in row.get("passes", {}).items():
            top, other = (next(iter(found[field]), none) for field in ("kernels", "others"))
            yield row | {"pass": name, "found": found, "top": top, "other": other}


def step_shares(record):
    """The share of the products in inference and in a training step, and how much of the wall time is kernels."""
    for row in measured(models())(record):
        forward, *step = (row["passes"][name] for name in ("forward only", "forward", "backward", "optimizer"))
        total = sum(each["kernels_ms"] for each in step)
        yield row | {
            "forward": forward["product_share"],
            "training": sum(each["kernels_ms"] * each["product_share"] for each in step) / total,
            "optimizer": step[-1]["kernels_ms"] / total,
            "busy_forward": forward["kernels_ms"] / forward["wall"]["mean"],
            "busy_training": total / sum(each["wall"]["mean"] for each in step),
        }


def other_kernels(record):
    for row in measured(models())(record):
        others = row["passes"]["forward only"]["others"]
        texts = (f"`{each['name']}` {each['calls']} x, {percent(each['share'])}" for each in others)
        yield row | {"others": "; ".join(texts)}


def attention_parts(record):
    for row in measured(models())(record):
        products, softmax = row["attention"][PRODUCTS], row["attention"][SOFTMAX]
        time = softmax["ms"] / products["ms"] if products["ms"] else None
        yield row | {"time": time, "operations": softmax["operations"] / products["operations"]}


# -- accumulation, memory and attention --------------------------------------------------------------------------------


def dtypes(record):
    for row in named("dtypes")(record):
        skipped = "name", "commit", "date", "words"
        yield {"autocast": row["words"][0]} | {key: value for key, value in row.items() if key not in skipped}


def peaks(part=None):
    """A function of the content of memory.json: its rows of a part, with the peaks in GiB as texts."""

    def text(row, kind, field):
        found = OUT_OF_MEMORY if row.get("oom") else row.get(kind, OUT_OF_MEMORY)
        if found.get("oom"):
            return "out of memory"
        return "" if found[field] is None else f"{found[field] / GIB:.2f}"

    def rows(record):
        for row in models(part)(record):
            texts = {kind: text(row, kind, "peak") for kind in (FORWARD, STEP)}
            yield row | texts | {"held": text(row, STEP, "held"), "blocks": row["more"].removesuffix(" blocks")}

    return rows


def residuals(record):
    """One row for each size and context."""
    return {(row["size"], row["context"]): row for row in models()(record) if "residual" in row}.values()


def saved_tensors(record):
    """The lines that save tensors for backward, their sum, and the gradients of the parameters."""
    for row in measured(models("saved"))(record):
        for line, count in row["sources"].items():
            yield row | {"line": f"`{line}`", "count": count, "share": percent(count / row["saved"])}
        yield row | {"line": "sum of all lines", "count": row["saved"], "share": "100 %"}
        yield row | {"line": "gradients of the parameters", "count": row["gradients"], "share": ""}


def timelines(record):
    """GiB at the moments of a timeline. Each point is the largest value of some neighbouring allocations."""
    for row in measured(models("timeline"))(record):
        points = [float(value) for value in row["GiB"].split()]
        start = row["marks"].get("backward")
        yield row | {"lowest": min(points), "end": points[-1], "start": None if start is None else points[start]}


def largest_allocations(record):
    return (row | each for row in measured(models("timeline"))(record) for each in row["largest"])


def grid(kind):
    """The times of one kind (forward, backward, both) of all implementations, in a row for each shape."""

    def rows(record):
        for row in or_out_of_memory(named("grid"), [kind])(record):
            *shape, implementation = row["words"]
            yield {"": ", ".join(shape), **dict.fromkeys(GRID, ""), implementation: cell(row[kind])}

    return rows


# -- several GPUs ------------------------------------------------------------------------------------------------------


def ways(record):
    """The rows; a row without results, because the memory was too small, gets OUT_OF_MEMORY as its time."""
    for row in record["results"]:
        way = row["name"].rpartition(", ")[2]
        yield row if "step" in row else row | {"way": way, "step": OUT_OF_MEMORY, "buckets": 0, "ranks": ""}


def libraries(record):
    return (row | {"library": row["name"].split(",")[0]} for row in record["results"] if "bytes" in row)


def algorithms(record):
    """The times of stage 1's algorithms beside MPI's."""
    for row in libraries(record):
        if ours := {f"{key}, ms": cell(row[key]) for key in row if key.startswith("ours")}:
            keys = {"ranks": row["ranks"], "MB": f"{row['bytes'] / 1e6:g}"}
            yield keys | {f"{row['library']}, ms": cell(row["time"])} | ours


def schedules(record):
    """The rows of ddp with the time that each schedule adds to a step without synchronisation.

    "after" is the time of the schedules that send nothing during backward.
    """
    base = next((row["step"].get("mean") for row in ways(record) if row["way"] == "none"), None)
    for row in ways(record):
        step, is_measured = row["step"].get("mean"), base is not None and row["way"] != "none"
        added = {"added": step - base, "share": 1 - base / step} if is_measured and step else {}
        yield row | added | ({"after": row.get("finish")} if row["way"] in ("naive", "flat") else {})


def bucket_sizes(record):
    """The rows of ddp_model: measured and predicted overhead of each bucket size."""
    for row in record["results"]["rows"]:
        yield row | {"mean": record["results"]["bytes"] / row["buckets"]}


def networks(record):
    """What ddp_model fitted to a network, and whether backward takes as long as the communication."""
    found = record["results"]
    rows = (row for file in ("torch/ddp", "torch/ddp_sockets") for row in load(file)["results"])
    best = min(found["rows"], key=lambda row: row["measured ms"])["bucket MB"]
    for base in (row for row in rows if row["name"] == f"{found['settings']}, none"):
        yield found | {"all_reduce": found["bytes"] / found["w"], "backward": base["backward"]["mean"], "best": best}


def overlaps(record):
    """How much of the communication of one step runs at the same time as computation, from the intervals of ddp."""
    for way, intervals in record["results"]["intervals"].items():
        spans = {lane: [(a, b) for each, a, b in intervals if each == lane] for lane in ("compute", "communication")}
        total = {lane: sum(b - a for a, b in found) for lane, found in spans.items()}
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans["compute"] for c, d in spans["communication"])
        yield {"way": way, **total, "share": both / total["communication"] if total["communication"] else None}


# -- tables -----------------------------------------------------------------------------------------------------------

KEYS = "size | context | precision"
MODEL = f"{KEYS} | implementation"
WARM_UP_COLUMNS = "first step", *(f"warm-up {count}" for count in WARM_UPS)


def in_ms(columns):
    """The description of columns with the mean and standard deviation of times."""
    return "\n".join(f"{column}, ms = {{{column}:cell}}" for column in columns)


END_TO_END = f"{MODEL}\n{in_ms(KINDS)} | backward, ms = {{backward:.4g}}"
BF16 = "size | context | implementation" + "".join(f"| {kind} = {{{kind}:.2f}}" for kind in KINDS)
WARM_UP = f"{MODEL}\n{in_ms(WARM_UP_COLUMNS)}"
PASSES = f"""{MODEL}
    pass | wall ms = {{found?[wall]:cell}} | sum of kernels, ms = {{found?[kernels_ms]:.4g}}
    kernels = {{found?[calls]}} | products = {{found?[product_share]:percent}}
    longest kernel = {{top?[name]:code}} | its calls = {{top?[calls]}} | its share = {{top?[share]:percent}}
    longest other kernel = {{other?[name]:code}} | share of that = {{other?[share]:percent}}"""
SHARES = f"""{MODEL}
    products, forward only = {{forward:percent}} | products, training step = {{training:percent}}
    optimizer, training step = {{optimizer:percent}} | kernels / wall, forward only = {{busy_forward:percent}}
    kernels / wall, training step = {{busy_training:percent}}"""
OTHER_KERNELS = f"{MODEL} | kernels that are not products, forward only: calls, share = {{others}}"
ATTENTION = f"""{MODEL}
    products, ms = {{attention[{PRODUCTS}][ms]:.4g}} | softmax, ms = {{attention[{SOFTMAX}][ms]:.4g}}
    {OTHERS}, ms = {{attention[{OTHERS}][ms]:.4g}} | time of softmax / products = {{time:.2f}}
    operations of softmax / products = {{operations:.3f}}"""
SUMS = "sum + number = {words[0]} | result = {sum:.7g} | relative error = {error:.1e}"
LAYERNORM = """
    dtype = {words[0]} | input = {words[1]}
    error, statistics in this dtype = {own dtype:.1e} | error, statistics in float32 = {float32:.1e}"""
PEAKS = f"""{MODEL}
    forward, GiB = {{forward}} | step, GiB = {{step}} | step, held by the allocator, GiB = {{held}}
    step, predicted, GiB = {{predicted?:GiB}}"""
RESIDUAL = "size | context | one residual activation in fp32, MiB = {residual:MiB}"
CHECKPOINTS = f"{KEYS} | blocks of a checkpoint = {{blocks}} | step, GiB = {{step}}"
TIMELINES = f"""{KEYS}
    kind = {{more}} | implementation | before, GiB = {{before:GiB}} | lowest, GiB = {{lowest:.2f}}
    peak, GiB = {{peak:GiB}} | start of backward, GiB = {{start:.2f}} | end, GiB = {{end:.2f}} | allocations"""
LARGEST = f"{KEYS} | kind = {{more}} | implementation | MiB = {{bytes:MiB .1f}} | times | allocated by = `{{source}}`"
SAVED = f"{KEYS} | saved by = {{line}} | MiB = {{count:MiB .1f}} | share"
NAIVE = """
    = {words:listed} | forward ms = {forward:cell} | backward ms = {backward:cell}
    GiB before backward = {bytes_before_backward?:GiB} | GiB of weights = {bytes_of_weights?:GiB}"""
ALL_REDUCE = """
    library | ranks | MB = {bytes:MB g} | ms = {time:cell} | GB/s = {GB/s:cell} | bus GB/s = {bus GB/s:cell}"""
DDP = """
    schedule = {way} | messages = {buckets:or} | ms per step = {step:cell} | added, ms = {added?:.1f}
    share of step = {share?:percent} | synchronisation after backward, ms = {after?:cell}"""
TIMELINE = """
    = {way} | compute, ms = {compute:.1f} | communication, ms = {communication:.1f}
    communication during computation = {share:percent 0}"""
FITS = """
    settings | s, MB = {bytes:MB .0f} | w, GB/s = {w:GB .3g} | o, us = {o:times 1e6 .3g}
    s / w, ms = {all_reduce:times 1e3 .1f} | backward, ms = {backward:.1f}
    sqrt(s w o), MiB = {best_bucket_bytes:MiB .1f} | largest bucket of the fastest, MiB = {best:g}"""
DDP_MODEL = """
    largest bucket, MiB = {bucket MB:g} | buckets | mean bucket, MiB = {mean:MiB .1f} | measured, ms = {measured ms:.2f}
    closed form, ms = {closed form ms:.2f} | closed form / measured = {closed form / measured:.2f}
    pipelined, ms = {pipelined ms:.2f} | pipelined / measured = {pipelined / measured:.2f}"""
SHARDING = (
    "= {way} | ranks | ms per step = {step:cell}\n"
    + "\n".join(f"{at}, counted GB = {{counted GB {at}?:.2f}} | {at}, GB = {{GB {at}?:.2f}}" for at in MOMENTS)
    + "\npeak, GB = {peak GB?:.2f} | first loss = {first loss?:.4f} | last loss = {last loss?:.4f}"
)
SHARDING_CONSOLE = "\n".join(f"{moment}, predicted GB = {{predicted GB {moment}?:.2f}}" for moment in MOMENTS)

TABLES = {
    "end-to-end": Table("torch/end_to_end", END_TO_END, kinds_of_passes),
    "end-to-end-bf16": Table("torch/end_to_end", BF16, bf16_speedups),
    "warm-up": Table("torch/end_to_end", WARM_UP, or_out_of_memory(models("warm-up"), WARM_UP_COLUMNS)),
    "profile-passes": Table("torch/profile", PASSES, passes),
    "profile-shares": Table("torch/profile", SHARES, step_shares),
    "profile-others": Table("torch/profile", OTHER_KERNELS, other_kernels),
    "profile-attention": Table("torch/profile", ATTENTION, attention_parts),
    "sums": Table("torch/accumulation", SUMS, named("sum")),
    "autocast": Table("torch/accumulation", rows=dtypes),
    "layernorm": Table("torch/accumulation", LAYERNORM, named("layernorm")),
    "peaks": Table("torch/memory", PEAKS, peaks()),
    "residual": Table("torch/memory", RESIDUAL, residuals),
    "checkpoints": Table("torch/memory", CHECKPOINTS, peaks("checkpoint")),
    "timelines": Table("torch/memory", TIMELINES, timelines),
    "largest": Table("torch/memory", LARGEST, largest_allocations),
    "saved": Table("torch/memory", SAVED, saved_tensors),
    "naive-memory": Table("torch/attention", NAIVE, or_out_of_memory(named("memory"), ("forward", "backward"))),
    "grid-forward": Table("torch/attention", rows=grid("forward"), merged=True),
    "grid-backward": Table("torch/attention", rows=grid("backward"), merged=True),
    "grid-both": Table("torch/attention", rows=grid("both"), merged=True),
    "all-reduce": Table("torch/all_reduce", ALL_REDUCE, libraries),
    "all-reduce-ours": Table("torch/all_reduce", rows=algorithms),
    **Table("torch/ddp", DDP, schedules).kinds("ddp", "sockets"),
    "ddp-timeline": Table("torch/ddp_timeline", TIMELINE, overlaps),
    "core-buckets": gpu_tables.TABLES["gpus-strategies"].of("gpus/buckets"),
    "ddp-fits": Table(("torch/ddp_model", "torch/ddp_model_sockets"), FITS, networks),
    **Table("torch/ddp_model", DDP_MODEL, bucket_sizes).kinds("ddp-model", "sockets"),
    **Table("torch/sharding", SHARDING, ways, SHARDING_CONSOLE).kinds("sharding", "shared"),
}


def print_tables(rows, *names):
    """Print the tables with these names of rows that a command has measured."""
    for name in names:
        TABLES[name].print(rows, title=name)

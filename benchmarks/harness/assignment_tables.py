"""The tables of docs/ASSIGNMENT.md, which the commands of benchmarks/torch print too. This file imports no PyTorch."""

import re
from dataclasses import replace

from benchmarks.harness import result_tables
from benchmarks.harness.table_format import Table

KINDS = FORWARD, GRADIENTS, STEP = "forward", "forward + backward", "step"
WARM_UPS = 0, 1, 2, 5  # numbers of steps
ATTENTION_PARTS = PRODUCTS, SOFTMAX, OTHERS = "products", "softmax", "scale, mask, casts"
OURS = "ours"
GRID = "naive", "compiled", "sdpa", OURS, "ours, compiled backward"
MOMENTS = "init", "before step", "after step"  # of sharding
GIB = 2**30
TENSORS = "parameters", "output of fc1", "output of relu", "output of ln", "logits", "loss", "gradients"
ALGORITHMS = "ours, root", "ours, ring", "ours, halving-doubling", "ours, tree", "ours, canonical"  # all-reduces

MODEL = "{size} / context {context} / {precision} / {implementation}"  # the name of a row
TIMELINE = "timeline / {size} / context {context} / {precision} / {kind} / {implementation}"
SAVED = "saved / {size} / context {context} / {precision} / torch naive"
TIME = 'NAME, ms = {row["NAME"]:cell}'  # mean and standard deviation
STEP_GIB = "step, GiB = {row.step.peak:cell GiB}"


def of_models(file, columns, name=MODEL, **options):
    """A table of torch/<file> whose first columns are the fields of `name`, the template of the names of its rows."""
    return Table(f"torch/{file}", " | ".join(re.findall(r"{(\w+)}", name)) + f"\n{columns}", name=name, **options)


def repeated(names, columns):
    """The columns once for each name, which stands in the place of NAME."""
    return "\n" + "\n".join(columns.replace("NAME", name) for name in names)


def grid(kind):
    """The table of the times of one kind (forward, backward, both) of all implementations, a row for each shape."""
    columns = repeated(GRID, f'NAME = {{row.{kind} if implementation == "NAME" else "":cell}}')
    name = "grid / {dtype} / {D} / {T} / {implementation}"
    return Table("torch/attention", "= {dtype}, {D}, {T}" + columns, name=name, merged=True)


def kinds(name, table, kind):
    """{"NAME": table, "NAME-KIND": the same of the file with the suffix _KIND}."""
    return {name: table, f"{name}-{kind}": replace(table, files=f"{table.files}_{kind}")}


TABLES = {
    "end-to-end": of_models("end_to_end", repeated(KINDS, TIME) + f"""
        backward, ms = {{row["{GRADIENTS}"].mean - row.forward.mean:.4g}}"""),
    "end-to-end-bf16": Table(
        "torch/end_to_end",
        "size | context | implementation" + repeated(KINDS, 'NAME = {base["NAME"].mean / row["NAME"].mean:.2f}'),
        name=MODEL, base='precision == "fp32"', same="size context implementation",
        where='precision == "bf16" and base'),
    "warm-up": of_models(
        "end_to_end", repeated(["first step", *(f"warm-up {count}" for count in WARM_UPS)], TIME),
        f"warm-up / {MODEL}"),
    "profile-passes": of_models("profile", """
        pass = {row.key:cell} | wall ms = {row.wall:cell} | sum of kernels, ms = {row.kernels_ms:.4g}
        kernels = {row.calls} | products = {row.product_share:percent}
        longest kernel = `{kernels[0].name}` | its calls = {kernels[0].calls} | its share = {kernels[0].share:percent}
        longest other kernel = `{others[0].name}` | share of that = {others[0].share:percent}""", each="passes"),
    "profile-shares": of_models("profile", """
        products, forward only = {passes["forward only"].product_share:percent}
        products, training step = {step.product_share:percent}
        optimizer, training step = {step.optimizer_share:percent}
        kernels / wall, forward only = {passes["forward only"].kernels_ms / passes["forward only"].wall.mean:percent}
        kernels / wall, training step = {step.kernels_per_wall:percent}""", where="not row.oom"),
    "profile-others": of_models("profile", """
        kernels that are not products, forward only: calls, share = {"; ".join(["`%s` %d x, %.1f %%" % \
(each.name, each.calls, 100 * each.share) for each in passes["forward only"].others])}""", where="not row.oom"),
    "profile-attention": of_models("profile", f"""
        products, ms = {{attention.products.ms:.4g}} | softmax, ms = {{attention.softmax.ms:.4g}}
        {OTHERS}, ms = {{attention["{OTHERS}"].ms:.4g}}
        time of softmax / products = {{attention.softmax.ms / (attention.products.ms or None):.2f}}
        operations of softmax / products = {{attention.softmax.operations / attention.products.operations:.3f}}""",
        where="not row.oom"),
    "sums": Table("torch/accumulation", """
        sum + number = {numbers} | result = {sum:.7g} | relative error = {error:.1e}""",
        name="sum / {numbers} / {device}"),
    "autocast": Table(
        "torch/accumulation", "autocast" + repeated(TENSORS, 'NAME = {row["NAME"]}'),
        name="dtypes / {autocast} / {device}"),
    "layernorm": Table("torch/accumulation", """
        dtype | input | error, statistics in this dtype = {row["own dtype"]:.1e}
        error, statistics in float32 = {float32:.1e}""", name="layernorm / {dtype} / {input} / {device}"),
    "peaks": of_models("memory", f"""
        forward, GiB = {{row.forward.peak:cell GiB}} | {STEP_GIB}
        step, held by the allocator, GiB = {{row.step.held:cell GiB}}
        step, predicted, GiB = {{row.predicted:GiB}}"""),
    "residual": of_models("memory", "one residual activation in fp32, MiB = {residual:MiB}",
        "{size} / context {context} / fp32 / torch naive", where="row.residual"),
    "checkpoints": Table("torch/memory", f"""
        size | context | precision | blocks of a checkpoint = {{blocks}} | {STEP_GIB}""",
        name="checkpoint / {size} / context {context} / {precision} / {blocks} blocks"),
    "timelines": of_models("memory", """
        before, GiB = {before:GiB} | lowest, GiB = {min(map(float, GiB.split())):.2f} | peak, GiB = {peak:GiB}
        start of backward, GiB = {float(GiB.split()[marks.backward]) if marks.backward else None:.2f}
        end, GiB = {float(GiB.split()[-1]):.2f} | allocations""", TIMELINE, where="not row.oom"),
    "largest": of_models("memory", """
        MiB = {bytes:MiB .1f} | times | allocated by = `{source}`""", TIMELINE, each="largest", where="not row.oom"),
    # The lines that save tensors for backward, their sum, and the gradients of the parameters.
    "saved": of_models("memory", "saved by = `{key}` | MiB = {value:MiB .1f} | share = {value / saved:percent}", SAVED,
        each="sources", also=(
        of_models("memory", "saved by = sum of all lines | MiB = {saved:MiB .1f} | share = 100 %", SAVED),
        of_models("memory", "saved by = gradients of the parameters | MiB = {gradients:MiB .1f} | share =", SAVED))),
    "naive-memory": Table("torch/attention", """
        = {D}, {T} | forward ms = {row.forward:cell} | backward ms = {row.backward:cell}
        GiB before backward = {row.bytes_before_backward:GiB} | GiB of weights = {row.bytes_of_weights:GiB}""",
        name="memory / {D} / {T}"),
    **{f"grid-{kind}": grid(kind) for kind in ("forward", "backward", "both")},
    "all-reduce": Table("torch/all_reduce", """
        library | ranks | MB = {bytes:MB g} | ms = {time:cell}
        GB/s = {row["GB/s"]:cell} | bus GB/s = {row["bus GB/s"]:cell}""",
        name="{library}, {_} ranks, {mb} MB", where="row.bytes"),
    "all-reduce-ours": Table("torch/all_reduce", """
        ranks | MB = {bytes:MB g} | {library}, ms = {time:cell}""" + repeated(ALGORITHMS, TIME),
        name="{library}, {_} ranks, {mb} MB", where='"ours, root" in row'),
    **kinds("ddp", Table("torch/ddp", """
        schedule = {way} | messages = {row.buckets or ""} | ms per step = {row.step:cell}
        added, ms = {None if way == "none" else row.step.mean - base.step.mean:.1f}
        share of step = {None if way == "none" else 1 - base.step.mean / row.step.mean:percent}
        synchronisation after backward, ms = {row.finish if way in ("naive", "flat") else "":cell}""",
        name="{settings}, {way}", base='way == "none" and row.step'), "sockets"),
    "ddp-timeline": Table("torch/ddp_timeline", """
        = {key} | compute, ms = {compute:.1f} | communication, ms = {communication:.1f}
        communication during computation = {share:percent 0}""", each="overlap"),
    "core-buckets": replace(result_tables.GPU_STRATEGIES, files="gpus/buckets"),
    "ddp-fits": Table(("torch/ddp_model", "torch/ddp_model_sockets"), """
        settings | s, MB = {bytes:MB .0f} | w, GB/s = {w:GB .3g} | o, us = {o * 1e6:.3g}
        s / w, ms = {bytes / w * 1e3:.1f} | backward, ms = {backward_ms:.1f}
        sqrt(s w o), MiB = {best_bucket_bytes:MiB .1f} | largest bucket of the fastest, MiB = {fastest_bucket_mb:g}"""),
    **kinds("ddp-model", Table("torch/ddp_model", """
        largest bucket, MiB = {row["bucket MB"]:g} | buckets | mean bucket, MiB = {bytes / buckets:MiB .1f}
        measured, ms = {row["measured ms"]:.2f} | closed form, ms = {row["closed form ms"]:.2f}
        closed form / measured = {row["closed form / measured"]:.2f} | pipelined, ms = {row["pipelined ms"]:.2f}
        pipelined / measured = {row["pipelined / measured"]:.2f}""", each="rows"), "sockets"),
    **kinds("sharding", Table("torch/sharding", """
        = {way} | ranks = {row.ranks} | ms per step = {row.step:cell}""" + repeated(
            MOMENTS, 'NAME, counted GB = {row["counted GB NAME"]:.2f} | NAME, GB = {row["GB NAME"]:.2f}') + """
        peak, GB = {row["peak GB"]:.2f} | first loss = {row["first loss"]:.4f} | last loss = {row["last loss"]:.4f}""",
        name="{settings}, {way}"), "shared"),
}  # fmt: skip


def print_tables(rows, *names):
    """Print the tables with these names of rows that a command has measured."""
    for name in names:
        TABLES[name].print(rows, title=name)

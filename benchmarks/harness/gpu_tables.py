"""The tables of docs/RESULTS.md about stages 2 and 3: functions that return (rows, names of the source files)."""

import math
from collections import Counter

from benchmarks.gpu.profile import CEILINGS
from benchmarks.harness.cpu_tables import kills
from benchmarks.harness.table_format import gib, load, number, percent, ratio, spread

STEPS = "gpu/step_gpt2", "gpu/step_gpt2_4096", "gpu/step_gpt2_8192", "gpu/step_paper", "gpu/step_paper_fp32"
SCALING = "gpus/scaling", "gpus/scaling_16", "gpus/scaling_two", "gpus/scaling_strong"
PRODUCTS = {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")


def gpu_step():
    rows = []
    for name in STEPS:
        for row in load(name)["results"]:
            options = row["options"]
            if ours := row["name"] == "ours":
                own = row
            rows.append(
                {
                    "": f"{options['preset']}, {options['precision']}, {options['batch_size']} x {options['seq_len']}, "
                    f"{row['name']}",
                    "ms per step": number(row["seconds"], 1e3),
                    "quartiles": spread(row["seconds"], 1e3),
                    "tokens/s": f"{row['tokens_per_second']:,.0f}",
                    "MFU": percent(row["mfu"]),
                    "ours is times as fast": "" if ours else ratio(own["times_as_fast"][row["name"]]),
                    "with losses read at the end": "" if ours else ratio(own["times_as_fast_as_unread"][row["name"]]),
                    "memory held, GiB": gib(row["held_bytes"]),
                }
            )
    return rows, list(STEPS)


def gpu_choices():
    rows = [
        {
            "": f"{row['preset']}, without: {row['without']}",
            "ms per step": number(row["seconds"], 1e3),
            "time / full step": ratio(row["gain"], 3),
            "quartiles": spread(row["gain"], 1),
        }
        for row in load("gpu/choices")["results"]
    ]
    return rows, ["gpu/choices"]


def group_of(row):
    """The group of a kernel in the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = row["title"].partition(": ")[0]
    if name.startswith("product") or name.startswith("splitK"):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def gpu_profile():
    columns = {}
    for name in ("gpu/profile", "gpu/profile_paper"):
        found, spent = load(name)["results"], Counter()
        for row in found["graph"]:
            spent[group_of(row)] += row["ms"]
        total = sum(spent.values())
        cells = {group: f"{ms:.3f} ({percent(ms / total)})" for group, ms in spent.most_common()}
        columns[f"{found['preset']}, {found['precision']}, ms"] = cells | {
            "sum of the kernels": f"{total:.3f}",
            "idle, by device clock": percent(found["idle_share"]),
            "idle, by the kernels' time stamps": percent(found["idle_share_profiled"]),
            "whole step, graph replayed": f"{1e3 * found['graph_step_seconds']:.3f}",
            "whole step, launched from Python": f"{1e3 * found['eager_step_seconds']:.3f}",
        }
    names = list(next(iter(columns.values())))
    return [{"": name} | {column: cells.get(name, "") for column, cells in columns.items()} for name in names], [
        "gpu/profile",
        "gpu/profile_paper",
    ]


def gpu_kernels():
    rows = []
    for row in load("gpu/profile")["results"]["graph"][:21]:
        rows.append(
            {
                "kernel": f"`{row['title']}`",
                "calls": f"{row['calls']:g}",
                "ms": f"{row['ms']:.3f}",
                "share": percent(row["share"]),
                "TFLOP/s": f"{row['tflops']:.0f}" if row["tflops"] else "",
                f"of {CEILINGS['tflops']}": percent(row["tflops"] / CEILINGS["tflops"], 0) if row["tflops"] else "",
                "TB/s": f"{row['tbps']:.2f}" if row["tbps"] else "",
                f"of {CEILINGS['tbps']}": percent(row["tbps"] / CEILINGS["tbps"], 0) if row["tbps"] else "",
            }
        )
    return rows, ["gpu/profile"]


def lesson(name):
    rows = [
        {
            "section": row["section"],
            "measured": row["name"],
            "plain, us": number(row["plain"], 1e6),
            "ours, us": number(row["ours"], 1e6),
            "times as fast": ratio(row["times_as_fast"]),
        }
        for row in load(name)["results"]
    ]
    return rows, [name]


def gpu_fusions():
    base = {}
    rows = []
    for row in load("gpu/fusions")["results"]:
        key = row["rows"], row["c"], row["k"], row["fusion"]
        base.setdefault(key, row["us"])  # the separate kernel is the first version
        rows.append(
            {
                "rows x C x K": f"{row['rows']} x {row['c']} x {row['k']}",
                "fusion": row["fusion"],
                "version": row["version"],
                "us": f"{row['us']:.1f}",
                "times as fast": f"{base[key] / row['us']:.2f}",
            }
        )
    return rows, ["gpu/fusions"]


def attention(name):
    rows = []
    for group in load(name)["results"]:
        for row in group:
            rows.append(
                {
                    "B x H x T x D": " x ".join(map(str, row["shape"])),
                    "": row["name"],
                    "forward, ms": number(row["ms"]["forward"]),
                    "TFLOP/s": f"{row['tflops']['forward']:.0f}",
                    "ours is times as fast": ratio(row["ours_is_times_as_fast"]["forward"]),
                    "forward and backward, ms": number(row["ms"]["both"]),
                    "TFLOP/s ": f"{row['tflops']['both']:.0f}",
                    "ours is times as fast ": ratio(row["ours_is_times_as_fast"]["both"]),
                }
            )
    return rows, [name]


def gpu_tune():
    rows = []
    for title, found in load("gpu/tune")["results"].items():
        used, best = next(row for row in found if row["label"] == "in use"), found[0]
        rows.append(
            {
                "case": title,
                "candidates": len(found),
                "current, ms": f"{used['ms']:.4f}",
                "fastest, ms": f"{best['ms']:.4f}",
                "current / fastest": f"{used['ms'] / best['ms']:.3f}",
            }
        )
    return rows, ["gpu/tune"]


def gpu_products():
    rows = []
    for mine, peer in load("gpu/products")["results"]:
        N, C, K, _ = mine["shape"]
        row = {"": f"{mine['precision']}, {N} x {C} x {K}"}
        for pad, (kind, title) in enumerate(PRODUCTS.items()):
            row[f"{title}, TFLOP/s"] = f"{mine['tflops'][kind]:.0f}"
            row["torch" + " " * pad] = f"{peer['tflops'][kind]:.0f}"
            row["ratio" + " " * pad] = ratio(mine["times_as_fast"][kind])
        rows.append(row)
    return rows, ["gpu/products"]


def gpu_decode():
    rows, ours = [], None
    for name in ("gpu/decode", "gpu/decode_paper"):
        for row in load(name)["results"]:
            ours = row if row["name"] == "ours" else ours
            title = f"{row['preset']}, {row['precision']}, {row['batch']} x ({row['prompt']} + {row['new']})"
            rows.append(
                {
                    "": f"{title}, {row['name']}",
                    "us per step": number(row["token"], 1e6),
                    "quartiles": spread(row["token"], 1e6),
                    "tokens/s": f"{row['batch'] / row['token']['median']:,.0f}",
                    "first token, ms": number(row["first"], 1e3, 3),
                    "all tokens, ms": number(row["total"], 1e3),
                    "ours is times as fast, all tokens": ratio(ours["times_as_fast"][row["name"]]),
                }
            )
    return rows, ["gpu/decode", "gpu/decode_paper"]


def gpu_memory():
    rows = []
    for row in load("gpu/memory")["results"]:
        options = row["options"]
        plural = "s" * (options["batch_size"] > 1)
        title = f"{options['preset']}, {options['precision']}, {options['batch_size']} sequence{plural}"
        if options["micro_batches"] > 1:
            title += f", {options['micro_batches']} micro-batches"
        rows.append(
            {
                "": title,
                "held, GiB": gib(row["held_bytes"]),
                "model, GiB": gib(row["model_bytes"]),
                "difference": f"{100 * row['difference']:+.1f} %",
                "of the driver, GiB": gib(row["driver_bytes"]),
            }
        )
    return rows, ["gpu/memory"]


def scaling():
    rows = []
    for name in SCALING:
        for table in load(name)["results"]["scaling"]:
            for row in table["rows"]:
                rows.append(
                    {
                        "sequences x tokens": table["title"],
                        "": row["name"],
                        "ms per step": number(row["seconds"], 1e3),
                        "tokens/s": f"{row['tokens_per_second']:,.0f}",
                        "efficiency": percent(row["efficiency"]["median"]),
                        "times as fast as PyTorch": ratio(row["times_as_fast"]),
                        "commit": load(name)["commit"],
                    }
                )
    return rows, list(SCALING)


def gpus_paper():
    rows = [
        {
            "50 steps of `paper`, bf16, 2 GPUs": row["name"],
            "seconds": number(row["totals"], 1, 3),
            "quartiles": spread(row["totals"], 1, 3),
        }
        for row in load("gpus/scaling")["results"]["paper"]
    ]
    return rows, ["gpus/scaling"]


def gpus_strategies():
    rows = []
    for row in load("gpus/strategies")["results"]:
        alone = not row.get("communicate", True)
        added = row["communication_share"] * row["seconds"]["median"]
        rows.append(
            {
                "": row["name"],
                "messages": "" if alone else row["messages"],
                "ms per step": number(row["seconds"], 1e3),
                "added by communication, ms": "" if alone else f"{1e3 * added:.1f}",
                "share of step": "" if alone else percent(row["communication_share"]),
                "time / same `--dp`": ratio(row.get("times_plain"), 3),
                "MB sent per rank": f"{1e-6 * row['bytes_sent']:,.0f}",
                "optimizer MB per rank": f"{1e-6 * row['optimizer_bytes']:,.0f}",
            }
        )
    return rows, ["gpus/strategies"]


def gpus_collectives():
    found, rows = load("gpus/collectives")["results"], []
    for row in found["all_reduce"]:
        rows.append(
            {
                "fp32 MB": f"{1e-6 * row['bytes']:,.0f}",
                f"{row['ranks']} GPUs": row["name"],
                "us": number(row["seconds"], 1e6),
                "bus GB/s": f"{1e-9 * row['bus_bandwidth']:.0f}",
                "times as fast as torch": ratio(row["times_as_fast_as_torch"]),
                "relative error at 10 MB": f"{found['errors'][str(row['ranks'])][row['name']]:.1e}",
            }
        )
    return rows, ["gpus/collectives"]


def gpus_fit():
    found, rows = load("gpus/collectives")["results"], []
    for ranks, fits in found["alpha_beta"].items():
        for name, (alpha, beta) in fits.items():
            bucket = found["bucket_mb"][f"{ranks} GPUs, {name}"]
            cells = {"alpha, us": f"{1e6 * alpha:.1f}", "beta, ps per byte": f"{1e12 * beta:.2f}"}
            rows.append({f"{ranks} GPUs": name, **cells, "best `--bucket-mb` for GPT-2 124M": f"{bucket:.0f}"})
    return rows, ["gpus/collectives"]


def gpus_timeline():
    rows = [
        {
            "rank 0": name,
            "step, ms": f"{each['step_ms']:.1f}",
            "computation": f"{each['compute_ms']:.1f}",
            "communication": f"{each['communication_ms']:.1f}",
            "hidden share": percent(each["hidden_ms"] / each["communication_ms"], 0),
            "kernels": each["kernels"],
        }
        for name, each in load("gpus/timeline")["results"].items()
    ]
    return rows, ["gpus/timeline"]


def gpus_parity():
    rows = []
    for row in load("gpus/parity")["results"]:
        deviation = row["largest_deviation"]
        rows.append(
            {
                "": f"{row['precision']}, {row['name']}",
                "against stage 2": "bit-identical" if row["difference"] is None else "differs",
                "largest loss deviation": f"{deviation:.1e}" if deviation else "0",
                "ms per step": f"{1e3 * row['median']:.3g}",
                "last loss": f"{row['losses'][-1]:.6f}" if math.isfinite(row["losses"][-1]) else "not finite",
            }
        )
    return rows, ["gpus/parity"]


TABLES = {
    "gpu-step": gpu_step,
    "gpu-choices": gpu_choices,
    "gpu-profile": gpu_profile,
    "gpu-kernels": gpu_kernels,
    "gpu-lesson": lambda: lesson("gpu/lesson"),
    "gpu-lesson-busy": lambda: lesson("gpu/lesson_busy"),
    "gpu-fusions": gpu_fusions,
    "gpu-attention-tiles": lambda: attention("gpu/attention_tiles"),
    "gpu-attention-pointers": lambda: attention("gpu/attention_pointers"),
    "gpu-attention": lambda: attention("gpu/attention"),
    "gpu-tune": gpu_tune,
    "gpu-products": gpu_products,
    "gpu-decode": gpu_decode,
    "gpu-memory": gpu_memory,
    "gpus-scaling": scaling,
    "gpus-paper": gpus_paper,
    "gpus-strategies": gpus_strategies,
    "gpus-collectives": gpus_collectives,
    "gpus-fit": gpus_fit,
    "gpus-timeline": gpus_timeline,
    "gpus-parity": gpus_parity,
    "gpus-kill": lambda: kills("gpus/kill"),
}

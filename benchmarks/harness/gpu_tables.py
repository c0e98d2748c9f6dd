"""The tables of docs/RESULTS.md about stages 2 and 3.

Each function returns (rows, names of the source files in results/). A row is a dictionary {column title: cell}.
"""

import math
from collections import Counter

from benchmarks.gpu.profile import CEILINGS
from benchmarks.harness.cpu_tables import kills
from benchmarks.harness.table_format import gib, load, number, percent, ratio, spread

STEPS = "gpu/step_gpt2", "gpu/step_gpt2_4096", "gpu/step_gpt2_8192", "gpu/step_paper", "gpu/step_paper_fp32"
SCALING = "gpus/scaling", "gpus/scaling_16", "gpus/scaling_two", "gpus/scaling_strong"
PRODUCTS = {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}  # {field: column title}
# Groups of kernels of which the profile's table shows the total time.
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")


def gpu_step():
    rows = []
    for name in STEPS:
        for row in load(name)["results"]:
            options = row["options"]
            if is_ours := row["name"] == "ours":  # the first row of a file
                ours = row
            rows.append(
                {
                    "": f"{options['preset']}, {options['precision']}, {options['batch_size']} x {options['seq_len']}, "
                    f"{row['name']}",
                    "ms per step": number(row["seconds"], 1e3),
                    "quartiles": spread(row["seconds"], 1e3),
                    "tokens/s": f"{row['tokens_per_second']:,.0f}",
                    "MFU": percent(row["mfu"]),
                    "ours times as fast": "" if is_ours else ratio(ours["times_as_fast"][row["name"]]),
                    "ours times as fast if PyTorch reads losses at the end": ""
                    if is_ours
                    else ratio(ours["times_as_fast_as_unread"][row["name"]]),
                    "memory held, GiB": gib(row["held_bytes"]),
                }
            )
    return rows, list(STEPS)


def gpu_choices():
    rows = [
        {
            "": f"{row['preset']}, without: {row['without']}",
            "ms per step": number(row["seconds"], 1e3),
            "time / time of the full step": ratio(row["gain"], 3),
            "quartiles": spread(row["gain"], 1),
        }
        for row in load("gpu/choices")["results"]
    ]
    return rows, ["gpu/choices"]


def group_of(row):
    """The group of one row of the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = row["title"].partition(": ")[0]
    if name.startswith("product") or name.startswith("splitK"):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def gpu_profile():
    files = ["gpu/profile", "gpu/profile_paper"]
    columns = {}  # {column title: {row title: cell}}
    for name in files:
        profile, group_ms = load(name)["results"], Counter()
        for row in profile["graph"]:
            group_ms[group_of(row)] += row["ms"]
        total = sum(group_ms.values())
        cells = {group: f"{ms:.3f} ({percent(ms / total)})" for group, ms in group_ms.most_common()}
        columns[f"{profile['preset']}, {profile['precision']}, ms"] = cells | {
            "sum of the kernels": f"{total:.3f}",
            "idle, by device clock": percent(profile["idle_share"]),
            "idle, by the kernels' time stamps": percent(profile["idle_share_profiled"]),
            "whole step, graph replayed": f"{1e3 * profile['graph_step_seconds']:.3f}",
            "whole step, launched from Python": f"{1e3 * profile['eager_step_seconds']:.3f}",
        }
    row_titles = list(next(iter(columns.values())))
    rows = [
        {"": row_title} | {title: cells.get(row_title, "") for title, cells in columns.items()}
        for row_title in row_titles
    ]
    return rows, files


def gpu_kernels():
    rows = []
    for row in load("gpu/profile")["results"]["graph"][:21]:
        tflops, tbps = row["tflops"], row["tbps"]
        rows.append(
            {
                "kernel": f"`{row['title']}`",
                "calls": f"{row['calls']:g}",
                "ms": f"{row['ms']:.3f}",
                "share of time": percent(row["share"]),
                "TFLOP/s": f"{tflops:.0f}" if tflops else "",
                f"share of {CEILINGS['tflops']} TFLOP/s": percent(tflops / CEILINGS["tflops"], 0) if tflops else "",
                "TB/s": f"{tbps:.2f}" if tbps else "",
                f"share of {CEILINGS['tbps']} TB/s": percent(tbps / CEILINGS["tbps"], 0) if tbps else "",
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
    unfused_us = {}
    rows = []
    for row in load("gpu/fusions")["results"]:
        case = row["rows"], row["c"], row["k"], row["fusion"]
        unfused_us.setdefault(case, row["us"])  # the first version of a case has a separate kernel
        rows.append(
            {
                "rows x C x K": f"{row['rows']} x {row['c']} x {row['k']}",
                "fusion": row["fusion"],
                "version": row["version"],
                "us": f"{row['us']:.1f}",
                "times as fast": f"{unfused_us[case] / row['us']:.2f}",
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
                    "forward, TFLOP/s": f"{row['tflops']['forward']:.0f}",
                    "forward: ours times as fast": ratio(row["ours_is_times_as_fast"]["forward"]),
                    "forward and backward, ms": number(row["ms"]["both"]),
                    "both, TFLOP/s": f"{row['tflops']['both']:.0f}",
                    "both: ours times as fast": ratio(row["ours_is_times_as_fast"]["both"]),
                }
            )
    return rows, [name]


def gpu_tune():
    rows = []
    for title, candidates in load("gpu/tune")["results"].items():  # the fastest candidate comes first
        current, fastest = next(row for row in candidates if row["label"] == "in use"), candidates[0]
        rows.append(
            {
                "case": title,
                "candidates": len(candidates),
                "current, ms": f"{current['ms']:.4f}",
                "fastest, ms": f"{fastest['ms']:.4f}",
                "current / fastest": f"{current['ms'] / fastest['ms']:.3f}",
            }
        )
    return rows, ["gpu/tune"]


def gpu_products():
    rows = []
    for ours, torch in load("gpu/products")["results"]:
        N, C, K, _ = ours["shape"]
        row = {"": f"{ours['precision']}, {N} x {C} x {K}"}
        for kind, title in PRODUCTS.items():
            row[f"{title}: ours, TFLOP/s"] = f"{ours['tflops'][kind]:.0f}"
            row[f"{title}: torch, TFLOP/s"] = f"{torch['tflops'][kind]:.0f}"
            row[f"{title}: times as fast"] = ratio(ours["times_as_fast"][kind])
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
                    "all tokens: ours times as fast": ratio(ours["times_as_fast"][row["name"]]),
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
                "predicted, GiB": gib(row["model_bytes"]),
                "difference": f"{100 * row['difference']:+.1f} %",
                "held according to the driver, GiB": gib(row["driver_bytes"]),
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
        is_baseline = not row.get("communicate", True)
        added = row["communication_share"] * row["seconds"]["median"]
        rows.append(
            {
                "": row["name"],
                "messages": "" if is_baseline else row["messages"],
                "ms per step": number(row["seconds"], 1e3),
                "added by communication, ms": "" if is_baseline else f"{1e3 * added:.1f}",
                "share of step": "" if is_baseline else percent(row["communication_share"]),
                "time / time of the same `--dp` without options": ratio(row.get("times_plain"), 3),
                "MB sent per rank": f"{1e-6 * row['bytes_sent']:,.0f}",
                "optimizer MB per rank": f"{1e-6 * row['optimizer_bytes']:,.0f}",
            }
        )
    return rows, ["gpus/strategies"]


def gpus_collectives():
    results, rows = load("gpus/collectives")["results"], []
    for row in results["all_reduce"]:
        rows.append(
            {
                "MB in fp32": f"{1e-6 * row['bytes']:,.0f}",
                f"{row['ranks']} GPUs": row["name"],
                "us": number(row["seconds"], 1e6),
                "bus GB/s": f"{1e-9 * row['bus_bandwidth']:.0f}",
                "times as fast as torch": ratio(row["times_as_fast_as_torch"]),
                "relative error at 10 MB": f"{results['errors'][str(row['ranks'])][row['name']]:.1e}",
            }
        )
    return rows, ["gpus/collectives"]


def gpus_fit():
    results, rows = load("gpus/collectives")["results"], []
    for ranks, fits in results["alpha_beta"].items():
        for name, (alpha, beta) in fits.items():
            bucket = results["bucket_mb"][f"{ranks} GPUs, {name}"]
            cells = {"alpha, us": f"{1e6 * alpha:.1f}", "beta, ps per byte": f"{1e12 * beta:.2f}"}
            rows.append({f"{ranks} GPUs": name, **cells, "best `--bucket-mb` for GPT-2 124M": f"{bucket:.0f}"})
    return rows, ["gpus/collectives"]


def gpus_timeline():
    rows = [
        {
            "rank 0": name,
            "step, ms": f"{times['step_ms']:.1f}",
            "computation, ms": f"{times['compute_ms']:.1f}",
            "communication, ms": f"{times['communication_ms']:.1f}",
            "communication that overlaps": percent(times["hidden_ms"] / times["communication_ms"], 0),
            "kernels": times["kernels"],
        }
        for name, times in load("gpus/timeline")["results"].items()
    ]
    return rows, ["gpus/timeline"]


def gpus_parity():
    rows = []
    for row in load("gpus/parity")["results"]:
        deviation = row["largest_deviation"]
        rows.append(
            {
                "": f"{row['precision']}, {row['name']}",
                "compared with stage 2": "bit-identical" if row["difference"] is None else "differs",
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

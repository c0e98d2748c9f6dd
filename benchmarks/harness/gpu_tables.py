"""The tables of docs/RESULTS.md about stages 2 and 3.

Each function returns (rows, names of the source files in results/). A row is a dictionary {column title: cell}.
"""

import math
from collections import Counter

from benchmarks.gpu.profile import CEILINGS
from benchmarks.harness.cpu_tables import kills
from benchmarks.harness.speedups import efficiencies
from benchmarks.harness.table_format import gib, load, number, percent, ratio, spread

STEPS = (
    "gpu/step_gpt2",
    "gpu/step_gpt2_h100",
    "gpu/step_gpt2_4096",
    "gpu/step_gpt2_8192",
    "gpu/step_paper",
    "gpu/step_paper_fp32",
)
SCALING = "gpus/scaling", "gpus/scaling_16", "gpus/scaling_two", "gpus/scaling_strong"
PRODUCTS = {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}  # {field: column title}
# Groups of kernels: the table of the profile shows the total time of each group.
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")


def gpu_model(name):
    """The model of the GPU of a results file, "H100" or "H200"."""
    return "H100" if "H100" in load(name)["hardware"]["gpu"] else "H200"


def gpu_step():
    rows = []
    for name in STEPS:
        for result in load(name)["results"]:
            options = result["options"]
            if is_ours := result["name"] == "ours":  # the first result of a file
                ours = result
            rows.append(
                {
                    "": f"{options['preset']}, {options['precision']}, {options['batch_size']} x {options['seq_len']}, "
                    f"{result['name']}",
                    "GPU": gpu_model(name),
                    "ms per step": number(result["seconds"], 1e3),
                    "quartiles": spread(result["seconds"], 1e3),
                    "tokens/s": f"{result['tokens_per_second']:,.0f}",
                    "MFU": percent(result["mfu"]),
                    "speedup of ours": "" if is_ours else ratio(ours["times_as_fast"][result["name"]]),
                    "speedup of ours if PyTorch reads losses at the end": ""
                    if is_ours
                    else ratio(ours["times_as_fast_as_unread"][result["name"]]),
                    "memory held, GiB": gib(result["held_bytes"]),
                }
            )
    return rows, list(STEPS)


def gpu_choices():
    rows = [
        {
            "": f"{result['preset']}, without: {result['without']}",
            "ms per step": number(result["seconds"], 1e3),
            "time of this row / time of the full step": ratio(result["gain"], 3),
            "quartiles": spread(result["gain"], 1),
        }
        for result in load("gpu/choices")["results"]
    ]
    return rows, ["gpu/choices"]


def group_of(kernel):
    """The group of a kernel of the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = kernel["title"].partition(": ")[0]
    if name.startswith("product") or name.startswith("splitK"):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def gpu_profile():
    files = ["gpu/profile", "gpu/profile_h100", "gpu/profile_paper"]
    columns = {}  # {column title: {row title: cell}}
    for name in files:
        profile, group_ms, gpu = load(name)["results"], Counter(), gpu_model(name)
        for kernel in profile["graph"]:
            group_ms[group_of(kernel)] += kernel["ms"]
        total = sum(group_ms.values())
        cells = {group: f"{ms:.3f} ({percent(ms / total)})" for group, ms in group_ms.most_common()}
        columns[f"{profile['preset']}, {profile['precision']}, {gpu}, ms"] = cells | {
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
    for result in load("gpu/profile")["results"]["graph"][:21]:
        tflops, tbps = result["tflops"], result["tbps"]
        rows.append(
            {
                "kernel": f"`{result['title']}`",
                "calls": f"{result['calls']:g}",
                "ms": f"{result['ms']:.3f}",
                "share of time": percent(result["share"]),
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
            "measured": result["name"],
            "plain, us": number(result["plain"], 1e6),
            "ours, us": number(result["ours"], 1e6),
            "times as fast": ratio(result["times_as_fast"]),
        }
        for result in load(name)["results"]
    ]
    return rows, [name]


def gpu_fusions():
    unfused_us = {}
    rows = []
    for result in load("gpu/fusions")["results"]:
        case = result["rows"], result["c"], result["k"], result["fusion"]
        unfused_us.setdefault(case, result["us"])  # the first version of a case has a separate kernel
        rows.append(
            {
                "rows x C x K": f"{result['rows']} x {result['c']} x {result['k']}",
                "fusion": result["fusion"],
                "version": result["version"],
                "us": f"{result['us']:.1f}",
                "times as fast": f"{unfused_us[case] / result['us']:.2f}",
            }
        )
    return rows, ["gpu/fusions"]


def gpu_gelu():
    rows = [
        {
            "": result["direction"],
            "tile of a consumer": result["variant"],
            "us": f"{result['us']:.0f}",
            "cublasLt, us": f"{result['cublasLt us']:.0f}",
            "times as fast as cublasLt": f"{result['cublasLt us'] / result['us']:.2f}",
        }
        for result in load("gpu/gelu_product")["results"]
        if "error" not in result
    ]
    return rows, ["gpu/gelu_product"]


def attention(name):
    rows = []
    for group in load(name)["results"]:
        for result in group:
            rows.append(
                {
                    "B x H x T x D": " x ".join(map(str, result["shape"])),
                    "": result["name"],
                    "forward, ms": number(result["ms"]["forward"]),
                    "forward, TFLOP/s": f"{result['tflops']['forward']:.0f}",
                    "forward: speedup of ours": ratio(result["ours_is_times_as_fast"]["forward"]),
                    "forward and backward, ms": number(result["ms"]["both"]),
                    "forward and backward, TFLOP/s": f"{result['tflops']['both']:.0f}",
                    "forward and backward: speedup of ours": ratio(result["ours_is_times_as_fast"]["both"]),
                }
            )
    return rows, [name]


def gluon_ladder():
    rows, files = attention("gpu/gluon_ladder")
    return [{title: cell for title, cell in row.items() if "speedup" not in title} for row in rows], files


def gpu_tune():
    rows = []
    for title, candidates in load("gpu/tune")["results"].items():  # the fastest candidate comes first
        current, fastest = next(result for result in candidates if result["label"] == "in use"), candidates[0]
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


def decode_variant(result):
    """The fastest variant that the search found, for the title of a row of PyTorch; "" without a search."""
    if "tried" not in result:
        return ""
    cut = f", cache cut to a multiple of {result['cut']}" if result.get("cut") else ""
    return f" (attention: {result['attention']}, products: {result['products']}{cut})"


def gpu_decode():
    names = ["gpu/decode", "gpu/decode_eight", "gpu/decode_many", "gpu/decode_paper"]
    rows, ours = [], None
    for name in names:
        for result in load(name)["results"]:
            ours = result if result["name"] == "ours" else ours
            title = (
                f"{result['preset']}, {result['precision']}, {result['batch']} x ({result['prompt']} + {result['new']})"
            )
            rows.append(
                {
                    "": f"{title}, {result['name']}{decode_variant(result)}",
                    "us per step": number(result["token"], 1e6),
                    "quartiles": spread(result["token"], 1e6),
                    "tokens/s": f"{result['batch'] / result['token']['median']:,.0f}",
                    "first token, ms": number(result["first"], 1e3, 3),
                    "all tokens, ms": number(result["total"], 1e3),
                    "all tokens: speedup of ours": ratio(ours["times_as_fast"][result["name"]]),
                }
            )
    return rows, names


def gpu_decode_tried():
    """The variants of PyTorch's program that the search timed, for each case."""
    names, rows = ["gpu/decode", "gpu/decode_eight", "gpu/decode_many"], []
    for name in names:
        searched = [result for result in load(name)["results"] if "tried" in result]
        for result in {result["case"]: result for result in searched}.values():  # the programs of a case share a search
            for each in result["tried"]:
                rows.append(
                    {
                        "sequences": result["batch"],
                        "products": each["products"],
                        "attention": each["attention"],
                        "cache cut to a multiple of": each.get("cut") or "not cut",
                        "us per token": f"{each['us_per_token']:.0f}" if "us_per_token" in each else each["error"],
                    }
                )
    return rows, names


def gpu_memory():
    rows = []
    for result in load("gpu/memory")["results"]:
        options = result["options"]
        plural = "s" * (options["batch_size"] > 1)
        title = f"{options['preset']}, {options['precision']}, {options['batch_size']} sequence{plural}"
        if options["micro_batches"] > 1:
            title += f", {options['micro_batches']} micro-batches"
        rows.append(
            {
                "": title,
                "held, GiB": gib(result["held_bytes"]),
                "predicted, GiB": gib(result["model_bytes"]),
                "difference": f"{100 * result['difference']:+.1f} %",
                "held according to the driver, GiB": gib(result["driver_bytes"]),
            }
        )
    return rows, ["gpu/memory"]


def scaling():
    rows = []
    for name in SCALING:
        for table in load(name)["results"]["scaling"]:
            checked = efficiencies(table["rows"])
            for result in table["rows"]:
                rows.append(
                    {
                        "sequences x tokens": table["title"],
                        "": result["name"],
                        "ms per step": number(result["seconds"], 1e3),
                        "tokens/s": f"{result['tokens_per_second']:,.0f}",
                        "efficiency": checked[result["name"]].cell(percent(result["efficiency"]["median"])),
                        "times as fast as PyTorch": ratio(result["times_as_fast"]),
                        "commit": load(name)["commit"],
                    }
                )
    return rows, list(SCALING)


def gpus_paper():
    rows = [
        {
            "50 steps of `paper`, bf16, 2 GPUs": result["name"],
            "seconds": number(result["totals"], 1, 3),
            "quartiles": spread(result["totals"], 1, 3),
        }
        for result in load("gpus/scaling")["results"]["paper"]
    ]
    return rows, ["gpus/scaling"]


def gpus_strategies(file="gpus/strategies"):
    rows = []
    for result in load(file)["results"]:
        is_baseline = not result.get("communicate", True)
        added = result["communication_share"] * result["seconds"]["median"]
        rows.append(
            {
                "": result["name"],
                "messages": "" if is_baseline else result["messages"],
                "ms per step": number(result["seconds"], 1e3),
                "added by communication, ms": "" if is_baseline else f"{1e3 * added:.1f}",
                "share of step": "" if is_baseline else percent(result["communication_share"]),
                "time of this row / time of the same `--dp` without further flags": ratio(result.get("times_plain"), 3),
                "MB sent per rank": f"{1e-6 * result['bytes_sent']:,.0f}",
                "optimizer MB per rank": f"{1e-6 * result['optimizer_bytes']:,.0f}",
            }
        )
    return rows, [file]


def gpus_collectives():
    results, rows = load("gpus/collectives")["results"], []
    for result in results["all_reduce"]:
        rows.append(
            {
                "MB in fp32": f"{1e-6 * result['bytes']:,.0f}",
                f"{result['ranks']} GPUs": result["name"],
                "us": number(result["seconds"], 1e6),
                "bus GB/s": f"{1e-9 * result['bus_bandwidth']:.0f}",
                "times as fast as torch": ratio(result["times_as_fast_as_torch"]),
                "relative error at 10 MB": f"{results['errors'][str(result['ranks'])][result['name']]:.1e}",
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
    for result in load("gpus/parity")["results"]:
        deviation = result["largest_deviation"]
        rows.append(
            {
                "": f"{result['precision']}, {result['name']}",
                "compared with stage 2": "bit-identical" if result["difference"] is None else "differs",
                "largest loss deviation": f"{deviation:.1e}" if deviation else "0",
                "ms per step": f"{1e3 * result['median']:.3g}",
                "last loss": f"{result['losses'][-1]:.6f}" if math.isfinite(result["losses"][-1]) else "not finite",
            }
        )
    return rows, ["gpus/parity"]


def gpu_start(file="gpu/start"):
    commands = {"inference": "`inference.py --stats --prompt ...`", "train": "`train_gpt2.py --preset paper --out ...`"}
    rows = [
        {
            "command": commands[name],
            "caches": caches,
            "seconds": number(result["seconds"], 1, 3),
            "quartiles": spread(result["seconds"], 1, 3),
        }
        for name, results in load(file)["results"].items()
        for caches, result in results.items()
    ]
    return rows, [file]


TABLES = {
    "gpu-step": gpu_step,
    "gpu-choices": gpu_choices,
    "gpu-profile": gpu_profile,
    "gpu-kernels": gpu_kernels,
    "gpu-lesson": lambda: lesson("gpu/lesson"),
    "gpu-lesson-busy": lambda: lesson("gpu/lesson_busy"),
    "gpu-fusions": gpu_fusions,
    "gpu-gelu": gpu_gelu,
    "gpu-attention-tiles": lambda: attention("gpu/attention_tiles"),
    "gpu-attention-pointers": lambda: attention("gpu/attention_pointers"),
    "gpu-attention": lambda: attention("gpu/attention"),
    "gpu-attention-h100": lambda: attention("gpu/attention_h100"),
    "gpu-attention-h100-long": lambda: attention("gpu/attention_h100_long"),
    "gpu-attention-h100-128": lambda: attention("gpu/attention_h100_128"),
    "gpu-gluon-ladder": gluon_ladder,
    "gpu-tune": gpu_tune,
    "gpu-products": gpu_products,
    "gpu-decode": gpu_decode,
    "gpu-decode-tried": gpu_decode_tried,
    "gpu-start": gpu_start,
    "gpu-start-h100": lambda: gpu_start("gpu/start_h100"),
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

"""The tables of docs/RESULTS.md about stages 2 and 3 and about torch_bridge."""

import math
from collections import Counter

from benchmarks.harness.cpu_tables import kill_results
from benchmarks.harness.speedups import efficiencies
from benchmarks.harness.table_format import Table, fill, flat, percent

# The largest rates measured on an H200: TFLOP/s of bf16 products of random numbers, TB/s of a copy.
CEILINGS = {"tflops": 766, "tbps": 4.26}
# Groups of kernels: the table of the profile shows the total time of each group.
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")
COMMANDS = {
    "inference": "`inference.py --stats --prompt ...`",
    "train": "`train_gpt2.py --preset paper --out ...`",
}  # {name in gpu/start.json: command}
SHARDING = {"plain": "`BucketedDDP`, AdamW", "sharded optimizer": "`ShardedOptimizer`", "fsdp": "`FSDP`"}


# -- one GPU ----------------------------------------------------------------------------------------------------------


def beside_ours(record):
    """The results with their speed-ups over PyTorch: those of the last result "ours" before them, None for its own."""
    for result in record["results"]:
        if result["name"] == "ours":
            ours = result
        for field in ("times_as_fast", "times_as_fast_as_unread"):
            speedup = ours.get(field, {}).get(result["name"])
            result = result | {f"ours_{field}": speedup}
        yield result


def group_of(kernel):
    """The group of a kernel of the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = kernel["title"].partition(": ")[0]
    if name.startswith("product") or name.startswith("splitK"):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def kernel_groups(record):
    """The time of each group of kernels of one profile, then the times of the whole step."""
    profile, group_ms = record["results"], Counter()
    for kernel in profile["graph"]:
        group_ms[group_of(kernel)] += kernel["ms"]
    total = sum(group_ms.values())
    cells = {group: f"{ms:.3f} ({percent(ms / total)})" for group, ms in group_ms.most_common()} | {
        "sum of the kernels": f"{total:.3f}",
        "idle, by device clock": percent(profile["idle_share"]),
        "idle, by the kernels' time stamps": fill("{idle_share_profiled:percent}", profile),
        "whole step, graph replayed": f"{1e3 * profile['graph_step_seconds']:.3f}",
        "whole step, launched from Python": f"{1e3 * profile['eager_step_seconds']:.3f}",
    }
    for title, cell in cells.items():
        yield {"preset": profile["preset"], "precision": profile["precision"], "title": title, "cell": cell}


def kernels(record):
    """The kernels with the longest time, 21 or "rows" of them; rates that were not counted are None.

    The ceiling of products is known in bf16 only.
    """
    profile = record["results"]
    ceilings = CEILINGS if profile["precision"] == "bf16" else CEILINGS | {"tflops": math.inf}
    for kernel in profile["graph"][: profile.get("rows", 21)]:
        shares = {rate: kernel[rate] / ceiling for rate, ceiling in ceilings.items() if kernel[rate]}
        yield kernel | {f"of_{rate}": shares.get(rate) or None for rate in CEILINGS}


def fusions(record):
    """The versions of each fusion, with the time of the first version of the case, which has a separate kernel."""
    separate = {}
    for result in record["results"]:
        case = result["rows"], result["c"], result["k"], result["fusion"]
        yield result | {"gain": separate.setdefault(case, result["us"]) / result["us"]}


def gelu_variants(record):
    for result in record["results"]:
        if "error" not in result:
            yield result | {"gain": result["cublasLt us"] / result["us"]}


def attention_results(record):
    return (result for of_shape in record["results"] for result in of_shape)


def tuned(record):
    """The candidates of each kernel: the current constants and the fastest, which comes first."""
    for title, candidates in record["results"].items():
        current, fastest = next(each for each in candidates if each["label"] == "in use")["ms"], candidates[0]["ms"]
        yield {
            "case": title,
            "candidates": len(candidates),
            "current": current,
            "fastest": fastest,
            "gain": current / fastest,
        }


def product_pairs(record):
    for ours, torch in record["results"]:
        yield {"ours": ours, "torch": torch}


def decode_variant(result):
    """The fastest variant that the search found, for the title of a row of PyTorch; "" without a search."""
    if "tried" not in result:
        return ""
    cut = f", cache cut to a multiple of {result['cut']}" if result.get("cut") else ""
    return f" (attention: {result['attention']}, products: {result['products']}{cut})"


def decoders(record):
    """The results of gpu/decode.py beside ours."""
    for result in beside_ours(record):
        yield result | {"variant": decode_variant(result), "rate": result["batch"] / result["token"]["median"]}


def decode_variants(record):
    """The variants of PyTorch's program that the search timed; the programs of a case share a search."""
    searched = {result["case"]: result for result in record["results"] if "tried" in result}
    for result in searched.values():
        for each in result["tried"]:
            us = f"{each['us_per_token']:.0f}" if "us_per_token" in each else each["error"]
            yield {"sequences": result["batch"], "us": us, "cut": None, **each}


def memory_cases(record):
    for result in record["results"]:
        batch, parts = result["options"]["batch_size"], result["options"]["micro_batches"]
        title = "{preset}, {precision}, {batch_size} sequence" + "s" * (batch > 1)
        title += ", {micro_batches} micro-batches" * (parts > 1)
        title += ", `--recompute block`" * (result["options"].get("recompute") == "block")
        largest = sorted(result["terms"].items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in largest)
        yield result | {"title": fill(title, result["options"]), "largest": terms}


def starts(record):
    for row in flat(record["results"], "name", "caches"):
        yield row | {"command": COMMANDS.get(row["name"], row["name"])}


# -- several GPUs -----------------------------------------------------------------------------------------------------


def scaling_tables(record):
    """The results of all tables of gpus/scaling.py, with the texts of the efficiencies: disturbed ones are marked."""
    for table in record["results"]["scaling"]:
        checked = efficiencies(table["rows"])
        for result in table["rows"]:
            text = fill("{efficiency:percent}", result)
            marked = checked[result["name"]].cell(text) if result["name"] in checked else text
            yield result | {"title": table["title"], "marked": marked}


def added_by_communication(record):
    """The results of gpus/strategies.py; those without communication have no messages and no added time."""
    for result in record["results"]:
        if not result.get("communicate", True):
            result = result | {"messages": "", "communication_share": None}
        share = result["communication_share"]
        yield result | {"added": None if share is None else 1e3 * share * result["seconds"]["median"]}


def sharded_programs(record):
    for result in record["results"]:
        yield result | {"losses": ", ".join(f"{loss:.4f}" for loss in result["first_losses"])}


def gpu_all_reduces(record):
    results = record["results"]
    for result in results["all_reduce"]:
        yield result | {"error": results["errors"][str(result["ranks"])][result["name"]]}


def gpu_fits(record):
    for row in flat(record["results"]["alpha_beta"], "ranks", "name"):
        yield row | {"bucket": record["results"]["bucket_mb"][f"{row['ranks']} GPUs, {row['name']}"]}


def overlaps(record):
    for name, times in record["results"].items():
        yield {"name": name, **times, "share": times["hidden_ms"] / times["communication_ms"]}


def compared_runs(record):
    for result in record["results"]:
        yield result | {
            "compared": "bit-identical" if result["difference"] is None else "differs",
            "deviation": fill("{largest_deviation:.1e}", result) if result["largest_deviation"] else "0",
            "loss": fill("{losses:last .6f}", result) if math.isfinite(result["losses"][-1]) else "not finite",
        }


# -- torch_bridge -----------------------------------------------------------------------------------------------------


def leaderboard(record):
    part = "leaderboard / "
    for result in record["results"]:
        if result["name"].startswith(part):
            yield result | {"name": result["name"].removeprefix(part)}


def fused_products(record):
    """The times of the fused product and of its peers, for each size."""
    found = {result["name"].split(" /")[0]: result["ms"] for result in record["results"] if "tile" in result}
    for size in sorted(found, key=int):
        for row in flat(found[size], "name"):
            yield row | {"size": size, "ratio": row["value"]["median"] / found[size]["ours"]["median"]}


def relative_to(way, value):
    """A function of a file's content: its rows with the "ratio" of value(row) to that of the row `way`."""

    def rows(record):
        (base,) = (value(row) for row in record["results"] if row["way"] == way)
        for row in record["results"]:
            yield row | {"title": SHARDING.get(row["way"], f"torch `{row['way']}`"), "ratio": value(row) / base}

    return rows


# -- tables -----------------------------------------------------------------------------------------------------------

STEP = """
    = {options[preset]}, {options[precision]}, {options[batch_size]} x {options[seq_len]}, {name}
    GPU = {file[hardware][gpu]:gpu} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
    tokens/s = {tokens_per_second:,.0f} | MFU = {mfu:percent} | speedup of ours = {ours_times_as_fast:ratio}
    speedup of ours if PyTorch reads losses at the end = {ours_times_as_fast_as_unread:ratio}
    memory held, GiB = {held_bytes:GiB}"""
STEP_CONSOLE = """
    fastest step, ms = {min:times 1e3 .4g} | tensors GiB = {allocated_bytes:GiB} | driver GiB = {driver_bytes:GiB}
    last loss = {last_loss:.4f}"""
STEP_FILES = "gpt2", "recompute", "gpt2_h100", "gpt2_4096", "gpt2_8192", "paper", "paper_fp32"
REAL_RUN = """
    = {name}, {parameters:times 1e-6 .1f} M parameters
    tokens = {tokens:times 1e-6 .1f} M | training loss, last {recipe[eval_every]} steps = {final_loss:.4f}
    ours minus PyTorch = {difference?:+.4f} | validation loss = {final_val_loss:.4f}
    ours minus PyTorch, validation = {val_difference?:+.4f}
    largest distance of a validation = {largest_val_difference?:.4f}
    ms per step = {seconds:ms} | seconds of the whole program = {wall_seconds:.0f}"""
CHOICES = """
    = {preset}, without: {without} | ms per step = {seconds:ms}
    time of this row / time of the full step = {gain:ratio 3} | quartiles = {gain:quartiles}"""
KERNELS = f"""
    kernel = `{{title}}` | calls = {{calls:g}} | ms = {{ms:.3f}} | share of time = {{share:percent}}
    TFLOP/s = {{tflops:.0f}} | share of {CEILINGS["tflops"]} TFLOP/s = {{of_tflops:percent 0}}
    TB/s = {{tbps:.2f}} | share of {CEILINGS["tbps"]} TB/s = {{of_tbps:percent 0}}"""
LESSON = "measured = {name} | plain, us = {plain:us} | ours, us = {ours:us} | times as fast = {times_as_fast:ratio}"
FUSIONS = """
    rows x C x K = {rows} x {c} x {k} | fusion | version | us = {us:.1f} | times as fast = {gain:.2f}"""
GELU = """
    = {direction} | tile of a consumer = {variant} | us = {us:.0f} | cublasLt, us = {cublasLt us:.0f}
    times as fast as cublasLt = {gain:.2f}"""
ATTENTION = """
    B x H x T x D = {shape:joined x} | = {name}
    forward, ms = {ms[forward]:number} | forward, TFLOP/s = {tflops[forward]:.0f}
    forward: speedup of ours = {ours_is_times_as_fast[forward]:ratio}
    forward and backward, ms = {ms[both]:number} | forward and backward, TFLOP/s = {tflops[both]:.0f}
    forward and backward: speedup of ours = {ours_is_times_as_fast[both]:ratio}"""
GLUON = "\n".join(line for line in ATTENTION.splitlines() if "speedup" not in line)
TUNE = """
    case | candidates | current, ms = {current:.4f} | fastest, ms = {fastest:.4f} | current / fastest = {gain:.3f}"""
PRODUCTS = "= {ours[precision]}, {ours[shape][0]} x {ours[shape][1]} x {ours[shape][2]}" + "".join(
    f"""
    {title}: ours, TFLOP/s = {{ours[tflops][{kind}]:.0f}} | {title}: torch, TFLOP/s = {{torch[tflops][{kind}]:.0f}}
    {title}: times as fast = {{ours[times_as_fast][{kind}]:ratio}}"""
    for kind, title in {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}.items()
)
DECODE = """
    = {preset}, {precision}, {batch} x ({prompt} + {new}), {name}{variant}
    us per step = {token:us} | quartiles = {token:quartiles us} | tokens/s = {rate:,.0f}
    first token, ms = {first:ms 3} | all tokens, ms = {total:ms}
    all tokens: speedup of ours = {ours_times_as_fast:ratio}"""
TRIED = """
    sequences | products | attention | cache cut to a multiple of = {cut:or not cut} | us per token = {us}"""
START = "command | caches | seconds = {value[seconds]:s 3} | quartiles = {value[seconds]:quartiles s 3}"
MEMORY = """
    = {title} | held, GiB = {held_bytes:GiB} | predicted, GiB = {model_bytes:GiB}
    difference = {difference:times 100 +.1f} % | held according to the driver, GiB = {driver_bytes:GiB}"""
SCALING = """
    sequences x tokens = {title} | = {name} | ms per step = {seconds:ms} | tokens/s = {tokens_per_second:,.0f}
    efficiency = {marked} | times as fast as PyTorch = {times_as_fast:ratio} | commit = {file[commit]}"""
SCALING_CONSOLE = """
    MB sent per rank = {bytes_sent:MB ,.1f} | optimizer MB per rank = {optimizer_bytes:MB ,.1f}
    last loss = {last_loss:.4f}"""
SCALING_FILES = "gpus/scaling", "gpus/scaling_16", "gpus/scaling_two", "gpus/scaling_strong"
PAPER = """
    50 steps of `paper`, bf16, 2 GPUs = {name} | seconds = {totals:s 3} | quartiles = {totals:quartiles s 3}"""
STRATEGIES = """
    = {name} | messages | ms per step = {seconds:ms}
    added by communication, ms = {added:.1f} | share of step = {communication_share:percent}
    time of this row / time of the same `--dp` without further flags = {times_plain?:ratio 3}
    MB sent per rank = {bytes_sent:MB ,.0f} | optimizer MB per rank = {optimizer_bytes:MB ,.0f}"""
BUBBLES = """
    = {schedule} | ms per step = {median:times 1e3 .1f} | measured bubble = {measured:.1f} %
    simulated bubble = {simulated:.1f} %"""
LAYOUTS = """
    = {precision} | tied = {tied} | clip = {clip} | --tp = {tp} | ranks = {ranks:joined} | runs = {runs}
    with the same bits = {equal} | digest = {digest}"""
SHARDED_GPUS = """
    = {name} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms} | tokens/s = {tokens_per_second:,.0f}
    times as fast as fully_shard = {times_as_fast:ratio} | GPU memory, GiB = {driver_bytes:GiB}
    relative to fully_shard's = {memory_ratio:.2f} | held in pools, GiB = {held_bytes:GiB}
    tensors, GiB = {allocated_bytes:GiB} | first losses = {losses} | last loss = {last_loss:.4f}"""
ALL_REDUCES = """
    MB in fp32 = {bytes:MB ,.0f} | {ranks} GPUs = {name} | us = {seconds:us} | bus GB/s = {bus_bandwidth:GB .0f}
    times as fast as torch = {times_as_fast_as_torch:ratio} | relative error at 10 MB = {error:.1e}"""
FITS = """
    {ranks} GPUs = {name} | alpha, us = {value[0]:times 1e6 .1f} | beta, ps per byte = {value[1]:times 1e12 .2f}
    best `--bucket-mb` for GPT-2 124M = {bucket:.0f}"""
TIMELINE = """
    rank 0 = {name} | step, ms = {step_ms:.1f} | computation, ms = {compute_ms:.1f}
    communication, ms = {communication_ms:.1f} | communication that overlaps = {share:percent 0} | kernels"""
PARITY = """
    = {precision}, {name} | compared with stage 2 = {compared} | largest loss deviation = {deviation}
    ms per step = {median:times 1e3 .3g} | last loss = {loss}"""
PARITY_CONSOLE = "difference | parameters_sha256 = {parameters_sha256:.12}"
MATMUL = """
    = {name} | size | us = {value[median]:times 1e3 .1f} | time of this row / time of ours = {ratio:.2f}"""
DDP = """
    = {way} | messages = {buckets:or} | ms per step = {step[mean]:.1f} | standard deviation = {step[std]:.2g}
    time of this row / time of torch DDP = {ratio:.2f}"""
SHARDED = """
    = {title} | ms per step = {step[mean]:.1f} | standard deviation = {step[std]:.2g}
    GB after the first step = {GB after step:.2f} | peak GB = {peak GB:.2f}
    peak of this row / peak of fully_shard = {ratio:.2f} | last loss = {last loss:.6f}"""

ATTENTION_KINDS = "tiles", "pointers", "h100", "h100-long", "h100-128"
DECODE_FILES = "gpu/decode", "gpu/decode_eight", "gpu/decode_many", "gpu/decode_paper"
PROFILE = "= {title} | {preset}, {precision}, {file[hardware][gpu]:gpu}, ms = {cell}"
PROFILE_FILES = "gpu/profile", "gpu/profile_h100", "gpu/profile_paper"
TABLES = {
    "gpu-step": Table(tuple(f"gpu/step_{name}" for name in STEP_FILES), STEP, beside_ours, STEP_CONSOLE),
    "gpu-real-run": Table("gpu/real_run", REAL_RUN),
    "gpu-choices": Table("gpu/choices", CHOICES),
    "gpu-profile": Table(PROFILE_FILES, PROFILE, kernel_groups, merged=True),
    "gpu-kernels": Table("gpu/profile", KERNELS, kernels),
    **Table("gpu/lesson", LESSON).kinds("gpu-lesson", "busy"),
    "gpu-fusions": Table("gpu/fusions", FUSIONS, fusions),
    "gpu-gelu": Table("gpu/gelu_product", GELU, gelu_variants, "product, us = {product us:.0f}"),
    **Table("gpu/attention", ATTENTION, attention_results).kinds("gpu-attention", *ATTENTION_KINDS),
    "gpu-gluon-ladder": Table("gpu/gluon_ladder", GLUON, attention_results),
    "gpu-tune": Table("gpu/tune", TUNE, tuned),
    "gpu-products": Table("gpu/products", PRODUCTS, product_pairs),
    "gpu-decode": Table(DECODE_FILES, DECODE, decoders, "cold start, ms = {cold:times 1e3 .0f}"),
    "gpu-decode-tried": Table(DECODE_FILES[:3], TRIED, decode_variants),
    **Table("gpu/start", START, starts).kinds("gpu-start", "h100"),
    "gpu-memory": Table("gpu/memory", MEMORY, memory_cases, "largest terms, GiB = {largest}"),
    "gpus-scaling": Table(SCALING_FILES, SCALING, scaling_tables, SCALING_CONSOLE),
    "gpus-paper": Table("gpus/scaling", PAPER, lambda record: record["results"]["paper"]),
    "gpus-strategies": Table("gpus/strategies", STRATEGIES, added_by_communication, "last loss = {last_loss:.4f}"),
    "gpus-sharding": Table("gpus/sharding", SHARDED_GPUS, sharded_programs),
    "gpus-layouts": Table("gpus/layouts", LAYOUTS),
    "gpus-pipeline": Table("gpus/pipeline", BUBBLES),
    "gpus-collectives": Table("gpus/collectives", ALL_REDUCES, gpu_all_reduces),
    "gpus-fit": Table("gpus/collectives", FITS, gpu_fits),
    "gpus-timeline": Table("gpus/timeline", TIMELINE, overlaps),
    "gpus-parity": Table("gpus/parity", PARITY, compared_runs, PARITY_CONSOLE),
    "gpus-kill": Table("gpus/kill", rows=kill_results),
    "torch-attention": Table(
        "torch/attention", "= {name} | ms = {both?[mean]:.4g} | standard deviation = {both?[std]:.2g}", leaderboard
    ),
    "torch-matmul": Table("torch/matmul_search", MATMUL, fused_products),
    "torch-ddp": Table("torch/ddp", DDP, relative_to("torch DDP", lambda row: row["step"]["mean"])),
    "torch-sharding": Table("torch/sharding", SHARDED, relative_to("fully_shard", lambda row: row["peak GB"])),
}

"""The tables of docs/RESULTS.md about stages 2 and 3 and about torch_bridge."""

from collections import Counter

from benchmarks.harness.cpu_tables import KILLS
from benchmarks.harness.speedups import efficiencies
from benchmarks.harness.table_format import Table, beside, fill, flat, percent

# The largest rates measured on an H200: TFLOP/s of bf16 products of random numbers, TB/s of a copy.
CEILINGS = {"tflops": 766, "tbps": 4.26}
# Groups of kernels: the table of the profile shows the total time of each group.
GROUPS = ("attention", "layernorm", "column_sums", "cross_entropy", "adamw", "embedding")
COMMANDS = {
    "inference": "`inference.py --stats --prompt ...`",
    "train": "`train_gpt2.py --preset paper --out ...`",
}  # {name in gpu/start.json: command}
SHARDING = {"plain": "`BucketedDDP`, AdamW", "sharded optimizer": "`ShardedOptimizer`", "fsdp": "`FSDP`"}

# -- rows -------------------------------------------------------------------------------------------------------------


def beside_ours(results, *fields):
    """The results with this project's of the same fields as "base"."""
    return beside(results, lambda result: result["name"] == "ours", *fields)


def group_of(kernel):
    """The group of a kernel of the profile: one of GROUPS, "matrix products", or "other kernels and copies"."""
    name = kernel["title"].partition(": ")[0]
    if name.startswith(("product", "splitK")):
        return "matrix products"
    return name if name in GROUPS else "other kernels and copies"


def kernel_groups(profile):
    """The time of each group of kernels of one profile, then the times of the whole step."""
    group_ms = Counter()
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
    return ({"title": title, "cell": cell} for title, cell in cells.items())


def kernels(profile):
    """The kernels with the longest time, 21 or "rows" of them, with their share of CEILINGS; rates of 0 are None.

    The ceiling of products is known in bf16 only.
    """
    known = {rate: rate == "tbps" or profile["precision"] == "bf16" for rate in CEILINGS}
    for kernel in profile["graph"][: profile.get("rows", 21)]:
        yield kernel | {f"of_{rate}": (known[rate] and kernel[rate] or 0) / CEILINGS[rate] or None for rate in CEILINGS}


def decode_variant(result):
    """The fastest variant that the search found, for the title of a row of PyTorch; "" without a search."""
    if "tried" not in result:
        return ""
    cut = f", cache cut to a multiple of {result['cut']}" if result.get("cut") else ""
    return f" (attention: {result['attention']}, products: {result['products']}{cut})"


def decode_variants(results):
    """The variants of PyTorch's program that the search timed; the programs of a case share a search."""
    searched = {result["case"]: result for result in results if "tried" in result}
    return ({"batch": result["batch"], **each} for result in searched.values() for each in result["tried"])


def memory_cases(results):
    for result in results:
        batch, parts = result["options"]["batch_size"], result["options"]["micro_batches"]
        title = "{preset}, {precision}, {batch_size} sequence" + "s" * (batch > 1)
        title += ", {micro_batches} micro-batches" * (parts > 1)
        title += ", `--recompute block`" * (result["options"].get("recompute") == "block")
        largest = sorted(result["terms"].items(), key=lambda term: -term[1])[:3]
        terms = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in largest)
        yield result | {"title": fill(title, result["options"]), "largest": terms}


def scaling_tables(results):
    """The results of all tables of gpus/scaling.py, with the texts of the efficiencies: disturbed ones are marked."""
    for table in results["scaling"]:
        checked = efficiencies(table["rows"])
        for result in table["rows"]:
            text = fill("{efficiency:percent}", result)
            marked = checked[result["name"]].cell(text) if result["name"] in checked else text
            yield result | {"title": table["title"], "marked": marked}


def without_communication(results):
    """The results of gpus/strategies.py; those without communication have no messages and no added time."""
    nothing = {"messages": "", "communication_share": None}
    return (result if result.get("communicate", True) else result | nothing for result in results)


def fused_products(results):
    """The times of the fused product and of its peers, for each size."""
    found = {int(result["name"].split(" /")[0]): result["ms"] for result in results if "tile" in result}
    return flat(dict(sorted(found.items())), "size", "name")


def beside_way(results, way):
    """The results with that of `way` as "base", and their titles."""
    results = (row | {"title": SHARDING.get(row["way"], f"torch `{row['way']}`")} for row in results)
    return beside(results, lambda row: row["way"] == way)


# -- tables -----------------------------------------------------------------------------------------------------------

ATTENTION = """
    B x H x T x D = {" x ".join(map(str, shape))} | = {name}
    forward, ms = {row.ms.forward:number} | forward, TFLOP/s = {tflops.forward:.0f}
    forward: speedup of ours = {ours_is_times_as_fast.forward:ratio}
    forward and backward, ms = {row.ms.both:number} | forward and backward, TFLOP/s = {tflops.both:.0f}
    forward and backward: speedup of ours = {ours_is_times_as_fast.both:ratio}"""
GLUON = "\n".join(line for line in ATTENTION.splitlines() if "speedup" not in line)
PRODUCTS = "= {ours.precision}, {ours.shape[0]} x {ours.shape[1]} x {ours.shape[2]}" + "".join(
    f"""
    {title}: ours, TFLOP/s = {{ours.tflops.{kind}:.0f}} | {title}: torch, TFLOP/s = {{torch.tflops.{kind}:.0f}}
    {title}: times as fast = {{ours.times_as_fast.{kind}:ratio}}"""
    for kind, title in {"forward": "forward", "input": "input gradient", "weight": "weight gradient"}.items()
)
BUBBLES = """
    = {schedule} | ms per step = {median * 1e3:.1f} | measured bubble = {measured:.1f} %
    simulated bubble = {simulated:.1f} %"""
STRATEGIES = Table("gpus/strategies", """
    = {name} | messages | ms per step = {seconds:ms}
    added by communication, ms = {communication_share * seconds.median * 1e3:.1f}
    share of step = {communication_share:percent}
    time of this row / time of the same `--dp` without further flags = {row.times_plain:ratio 3}
    MB sent per rank = {bytes_sent:MB ,.0f} | optimizer MB per rank = {optimizer_bytes:MB ,.0f}""",
    without_communication, "last loss = {last_loss:.4f}",
)  # fmt: skip
STEP_FILES = "gpt2", "recompute", "gpt2_h100", "gpt2_4096", "gpt2_8192", "paper", "paper_fp32"
SCALING_FILES = "gpus/scaling_64", "gpus/scaling", "gpus/scaling_16", "gpus/scaling_two", "gpus/scaling_strong"
ATTENTION_KINDS = "tiles", "pointers", "h100", "h100-long", "h100-128"
DECODE_FILES = "gpu/decode", "gpu/decode_eight", "gpu/decode_many", "gpu/decode_paper"

TABLES = {
    "gpu-step": Table(tuple(f"gpu/step_{name}" for name in STEP_FILES), """
        = {preset}, {precision}, {batch_size} x {seq_len}, {name}
        GPU = {file.hardware.gpu:gpu} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms}
        tokens/s = {tokens_per_second:,.0f} | MFU = {mfu:percent} | speedup of ours = {base.times_as_fast[name]:ratio}
        speedup of ours if PyTorch reads losses at the end = {base.times_as_fast_as_unread[name]:ratio}
        memory held, GiB = {held_bytes:GiB}""",
        lambda results: beside_ours((row["options"] | row for row in results), "preset", "precision"), """
        fastest step, ms = {min * 1e3:.4g} | tensors GiB = {allocated_bytes:GiB} | driver GiB = {driver_bytes:GiB}
        last loss = {last_loss:.4f}"""),
    "gpu-real-run": Table("gpu/real_run", """
        = {name}, {parameters / 1e6:.1f} M parameters
        tokens = {tokens / 1e6:.1f} M | training loss, last {recipe.eval_every} steps = {final_loss:.4f}
        ours minus PyTorch = {row.difference:+.4f} | validation loss = {final_val_loss:.4f}
        ours minus PyTorch, validation = {row.val_difference:+.4f}
        largest distance of a validation = {row.largest_val_difference:.4f}
        ms per step = {seconds:ms} | seconds of the whole program = {wall_seconds:.0f}"""),
    "gpu-choices": Table("gpu/choices", """
        = {preset}, without: {without} | ms per step = {seconds:ms}
        time of this row / time of the full step = {gain:ratio 3} | quartiles = {gain:quartiles}"""),
    "gpu-profile": Table(
        ("gpu/profile", "gpu/profile_h100", "gpu/profile_paper"),
        "= {title} | {file.results.preset}, {file.results.precision}, {file.hardware.gpu:gpu}, ms = {cell}",
        kernel_groups, merged=True),
    "gpu-kernels": Table("gpu/profile", f"""
        kernel = `{{title}}` | calls = {{calls:g}} | ms = {{ms:.3f}} | share of time = {{share:percent}}
        TFLOP/s = {{tflops:.0f}} | share of {CEILINGS["tflops"]} TFLOP/s = {{of_tflops:percent 0}}
        TB/s = {{tbps:.2f}} | share of {CEILINGS["tbps"]} TB/s = {{of_tbps:percent 0}}""", kernels),
    **Table("gpu/lesson", """
        measured = {name} | plain, us = {plain:us} | ours, us = {ours:us} | times as fast = {times_as_fast:ratio}"""
    ).kinds("gpu-lesson", "busy"),
    "gpu-fusions": Table("gpu/fusions", """
        rows x C x K = {rows} x {c} x {k} | fusion | version | us = {us:.1f} | times as fast = {base.us / us:.2f}""",
        # The first version of a case has a separate kernel.
        lambda results: beside(results, lambda row: True, "rows", "c", "k", "fusion")),
    "gpu-gelu": Table("gpu/gelu_product", """
        = {direction} | tile of a consumer = {variant} | us = {us:.0f} | cublasLt, us = {row["cublasLt us"]:.0f}
        times as fast as cublasLt = {row["cublasLt us"] / us:.2f}""",
        lambda results: (result for result in results if "error" not in result),
        'product, us = {row["product us"]:.0f}'),
    **Table("gpu/attention", ATTENTION, lambda results: sum(results, [])).kinds("gpu-attention", *ATTENTION_KINDS),
    "gpu-gluon-ladder": Table("gpu/gluon_ladder", GLUON, lambda results: sum(results, [])),
    "gpu-tune": Table("gpu/tune", """
        case | candidates = {len(value)} | current, ms = {current:.4f} | fastest, ms = {value[0].ms:.4f}
        current / fastest = {current / value[0].ms:.3f}""",
        lambda results: (
            row | {"current": next(each["ms"] for each in row["value"] if each["label"] == "in use")}
            for row in flat(results, "case")
        )),
    "gpu-products": Table(
        "gpu/products", PRODUCTS, lambda results: ({"ours": ours, "torch": torch} for ours, torch in results)),
    "gpu-decode": Table(DECODE_FILES, """
        = {preset}, {precision}, {batch} x ({prompt} + {new}), {name}{variant}
        us per step = {token:us} | quartiles = {token:quartiles us} | tokens/s = {batch / token.median:,.0f}
        first token, ms = {first:ms 3} | all tokens, ms = {total:ms}
        all tokens: speedup of ours = {base.times_as_fast[name]:ratio}""",
        lambda results: (row | {"variant": decode_variant(row)} for row in beside_ours(results, "case", "precision")),
        "cold start, ms = {cold * 1e3:.0f}"),
    "gpu-decode-tried": Table(DECODE_FILES[:3], """
        sequences = {batch} | products | attention | cache cut to a multiple of = {row.cut or "not cut"}
        us per token = {row.us_per_token:.0f}{row.error}""", decode_variants),
    **Table("gpu/start", """
        command | caches | seconds = {value.seconds:s 3} | quartiles = {value.seconds:quartiles s 3}""",
        lambda results: (row | {"command": COMMANDS[row["name"]]} for row in flat(results, "name", "caches")),
    ).kinds("gpu-start", "h100"),
    "gpu-checkpoints": Table("gpu/checkpoints", """
        = {"`%s`" % name if "--" in name else name} | ms per step = {totals.median / steps * 1e3:.2f}
        time of this row / time without checkpoints = {times:ratio 3}"""),
    "gpu-positions": Table("gpu/positions", """
        positions = {name} | before the end of the block, us = {seconds.before:us} | after it, us = {seconds.after:us}
        times = {after_times:ratio}""",
        lambda results: ({"name": name, **found} for name, found in results["tokens"].items())),
    "gpu-contexts": Table("gpu/positions", """
        = 1 x {tokens:,} tokens | ms per step = {seconds:ms} | held, GiB = {held_bytes:GiB}
        loss of the first step = {first_loss:.3f} | of the last step = {last_loss:.3f}""",
        lambda results: results["contexts"]),
    "gpu-memory": Table("gpu/memory", """
        = {title} | held, GiB = {held_bytes:GiB} | predicted, GiB = {model_bytes:GiB}
        difference = {difference * 100:+.1f} % | held according to the driver, GiB = {driver_bytes:GiB}""",
        memory_cases, "largest terms, GiB = {largest}"),
    "gpus-scaling": Table(SCALING_FILES, """
        sequences x tokens = {title} | = {name} | ms per step = {seconds:ms} | tokens/s = {tokens_per_second:,.0f}
        efficiency = {marked} | times as fast as PyTorch = {times_as_fast:ratio} | commit = {file.commit}""",
        scaling_tables, """
        MB sent per rank = {bytes_sent:MB ,.1f} | optimizer MB per rank = {optimizer_bytes:MB ,.1f}
        last loss = {last_loss:.4f}"""),
    "gpus-paper": Table("gpus/scaling", """
        50 steps of `paper`, bf16, 2 GPUs = {name} | seconds = {totals:s 3} | quartiles = {totals:quartiles s 3}""",
        lambda results: results["paper"]),
    "gpus-strategies": STRATEGIES,
    "gpus-sharding": Table("gpus/sharding", """
        = {name} | ms per step = {seconds:ms} | quartiles = {seconds:quartiles ms} | tokens/s = {tokens_per_second:,.0f}
        times as fast as fully_shard = {times_as_fast:ratio} | GPU memory, GiB = {driver_bytes:GiB}
        relative to fully_shard's = {memory_ratio:.2f} | held in pools, GiB = {held_bytes:GiB}
        tensors, GiB = {allocated_bytes:GiB} | first losses = {first_losses:list .4f} | last loss = {last_loss:.4f}"""),
    "gpus-layouts": Table("gpus/layouts", """
        = {precision} | tied = {tied} | clip = {clip} | --tp = {tp} | ranks = {" ".join(map(str, ranks))}
        runs = {runs} | with the same bits = {equal} | digest = {digest}"""),
    **Table("gpus/pipeline", BUBBLES).kinds("gpus-pipeline", "4"),
    "gpus-collectives": Table("gpus/collectives", """
        MB in fp32 = {bytes:MB ,.0f} | {ranks} GPUs = {name} | us = {seconds:us} | bus GB/s = {bus_bandwidth:GB .0f}
        times as fast as torch = {times_as_fast_as_torch:ratio}
        relative error at 10 MB = {file.results.errors[str(ranks)][name]:.1e}""",
        lambda results: results["all_reduce"]),
    "gpus-fit": Table("gpus/collectives", """
        {ranks} GPUs = {name} | alpha, us = {value[0] * 1e6:.1f} | beta, ps per byte = {value[1] * 1e12:.2f}
        best `--bucket-mb` for GPT-2 124M = {file.results.bucket_mb["%s GPUs, %s" % (ranks, name)]:.0f}""",
        lambda results: flat(results["alpha_beta"], "ranks", "name")),
    "gpus-timeline": Table("gpus/timeline", """
        rank 0 = {name} | step, ms = {value.step_ms:.1f} | computation, ms = {value.compute_ms:.1f}
        communication, ms = {value.communication_ms:.1f}
        communication that overlaps = {value.hidden_ms / value.communication_ms:percent 0}
        kernels = {value.kernels}""", lambda results: flat(results, "name")),
    "gpus-parity": Table("gpus/parity", """
        = {precision}, {name} | compared with stage 2 = {"differs" if row.difference else "bit-identical"}
        largest loss deviation = {row.largest_deviation or "0":cell .1e} | ms per step = {median * 1e3:.3g}
        last loss = {losses[-1] if abs(losses[-1]) < float("inf") else "not finite":cell .6f}""",
        console="difference | parameters_sha256 = {parameters_sha256:.12}"),
    "gpus-kill": Table("gpus/kill", KILLS, lambda results: [results], lines=True),
    "torch-attention": Table("torch/attention", """
        = {name.removeprefix("leaderboard / ")} | ms = {row.both.mean:.4g} | standard deviation = {row.both.std:.2g}""",
        lambda results: (row for row in results if row["name"].startswith("leaderboard / "))),
    "torch-matmul": Table("torch/matmul_search", """
        = {name} | size | us = {value.median * 1e3:.1f}
        time of this row / time of ours = {value.median / base.value.median:.2f}""",
        lambda results: beside_ours(fused_products(results), "size")),
    "torch-ddp": Table("torch/ddp", """
        = {way} | messages = {buckets or ""} | ms per step = {step.mean:.1f} | standard deviation = {step.std:.2g}
        time of this row / time of torch DDP = {step.mean / base.step.mean:.2f}""",
        lambda results: beside_way(results, "torch DDP")),
    "torch-sharding": Table("torch/sharding", """
        = {title} | ms per step = {step.mean:.1f} | standard deviation = {step.std:.2g}
        GB after the first step = {row["GB after step"]:.2f} | peak GB = {row["peak GB"]:.2f}
        peak of this row / peak of fully_shard = {row["peak GB"] / base["peak GB"]:.2f}
        last loss = {row["last loss"]:.6f}""", lambda results: beside_way(results, "fully_shard")),
}  # fmt: skip

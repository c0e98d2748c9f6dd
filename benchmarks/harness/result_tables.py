"""The tables of docs/RESULTS.md, and those that its scripts print; table_format.py says how to add one."""

from dataclasses import replace

from benchmarks.harness.table_format import Table, load

CODE = '{"`%s`" % name if "--" in name or name.startswith("make ") else name}'  # a name; one with flags as code
STEP = "{options.preset}, {options.precision}, {options.batch_size} x {options.seq_len}"
CURVE = {"each": "losses", "where": "index % 5 == 0 or index == 49", "merged": True}
MAIN_SHAPES = [1, 16, 16384, 64], [64, 12, 1024, 64], [4, 16, 4096, 128]  # of attention, measured on H100 and H200

# -- tables of docs/RESULTS.md ----------------------------------------------------------------------------------------

TABLES = {
    "cpu-step": Table("cpu/train_step*", """
        = {"GPT-2 124M" if "gpt2" in str(row.preset or file.name) else "`%s`" % (row.preset or "paper")}, \
{file.machine}, threads {threads}
        {name}, ms = {seconds:ms} | ours: times as fast as PyTorch = {row.ratio:ratio}
        ours: times as fast as llm.c = {row.ratio and row.times_as_fast_as_llmc:ratio}
        floor / ours = {row.ratio and share_of_floor:percent 0}
        ours: peak MiB = {row.ratio and peak_bytes:memory}
        torch eager: peak MiB = {peak_bytes if name == "torch eager" else None:memory}""", merged=True),
    "cpu-decode": Table("cpu/decode*", """
        = {case}, {file.machine} | {threads}: {name}, ms = {token:ms 3} | {threads}: times as fast = {row.ratio:ratio}
        {threads}: {name}, first token, ms = {first:ms 3}
        {threads}: recomputing / cache = {row.times_as_fast_as_recomputing if name == "ours" else None:.1f}""",
        where='case != "recomputing"', merged=True),
    "cpu-curve": Table("cpu/curve", "step = paper, serial | {index} = {value / (1 + deviations[index]):.3f}",
        **CURVE, also=(
        Table("cpu/curve", "step = ours | {index} = {value:.3f}", **CURVE),
        Table("cpu/curve", "step = deviation | {index} = {deviations[index]:+.1%}", **CURVE))),
    "classroom": Table("cpu/classroom", f"""
        command = {CODE} | seconds = {{seconds:s 2}} | peak MiB = {{peak_bytes:memory}}"""),
    "first-run": (FIRST_RUN := Table("cpu/first_run", """
        command = stage 0: `{key}` | {file.machine}, s = {median:#.3g}""", each="seconds")),
    "cpu-deployment": (DEPLOYMENT := Table("cpu/deployment", """
        command = one token, {program}, {version} | {file.machine}, s = {seconds:s 3}
        modules of this repository = {modules} | their import, ms = {ms:s 3}
        peak MiB = {peak_bytes:memory}""")),
    "start": Table("gpu/start*", """
        command = stage 2: `{"train_gpt2.py --preset paper --out" if key == "train" else \
"inference.py --stats --prompt"} ...`
        {file.machine}, empty caches, s = {empty.seconds:s 3} | {file.machine}, warm caches, s = {warm.seconds:s 3}""",
        each="*", merged=True, also=(FIRST_RUN, DEPLOYMENT)),
    "ranks-step": Table("ranks/ranks*", """
        = {file.machine}, {name} | ms per step = {seconds:ms} | times as fast as one process = {one_process}
        times as fast as DDP = {row.times_as_fast["torch DDP, gloo"]:ratio}
        cores used = {cores_used:.2f} | peak MiB per rank = {peak_bytes:memory}"""),
    "ranks-strategies": (RANK_STRATEGIES := Table(("ranks/strategies", "ranks/strategies_zero"), """
        = `{name}` | {ranks} ranks: ms per step = {seconds:ms}
        {ranks} ranks: time / time of `--dp flat` = {row.times_flat:ratio}
        {ranks} ranks: MB sent = {max(bytes_sent):MB .1f}
        {ranks} ranks: optimizer MiB = {max(optimizer_bytes):memory}""")),
    "gpus-strategies": (GPU_STRATEGIES := Table("gpus/strategies", """
        = {"`" * bool(row.dp)}{name.replace(", %d GPUs" % ranks, "").removeprefix("ours ")}{"`" * bool(row.dp)}
        {ranks} GPUs: ms per step = {seconds:ms}
        {ranks} GPUs: added by communication, ms = {row.dp and communication_share * seconds.median * 1e3:.1f}
        {ranks} GPUs: share of the step = {row.dp and communication_share:percent}
        {ranks} GPUs: messages = {row.dp and messages}
        {ranks} GPUs: MB sent = {bytes_sent:MB ,.0f} | {ranks} GPUs: optimizer MB = {optimizer_bytes:MB ,.0f}""")),
    "gpus-timeline": (OVERLAP := Table("gpus/timeline", """
        = `{key.removesuffix(", 4 GPUs")}` | 4 GPUs: communication, ms = {communication_ms:.1f}
        4 GPUs: communication that overlaps = {hidden_ms / communication_ms:percent 0}""", each="*")),
    "strategies": replace(RANK_STRATEGIES, merged=True, also=(GPU_STRATEGIES, OVERLAP),
        where='"--collectives" not in name'),  # they differ as in the table of the collectives
    "ranks-collectives": Table(
        ("ranks/collectives", "ranks/collectives_16_cores", "ranks/collectives_others*"), """
        = {operation}, {bytes:MB g} MB | {ranks} ranks, {file.hardware.cores} cores = {seconds:ms 3} ms; \
{"%.2f; " % ratios.canonical if "canonical" in ratios else ""}{best} {ratios[best]:.2f}""",
        each="times", where='algorithm == "mpi"', order="operation, bytes", merged=True),
    "ranks-fit": Table(("ranks/collectives", "ranks/collectives_16_cores"), """
        = {"MPI library" if name == "mpi" else name}: alpha in us; beta in ns per byte
        {ranks} ranks, {file.hardware.cores} cores = {alpha * 1e6:.0f}; {beta * 1e9:.2f}""",
        each="fits", merged=True),
    "ranks-convergence": Table("ranks/convergence_intel", f"""
        = {CODE} | loss after {{value[0] + 1}} steps = {{value[1]:.3f}}""", each="val_losses", merged=True, also=(
        Table("ranks/convergence_intel", f"""
        = {CODE} | difference, mean of the seeds = {{row.difference:+.4f}}
        largest difference = {{row.largest_difference:+.4f}}"""),)),
    "ranks-grid": Table(("ranks/grid", "ranks/grid_nano", "ranks/grid_paper"), """
        measured; predicted = {file.machine}, {ranks} ranks: {name}
        {preset}, ms = {measured.ms:.1f}; {predicted.ms:.1f}
        {preset}, bubble = {measured.bubble:percent}; {predicted.bubble:percent}
        {preset}, MB of a rank = {measured.memory:MB .1f}; {predicted.memory:MB .1f}""", merged=True),
    "token-files": Table("ranks/token_files", """
        ranks | peak of a rank, MB = {peak_bytes:MB .1f} | of which for 4 GB of tokens, MB = {loader_bytes:MB .1f}
        loss of the last step = {loss:.6f} | parameters, SHA-256 = {hash}"""),
    "table-1": Table("gpus/table_1*", """
        = {name} | training, the paper, s = {paper.training:,.2f} | inference, the paper, s = {paper.inference:.2f}
        training, {file.machine}, s = {training:.2f} | a step, {file.machine}, ms = {step * 1e3:.2f}
        inference, {file.machine}, s = {seconds:s 3} | last loss = {last_loss:.6f}""", merged=True),
    "gpus-plan": Table("gpus/plan", """
        = {name} | measured, ms = {measured * 1e3:.1f} | predicted, ms = {predicted * 1e3:.1f}
        error = {error:percent}"""),
    "gpu-step": Table(("gpu/step_gpt2*", "gpu/step_recompute", "gpu/step_paper", "gpu/step_paper_fp32"), f"""
        = {STEP}, {{file.machine}}{{" (again)" * ("recompute" in str(file.name))}}""" """
        {name}, ms = {seconds:ms} | times as fast = {row.ratio:ratio}
        if PyTorch reads losses at the end = {row.ratio and times_as_fast_as_unread[peer.name]:ratio}
        MFU of ours = {row.ratio and mfu:percent} | {name}, GiB = {held_bytes:GiB}""", merged=True),
    "gpu-real-run": Table("gpu/real_run", """
        = {name}, {parameters / 1e6:.1f} M parameters
        tokens = {tokens / 1e6:.1f} M | training loss, last {recipe.eval_every} steps = {final_loss:.4f}
        ours minus PyTorch = {row.difference:+.4f} | validation loss = {final_val_loss:.4f}
        ours minus PyTorch, validation = {row.val_difference:+.4f}
        largest distance of a validation = {row.largest_val_difference:.4f}
        ms per step = {seconds:ms} | seconds of the whole program = {wall_seconds:.0f}"""),
    "gpu-profile": Table(("gpu/profile", "gpu/profile_h100", "gpu/profile_paper"), """
        = {title} | {preset}, {precision}, {file.machine}, ms = {row.ms:.3f}\
{" (%.1f %%)" % (100 * share) if row.share else ""}{row.idle:percent}
        {preset}, H200: share of the limit = {row.limit if "H200" in str(file.machine) else None:percent 0}""",
        each="groups", merged=True),
    "gpu-attention": Table(("gpu/attention", "gpu/attention_h100", "gpu/attention_h100_*"), """
        B x H x T x D = {" x ".join(map(str, shape))}, {file.machine}
        {name} = {tflops.forward:.0f}; {tflops.both:.0f}
        times as fast = {row.ratio.forward:ratio}{"; " * bool(row.ratio)}{row.ratio.both:ratio}""", merged=True),
    "gpu-products": Table(
        "gpu/products", "N x C x K = {shape[0]} x {shape[1]} x {shape[2]} | {precision} = " + ", ".join(
        f"{{tflops.{kind}:.0f}} ({{times_as_fast.{kind}:ratio}})" for kind in ("forward", "input", "weight")),
        where='name == "ours"', merged=True),
    "gpu-decode": Table(("gpu/decode", "gpu/decode_*"), """
        = {preset}, {precision}, {batch} x ({prompt} + {new}), {file.machine}
        {name.replace(" + each step a graph", ", graph")}, us = {token:us}
        all tokens: times as fast = {row.ratio:ratio}
        ours, first token, ms = {first if name == "ours" else None:ms 3}
        torch, first token, ms = {first if "compiled" in name else None:ms 3}
        fastest variant of PyTorch = {row.variant}""", merged=True),
    "gpu-decode-tried": Table(("gpu/decode_h100", "gpu/decode_eight"), """
        products, attention = {products}, {attention} | cache cut to a multiple of = {row.cut or "not cut"}
        sequences = {batch} | us per token = {row.us_per_token:.0f}{row.error}""",
        each="tried", where='kind == "graph"'),
    "gpu-positions": Table(("gpu/positions", "gpu/positions_cpu"), """
        positions = {key}, generation, {file.results.preset}, {file.machine}
        a token before the end of the block, us = {seconds.before:us}
        a token after it, us = {seconds.after:us} | times = {after_times:ratio}""", each="tokens", also=(
        Table("gpu/positions", """
        positions = rotary, training, 1 x {tokens:,} tokens | ms per step = {seconds:ms} | held, GiB = {held_bytes:GiB}
        loss of the first step = {first_loss:.3f} | of the last step = {last_loss:.3f}""", each="contexts"),)),
    "gpu-memory": Table("gpu/memory", """
        = {options.preset}, {options.precision}, {options.batch_size} sequence{"s" * (options.batch_size > 1)}\
{", %d micro-batches" % options.micro_batches if options.micro_batches > 1 else ""}\
{", `--recompute block`" * (options.recompute == "block")}
        held, GiB = {held_bytes:GiB} | predicted, GiB = {model_bytes:GiB}
        difference = {difference * 100:+.1f} % | held according to the driver, GiB = {driver_bytes:GiB}"""),
    "gpus-paper": (PAPER_STEPS := Table("gpus/scaling", """
        = {name} | 50 steps of `paper`, s = {totals:s 3}""", each="paper")),
    "gpus-scaling": Table(
        tuple(f"gpus/scaling{name}" for name in ("_strong", "_strong_two", "_two", "_16", "", "_64", "_64_two")), """
        = {name} | {title} = {seconds:ms}; {efficiency_text}; {times_as_fast:ratio}; {file.commit}""",
        each="scaling rows", merged=True, also=(PAPER_STEPS,)),
    "gpus-sharding": Table("gpus/sharding", """
        = {name} | ms per step = {seconds:ms} | tokens/s = {tokens_per_second:,.0f}
        times as fast as fully_shard = {times_as_fast:ratio} | GPU memory, GiB = {driver_bytes:GiB}
        relative to fully_shard's = {memory_ratio:.2f} | last loss = {last_loss:.4f}"""),
    "gpus-pipeline": Table("gpus/pipeline*", """
        ms per step; measured bubble; simulated bubble = {schedule}
        {file.machine} = {median * 1e3:.1f}; {measured:.1f} %; {simulated:.1f} %""", merged=True),
    "gpus-collectives": Table("gpus/collectives", """
        {ranks} GPUs = {name} | {bytes:MB ,.0f} MB = {seconds:us}; {times_as_fast_as_torch:ratio}
        bus GB/s of the largest = {bus_bandwidth:GB .0f} | relative error at 10 MB = {error:.1e}""",
        each="all_reduce", merged=True, also=(
        Table("gpus/collectives", """
        {ranks} GPUs = {name} | alpha, us; beta, ps per byte = {alpha * 1e6:.1f}; {beta * 1e12:.2f}
        best `--bucket-mb` for GPT-2 124M = {bucket_mb:.0f}""", each="fits"),)),
    "torch-matmul": (MATMUL := Table("torch/matmul_search", """
        us = ReLU(A B + C), fp16, {size} rows | {key} = {median * 1e3:.1f}""",
        each="ms", where="row.size", order="size", merged=True)),
    "torch-kernels": Table("torch/attention", """
        us = attention, forward and backward | {program} = {row.both.mean * 1e3:.4g}""",
        name="leaderboard / {program}", merged=True, also=(MATMUL,)),
    "parity": Table(("ranks/parity*", "gpus/parity", "gpus/layouts", "gpus/parity_sockets"), """
        = {title} | ranks = {" ".join(map(str, ranks))} | bit-identical runs, {file.machine} = {equal} of {runs}
        largest loss deviation = {deviation or None:.1e}""", each="summary", merged=True),
    "kill": Table(("ranks/kill", "gpus/kill"), """
        = `kill -9` of one of 4 ranks, {file.machine} | kills = {times} | ended cleanly = {row.summary.clean_ends}
        median and longest time, s = {summary.median_seconds:.2f}, {summary.longest_seconds:.2f}
        readable checkpoints = {row.summary.readable} | resumed with the same bits = {row.summary.equal}""", also=(
        Table(("ranks/survive", "gpus/survive"), """
        = one run with `--max-restarts`, {file.machine} | kills = {summary.kills}
        median and longest time, s = {summary.median_seconds:.2f}, {summary.longest_seconds:.2f}
        readable checkpoints = all; {summary.incomplete} incomplete ones are not read
        resumed with the same bits = {"yes" if summary.equal else "NO"}
        moments of the kills = {"; ".join(["%d %s" % (count, moment) for moment, count in summary.moments.items()])}
        most steps repeated = {summary.most_repeated} of {checkpoint_every}"""),)),
    # The last column of the next tables is a row of the table "choices" of docs/RESULTS.md.
    "cpu-choices": Table("cpu/choices*", """
        choice = `{choice}` | naive, us = {naive_seconds:us} | ours, us = {our_seconds:us}
        times as fast = {gain:ratio}""",
        choice="NumPy backend; `formula -> override` is a kernel of `NumpyBackend`: times as fast"),
    "gpu-choices": Table("gpu/choices", """
        = {preset}, without: {without} | ms per step = {seconds:ms}
        time of this row / time of the full step = {gain:ratio 3}""",
        choice="GPU step without a choice: its time / the time of the full step"),
    "gpu-lesson": Table("gpu/lesson*", """
        measured = {name} | plain, us = {plain:us} | ours, us = {ours:us} | times as fast = {times_as_fast:ratio}""",
        choice="sections of stage 2's lesson, against plain code: times as fast"),
    "gpu-fusions": Table("gpu/fusions", """
        = {fusion}, {"Triton" if version.startswith("Triton") else version} | rows x C x K = {rows} x {c} x {k}
        version | us = {us:.1f} | times as fast = {base.us / us:.2f}""",
        base='version == "separate kernel"', same="rows c k fusion",
        choice="fusing an operation with a product: times as fast as a separate kernel, by shape and tile"),
    "gpu-gelu": Table("gpu/gelu_product", """
        = {direction} | tile of a consumer = {variant} | us = {us:.0f} | cublasLt, us = {row["cublasLt us"]:.0f}
        times as fast as cublasLt = {row["cublasLt us"] / us:.2f}""",
        where="not row.error", choice="Gluon product with GELU, by tile: times as fast as cublasLt's epilogue"),
    "gpu-gluon-ladder": Table("gpu/gluon_ladder", """
        = {" x ".join(map(str, shape))}, {name} | ms = {ms.both:number} | TFLOP/s = {tflops.both:.0f}""",
        choice="attention, forward and backward: TFLOP/s"),
    "gpu-tune": Table("gpu/tune", """
        case = {key} | candidates = {len(value)} | current, ms = {ms:.4f} | fastest, ms = {value[0].ms:.4f}
        current / fastest = {ms / value[0].ms:.3f}""", each="* value", where='label == "in use"',
        choice="attention's tiles; 1 forward, 2, 3 the kernels of backward, 4 all: time / time of the fastest tile"),
    "gpu-checkpoints": Table("gpu/checkpoints", f"""
        = {CODE} | ms per step = {{totals.median / steps * 1e3:.2f}}
        time of this row / time without checkpoints = {{times:ratio 3}}""",
        choice="199 steps of GPT-2 124M, 1.5 GB saved every 50 steps: time / time without checkpoints"),
    "ranks-idle": Table("ranks/collectives_idle", """
        {ranks - 1} of {ranks} ranks are = {name} | GFLOP/s of rank 0 = {gflops:s 3}
        relative to the row "asleep" = {share_of_speed:percent 0}""",
        choice="rank 0 multiplies matrices on two cores while 7 ranks wait: its speed / its speed while they sleep"),
    "ranks-sparse": Table("ranks/sparse", """
        = V = {vocab_size:,}, {name}{", %d tokens" % distinct if row.distinct else ""}
        MB sent per rank = {max(bytes_sent):MB .3f} | ms = {seconds:ms 3}
        time of this row / time with all rows = {times_all_rows:ratio}""",
        choice="`--sparse-embedding`, 4 ranks, distinct tokens from few to all: time / time with all rows"),
    "ranks-update-behind": Table("ranks/update_behind", """
        = {ranks} ranks, {name} | ms = {seconds:ms}
        time of this row / time of the first row = {times_after:ratio 3}""",
        choice="AdamW behind each bucket instead of after the last one: time of a step / time now"),
}  # fmt: skip


def choices():
    """(A row for each file of a table with a choice: its last column, as a range for rows of the same name; files)."""
    rows, names = [], []
    for table in (table for table in TABLES.values() if table.choice):
        for record in map(load, table.names()):
            found = {}
            for title, *_, text in (cells.values() for cells in table.filled([record])):
                found.setdefault(title, []).append(text)
            for texts in found.values():
                texts.sort(key=lambda text: float(text.strip(" %")))
            ends = (f"{title} {' to '.join(dict.fromkeys((texts[0], texts[-1])))}" for title, texts in found.items())
            where = f"{record.machine}, {record.commit}"
            rows.append({"measured": table.choice, "machine, commit": where, "result": "; ".join(ends)})
            names.append(record.name)
    return rows, names


# -- the summary of docs/RESULTS.md, of which README has some rows ----------------------------------------------------


def compared(question, section, files, cell, limit="", share="", peer="peer", ratio="{ratio:ratio}", **options):
    """A table of our rows beside PyTorch's. cell: template of "x", ours or the peer. peer: the field with the peer.

    options: of the Table, by default our rows with a "ratio".
    """
    program = f'{{{peer}.name.removeprefix("torch ").replace(" + each step a graph", ", CUDA graph")}}'
    return Table(files, f"""
        question = [{question}](#{section}) | hardware = {{file.machine}}
        ours = {cell.replace("x.", "row.")} | strongest peer = {cell.replace("x.", f"{peer}.")} ({program})
        ratio = {ratio} | limit = {limit} | share of the limit = {share}
        file = `{{file.name}}`, {{file.commit}}""", **{"where": "row.ratio"} | options)  # fmt: skip


MS, MEAN = "{x.seconds:ms} ms", "{x.step.mean:.1f} ms"
TWO_THREADS = {"where": 'row.ratio and threads == 2 and row.case != "recomputing"'}
CPU_STEP = {"limit": "products: {floor.seconds:ms} ms", "share": "{share_of_floor:percent 0}", **TWO_THREADS}
MEANS = {"peer": "base", "name": "{settings}, {name}", "ratio": "{base.step.mean / row.step.mean:.2f}"}
SUMMARY = (
    compared("step, `paper`, 2 threads", "cpu-training-step", ("cpu/train_step", "cpu/train_step_[iz]*"), MS,
             **CPU_STEP),
    compared("step, GPT-2 124M, 4 x 64 tokens, 2 threads", "cpu-training-step", "cpu/train_step_gpt2", MS, **CPU_STEP),
    compared("token, `paper`: {case}, 2 threads", "cpu-decode", ("cpu/decode", "cpu/decode_intel"),
             "{x.token:ms 3} ms", **TWO_THREADS),
    compared("step, `paper`, 2 MPI ranks", "ranks", "ranks/ranks*", MS, "2 x one process",
             '{times_as_fast["stage 0: 1 process, 1 thread"].median / 2:percent 0}'),
    compared(f"{STEP} tokens", "gpu-step", ("gpu/step_gpt2*", "gpu/step_paper*"), MS,
             "peak of the GPU", "{mfu:percent}"),
    compared("attention, {' x '.join(map(str, shape))}", "attention",
             ("gpu/attention", "gpu/attention_h100", "gpu/attention_h100_*"), "{x.ms.both:number} ms",
             "766 TFLOP/s", "{tflops.both / 766:percent 0}", ratio="{ratio.both:ratio}",
             where=f"row.ratio and shape in {MAIN_SHAPES}"),
    compared("token, {preset}, {precision}, {batch} x ({prompt} + {new})", "gpu-decode", "gpu/decode*",
             "{x.token:us} us"),
    compared("GPT-2 124M, bf16, {ranks} GPUs, {title}", "several-gpus",
             ("gpus/scaling_strong", "gpus/scaling_strong_two", "gpus/scaling_16", "gpus/scaling_64"),
             "{x.tokens_per_second / 1e6:.2f} M tokens/s", "{ranks} x one GPU", "{efficiency:percent}", "base",
             "{times_as_fast:ratio}", base='side != "ours"', same="title ranks", each="scaling rows",
             where="row.fastest"),
    compared("GPT-2 1.5B, `{name.partition('GPUs ')[2]}`", "several-gpus", "gpus/sharding", MS, peer="base",
             base='side != "ours"', same="recompute", ratio="{times_as_fast:ratio}",
             where='side == "ours" and zero == 3'),
    compared("all-reduce of 1 GB, {name}, 4 GPUs", "several-gpus", "gpus/collectives", MS, peer="base",
             base='name == "torch, fp32"', same="bytes ranks", ratio="{times_as_fast_as_torch:ratio}",
             each="all_reduce", where='bytes == 1e9 and name in ("nccl, fp32", "canonical, fp32")'),
    compared("attention in PyTorch, 16 x 16384 x 64", "pytorch-with-our-kernels", "torch/attention",
             "{x.both.mean:.3f} ms", peer="base", name="leaderboard / {name}", base='name == "sdpa cudnn"',
             where='name == "ours"', ratio="{base.both.mean / both.mean:.2f}"),
    compared("ReLU(A B + C), {size} rows", "pytorch-with-our-kernels", "torch/matmul_search", "{x.us:.1f} us",
             order="size"),
    compared("step of `xl`, `OverlapDDP`, 2 GPUs", "pytorch-with-our-kernels", "torch/ddp", MEAN,
             base='name == "torch DDP"', where='name == "overlap"', **MEANS),
    compared("step of `xl`, `FSDP`, 2 GPUs", "pytorch-with-our-kernels", "torch/sharding", MEAN,
             base='name == "fully_shard"', where='name == "fsdp"', **MEANS),
)  # fmt: skip

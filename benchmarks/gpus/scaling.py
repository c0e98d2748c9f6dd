"""Do four GPUs train four times as fast as one, and faster than PyTorch's DistributedDataParallel on four GPUs?

One job has all our variants, another one those of PyTorch. A variant uses the first GPU, the first two GPUs, or all
GPUs; while another one trains, it uses GPU memory but no GPU time.

    python -m benchmarks.gpus.scaling                                         # on 1, 2 and 4 GPUs
    python -m benchmarks.gpus.scaling --ranks 1 2 --batch-size 16 --rounds 1  # a quick trial on two GPUs
    python -m benchmarks.gpus.scaling --strong 64 --paper                     # more tables
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED, measure_variants
from benchmarks.harness.script import benchmark
from benchmarks.harness.speedups import marked
from benchmarks.harness.table_format import percent
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import BUCKET_MB
from gpt2core.presets import PRESETS

LEAD_IN = 3  # untimed steps at the start of a round, after which all ranks begin the timed steps at the same time
CORPUS = 1 << 22  # number of random tokens to train on
PAPER_STEPS = 50  # of the paper's run
# Our variants, {name for --ways: options}. On the largest number of GPUs all chosen variants run, on fewer GPUs only
# the first of them, and on one GPU a variant without options.
OUR_VARIANTS = {
    "bucket": {"dp": "bucket"},
    "flat": {"dp": "flat"},
    "zero": {"dp": "flat", "zero": 1},
    "zero-forward": {"dp": "flat", "zero": 1, "zero_gather": "forward"},
    "zero-bf16": {"dp": "flat", "zero": 1, "compress": "bf16"},
    "deterministic": {"dp": "bucket", "deterministic": True},
}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def prepare(module, world, preset, seq_len, variants, **options):
    """Called on every rank by harness/processes.py: build all variants, and return `run_round(name, steps)`.

    module: benchmarks.gpus.ours or benchmarks.peers.torch_ddp. variants: {name: options} of its make_variants().
    """
    config, rng = PRESETS[preset], np.random.default_rng(SEED)
    windows = Windows(rng.integers(0, config.vocab_size, CORPUS), seq_len)
    return round_function(module.make_variants(config, world, windows, variants, **options), world)


def round_function(train_functions, world):
    """`run_round(name, steps)` for the result of make_variants()."""

    def run_round(name, steps):
        """Train the variant `name`; return its measurements: for each field the largest value of all ranks.

        The field "seconds" is the time per step, without the LEAD_IN first steps. "last_loss" is that of rank 0.
        """
        train, measured = train_functions[name], None
        if train is not None:
            train(LEAD_IN)
            started = time.perf_counter()
            measured = train(steps)
            measured["seconds"] = (time.perf_counter() - started) / steps
        root, *others = world.all_gather_object(measured)  # None from ranks that take no part
        of_ranks = [root, *(each for each in others if each is not None)]
        return {key: max(each[key] for each in of_ranks) for key in root} | {"last_loss": root["loss"]}

    return run_round


# -- in the parent process ---------------------------------------------------------------------------------------------


def gpus(count):
    """The text "1 GPU" or "N GPUs"."""
    return f"{count} GPU{'s' * (count > 1)}"


def variant_name(ranks, options):
    """The name of one of our variants: the number of GPUs and the flags of train_gpt2.py for these options."""
    if options.get("dp") == "flat" and "compress" not in options:
        options = {"dp": "flat", "zero": 0, **options}  # in train_gpt2.py, --dp flat without --zero means --zero 1
    names = "dp", "zero", "zero_gather", "compress", "recompute", "bucket_mb"
    flags = [f"--{name.replace('_', '-')} {options[name]}".removesuffix(".0") for name in names if name in options]
    return " ".join([f"ours, {gpus(ranks)}", *flags, *["--deterministic"] * options.get("deterministic", False)])


def variants(gpu_counts, batch_of, our_options, bucket_mb):
    """({name: options} of our variants, {name: options} of PyTorch's), for each number in gpu_counts.

    batch_of(count): the number of sequences in a global batch of `count` GPUs. our_options: [options] of OUR_VARIANTS.
    """
    ours, peers = {}, {}
    for count in gpu_counts:
        sizes = {"ranks": count, "batch_size": batch_of(count)}
        peers[f"DDP, {gpus(count)}" if count > 1 else "torch compiled, 1 GPU"] = sizes
        chosen = our_options if count == max(gpu_counts) else our_options[:1]
        for options in chosen if count > 1 else [{}]:  # one GPU needs no options of data parallelism
            ours[variant_name(count, options)] = dict(sizes, bucket_mb=bucket_mb, **options)
    return ours, peers


def our_job(args, preset, variants):
    """The ProcessSpec of one MPI job with our variants."""
    options = {"preset": preset, "seq_len": seq_len_of(args, preset), "precision": args.precision, "variants": variants}
    ranks = max(each["ranks"] for each in variants.values())
    return ProcessSpec("ours", "benchmarks.gpus.ours", args.threads, options, ranks, mpi=True)


def seq_len_of(args, preset):
    return args.seq_len or PRESETS[preset].block_size


def summarise(results):
    """Do add_speed() for each result of one table, with PyTorch on equally many GPUs; add its efficiency and the text.

    Our fastest result on the most GPUs has "fastest". The text of an efficiency says if other programs have disturbed
    the measurement.
    """
    one_gpu = {result["side"]: result for result in results if result["ranks"] == 1}
    ddp = {result["ranks"]: result for result in results if result["side"] == "DDP"}
    for result in results:
        add_speed(result, ddp.get(result["ranks"]))
        result["efficiency"] = efficiency(result, one_gpu.get(result["side"]))
    checked = {}
    for side in one_gpu:  # the efficiencies of a side have one reference
        of_side = [result for result in results if result["side"] == side]
        checked |= marked({result["name"]: (result["efficiency"]["median"], 1) for result in of_side})
    for result in results:
        text = "" if result["efficiency"] is None else percent(result["efficiency"])
        result["efficiency_text"] = checked[result["name"]].cell(text) if result["name"] in checked else text
    ours = (result for result in results if result["side"] == "ours")
    max(ours, key=lambda result: (result["ranks"], result["tokens_per_second"]))["fastest"] = True


def add_speed(result, peer):
    """Add tokens_per_second and times_as_fast: the time of `peer` / the time of the result, None without a peer."""
    result["tokens_per_second"] = result["batch_size"] * result["seq_len"] / statistics.median(result["seconds"])
    result["times_as_fast"] = peer and paired_ratio(peer["seconds"], result["seconds"])


def efficiency(result, one_gpu):
    """The parallel efficiency: tokens/s per GPU, divided by tokens/s of a run on one GPU in the same round.

    one_gpu: the result of our run, or PyTorch's, on one GPU. Returns a summary, or None if one_gpu is None.
    """
    if one_gpu is None:
        return None
    work = result["batch_size"] / one_gpu["batch_size"] / result["ranks"]  # sequences per GPU, relative to one_gpu
    return paired_ratio([work * seconds for seconds in one_gpu["seconds"]], result["seconds"])


def paper(args):
    """Print the time of the paper's 50 steps on two GPUs, without compilation and capture; return the results."""
    chosen = {variant_name(2, options): dict(ranks=2, batch_size=16, **options) for options in OUR_VARIANTS.values()}
    of_paper = argparse.Namespace(**vars(args) | {"steps_per_round": PAPER_STEPS})
    results = measure_variants(of_paper, [our_job(args, "paper", chosen)])
    for result in results:
        result["totals"] = [PAPER_STEPS * seconds for seconds in result["seconds"]]
    TABLES["gpus-paper"].print({"paper": results})
    return results


def flags_of(ranks, timeout=300, rounds=True, **flags):
    """The flags of a benchmark on several GPUs. rounds: whether there are interleaved rounds; flags: other defaults.

    Every round begins with LEAD_IN untimed steps.
    """
    common = dict(preset="gpt2", precision="bf16", bucket_mb=BUCKET_MB, timeout=timeout, ranks=ranks)
    common |= {"batch_size": dict(type=int, default=16, help="sequences per GPU (default 16)")}
    if rounds:
        common |= dict(rounds=5, steps_per_round=10, threads=4, warm_up=1)
        common |= {"seq_len": dict(type=int, help="tokens per sequence (default: the model's block size)")}
    return common | flags


@benchmark(
    common=flags_of([1, 2, 4], no_ddp=False, no_compile=False),
    batch_size=dict(type=int, nargs="*", default=[64, 16], help="sequences per GPU, a table each (default 64 16)"),
    strong=dict(type=int, metavar="B", help="add a table with a global batch of B at every number of GPUs"),
    paper=dict(action="store_true", help="add a table: seconds of the paper's 50 steps, two GPUs"),
    ways=dict(choices=OUR_VARIANTS, nargs="+", default=list(OUR_VARIANTS), help="our variants (default: all)"),
)
def main(args):
    gpu_counts, seq_len = sorted(set(args.ranks)), seq_len_of(args, args.preset)
    most = max(gpu_counts)
    if args.strong and args.strong % most:
        raise ConfigError(f"--strong {args.strong}: not divisible by {most} GPUs; use a multiple of {most}")
    # {title: batch_of() of variants()}
    tables = {f"{size} x {seq_len} per GPU": lambda count, size=size: count * size for size in args.batch_size}
    if args.strong:
        tables[f"{args.strong} x {seq_len} in total"] = lambda count: args.strong
    results = {"paper": paper(args) if args.paper else None, "scaling": []}
    if args.paper:
        save(results, args)
    for title, batch_of in tables.items():
        ours, peers = variants(gpu_counts, batch_of, [OUR_VARIANTS[name] for name in args.ways], args.bucket_mb)
        specs = [job := our_job(args, args.preset, ours)]
        if not args.no_ddp:
            options = job.options | {"variants": peers, "compiled": not args.no_compile}
            specs.append(replace(job, name="DDP", module="benchmarks.peers.torch_ddp", options=options))
        of_table = measure_variants(args, specs)
        summarise(of_table)
        results["scaling"].append({"title": title, "rows": of_table})
        print(f"\n{args.preset}, {args.precision}")
        TABLES["gpus-scaling"].print({"scaling": results["scaling"][-1:]})
        save(results, args)  # after each table, so that an interrupted run keeps its finished tables

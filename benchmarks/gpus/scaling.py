"""Do four GPUs train four times as fast as one, and faster than PyTorch's DistributedDataParallel on the same four?

Ours is one MPI job and PyTorch's another, and each has all its numbers of GPUs inside: the first GPU alone, the first
two, all. So every row takes its turn in every round, and who waits has a GPU's memory but none of its time.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.contenders import (
    Contender,
    Member,
    Running,
    add_saving,
    paired_ratio,
    play,
    print_table,
    run,
    save,
)
from gpt2core.app.presets import PRESETS
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.data_parallel import BUCKET_MB
from stage1_mpi.launch import choose, launch_line

BENCHMARK = "benchmarks.gpus.scaling"  # how the contenders' processes import this file
SEED = 20260101
LEAD_IN = 3  # untimed steps that begin a turn, and leave the ranks in step
CORPUS = 1 << 22  # random tokens
PAPER_STEPS, PAPER_SECONDS = 50, 0.1
WAYS = {  # of ours, at the largest number of GPUs; the first also at the others
    "bucket": {"dp": "bucket"},
    "flat": {"dp": "flat"},
    "zero": {"dp": "flat", "zero": 1},
    "zero-forward": {"dp": "flat", "zero": 1, "zero_gather": "forward"},
    "zero-bf16": {"dp": "flat", "zero": 1, "compress": "bf16"},
    "deterministic": {"dp": "bucket", "deterministic": True},
}
TARGETS = {64: 0.96, 16: 0.93}  # sequences a GPU: least share of the own 1-GPU rate at 4 GPUs


# -- on the ranks ------------------------------------------------------------------------------------------------------


def prepare(module, world, preset, seq_len, variants, **options):
    """On every rank: return `turn(name, steps)`; all variants live here, and one of them trains at a time."""
    config, rng = PRESETS[preset], np.random.default_rng(SEED)
    windows = Windows(rng.integers(0, config.vocab_size, CORPUS), seq_len)
    trains = module.make_variants(config, world, windows, variants, **options)

    def turn(name, steps):
        """Seconds a step, the slowest rank's, from when all have done one until they have done so many more."""
        train, told = trains[name], None
        if train is not None:
            train(LEAD_IN)
            started = time.perf_counter()
            told = train(steps)
            told["seconds"] = (time.perf_counter() - started) / steps
        root, *others = world.all_gather_object(told)
        everyones = [root, *(each for each in others if each is not None)]
        return {key: max(each[key] for each in everyones) for key in root} | {"loss": root["loss"]}

    return turn


# -- on the one that starts them ---------------------------------------------------------------------------------------


def gpus(count):
    return f"{count} GPU{'s' * (count > 1)}"


def named(ranks, options):
    """What a row of ours is called: the number of GPUs, and the flags of train_gpt2.py."""
    if options.get("dp") == "flat" and "compress" not in options:
        options = {"dp": "flat", "zero": 0, **options}  # there 1 is the default
    names = "dp", "zero", "zero_gather", "compress"
    flags = [f"--{name.replace('_', '-')} {options[name]}" for name in names if name in options]
    return " ".join([f"ours, {gpus(ranks)}", *flags, *["--deterministic"] * options.get("deterministic", False)])


def variants(ranks, batch_of, ways, bucket_mb):
    """({name: options} of ours, {name: options} of PyTorch); batch_of(ranks): the sequences of a global batch."""
    ours, peers = {}, {}
    for count in ranks:
        sizes = {"ranks": count, "batch_size": batch_of(count)}
        peers[f"DDP, {gpus(count)}" if count > 1 else "torch compiled, 1 GPU"] = sizes
        for options in [{}] if count == 1 else ways if count == max(ranks) else ways[:1]:
            ours[named(count, options)] = dict(sizes, bucket_mb=bucket_mb, **options)
    return ours, peers


def jobs(args, preset, ours, peers):
    """The two contenders: a job with all variants of ours, and one with all of PyTorch's."""
    shared = {"preset": preset, "seq_len": args.seq_len or PRESETS[preset].block_size, "precision": args.precision}
    most = max(options["ranks"] for options in ours.values())
    launcher = tuple(launch_line(*choose(), most))
    options = dict(shared, variants=ours)
    yield Contender("ours", "benchmarks.gpus.ours", args.threads, options, ranks=most, launcher=launcher)
    if peers:
        options = dict(shared, variants=peers, compiled=not args.no_compile)
        yield Contender("DDP", "benchmarks.peers.torch_ddp_cuda", args.threads, options, ranks=most)


def measure(args, contenders, steps):
    """Play them all; return one result for each variant, with each round's seconds a step."""
    with ExitStack() as stack:
        members, of_name = [], {}
        for contender in contenders:
            running = stack.enter_context(Running(contender, BENCHMARK, args.timeout))
            seq_len = contender.options["seq_len"]
            for name, options in contender.options["variants"].items():
                members.append(Member(running, name))
                of_name[name] = {"name": name, "who": contender.name, "seq_len": seq_len, **options}
        played = play(members, args.rounds, {"steps": args.warm_up}, {"steps": steps})
    for name, answers in played.items():
        rounds = answers["rounds"]
        of_name[name] |= {
            "seconds": [answer["seconds"] for answer in rounds],
            "last_loss": rounds[-1]["loss"],
            **{key: rounds[-1].get(key) for key in ("bytes_sent", "optimizer_bytes", "messages")},
        }
    return list(of_name.values())


def summarise(results, title):
    """Add medians and ratios (taken within rounds) to the results of one table; return its rows."""
    alone = {result["who"]: result for result in results if result["ranks"] == 1}
    ddp = {result["ranks"]: result for result in results if result["who"] == "DDP"}
    rows = []
    for result in results:
        result["median"], result["min"] = statistics.median(result["seconds"]), min(result["seconds"])
        result["tokens_per_second"] = result["batch_size"] * result["seq_len"] / result["median"]
        result["share_of_one"] = share_of_one(result, alone.get(result["who"]))
        peer = ddp.get(result["ranks"])
        result["times_as_fast"] = None if peer is None else paired_ratio(peer["seconds"], result["seconds"])
        rows.append(
            {
                title: result["name"],
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "tokens/s": f"{result['tokens_per_second']:,.0f}",
                "of its 1 GPU": percent(result["share_of_one"]),
                "x PyTorch": "" if peer is None else f"{result['times_as_fast']:.3f}",
                "MB sent a rank": megabytes(result["bytes_sent"]),
                "optimizer MB a rank": megabytes(result["optimizer_bytes"]),
                "last loss": f"{result['last_loss']:.4f}",
            }
        )
    return rows


def share_of_one(result, one):
    """Tokens a second and GPU, as a share of what one GPU of the same contender does in the same rounds; or None."""
    if one is None:
        return None
    work = result["batch_size"] / one["batch_size"] / result["ranks"]  # of a GPU, compared with the one alone
    return work * paired_ratio(one["seconds"], result["seconds"])


def percent(share):
    return "" if share is None else f"{100 * share:.1f} %"


def megabytes(count):
    return "" if count is None else f"{1e-6 * count:,.1f}"


def verdicts(results, each):
    """One sentence for each of ours at the largest number of GPUs; each: sequences a GPU, None if that is not fixed."""
    most = max(result["ranks"] for result in results)
    by_name = {result["name"]: result for result in results}
    for name, result in by_name.items():
        if result["who"] != "ours" or result["ranks"] != most or most == 1:
            continue
        words = []
        if result["share_of_one"] is not None:
            target = TARGETS.get(each)
            met = "" if target is None else f" (target {percent(target)}: {reached(result['share_of_one'] >= target)})"
            words.append(f"{percent(result['share_of_one'])} of its own 1-GPU rate{met}")
        if result["times_as_fast"] is not None:
            words.append(f"{result['times_as_fast']:.3f} x DDP (target 1: {reached(result['times_as_fast'] > 1)})")
        fast = by_name.get(named(most, WAYS["bucket"]))
        if fast is not None and fast is not result:
            words.append(f"{paired_ratio(result['seconds'], fast['seconds']):.3f} x the time of --dp bucket")
        yield f"{name}: {', '.join(words)}"


def reached(met):
    return "reached" if met else "MISSED"


def paper(args):
    """Total seconds of the paper's 50 steps on two GPUs; what the first two steps compile and record is not in them."""
    chosen = {named(2, options): dict(ranks=2, batch_size=16, **options) for options in WAYS.values()}
    results = measure(args, list(jobs(args, "paper", chosen, {})), PAPER_STEPS)
    rows = []
    for result in results:
        result["totals"] = [PAPER_STEPS * seconds for seconds in result["seconds"]]
        total = statistics.median(result["totals"])
        rows.append(
            {
                f"paper, {args.precision}, {PAPER_STEPS} steps of 16 x {result['seq_len']}": result["name"],
                "seconds": f"{total:.4f}",
                "best": f"{min(result['totals']):.4f}",
                f"target {PAPER_SECONDS} s": reached(total < PAPER_SECONDS),
                "last loss": f"{result['last_loss']:.4f}",
            }
        )
    print_table(rows)
    print(flush=True)
    return results


def parser_of(benchmark, thesis, timeout, of):
    """The flags that all benchmarks of training on GPUs have; `timeout` seconds are the default for `of`."""
    parser = argparse.ArgumentParser(prog=f"python -m {benchmark}", description=thesis.splitlines()[0])
    add, name = parser.add_argument, benchmark.split(".")[-1]
    add("--preset", choices=PRESETS, default="gpt2", help="model (default gpt2)")
    add("--precision", choices=("fp32", "tf32", "bf16"), default="bf16", help="of the arithmetic (default bf16)")
    add("--bucket-mb", type=float, default=BUCKET_MB, help=f"least size of a bucket, 10^6 bytes ({BUCKET_MB:g})")
    add("--timeout", type=int, default=timeout, help=f"seconds that {of} may take (default {timeout})")
    add_saving(add, name)
    return parser


def add_rounds(add, warm_up):
    """The flags of those that take turns."""
    add("--rounds", type=int, default=5, help="turns of each row (default 5)")
    add("--steps-per-round", type=int, default=10, help="timed steps in one turn (default 10)")
    add("--warm-up", type=int, default=1, help=f"timed steps of a first turn that does not count ({warm_up})")
    add("--threads", type=int, default=4, help="threads of each process on the host (default 4)")
    add("--seq-len", type=int, help="tokens per sequence (default: the model's block size)")


def add_sizes(add):
    """The flags of those that look at one number of GPUs."""
    add("--ranks", type=int, default=4, help="GPUs (default 4)")
    add("--batch-size", type=int, default=16, help="sequences a GPU (default 16)")


def parser():
    parser = parser_of(BENCHMARK, __doc__, 300, "one turn, compiling included,")
    add = parser.add_argument
    add_rounds(add, f"1, after {LEAD_IN}")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs (default 1 2 4)")
    add("--batch-size", type=int, nargs="*", default=[64, 16], help="sequences a GPU, a table for each (default 64 16)")
    add("--strong", type=int, metavar="B", help="also a table for a global batch of B, whatever the number of GPUs")
    add("--paper", action="store_true", help="also the paper's 50 steps on two GPUs, in seconds")
    add("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="rows of ours (default: all)")
    add("--no-ddp", action="store_true", help="leave PyTorch out")
    add("--no-compile", action="store_true", help="PyTorch without torch.compile")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    ranks, seq_len = sorted(set(args.ranks)), args.seq_len or PRESETS[args.preset].block_size
    if args.strong and args.strong % max(ranks):
        raise ConfigError(f"--strong {args.strong} is not divisible by {max(ranks)} GPUs")
    tables = [(each, lambda count, each=each: count * each, f"{each} x {seq_len} a GPU") for each in args.batch_size]
    if args.strong:
        tables.append((None, lambda count: args.strong, f"{args.strong} x {seq_len} in all"))
    results = {"paper": None, "scaling": []}

    def keep():  # at once, as the next table may take long
        if not args.no_save:
            save(BENCHMARK, results, args.commit, args.save_as)

    if args.paper:
        results["paper"] = paper(args)
        keep()
    for each, batch_of, title in tables:
        ours, peers = variants(ranks, batch_of, [WAYS[way] for way in args.ways], args.bucket_mb)
        contenders = list(jobs(args, args.preset, ours, {} if args.no_ddp else peers))
        of_table = measure(args, contenders, args.steps_per_round)
        print_table(summarise(of_table, f"{args.preset}, {args.precision}, {title}"))
        print("\n" + "\n".join(verdicts(of_table, each)), flush=True)
        results["scaling"].append({"title": title, "rows": of_table})
        keep()


if __name__ == "__main__":
    run(main)

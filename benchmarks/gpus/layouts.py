"""Have random layouts of ranks one loss curve: equal losses, gradient norms and parameters, bit by bit?

A layout is data, tensor and pipeline parallelism with a schedule, ZeRO 0 to 3, recomputation, and a strategy of data
parallelism. Layouts are drawn at random for each number of ranks, and train the same model on the same batches with
--deterministic. Layouts with the same --tp must have the same bits; with another --tp sums have another order.

    python -m benchmarks.gpus.layouts  # 1, 2 and 4 GPUs
    python -m benchmarks.gpus.layouts --ranks 1 2 --layouts 4  # a quick trial on two GPUs
    python -m benchmarks.gpus.layouts --stage 1 --preset tiny --n-layer 8 --ranks 1 2 4 8 --seq-len 64  # on CPUs
"""

import hashlib
import itertools
from collections import Counter
from dataclasses import asdict, replace

import numpy as np

from benchmarks.harness.report import save
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from benchmarks.ranks.collectives import launch
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import RECOMPUTE, ZERO, ParallelConfig
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.tensor.shards import check_tensor_parallel
from gpt2core.parallel.whole_parameters import parameter_hash
from gpt2core.presets import PRESETS
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend

MICRO_BATCHES = 8
MODELS = (False, 1.0), (True, 0.0)  # (tied, clip)
COLUMNS = """
    = {precision} | tied = {tied} | clip = {clip} | --tp = {tp} | ranks = {" ".join(map(str, ranks))}
    runs = {runs} | with the same bits = {equal} | digest = {digest}"""
BUCKETS = 0.1, 1.0, 25.0  # 10^6 bytes


def layouts(rng, ranks, count, config, stage):
    """`count` different pairs (threads, options of ParallelConfig) of `ranks` ranks; the first one is the default."""

    def choice(values):
        return list(values)[rng.integers(len(values))]

    found = [(1, {})]
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    while len(found) < count:
        tp, pp, threads, zero = choice(divisors), choice(divisors), choice((1, 2) if stage == 1 else (1,)), choice(ZERO)
        options = dict(
            tp=tp, pp=pp, zero=zero, dp=choice(STRATEGIES if zero < 2 else ["flat"]),
            bucket_mb=choice(BUCKETS), recompute=choice(RECOMPUTE),
            pp_schedule=choice(SCHEDULES) if pp > 1 else "1f1b",
            zero_gather=choice(("end", "forward") if zero < 2 else ["end"]),
        )  # fmt: skip
        if (threads, options) not in found and fits(ranks, threads, options, config):
            found.append((threads, options))
        elif ranks == 1 and len(found) > 1:
            break  # one rank has few layouts
    return found


def fits(ranks, threads, options, config):
    """Whether training accepts these options."""
    replicas, rest = divmod(ranks, options["tp"] * options["pp"])
    if rest:
        return False
    try:
        check_tensor_parallel(config, options["tp"])
        ParallelConfig(**options).check_run(config, threads, MICRO_BATCHES // replicas, replicas)
    except ConfigError:
        return False
    return MICRO_BATCHES // replicas % threads == 0


def name_of(case):
    """Text such as "4 ranks: tp=2 zero=1"."""
    default, threads = asdict(ParallelConfig()), case["threads"]
    words = [f"{name}={value}" for name, value in case["options"].items() if value != default[name]]
    return " ".join([f"{case['ranks']} ranks:", *words, *([f"threads={threads}"] if threads > 1 else [])])


def train_all(host, stage, cases, *sizes):
    """The cases with the digest of their curve, and whether all ranks of this job have it; host: an MpiCommunicator."""
    if stage == 3:
        from stage2_cuda.cuda_backend import CudaBackend
        from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

        world = NcclCommunicator(host)
        world.use_transport("nccl")
    else:
        world = host
    world.use_collectives("canonical")
    found = []
    for case in cases:
        if stage == 3:
            backends = [CudaBackend(case["precision"], deterministic=True)]
        else:
            backends = [NumpyBackend(case["precision"]) for _ in range(case["threads"])]
        digest = train(world, backends, case, *sizes)
        same = host.all_gather_object(digest).count(digest) == host.size
        found.append(case | {"name": name_of(case), "digest": digest, "same": same})
    return found


def train(world, backends, case, config, batch_size, seq_len, steps):
    """The digest of losses, norms and the hash of the parameters after `steps` steps."""
    trainer = FastTrainer(
        replace(config, tied=case["tied"]), backends, batch_size=batch_size, seq_len=seq_len, world=world, seed=0,
        micro_batches=MICRO_BATCHES, optimizer=dict(clip=case["clip"], weight_decay=0.1),
        parallel=ParallelConfig(**case["options"]),
    )  # fmt: skip
    windows = Windows(np.random.default_rng(0).integers(0, config.vocab_size, 20_000), seq_len)
    reports = [trainer.step(read_batch(trainer, windows), 1e-3 / (1 + i)) for i in range(steps)]
    curve = [(step.loss.hex(), step.grad_norm.hex()) for step in reports]
    return hashlib.sha256(repr((curve, parameter_hash(trainer))).encode()).hexdigest()


def results_of(runs):
    """One row for each precision, model and --tp; runs: from train_all()."""
    rows, groups = [], {}
    for run in runs:
        key = run["precision"], run["tied"], run["clip"], run["options"].get("tp", 1)
        groups.setdefault(key, []).append(run)
    for values, group in sorted(groups.items()):
        digest = Counter(run["digest"] for run in group).most_common(1)[0][0]
        different = [run["name"] for run in group if run["digest"] != digest or not run["same"]]
        row = {"ranks": sorted({run["ranks"] for run in group}), "layouts": [run["name"] for run in group]}
        row |= {"runs": len(group), "equal": len(group) - len(different)}
        row |= dict(zip(("precision", "tied", "clip", "tp"), values, strict=True))
        rows.append(row | {"digest": digest[:16], "different": different})
    return rows


def summary(args, results):
    """Rows of the table "parity" of docs/RESULTS.md: all runs of a precision."""
    for precision in dict.fromkeys(row["precision"] for row in results):
        rows = [row for row in results if row["precision"] == precision]
        yield {
            "title": f"random layouts, `{args.preset}`, {args.steps} steps, {precision}",
            "ranks": sorted({ranks for row in rows for ranks in row["ranks"]}),
            "runs": sum(row["runs"] for row in rows),
            "equal": sum(row["equal"] for row in rows),
            "deviation": 0.0,
        }


@benchmark(
    common=dict(stage=3, preset="small", ranks=[1, 2, 4], batch_size=16, seq_len=256, steps=20, timeout=500, seed=0),
    n_layer=dict(type=int, help="layers (default: those of the preset)"),
    precision=dict(nargs="+", choices=("fp32", "bf16"), help="default fp32 bf16, in stage 1 fp32"),
    layouts=dict(type=int, default=6, help="layouts for each model and number of ranks (default 6)"),
)
def main(args):
    precisions = args.precision or (("fp32",) if args.stage == 1 else ("fp32", "bf16"))
    config, rng, runs = PRESETS[args.preset], np.random.default_rng(args.seed), []
    config = replace(config, n_layer=args.n_layer or config.n_layer)
    for ranks in args.ranks:
        cases = [
            dict(precision=precision, tied=tied, clip=clip, threads=threads, options=options, ranks=ranks)
            for precision, (tied, clip) in itertools.product(precisions, MODELS)
            for threads, options in layouts(rng, ranks, args.layouts, config, args.stage)
        ]
        job = args.stage, cases, config, args.batch_size, args.seq_len, args.steps
        runs += launch(ranks, "train_all", *job, timeout=args.timeout, benchmark=args.benchmark)
    results = results_of(runs)
    Table("", COLUMNS).print(results)
    different = [f"{row['precision']}, tp {row['tp']}: {name}" for row in results for name in row["different"]]
    print(f"{len(runs) - len(different)} of {len(runs)} runs have the bits of their row", *different, sep="\n")
    save({"summary": list(summary(args, results)), "groups": results}, args)
    return 1 if different else 0

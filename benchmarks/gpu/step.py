"""Is a training step on the GPU faster than PyTorch's, compiled or eager, and how much memory does it use?

python -m benchmarks.gpu.step --preset gpt2                              # one model beside PyTorch
python -m benchmarks.gpu.step --preset paper --precision bf16 fp32 tf32  # three precisions
python -m benchmarks.gpu.step --preset paper --no-compile --rounds 1     # a quick trial
"""

import functools
import itertools
import statistics
import time
from dataclasses import replace

import numpy as np

from benchmarks.gpu.timing import LEAD_IN, time_calls
from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import add_peer, nvidia_smi, paired_ratio, round_medians
from benchmarks.harness.rounds import SEED, measure_specs, random_batch
from benchmarks.harness.script import benchmark
from gpt2core.architecture import flops_per_token
from gpt2core.presets import PRESETS
from stage2_cuda.runtime.peak_flops import peak_flops

OURS, RECOMPUTING = "ours", "ours, --recompute block"
PRECISIONS = "bf16", "tf32", "fp32"
TUNED = {"compiled": True, "autotune": True, "attention": "cudnn"}
PEERS = {  # {name of a PyTorch program for --peers: (title, options of CudaSteps in peers/torch_gpt2_cuda.py)}
    "compiled": ("torch compiled", {"compiled": True}),
    "eager": ("torch eager", {"compiled": False}),
    "overhead": ("torch compiled, reduce-overhead", {"compiled": True, "graph": "trees"}),  # PyTorch's graph trees
    "graph": ("torch compiled + whole-step graph", {"compiled": True, "graph": "step"}),
    # products by cuBLAS or Triton, whichever is faster
    "autotune": ("torch compiled, max-autotune", {"compiled": True, "autotune": True}),
    "cudnn": ("torch compiled, cuDNN attention", {"compiled": True, "attention": "cudnn"}),
    "autotune-cudnn": ("torch compiled, max-autotune, cuDNN attention", TUNED),
    "autotune-cudnn-graph": (
        "torch compiled, max-autotune, cuDNN attention + whole-step graph",
        TUNED | {"graph": "step"},
    ),
}
# preset: (sequences per step, steps per round, names of the peers); other presets use the entry of gpt2
DEFAULTS = {"gpt2": (64, 10, ["compiled"]), "paper": (16, 200, ["graph", "compiled", "eager"])}


def prepare(module, preset, vocab_size, batch_size, seq_len, unread, **options):
    """Called in each process. Return `run_round(steps)`, which trains on fresh random tokens and times every step.

    module: the imported Python module that is measured; its CudaSteps is built in the first round. unread: whether a
    round has `steps` further steps, whose losses are read only at the end of the round.
    """
    build = functools.cache(lambda: module.CudaSteps(config_of(preset, seq_len), batch_size, seq_len, **options))
    rng, bytes_before = np.random.default_rng(SEED), functools.cache(driver_bytes)  # the same tokens in every process

    def run_round(steps):
        before, step, losses = bytes_before(), build(), []
        # Every process draws the same number of batches; only PyTorch's, with unread=True, use the last `steps`.
        all_batches = [random_batch(rng, vocab_size, batch_size, seq_len) for _ in range(LEAD_IN + 2 * steps)]
        # This project's CudaSteps needs the batches in advance, as from a data loader, to begin a step before it reads
        # the loss of the previous one. PyTorch's CudaSteps does not: its copies to the GPU are asynchronous.
        if hasattr(step, "announce"):
            step.announce(all_batches if unread else all_batches[: LEAD_IN + steps])
        seconds = time_calls(lambda batch: losses.append(step(*batch)), all_batches[: LEAD_IN + steps])
        answer = {"seconds": seconds, "losses": losses, "unread_seconds": None, **step.memory()}
        if unread:
            started = time.perf_counter()
            unread_losses = [step(*batch, wait=False) for batch in all_batches[LEAD_IN + steps :]]
            answer["losses"] += [float(loss) for loss in unread_losses]
            answer["unread_seconds"] = (time.perf_counter() - started) / steps
        # the allocated memory, with the CUDA context; of this process only in the first round
        return dict(answer, driver_bytes=None if before is None else driver_bytes() - before)

    return run_round


def config_of(preset, seq_len):
    """The preset's GPT2Config, with a larger block size if `seq_len` exceeds it."""
    config = PRESETS[preset]
    return replace(config, block_size=max(config.block_size, seq_len))


def driver_bytes():
    """The device memory in use by all processes; None if nvidia-smi does not report it."""
    used = nvidia_smi("memory.used")
    return sum(int(row[0]) for row in used) << 20 if used and all(row[0].isdigit() for row in used) else None


def defaults(args, preset):
    """(sequences per step, steps per round, names of the peers) of the flags, or else of DEFAULTS."""
    given = args.batch_size, args.steps_per_round, args.peers
    return [mine or other for mine, other in zip(given, DEFAULTS.get(preset, DEFAULTS["gpt2"]), strict=True)]


def process_specs(args, preset, precision):
    """Yield a ProcessSpec for each row of a table: this project's programs, then PyTorch's in the order of --peers."""
    config, (batch_size, _, peers) = PRESETS[preset], defaults(args, preset)
    sizes = {"preset": preset, "vocab_size": config.vocab_size, "batch_size": batch_size}
    sizes |= {"seq_len": args.seq_len or config.block_size, "precision": precision}
    for name, options in {OURS: {}, RECOMPUTING: {"recompute": "block"}}.items():
        if name == OURS or args.recompute:
            yield ProcessSpec(name, "benchmarks.harness.ours", args.threads, dict(sizes, unread=False, **options))
    for peer in peers:
        title, options = PEERS[peer]
        if not (args.no_compile and options["compiled"]):
            options = dict(sizes, unread=True, **options)
            yield ProcessSpec(title, "benchmarks.peers.torch_gpt2_cuda", args.threads, options)


def measure(args, preset, precision):
    """Measure one preset and precision; return one result for each program, with the seconds of every step."""
    specs = list(process_specs(args, preset, precision))
    measured = measure_specs(specs, args, {"steps": args.warm_up}, {"steps": defaults(args, preset)[1]})
    results = []
    for spec in specs:
        warm_up, rounds = measured[spec.name]["warm_up"], measured[spec.name]["rounds"]
        result = {"name": spec.name, "options": spec.options, "warm_up_seconds": warm_up["seconds"]}
        result |= {field: [each[field] for each in rounds] for field in ("seconds", "unread_seconds")}
        result |= {field: rounds[-1].get(field) for field in ("allocated_bytes", "held_bytes")}
        results.append(result | {"last_loss": rounds[-1]["losses"][-1], "driver_bytes": warm_up["driver_bytes"]})
    return results


def summarise(results):
    """Add minimum, tokens/s, MFU and speed ratios to the results of one table.

    MFU is the model-FLOPs utilisation. A ratio is computed from the median step times of the same round.
    """
    options, peers = results[0]["options"], results[1:]
    tokens = options["batch_size"] * options["seq_len"]
    flops = tokens * flops_per_token(config_of(options["preset"], options["seq_len"]), options["seq_len"])
    peak = peak_flops((nvidia_smi("name") or [[""]])[0][0], options["precision"])
    medians = {result["name"]: round_medians(result["seconds"]) for result in results}
    for result in results:
        all_steps, own = sum(result["seconds"], []), medians[result["name"]]
        median, result["min"] = statistics.median(all_steps), min(all_steps)
        result["tokens_per_second"] = tokens / median
        result["mfu"] = peak and flops / median / peak
        result["times_as_fast"] = {peer["name"]: paired_ratio(medians[peer["name"]], own) for peer in peers}
        if not any(result["unread_seconds"]):  # this project's result; its losses are always read at every step
            result["times_as_fast_as_unread"] = {
                peer["name"]: paired_ratio(peer["unread_seconds"], own) for peer in peers if any(peer["unread_seconds"])
            }
    add_peer(results[0], peers, results[0]["times_as_fast"])


TITLES = "; ".join(f"{name}: {title}" for name, (title, _) in PEERS.items())


@benchmark(
    "gpu-step",
    common=dict(threads=4, rounds=7, warm_up=3, timeout=500, no_compile=False),
    preset=dict(choices=PRESETS, nargs="+", default=["gpt2"], help="models, one table for each (default gpt2)"),
    precision=dict(choices=PRECISIONS, nargs="+", default=["bf16"], help="one table for each (default bf16)"),
    batch_size=dict(type=int, help="sequences per step (default 64; for preset paper: 16)"),
    seq_len=dict(type=int, help="tokens per sequence; may exceed the block size (default: the block size)"),
    peers=dict(choices=PEERS, nargs="+", help=f"{TITLES} (default compiled; for preset paper: graph compiled eager)"),
    recompute=dict(action="store_true", help="also measure this project's program with --recompute block"),
    steps_per_round=dict(type=int, help="timed steps of each process in a round (default 10; for preset paper: 200)"),
)
def main(args):
    for preset, precision in itertools.product(args.preset, args.precision):
        results = measure(args, preset, precision)
        summarise(results)
        yield results

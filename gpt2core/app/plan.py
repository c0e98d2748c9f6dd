"""`python -m gpt2core.app.plan`: list the layouts of a model that fit into the memory, the fastest first."""

import json
import subprocess
import sys
import time
from pathlib import Path

from gpt2core.app.command import run_command
from gpt2core.app.host_memory import available_memory
from gpt2core.app.planning.layouts import Devices, estimates
from gpt2core.app.planning.machine import CALIBRATED, calibration_file, h100, host_machine, save_calibration
from gpt2core.app.settings.definitions import PRECISIONS, recipe
from gpt2core.app.settings.flag_parser import Parser
from gpt2core.app.settings.setting_fields import LARGEST, flag
from gpt2core.architecture import parameter_count
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.config import ParallelConfig
from gpt2core.presets import PRESETS
from gpt2core.threads import cores_of_process

ROOT = Path(__file__).resolve().parents[2]
LAUNCH, CALIBRATE = ["-m", "stage1_mpi.launch", "-n"], ["--", "-m", "stage1_mpi.calibrate"]
GPU_BATCH = 512  # sequences: with 1,024 tokens each the half million tokens per step of GPT-2's size
GPU_MEMORY = 80.0  # 10^9 bytes of an H100
LIMIT = 65536  # ranks; a larger number is a typing error
TIMEOUT = 300  # seconds of a calibration
SHOWN = 5  # layouts


def main(arguments=None):
    run_command(Solo, lambda world: plan(parser().parse_args(arguments)))


def parser():
    examples = [
        ("--preset gpt2 --gpus 8", "on one host with 8 H100"),
        ("--calibrate", "measure this machine once, for --ranks"),
        ("--preset tiny --ranks 2", "on CPU ranks of this machine"),
    ]
    result = Parser("List the ways to divide training over ranks, with their predicted memory and time.", examples)
    add = result.add_argument
    add("--preset", default="gpt2", help=f"model: {', '.join(PRESETS)} (default gpt2)")
    add("--gpus", type=int, metavar="N", help="plan for stage 3, on N H100 GPUs in hosts of 8")
    add("--ranks", type=int, metavar="N", help="plan for stage 1, on N ranks of one thread on this host")
    add("--gpu-memory", type=float, metavar="GB", help=f"memory of a GPU in 10^9 bytes (default {GPU_MEMORY:g})")
    add("--batch-size", type=int, metavar="B", help="sequences per step over all ranks (default: see docs/USAGE.md)")
    add("--seq-len", type=int, metavar="T", help="tokens per sequence (default: the model's block size)")
    add("--precision", help="precision on GPUs: " + ", ".join(PRECISIONS) + " (default bf16)")
    add("--calibrate", action="store_true", help="measure 2 and 4 ranks of this machine and save the constants")
    return result


def plan(args):
    """Run the command with the parsed flags; returns the exit code."""
    if args.calibrate and args.gpus is args.ranks is None:
        if vars(args) != vars(parser().parse_args(["--calibrate"])):
            raise ConfigError(
                "--calibrate without --ranks and --gpus takes no other flag: add --ranks N to plan as well"
            )
        calibrate()
        return 0
    check(args)
    if args.calibrate:
        calibrate()
    config, devices = PRESETS[args.preset], devices_of(args)
    machine = machine_for(devices)
    batch_size = args.batch_size or default_batch(args.preset, devices)
    seq_len = args.seq_len or config.block_size
    found, count, least = estimates(config, devices, machine, batch_size, seq_len)
    if not found:
        raise ConfigError(too_large(args, devices, least))
    print("\n".join(report(args, devices, machine, batch_size, seq_len, found, count)))
    return 0


def check(args):
    """Raise ConfigError for flags that do not fit together or that have a wrong value."""
    if args.preset not in PRESETS:
        raise ConfigError(f"--preset {args.preset} is unknown: choose from {', '.join(PRESETS)}")
    given = {name: value for name in ("gpus", "ranks") if (value := getattr(args, name)) is not None}
    if len(given) != 1:
        what = "--gpus and --ranks exclude each other" if given else "the number of ranks is missing"
        raise ConfigError(f"{what}: give --gpus N for stage 3, or --ranks N for stage 1")
    config = PRESETS[args.preset]
    sizes = given | {name: value for name in ("batch_size", "seq_len") if (value := getattr(args, name)) is not None}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{flag(name)} {value} must be at least 1")
    for name, value in sizes.items():
        if value > (most := LIMIT if name in given else LARGEST):
            raise ConfigError(f"{flag(name)} {value} is too large: the largest value is {most}")
    if (args.seq_len or 1) > config.block_size:
        raise ConfigError(
            f"--seq-len {args.seq_len} exceeds the model's block of {config.block_size} tokens: use --seq-len "
            f"{config.block_size}"
        )
    check_gpus(args, given)


def check_gpus(args, given):
    """check() for the flags of GPUs. given: {"gpus" or "ranks": their number}."""
    if "ranks" in given and (args.gpu_memory is not None or args.precision):
        raise ConfigError("--gpu-memory and --precision are for --gpus, and this plan is for --ranks: omit them")
    if args.precision not in (None, *PRECISIONS):
        raise ConfigError(f"--precision {args.precision} is unknown: choose from {', '.join(PRECISIONS)}")
    if not 0 < (args.gpu_memory or GPU_MEMORY) < float("inf") or args.gpu_memory == 0:
        raise ConfigError(f"--gpu-memory {args.gpu_memory:g} must be above 0 and finite")


def devices_of(args):
    if args.gpus is None:
        return Devices(args.ranks, available_memory() / args.ranks, True, "fp32")
    return Devices(args.gpus, 1e9 * (args.gpu_memory or GPU_MEMORY), False, args.precision or "bf16")


def machine_for(devices):
    """The Machine with the constants of time; raises ConfigError if CPU ranks are not calibrated."""
    if not devices.on_host:
        return h100(devices.precision)
    machine = host_machine(calibration_file(), devices.count)
    if machine is None:
        raise ConfigError("--ranks needs constants of this machine: measure them with --calibrate, which takes seconds")
    return machine


def default_batch(preset, devices):
    """The batch size of the preset's recipe, or GPU_BATCH on GPUs, rounded up to a multiple of the ranks."""
    wanted = recipe(preset)["batch_size"] if devices.on_host else GPU_BATCH
    return -(-wanted // devices.count) * devices.count


def calibrate():
    """Measure the constants of this machine and save them; prints where.

    Each number of ranks in CALIBRATED is measured, if each rank has a core; two ranks in any case.
    """
    if (path := calibration_file()) is None:
        raise ConfigError("--calibrate: there is no home directory in which the constants can be saved")
    save_calibration({}, path, 0)  # raises an error before the measurement if the file cannot be written
    start = time.perf_counter()
    counts = [count for count in CALIBRATED if count == min(CALIBRATED) or count <= len(cores_of_process())]
    for count in counts:
        save_calibration(constants(count), path, count)
    measured, seconds = " and ".join(map(str, counts)), time.perf_counter() - start
    print(f"calibrated with {measured} ranks in {seconds:.0f} s: {path}", flush=True)


def constants(count):
    """{name: list of floats} that stage1_mpi/calibrate.py measures on so many ranks; raises ConfigError if it fails."""
    command, ranks = [sys.executable, *LAUNCH, str(count), *CALIBRATE], f"{count} ranks"
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--calibrate: {ranks} did not end within {TIMEOUT} s: check `make doctor`") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"--calibrate: {ranks} cannot run here: {reason.removeprefix('error: ')}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def too_large(args, devices, least):
    """The error of a model that fits in no layout."""
    what, device = (counted(devices.count, "rank"), "a rank has") if devices.on_host else (
        counted(devices.count, "GPU"), "a GPU has")  # fmt: skip
    more = "--ranks on more hosts" if devices.on_host else "more --gpus or GPUs with more memory"
    return (
        f"{args.preset} on {what} needs at least {gb(least)} on each, but {device} {gb(devices.memory)}: use {more}, "
        f"a smaller --batch-size or --seq-len, or a smaller --preset"
    )


def gb(count):
    return f"{count / 1e9:.2f} GB"


# -- the report --------------------------------------------------------------------------------------------------------

CLOSE = 0.01  # a difference of predicted times that is too small to be a reason
COLUMNS = f"{'dp':>5} {'tp':>3} {'pp':>3} {'schedule':>12} zero recompute micro {'memory':>9} {'step':>10}"


def report(args, devices, machine, batch_size, seq_len, found, count):
    """The lines of the plan."""
    config, best = PRESETS[args.preset], recommended(found, devices)
    kind = "rank" if devices.on_host else "GPU"
    yield f"{args.preset}: {parameter_count(config):,} parameters, {batch_size} x {seq_len} tokens per step"
    yield f"{counted(devices.count, kind)} with {gb(devices.memory)} each; times: {machine.name}"
    yield f"{counted(count, 'layout')}, of which {len(found)} fit; the fastest:"
    yield COLUMNS
    yield from map(row, found[:SHOWN])
    yield "the recommended one, in ms: " + ", ".join(f"{term} {1e3 * s:.2f}" for term, s in best.seconds.items())
    yield f"recommended: {flags_of(args, best, devices)}"
    yield f"why: {reason(best, found)}"


def recommended(found, devices):
    """Of the layouts that are at most CLOSE slower than the fastest one, that with the fewest options."""
    close = [each for each in found if each.total <= (1 + CLOSE) * found[0].total]
    return min(close, key=lambda each: (len(changed(each.layout, devices)), each.layout.parallel.zero, each.total))


def changed(layout, devices):
    """The options of the ParallelConfig of a layout that are not the default."""
    # resolve_rank_flags() makes --zero 1 the default of several replicas on GPUs
    default = ParallelConfig(zero=int(layout.replicas > 1 and not devices.on_host))
    return [name for name, value in vars(layout.parallel).items() if value != getattr(default, name)]


def row(each):
    layout, parallel = each.layout, each.layout.parallel
    name = "-" if parallel.pp == ParallelConfig.pp else f"{parallel.pp_schedule} {parallel.chunks}"
    return (
        f"{layout.replicas:5} {parallel.tp:3} {parallel.pp:3} {name:>12} {parallel.zero:4} {parallel.recompute:>9} "
        f"{layout.count:5} {gb(each.memory):>9} {1e3 * each.total:7.1f} ms"
    )


def flags_of(args, each, devices):
    """The flags of train_gpt2.py for a layout of the plan with the flags `args`."""
    layout, parallel = each.layout, each.layout.parallel
    options = {"preset": args.preset, "batch_size": layout.batch_size, "micro_batches": layout.micro_batches}
    options |= {"seq_len": args.seq_len} if args.seq_len else {}
    options |= {"threads": layout.threads} if devices.on_host else {"precision": devices.precision}
    given = changed(layout, devices)
    options |= {name: getattr(parallel, name) for name in ("tp", "pp", "zero", "recompute") if name in given}
    if "pp" in given:
        options |= {"pp_schedule": parallel.pp_schedule, "chunks": parallel.chunks}
    words = [f"{flag(name)} {value}" for name, value in options.items()]
    ordered = devices.on_host and not layout.micro_batches & (layout.micro_batches - 1)
    return " ".join(words + ["--no-deterministic"] * (devices.on_host and not ordered))


def reason(best, found):
    """One sentence: by which term the best layout is faster than the next one that differs in more than memory."""
    if best is not found[0]:
        return f"no layout is more than {CLOSE:.0%} faster, and of those as fast as it, it needs the fewest options."
    others = [each for each in found[1:] if each.layout.parallel != best.layout.parallel and each.total > best.total]
    if not others:
        return "no other layout that fits has another time."
    other, extra = others[0], {}
    for term in best.seconds | other.seconds:
        extra[term] = other.seconds.get(term, 0.0) - best.seconds.get(term, 0.0)
    parallel, more = other.layout.parallel, other.total / best.total - 1
    name = f"{other.layout.replicas} data x {parallel.tp} tensor x {parallel.pp} pipeline ranks, zero {parallel.zero}"
    return (
        f"it has the shortest predicted step; the next one ({name}, recompute {parallel.recompute}) takes {more:.1%} "
        f"longer, mostly because of {max(extra, key=extra.get)}."
    )


if __name__ == "__main__":
    main()

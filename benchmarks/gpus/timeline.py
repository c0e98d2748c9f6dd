"""Which kernels run on the compute and communication streams of a GPU during one step, without and with buckets?

The figure shows one replay of a step's CUDA graph on rank 0. CUPTI, NVIDIA's profiling library, reports every kernel of
a graph, but not the stream on which the kernel was captured. So this script assigns each kernel to one of the three
lanes of the figure. Kernels of NCCL and of the canonical sum are in the lane "communication". The other kernels are in
the lane "compute", or in "compute, concurrent" if they start while a kernel of the lane "compute" runs. The profiler
slows each kernel a little, so the step takes longer than in the other benchmarks.

    python -m benchmarks.gpus.timeline                           # on four GPUs
    python -m benchmarks.gpus.timeline --ranks 2 --preset paper  # a quick trial on two GPUs
"""

import numpy as np

from benchmarks.gpu.profile import union_length
from benchmarks.gpus.scaling import flags_of
from benchmarks.harness.drawing import draw_timeline
from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import SEED
from benchmarks.harness.script import benchmark
from benchmarks.ranks.collectives import launch
from gpt2core.data import Windows
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.presets import PRESETS
from gpt2core.tracing.trace_file import Process, Span, write_trace
from stage2_cuda.runtime.cupti import COMMUNICATE, LANES, Activity, lanes_of, open_cupti, recorded, short

COLOURS = ("tab:blue", "tab:cyan", "tab:red")  # of LANES


def steps_of(host, preset, precision, variants):
    """Profile one replayed step of each variant. Return {name: [fields of an Activity]} on rank 0, else None.

    An Activity is a kernel with its start and duration in microseconds.
    """
    import torch  # on every rank and before CuPy, so that all ranks use PyTorch's NCCL

    torch.cuda.set_device(host.local_rank)
    if host.is_root:
        open_cupti()
    from benchmarks.gpus.ours import make_variants
    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world, config = NcclCommunicator(host), PRESETS[preset]
    world.use_transport("nccl")
    tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, 1 << 20)
    windows = Windows(tokens, config.block_size)
    train_functions = make_variants(config, world, windows, variants, precision)
    steps = {}
    for name, train in train_functions.items():
        train(4)  # compiles, captures, and replays twice
        host.barrier()
        if host.is_root:
            steps[name] = [tuple(activity) for activity in last_of_two(recorded(lambda train=train: train(1), 2))]
        else:
            train(2)
        host.barrier()
    return steps if host.is_root else None


def last_of_two(activities):
    """The activities of the second of two profiled steps: those after the longest time without a kernel."""
    gaps, end = [], activities[0].start
    for activity in activities:
        gaps.append(activity.start - end)
        end = max(end, activity.start + activity.duration)
    return activities[int(np.argmax(gaps)) :]


def processes_of(steps):
    """The steps {name: lanes_of()} as processes of a trace: each step is a process."""
    processes = [Process(name, {title: [] for title in LANES}) for name in steps]
    for process, placed in zip(processes, steps.values(), strict=True):
        for lane, each in placed:
            process.lanes[LANES[lane]].append(Span(short(each.name), each.start, each.duration))
    return processes


def times_of(placed):
    """The times of a step in milliseconds. placed: the activities of the step, from lanes_of().

    hidden_ms is the time of the communication that overlaps with computation.
    """
    compute_spans, communication_spans = [], []
    for lane, activity in placed:
        spans = communication_spans if lane == COMMUNICATE else compute_spans
        spans.append((activity.start, activity.start + activity.duration))
    compute, communication = union_length(compute_spans), union_length(communication_spans)
    both = compute + communication - union_length(compute_spans + communication_spans)
    end = max(activity.start + activity.duration for _, activity in placed)
    return {
        "step_ms": end / 1e3,
        "compute_ms": compute / 1e3,
        "communication_ms": communication / 1e3,
        "hidden_ms": both / 1e3,
        "kernels": len(placed),
    }


def plot(steps, path):
    """Draw the steps {name: lanes_of()}: one panel for each step, with three lanes, on a common time axis."""
    spans = {}
    for name, lanes in processes_of(steps):
        lanes = {lane: [(each.start / 1e3, each.duration / 1e3) for each in found] for lane, found in lanes.items()}
        spans[f"{name}: {times_of(steps[name])['step_ms']:.1f} ms"] = lanes
    draw_timeline(path, dict(zip(LANES, COLOURS, strict=True)), spans)


@benchmark(
    common=flags_of(4, 200, rounds=False),
    dp=dict(choices=STRATEGIES, nargs="+", default=["naive", "bucket"], help="one panel each (default naive bucket)"),
)
def main(args):
    sizes = {"ranks": args.ranks, "batch_size": args.ranks * args.batch_size, "bucket_mb": args.bucket_mb}
    variants = {f"--dp {dp}, {args.ranks} GPUs": dict(sizes, dp=dp) for dp in args.dp}
    options = args.preset, args.precision, variants
    profiled = launch(args.ranks, "steps_of", *options, timeout=args.timeout, benchmark=args.benchmark)
    steps = {name: lanes_of([Activity(*fields) for fields in activities]) for name, activities in profiled.items()}
    times = {name: times_of(placed) for name, placed in steps.items()}
    TABLES["gpus-timeline"].print(times)
    path = save(times, args)
    trace = path.with_name(f"{path.stem}_trace.json")
    write_trace(trace, processes_of(steps))
    plot(steps, path.with_suffix(".png"))
    print(f"Also written: {trace.name} (open it in ui.perfetto.dev) and {path.stem}.png.")

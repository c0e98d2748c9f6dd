"""Which kernels run on the compute and communication streams of a GPU during one step, without and with buckets?

The figure shows a replayed graph on rank 0. CUPTI reports every kernel of a graph, but not the stream on which it was
captured. So kernels of NCCL and of the canonical sum count as communication; other kernels go to the first line, or to
the second if they overlap one on the first. The profiler slows each kernel a little, so the step is longer than a timed
one.
"""

import json
import re

import numpy as np

from benchmarks.gpu.profile import Activity, open_cupti, recorded, short
from benchmarks.gpus.scaling import add_sizes, parser_of
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import print_table, save
from benchmarks.ranks.collectives import launch
from gpt2core.app.presets import PRESETS
from gpt2core.data import Windows
from gpt2core.parallel.data_parallel import STRATEGIES

BENCHMARK = "benchmarks.gpus.timeline"  # the name under which the ranks import this file
SEED = 20260101
COMMUNICATION = re.compile("nccl|tree_sum", re.IGNORECASE)
STREAMS = ("compute", "compute, concurrent", "communication")
COLOURS = ("tab:blue", "tab:cyan", "tab:red")


# -- on the ranks ------------------------------------------------------------------------------------------------------


def steps_of(host, preset, precision, variants):
    """{name: [(start, duration, kernel) of one replayed step, in microseconds]} on rank 0, None elsewhere."""
    import torch  # on every rank and before CuPy, so that all use PyTorch's NCCL

    torch.cuda.set_device(host.local_rank)
    if host.is_root:
        open_cupti()
    from benchmarks.gpus.ours import make_variants
    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    world, config = NcclCommunicator(host), PRESETS[preset]
    world.use_transport("nccl")
    tokens = np.random.default_rng(SEED).integers(0, config.vocab_size, 1 << 20)
    windows = Windows(tokens, config.block_size)
    trains = make_variants(config, world, windows, variants, precision)
    found = {}
    for name, train in trains.items():
        train(4)  # compiles, captures, and replays twice
        host.barrier()
        if host.is_root:
            found[name] = [tuple(activity) for activity in last_of_two(recorded(lambda train=train: train(1), 2))]
        else:
            train(2)
        host.barrier()
    return found if host.is_root else None


def last_of_two(activities):
    """The second of two steps: the activities after the longest idle gap."""
    gaps, end = [], activities[0].start
    for activity in activities:
        gaps.append(activity.start - end)
        end = max(end, activity.start + activity.duration)
    return activities[int(np.argmax(gaps)) :]


# -- in the parent process ---------------------------------------------------------------------------------------------


def streams_of(activities):
    """[(index into STREAMS, Activity)] with starts relative to the first."""
    listed, busy, origin = [], 0.0, activities[0].start
    for activity in activities:
        activity = activity._replace(start=activity.start - origin)
        if COMMUNICATION.search(activity.name):
            listed.append((2, activity))
        elif activity.start < busy:
            listed.append((1, activity))
        else:
            listed.append((0, activity))
            busy = activity.start + activity.duration
    return listed


def trace_of(steps):
    """Chrome's trace format (ui.perfetto.dev opens it) of {name: [(stream, Activity)]}; each name is a process."""
    events = []
    for number, (name, listed) in enumerate(steps.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        for stream, title in enumerate(STREAMS):
            place = {"ph": "M", "pid": number, "tid": stream}
            events.append({"name": "thread_name", "args": {"name": title}, **place})
            events.append({"name": "thread_sort_index", "args": {"sort_index": stream}, **place})
        for stream, activity in listed:
            times = {"ts": round(activity.start, 3), "dur": round(activity.duration, 3)}
            events.append({"ph": "X", "name": short(activity.name), "pid": number, "tid": stream, **times})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def union(intervals):
    """Sorted, disjoint [start, end] that cover the same points."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def length(intervals):
    """The length of the union of (start, end) intervals."""
    return sum(end - start for start, end in union(intervals))


def figures_of(listed):
    """Milliseconds of a step: total, each kind of work, and the communication that overlaps computation."""
    spans = {kind: [] for kind in ("compute", "communication")}
    for stream, activity in listed:
        spans[STREAMS[stream] if stream == 2 else "compute"].append(
            (activity.start, activity.start + activity.duration)
        )
    compute, communication = (length(spans[kind]) for kind in ("compute", "communication"))
    both = compute + communication - length(spans["compute"] + spans["communication"])
    end = max(activity.start + activity.duration for _, activity in listed)
    return {
        "step_ms": end / 1e3,
        "compute_ms": compute / 1e3,
        "communication_ms": communication / 1e3,
        "hidden_ms": both / 1e3,
        "kernels": len(listed),
    }


def plot(steps, path):
    """Draw one panel for each of {name: [(stream, Activity)]}, one line for each stream, on a common time axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(steps), 1, figsize=(10, 1.8 * len(steps)), sharex=True, squeeze=False)
    for panel, (name, listed) in zip(panels[:, 0], steps.items(), strict=True):
        for stream, colour in enumerate(COLOURS):
            bars = [(activity.start / 1e3, activity.duration / 1e3) for at, activity in listed if at == stream]
            panel.broken_barh(bars, (len(STREAMS) - 1.4 - stream, 0.8), facecolors=colour, linewidth=0)
        panel.set_yticks([len(STREAMS) - 1 - stream for stream in range(len(STREAMS))], STREAMS)
        panel.set_title(f"{name}: {figures_of(listed)['step_ms']:.1f} ms", loc="left", fontsize=10)
        panel.grid(axis="x", alpha=0.3)
    panels[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def rows_of(figures):
    """The table's rows."""
    return [
        {
            "rank 0": name,
            "step ms": f"{each['step_ms']:.2f}",
            "compute": f"{each['compute_ms']:.2f}",
            "communication": f"{each['communication_ms']:.2f}",
            "hidden share": f"{100 * each['hidden_ms'] / each['communication_ms']:.0f} %",
            "kernels": each["kernels"],
        }
        for name, each in figures.items()
    ]


def parser():
    parser = parser_of(BENCHMARK, __doc__, 200, "the job")
    add_sizes(parser.add_argument)
    panels = "strategies, one panel each (default naive bucket)"
    parser.add_argument("--dp", choices=STRATEGIES, nargs="+", default=["naive", "bucket"], help=panels)
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    sizes = {"ranks": args.ranks, "batch_size": args.ranks * args.batch_size, "bucket_mb": args.bucket_mb}
    variants = {f"--dp {dp}, {args.ranks} GPUs": dict(sizes, dp=dp) for dp in args.dp}
    options = args.preset, args.precision, variants
    found = launch(args.ranks, "steps_of", *options, timeout=args.timeout, benchmark=BENCHMARK)
    steps = {name: streams_of([Activity(*activity) for activity in activities]) for name, activities in found.items()}
    figures = {name: figures_of(listed) for name, listed in steps.items()}
    print_table(rows_of(figures))
    path = save(BENCHMARK, figures, args, args.save_as)
    trace = path.with_name(f"{path.stem}_trace.json")
    trace.write_text(json.dumps(trace_of(steps), separators=(",", ":")) + "\n")
    plot(steps, path.with_suffix(".png"))
    print(f"Also written: {trace.name} (open it in ui.perfetto.dev) and {path.stem}.png.")


if __name__ == "__main__":
    run_main(main)

"""What does synchronising the gradients add to a training step, with each schedule and each bucket size?

The row "none" trains without synchronisation; the exposed time of another row is its step time minus that one's.
`--timeline` instead draws one step of naive above one of overlapped. `ddp_model` compares the rows with a formula.

    python -m benchmarks.torch.ddp                            # on two GPUs
    python -m benchmarks.torch.ddp --backend gloo --size toy  # a quick trial on the CPU
    python -m benchmarks.torch.ddp --timeline                 # draw one step
"""

import functools
import re

import torch
from torch import nn

from benchmarks.harness.assignment_tables import print_tables
from benchmarks.harness.drawing import draw_timeline
from benchmarks.harness.report import save
from benchmarks.harness.rows import run_rows
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import percent
from benchmarks.torch.groups import TIMED_BACKENDS, Groups, Training, group_flags, seconds_of, settings_of, slowest
from benchmarks.torch.models import loss_of, timed
from benchmarks.torch.profile import activities_of
from torch_bridge.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

NONE, TORCH = "none", "torch DDP"
BUCKETS_MB = [1, 10, 100, 1000]
COMMUNICATION, COMPUTE = "communication", "compute"
GAP = 0.02  # ms; a shorter gap between two kernels is not visible in the timeline


class Unsynchronized(nn.Module):
    """The module itself, in the form of the schedules; it may be PyTorch's own, which needs no finish."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do."""


def ways(buckets_mb):
    """The names of the rows."""
    return [NONE, "naive", "flat", "overlap", *(f"bucketed {mb:g} MB" for mb in buckets_mb), TORCH]


def wrap(way, module, options):
    """(the module with the schedule of a row, its optimizer)."""
    if way.startswith("bucketed"):
        model = BucketedDDP(module, float(way.split()[1]))
    elif way == TORCH:  # buckets of 25 MB
        model = Unsynchronized(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))
    else:
        model = {NONE: Unsynchronized, "naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP}[way](module)
    return model, torch.optim.AdamW(model.parameters(), **options)


def steps(way, size, context, batch, warm_up, repeats):
    """{"step", "finish", "backward": seconds of each run, "bytes", "buckets"} of this rank.

    The times of finish_gradient_synchronization() and of backward are from other steps, because they wait for the
    device.
    """
    training = Training(functools.partial(wrap, way), size, context, batch)
    model, device = training.model, training.device
    found = {"step": seconds_of(training.step, device, warm_up, repeats), "finish": [], "backward": []}
    for _ in range(repeats):
        training.step(lambda: found["finish"].append(timed(model.finish_gradient_synchronization, device)[0]))
    for _ in range(repeats if way == NONE else 0):
        found["backward"].append(timed(loss_of(model, *training.batch).backward, device)[0])
    found["bytes"] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found["buckets"] = len(model.gradients.buckets) if hasattr(model, "gradients") else 0
    return found


def way_row(groups, way, args):
    """The values of a row: of each run, the time of the slowest rank."""
    found = groups.run_way(args, args.ranks, steps, way)
    values = {"way": way, "MB": found[0]["bytes"] / 1e6, "buckets": found[0]["buckets"]}
    return values | {field: slowest(found, field) for field in ("step", "finish", "backward") if found[0][field]}


def intervals(way, size, context, batch, warm_up):
    """[(lane, start, end)] in ms of the kernels of one step of this rank; on the CPU, of its operations."""
    training = Training(functools.partial(wrap, way), size, context, batch)
    for _ in range(warm_up):
        training.step()
    activities = activities_of(training.step, training.device)
    found = []
    for each in activities:
        lane = COMMUNICATION if re.search("nccl|gloo:", each.name.lower()) else COMPUTE
        start = each.start - activities[0].start
        found.append((lane, start / 1e3, (start + each.duration) / 1e3))
    return joined(found)


def joined(found):
    """The intervals in order, with those of one lane joined whose gap is below GAP, rounded to microseconds."""
    lanes = {}
    for lane, start, end in sorted(found, key=lambda each: each[1]):
        spans = lanes.setdefault(lane, [])
        if spans and start - spans[-1][1] < GAP:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    return [(lane, round(start, 3), round(end, 3)) for lane, spans in lanes.items() for start, end in spans]


def overlaps(spans):
    """{way: milliseconds of each lane, and the share of the communication that overlaps with computation}."""
    found = {}
    for way, intervals in spans.items():
        lanes = {lane: [(a, b) for each, a, b in intervals if each == lane] for lane in (COMPUTE, COMMUNICATION)}
        found[way] = {lane: sum(b - a for a, b in of_lane) for lane, of_lane in lanes.items()}
        both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in lanes[COMPUTE] for c, d in lanes[COMMUNICATION])
        found[way]["share"] = both / found[way][COMMUNICATION] if lanes[COMMUNICATION] else None
    return found


def draw_intervals(intervals, path):
    """Draw {way: intervals} one above the other, on one axis of milliseconds."""
    colours, spans = {COMPUTE: "tab:blue", COMMUNICATION: "tab:red"}, {}
    for way, overlap in overlaps(intervals).items():
        title = f"{way}: {percent(overlap['share'] or 0.0, 0)} of the communication runs during computation"
        spans[title] = {lane: [(a, b - a) for each, a, b in intervals[way] if each == lane] for lane in colours}
    draw_timeline(path, colours, spans)


def timeline(args, settings, groups):
    """Record a step of naive and of overlapped on rank 0, save the intervals and draw them."""
    spans = {}
    for way in ("naive", "overlap"):
        found = groups.run(args.backend, args.ranks, intervals, way, args.size, args.context, args.batch, args.warm_up)
        spans[way] = found[0]
    results = {"settings": settings, "overlap": overlaps(spans), "intervals": spans}
    path = save(results, args, f"{args.save_as}_timeline")
    draw_intervals(spans, path.with_suffix(".png"))


@benchmark(
    common=group_flags(TIMED_BACKENDS, "nccl on GPUs, nccl-sockets without P2P, or gloo on the CPU")
    | dict(batch=4, context=128, ranks=2, warm_up=5, repeats=10),
    buckets_mb=dict(type=float, nargs="+", default=BUCKETS_MB, help="sizes in 2^20 bytes (default 1 10 100 1000)"),
    timeline=dict(action="store_true", help="draw one step of naive above one of overlapped"),
)
def main(args):
    settings = settings_of(args, args.ranks)
    with Groups() as groups:
        if args.timeline:
            return timeline(args, settings, groups)
        cases = {f"{settings}, {way}": functools.partial(way_row, groups, way, args) for way in ways(args.buckets_mb)}
        print_tables(run_rows(args, cases), "ddp")

"""How much memory do forward and a training step of the assignment's models need, when, and for what?

Peaks are those of the allocated tensors. The forward pass is without a graph for gradients. "torch naive" has the
assignment's attention, with the (T, T) matrices in memory; "ours" is stage 2. The rows "checkpoint" are steps that keep
only the input of every group of N blocks. The rows "timeline" record every allocation of one pass: the figure shows the
allocated memory after each, and the table the largest ones with their source. PyTorch's memory snapshot is written to
out/results/torch/*.pickle, for pytorch.org/memory_viz.
"""

import argparse
import functools

import torch

from benchmarks.harness.assignment_tables import FORWARD, GIB, STEP, print_tables
from benchmarks.harness.drawing import panels
from benchmarks.harness.rows import measured, rows_path, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch import memory_events, models
from benchmarks.torch.passes import EAGER, NAIVE, OURS, TorchPasses, our_passes

# B batch, T time (context), C channels (d_model)

KINDS = FORWARD, STEP
IMPLEMENTATIONS = NAIVE, EAGER, OURS
POINTS, LARGEST = 600, 5  # points of a timeline and its largest allocations, in the results file


def peaks_row(implementation, size, context, precision, args):
    """{kind: {"peak": bytes of tensors, "held": bytes of the allocator}, "residual": bytes of one activation}."""
    measure = our_peaks if implementation == OURS else torch_peaks
    residual = {"residual": 4 * args.batch * context * models.SIZES[size][0]}  # float32 (B, T, C)
    return residual | measure(implementation, size, context, precision, args)


def torch_peaks(implementation, size, context, precision, args):
    passes = TorchPasses(implementation, size, context, precision, args.device, args.batch)
    found = {FORWARD: measured(lambda: torch_peak(passes, FORWARD))}
    if "oom" not in found[FORWARD]:
        found[STEP] = measured(lambda: second_step_peak(passes))
    return found | {"parameters": sum(p.nbytes for p in passes.model.parameters())}


def torch_peak(passes, kind):
    if passes.device.type == "cpu":
        events, _, before = memory_events.allocated_by_torch(passes, kind, None)
        return {"peak": before + max(memory_events.allocated_after(events)), "held": None}
    torch.cuda.reset_peak_memory_stats()
    passes.run(kind)
    return {"peak": torch.cuda.max_memory_allocated(), "held": torch.cuda.max_memory_reserved()}


def second_step_peak(passes):
    """torch_peak() of the second training step: AdamW's state exists only after the first."""
    torch_peak(passes, STEP)
    return torch_peak(passes, STEP)


def checkpoint_row(size, context, precision, count, args):
    """{"step": as in peaks_row()} with one checkpoint for every `count` blocks; {"oom": True} there without memory."""
    passes = TorchPasses(NAIVE, size, context, precision, args.device, args.batch)
    models.use_checkpoints(passes.model, count)
    return {"blocks": count, STEP: measured(lambda: second_step_peak(passes))}


def saved_row(implementation, size, context, precision, args):
    """{"saved": bytes that one block saves for backward, "sources": {line: its bytes}, "gradients": bytes}."""
    passes = TorchPasses(implementation, size, context, precision, args.device, args.batch)
    saved, block = memory_events.saved_by_block(passes, (args.batch, context, models.SIZES[size][0])), passes.model.h[0]
    gradients = sum(p.nbytes for p in block.parameters())
    return {"saved": sum(saved.values()), "sources": dict(saved.most_common(LARGEST)), "gradients": gradients}


def our_peaks(implementation, size, context, precision, args):
    from gpt2core.memory.gpu import training_memory

    passes = our_passes(size, context, precision, "cuda", args.batch, deterministic=True)
    found = {}
    for kind in KINDS:
        memory_events.allocated_by_ours(passes, kind)  # compiles the kernels
        events, _, before = memory_events.allocated_by_ours(passes, kind)
        found[kind] = {"peak": before + max(memory_events.allocated_after(events)), "held": None}
    terms = training_memory(models.config_of(size, context), args.batch, context, precision)
    for _ in range(3):  # the second is captured: its memory is a pool of its own
        passes.run(STEP)
    found[STEP]["held"] = passes.backend.runtime.peak_memory()
    found["predicted"] = sum(terms.values()) - terms["context"]
    return found | {"parameters": passes.trainer.parameters.nbytes}


def timeline_row(implementation, size, context, precision, kind, args):
    """The allocated memory after each allocation of one kind ("GiB", thinned, as text), and the largest allocations."""
    if implementation == OURS:
        passes = our_passes(size, context, precision, "cuda", args.batch, deterministic=True)
        for _ in range(2):
            events, marks, before = memory_events.allocated_by_ours(passes, kind)
    else:
        passes = TorchPasses(implementation, size, context, precision, args.device, args.batch)
        for _ in range(2):
            passes.run(kind)
        name = f"{args.save_as}_{size}_{context}_{precision}_{kind}"
        path = rows_path(argparse.Namespace(**{**vars(args), "save": False, "save_as": name}), ".pickle")  # not in git
        path.parent.mkdir(parents=True, exist_ok=True)
        events, marks, before = memory_events.allocated_by_torch(passes, kind, path)
    after = [before + count for count in memory_events.allocated_after(events)]
    points, marks = memory_events.thinned(after, marks, POINTS)
    return {
        "before": before,
        "peak": max(after),
        "allocations": sum(size > 0 for size, _ in events),
        "GiB": " ".join(f"{count / GIB:.4f}" for count in points),
        "marks": marks,
        "largest": memory_events.largest_allocations(events, LARGEST),
    }


def draw(rows, path):
    """Draw the timelines of the rows one below the other. The axis of a forward pass does not begin at 0."""
    rows = [row for row in rows if row["name"].startswith("timeline / ") and "GiB" in row]
    if not rows:
        return
    with panels(path, len(rows), figsize=(10, 2.6 * len(rows))) as (_, axes):
        for row, panel in zip(rows, axes[:, 0], strict=True):
            values = [float(value) for value in row["GiB"].split()]
            low, high = min(values), max(values)
            bottom = 0 if high - low > 0.1 * high else low - (high - low)  # parameters only, and one block at a time
            panel.fill_between(range(len(values)), values, bottom, color="tab:blue", alpha=0.6, linewidth=0)
            for name, index in row["marks"].items():
                panel.axvline(index, color="black", linewidth=0.8)
                place = {"ha": "right" if index > 0.9 * len(values) else "left", "va": "top", "fontsize": 9}
                panel.annotate(name, (index, 0.96), (4 if place["ha"] == "left" else -4, 0), **place,
                               xycoords=panel.get_xaxis_transform(), textcoords="offset points")  # fmt: skip
            panel.set(ylabel="GiB", xticks=[], xlim=(0, len(values)), ylim=(bottom, high + 0.25 * (high - bottom)))
            panel.set_title(row["name"].removeprefix("timeline / "), fontsize=10)
        axes[-1, 0].set_xlabel("allocations and frees, in their order")


def selected(args):
    """([(implementation, size, context, precision)], [the same and kind] of the timelines), the main ones first."""
    if chosen := models.chosen_models(args):
        names = [name for name in args.implementations or IMPLEMENTATIONS if args.device == "cuda" or name != OURS]
        peaks = [(name, *model) for name in names for model in chosen]
        return peaks, [(name, *chosen[-1], kind) for name in names for kind in KINDS]
    contexts, others = (128, 256, 512), ("xl", "small", "medium", "large")
    peaks = [(NAIVE, "2.7B", T, precision) for precision in models.PRECISIONS for T in contexts]
    peaks += [(OURS, "2.7B", T, precision) for precision in models.PRECISIONS for T in contexts]
    peaks += [(NAIVE, size, 512, precision) for size in others for precision in models.PRECISIONS]
    peaks += [(EAGER, "2.7B", T, precision) for precision in models.PRECISIONS for T in (512, 2048)]
    peaks[6:6] = [(NAIVE, "2.7B", 2048, precision) for precision in models.PRECISIONS]
    names = args.implementations or IMPLEMENTATIONS
    timelines = [(name, "2.7B", 512, "fp32", kind) for name in (NAIVE, OURS) for kind in KINDS]
    return ([each for each in rows if each[0] in names] for rows in (peaks, timelines))


def cases(args):
    """{name of a row: function that measures it}; the other kinds of rows come after the first eight peaks."""
    peaks, timelines = selected(args)
    size, precision = (args.sizes or ["2.7B"])[-1], args.precisions or ["fp32"]
    saved = NAIVE, size, (args.contexts or [512])[-1], precision[0]
    found = [("{1} / context {2} / {3} / {0}".format(*each), peaks_row, each) for each in peaks]
    others = [("saved / {1} / context {2} / {3} / {0}".format(*saved), saved_row, saved)]
    for each in timelines:
        others.append(("timeline / {1} / context {2} / {3} / {4} / {0}".format(*each), timeline_row, each))
    for count in args.blocks:
        each = size, (args.contexts or [2048])[-1], (args.precisions or ["bf16"])[0], count
        others.append(("checkpoint / {} / context {} / {} / {} blocks".format(*each), checkpoint_row, each))
    found[8:8] = others
    return {name: functools.partial(function, *each, args) for name, function, each in found}


__doc__ += models.model_examples("memory")


@benchmark(
    common=models.model_flags("bf16 is autocast over fp32 parameters (default: both)") | dict(batch=4, device="cuda"),
    implementations=dict(nargs="+", choices=IMPLEMENTATIONS, metavar="NAME", help=", ".join(IMPLEMENTATIONS)),
    blocks=dict(type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="blocks per checkpoint (default 1 2 4 8)"),
)
def main(args):
    models.check_device(args)
    rows = run_rows(args, cases(args))
    print_tables(rows, "peaks", "residual", "checkpoints", "timelines", "largest", "saved")
    draw(rows, rows_path(args, ".png"))

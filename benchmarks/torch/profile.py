"""Which kernels take the time of forward, backward and optimizer, and how much of it are matrix products?

The model is PyTorch's in eager mode, with attention as in the assignment's model: the (T, T) matrices are in memory, so
softmax is a kernel of its own. CUPTI records the kernels of one pass; the wall time of the pass is measured without
recording. "forward only" is without a graph for gradients. On the CPU the operations of PyTorch take the place of the
kernels. The second table has the kernels of the attention of one layer in the forward pass.

Every pass and the three parts of attention are NVTX ranges, so NVIDIA's profiler can show the same passes:

    nsys profile --trace=cuda,nvtx -o out/profile python -m benchmarks.torch.profile --ranges-only --only small 512
"""

import functools
import re
from collections import Counter

import torch

from benchmarks.gpu.profile import is_product as is_gpu_product
from benchmarks.harness.assignment_tables import ATTENTION_PARTS, OTHERS, PRODUCTS, SOFTMAX, STEP, print_tables
from benchmarks.harness.rows import mean_and_deviation, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch import models
from benchmarks.torch.passes import EAGER, NAIVE, TorchPasses
from stage2_cuda.runtime import cupti

# B batch, H heads, T time, D head size

CPU_PRODUCT = re.compile(r"mm$")  # aten::mm, addmm, bmm, baddbmm
NSYS = "nsys profile --trace=cuda,nvtx -o out/profile python -m benchmarks.torch.profile --ranges-only --only small 512"
KEPT = 5  # kernels of each pass in the results file


def activities_of(function, device):
    """[Activity] of one call: kernels and copies of the GPU, or operations of the CPU with their own time."""
    if device.type == "cuda":
        return cupti.recorded(function, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        function()
    found = []
    for event in recorded.events():
        duration = event.time_range.elapsed_us() if event.is_async else event.self_cpu_time_total
        found += [cupti.Activity(event.time_range.start, duration, event.name)] * (duration > 0)
    return sorted(found)


def is_product(activity):
    """Whether this is a matrix product, of the GPU or of the CPU."""
    return is_gpu_product(activity) or bool(CPU_PRODUCT.search(activity.name))


def summary(activities):
    """{"kernels_ms", "calls", "product_share", "kernels": the KEPT longest, "others": the KEPT longest of the others}.

    A kernel is {"name", "calls", "ms", "share", "product"}; its name has no template arguments.
    """
    spent, calls, product = Counter(), Counter(), {}
    for activity in activities:
        name = cupti.short(activity.name)
        spent[name] += activity.duration / 1e3
        calls[name] += 1
        product[name] = is_product(activity)
    total = sum(spent.values())
    ranked = [
        {"name": name, "calls": calls[name], "ms": ms, "share": ms / total, "product": product[name]}
        for name, ms in spent.most_common()
    ]
    return {
        "kernels_ms": total,
        "calls": sum(calls.values()),
        "product_share": sum(each["share"] for each in ranked if each["product"]),
        "kernels": ranked[:KEPT],
        "others": [each for each in ranked if not each["product"]][:KEPT],
    }


def pass_functions(passes):
    """{name: (prepare, function of its result)}: function is what is measured, after prepare()."""
    return {
        "forward only": (lambda: None, lambda _: passes.forward()),
        "forward": (lambda: None, lambda _: passes.loss()),
        "backward": (passes.new_loss, passes.backward),
        "optimizer": (lambda: None, lambda _: passes.update()),
    }


def run_passes(passes, warm_up, repeats, record=lambda call: None):
    """Run the passes in their NVTX ranges; return {name: ([seconds of each run], record() of one more run)}."""
    with passes.range("warm-up"):
        for _ in range(warm_up):
            passes.run(STEP)
    found = {}
    for name, (prepare, function) in pass_functions(passes).items():
        seconds = [models.timed(functools.partial(function, prepare()), passes.device)[0] for _ in range(repeats)]
        found[name] = seconds, record(functools.partial(function, prepare()))
    return found


def profile_row(size, context, precision, args):
    """The values of a row: of each pass the wall time and the kernels, and the kernels of one layer's attention."""
    passes, result = TorchPasses(args.attention, size, context, precision, args.device, args.batch), {}
    record = functools.partial(activities_of, device=passes.device)
    for name, (seconds, activities) in run_passes(passes, args.warm_up, args.repeats, record).items():
        result[name] = {"wall": mean_and_deviation([1e3 * each for each in seconds]), **summary(activities)}
    attention = attention_of_layer(passes, size, context, precision, args.batch)
    return {"passes": result, "step": step_shares(result), "attention": attention}


def step_shares(passes):
    """Of a training step: the shares of products and of the optimizer in the kernels' time, and kernels / wall."""
    step = [passes[name] for name in ("forward", "backward", "optimizer")]
    total = sum(each["kernels_ms"] for each in step)
    return {
        "product_share": sum(each["kernels_ms"] * each["product_share"] for each in step) / total,
        "optimizer_share": passes["optimizer"]["kernels_ms"] / total,
        "kernels_per_wall": total / sum(each["wall"]["mean"] for each in step),
    }


def attention_of_layer(passes, size, context, precision, batch):
    """{part: {"ms", "operations"}} of the attention of one layer in the forward pass, without its projections."""
    width, _, heads = models.SIZES[size]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q, k, v = torch.randn(3, batch, heads, context, width // heads, device=passes.device, dtype=dtype)

    def attend():
        with torch.no_grad(), passes.autocast():
            models.naive_attention(q, k, v)

    attend()
    spent = dict.fromkeys(ATTENTION_PARTS, 0.0)
    for activity in activities_of(attend, passes.device):
        softmax = SOFTMAX if "softmax" in activity.name.lower() else OTHERS
        spent[PRODUCTS if is_product(activity) else softmax] += activity.duration / 1e3
    scores = batch * heads * context**2  # elements
    operations = {PRODUCTS: 4 * scores * (width // heads), SOFTMAX: 5 * scores, OTHERS: scores}
    return {part: {"ms": ms, "operations": operations[part]} for part, ms in spent.items()}


def selected(args):
    """[(size, context, precision)], the most informative first."""
    first = [(size, 512, "bf16") for size in ("small", "xl", "2.7B", "medium", "large")]
    others = [(size, context, "bf16") for size in ("small", "xl") for context in (1024, 128, 256)]
    return models.chosen_models(args, ["bf16"]) or [*first, ("small", 512, "fp32"), ("xl", 512, "fp32"), *others]


__doc__ += models.model_examples("profile")


@benchmark(
    common=models.model_flags("fp32 is without TF32 (default bf16, two rows of fp32)")
    | dict(batch=4, device="cuda", warm_up=2, repeats=5),
    attention=dict(choices=(NAIVE, EAGER), default=NAIVE, help="naive, or scaled_dot_product_attention (eager)"),
    ranges_only=dict(action="store_true", help="run the passes in their NVTX ranges and record nothing: for nsys"),
)
def main(args):
    models.check_device(args)
    settings = {"{} / context {} / {} / {}".format(*each, args.attention): each for each in selected(args)}
    if args.ranges_only:
        for name, each in settings.items():
            if all(text in name for text in args.only):
                run_passes(TorchPasses(args.attention, *each, args.device, args.batch), args.warm_up, args.repeats)
        return
    if args.device == "cuda" and not args.dry_run:
        cupti.open_cupti()
    cases = {name: functools.partial(profile_row, *each, args) for name, each in settings.items()}
    rows = run_rows(args, cases)
    print_tables(rows, "profile-passes", "profile-shares", "profile-others", "profile-attention")
    print(f"\nThe same passes in NVIDIA's profiler:\n{NSYS}")

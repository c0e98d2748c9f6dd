"""The list of exercises: which functions of the repository a student writes, and which checks grade them.

The source files have no markers. A function is named by its file and its qualified name, and found with `ast`.
"""

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).resolve().parent / "pages"

# The packages that a stage consists of. The working folder has a copy of each, and the default corpus.
PACKAGES = {
    0: ("gpt2core", "stage0_serial"),
    1: ("gpt2core", "stage0_serial", "stage1_mpi"),
    2: ("gpt2core", "stage0_serial", "stage2_cuda"),
    3: ("gpt2core", "stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda"),
}


@dataclass(frozen=True)
class Exercise:
    """One exercise: "0.2" is the second one of stage 0.

    functions: pairs (file, qualified name) that the student writes. checks: {name of a function in the module: what it
    checks, as a sentence for the student}. removed: further functions that contain the answer, such as the plain form
    of a kernel: they have no body in the working folder, nor while this exercise is graded. No student writes in their
    files.
    """

    number: str
    slug: str
    title: str
    functions: tuple
    checks: dict = field(hash=False)
    removed: tuple = ()

    @property
    def stage(self):
        return int(self.number[0])

    @property
    def page(self):
        """The name of the exercise's page in exercises/pages/ and in the working folder."""
        return f"{self.number}-{self.slug}.md"

    @property
    def module(self):
        """The module of its checks: exercises.checks.softmax for the slug "softmax"."""
        return f"exercises.checks.{self.slug.replace('-', '_')}"

    @property
    def hint(self):
        """Where to look if a check knows nothing better."""
        return f"Look at {', '.join(name.rpartition('.')[2] for _, name in self.functions)}."

    @property
    def files(self):
        """The files that contain the functions, without repetition."""
        return list(dict.fromkeys(file for file, _ in self.functions))


def functions(file, *names):
    return tuple((file, name) for name in names)


PLAIN = "gpt2core/plain_backend.py"
NUMPY, GENERATION = "stage0_serial/numpy_backend.py", "stage0_serial/generation/kernels.py"
COLLECTIVES, PARALLEL = "stage1_mpi/collectives.py", "gpt2core/parallel/"
KERNELS, ATTENTION, STAGE_3 = "stage2_cuda/kernels/", "stage2_cuda/attention/", "stage3_mpi_cuda/"

EXERCISES = (
    Exercise(
        "0.1",
        "softmax",
        "softmax and its gradient",
        functions("gpt2core/primitives.py", "softmax"),
        {
            "softmax_rows": "softmax of random numbers, along the last and along the first axis",
            "softmax_large": "softmax of rows near 1000, 0 and -1000, whose exponentials are infinite or 0",
            "softmax_gradient": "the gradient of softmax",
        },
        functions(PLAIN, "softmax"),
    ),
    Exercise(
        "0.2",
        "layernorm-backward",
        "the gradient of LayerNorm",
        functions(NUMPY, "NumpyBackend.residual_layernorm_backward"),
        {
            "layernorm_dx": "dx, the gradient of the input",
            "layernorm_parameters": "dw and db, the gradients of the weight and the bias",
            "layernorm_residual": "the gradient ds of the residual stream, and da_bias",
            "layernorm_model": "several micro-batches, and three training steps with your LayerNorm",
        },
        functions(PLAIN, "PlainBackend.layernorm_backward"),
    ),
    Exercise(
        "0.3",
        "attention",
        "causal attention, forward and backward",
        functions(NUMPY, "NumpyBackend.attention_forward", "NumpyBackend.attention_backward"),
        {
            "attention_values": "the output y of attention",
            "attention_future": "no position depends on a later one",
            "attention_gradient": "the gradients of q, k and v",
            "attention_model": "three training steps with your attention",
        },
        functions(PLAIN, *(f"PlainBackend.attention_{kind}" for kind in ("forward", "backward", "cached"))),
    ),
    Exercise(
        "0.4",
        "adamw",
        "the AdamW update",
        functions("gpt2core/optimizer.py", "adamw_coefficients") + functions(NUMPY, "NumpyBackend.adamw_step"),
        {
            "adamw_coefficients": "the three numbers of adamw_coefficients()",
            "adamw_moments": "the moments m and v after two steps",
            "adamw_parameters": "the parameters after three steps, with weight decay",
            "adamw_scale": "the argument factor, and a factor of NaN",
            "adamw_model": "three training steps with your AdamW",
        },
        functions(PLAIN, "PlainBackend.adamw_step"),
    ),
    Exercise(
        "0.5",
        "kv-cache",
        "attention with a KV cache",
        functions(GENERATION, "GenerationKernels.attention_cached"),
        {
            "cache_contents": "the keys and values in the cache",
            "cache_tokens": "one new position at a time",
            "cache_several": "several new positions after cached ones",
            "cache_model": "greedy text with the cache, compared with text without a cache",
        },
        functions(PLAIN, "PlainBackend.attention_cached"),
    ),
    Exercise(
        "1.1",
        "ring-all-gather",
        "the all-gather of a ring",
        functions(COLLECTIVES, "_ring_all_gather"),
        {
            "all_gather_values": "every rank has every part, on 2, 3 and 4 ranks",
            "all_gather_bytes": "the bytes that each rank sends",
        },
    ),
    Exercise(
        "1.2",
        "ring-reduce-scatter",
        "the reduce-scatter of a ring, and with it all-reduce",
        functions(COLLECTIVES, "_ring_reduce_scatter"),
        {
            "reduce_scatter_values": "rank r has the sum of part r, on 2, 3 and 4 ranks",
            "reduce_scatter_bytes": "the bytes that each rank sends",
            "reduce_scatter_buffers": "the public reduce_scatter(), which passes two alternating buffers",
            "ring_all_reduce": "all_reduce() with the algorithm ring: sum and maximum",
        },
    ),
    Exercise(
        "1.3",
        "buckets",
        "plan the buckets of gradients",
        functions(PARALLEL + "data_parallel.py", "plan_buckets"),
        {
            "buckets_order": "one name per bucket, from the last name to the first",
            "buckets_least": "a bucket is closed when it has at least `least` bytes",
            "buckets_most": "a bucket never has more than `most` bytes, unless it has one name",
            "buckets_training": "training with --dp bucket on 2 ranks, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "1.4",
        "zero-slices",
        "the slices of ZeRO-1",
        functions(PARALLEL + "divided_arena.py", "DividedArena.share")
        + functions(PARALLEL + "async_all_gather.py", "owned"),
        {
            "parts_of_the_arena": "the parts of 1, 2, 3, 4 and 64 owners",
            "owned_pieces": "the share of each owner in a piece of the arena",
            "zero_training": "training with --zero 1 on 2 ranks, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "1.5",
        "tensor-parallel-duals",
        "the dual operations of tensor parallelism",
        functions("gpt2core/ops.py", "copy_to_group", "reduce_from_group", "gather_from_group"),
        {
            "copy_to_group": "copy_to_group, forward and backward",
            "reduce_from_group": "reduce_from_group, forward and backward",
            "gather_from_group": "gather_from_group, forward and backward",
            "tensor_parallel_model": "loss and gradients of a model divided over 2 ranks, compared with 1 rank",
        },
    ),
    Exercise(
        "1.6",
        "one-f-one-b",
        "the pipeline schedule 1F1B",
        functions(PARALLEL + "pipeline/schedules.py", "one_f_one_b", "alternate"),
        {
            "schedule_order": "the actions of each rank, in order, for several numbers of ranks and micro-batches",
            "alternate_other_lists": "alternate() with other lists, which it does not change",
            "bubble_and_activations": "no rank waits forever; the bubble and the live activations are the least",
            "pipeline_training": "training with --pp 2, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "1.7",
        "zero3-gather",
        "gather and free the parameters of ZeRO-3",
        functions(
            PARALLEL + "sharded/unit_parameters.py",
            "UnitParameters.need",
            "UnitParameters.start",
            "UnitParameters.free",
        ),
        {
            "gather_before_use": "a unit is whole before it is read, and the next one is on its way",
            "free_after_use": "only the units that are read now or next are in memory",
            "tied_and_kept_units": "a head that reads the embedding too; ZeRO-2, which frees nothing",
            "sharded_training": "training with --zero 3 and --zero 2 on 2 ranks, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "1.8",
        "tied-pipeline",
        "a tied embedding on two ranks of a pipeline",
        functions(
            PARALLEL + "pipeline/tied_table.py",
            "TiedTable.refresh",
            "TiedTable.set_destination",
            "TiedTable.add_embedding",
        ),
        {
            "refresh_copies_the_table": "the first rank has the table of the last one, in every step",
            "two_gradients": "the gradient of each micro-batch is that of the head plus that of the embedding",
            "destinations_are_separate": "the gradients of several micro-batches wait at the same time",
            "tied_training": "training of a tied model with --pp 2, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "2.1",
        "split-sum",
        "a sum that is split over programs",
        functions(KERNELS + "column_sums.py", "column_sums_kernel"),
        {
            "split_sum_one_tile": "the column sums of a small matrix, one program",
            "split_sum_tiles": "the column sums of a matrix with many tiles, several programs",
            "split_sum_guards": "the kernel loads only x, and writes only to its own elements",
        },
    ),
    Exercise(
        "2.2",
        "online-softmax",
        "the online softmax of flash attention",
        functions(ATTENTION + "forward.py", "softmax_step"),
        {
            "online_softmax_step": "one step of the online softmax",
            "online_softmax_tiles": "attention over several tiles of keys",
            "online_softmax_large": "attention with large scores",
        },
    ),
    Exercise(
        "2.3",
        "flash-dq",
        "flash attention: the gradient of q",
        functions(ATTENTION + "backward.py", "dq_tile"),
        {
            "flash_dq": "dq of one tile of queries",
            "flash_dq_tiles": "dq with several tiles, some of them on the diagonal",
            "flash_delta": "delta, which the kernel stores for dk and dv",
        },
    ),
    Exercise(
        "2.4",
        "flash-dk-dv",
        "flash attention: the gradients of k and v",
        functions(ATTENTION + "backward.py", "dkdv_tile"),
        {
            "flash_dv": "dv of one tile of keys",
            "flash_dk": "dk of one tile of keys",
            "flash_dkdv_tiles": "dk and dv with several tiles, in two kernels",
            "flash_both": "dq, dk and dv in one launch, which computes delta itself",
        },
    ),
    Exercise(
        "2.5",
        "fused-cross-entropy",
        "cross-entropy and its gradient in one kernel",
        functions(KERNELS + "cross_entropy.py", "online_update", "write_gradient", "forward_backward_kernel"),
        {
            "cross_entropy_statistics": "the maximum, the sum and the target's logit of each row",
            "cross_entropy_gradient": "dlogits, with one kernel for forward and another for backward",
            "cross_entropy_fused": "all results of the fused kernel",
            "cross_entropy_fused_tiles": "the fused kernel, for rows of several tiles and with padding",
        },
    ),
    Exercise(
        "3.1",
        "canonical-sum",
        "the canonical sum over ranks",
        functions(STAGE_3 + "tree_sum.py", "tree_of_rows"),
        {
            "tree_values": "the sum of 1 to 5 rows",
            "tree_order": "the order of the additions, bit for bit",
            "tree_half": "rows in float16 are added in float32",
            "tree_double": "rows in float64 are added in float64",
            "tree_mask": "only columns that exist are loaded",
        },
    ),
    Exercise(
        "3.2",
        "canonical-all-reduce",
        "an all-reduce from all-to-all, a sum and all-gather",
        functions(
            STAGE_3 + "nccl_collectives.py",
            "part_edges",
            "NcclCollectives._canonical_all_reduce",
            "NcclCollectives._exchange_parts",
        ),
        {
            "part_edges": "the division of n elements into p parts",
            "exchange_parts": "rank r receives part r of every rank",
            "canonical_all_reduce": "the all-reduce on 2, 3 and 4 ranks, bit for bit",
            "canonical_uneven": "lengths that the number of ranks does not divide, and length 0",
        },
    ),
    Exercise(
        "3.3",
        "overlap-hook",
        "send gradients during backward",
        functions(PARALLEL + "data_parallel.py", "DataParallel.completed", "DataParallel.finish"),
        {
            "hook_starts": "the sum of a bucket starts when its last gradient is complete",
            "hook_finish": "finish() waits for all sums, and starts them if none was started during backward",
            "hook_second_step": "a second step",
            "hook_training": "training with --dp overlap on 2 ranks, compared with 1 rank bit for bit",
        },
    ),
    Exercise(
        "3.4",
        "communication-stream",
        "order work on a communication stream",
        functions(STAGE_3 + "nccl_collectives.py", "NcclCollectives._enqueue", "_StreamOperation.wait"),
        {
            "stream_order": "NCCL's call is ordered after the caller's kernels",
            "stream_join": "the caller's stream waits for the call, the host does not",
            "stream_result": "wait() returns the result, also the second time, and frees the arrays",
            "stream_collectives": "a reduce-scatter and an all-gather that are pending at the same time",
        },
    ),
)


def of_stage(stage):
    """The exercises of one stage, in order."""
    return [exercise for exercise in EXERCISES if exercise.stage == stage]


def graded_files(stage):
    """The files that the exercises of a stage change, relative to the working folder, sorted."""
    return sorted({file for exercise in of_stage(stage) for file in exercise.files})


def removed_functions(exercises):
    """{file: {qualified name: text of the NotImplementedError}} of all functions `removed` of these exercises."""
    messages = {}
    for exercise in exercises:
        for file, name in exercise.removed:
            text = f"this function was removed, because it has the answer of exercise {exercise.number}"
            messages.setdefault(file, {}).setdefault(name, text)
    return messages

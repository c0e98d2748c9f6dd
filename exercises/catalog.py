"""The list of exercises: which functions of the repository a student writes, and which checks grade them.

The source files have no markers. A function is named by its file and its qualified name, and found with `ast`.
"""

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).resolve().parent / "pages"

# The packages that a stage consists of. The working folder has a copy of each, the default corpus and weights.
PACKAGES = {
    0: ("gpt2core", "stage0_serial"),
    1: ("gpt2core", "stage0_serial", "stage1_mpi"),
    2: ("gpt2core", "stage0_serial", "stage2_cuda"),
    3: ("gpt2core", "stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda"),
}


@dataclass(frozen=True)
class Exercise:
    """One exercise: "0.2" is the second one of stage 0.

    effort: (level, minutes). Level 1: a formula or a list becomes code; 2: several parts must fit together; 3: the
    order of messages, events or tiles counts too. The minutes are an estimate. functions: pairs (file, qualified name)
    that the student writes. checks: {name of a function in the module: the property that it checks, as a sentence for
    the student}. removed: further functions that contain the answer, such as the plain form of a kernel: they have no
    body in the working folder, nor while this exercise is graded. No student writes in their files.
    """

    number: str
    slug: str
    title: str
    effort: tuple
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
        (1, 20),
        functions("gpt2core/primitives.py", "softmax"),
        {
            "softmax_rows": "`axis` decides which elements sum to 1: the last and the first axis",
            "softmax_large": "large numbers do not overflow: rows near 1000, 0 and -1000",
            "softmax_gradient": "the gradient of an element depends on all outputs of its row",
        },
        functions(PLAIN, "softmax"),
    ),
    Exercise(
        "0.2",
        "layernorm-backward",
        "the gradient of LayerNorm",
        (2, 40),
        functions(NUMPY, "NumpyBackend.residual_layernorm_backward"),
        {
            "layernorm_dx": "dx has the terms of the mean and of the variance",
            "layernorm_parameters": "dw and db are sums over all rows",
            "layernorm_residual": "the gradient ds of the stream is a part of dx, and da_bias is the sum of dx",
            "layernorm_model": "micro-batches do not change the sums, and three training steps have the right losses",
        },
        functions(PLAIN, "PlainBackend.layernorm_backward"),
    ),
    Exercise(
        "0.3",
        "attention",
        "causal attention, forward and backward",
        (2, 60),
        functions(NUMPY, "NumpyBackend.attention_forward", "NumpyBackend.attention_backward"),
        {
            "attention_values": "the number of positions does not change the formula of y",
            "attention_future": "no position depends on a later one",
            "attention_gradient": "the number of positions does not change the formula of the gradients of q, k and v",
            "attention_model": "three training steps have the losses of the repository",
        },
        functions(PLAIN, *(f"PlainBackend.attention_{kind}" for kind in ("forward", "backward", "cached"))),
    ),
    Exercise(
        "0.4",
        "adamw",
        "the AdamW update",
        (1, 30),
        functions("gpt2core/optimizer.py", "AdamW.coefficients") + functions(NUMPY, "NumpyBackend.adamw_step"),
        {
            "adamw_coefficients": "the three numbers have the corrections of the step",
            "adamw_moments": "m and v are running means, also in the second step",
            "adamw_parameters": "weight decay shrinks p, and only where its flag is 1",
            "adamw_scale": "`factor` scales the gradient, and a factor of NaN changes nothing",
            "adamw_model": "three training steps have the losses of the repository",
        },
        functions(PLAIN, "PlainBackend.adamw_step"),
    ),
    Exercise(
        "0.5",
        "kv-cache",
        "attention with a KV cache",
        (2, 30),
        functions(GENERATION, "GenerationKernels.attention_cached"),
        {
            "cache_contents": "each call stores its keys and values at its own positions",
            "cache_tokens": "one new position attends to itself and to all cached ones",
            "cache_several": "several new positions do not attend to later ones",
            "cache_model": "a cache does not change the logits of a model",
        },
        functions(PLAIN, "PlainBackend.attention_cached"),
    ),
    Exercise(
        "1.1",
        "ring-all-gather",
        "the all-gather of a ring",
        (1, 30),
        functions(COLLECTIVES, "_ring_all_gather"),
        {
            "all_gather_values": "every rank has every part, whatever the number of ranks: 2, 3 and 4",
            "all_gather_bytes": "a rank sends each part at most once",
        },
    ),
    Exercise(
        "1.2",
        "ring-reduce-scatter",
        "the reduce-scatter of a ring, and with it all-reduce",
        (2, 50),
        functions(COLLECTIVES, "_ring_reduce_scatter"),
        {
            "reduce_scatter_values": "rank r has the sum of part r, whatever the number of ranks: 2, 3 and 4",
            "reduce_scatter_bytes": "a rank sends each part except its own once",
            "reduce_scatter_buffers": "two alternating buffers are enough, as in the public reduce_scatter()",
            "ring_all_reduce": "both phases together are an all-reduce, for sums and for maxima",
        },
    ),
    Exercise(
        "1.3",
        "buckets",
        "plan the buckets of gradients",
        (1, 30),
        functions(PARALLEL + "data/strategies.py", "plan_buckets"),
        {
            "buckets_order": "the last name comes first, and `least=0` gives one name per bucket",
            "buckets_least": "a bucket is closed when it has at least `least` bytes",
            "buckets_most": "a bucket never has more than `most` bytes, unless it has one name",
            "buckets_training": "buckets change no bit of training: --dp bucket on 2 ranks, compared with 1 rank",
        },
    ),
    Exercise(
        "1.4",
        "zero-slices",
        "the slices of ZeRO-1",
        (2, 30),
        functions(PARALLEL + "divided/arena.py", "DividedArena.share")
        + functions(PARALLEL + "divided/async_all_gather.py", "owned"),
        {
            "parts_of_the_arena": "the parts of 1, 2, 3, 4 and 64 owners are whole segments, and cover the arena",
            "owned_pieces": "the shares cover a piece of the arena, wherever it begins and ends",
            "zero_training": "ZeRO-1 changes no bit of training: --zero 1 on 2 ranks, compared with 1 rank",
        },
    ),
    Exercise(
        "1.5",
        "tensor-parallel-duals",
        "the dual operations of tensor parallelism",
        (2, 40),
        functions("gpt2core/ops.py", "copy_to_group", "reduce_from_group", "gather_from_group")
        + functions("gpt2core/vocabulary.py", "gather_columns"),
        {
            "copy_to_group": "copy_to_group has the right dual: forward and backward",
            "reduce_from_group": "reduce_from_group has the right dual: forward and backward",
            "gather_from_group": "gather_from_group has the right dual, for any number of columns",
            "tensor_parallel_model": "dividing a model over 2 ranks does not change its loss and its gradients",
        },
    ),
    Exercise(
        "1.6",
        "one-f-one-b",
        "the pipeline schedule 1F1B",
        (1, 30),
        functions(PARALLEL + "pipeline/schedules.py", "one_f_one_b", "alternate"),
        {
            "schedule_order": "for any number of ranks and micro-batches, a rank alternates after its warm-up",
            "alternate_other_lists": "alternate() takes lists of any actions, and does not change them",
            "bubble_and_activations": "no rank waits forever; the bubble and the live activations are the least",
            "pipeline_training": "a pipeline changes no bit of training: --pp 2, compared with 1 rank",
        },
    ),
    Exercise(
        "1.7",
        "zero3-gather",
        "gather and free the parameters of ZeRO-3",
        (3, 50),
        functions(
            PARALLEL + "sharded/unit_parameters.py",
            "UnitParameters.need",
            "UnitParameters.start",
            "UnitParameters.free",
        ),
        {
            "gather_before_use": "a unit is whole before it is read, and the next one is on its way",
            "free_after_use": "only the units that are read now or next are in memory",
            "tied_and_kept_units": "a tied head reads two units, and ZeRO-2 frees none",
            "sharded_training": "shards change no bit of training: --zero 3 and 2 on 2 ranks, compared with 1 rank",
        },
    ),
    Exercise(
        "1.8",
        "tied-pipeline",
        "a tied embedding on two ranks of a pipeline",
        (2, 30),
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
            "tied_training": "a pipeline changes no bit of training a tied model: --pp 2, compared with 1 rank",
        },
    ),
    Exercise(
        "2.1",
        "split-sum",
        "a sum that is split over programs",
        (1, 40),
        functions(KERNELS + "column_sums.py", "column_sums_kernel"),
        {
            "split_sum_one_tile": "one program adds all rows and columns of a matrix that fits in one tile",
            "split_sum_tiles": "sizes not divisible by the tile, and the number of programs, do not change the sums",
            "split_sum_guards": "no element outside the arrays is loaded or stored",
        },
    ),
    Exercise(
        "2.2",
        "online-softmax",
        "the online softmax of flash attention",
        (2, 30),
        functions(ATTENTION + "forward.py", "softmax_step"),
        {
            "online_softmax_step": "a larger maximum rescales the sum and the output",
            "online_softmax_tiles": "the tile size does not change attention, for a length not divisible by the tile",
            "online_softmax_large": "large scores do not overflow",
        },
    ),
    Exercise(
        "2.3",
        "flash-dq",
        "flash attention: the gradient of q",
        (3, 60),
        functions(ATTENTION + "backward.py", "dq_tile"),
        {
            "flash_dq": "dq of one tile is that of the formula",
            "flash_dq_tiles": "the tile size does not change dq, for lengths divisible by the tile and not",
            "flash_delta": "delta is stored for dk and dv",
        },
    ),
    Exercise(
        "2.4",
        "flash-dk-dv",
        "flash attention: the gradients of k and v",
        (3, 60),
        functions(ATTENTION + "backward.py", "dkdv_tile"),
        {
            "flash_dv": "dv of one tile is that of the formula",
            "flash_dk": "dk of one tile is that of the formula",
            "flash_dkdv_tiles": "the tile size does not change dk and dv, for lengths divisible by the tile and not",
            "flash_both": "one launch for all gradients has the results of two",
        },
    ),
    Exercise(
        "2.5",
        "fused-cross-entropy",
        "cross-entropy and its gradient in one kernel",
        (3, 60),
        functions(KERNELS + "cross_entropy.py", "online_update", "write_gradient", "forward_backward_kernel"),
        {
            "cross_entropy_statistics": "the number of tiles does not change maximum, sum and target's logit",
            "cross_entropy_gradient": "dlogits is right with one kernel for forward and another for backward",
            "cross_entropy_fused": "the fused kernel has the results of the two",
            "cross_entropy_fused_tiles": "rows not divisible by the tile, and padding, do not change the results",
        },
    ),
    Exercise(
        "3.1",
        "canonical-sum",
        "the canonical sum over ranks",
        (1, 30),
        functions(STAGE_3 + "tree_sum.py", "tree_of_rows"),
        {
            "tree_values": "the sum of 1 to 5 rows has every row once",
            "tree_order": "the order of the additions is that of the tree, bit for bit",
            "tree_half": "rows in float16 are added in float32",
            "tree_double": "rows in float64 are added in float64",
            "tree_mask": "only columns that exist are loaded",
        },
    ),
    Exercise(
        "3.2",
        "canonical-all-reduce",
        "an all-reduce from all-to-all, a sum and all-gather",
        (2, 50),
        functions(
            STAGE_3 + "nccl_collectives.py",
            "part_edges",
            "NcclCollectives._canonical_all_reduce",
            "NcclCollectives._exchange_parts",
        ),
        {
            "part_edges": "the p parts cover n elements, and differ by at most one in length",
            "exchange_parts": "rank r receives part r of every rank",
            "canonical_all_reduce": "the bits are those of the tree, on 2, 3 and 4 ranks",
            "canonical_uneven": "lengths not divisible by the number of ranks, and length 0, are summed too",
        },
    ),
    Exercise(
        "3.3",
        "overlap-hook",
        "send gradients during backward",
        (2, 30),
        functions(PARALLEL + "data/strategies.py", "DataParallel.completed", "DataParallel.finish"),
        {
            "hook_starts": "the sum of a bucket starts when its last gradient is complete",
            "hook_finish": "finish() waits for all sums, and starts them if none was started during backward",
            "hook_second_step": "a second step starts as the first one did",
            "hook_training": "overlap changes no bit of training: --dp overlap on 2 ranks, compared with 1 rank",
        },
    ),
    Exercise(
        "3.4",
        "communication-stream",
        "order work on a communication stream",
        (3, 40),
        functions(STAGE_3 + "nccl_collectives.py", "NcclCollectives._enqueue", "_StreamOperation.wait"),
        {
            "stream_order": "NCCL's call is ordered after the caller's kernels",
            "stream_join": "the caller's stream waits for the call, the host does not",
            "stream_result": "wait() returns the result, also the second time, and frees the arrays",
            "stream_collectives": "two collectives that are pending at the same time do not disturb each other",
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

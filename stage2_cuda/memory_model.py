"""Predict the device memory of a training step or a generation, as a sum of named terms; suggest options that fit.

benchmarks/gpu/memory.py compares the sum with what CuPy's pools and the driver allocate: the two agree within a tenth.
"""

# B sequences of T tokens in one micro-batch, N = B*T rows, C channels, V vocabulary, L layers
# with tensor parallelism, a rank has n_head / tp heads, V / tp tokens, and 4C / tp channels of the MLP's hidden layer

import math
from dataclasses import replace

from gpt2core.arena import Arena, round_up
from gpt2core.errors import counted
from gpt2core.model import parameter_shapes
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.tensor_parallel import shard_shapes

FP32 = 4  # bytes
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of an activation, and of a parameter that the kernels read
LOGITS = 1 << 29  # elements of the logits that are computed at a time
ALIGNED = 64  # columns: logits are padded to a multiple, so that the start of each row is aligned
WORKSPACE = 64 << 20  # bytes of cublasLt's workspaces, for two streams
WIDE = 1 << 25  # elements of GELU's input; from this size GELU is faster as an epilogue of the product than as a kernel
CONTEXT = 550 << 20  # bytes of the CUDA context and the loaded kernels on an H200, which CuPy's pools do not count
MARGIN = 1.1  # the prediction is right within a tenth
# Buffers for the codes sent and received, as a multiple of a message's size
CODE_BUFFERS = {"none": 0, "fp16": 1.2, "bf16": 1.2, "int8": 0.7}


def training_memory(config, batch_size, seq_len, precision, micro_batches=1, ranks=1, parallel=None, in_order=False):
    """{term: maximum bytes} of one rank that trains on `batch_size` sequences a step, in `micro_batches` parts.

    ranks: the data-parallel ranks; there are parallel.tp times as many in all. parallel: a ParallelConfig. in_order:
    whether the GPUs sum gradients in the canonical order.
    """
    parallel = parallel or ParallelConfig()
    tp, owners = parallel.tp, ranks if parallel.zero else 1
    C, V, L = config.n_embd, round_up(config.vocab_size // tp, ALIGNED), config.n_layer
    rows = -(-batch_size // micro_batches) * seq_len
    stream = BYTES[precision] * rows * C  # an array (N, C), the size of the residual stream
    several = micro_batches > 1  # with one micro-batch, backward writes gradients directly into the sum
    head = FP32 * V * C * several  # the gradient of lm_head
    layer_gradients = head * config.tied + 4 * FP32 * C * C // tp * several  # in the backward pass of an MLP
    halves = precision == "fp32"  # each operand of a product is split into two arrays of half the bytes
    logits = BYTES[precision] * min(rows, max(1, LOGITS // V)) * V
    fused = BYTES[precision] < FP32 and 4 * rows * C // tp >= WIDE  # only the gradient of GELU's input is stored
    arena = Arena(shard_shapes(parameter_shapes(config), tp), owners)
    size, whole = arena.size, Arena(parameter_shapes(config)).size
    message = size  # elements of the gradients in one message
    if parallel.dp != "flat" and parallel.bucket_mb is not None:  # None: the size is measured later; assume the maximum
        message = min(size, int(parallel.bucket_mb * 1e6 / FP32) + max(map(math.prod, arena.shapes.values())))
    return {
        "parameters": FP32 * size,
        "copy of the parameters": BYTES[precision] * size if BYTES[precision] < FP32 else 0,
        # one partial sum per level of the tree over the micro-batches
        "gradients": FP32 * size * max(1, (micro_batches - 1).bit_length()),
        "moments": 2 * FP32 * size // owners,
        # what forward keeps per layer, in arrays (N, C): qkv 3, attention 1, residual stream and LayerNorm 2, the MLP's
        # hidden layer before and after GELU 4 + 4, residual stream and LayerNorm 2; qkv, attention and the hidden layer
        # are split over the tp ranks
        "activations": (4 * L + 2) * stream + 12 * L * stream // tp,
        # LayerNorm's mean and inverse standard deviation, attention's logsumexp
        "statistics": FP32 * rows * (4 * L + 2 + config.n_head * L // tp),
        # the larger of two temporary peaks: a chunk of logits in the loss, with the gradients of both operands; or,
        # a little later, the gradients in the backward pass of an MLP
        "at work": max(
            stream + logits + head + halves * (logits + stream),
            (1 + (tp > 1)) * stream + (4 + 4 * (not fused) + 4 * halves) * stream // tp + layer_gradients,
        ),
        # temporary memory of the side stream, because CuPy's pool does not share blocks between streams: the halves of
        # an MLP's product. The operands kept for it (side_stream.DEPTH) take less than backward has freed by then
        "side stream": halves * (stream + 4 * stream // tp) * (not several),
        # the parts received from other ranks, on NCCL's stream
        "sums over ranks": FP32 * message * in_order * (ranks > 1),
        # error feedback of the gradients and of their sums, and the codes
        "compression": int(FP32 * (size + size // ranks + CODE_BUFFERS[parallel.compress] * message))
        * (parallel.compress != "none"),
        "gathered to save": FP32 * whole * (tp > 1),  # in addition to the workspace of the captured step
        "tokens": 12 * FP32 * rows * micro_batches,  # inputs, targets, their sort order, and the sort's temporaries
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def generation_memory(config, precision, batch_size=1, tp=1):
    """{term: maximum bytes} of one of `tp` ranks that generates from `batch_size` prompts of block_size tokens."""
    rows, width = batch_size * config.block_size, BYTES[precision]
    stream = width * rows * config.n_embd
    return {
        "parameters": width * Arena(shard_shapes(parameter_shapes(config), tp)).size,
        "keys and values": 2 * config.n_layer * stream // tp,
        # the activations of one layer of the prompts; the MLP's hidden layer and qkv are split over the ranks
        "at work": 4 * stream + 8 * stream // tp + width * batch_size * config.vocab_size,
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def largest_batch(fits, batch_size, step):
    """The largest multiple n of `step` below `batch_size` with fits(n), or 0; if n does not fit, no larger n does."""
    low, high = 0, -(-batch_size // step)  # in steps; `high` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def explain_training_oom(
    config, batch_size, seq_len, precision, micro_batches, ranks, free, parallel=None, in_order=False
):  # fmt: skip
    """One sentence: the memory that the training step needs, the free memory, and options that fit.

    free: bytes of this rank's GPU. batch_size and micro_batches count all ranks together; the other arguments are those
    of training_memory.
    """
    parallel = parallel or ParallelConfig()

    def needed(sequences, parts, parallel=parallel):
        sizes = sequences // ranks, seq_len, precision, parts // ranks
        return sum(training_memory(config, *sizes, ranks, parallel, in_order).values())

    def fits(sequences, parts=micro_batches, parallel=parallel):
        return MARGIN * needed(sequences, parts, parallel) <= free

    options, parts = [], 2 * micro_batches
    if batch := largest_batch(fits, batch_size, micro_batches):
        options.append(f"--batch-size {batch}")
    while batch_size % parts == 0 and not fits(batch_size, parts):
        parts *= 2
    if batch_size % parts == 0:
        options.append(f"--micro-batches {parts}")
    if not parallel.zero and fits(batch_size, parallel=replace(parallel, zero=1)):
        options.append("--zero 1")
    if parallel.compress != "none" and fits(batch_size, parallel=replace(parallel, compress="none")):
        options.append("--compress none")
    given = {"tp": parallel.tp, "zero": parallel.zero, "compress": parallel.compress}
    flags = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(ParallelConfig(), name))
    return (
        f"--batch-size {batch_size} of {seq_len} tokens in {counted(micro_batches, 'micro-batch')}"
        f"{' with' * bool(flags)}{flags} needs "
        f"about {gib(needed(batch_size, micro_batches))} in {precision}, but only {gib(free)} are free; "
        f"use {join_options(options) or 'a smaller --seq-len, or a smaller model'}"
    )


def join_options(options):
    """ "a, b or c"; empty for no options."""
    *most, last = options or [""]
    return f"{', '.join(most)} or {last}" if most else last


def explain_generation_oom(config, precision, free, tp=1):
    """One sentence: the memory that generation needs on one of `tp` ranks, the free memory, and what to do."""
    needed = sum(generation_memory(config, precision, tp=tp).values())
    advice = "use --precision bf16, or a smaller model" if BYTES[precision] == FP32 else "use a smaller model"
    return f"generation needs about {gib(needed)} in {precision}, but only {gib(free)} are free; {advice}"


def is_out_of_memory(error):
    """Whether this is an out-of-memory error of CuPy, CUDA, Triton or cublasLt."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "alloc_failed" in words


def gib(count):
    return f"{count / 2**30:.1f} GiB"

"""How much device memory a training step takes, as a sum of terms that have names; and what to do where it is too much.

benchmarks/gpu/memory.py holds the sum against what CuPy's pools and the driver have given out: within a tenth.
"""

# B sequences of T tokens in one micro-batch, N = B*T rows, C channels, V vocabulary, L layers
# a rank has heads / tp, V / tp, and a middle of the MLP of 4C / tp channels

import math
from dataclasses import replace

from gpt2core.arena import Arena, round_up
from gpt2core.errors import counted
from gpt2core.model import parameter_shapes
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.tensor_parallel import shard_shapes

FP32 = 4  # bytes
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of an activation, and of a parameter that the kernels read
LOGITS = 1 << 29  # elements of logits that exist at once
ALIGNED = 64  # columns: logits are padded to a multiple, because a row must begin where the GPU can read it at once
WORKSPACE = 64 << 20  # of cublasLt, for two streams
WIDE = 1 << 25  # elements of a GELU's input from which it costs less in the product than in a kernel of its own
CONTEXT = 550 << 20  # of CUDA, with the kernels that are loaded: what an H200's driver counts beside CuPy's pools
MARGIN = 1.1  # the model is right within a tenth
CODING = {"none": 0, "fp16": 1.2, "bf16": 1.2, "int8": 0.7}  # arrays of a message's size: its codes, sent and come


def training_memory(config, batch_size, seq_len, precision, micro_batches=1, ranks=1, parallel=None, in_order=False):
    """{what: bytes at most} of a rank that trains on `batch_size` sequences a step, in `micro_batches` parts.

    It is one of `ranks` that are data parallel, times parallel.tp (a ParallelConfig); in_order: whether the GPUs add
    gradients up in the canonical tree.
    """
    parallel = parallel or ParallelConfig()
    tp, owners = parallel.tp, ranks if parallel.zero else 1
    C, V, L = config.n_embd, round_up(config.vocab_size // tp, ALIGNED), config.n_layer
    rows = -(-batch_size // micro_batches) * seq_len
    stream = BYTES[precision] * rows * C  # an array (N, C), as large as the residual stream
    several = micro_batches > 1  # else gradients are written where they are summed
    head = FP32 * V * C * several  # the gradient of lm_head
    in_middle = head * config.tied + 4 * FP32 * C * C // tp * several  # of gradients, in the middle of backward
    halves = precision == "fp32"  # a product's operands are split first, in two of half the bytes
    logits = BYTES[precision] * min(rows, max(1, LOGITS // V)) * V
    fused = BYTES[precision] < FP32 and 4 * rows * C // tp >= WIDE  # then GELU's input has a gradient, its output none
    arena = Arena(shard_shapes(parameter_shapes(config), tp), owners)
    size, whole = arena.size, Arena(parameter_shapes(config)).size
    message = size  # elements of gradients that travel together
    if parallel.dp != "flat" and parallel.bucket_mb is not None:  # else it is measured, and all of it at most
        message = min(size, int(parallel.bucket_mb * 1e6 / FP32) + max(map(math.prod, arena.shapes.values())))
    return {
        "parameters": FP32 * size,
        "copy of the parameters": BYTES[precision] * size if BYTES[precision] < FP32 else 0,
        # one sum for each level of the tree over the micro-batches
        "gradients": FP32 * size * max(1, (micro_batches - 1).bit_length()),
        "moments": 2 * FP32 * size // owners,
        # what forward keeps of a layer: qkv 3, attention 1, residual stream and LayerNorm 2, the MLP's middle before
        # and after GELU 4 + 4, residual stream and LayerNorm 2; of heads and the middle this rank has its part
        "activations": (4 * L + 2) * stream + 12 * L * stream // tp,
        # LayerNorm's mean and 1 / deviation, logsumexp
        "statistics": FP32 * rows * (4 * L + 2 + config.n_head * L // tp),
        # the most that exists beside these: a chunk of logits as the loss is computed, with the gradients of both
        # factors; or, a little later, the gradients of an MLP
        "at work": max(
            stream + logits + head + halves * (logits + stream),
            (1 + (tp > 1)) * stream + (4 + 4 * (not fused) + 4 * halves) * stream // tp + in_middle,
        ),
        # its own scratch, which CuPy's pool keeps for each stream apart: the halves of an MLP's product. The operands
        # that wait for it (side_stream.DEPTH) take nothing more: less than what backward has let go by then
        "side stream": halves * (stream + 4 * stream // tp) * (not several),
        # the parts of a sum that others send, on NCCL's stream; what compression has lost, of gradients and of sums
        "sums over ranks": FP32 * message * in_order * (ranks > 1),
        "compression": int(FP32 * (size + size // ranks + CODING[parallel.compress] * message))
        * (parallel.compress != "none"),
        "gathered to save": FP32 * whole * (tp > 1),  # beside what a recorded step holds for good
        "tokens": 12 * FP32 * rows * micro_batches,  # inputs and targets, their sorted order, and what sorts them
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def generation_memory(config, precision, batch_size=1, tp=1):
    """{what: bytes at most} of a continuation of `batch_size` prompts that fill the block, by one of `tp` ranks."""
    rows, width = batch_size * config.block_size, BYTES[precision]
    stream = width * rows * config.n_embd
    return {
        "parameters": width * Arena(shard_shapes(parameter_shapes(config), tp)).size,
        "keys and values": 2 * config.n_layer * stream // tp,
        # of one layer of the prompt, two arrays at a time; the MLP's middle, and q, k and v, are the rank's part
        "at work": 4 * stream + 8 * stream // tp + width * batch_size * config.vocab_size,
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def largest_batch(fits, batch_size, step):
    """The largest multiple of `step` below `batch_size` that fits, or 0; fits(n) does not hold above where it fails."""
    low, high = 0, -(-batch_size // step)  # in steps; `high` is too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def no_room_to_train(
    config, batch_size, seq_len, precision, micro_batches, ranks, free, parallel=None, in_order=False
):  # fmt: skip
    """One sentence: what was asked for takes so much, so much there is (`free`, bytes), and what would fit.

    batch_size and micro_batches are those of all ranks, bytes those of one; the rest is training_memory's.
    """
    parallel = parallel or ParallelConfig()

    def needed(sequences, shards, parallel=parallel):
        sizes = sequences // ranks, seq_len, precision, shards // ranks
        return sum(training_memory(config, *sizes, ranks, parallel, in_order).values())

    def fits(sequences, shards=micro_batches, parallel=parallel):
        return MARGIN * needed(sequences, shards, parallel) <= free

    ways, shards = [], 2 * micro_batches
    if batch := largest_batch(fits, batch_size, micro_batches):
        ways.append(f"--batch-size {batch}")
    while batch_size % shards == 0 and not fits(batch_size, shards):
        shards *= 2
    if batch_size % shards == 0:
        ways.append(f"--micro-batches {shards}")
    if not parallel.zero and fits(batch_size, parallel=replace(parallel, zero=1)):
        ways.append("--zero 1")
    if parallel.compress != "none" and fits(batch_size, parallel=replace(parallel, compress="none")):
        ways.append("--compress none")
    given = {"tp": parallel.tp, "zero": parallel.zero, "compress": parallel.compress}
    flags = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(ParallelConfig(), name))
    return (
        f"--batch-size {batch_size} of {seq_len} tokens in {counted(micro_batches, 'micro-batch')}"
        f"{' with' * bool(flags)}{flags} takes "
        f"about {gib(needed(batch_size, micro_batches))} in {precision}, and {gib(free)} are free: "
        f"use {listed(ways) or 'a smaller --seq-len, or a smaller model'}"
    )


def listed(ways):
    *most, last = ways or [""]
    return f"{', '.join(most)} or {last}" if most else last


def no_room_to_write(config, precision, free, tp=1):
    """The same of a generation, by one of `tp` ranks."""
    needed = sum(generation_memory(config, precision, tp=tp).values())
    way = "use --precision bf16, or a smaller model" if BYTES[precision] == FP32 else "use a smaller model"
    return f"to write with these weights takes about {gib(needed)} in {precision}, and {gib(free)} are free: {way}"


def is_out_of_memory(error):
    """Whether CuPy, CUDA under it, Triton or cublasLt has found no memory."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "alloc_failed" in words


def gib(count):
    return f"{count / 2**30:.1f} GiB"

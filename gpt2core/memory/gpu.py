"""Predict the memory of one GPU in a training step or in a generation, as a sum of named terms.

benchmarks/gpu/memory.py compares the sum with the memory that CuPy and the driver allocate; they agree within 10 %.
"""

# B sequences of T tokens in one micro-batch, N = B*T rows, C channels, V vocabulary, L layers. With tensor parallelism
# over tp ranks, a rank has n_head / tp heads and 4C / tp channels of the MLP's hidden layer. It computes S / tp slices,
# one after another; slice 0 has n_head / S heads, ceil(V / S) tokens, and 4C / S channels of the hidden layer.

import math
from typing import NamedTuple

from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena, round_up
from gpt2core.memory.gpu_sizes import CHUNK_LOGITS, CONTEXT, LOGITS_ALIGNMENT, MIN_FUSED_GELU, WORKSPACE
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.pipeline.micro_batches import make_schedule
from gpt2core.parallel.pipeline.placement import ranks_of_parameters, units_of_chunks
from gpt2core.parallel.pipeline.simulator import simulate
from gpt2core.parallel.sharded.units import most_at_once, shard_lengths
from gpt2core.parallel.tensor.shards import shard_shapes

FP32 = 4  # bytes per element
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # per activation, and per parameter that the kernels read
MARGIN = 1.1  # a configuration is suggested only if 1.1 times its predicted memory is free
# The bytes of the buffers for the codes of `compress`, sent and received, divided by the bytes of a message in fp32
CODE_BUFFERS = {"none": 0, "fp16": 1.2, "bf16": 1.2, "int8": 0.7}


class Share(NamedTuple):
    """What a rank of a pipeline has of the model and of its activations; without a pipeline, all."""

    shapes: list  # of its parameters: [(name, shape)]
    layers: int  # of its largest chunk
    live: int  # the most chunks of micro-batches whose activations are kept at the same time
    has_head: bool
    copies: int  # elements of its copy of a tied table


def shares(config, parallel, micro_batches):
    """[the Share of each rank of the pipeline]."""
    shapes, pp = list(parameter_shapes(config)), parallel.pp
    if pp == 1:
        return [Share(shapes, config.n_layer, 1, True, 0)]
    placement = ranks_of_parameters(config, pp, parallel.chunks)
    chunks = units_of_chunks(config, pp * parallel.chunks)
    peaks = simulate(make_schedule(parallel, micro_batches, config.tied)).peaks
    found = []
    for rank in range(pp):
        own = chunks[rank::pp]
        units = [unit for chunk in own for unit in chunk]
        layers = max(sum(unit.startswith("h.") for unit in chunk) for chunk in own)
        copied = config.tied and "embedding" in units and "head" not in units
        own_shapes = [(name, shape) for name, shape in shapes if placement[name] == rank]
        copies = config.vocab_size * config.n_embd * copied
        found.append(Share(own_shapes, layers, math.ceil(peaks[rank]), "head" in units, copies))
    return found


def training_memory(*sizes, **options):
    """The result of memory_of_ranks() for the rank that needs most; the arguments are the same."""
    return max(memory_of_ranks(*sizes, **options), key=lambda terms: sum(terms.values()))


def memory_of_ranks(config, batch_size, seq_len, precision, micro_batches=1, ranks=1, parallel=None, in_order=False):
    """[{term: maximum bytes} of each rank of a pipeline], in a step of `batch_size` sequences; one without a pipeline.

    batch_size and micro_batches count this replica only. ranks: the number of data-parallel ranks. parallel: a
    ParallelConfig. in_order: whether the GPUs sum gradients in the canonical order.
    """
    parallel = parallel or ParallelConfig()
    sizes = batch_size, seq_len, precision, micro_batches, ranks, parallel, in_order
    return [memory_of_share(config, share, *sizes) for share in shares(config, parallel, micro_batches)]


def memory_of_share(config, share, batch_size, seq_len, precision, micro_batches, ranks, parallel, in_order):
    """{term: maximum bytes} of a rank with this Share; the other arguments are those of memory_of_ranks()."""
    tp, S, slices, owners = parallel.tp, parallel.canonical_tp, parallel.slices, ranks if parallel.zero == 1 else 1
    C, V, L = config.n_embd, round_up(math.ceil(config.vocab_size / S), LOGITS_ALIGNMENT), share.layers
    rows = -(-batch_size // micro_batches) * seq_len
    activation = BYTES[precision] * rows * C  # bytes of one array (N, C), such as the residual stream
    # the gradient of lm_head is computed in forward, in an array of its own; kernels write the others to the arena, or
    # add them: every second micro-batch needs a temporary array for each
    accumulates = micro_batches > 1
    head_gradient = FP32 * slices * V * C * share.has_head
    layer_gradients = 4 * FP32 * C * C // S * accumulates  # the gradient of one MLP weight
    splits_operands = precision == "fp32"  # each operand of a product becomes two fp16 arrays (gemm/fp16x3.py)
    # a copy of the head's matrix, with padding rows if V needs them, or in two fp16 arrays
    pads = V != math.ceil(config.vocab_size / S)
    head_copy = BYTES[precision] * V * C * (splits_operands | pads) * share.has_head
    logits = BYTES[precision] * min(rows, max(1, CHUNK_LOGITS // V)) * V * share.has_head
    # with GELU as an epilogue of the product, backward needs only the gradient of GELU's input
    fused_gelu = BYTES[precision] < FP32 and 4 * rows * C // S >= MIN_FUSED_GELU
    # with `recompute=block`, forward keeps the activations of the last layer and the input of every other layer;
    # backward holds the activations of one layer at a time; a rank of a pipeline without the head keeps only inputs
    last = int(share.has_head)
    kept, inputs = (L * share.live, 0) if parallel.recompute == "none" or L == last else (1, (L - last) * share.live)
    # and, counted for every GPU, the partial sums of this gradient, four for each tile of 128 rows, which
    # gemm/gluon_gelu.py writes on a Hopper GPU
    partial_sums = fused_gelu * FP32 * 4 * -(-rows // 128) * 4 * C // S
    arena = DividedArena(shard_shapes(share.shapes, 0, tp, slices), owners)
    size, full_size = arena.size, Arena(parameter_shapes(config)).size  # elements on this rank, and of the whole model
    message = size  # the most elements of gradients in one message to other ranks
    sums = max(1, (micro_batches - 1).bit_length())  # the canonical sum needs one arena per level of its tree
    whole_parameters = whole_gradients = before_gradients = 0  # of units that are divided over the ranks
    if parallel.zero > 1:
        shards = shard_lengths(arena, ranks)
        units = {unit: ranks * length for unit, length in shards.items()}
        size, message, both = sum(shards.values()), max(units.values()), most_at_once(config, units)
        block = max(length for unit, length in units.items() if unit.startswith("h."))
        # in the backward pass of the last layer: its parameters and those of the layer before; the gradients of the
        # unit that is computed and of the one that is sent, or those of all units if there are several passes
        whole_parameters = BYTES[precision] * (sum(units.values()) if parallel.zero == 2 else 2 * block)
        whole_gradients = FP32 * (sums * sum(units.values()) if accumulates else both)
        sums = 1
        # the head has other parameters in memory, and its gradients are not there before those of the layers
        before_gradients = BYTES[precision] * (both - 2 * block) * (parallel.zero == 3)
        before_gradients -= whole_gradients * (not accumulates)
    # a bucket size of None is measured later: assume the maximum, one bucket for all gradients
    if parallel.dp != "flat" and parallel.bucket_mb is not None:
        message = min(size, int(parallel.bucket_mb * 1e6 / FP32) + max(map(math.prod, arena.shapes.values())))
    return {
        "parameters": FP32 * size,
        "copy of the parameters": BYTES[precision] * (size * (BYTES[precision] < FP32) + share.copies // tp),
        # a tied embedding needs an array of its own for the sum of its two gradients of one micro-batch
        "gradients": FP32 * size * sums + head_gradient * config.tied * accumulates,
        "moments": 2 * FP32 * size // owners,
        "whole parameters": whole_parameters,
        "whole gradients": whole_gradients,
        # what forward keeps per layer, in arrays (N, C): qkv 3, attention 1, residual stream and LayerNorm 2, the MLP's
        # hidden layer before and after GELU 4 + 4, residual stream and LayerNorm 2. Of these, qkv, attention and the
        # hidden layer (12) are divided over the tp ranks. The residual stream and LayerNorm after the last layer add 2
        "activations": (4 * kept + 2 + inputs) * activation + 12 * kept * activation // tp,
        # LayerNorm's mean and inverse standard deviation, attention's logsumexp
        "statistics": FP32 * rows * (4 * kept + 2 + config.n_head * kept // tp),
        # the larger of two peaks: in the loss, a chunk of logits, the copy of the matrix and the gradients of both
        # operands; or in the backward pass of an MLP, its gradients
        "temporary arrays": max(
            slices * activation
            + logits
            + head_gradient
            + head_copy
            + splits_operands * (logits + activation)
            + before_gradients,
            (1 + (S > 1)) * activation
            + (4 + 4 * (not fused_gelu) + 4 * splits_operands) * activation // S
            + partial_sums
            + head_gradient,  # which the side stream has not yet added to the arena
        ),
        # with `recompute=block` backward frees the activations of only one layer, in pieces that are too small for an
        # array of the next layer's MLP, unless the memory of the logits is large enough
        "free in pieces": 4 * activation // S * (inputs > 0 and 4 * activation // S > logits),
        # temporary arrays of the side stream, which has blocks of its own in CuPy's pool: the fp16 operands of the
        # product that computes the gradient of an MLP weight. The operands that SideStream keeps need less memory than
        # backward has freed by then
        "side stream": splits_operands * (activation + 4 * activation // S) + layer_gradients,
        # the parts received from other ranks, on NCCL's stream
        "sums over ranks": FP32 * message * in_order * (ranks > 1),
        # the residuals (error feedback) of the gradients and of their sums, and the buffers for codes
        "compression": int(FP32 * (size + size // ranks + CODE_BUFFERS[parallel.compress] * message))
        * (parallel.compress != "none"),
        # the whole model, for a checkpoint, while the captured step keeps its memory
        "gathered to save": FP32 * full_size * (tp > 1 or parallel.pp > 1 or parallel.zero > 1),
        # activations and their gradients on the way: received for this action and the next one, and sent
        "messages of the pipeline": 6 * activation * (parallel.pp > 1),
        "tokens": 12 * FP32 * rows * micro_batches,  # at most 12 numbers per token: input, target, sorted order
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def generation_memory(config, precision, batch_size=1, tp=1):
    """{term: maximum bytes} of one of `tp` ranks that generates from `batch_size` prompts of block_size tokens."""
    rows, itemsize = batch_size * config.block_size, BYTES[precision]
    activation = itemsize * rows * config.n_embd  # bytes of one array (N, C) for the whole prompts
    return {
        "parameters": itemsize * Arena(shard_shapes(parameter_shapes(config), 0, tp)).size,
        "keys and values": 2 * config.n_layer * activation // tp,
        # the activations of one layer; the MLP's hidden layer and qkv are divided over the ranks; and the logits
        "temporary arrays": 4 * activation + 8 * activation // tp + itemsize * batch_size * config.vocab_size,
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }

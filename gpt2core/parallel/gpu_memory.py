"""Predict the memory of one GPU in a training step or in a generation, as a sum of named terms.

benchmarks/gpu/memory.py compares the sum with the memory that CuPy and the driver allocate; they agree within 10 %.
"""

# B sequences of T tokens in one micro-batch, N = B*T rows, C channels, V vocabulary, L layers. With tensor parallelism
# over tp ranks, each rank has n_head / tp heads, V / tp tokens, and 4C / tp channels of the MLP's hidden layer.

import math

from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena, round_up
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided_arena import DividedArena
from gpt2core.parallel.tensor_parallel import shard_shapes

FP32 = 4  # bytes per element
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # per activation, and per parameter that the kernels read
CHUNK_LOGITS = 1 << 29  # the most logits that are computed at a time
LOGITS_ALIGNMENT = 64  # the rows of the logits are padded to a multiple of this many columns, so that rows are aligned
WORKSPACE = 64 << 20  # bytes of cublasLt's workspaces, for two streams
MIN_FUSED_GELU = 1 << 25  # elements of GELU's input; from this size cublasLt's GELU epilogue is faster than a kernel
CONTEXT = 550 << 20  # bytes of the CUDA context and the loaded kernels on an H200, which CuPy's pools do not count
MARGIN = 1.1  # a configuration is suggested only if 1.1 times its predicted memory is free
# The bytes of the buffers for the codes of `compress`, sent and received, divided by the bytes of a message in fp32
CODE_BUFFERS = {"none": 0, "fp16": 1.2, "bf16": 1.2, "int8": 0.7}


def training_memory(config, batch_size, seq_len, precision, micro_batches=1, ranks=1, parallel=None, in_order=False):
    """{term: maximum bytes} of one rank that trains on `batch_size` sequences per step.

    batch_size and micro_batches count this rank only. ranks: the number of data-parallel ranks. parallel: a
    ParallelConfig. in_order: whether the GPUs sum gradients in the canonical order.
    """
    parallel = parallel or ParallelConfig()
    tp, owners = parallel.tp, ranks if parallel.zero else 1
    C, V, L = config.n_embd, round_up(config.vocab_size // tp, LOGITS_ALIGNMENT), config.n_layer
    rows = -(-batch_size // micro_batches) * seq_len
    activation = BYTES[precision] * rows * C  # bytes of one array (N, C), such as the residual stream
    # the gradient of lm_head is computed in forward, in an array of its own; kernels write the others to the arena, or
    # add them: every second micro-batch needs a temporary array for each
    accumulates = micro_batches > 1
    head_gradient = FP32 * V * C
    layer_gradients = 4 * FP32 * C * C // tp * accumulates  # the gradient of one MLP weight
    splits_operands = precision == "fp32"  # each operand of a product becomes two fp16 arrays (gemm/fp16x3.py)
    logits = BYTES[precision] * min(rows, max(1, CHUNK_LOGITS // V)) * V
    # with GELU as an epilogue of the product, backward needs only the gradient of GELU's input
    fused_gelu = BYTES[precision] < FP32 and 4 * rows * C // tp >= MIN_FUSED_GELU
    # with `recompute=block`, forward keeps the activations of the last layer and the input of every other layer;
    # backward holds the activations of one layer at a time
    kept, inputs = (L, 0) if parallel.recompute == "none" or L == 1 else (1, L - 1)
    # and, counted for every GPU, the partial sums of this gradient, four for each tile of 128 rows, which
    # gemm/gluon_gelu.py writes on a Hopper GPU
    partial_sums = fused_gelu * FP32 * 4 * -(-rows // 128) * 4 * C // tp
    arena = DividedArena(shard_shapes(parameter_shapes(config), tp), owners)
    size, full_size = arena.size, Arena(parameter_shapes(config)).size  # elements on this rank, and of the whole model
    message = size  # the most elements of gradients in one message to other ranks
    # a bucket size of None is measured later: assume the maximum, one bucket for all gradients
    if parallel.dp != "flat" and parallel.bucket_mb is not None:
        message = min(size, int(parallel.bucket_mb * 1e6 / FP32) + max(map(math.prod, arena.shapes.values())))
    return {
        "parameters": FP32 * size,
        "copy of the parameters": BYTES[precision] * size if BYTES[precision] < FP32 else 0,
        # the canonical sum needs one arena per level of its tree over the micro-batches
        # a tied embedding needs an array of its own for the sum of its two gradients of one micro-batch
        "gradients": FP32 * size * max(1, (micro_batches - 1).bit_length()) + head_gradient * config.tied * accumulates,
        "moments": 2 * FP32 * size // owners,
        # what forward keeps per layer, in arrays (N, C): qkv 3, attention 1, residual stream and LayerNorm 2, the MLP's
        # hidden layer before and after GELU 4 + 4, residual stream and LayerNorm 2. Of these, qkv, attention and the
        # hidden layer (12) are divided over the tp ranks. The residual stream and LayerNorm after the last layer add 2
        "activations": (4 * kept + 2 + inputs) * activation + 12 * kept * activation // tp,
        # LayerNorm's mean and inverse standard deviation, attention's logsumexp
        "statistics": FP32 * rows * (4 * kept + 2 + config.n_head * kept // tp),
        # the larger of two peaks: in the loss, a chunk of logits and the gradients of both operands; or in the backward
        # pass of an MLP, its gradients
        "temporary arrays": max(
            activation + logits + head_gradient + splits_operands * (logits + activation),
            (1 + (tp > 1)) * activation
            + (4 + 4 * (not fused_gelu) + 4 * splits_operands) * activation // tp
            + partial_sums
            + head_gradient,  # which the side stream has not yet added to the arena
        ),
        # with `recompute=block` backward frees the activations of only one layer, in pieces that are too small for an
        # array of the next layer's MLP, unless the memory of the logits is large enough
        "free in pieces": 4 * activation // tp * (inputs > 0 and 4 * activation // tp > logits),
        # temporary arrays of the side stream, which has blocks of its own in CuPy's pool: the fp16 operands of the
        # product that computes the gradient of an MLP weight. The operands that SideStream keeps need less memory than
        # backward has freed by then
        "side stream": splits_operands * (activation + 4 * activation // tp) + layer_gradients,
        # the parts received from other ranks, on NCCL's stream
        "sums over ranks": FP32 * message * in_order * (ranks > 1),
        # the residuals (error feedback) of the gradients and of their sums, and the buffers for codes
        "compression": int(FP32 * (size + size // ranks + CODE_BUFFERS[parallel.compress] * message))
        * (parallel.compress != "none"),
        # the whole model, for a checkpoint, while the captured step keeps its memory
        "gathered to save": FP32 * full_size * (tp > 1),
        "tokens": 12 * FP32 * rows * micro_batches,  # at most 12 numbers per token: input, target, sorted order
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }


def generation_memory(config, precision, batch_size=1, tp=1):
    """{term: maximum bytes} of one of `tp` ranks that generates from `batch_size` prompts of block_size tokens."""
    rows, itemsize = batch_size * config.block_size, BYTES[precision]
    activation = itemsize * rows * config.n_embd  # bytes of one array (N, C) for the whole prompts
    return {
        "parameters": itemsize * Arena(shard_shapes(parameter_shapes(config), tp)).size,
        "keys and values": 2 * config.n_layer * activation // tp,
        # the activations of one layer; the MLP's hidden layer and qkv are divided over the ranks; and the logits
        "temporary arrays": 4 * activation + 8 * activation // tp + itemsize * batch_size * config.vocab_size,
        "workspace": WORKSPACE,
        "context": CONTEXT,
    }

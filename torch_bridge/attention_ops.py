"""The Triton kernels of attention as operators of PyTorch: `triton_forward` and `triton_backward`.

Both are custom operators (torch.library), so torch.compile treats each as one node of its graph. Each has a fake
kernel, from which torch.compile learns the shapes and strides of the outputs. flash_attention.py connects them to
autograd.

Products of float32 follow torch.set_float32_matmul_precision(): with "highest", PyTorch's default, they are "fp16x3"
(three products of fp16 numbers; kernels/attention_fp16x3.py says how large the errors are), otherwise "tf32".
Products of fp16 and bf16 are exact. All sums are float32.
"""

# T_q queries, T_k keys, D head size; q (batch..., T_q, D), k and v (batch..., T_k, D), any number of batch dimensions
# The kernels read them as Heads (B, H, T, D): two batch dimensions.

import functools
import math

import torch
import triton

from stage2_cuda.attention.hopper_launches import serves
from stage2_cuda.attention.launches import AttentionTiles, Heads, TileConfig, default_tiles, gluon_tiles_of
from torch_bridge.kernels import fp16x3_launches
from torch_bridge.kernels.attention_parts import backward_launches, forward_launches
from torch_bridge.triton_launch import check_device, check_equal_kinds, interpreted, launch

DTYPES = torch.float32, torch.float16, torch.bfloat16
HEAD_SIZES = range(16, 129, 8)
ALIGNED = 16  # bytes: a descriptor needs this alignment of addresses and strides

# A tile's loop is divided into up to MAX_PARTS parts, and a launch then has at most PROGRAMS_PER_MULTIPROCESSOR. It is
# done if the longest loop is at least MIN_SAVED iterations longer than the average of a multiprocessor: on an H100 the
# second launch takes as long as about 6 iterations.
PROGRAMS_PER_MULTIPROCESSOR, MAX_PARTS, MIN_SAVED = 4, 8, 6
SMALL_TILES = AttentionTiles(TileConfig(64, 64, 4, 3), both=TileConfig(64, 64, 4, 2))  # 16 bits, few programs


# -- checks ------------------------------------------------------------------------------------------------------------


def check_inputs(q, k, v):
    """Raise TypeError or ValueError, naming both values, unless q, k and v have matching shapes, dtypes and devices."""
    check_equal_kinds(q=q, k=k, v=v)
    if q.dtype not in DTYPES:
        raise TypeError(f"q has dtype {q.dtype}: attention takes {', '.join(map(str, DTYPES))}")
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if min(map(len, shapes)) < 2 or (*shapes[0][:-2], shapes[0][-1]) != (*shapes[1][:-2], shapes[1][-1]):
        raise ValueError(f"q has shape {shapes[0]}, k has {shapes[1]}: only T may differ in (batch..., T, D)")
    if shapes[1] != shapes[2]:
        raise ValueError(f"k has shape {shapes[1]}, v has {shapes[2]}: they must be equal")
    if shapes[0][-1] not in HEAD_SIZES:
        raise ValueError(f"the head size D of q {shapes[0]} is {shapes[0][-1]}: it must be a multiple of 8, 16 to 128")
    if shapes[1][-2] == 0:
        raise ValueError(f"k has shape {shapes[1]}: attention needs at least one key")


# -- strides and tiles -------------------------------------------------------------------------------------------------


def four_dimensions(x):
    """A view (B, H, T, D) of x (batch..., T, D). Raises RuntimeError if the strides of x do not allow a view."""
    return x.view(math.prod(x.shape[:-3]), *x.shape[-3:]) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]


def has_descriptor_strides(x):
    """Whether a descriptor can have the strides of x (B, H, T, D); those of dimensions of size 1 do not matter."""
    pairs = list(zip(x.shape, x.stride(), strict=True))[:3]
    aligned = all(size == 1 or (stride > 0 and stride * x.element_size() % ALIGNED == 0) for size, stride in pairs)
    return aligned and x.stride(3) == 1


def input_heads(x):
    """x (batch..., T, D) as Heads, of a copy if a descriptor cannot read x: for example an expanded gradient."""
    x = x.flatten(0, -4) if x.ndim > 4 else four_dimensions(x)  # flatten copies x if its strides do not allow a view
    if not has_descriptor_strides(x) or x.data_ptr() % ALIGNED:
        x = x.clone(memory_format=torch.contiguous_format)
    return heads_of(x)


def output_heads(x):
    """The Heads of an empty_output(), which a kernel writes: never those of a copy."""
    return heads_of(four_dimensions(x))


def read_heads(q, k, v, is_causal):
    """[Heads of q, k and v]: of k and v only the rows that a query reads, because p = 0 times an infinite v is NaN."""
    q, k, v = map(input_heads, (q, k, v))
    return [q, *(first_rows(x, q.shape[2]) for x in (k, v))] if is_causal else [q, k, v]


def first_rows(heads, T):
    """The Heads of the first T rows, or of all if there are fewer."""
    B, H, rows, D = heads.shape
    return heads._replace(shape=(B, H, min(T, rows), D))


def heads_of(x):
    """The Heads of x (B, H, T, D)."""
    strides = [x.shape[3] if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Heads(x, tuple(x.shape), tuple(strides))


def empty_output(x):
    """An uninitialised tensor like x that a descriptor can write.

    Up to two batch dimensions have x's order of dimensions if a descriptor can; otherwise the tensor is contiguous.
    """
    output = torch.empty_like(x) if x.ndim <= 4 else x.new_empty(x.shape)
    return output if has_descriptor_strides(four_dimensions(output)) else x.new_empty(x.shape)


def allocator(x):
    """A function empty(dtype, *shape) that returns an uninitialised tensor on the device of x; dtype: "float32", ..."""
    return lambda dtype, *shape: x.new_empty(shape, dtype=getattr(torch, dtype))


def float32_precision():
    """The precision of the products of matmul.py: "tf32x3" or "tf32"."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def precision_of(q):
    """The precision of the products of attention: "fp16x3", "tf32", or "ieee" for q of 16 bits."""
    if q.dtype != torch.float32:
        return "ieee"
    return "fp16x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def select_tiles(q, k, precision):
    """The AttentionTiles for Heads q and k: those of fp16x3, smaller ones for few programs, or the tuned ones.

    With fewer programs than multiprocessors the time is that of the longest program. Smaller tiles, and several
    programs for each tile (parts), make it shorter. dq, dk and dv are then computed in one launch, because two launches
    would each leave most of the GPU idle. The number of programs is an estimate for causal attention with T_q = T_k.
    """
    B, H, _, D = q.shape
    T, itemsize = max(q.shape[2], k.shape[2]), q.base.element_size()
    multiprocessors, iterations = multiprocessors_of(q.base.device), triton.cdiv(T, 64)
    programs = B * H * iterations
    # a causal program has iterations / 2 on average; `even`: iterations of a multiprocessor if all had the same number
    even = programs * iterations / (2 * multiprocessors) if multiprocessors else iterations
    in_parts = iterations - even >= MIN_SAVED
    if precision == "fp16x3":
        tiles = next(tiles for largest, tiles in fp16x3_launches.TILES.items() if D <= largest)
    elif itemsize == 2 and (programs <= multiprocessors or in_parts):
        tiles = SMALL_TILES
    else:
        served = not interpreted() and serves(itemsize, B * H, q.shape[2], k.shape[2], D)
        return default_tiles(itemsize, T, D, precision, gluon_tiles_of_device(q.base.device) if served else None)
    if not in_parts:
        return tiles
    forward = divided(tiles.forward, B * H, T, multiprocessors)
    return tiles._replace(forward=forward, both=divided(tiles.both, 2 * B * H, T, multiprocessors))


def divided(tile, heads, T, multiprocessors):
    """`tile` with the number of parts that the limits above allow.

    heads: B * H, or 2 * B * H for the kernel `both`, which has two programs for each tile.
    """
    programs, parts = heads * triton.cdiv(T, tile.block_m), 1
    limit = min(MAX_PARTS, triton.cdiv(T, tile.block_n), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs)
    while 2 * parts <= limit:
        parts *= 2
    return tile._replace(parts=parts)


@functools.cache
def multiprocessors_of(device):
    """The number of multiprocessors of a CUDA device; 0 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.cache
def gluon_tiles_of_device(device):
    """The entries of GLUON_TILES for a CUDA device, {} if it has no Gluon kernels."""
    return gluon_tiles_of(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


# -- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torch_bridge::attention_forward", mutates_args=())
def triton_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (batch..., T_q, D), logsumexp (batch..., T_q) float32, a natural logarithm) of attention."""
    check_inputs(q, k, v)
    check_device(q, "FlashAttention2Triton", "FlashAttention2Torch")
    o, lse = empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.numel():
        precision, y, qkv = precision_of(q), output_heads(o), read_heads(q, k, v, is_causal)
        tile, empty = select_tiles(*qkv[:2], precision).forward, allocator(q)
        if precision == "fp16x3":
            launches = fp16x3_launches.forward_launches(y, lse, *qkv, tile, empty, is_causal, natural=True)
        else:
            launches = forward_launches(y, lse, *qkv, tile, empty, precision, is_causal, natural=True)
        for kernel_launch in launches:
            launch(*kernel_launch, q.device)
    return o, lse


@triton_forward.register_fake
def _(q, k, v, is_causal):
    check_inputs(q, k, v)
    return empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("torch_bridge::attention_backward", mutates_args=())
def triton_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) from do, the gradient of o; o and lse: of triton_forward()."""
    gradients = [empty_output(x) for x in (q, k, v)]
    if not q.numel():
        return gradients[0], *(each.zero_() for each in gradients[1:])
    lse = lse.contiguous()
    precision, delta, lse2 = precision_of(q), torch.empty_like(lse), torch.empty_like(lse)
    T_q, (dy, y), qkv = q.shape[-2], map(input_heads, (do, o)), read_heads(q, k, v, is_causal)
    written = [output_heads(x) for x in gradients]
    if is_causal:
        written[1:] = [first_rows(each, T_q) for each in written[1:]]
        for gradient in gradients[1:]:
            gradient[..., T_q:, :].zero_()
    tiles, empty, arrays = select_tiles(*qkv[:2], precision), allocator(q), (delta, dy, *qkv, y, lse)
    if precision == "fp16x3":
        launches = fp16x3_launches.backward_launches(*written, *arrays, tiles.both, empty, is_causal, natural=True)
    else:
        launches = backward_launches(*written, *arrays, tiles, precision, is_causal, lse2, empty)
    for kernel_launch in launches:
        launch(*kernel_launch, q.device)
    return tuple(gradients)


@triton_backward.register_fake
def _(do, q, k, v, o, lse, is_causal):
    return tuple(empty_output(x) for x in (q, k, v))

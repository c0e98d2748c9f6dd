"""What launches of Gluon kernels share: which GPUs have such kernels, and tensor descriptors.

Importing this file does not import Gluon, which an older Triton may not have.
"""

import functools
import importlib

# What the kernels use of Gluon's module for Hopper GPUs, besides what gluon_tiles.py uses.
INSTRUCTIONS = "fence_async_shared", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"


def gluon_kind(capability, name):
    """The kind of a GPU of this compute capability and name, "H100" or "H200"; None if it has no Gluon kernels."""
    if tuple(capability) != (9, 0) or not has_gluon():
        return None
    return "H100" if "H100" in name or "H800" in name else "H200"


@functools.cache
def has_gluon():
    """Whether this Triton has the parts of Gluon that the kernels use: Triton 3.6 and later."""
    try:
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
        importlib.import_module("stage2_cuda.runtime.gluon_tiles")
    except (ImportError, AttributeError):
        return False
    return all(hasattr(hopper, name) for name in INSTRUCTIONS)


@functools.cache
def shared_layout(block_shape, dtype_name):
    """The layout of a tile in shared memory, swizzled so that the tensor cores read it without bank conflicts."""
    from triton.experimental.gluon import language as gl

    dtype = {"float32": gl.float32, "float16": gl.float16, "bfloat16": gl.bfloat16}[dtype_name]
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), dtype)


def tile_descriptor(base, shape, strides, block_shape):
    """A Gluon tensor descriptor. base: a Pointer or a PyTorch tensor."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = shared_layout(tuple(block_shape), str(base.dtype).rpartition(".")[2])
    return TensorDescriptor(base, list(shape), list(strides), list(block_shape), layout)

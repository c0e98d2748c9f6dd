"""What all Gluon kernels share: tiles in shared memory, barriers, rings.

Gluon is the lower level of Triton. A kernel in Triton says what a program computes; in Gluon it also says in which
registers a tile lies (its layout), when a tile is copied to shared memory, and when the tensor cores start and finish.
The kernels here are for Hopper GPUs (compute capability 9.0):

    TMA      copies a tile between global and shared memory. One thread starts the copy. A barrier in shared memory
             (mbarrier) counts the bytes that have arrived.
    wgmma    a matrix product that four warps, a warp group, start together (warpgroup_mma). It reads its operands from
             shared memory or registers, and runs while the warps compute something else, until warpgroup_mma_wait.

A ring is an array of tiles in shared memory with one barrier per tile. Use number i of a ring has tile i % STAGES. The
barrier `full` of a tile completes a phase each time that a copy to this tile has arrived. A wait names the parity of
the phase, which is (i // STAGES) % 2. In a specialized kernel a tile also has a barrier `empty`, which completes a
phase when every warp group that computes has released the tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

PRODUCER_REGISTERS = gl.constexpr(24)  # per thread of a warp that only starts copies: the minimum

# Triton 3.9 has other names for these functions than Triton 3.6
start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # the threads of a program or of a partition


@gluon.jit
def new_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of this descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers. A phase completes after `arrivals` arrivals and, if bytes are expected, the last byte.

    Each barrier must be used. Triton takes an unused barrier for free memory, which it may use for other data; but an
    initialised barrier must not be read or written as data.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def make_barriers_visible():
    """Make new barriers visible to the TMA unit and to all threads of the program."""
    fence_async_shared()
    synchronize()


@gluon.jit
def slot(i, STAGES: gl.constexpr):
    """(tile, parity) of use number i of a ring."""
    return i % STAGES, (i // STAGES) & 1


@gluon.constexpr_function
def product_layout(columns, warps=4):
    """The layout of a product of `columns` columns that this number of warps computes; 4 are a warp group."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def exp2(x):
    """2**x in one instruction. gl.exp2 takes several, because it also returns denormal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)

// Types, numbers of 16 bits, and instructions of a Hopper GPU, for all kernels in CUDA C. The tests replace this file
// by tests/support/cuda_emulator.h, and run the other files on the CPU.
//
// Macros: BLOCK_THREADS, the threads of a block; BF16, 1 for bf16 and 0 for fp16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2)  // two blocks on a multiprocessor

DEVICE int block_number() { return (int)blockIdx.x; }
DEVICE int block_count() { return (int)gridDim.x; }
DEVICE int thread_number() { return (int)(threadIdx.x % BLOCK_THREADS); }  // so that the compiler knows: not negative
DEVICE float exchange(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE u32 exchange(u32 value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE void block_barrier() { __syncthreads(); }

DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The shared memory of this block, as a struct.
template <class T>
DEVICE T& shared_memory() {
  __shared__ T memory;
  return memory;
}

// The shared memory whose size the launch gives.
extern __shared__ uint4 memory_of_launch[];
DEVICE uint4* dynamic_memory() { return memory_of_launch; }

// -- loads and stores -------------------------------------------------------------------------------------------------

// 16 bytes. Unlike a C++ load, the compiler does not move it to a later place, after wait_for_previous_launch().
DEVICE uint4 load16(const u16* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// 16 bytes that no kernel writes at the same time and that this kernel reads once: they are not kept in the L1 cache.
DEVICE uint4 load_stream(const u16* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// 16 bytes that this kernel does not read again.
DEVICE void store_stream(u16* address, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// -- signals, and copies of shared memory -----------------------------------------------------------------------------

DEVICE u32 shared_address(const void* address) { return (u32)__cvta_generic_to_shared(address); }

// Thread 0 of the block calls this: the signal is given when `bytes` bytes have arrived. Without __syncwarp(1), a barrier
// of thread 0 alone, the compiler may execute mbarrier.init for the whole warp; then compute-sanitizer reports a race.
DEVICE void start_signal(u64* signal, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(signal)) : "memory");
  __syncwarp(1);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; fence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(signal)), "r"(bytes) : "memory");
}

DEVICE void wait_for_signal(u64* signal) {
  asm volatile(
      "{ .reg .pred given;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 given, [%0], 0;\n"
      "@!given bra again; }" ::"r"(shared_address(signal)) : "memory");
}

// Start to copy bytes to shared memory; they count for the signal when they arrive. For this function and the next one,
// addresses and the number of bytes are multiples of 16, and one thread calls it.
DEVICE void start_load(void* to, const void* from, int bytes, u64* signal) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(signal)) : "memory");
}

// Copy bytes of shared memory to global memory. Before it, all threads of the block have called publish_writes() after
// their writes, and then block_barrier(). It returns when the bytes have been written.
DEVICE void store_bytes(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// This thread's writes to shared memory are visible to store_bytes().
DEVICE void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- 16-bit numbers ---------------------------------------------------------------------------------------------------

#if BF16
#define TYPE "bf16"
DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
#else
#define TYPE "f16"
DEVICE float widened(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
DEVICE float low_half(u32 pair) { return widened((u16)pair); }
DEVICE float high_half(u32 pair) { return widened((u16)(pair >> 16)); }
#endif

// Two numbers, rounded to 16 bits: `low` is in the low half.
DEVICE u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Instructions of a Hopper GPU for cluster_step.cu. The tests replace this file by tests/support/cuda_emulator.h, and
// run the other files on the CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(256, 2)

DEVICE int cluster_number() { return (int)(blockIdx.x / 8); }
DEVICE int rank_in_cluster() { return (int)(blockIdx.x % 8); }
DEVICE int thread_number() { return (int)(threadIdx.x % 256); }  // so that the compiler knows: not negative
DEVICE float exchange(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE u32 exchange(u32 value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE void block_barrier() { __syncthreads(); }

// A barrier for all threads of the cluster, in two parts. It orders start_signal() before send().
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float fast_divide(float x, float y) { return __fdividef(x, y); }

// The shared memory of this block, as a struct.
template <class T>
DEVICE T& shared_memory() {
  __shared__ T memory;
  return memory;
}

// Wait until the previous kernel has ended, then allow the next kernel to start.
DEVICE void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}

// The compiler must compute the pointer before this call, and not later, where it is used.
DEVICE void compute_now(const float*& pointer) { asm volatile("" : "+l"(pointer)::"memory"); }

// -- loads ------------------------------------------------------------------------------------------------------------

// The policy of load_once(): a step reads a weight once, so the L2 cache should replace it before other data.
DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes of a weight.
DEVICE uint4 load_once(const u16* address, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(policy));
  return v;
}

// 16 bytes. Unlike a C++ load, the compiler does not move it to a later place, after wait_for_previous_launch().
DEVICE uint4 load16(const u16* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// Data that the previous kernel wrote: from the L2 cache, because the L1 cache may hold an old copy.
DEVICE float4 load_new(const float* address) { return __ldcg((const float4*)address); }

// Start to copy memory to the L2 cache. The address and the number of bytes are multiples of 16.
DEVICE void prefetch(const u16* address, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// -- signals ----------------------------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* address) { return (u32)__cvta_generic_to_shared(address); }
DEVICE u32 remote_address(const void* address, int rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(address)), "r"(rank));
  return result;
}

// One thread of the block calls this: the signal is given when `bytes` bytes have arrived.
DEVICE void start_signal(u64* signal, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(signal)) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; fence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(signal)), "r"(bytes) : "memory");
}

DEVICE void wait_for_signal(u64* signal) {
  asm volatile(
      "{ .reg .pred given;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 given, [%0], 0;\n"
      "@!given bra again; }" ::"r"(shared_address(signal)) : "memory");
}

// Write to the variable at this address in another block of the cluster, and add the bytes to its signal.
DEVICE void send(uint4* address, u64* signal, int rank, uint4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(remote_address(address, rank)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "r"(remote_address(signal, rank)) : "memory");
}
DEVICE void send(float2* address, u64* signal, int rank, float2 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(remote_address(address, rank)), "f"(v.x), "f"(v.y), "r"(remote_address(signal, rank)) : "memory");
}
DEVICE void send(float* address, u64* signal, int rank, float v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               ::"r"(remote_address(address, rank)), "f"(v), "r"(remote_address(signal, rank)) : "memory");
}

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

// c (16, 8) += a (16, 16) b (16, 8). Lane 4 g + t has these elements of c: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1);
// of a: (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8), each with its neighbour in the next column; of b: (2t, g) and
// (2t+8, g), each with its neighbour in the next row.
DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

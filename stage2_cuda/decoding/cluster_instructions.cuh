// Instructions of a Hopper GPU for the kernels with clusters of eight thread blocks. They need
// runtime/instructions.cuh. The tests replace both files by tests/support/cuda_emulator.h.

#define CLUSTER_KERNEL KERNEL __cluster_dims__(8, 1, 1)

DEVICE int cluster_number() { return (int)(blockIdx.x / 8); }
DEVICE int rank_in_cluster() { return (int)(blockIdx.x % 8); }
// A barrier for all threads of the cluster, in two parts. It orders start_signal() before send().
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE float fast_divide(float x, float y) { return __fdividef(x, y); }

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

// Data that the previous kernel wrote: from the L2 cache, because the L1 cache may hold an old copy.
DEVICE float4 load_new(const float* address) { return __ldcg((const float4*)address); }

// Start to copy memory to the L2 cache. The address and the number of bytes are multiples of 16.
DEVICE void prefetch(const u16* address, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Start to copy 16 bytes to shared memory, or zeros. Only this thread may read them, after wait_for_copies().
DEVICE void start_copy(uint4* to, const u16* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// The end of a group of copies.
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most COUNT of this thread's groups are incomplete.
template <int COUNT>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }

// -- signals ----------------------------------------------------------------------------------------------------------

DEVICE u32 remote_address(const void* address, int rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(address)), "r"(rank));
  return result;
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

// -- tensor cores -----------------------------------------------------------------------------------------------------

// c (16, 8) += a (16, 16) b (16, 8). Lane 4 g + t has these elements of c: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1);
// of a: (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8), each with its neighbour in the next column; of b: (2t, g) and
// (2t+8, g), each with its neighbour in the next row.
DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Run kernels in CUDA C on the CPU: they are compiled as C++ after this file, which replaces instructions.cuh and
// cluster_instructions.cuh of stage2_cuda. Macros: BLOCK_THREADS and BF16.
//
// Every thread of a cluster is a fiber (ucontext): it runs until it must wait for other threads, for example in a
// barrier, and then lets the next fiber run. The clusters run one after another.
// A kernel without clusters runs as clusters of eight blocks that do not communicate.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define EMULATED
#define DEVICE static inline
#define KERNEL extern "C" void
#define CLUSTER_KERNEL KERNEL
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;
static float rsqrtf(float x) { return 1 / std::sqrt(x); }

const int BLOCKS = 8, THREADS = BLOCK_THREADS;  // of a cluster and of a block
const size_t STACK_BYTES = 64 << 10, SHARED_BYTES = 48 << 10, DYNAMIC_BYTES = 112 << 10;

struct Barrier {  // `count` threads meet; generation: how often they have met
  int arrived = 0, generation = 0;
};
struct Fiber {
  ucontext_t context;
  int block, thread;
  int generation;  // of all_threads when this thread arrived there
  bool done;
};
static std::vector<Fiber> fibers;
static std::vector<char> stacks, shared_bytes, dynamic_bytes;
static Barrier all_threads, block_barriers[BLOCKS], warp_barriers[BLOCKS * THREADS / 32];
static ucontext_t scheduler;
static Fiber* current;
static int current_cluster, all_clusters;
static std::function<void()> kernel_call;

static void let_others_run() { swapcontext(&current->context, &scheduler); }
static int arrive(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
  return generation;
}
static void wait_for(Barrier& barrier, int generation) {
  while (barrier.generation == generation) let_others_run();
}

DEVICE int cluster_number() { return current_cluster; }
DEVICE int rank_in_cluster() { return current->block; }
DEVICE int block_number() { return current_cluster * BLOCKS + current->block; }
DEVICE int block_count() { return all_clusters * BLOCKS; }
DEVICE int thread_number() { return current->thread; }

// Every lane of a warp publishes `value`; returns those of all lanes.
template <class T>
DEVICE const T* published(T value) {
  static char bytes[2][BLOCKS * THREADS / 32][32 * 32];
  static_assert(sizeof(T) <= 32);
  const int warp = (current->block * THREADS + current->thread) / 32;
  Barrier& barrier = warp_barriers[warp];
  T* values = (T*)bytes[barrier.generation % 2][warp];  // two buffers: a fast lane may already publish its next value
  values[current->thread % 32] = value;
  wait_for(barrier, arrive(barrier, 32));
  return values;
}
DEVICE float exchange(float value, int mask) { return published(value)[current->thread % 32 ^ mask]; }
DEVICE u32 exchange(u32 value, int mask) { return published(value)[current->thread % 32 ^ mask]; }
DEVICE void block_barrier() {
  Barrier& barrier = block_barriers[current->block];
  wait_for(barrier, arrive(barrier, THREADS));
}
DEVICE void cluster_arrive() { current->generation = arrive(all_threads, BLOCKS * THREADS); }
DEVICE void cluster_wait() { wait_for(all_threads, current->generation); }
DEVICE float fast_exp2(float x) { return std::exp2(x); }
DEVICE float fast_divide(float x, float y) { return x / y; }
DEVICE void wait_for_previous_launch() {}
DEVICE uint4 load16(const u16* address) { return *(const uint4*)address; }
DEVICE u64 evict_first() { return 0; }
DEVICE uint4 load_once(const u16* address, u64) { return load16(address); }
DEVICE void prefetch(const u16*, int) {}
DEVICE void compute_now(const float*) {}
DEVICE float4 load_new(const float* address) { return *(const float4*)address; }

template <class T>
DEVICE T& shared_memory() {
  static_assert(sizeof(T) <= SHARED_BYTES);
  return *(T*)(shared_bytes.data() + current->block * SHARED_BYTES);
}

DEVICE uint4* dynamic_memory() { return (uint4*)(dynamic_bytes.data() + current->block * DYNAMIC_BYTES); }
DEVICE void start_copy(uint4* to, const u16* from, bool exists) {
  *to = exists ? load16(from) : make_uint4(0, 0, 0, 0);
}
DEVICE void end_copies() {}
template <int COUNT>
DEVICE void wait_for_copies() {}
DEVICE uint4 load_stream(const u16* address) { return load16(address); }
DEVICE void store_stream(u16* address, uint4 v) { *(uint4*)address = v; }

// A signal is the number of bytes that have not arrived yet.
DEVICE void start_signal(u64* signal, int bytes) { *signal = bytes; }
DEVICE void wait_for_signal(u64* signal) {
  while (*(volatile u64*)signal) let_others_run();
}
DEVICE void start_load(void* to, const void* from, int bytes, u64* signal) {
  std::memcpy(to, from, bytes);
  *signal -= bytes;
}
DEVICE void publish_writes() {}
DEVICE void store_bytes(void* to, const void* from, int bytes) { std::memcpy(to, from, bytes); }
template <class T>
DEVICE T* in_block(T* address, int rank) {
  return (T*)((char*)address + (rank - current->block) * (std::ptrdiff_t)SHARED_BYTES);
}
template <class T>
DEVICE void send(T* address, u64* signal, int rank, T value) {
  *in_block(address, rank) = value;
  *in_block(signal, rank) -= sizeof(T);
}

DEVICE float as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
DEVICE u32 as_bits(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
#if BF16
DEVICE float low_half(u32 pair) { return as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return as_float(pair & 0xFFFF0000u); }
static u16 rounded_to_16_bits(float x) { const u32 bits = as_bits(x); return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }
#else
DEVICE float widened(u16 bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
DEVICE float low_half(u32 pair) { return widened(pair); }
DEVICE float high_half(u32 pair) { return widened(pair >> 16); }
static u16 rounded_to_16_bits(float x) { const _Float16 y = x; u16 bits; std::memcpy(&bits, &y, 2); return bits; }
#endif
DEVICE u32 pack(float low, float high) { return rounded_to_16_bits(low) | (u32)rounded_to_16_bits(high) << 16; }

struct Operands { u32 a[4], b[2]; };
DEVICE float half_of(u32 pair, int i) { return i ? high_half(pair) : low_half(pair); }
DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Operands* lanes = published(Operands{{a0, a1, a2, a3}, {b0, b1}});
  const int g = current->thread % 32 / 4, t = current->thread % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const int lane_t = k % 8 / 2, upper = k / 8;
      const float a = half_of(lanes[row % 8 * 4 + lane_t].a[row / 8 + 2 * upper], k % 2);
      c[i] += a * half_of(lanes[column * 4 + lane_t].b[upper], k % 2);
    }
  }
}

static void run_fiber() {
  kernel_call();
  current->done = true;
  let_others_run();
}

// Run call() in every thread of every cluster.
static void run_clusters(int clusters, std::function<void()> call) {
  kernel_call = call;
  all_clusters = clusters;
  fibers.resize(BLOCKS * THREADS);
  stacks.resize(STACK_BYTES * fibers.size());
  for (current_cluster = 0; current_cluster < clusters; current_cluster++) {
    shared_bytes.assign(BLOCKS * SHARED_BYTES, 0x7F);  // numbers that no kernel should use
    dynamic_bytes.assign(BLOCKS * DYNAMIC_BYTES, 0x7F);
    for (size_t i = 0; i < fibers.size(); i++) {
      Fiber& fiber = fibers[i];
      fiber.block = i / THREADS, fiber.thread = i % THREADS, fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack = {stacks.data() + i * STACK_BYTES, 0, STACK_BYTES};
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (size_t left = fibers.size(); left;) {
      left = 0;
      for (Fiber& fiber : fibers) {
        if (fiber.done) continue;
        current = &fiber;
        swapcontext(&scheduler, &fiber.context);
        left += !fiber.done;
      }
    }
  }
}

// CPU emulation of the few CUDA features that decode_floor.cu uses: every CUDA thread is a fiber.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#define DEV static inline
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }

extern "C" void switch_stack(void** from, void* to);
asm(R"(
.text
.globl switch_stack
switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
struct Warp { u32 gen = 0, count = 0, buffer[2][32]; float b[2][32][2]; u32 a[2][32][6]; };
struct Bar { u32 gen = 0, count = 0; };
struct Block { char* shared; Warp warps[WARPS]; Bar bars[8]; int full[SLOTS]; };
struct Fiber { void* stack; int block, thread; bool done; };
static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* current;
static void* main_stack;
static long yields = 0;
static void yield() { yields++; switch_stack(&current->stack, main_stack); }
#define shared (blocks[current->block].shared)
static inline int block_id() { return current->block; }
static inline int thread_id() { return current->thread; }
static inline Warp& my_warp() { return blocks[current->block].warps[current->thread / 32]; }
static inline float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static inline u32 as_word(float f) { u32 v; memcpy(&v, &f, 4); return v; }
static inline u32 load_relaxed(const u32* p) { u32 v = *(volatile const u32*)p; if (v == EMPTY) yield(); return v; }
static inline uint2 load_relaxed2(const u32* p) { uint2 v{load_relaxed(p), load_relaxed(p + 1)}; return v; }
static inline uint4 load_relaxed4(const u32* p) { return {load_relaxed(p), load_relaxed(p + 1), load_relaxed(p + 2), load_relaxed(p + 3)}; }
static inline void store_relaxed(u32* p, u32 v) { *(volatile u32*)p = v; }
static inline void arrive_all(Warp& w) {
  u32 gen = w.gen;
  if (++w.count == 32) { w.count = 0; w.gen++; }
  else while (*(volatile u32*)&w.gen == gen) yield();
}
static inline u32 exchange_words(u32 v, int from) {
  Warp& w = my_warp(); u32 g = w.gen & 1;
  w.buffer[g][current->thread & 31] = v;
  arrive_all(w);
  return w.buffer[g][from & 31];
}
static inline float shfl_xor(float v, int m) { return as_float(exchange_words(as_word(v), (current->thread & 31) ^ m)); }
static inline u32 shfl_xor_u(u32 v, int m) { return exchange_words(v, (current->thread & 31) ^ m); }
static inline float shfl(float v, int l) { return as_float(exchange_words(as_word(v), l)); }
static inline void warp_sync() { arrive_all(my_warp()); }
static inline void bar(int id, bool wait) {
  Bar& b = blocks[current->block].bars[id]; u32 gen = b.gen;
  if (++b.count == THREADS) { b.count = 0; b.gen++; }
  else if (wait) while (*(volatile u32*)&b.gen == gen) yield();
}
static inline void block_sync() { bar(0, true); }
static inline void bar_sync(int id) { bar(id, true); }
static inline void bar_arrive(int id) { bar(id, false); }
static inline float lo(u32 w) { return as_float(w << 16); }
static inline float hi(u32 w) { return as_float(w & 0xFFFF0000u); }
static inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& w = my_warp(); u32 gen = w.gen & 1, lane = current->thread & 31, g = lane >> 2, t = lane & 3;
  u32 v[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(w.a[gen][lane], v, sizeof v);
  arrive_all(w);
  auto A = [&](int row, int k) { u32 x = w.a[gen][(row & 7) * 4 + (k & 7) / 2][(row >> 3) + 2 * (k >> 3)]; return k & 1 ? hi(x) : lo(x); };
  auto B = [&](int k, int col) { u32 x = w.a[gen][col * 4 + (k & 7) / 2][4 + (k >> 3)]; return k & 1 ? hi(x) : lo(x); };
  if (t == 0)  // other lanes hold columns that are not used
    for (int i = 0; i < 4; i++) {
      float s = 0;
      for (int k = 0; k < 16; k++) s += A(g + 8 * (i >> 1), k) * B(k, 2 * t + (i & 1));
      c[i] += s;
    }
}
static inline u32 round_bf16(float f) { u32 u = as_word(f); return (u + 0x7FFF + ((u >> 16) & 1)) >> 16; }
static inline u32 pack(float l, float h) { return round_bf16(l) | round_bf16(h) << 16; }
static inline float fast_exp2(float v) { return exp2f(v); }
static inline float inverse_sqrt(float v) { return 1 / sqrtf(v); }
static inline void init_barriers() { for (int i = 0; i < SLOTS; i++) blocks[current->block].full[i] = 0; }
static inline void bulk_load(int slot, const char* source, u32 bytes, int) {
  memcpy(shared + slot * SLOT, source, bytes);  // at once: the earliest time at which the copy could overwrite the slot
  blocks[current->block].full[slot]++;
}
static inline int try_wait(int slot, int parity) {
  int full = blocks[current->block].full[slot];
  // phase `parity` completed: full loads so far, of which number full - 1 has parity (full - 1) & 1
  if (full && ((full - 1) & 1) == parity) return 1;
  yield();
  return 0;
}
static inline u32 now() { return 0; }
static inline void fence() {}
static inline void fail() { printf("spin limit: block %d thread %d\n", current->block, current->thread); exit(1); }
#define KERNEL void
#define BOUNDS
#define SPIN_LIMIT 200000

// One decoded token of GPT-2 124M as one persistent kernel, and the barriers and chains that bound its time.
//
// 128 blocks of 12 warps. A block owns 18 columns of qkv, 6 of the projection, 24 of fc, 6 of fc2 and 393 rows of the
// unembedding. Its weights arrive by bulk copies in a ring of 6 slots of 36,864 bytes: two layers ahead. Blocks
// exchange vectors through buffers whose words are EMPTY until they are written (no flags, no barriers): a reader polls
// the words that it needs. A block empties its own words one layer later; there are two sets of buffers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef LAYERS
#define LAYERS 12
#endif
#ifndef VOCAB
#define VOCAB 50257
#endif
#ifndef HEAD_SLOTS
#define HEAD_SLOTS 17  // per block: 16 of 24 rows and one of 16 rows
#define HEAD_ROWS 393
#endif
#define G 128
#define WARPS 12
#define THREADS 384
#define C 768
#define SLOT 36864
#define SLOTS 6
#define LAST_SLOT 24576
#define SPLITS 4
#ifndef COPIES
#define COPIES 1
#endif
#define KEYS 256  // cached keys of one split
#define EMPTY 0xFFFFFFFFu
#define PER_TOKEN (3 * LAYERS + HEAD_SLOTS)
// words of one set of exchange buffers
#define QKV 0
#define ATT 2304
#define ATT_ML (ATT + 12 * SPLITS * 32)
#define XMID (ATT_ML + 12 * SPLITS * 2)
#define GBUF (XMID + C)
#define XOUT (GBUF + 1536)
#define SET_WORDS (XOUT + C)
#define MAXIMA (2 * SET_WORDS)
#define EXCHANGE_WORDS (MAXIMA + 2 * G * 2)
// shared memory, bytes
#define STAGE_WORDS 164
#define STAGE (SLOTS * SLOT)
#define PART (STAGE + WARPS * STAGE_WORDS * 4)
#define BARRIERS (PART + 2 * WARPS * 26 * 4)
#define SHARED_BYTES (BARRIERS + 64)
#define MODE_LOAD 1
#define MODE_POLL 2
// mode >> 8: the number of layers whose weights stay in the L2 cache (evict_last); the others are evict_first

#ifdef EMULATE
#include "emulate.h"
#else
#define DEV __device__ __forceinline__
extern __shared__ __align__(1024) char shared[];
DEV int block_id() { return blockIdx.x; }
DEV int thread_id() { return threadIdx.x; }
DEV u32 load_relaxed(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV uint2 load_relaxed2(const u32* p) { uint2 v; asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v; }
DEV uint4 load_relaxed4(const u32* p) { uint4 v; asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
DEV void store_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEV float shfl_xor(float v, int m) { return __shfl_xor_sync(0xFFFFFFFFu, v, m); }
DEV float shfl(float v, int l) { return __shfl_sync(0xFFFFFFFFu, v, l); }
DEV u32 shfl_xor_u(u32 v, int m) { return __shfl_xor_sync(0xFFFFFFFFu, v, m); }
DEV void warp_sync() { __syncwarp(); }
DEV void block_sync() { __syncthreads(); }
DEV void bar_sync(int id) { asm volatile("bar.sync %0, 384;" :: "r"(id) : "memory"); }
DEV void bar_arrive(int id) { asm volatile("bar.arrive %0, 384;" :: "r"(id) : "memory"); }
DEV void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV float as_float(u32 v) { return __uint_as_float(v); }
DEV u32 as_word(float v) { return __float_as_uint(v); }
DEV float fast_exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
DEV float inverse_sqrt(float v) { return rsqrtf(v); }
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void init_barriers() {
  for (int i = 0; i < SLOTS; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(shared + BARRIERS + 8 * i)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV void bulk_load(int slot, const char* source, u32 bytes, int keep) {
  u64 policy;
  if (keep) asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  u32 barrier = shared_address(shared + BARRIERS + 8 * slot), target = shared_address(shared + slot * SLOT);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :: "r"(target), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DEV int try_wait(int slot, int parity) {
  u32 done, barrier = shared_address(shared + BARRIERS + 8 * slot);
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
DEV u32 now() { u32 v; asm volatile("mov.u32 %0, %%clock;" : "=r"(v) :: "memory"); return v; }
DEV void fence() { __threadfence(); }
DEV void fail() { __trap(); }
#define KERNEL extern "C" __global__ void
#define BOUNDS __launch_bounds__(THREADS, 1)
#define SPIN_LIMIT (1 << 21)
#endif

#define FOR _Pragma("unroll") for

DEV float low(u32 w) { return as_float(w << 16); }
DEV float high(u32 w) { return as_float(w & 0xFFFF0000u); }

// -- polling ---------------------------------------------------------------------------------------------------------

DEV uint2 poll2(const u32* p, int mode) {
  uint2 v = load_relaxed2(p);
  for (int spin = 0; (mode & MODE_POLL) && (v.x == EMPTY || v.y == EMPTY); v = load_relaxed2(p))
    if (++spin > SPIN_LIMIT) fail();
  return v;
}

DEV uint4 poll4(const u32* p, int mode) {
  uint4 v = load_relaxed4(p);
  for (int spin = 0; (mode & MODE_POLL) && (v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY); v = load_relaxed4(p))
    if (++spin > SPIN_LIMIT) fail();
  return v;
}

template <int N>
DEV int any_empty(const u32* v) {
  u32 empty = 0;
  FOR (int i = 0; i < N; i++) empty |= (v[i] == EMPTY);
  return empty;
}

DEV void load16(u32* v, const u32* p) {
  FOR (int i = 0; i < 4; i++) {
    uint4 w = load_relaxed4(p + 4 * i);
    v[4 * i] = w.x; v[4 * i + 1] = w.y; v[4 * i + 2] = w.z; v[4 * i + 3] = w.w;
  }
}

// every word has COPIES copies, to spread the readers; a block reads copy block % COPIES
DEV void publish(u32* p, u32 v) {
  FOR (int i = 0; i < COPIES; i++) store_relaxed(p + i * EXCHANGE_WORDS, v);
}

// -- the ring of weights ---------------------------------------------------------------------------------------------

DEV void issue_load(int n, int tokens, const char* layers, const char* head, int mode) {
  int token = n / PER_TOKEN, i = n % PER_TOKEN;
  if (token >= tokens || (!(mode & MODE_LOAD) && n >= SLOTS)) return;
  if (i < 3 * LAYERS)
    bulk_load(n % SLOTS, layers + ((size_t)i * G + block_id()) * SLOT, SLOT, i < 3 * (mode >> 8));
  else {
    int u = i - 3 * LAYERS;
    const char* own = head + (size_t)block_id() * ((HEAD_SLOTS - 1) * SLOT + LAST_SLOT);
    bulk_load(n % SLOTS, own + (size_t)u * SLOT, u == HEAD_SLOTS - 1 ? LAST_SLOT : SLOT, 0);
  }
}

DEV void wait_slot(int n, int mode) {
  if (!(mode & MODE_LOAD) && n >= SLOTS) return;
  for (int spin = 0; !try_wait(n % SLOTS, (n / SLOTS) & 1);)
    if (++spin > SPIN_LIMIT) fail();
}

// the fragments of 24 columns of 768: a[j] has 8 words of the columns 8 j + lane / 4
DEV void load_fragments(u32 (*a)[8], int n, int warp, int lane) {
  const char* slot = shared + (n % SLOTS) * SLOT;
  FOR (int j = 0; j < 3; j++)
    FOR (int half = 0; half < 2; half++) {
      uint4 v = *(const uint4*)(slot + (((j * WARPS + warp) * 2 + half) * 32 + lane) * 16);
      a[j][4 * half] = v.x; a[j][4 * half + 1] = v.y; a[j][4 * half + 2] = v.z; a[j][4 * half + 3] = v.w;
    }
}

// -- one vector of 64 values per warp as B fragments -------------------------------------------------------------------
// Column 0 of B has the upper 8 bits of the significand (a bf16), column 1 the next 8 bits: their sum has 16 bits.

DEV void stage_pair(u32* stage, u32* b, float x, float y, int lane) {
  u32 upper = pack(x, y), lower = pack(x - low(upper), y - high(upper));
  int row = lane >> 3, index = lane & 7;
  warp_sync();  // the previous phase's reads of stage
  stage[row * 12 + index] = upper;
  stage[(4 + row) * 12 + index] = lower;
  warp_sync();
  const u32* from = stage + (((lane >> 2) & 1) * 4 + (lane & 3)) * 12;
  uint4 v = *(const uint4*)from, w = *(const uint4*)(from + 4);
  b[0] = v.x; b[1] = v.y; b[2] = v.z; b[3] = v.w; b[4] = w.x; b[5] = w.y; b[6] = w.z; b[7] = w.w;
}

// the products of 24 columns with this warp's 64 values: part[0..23]
DEV void product24(float* part, u32 (*a)[8], const u32* b, int lane) {
  float c[4][4] = {};
  FOR (int s = 0; s < 4; s++) {
    mma(c[s & 1], a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], b[2 * s], b[2 * s + 1]);
    mma(c[2 + (s & 1)], a[2][2 * s], 0, a[2][2 * s + 1], 0, b[2 * s], b[2 * s + 1]);
  }
  if ((lane & 3) == 0) {
    int g = lane >> 2;
    part[g] = (c[0][0] + c[1][0]) + (c[0][1] + c[1][1]);
    part[8 + g] = (c[0][2] + c[1][2]) + (c[0][3] + c[1][3]);
    part[16 + g] = (c[2][0] + c[3][0]) + (c[2][1] + c[3][1]);
  }
}

DEV float sum_warps(const float* part, int column) {
  float v[WARPS];
  FOR (int w = 0; w < WARPS; w++) v[w] = part[w * 26 + column];
  return (((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))) + ((v[8] + v[9]) + (v[10] + v[11]));
}

// the end of a product in warp 0: true there, after all warps have stored their parts
DEV int join(int warp, int phase, int mode) {
  if (!(mode & MODE_POLL)) { block_sync(); return warp == 0; }
  if (warp) { bar_arrive(1 + (phase & 1)); return 0; }
  bar_sync(1 + (phase & 1));
  return 1;
}

DEV float normalized(float v, float total, float squares, float gw, float bw) {
  float mean = total * (1.0f / C), variance = fmaxf(squares * (1.0f / C) - mean * mean, 0.0f);
  return (v - mean * gw) * inverse_sqrt(variance + 1e-5f) + bw;
}

DEV float gelu(float v) {
  float u = 0.7978845608f * (v + 0.044715f * v * v * v);
  return v / (1.0f + fast_exp2(-2.885390082f * u));
}

// LayerNorm and 24 columns: stages x, multiplies, and stores this warp's parts and statistics
DEV void layernorm_product(float* part, u32* stage, u32 (*a)[8], float2 x, float2 gamma, int lane) {
  u32 b[8];
  stage_pair(stage, b, x.x * gamma.x, x.y * gamma.y, lane);
  float total = x.x + x.y, squares = x.x * x.x + x.y * x.y;
  product24(part, a, b, lane);
  FOR (int m = 16; m; m >>= 1) { total += shfl_xor(total, m); squares += shfl_xor(squares, m); }
  if (lane == 0) { part[24] = total; part[25] = squares; }
}

// -- attention of one head over one split of the keys -------------------------------------------------------------------
// Key j belongs to split j % SPLITS and has index j / SPLITS there. A warp takes 8 keys per pass; four lanes share a key.

struct Cached { u32 k[3][8], v[3][8]; };

DEV void load_cached(Cached& kv, const u16* own, int older, int warp, int lane) {
  FOR (int p = 0; p < 3; p++) {
    int key = p * 96 + warp * 8 + (lane >> 2);
    const char* at = (const char*)(own + (size_t)key * 128) + (lane & 3) * 32;
    FOR (int half = 0; half < 2; half++) {
      uint4 k = {0, 0, 0, 0}, v = {0, 0, 0, 0};
      if (key < older) { k = *(const uint4*)(at + 16 * half); v = *(const uint4*)(at + 128 + 16 * half); }
      kv.k[p][4 * half] = k.x; kv.k[p][4 * half + 1] = k.y; kv.k[p][4 * half + 2] = k.z; kv.k[p][4 * half + 3] = k.w;
      kv.v[p][4 * half] = v.x; kv.v[p][4 * half + 1] = v.y; kv.v[p][4 * half + 2] = v.z; kv.v[p][4 * half + 3] = v.w;
    }
  }
}

// add acc[0..2 N-1] of this lane and of lane ^ m; each of the two keeps N sums in acc[0..N-1]
template <int N>
DEV int halve(float* acc, int m, int lane) {
  int upper = (lane & m) != 0;
  FOR (int i = 0; i < N; i++) {
    float send = upper ? acc[i] : acc[N + i], keep = upper ? acc[N + i] : acc[i];
    acc[i] = keep + shfl_xor(send, m);
  }
  return upper ? N : 0;
}

// older: cached keys of this split; newest: the index of the newest key in this split, -1 if it is in another split
DEV void attend(float* staged, Cached& kv, const u32* set, u16* own, int head, int older, int newest, int warp, int lane, int mode) {
  int t = lane & 3, slot = warp * 8 + (lane >> 2), mine = newest >= 0 && newest % 96 == slot;
  u32 q[16], k[16], v[16];
  const u32* from = set + QKV + head * 64 + 16 * t;
  FOR (int i = 0; i < 16; i++) k[i] = v[i] = 0;
  for (int spin = 0;;) {
    load16(q, from);
    if (mine) { load16(k, from + C); load16(v, from + 2 * C); }
    if (!(mode & MODE_POLL) || !(any_empty<16>(q) | any_empty<16>(k) | any_empty<16>(v))) break;
    if (++spin > SPIN_LIMIT) fail();
  }
  u32* at = (u32*)(own + (size_t)newest * 128) + 8 * t;
  FOR (int i = 0; i < 8; i++) {
    u32 new_k = pack(as_float(k[2 * i]), as_float(k[2 * i + 1])), new_v = pack(as_float(v[2 * i]), as_float(v[2 * i + 1]));
    if (mine) at[i] = new_k, at[32 + i] = new_v;
    FOR (int p = 0; p < 3; p++) {
      int hit = p * 96 + slot == newest;
      kv.k[p][i] = hit ? new_k : kv.k[p][i];
      kv.v[p][i] = hit ? new_v : kv.v[p][i];
    }
  }
  warp_sync();
  float score[3], maximum = -3.0e38f, sum = 0, acc[16];
  FOR (int p = 0; p < 3; p++) {
    float s = 0;
    FOR (int i = 0; i < 8; i++) s += as_float(q[2 * i]) * low(kv.k[p][i]) + as_float(q[2 * i + 1]) * high(kv.k[p][i]);
    s += shfl_xor(s, 1);
    s += shfl_xor(s, 2);
    int key = p * 96 + slot;
    score[p] = (key < older || key == newest) ? s * (0.125f * 1.44269504f) : -3.0e38f;
    maximum = fmaxf(maximum, score[p]);
  }
  FOR (int m = 4; m < 32; m <<= 1) maximum = fmaxf(maximum, shfl_xor(maximum, m));
  FOR (int i = 0; i < 16; i++) acc[i] = 0;
  FOR (int p = 0; p < 3; p++) {
    float weight = score[p] > -2.0e38f ? fast_exp2(score[p] - maximum) : 0.0f;
    sum += weight;
    FOR (int i = 0; i < 8; i++) { acc[2 * i] += weight * low(kv.v[p][i]); acc[2 * i + 1] += weight * high(kv.v[p][i]); }
  }
  FOR (int m = 4; m < 32; m <<= 1) sum += shfl_xor(sum, m);
  // add over the 8 keys: each exchange halves the dimensions that a lane keeps
  int first = 16 * t;
  first += halve<8>(acc, 16, lane);
  first += halve<4>(acc, 8, lane);
  first += halve<2>(acc, 4, lane);
  float* to = staged + warp * STAGE_WORDS + 96;
  *(float2*)(to + first) = make_float2(acc[0], acc[1]);
  if (lane == 0) { to[64] = maximum; to[65] = sum; }
}

// warp 0 of an attention block: add the 12 warps and store the split's output
DEV void attention_output(const float* staged, u32* set, u32* other, int index, int lane) {
  float m = lane < WARPS ? staged[lane * STAGE_WORDS + 96 + 64] : -3.0e38f;
  float l = lane < WARPS ? staged[lane * STAGE_WORDS + 96 + 65] : 0.0f, maximum = m;
  FOR (int o = 8; o; o >>= 1) maximum = fmaxf(maximum, shfl_xor(maximum, o));
  float factor = lane < WARPS ? fast_exp2(m - maximum) : 0.0f, sum = l * factor;
  FOR (int o = 8; o; o >>= 1) sum += shfl_xor(sum, o);
  sum = shfl(sum, 0);
  maximum = shfl(maximum, 0);
  float x = 0, y = 0;
  FOR (int w = 0; w < WARPS; w++) {
    float2 v = *(const float2*)(staged + w * STAGE_WORDS + 96 + 2 * lane);
    float f = shfl(factor, w);
    x += f * v.x;
    y += f * v.y;
  }
  float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  publish(set + ATT + index * 32 + lane, pack(x * inverse, y * inverse));
  if (lane < 2) publish(set + ATT_ML + index * 2 + lane, as_word(lane ? sum : maximum));
  publish(other + ATT + index * 32 + lane, EMPTY);
  if (lane < 2) publish(other + ATT_ML + index * 2 + lane, EMPTY);
}

// the pair of attention outputs of this lane: poll the splits of one head and combine them
DEV float2 combined(const u32* set, int head, int lane, int mode) {
  u32 v[3 * SPLITS];
  for (int spin = 0;;) {
    FOR (int s = 0; s < SPLITS; s++) {
      v[s] = load_relaxed(set + ATT + (head * SPLITS + s) * 32 + lane);
      uint2 ml = load_relaxed2(set + ATT_ML + (head * SPLITS + s) * 2);
      v[SPLITS + 2 * s] = ml.x;
      v[SPLITS + 2 * s + 1] = ml.y;
    }
    if (!(mode & MODE_POLL) || !any_empty<3 * SPLITS>(v)) break;
    if (++spin > SPIN_LIMIT) fail();
  }
  float maximum = -3.0e38f, sum = 0, x = 0, y = 0;
  FOR (int s = 0; s < SPLITS; s++) maximum = fmaxf(maximum, as_float(v[SPLITS + 2 * s]));
  FOR (int s = 0; s < SPLITS; s++) {
    float f = fast_exp2(as_float(v[SPLITS + 2 * s]) - maximum) * as_float(v[SPLITS + 2 * s + 1]);
    sum += f;
    x += f * low(v[s]);
    y += f * high(v[s]);
  }
  return make_float2(x / sum, y / sum);
}

// -- the decode kernel ---------------------------------------------------------------------------------------------------
// layers: (3 * LAYERS, G, SLOT) bytes; head: (G, HEAD_SLOTS) slots; vectors (LAYERS, G, 6, 24): gamma w, beta w of qkv, of
// fc, the biases of the projection and of fc2; gammas (LAYERS, 2, C); final (2, C): weight and bias of the last LayerNorm
// state: token, position, step. trace: null, or (G, 2, 64) clock values.

KERNEL BOUNDS decode(
    const char* layers, const char* head, const float* vectors, const float* gammas, const float* final,
    const u16* wte, const float* wpe, u16* cache, u32* exchange, float* logits, float* x_out, int* state, int* readback,
    u32* trace, int tokens, int mode) {
  int block = block_id(), warp = thread_id() >> 5, lane = thread_id() & 31;
  u32* stage = (u32*)(shared + STAGE) + warp * STAGE_WORDS;
  const float* staged = (const float*)(shared + STAGE);
  int n = 0, phase = 0, stamp = 0, copy = block % COPIES * EXCHANGE_WORDS;
  if (thread_id() == 0) {
    init_barriers();
    for (int i = 0; i < SLOTS; i++) issue_load(i, tokens, layers, head, mode);
  }
  block_sync();
  int token = state[0], position = state[1], step = state[2];
  u32 a[3][8], b[16];
  float residual = 0;

  for (int count = 0; count < tokens; count++, step++, position++) {
    float2 x, embedded = *(const float2*)(wpe + (size_t)position * C + warp * 64 + 2 * lane);
    u32 word = *(const u32*)(wte + (size_t)token * C + warp * 64 + 2 * lane);
    x = make_float2(low(word) + embedded.x, high(word) + embedded.y);
    if (warp == 0 && lane < 6) {
      int c = 6 * block + lane;
      residual = as_float((u32)wte[(size_t)token * C + c] << 16) + wpe[(size_t)position * C + c];
    }
    float2 g1 = *(const float2*)(gammas + warp * 64 + 2 * lane), g2 = *(const float2*)(gammas + C + warp * 64 + 2 * lane);
    float vec[6];
    FOR (int i = 0; i < 6; i++) vec[i] = warp == 0 && lane < 24 ? vectors[((size_t)block * 6 + i) * 24 + lane] : 0.0f;
    int split = block % SPLITS, attends = block < 12 * SPLITS, older = (position + SPLITS - 1 - split) / SPLITS;
    int newest = position % SPLITS == split ? position / SPLITS : -1;

    for (int layer = 0; layer < LAYERS; layer++) {
      u32 *set = exchange + (layer & 1) * SET_WORDS, *from = set + copy, *other = exchange + (1 - (layer & 1)) * SET_WORDS;
      int next = layer + 1 < LAYERS ? layer + 1 : layer;
      u16* own = cache + ((size_t)layer * 12 * SPLITS + block) * KEYS * 128;

      // q, k, v
      wait_slot(n, mode);
      load_fragments(a, n, warp, lane);
      Cached kv;
      if (attends) load_cached(kv, own, older, warp, lane);
      if (layer) {
        uint2 v = poll2(other + copy + XOUT + warp * 64 + 2 * lane, mode);
        x = make_float2(as_float(v.x), as_float(v.y));
      }
      if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
      float* part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
      layernorm_product(part + warp * 26, stage, a, x, g1, lane);
      if (join(warp, phase++, mode)) {
        float v = lane < 26 ? sum_warps(part, lane) : 0.0f, total = shfl(v, 24), squares = shfl(v, 25);
        v = normalized(v, total, squares, vec[0], vec[1]);
        if (lane < 18) {
          publish(set + QKV + 18 * block + lane, as_word(v));
          publish(other + QKV + 18 * block + lane, EMPTY);
        }
        if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
      }
      stamp++;

      // attention
      if (attends) {
        attend((float*)(shared + STAGE), kv, from, own, block / SPLITS, older, newest, warp, lane, mode);
        if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
        if (warp && (mode & MODE_POLL)) bar_arrive(3);
        else {
          if (mode & MODE_POLL) bar_sync(3);
          else block_sync();
          if (warp == 0) {
            attention_output(staged, set, other, block, lane);
            if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
          }
        }
      }
      stamp++;

      // projection
      float2 y = combined(from, warp, lane, mode);
      if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
      part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
      stage_pair(stage, b, y.x, y.y, lane);
      {
        float c[2][4] = {};
        FOR (int s = 0; s < 4; s++) mma(c[s & 1], a[2][2 * s], 0, a[2][2 * s + 1], 0, b[2 * s], b[2 * s + 1]);
        if ((lane & 3) == 0) part[warp * 26 + (lane >> 2)] = (c[0][0] + c[1][0]) + (c[0][1] + c[1][1]);
      }
      if (join(warp, phase++, mode)) {
        if (lane < 6) {
          residual += sum_warps(part, 2 + lane) + vec[4];
          publish(set + XMID + 6 * block + lane, as_word(residual));
          publish(other + XMID + 6 * block + lane, EMPTY);
        }
        if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
        if (lane == 0) issue_load(n + SLOTS, tokens, layers, head, mode);
      }
      n++;
      stamp++;

      // fc
      wait_slot(n, mode);
      load_fragments(a, n, warp, lane);
      {
        uint2 v = poll2(from + XMID + warp * 64 + 2 * lane, mode);
        x = make_float2(as_float(v.x), as_float(v.y));
      }
      if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
      part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
      layernorm_product(part + warp * 26, stage, a, x, g2, lane);
      if (join(warp, phase++, mode)) {
        float v = lane < 26 ? sum_warps(part, lane) : 0.0f, total = shfl(v, 24), squares = shfl(v, 25);
        v = gelu(normalized(v, total, squares, vec[2], vec[3]));
        u32 packed = pack(v, shfl_xor(v, 1));
        if (lane < 24 && !(lane & 1)) {
          publish(set + GBUF + 12 * block + lane / 2, packed);
          publish(other + GBUF + 12 * block + lane / 2, EMPTY);
        }
        if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
        if (lane == 0) issue_load(n + SLOTS, tokens, layers, head, mode);
      }
      n++;
      stamp++;

      // fc2
      wait_slot(n, mode);
      u32 f[2][16];
      {
        const char* slot = shared + (n % SLOTS) * SLOT;
        FOR (int r = 0; r < 2; r++)
          FOR (int quarter = 0; quarter < 4; quarter++) {
            uint4 v = {0, 0, 0, 0};
            if (lane < 24) v = *(const uint4*)(slot + (((warp * 2 + r) * 4 + quarter) * 24 + lane) * 16);
            f[r][4 * quarter] = v.x; f[r][4 * quarter + 1] = v.y; f[r][4 * quarter + 2] = v.z; f[r][4 * quarter + 3] = v.w;
          }
      }
      // the vectors of the next layer
      g1 = *(const float2*)(gammas + (size_t)next * 2 * C + warp * 64 + 2 * lane);
      g2 = *(const float2*)(gammas + ((size_t)next * 2 + 1) * C + warp * 64 + 2 * lane);
      float ahead[6];
      FOR (int i = 0; i < 6; i++)
        ahead[i] = warp == 0 && lane < 24 ? vectors[(((size_t)next * G + block) * 6 + i) * 24 + lane] : 0.0f;
      uint4 g = poll4(from + GBUF + warp * 128 + 4 * lane, mode);
      if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
      part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
      warp_sync();
      *(uint4*)(stage + (lane >> 2) * 20 + (lane & 3) * 4) = g;
      warp_sync();
      FOR (int i = 0; i < 4; i++) {
        uint4 v = *(const uint4*)(stage + (((lane >> 2) & 1) * 4 + (lane & 3)) * 20 + 4 * i);
        b[4 * i] = v.x; b[4 * i + 1] = v.y; b[4 * i + 2] = v.z; b[4 * i + 3] = v.w;
      }
      {
        float c[2][4] = {};
        FOR (int s = 0; s < 8; s++)
          mma(c[s & 1], f[0][2 * s], f[1][2 * s], f[0][2 * s + 1], f[1][2 * s + 1], b[2 * s], b[2 * s + 1]);
        if ((lane & 3) == 0) part[warp * 26 + (lane >> 2)] = (c[0][0] + c[1][0]) + (c[0][3] + c[1][3]);
      }
      if (join(warp, phase++, mode)) {
        if (lane < 6) {
          residual += sum_warps(part, lane) + vec[5];
          publish(set + XOUT + 6 * block + lane, as_word(residual));
          publish(other + XOUT + 6 * block + lane, EMPTY);
        }
        if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
        if (lane == 0) issue_load(n + SLOTS, tokens, layers, head, mode);
      }
      FOR (int i = 0; i < 6; i++) vec[i] = ahead[i];
      n++;
      stamp++;
    }

    // the last LayerNorm, the logits and the largest logit
    float2 weight = *(const float2*)(final + warp * 64 + 2 * lane), bias = *(const float2*)(final + C + warp * 64 + 2 * lane);
    {
      uint2 v = poll2(exchange + copy + ((LAYERS - 1) & 1) * SET_WORDS + XOUT + warp * 64 + 2 * lane, mode);
      x = make_float2(as_float(v.x), as_float(v.y));
    }
    if (trace && thread_id() == 0) trace[(block * 2) * 64 + stamp] = now();
    if (x_out && block == 0) *(float2*)(x_out + warp * 64 + 2 * lane) = x;
    float* part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
    float total = x.x + x.y, squares = x.x * x.x + x.y * x.y;
    FOR (int m = 16; m; m >>= 1) { total += shfl_xor(total, m); squares += shfl_xor(squares, m); }
    if (lane == 0) { part[warp * 26 + 24] = total; part[warp * 26 + 25] = squares; }
    block_sync();
    total = sum_warps(part, 24), squares = sum_warps(part, 25);
    x.x = normalized(x.x, total, squares, 1.0f, 0.0f) * weight.x + bias.x;
    x.y = normalized(x.y, total, squares, 1.0f, 0.0f) * weight.y + bias.y;
    stage_pair(stage, b, x.x, x.y, lane);
    phase++;
    float best = -3.0e38f;
    int best_row = 0;
    for (int u = 0; u < HEAD_SLOTS; u++, n++, phase++) {
      wait_slot(n, mode);
      load_fragments(a, n, warp, lane);  // of the last slot, columns 16 to 23 are old and not used
      part = (float*)(shared + PART) + (phase & 1) * WARPS * 26;
      product24(part + warp * 26, a, b, lane);
      block_sync();
      if (warp == 0) {
        if (lane == 0) issue_load(n + SLOTS, tokens, layers, head, mode);
        int index = u * 24 + lane, row = block * HEAD_ROWS + index;
        float v = sum_warps(part, lane < 24 ? lane : 0);
        if (lane < 24 && index < HEAD_ROWS && row < VOCAB) {
          logits[row] = v;
          if (v > best) best = v, best_row = row;
        }
      }
    }
    u32* maxima = exchange + MAXIMA + (step & 1) * G * 2;
    if (warp == 0) {
      FOR (int m = 16; m; m >>= 1) {
        float v = shfl_xor(best, m);
        int row = shfl_xor_u(best_row, m);
        if (v > best || (v == best && row < best_row)) best = v, best_row = row;
      }
      if (tokens > 1) fence();
      if (lane < 2) {
        publish(maxima + 2 * block + lane, lane ? (u32)best_row : as_word(best));
        publish(exchange + MAXIMA + (1 - (step & 1)) * G * 2 + 2 * block + lane, EMPTY);
      }
      if (trace && lane == 0) trace[(block * 2 + 1) * 64 + stamp] = now();
    }
    phase += phase & 1;
    stamp = 0;
    if (count + 1 == tokens && (block || warp)) return;
    best = -3.0e38f;
    best_row = VOCAB;
    FOR (int i = 0; i < G / 32; i++) {
      uint2 v = poll2(maxima + copy + 2 * (lane + 32 * i), mode);
      if (as_float(v.x) > best || (as_float(v.x) == best && (int)v.y < best_row)) best = as_float(v.x), best_row = v.y;
    }
    FOR (int m = 16; m; m >>= 1) {
      float v = shfl_xor(best, m);
      int row = shfl_xor_u(best_row, m);
      if (v > best || (v == best && row < best_row)) best = v, best_row = row;
    }
    token = (u32)best_row < VOCAB ? best_row : 0;
    if (block == 0 && thread_id() == 0) {
      readback[step & 1023] = token;
      state[0] = token, state[1] = position + 1, state[2] = step + 1;
    }
  }
}

#ifndef EMULATE
// -- barriers and chains without weights -------------------------------------------------------------------------------

DEV void red_release(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(p) : "memory"); }
DEV void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEV u32 load_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV void wait_value(const u32* p, u32 value) {
  for (int spin = 0; load_acquire(p) < value;)
    if (++spin > SPIN_LIMIT) fail();
}
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// kind 0: no grid barrier; 1: one counter; 2: a flag per block; 3: a counter, one arrival per cluster
template <int KIND>
DEV void grid_barrier(u32* flags, int number) {  // number: 1, 2, 3, ...; all of flags is 0 at the start
  if (KIND == 3) cluster_sync();
  else block_sync();
  if (KIND == 1) {
    if (thread_id() == 0) {
      red_release(flags);
      wait_value(flags, (u32)number * G);
    }
    block_sync();
  }
  if (KIND == 2) {
    if (thread_id() == 0) store_release(flags + 32 + block_id(), number);
    if (thread_id() < G) wait_value(flags + 32 + thread_id(), number);
    block_sync();
  }
  if (KIND == 3) {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (rank == 0 && thread_id() == 0) {
      u32 size;
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
      red_release(flags);
      wait_value(flags, (u32)number * (G / size));
    }
    cluster_sync();
  }
}

template <int KIND>
DEV void barriers(u32* flags, u32* progress, int* errors, int phases) {
  for (int p = 1; p <= phases; p++) {
    if (progress && thread_id() == 0) store_relaxed(progress + block_id(), p);
    grid_barrier<KIND>(flags, p);
    if (progress && thread_id() < G && load_relaxed(progress + thread_id()) < (u32)p) atomicAdd(errors, 1);
  }
}

KERNEL BOUNDS barriers_none(u32* f, u32* p, int* e, int n) { barriers<0>(f, p, e, n); }
KERNEL BOUNDS barriers_counter(u32* f, u32* p, int* e, int n) { barriers<1>(f, p, e, n); }
KERNEL BOUNDS barriers_flags(u32* f, u32* p, int* e, int n) { barriers<2>(f, p, e, n); }
KERNEL BOUNDS __cluster_dims__(4, 1, 1) barriers_cluster4(u32* f, u32* p, int* e, int n) { barriers<3>(f, p, e, n); }
KERNEL BOUNDS __cluster_dims__(8, 1, 1) barriers_cluster8(u32* f, u32* p, int* e, int n) { barriers<3>(f, p, e, n); }

// each phase reads all of x (C) and writes 6 values per block: x = 0.5 x + 0.5 sum(weight x), weight = (1 + k % 4) / 1920
// KIND 4: no barrier; the words of x are EMPTY until they are written, and there are three buffers of x
template <int KIND>
DEV void chain(u32* x, u32* flags, int phases) {
  __shared__ float part[2][WARPS];
  int warp = thread_id() >> 5, lane = thread_id() & 31, block = block_id(), k = warp * 64 + 2 * lane;
  float own = as_float(load_relaxed(x + 6 * block + (lane < 6 ? lane : 0)));
  for (int p = 0; p < phases; p++) {
    const u32* from = x + (p % 3) * C + k;
    uint2 v = KIND == 4 ? poll2(from, MODE_POLL) : load_relaxed2(from);
    float s = (as_float(v.x) * (1 + k % 4) + as_float(v.y) * (1 + (k + 1) % 4)) * (1.0f / 1920);
    FOR (int m = 16; m; m >>= 1) s += shfl_xor(s, m);
    if (lane == 0) part[p & 1][warp] = s;
    if (KIND == 4 && warp) bar_arrive(1 + (p & 1));
    else if (KIND == 4) bar_sync(1 + (p & 1));
    else block_sync();
    if (warp == 0) {
      float total = 0;
      FOR (int w = 0; w < WARPS; w++) total += part[p & 1][w];
      own = 0.5f * own + 0.5f * total;
      if (lane < 6) store_relaxed(x + (p + 1) % 3 * C + 6 * block + lane, as_word(own));
      if (KIND == 4 && lane < 6) store_relaxed(x + (p + 2) % 3 * C + 6 * block + lane, EMPTY);
      warp_sync();
    }
    if (KIND != 4) grid_barrier<KIND>(flags, p + 1);
  }
}

KERNEL BOUNDS chain_counter(u32* x, u32* f, int n) { chain<1>(x, f, n); }
KERNEL BOUNDS chain_flags(u32* x, u32* f, int n) { chain<2>(x, f, n); }
KERNEL BOUNDS __cluster_dims__(4, 1, 1) chain_cluster4(u32* x, u32* f, int n) { chain<3>(x, f, n); }
KERNEL BOUNDS chain_empty(u32* x, u32* f, int n) { chain<4>(x, f, n); }
#endif

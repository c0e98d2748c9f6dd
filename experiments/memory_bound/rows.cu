// Memory-bound kernels of the training step in CUDA C: LayerNorm with one warp per row, cross-entropy with the row in
// shared memory. Compiled after cluster_instructions.cuh, whose functions it uses. Macros: C, BF16, BLOCK_THREADS.

#ifndef EMULATED
#define GRID_KERNEL extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
DEVICE int block_number() { return (int)blockIdx.x; }
DEVICE int block_count() { return (int)gridDim.x; }
extern __shared__ uint4 dynamic_memory[];
DEVICE uint4* dynamic_shared() { return dynamic_memory; }
DEVICE uint4 load_stream(const u16* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
DEVICE void store16(u16* address, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void bulk_load(void* to, const void* from, int bytes, u64* signal) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(signal)) : "memory");
}
DEVICE void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

const int NW = BLOCK_THREADS / 32;
const int J = C / 256;

DEVICE void unpack8(float (&v)[8], uint4 w) {
  v[0] = low_half(w.x), v[1] = high_half(w.x), v[2] = low_half(w.y), v[3] = high_half(w.y);
  v[4] = low_half(w.z), v[5] = high_half(w.z), v[6] = low_half(w.w), v[7] = high_half(w.w);
}
DEVICE uint4 pack8(const float (&v)[8]) { return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])); }
DEVICE float sum_warp(float v) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) v += exchange(v, mask);
  return v;
}
DEVICE float max_warp(float v) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) v = fmaxf(v, exchange(v, mask));
  return v;
}

struct Sums { float x[3 * C]; };

// dx, dy, s, ds (n, C) 16 bits; partials (blocks, 3C); has_ds: ds is not null
GRID_KERNEL layernorm_backward_rows(u16* dx, float* partials, const u16* ds, const u16* dy, const u16* s, const u16* w,
                                    const float* mean, const float* rstd, int n) {
  Sums& sums = shared_memory<Sums>();
  const int lane = thread_number() % 32, warp = thread_number() / 32, stride = block_count() * NW;
  int row = block_number() * NW + warp;
  float dw[J][8] = {}, db[J][8] = {}, dbias[J][8] = {};
  uint4 gamma[J], a[J], b[J], c[J];
  float m = 0, r = 0;
#pragma unroll
  for (int j = 0; j < J; j++) gamma[j] = load_stream(w + (j * 32 + lane) * 8);
  const auto load = [&](int at) {
    if (at >= n) return;
    const size_t start = (size_t)at * C + lane * 8;
#pragma unroll
    for (int j = 0; j < J; j++) {
      a[j] = load_stream(dy + start + j * 256), b[j] = load_stream(s + start + j * 256);
      c[j] = ds ? load_stream(ds + start + j * 256) : make_uint4(0, 0, 0, 0);
    }
    m = mean[at], r = rstd[at];
  };
  load(row);
  for (; row < n; row += stride) {
    uint4 dy_row[J], s_row[J], ds_row[J];
    const float row_mean = m, row_rstd = r;
#pragma unroll
    for (int j = 0; j < J; j++) dy_row[j] = a[j], s_row[j] = b[j], ds_row[j] = c[j];
    load(row + stride);
    float total = 0, total_h = 0;
#pragma unroll
    for (int j = 0; j < J; j++) {
      float g[8], y[8], x[8];
      unpack8(g, gamma[j]), unpack8(y, dy_row[j]), unpack8(x, s_row[j]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float h = (x[e] - row_mean) * row_rstd;
        dw[j][e] += y[e] * h, db[j][e] += y[e];
        total += y[e] * g[e], total_h += y[e] * g[e] * h;
      }
    }
    total = sum_warp(total) / C, total_h = sum_warp(total_h) / C;
#pragma unroll
    for (int j = 0; j < J; j++) {
      float g[8], y[8], x[8], d[8];
      unpack8(g, gamma[j]), unpack8(y, dy_row[j]), unpack8(x, s_row[j]), unpack8(d, ds_row[j]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float h = (x[e] - row_mean) * row_rstd;
        d[e] += (y[e] * g[e] - total - h * total_h) * row_rstd;
        dbias[j][e] += d[e];
      }
      store16(dx + (size_t)row * C + (j * 32 + lane) * 8, pack8(d));
    }
  }
  for (int turn = 0; turn < NW; turn++) {  // the warps add one after another: a fixed order
    if (warp == turn)
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const int column = (j * 32 + lane) * 8 + e;
          sums.x[column] = (turn ? sums.x[column] : 0) + dw[j][e];
          sums.x[C + column] = (turn ? sums.x[C + column] : 0) + db[j][e];
          sums.x[2 * C + column] = (turn ? sums.x[2 * C + column] : 0) + dbias[j][e];
        }
    block_barrier();
  }
  for (int i = thread_number(); i < 3 * C; i += BLOCK_THREADS) partials[(size_t)block_number() * 3 * C + i] = sums.x[i];
}

// s = x + (a + a_bias), rounded; y = LN(s); mean, rstd (n). s, a and a_bias may be null.
GRID_KERNEL layernorm_forward_rows(u16* s, u16* y, float* mean, float* rstd, const u16* x, const u16* a, const u16* a_bias,
                                   const u16* w, const u16* b, int n, float eps) {
  const int lane = thread_number() % 32, warp = thread_number() / 32, stride = block_count() * NW;
  int row = block_number() * NW + warp;
  uint4 gamma[J], beta[J], bias[J], next_x[J], next_a[J];
#pragma unroll
  for (int j = 0; j < J; j++) {
    gamma[j] = load_stream(w + (j * 32 + lane) * 8), beta[j] = load_stream(b + (j * 32 + lane) * 8);
    bias[j] = a ? load_stream(a_bias + (j * 32 + lane) * 8) : make_uint4(0, 0, 0, 0);
  }
  const auto load = [&](int at) {
    if (at >= n) return;
#pragma unroll
    for (int j = 0; j < J; j++) {
      next_x[j] = load_stream(x + (size_t)at * C + (j * 32 + lane) * 8);
      if (a) next_a[j] = load_stream(a + (size_t)at * C + (j * 32 + lane) * 8);
    }
  };
  load(row);
  for (; row < n; row += stride) {
    float v[J][8], total = 0, squares = 0;
#pragma unroll
    for (int j = 0; j < J; j++) {
      unpack8(v[j], next_x[j]);
      if (a) {
        float p[8], q[8];
        unpack8(p, next_a[j]), unpack8(q, bias[j]);
#pragma unroll
        for (int e = 0; e < 8; e++) v[j][e] += p[e] + q[e];
        const uint4 rounded = pack8(v[j]);
        store16(s + (size_t)row * C + (j * 32 + lane) * 8, rounded);
        unpack8(v[j], rounded);
      }
#pragma unroll
      for (int e = 0; e < 8; e++) total += v[j][e];
    }
    load(row + stride);
    const float row_mean = sum_warp(total) / C;
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int e = 0; e < 8; e++) v[j][e] -= row_mean, squares += v[j][e] * v[j][e];
    const float row_rstd = rsqrtf(sum_warp(squares) / C + eps);
#pragma unroll
    for (int j = 0; j < J; j++) {
      float g[8], o[8];
      unpack8(g, gamma[j]), unpack8(o, beta[j]);
#pragma unroll
      for (int e = 0; e < 8; e++) o[e] += v[j][e] * row_rstd * g[e];
      store16(y + (size_t)row * C + (j * 32 + lane) * 8, pack8(o));
    }
    if (lane == 0) mean[row] = row_mean, rstd[row] = row_rstd;
  }
}

struct CrossEntropyMemory { float warps[NW]; u64 arrived[4]; };

DEVICE float block_max(CrossEntropyMemory& memory, float v) {
  v = max_warp(v);
  if (thread_number() % 32 == 0) memory.warps[thread_number() / 32] = v;
  block_barrier();
#pragma unroll
  for (int i = 0; i < NW; i++) v = fmaxf(v, memory.warps[i]);
  block_barrier();
  return v;
}
DEVICE float block_sum(CrossEntropyMemory& memory, float v) {
  v = sum_warp(v);
  if (thread_number() % 32 == 0) memory.warps[thread_number() / 32] = v;
  block_barrier();
  v = 0;
#pragma unroll
  for (int i = 0; i < NW; i++) v += memory.warps[i];
  return v;
}

// One block per row. logits (n, width) are replaced by their gradient; width is a multiple of 32.
GRID_KERNEL cross_entropy_rows(u16* logits, float* maxima, float* sums, float* target_logits, const int* targets, int vocab,
                               int width, float scale) {
  CrossEntropyMemory& memory = shared_memory<CrossEntropyMemory>();
  uint4* row = dynamic_shared();
  const int thread = thread_number(), vectors = width / 8, quarter = vectors / 4;
  u16* global_row = logits + (size_t)block_number() * width;
  const float LOG2 = 1.4426950408889634f;
  if (thread == 0)
    for (int i = 0; i < 4; i++) start_signal(&memory.arrived[i], quarter * 16);
  block_barrier();
  if (thread == 0)
    for (int i = 0; i < 4; i++) bulk_load(row + i * quarter, global_row + i * quarter * 8, quarter * 16, &memory.arrived[i]);
  const int target = targets[block_number()];
  float maximum = -2e38f;
  for (int i = 0; i < 4; i++) {
    wait_for_signal(&memory.arrived[i]);
    const int last = (i + 1) * quarter;
    for (int at = i * quarter + thread; at < last; at += BLOCK_THREADS) {
      float v[8];
      if (at * 8 + 8 > vocab) {  // the padding becomes -inf
        u16* p = (u16*)(row + at);
        for (int e = 0; e < 8; e++)
          if (at * 8 + e >= vocab) p[e] = BF16 ? 0xFF80 : 0xFC00;
      }
      unpack8(v, row[at]);
#pragma unroll
      for (int e = 0; e < 8; e++) maximum = fmaxf(maximum, v[e]);
    }
  }
  maximum = block_max(memory, maximum);
  const float offset = maximum * LOG2;
  float sum = 0;
  for (int at = thread; at < vectors; at += BLOCK_THREADS) {
    float v[8];
    unpack8(v, row[at]);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += fast_exp2(v[e] * LOG2 - offset);
  }
  sum = block_sum(memory, sum);
  float target_logit = 0;
  if (thread == 0) {
    const u16 bits = ((const u16*)row)[target];
    target_logit = low_half(bits);
    maxima[block_number()] = maximum, sums[block_number()] = sum, target_logits[block_number()] = target_logit;
  }
  block_barrier();
  const float weight = scale / sum;
  for (int at = thread; at < vectors; at += BLOCK_THREADS) {
    float v[8];
    unpack8(v, row[at]);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = weight * fast_exp2(v[e] * LOG2 - offset);
    row[at] = pack8(v);
  }
  block_barrier();
  if (thread == 0) {
    ((u16*)row)[target] = (u16)pack(weight * fast_exp2(target_logit * LOG2 - offset) - scale, 0);
    bulk_store(global_row, row, width * 2);
    wait_for_stores();
  }
}

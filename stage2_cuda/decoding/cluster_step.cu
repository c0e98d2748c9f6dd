// The kernels of a decode step for one sequence on a Hopper GPU, whose blocks work in clusters.
//
// A cluster is a group of 8 blocks that run at the same time. A block can write to the shared memory of every block of
// its cluster, which is much faster than the same through global memory and a new kernel. cluster_step.py launches:
//
//     attention_kernel   one cluster per head:
//         s = x + partial sums + bias              each block computes C / 8 columns, and sends them
//         q, k, v = LN(s) w + b, for one head      each block computes 24 of the 192 columns, and sends them
//         attention of the head                    each block has 1/8 of the keys, and sends its result
//         partial sums of y w, over the 64 rows of w that belong to the head; each block computes C / 8 columns
//     mlp_kernel         one cluster per 64 * UNITS hidden units:
//         s = x + partial sums + bias              each block computes C / 8 columns, and sends them
//         g = gelu(LN(s) w + b)                    each block computes 8 * UNITS hidden units, and sends them
//         partial sums of g w, over the 64 * UNITS rows of w that belong to the cluster; C / 8 columns per block
//     logits_kernel      after the last layer:
//         s = x + partial sums + bias              each block computes C / 8 columns, and sends them
//         logits = LN(s) w                         each warp computes the logits of consecutive tokens
//
// "Sends" means: to the shared memory of all 8 blocks of the cluster. A signal (an mbarrier) in the shared memory of
// the receiver counts the bytes that have arrived. The next kernel adds the partial sums of all clusters, in a fixed
// order.
//
// A kernel loads its weights into registers before it waits for the previous kernel (programmatic dependent launch). It
// also starts the copy of the weights of the kernel after the next one from global memory to the L2 cache.
//
// The weights of a layer are stored transposed, (N, K), so that a thread loads 8 consecutive elements of a column. The
// products of a layer use tensor cores. Their other operand is a vector of float32 numbers, each given as the sum of
// two 16-bit numbers. LayerNorm and the product after it are one formula, as in single_row.py.
//
// The compiler gets these macros: C, the channels, a multiple of 256; UNITS, the hidden units per warp; BF16, 1 for
// bfloat16 and 0 for float16; U1 and U3, constants of kernels/gelu.py.
//
// cluster_step.py compiles cluster_instructions.cuh, cluster_parts.cuh and this file as one text.

const int KEYS_PER_PASS = 256;    // because 8 lanes of each warp of the cluster have one key
const int PASSES = 4;             // so a cluster holds at most 1024 keys
const int CHUNKS = C / 256;       // of 8 elements: a lane's part of a row of C elements, if the whole warp has the row
const int GROUP = 5;              // rows of the weight of the logits that a warp loads at once
const int ROW_BYTES = C * 4 + CLUSTER * C / 128 * 8;  // that a block receives

struct alignas(16) AttentionMemory {
  Row row;
  float sums[WARPS][24], product_sums[2][SHARE];
  float qkv[3 * D];           // of the newest position
  float rotation[D];          // D / 2 cosines, then D / 2 sines
  float warp_y[WARPS][D];     // of each warp: the sum of the values times their weights, exp2(score - maximum)
  float2 warp_stats[WARPS];   // of each warp: the largest score, the sum of the weights
  float block_y[CLUSTER][D];  // the same of each block
  float2 block_stats[CLUSTER];
  Four y[D / 4];              // the attention output
  u64 qkv_arrived, y_arrived;
};

// The attention of one query to some keys: the largest score, the sum of the weights exp2(score - maximum), and the sum
// of the values times these weights, of which a thread has 8 elements. If a warp has no keys, its maximum is SMALLEST,
// so its sums do not count when the warps are combined.
struct Attended {
  float maximum, sum, y[8];
};

// The 8 lanes of a key have 8 of its elements each. first_key: the key of this thread in pass 0; keys: their number.
template <int COUNT>
DEVICE Attended attend(const float* q, const uint4 (&k)[PASSES], const uint4 (&v)[PASSES], int first_key, int keys,
                       float scale) {
  Attended result = {SMALLEST, 0, {}};
  float score[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float key[8], dot = 0;
    unpack(key, k[i]);
#pragma unroll
    for (int e = 0; e < 8; e++) dot += key[e] * q[e];
    dot = scale * sum_lanes(dot, 1, 4);
    score[i] = first_key + i * KEYS_PER_PASS < keys ? dot : SMALLEST;
    result.maximum = fmaxf(result.maximum, score[i]);
  }
  result.maximum = fmaxf(result.maximum, exchange(result.maximum, 8));
  result.maximum = fmaxf(result.maximum, exchange(result.maximum, 16));
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float weight = fast_exp2(score[i] - result.maximum);  // 0 if there is no such key
    float values[8];
    unpack(values, v[i]);
    result.sum += weight;
#pragma unroll
    for (int e = 0; e < 8; e++) result.y[e] += weight * values[e];
  }
  result.sum = sum_lanes(result.sum, 8, 16);
#pragma unroll
  for (int e = 0; e < 8; e++) result.y[e] = sum_lanes(result.y[e], 8, 16);
  return result;
}

// partials_out (heads, C), s (C): results; x (C), partials (parts, C): from the previous kernel; bias (C), of the
// product that gave the partial sums. cache (block, 2C): k and v of position number i at index i % block; the newest
// position is lengths[0] - 1. qkv (3C, C) and proj (C, C) are weights, stored transposed. rotation (D): the cosines and
// sines of the newest position, which rotate q and k; or a null pointer. scale: log2(e) / sqrt(64), because exp2
// replaces exp.
CLUSTER_KERNEL attention_kernel(float* partials_out, float* s, u16* cache, const float* x, const float* partials,
                        const u16* bias, const u16* ln_w, const u16* qkv, const float* gamma_w, const float* beta_w,
                        const u16* proj, const int* lengths, const float* rotation, const u16* ahead_qkv,
                        const u16* ahead_proj, int parts, int block, float eps, float scale) {
  AttentionMemory& memory = shared_memory<AttentionMemory>();
  const int head = cluster_number(), rank = rank_in_cluster();
  const int thread = thread_number(), warp = thread / 32, lane = thread % 32, part = thread % 8;

  if (thread == 0) {
    start_signal(&memory.row.arrived, ROW_BYTES);
    start_signal(&memory.qkv_arrived, 3 * D * 4);
    start_signal(&memory.y_arrived, CLUSTER * (D * 4 + 8));
  }
  const auto column_of = [=](int i) { return (i / D) * C + head * D + i % D; };  // i: of the cluster's 192 columns
  const u64 policy = evict_first();
  cluster_arrive();
  const Terms terms = prepare_terms(x, partials, parts, bias, ln_w);
  uint4 w[3][STEPS], w_proj[TILES][1], k[PASSES], v[PASSES];
#pragma unroll
  for (int n = 0; n < 3; n++) load_columns(w[n], qkv + column_of(rank * 24 + 8 * n) * C + warp * STEPS * 32, C, policy);
  const int newest = (lengths[0] - 1) % block, keys = min(lengths[0], block);
  const int own_column = column_of(rank * 24 + (lane < 24 ? lane : 0));
  const float gamma_of = gamma_w[own_column], beta_of = beta_w[own_column];
  const int first_key = (rank * WARPS + warp) * 4 + lane / 8;
  const u16* head_cache = cache + head * D + part * 8;
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int key = first_key + i * KEYS_PER_PASS;
    k[i] = v[i] = make_uint4(0, 0, 0, 0);
    if (key < keys && key != newest) {
      k[i] = load16(head_cache + (size_t)key * 2 * C);
      v[i] = load16(head_cache + (size_t)key * 2 * C + C);
    }
  }
  if (rotation && thread < D) memory.rotation[thread] = rotation[thread];
  load_for_product(w_proj, proj + head * D, C, policy);
  prefetch_weights(ahead_qkv, 3 * C * C, ahead_proj, C * C, C / D);
  cluster_wait();  // all blocks of the cluster have started their signals, so other blocks may send to them
  wait_for_previous_launch();

  send_residual(memory.row, s, terms);
  wait_for_signal(&memory.row.arrived);
  const float value = layernorm_product(memory.sums, memory.row, w, gamma_of, beta_of, eps);
  const u32 rounded = pack(value, 0);
  const int column = rank * 24 + lane;  // of q, k and v
  if (lane < 24) {
    send(&memory.qkv[column], &memory.qkv_arrived, warp, low_half(rounded));
    if (warp == 0 && column >= (rotation ? 2 * D : D))  // k is rotated first
      cache[(size_t)newest * 2 * C + (column / D - 1) * C + head * D + column % D] = (u16)rounded;
  }
  wait_for_signal(&memory.qkv_arrived);

  float q[8];
#pragma unroll
  for (int i = 0; i < 8; i++) q[i] = memory.qkv[part * 8 + i];
  if (rotation) load_rotated(q, memory.qkv, memory.rotation, part * 8);
  if (first_key == newest % KEYS_PER_PASS) {  // k and v of the newest position are not in the cache yet
    float a[8], b[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = memory.qkv[D + part * 8 + i], b[i] = memory.qkv[2 * D + part * 8 + i];
    if (rotation) load_rotated(a, memory.qkv + D, memory.rotation, part * 8);
    const uint4 new_k = packed(a), new_v = packed(b);
    if (rotation) *(uint4*)(cache + (size_t)newest * 2 * C + head * D + part * 8) = new_k;
#pragma unroll
    for (int i = 0; i < PASSES; i++)
      if (first_key + i * KEYS_PER_PASS == newest) k[i] = new_k, v[i] = new_v;
  }
  const Attended attended = keys <= 2 * KEYS_PER_PASS ? attend<2>(q, k, v, first_key, keys, scale)
                                                      : attend<PASSES>(q, k, v, first_key, keys, scale);
  const float* y = attended.y;
  if (lane < 8) {
    *(float4*)&memory.warp_y[warp][lane * 8] = make_float4(y[0], y[1], y[2], y[3]);
    *(float4*)&memory.warp_y[warp][lane * 8 + 4] = make_float4(y[4], y[5], y[6], y[7]);
  }
  if (lane == 0) memory.warp_stats[warp] = make_float2(attended.maximum, attended.sum);
  block_barrier();

  // combine the 8 warps of the block: a thread has one element of y, and sends it to two blocks
  float element = 0, maximum = SMALLEST, sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) maximum = fmaxf(maximum, memory.warp_stats[i].x);
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const float weight = fast_exp2(memory.warp_stats[i].x - maximum);
    sum += weight * memory.warp_stats[i].y, element += weight * memory.warp_y[i][thread % D];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int target = thread / D + 4 * i;
    send(&memory.block_y[rank][thread % D], &memory.y_arrived, target, element);
    if (thread % D == 0) send(&memory.block_stats[rank], &memory.y_arrived, target, make_float2(maximum, sum));
  }
  wait_for_signal(&memory.y_arrived);

  if (thread < D) {  // combine the 8 blocks
    element = 0, maximum = SMALLEST, sum = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) maximum = fmaxf(maximum, memory.block_stats[i].x);
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
      const float weight = fast_exp2(memory.block_stats[i].x - maximum);
      sum += weight * memory.block_stats[i].y, element += weight * memory.block_y[i][thread];
    }
    const Four four = split_lanes(fast_divide(element, sum));
    if (thread % 4 == 0) memory.y[thread / 4] = four;
  }
  block_barrier();
  store_product(partials_out + head * C, memory.product_sums, w_proj, memory.y);
}

struct alignas(16) MlpMemory {
  Row row;
  float sums[WARPS][8 * UNITS], product_sums[2][SHARE];
  Four hidden[16 * UNITS];  // g of this cluster
  u64 hidden_arrived;
};

// partials_out (clusters, C), s (C): results; x (C), partials (parts, C): from the previous kernel; bias (C), of the
// product that gave the partial sums. fc (4C, C) and fc_proj (C, 4C) are weights, stored transposed.
CLUSTER_KERNEL mlp_kernel(float* partials_out, float* s, const float* x, const float* partials, const u16* bias,
                  const u16* ln_w, const u16* fc, const float* gamma_w, const float* beta_w, const u16* fc_proj,
                  const u16* ahead_fc, const u16* ahead_proj, int parts, float eps) {
  MlpMemory& memory = shared_memory<MlpMemory>();
  const int thread = thread_number(), warp = thread / 32, lane = thread % 32;
  const int first_unit = cluster_number() * 64 * UNITS, first = first_unit + rank_in_cluster() * 8 * UNITS;

  if (thread == 0) {
    start_signal(&memory.row.arrived, ROW_BYTES);
    start_signal(&memory.hidden_arrived, 16 * UNITS * 16);
  }
  cluster_arrive();
  uint4 w[UNITS][STEPS], w_proj[TILES][UNITS];
  const u64 policy = evict_first();
#pragma unroll
  for (int n = 0; n < UNITS; n++) load_columns(w[n], fc + (first + 8 * n) * C + warp * STEPS * 32, C, policy);
  const int unit = lane < 8 * UNITS ? lane : 0;
  const float gamma_of = gamma_w[first + unit], beta_of = beta_w[first + unit];
  const Terms terms = prepare_terms(x, partials, parts, bias, ln_w);
  load_for_product(w_proj, fc_proj + first_unit, 4 * C, policy);
  prefetch_weights(ahead_fc, 4 * C * C, ahead_proj, 4 * C * C, 4 * C / (64 * UNITS));
  cluster_wait();  // as in attention_kernel
  wait_for_previous_launch();

  send_residual(memory.row, s, terms);
  wait_for_signal(&memory.row.arrived);
  const float h = layernorm_product(memory.sums, memory.row, w, gamma_of, beta_of, eps);
  const Four four = split_lanes(fast_divide(h, 1 + fast_exp2(h * (U1 + U3 * h * h))));  // GELU, see kernels/gelu.py
  if (lane < 8 * UNITS && lane % 4 == 0)
    send(&memory.hidden[rank_in_cluster() * 2 * UNITS + lane / 4], &memory.hidden_arrived, warp, four);
  wait_for_signal(&memory.hidden_arrived);
  store_product(partials_out + cluster_number() * C, memory.product_sums, w_proj, memory.hidden);
}

// The logits: LN(s) times each of the V rows of `head` (V, C), for s = x + bias + partials[0] + partials[1] + ...
// logits (V): a warp computes the logits of `rows` consecutive tokens. maxima, indices (8 * blocks): of each warp, the
// largest logit and its token, the first of several equal ones. s (C): scratch memory.
CLUSTER_KERNEL logits_kernel(float* logits, float* maxima, int* indices, float* s, const float* x,
                             const float* partials, const u16* bias, const u16* ln_w, const u16* ln_b,
                             const u16* head, const u16* ahead_qkv, const u16* ahead_proj, const u16* ahead_fc,
                             const u16* ahead_fc_proj, int parts, int V, int rows, int clusters, float eps) {
  Row& row = shared_memory<Row>();
  const int lane = thread_number() % 32;
  const int warp = (cluster_number() * CLUSTER + rank_in_cluster()) * WARPS + thread_number() / 32;
  const int end = min(V, (warp + 1) * rows);

  if (thread_number() == 0) start_signal(&row.arrived, ROW_BYTES);
  cluster_arrive();
  const u64 policy = evict_first();
  const u16* address = head + (size_t)warp * rows * C + lane * 8;
  uint4 w[GROUP][CHUNKS];
  const auto load_group = [&](int first) {
#pragma unroll
    for (int n = 0; n < GROUP; n++)
#pragma unroll
      for (int j = 0; j < CHUNKS; j++)
        if (first + n < end) w[n][j] = load_once(address + n * C + j * 256, policy);
    address += GROUP * C;
  };
  load_group(warp * rows);
  uint4 gamma[CHUNKS], beta[CHUNKS];
#pragma unroll
  for (int j = 0; j < CHUNKS; j++)
    gamma[j] = load16(ln_w + j * 256 + lane * 8), beta[j] = load16(ln_b + j * 256 + lane * 8);
  const Terms terms = prepare_terms(x, partials, parts, bias, ln_w);
  cluster_wait();
  wait_for_previous_launch();

  send_residual(row, s, terms);
  wait_for_signal(&row.arrived);
  const float2 stats = mean_and_rstd(row, eps);
  float h[CHUNKS][8];  // the elements of LN(s) that this lane multiplies
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const Four four[2] = {row.x[(j * 32 + lane) * 2], row.x[(j * 32 + lane) * 2 + 1]};
    float g[8], b[8];
    unpack(g, gamma[j]), unpack(b, beta[j]);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const u32 high = e % 4 < 2 ? four[e / 4].x : four[e / 4].y, low = e % 4 < 2 ? four[e / 4].z : four[e / 4].w;
      const float scaled = e % 2 ? high_half(high) + high_half(low) : low_half(high) + low_half(low);
      h[j][e] = (scaled - stats.x * g[e]) * stats.y + b[e];
    }
  }
  float maximum = SMALLEST;
  int index = warp * rows < V ? warp * rows : V - 1;
  for (int first = warp * rows; first < end; first += GROUP) {
    float dots[GROUP];
#pragma unroll
    for (int n = 0; n < GROUP; n++) {
      dots[n] = 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; j++) {
        float v[8];
        unpack(v, w[n][j]);
#pragma unroll
        for (int e = 0; e < 8; e++) dots[n] += v[e] * h[j][e];
      }
    }
    load_group(first + GROUP);
#pragma unroll
    for (int n = 0; n < GROUP; n++) {
      const float logit = sum_lanes(dots[n], 1, 16);
      if (first + n >= end) continue;
      if (lane == n) logits[first + n] = logit;
      if (logit > maximum) maximum = logit, index = first + n;
    }
  }
  if (lane == 0) maxima[warp] = maximum, indices[warp] = index;
  // while the next token is chosen: the first weights of the next step
  prefetch_weights(ahead_qkv, 3 * C * C, ahead_proj, C * C, clusters);
  prefetch_weights(ahead_fc, 4 * C * C, ahead_fc_proj, 4 * C * C, clusters);
}

// The kernels of a layer's decode step for several sequences (rows) on a Hopper GPU, in clusters of 8 blocks.
//
// A cluster computes up to 8 rows. cluster_step.cu explains clusters, signals and the operands of the products. There
// the 8 rows of a tile of the tensor cores are equal; here they are those of 8 sequences. cluster_step.py launches:
//
//     rows_attention_kernel   one cluster per head and 8 sequences:
//         s = x + partial sums + bias              each block computes C / 8 columns of all rows
//         q, k, v = LN(s) w + b, for one head      each block multiplies its C / 8 columns of s, and sends the products
//                                                  of row i to block i, which adds those of all blocks
//         attention of the head                    block i: of row i; it sends the result to all blocks
//         partial sums of y w, over the 64 rows of w that belong to the head; each block computes C / 8 columns
//     rows_mlp_kernel         one cluster per 64 * UNITS hidden units and 8 sequences:
//         s = x + partial sums + bias              each block computes C / 8 columns of all rows
//         g = gelu(LN(s) w + b)                    as q, k and v; block i sends row i to all blocks
//         partial sums of g w, over the 64 * UNITS rows of w that belong to the cluster; C / 8 columns per block
//
// A row of the result does not depend on the other rows: each sum adds numbers of one row, in a fixed order.
//
// Keys and values of earlier positions do not depend on the previous kernel either: each thread copies the next ones
// that it needs to shared memory, AHEAD chunks of them, before it waits for the previous kernel.

// cluster_step.py compiles cluster_instructions.cuh, cluster_parts.cuh and this file as one text, with the macros of
// cluster_step.cu and AHEAD.

const int ROWS = 8;                                // of a cluster
const int COLUMNS = 3 * D;                         // of q, k and v; and the most hidden units of a cluster
const int CHUNK = 4;                               // keys of a thread
const int KEYS_AT_ONCE = BLOCK_THREADS / 8;        // because 8 threads have one key
const int CHUNK_KEYS = CHUNK * KEYS_AT_ONCE;       // of a block
const int MLP_CLUSTERS = C / (16 * UNITS);         // per 8 sequences

// LN(s) times some columns of a weight. Rows have one more Four than elements, so that they begin in different banks.
struct alignas(16) Product {
  Four x[ROWS][SHARE / 4 + 1];    // this block's columns of s, times the weight of LayerNorm
  float parts[CLUSTER][COLUMNS];  // from each block: its products, for the row of this block
  float2 sums[CLUSTER];           // from each block: the sums of its columns of s and of their squares, for this row
  u64 arrived;
};

// What a thread prepares for compute_share(): warp i has row i of the cluster, and a lane has 4 of the block's columns.
struct Place {
  bool used;
  size_t index;       // of the first of its columns in s (B, C)
  uint2 bias, gamma;  // 4 elements of the bias and of LayerNorm's weight
};

DEVICE Place prepare_place(int first_row, int B, const u16* bias, const u16* ln_w) {
  const int row = first_row + thread_number() / 32, column = rank_in_cluster() * SHARE + thread_number() % 32 * 4;
  Place place = {row < B && thread_number() % 32 < SHARE / 4, (size_t)row * C + column, {0, 0}, {0, 0}};
  if (place.used) {
    if (bias) place.bias = *(const uint2*)(bias + column);
    place.gamma = *(const uint2*)(ln_w + column);
  }
  return place;
}

// s = x + bias + partials[0] + partials[1] + ..., for this block's columns of all rows. x and s (B, C); partials
// (PARTS, B, C), or a null pointer. Rows beyond B are 0. The first cluster of these rows stores s.
template <int PARTS>
DEVICE void compute_share(Product& product, float* s, const float* x, const float* partials, int B, Place place,
                          bool first_cluster) {
  const int warp = thread_number() / 32, lane = thread_number() % 32;
  float v[4] = {};
  if (place.used) {
    const float4 old = load_new(x + place.index);
    v[0] = low_half(place.bias.x), v[1] = high_half(place.bias.x);
    v[2] = low_half(place.bias.y), v[3] = high_half(place.bias.y);
    if (partials) {
      float4 loaded[PARTS];  // issue all loads before the first value is used
#pragma unroll
      for (int i = 0; i < PARTS; i++) loaded[i] = load_new(partials + place.index + (size_t)i * B * C);
#pragma unroll
      for (int i = 0; i < PARTS; i++)
        v[0] += loaded[i].x, v[1] += loaded[i].y, v[2] += loaded[i].z, v[3] += loaded[i].w;
    }
    v[0] += old.x, v[1] += old.y, v[2] += old.z, v[3] += old.w;
    if (first_cluster) *(float4*)(s + place.index) = make_float4(v[0], v[1], v[2], v[3]);
  }
  const float scaled[4] = {v[0] * low_half(place.gamma.x), v[1] * high_half(place.gamma.x),
                           v[2] * low_half(place.gamma.y), v[3] * high_half(place.gamma.y)};
  if (lane < SHARE / 4) product.x[warp][lane] = split(scaled);
  const float total = sum_lanes(v[0] + v[1] + v[2] + v[3], 1, 16);
  const float squares = sum_lanes(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3], 1, 16);
  if (lane == 0) send(&product.sums[rank_in_cluster()], &product.arrived, warp, make_float2(total, squares));
  block_barrier();
}

// Lane 4 g + t: the products of row g with the columns 2t and 2t + 1 of a tile.
DEVICE float2 products_of(const float (&sums)[4]) { return make_float2(sums[0] + sums[2], sums[1] + sums[3]); }

// Multiply this block's columns of s with the 8 N columns of a weight that belong to this warp.
template <int N>
DEVICE void send_products(Product& product, const uint4 (&w)[N][STEPS]) {
  const int lane = thread_number() % 32, row = lane / 4, first = thread_number() / 32 * 8 * N + lane % 4 * 2;
  float sums[N][4] = {};
  multiply(sums, w, product.x[row]);
#pragma unroll
  for (int n = 0; n < N; n++)
    send((float2*)&product.parts[rank_in_cluster()][first + 8 * n], &product.arrived, row, products_of(sums[n]));
}

// LN(s) w + b for this block's row and one column of the cluster. gamma_w, beta_w: of this column.
DEVICE float receive_products(Product& product, int column, float gamma_w, float beta_w, float eps) {
  wait_for_signal(&product.arrived);
  float dot = 0, total = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++)
    dot += product.parts[i][column], total += product.sums[i].x, squares += product.sums[i].y;
  const float mean = total / C;
  return (dot - mean * gamma_w) * rsqrtf(fmaxf(squares / C - mean * mean, 0) + eps) + beta_w;
}

// Copy the part of a weight (C, K) that this thread needs in store_products() to shared memory.
template <int COUNT>
DEVICE void copy_for_product(uint4* copies, const u16* w, int K) {
  const int warp = thread_number() / 32, lane = thread_number() % 32;
  const u16* first = w + (rank_in_cluster() * SHARE + warp % 4 * TILES * 8 + lane / 4) * K + warp / 4 * COUNT * 32;
#pragma unroll
  for (int i = 0; i < TILES * COUNT; i++)
    start_copy(copies + i * BLOCK_THREADS, first + i / COUNT * 8 * K + i % COUNT * 32 + lane % 4 * 8, true);
  end_copies();
}

template <int COUNT>
DEVICE void load_copies(uint4 (&w)[TILES][COUNT], const uint4* copies) {
#pragma unroll
  for (int i = 0; i < TILES * COUNT; i++) w[i / COUNT][i % COUNT] = copies[i * BLOCK_THREADS];
}

// Store the product of vectors x, one per row, with the columns of this block; COUNT as in store_product(). out: the
// address of row 0 and the first of these columns.
template <int COUNT, int LENGTH>
DEVICE void store_products(float* out, int rows, float (&sums)[2][ROWS][SHARE + 8], const uint4 (&w)[TILES][COUNT],
                           const Four (&x)[ROWS][LENGTH]) {
  const int warp = thread_number() / 32, lane = thread_number() % 32, half = warp / 4;
  float products[TILES][4] = {};
  multiply(products, w, x[lane / 4] + half * COUNT * 8);
#pragma unroll
  for (int n = 0; n < TILES; n++)
    *(float2*)&sums[half][lane / 4][(warp % 4 * TILES + n) * 8 + lane % 4 * 2] = products_of(products[n]);
  block_barrier();
  if (warp < rows && lane < SHARE / 4) {
    const float4 a = *(const float4*)&sums[0][warp][lane * 4], b = *(const float4*)&sums[1][warp][lane * 4];
    *(float4*)(out + (size_t)warp * C + lane * 4) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
}

struct alignas(16) RowsAttentionMemory {
  Product product;
  float qkv[3 * D], rotation[D];  // of this block's row, as in AttentionMemory
  float warp_y[WARPS][D];
  float2 warp_stats[WARPS];
  Four y[ROWS][D / 4 + 1];  // the attention output of all rows
  float sums[2][ROWS][SHARE + 8];
  u64 y_arrived;
};

// The arguments are those of attention_kernel in cluster_step.cu, for B sequences: partials_out (heads, B, C), s and x
// (B, C), partials (parts, B, C), cache (B, block, 2C), lengths (B), rotation (B, D).
CLUSTER_KERNEL rows_attention_kernel(float* partials_out, float* s, u16* cache, const float* x, const float* partials,
                                     const u16* bias, const u16* ln_w, const u16* qkv, const float* gamma_w,
                                     const float* beta_w, const u16* proj, const int* lengths, const float* rotation,
                                     const u16* ahead_qkv, const u16* ahead_proj, int block, float eps, float scale,
                                     int B) {
  RowsAttentionMemory& memory = shared_memory<RowsAttentionMemory>();
  const int groups = (B + ROWS - 1) / ROWS, head = cluster_number() / groups, rank = rank_in_cluster();
  const int first_row = cluster_number() % groups * ROWS, row = min(first_row + rank, B - 1);
  const int thread = thread_number(), warp = thread / 32, lane = thread % 32, part = thread % 8;
  const bool used = first_row + rank < B;  // otherwise the result of this block is not stored

  if (thread == 0) {
    start_signal(&memory.product.arrived, CLUSTER * (COLUMNS * 4 + 8));
    start_signal(&memory.y_arrived, ROWS * D * 4);
  }
  const auto column_of = [=](int i) { return (i / D) * C + head * D + i % D; };  // i: of the cluster's 192 columns
  const u64 policy = evict_first();
  cluster_arrive();
  const int length = lengths[row], newest = (length - 1) % block, keys = used ? min(length, block) : 1;
  uint4 w[3][STEPS], w_proj[TILES][1];
#pragma unroll
  for (int n = 0; n < 3; n++) load_columns(w[n], qkv + column_of(warp * 24 + 8 * n) * C + rank * SHARE, C, policy);
  uint4* proj_copies = dynamic_memory() + thread;
  copy_for_product<1>(proj_copies, proj + head * D, C);
  u16* row_cache = cache + (size_t)row * block * 2 * C + head * D + part * 8;
  uint4* copies = proj_copies + TILES * BLOCK_THREADS;  // this thread's part of chunk 0
  const int first_key = thread / 8;
  const auto start_chunk = [=](int chunk) {
    if (chunk * CHUNK_KEYS < keys)
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const int key = chunk * CHUNK_KEYS + i * KEYS_AT_ONCE + first_key;
        const bool cached = key < keys && key != newest;
        const u16* address = row_cache + (size_t)(cached ? key : 0) * 2 * C;
        uint4* to = copies + (chunk % AHEAD * CHUNK + i) * 2 * BLOCK_THREADS;
        start_copy(to, address, cached);
        start_copy(to + BLOCK_THREADS, address + C, cached);
      }
    end_copies();
  };
#pragma unroll
  for (int chunk = 0; chunk < AHEAD; chunk++) start_chunk(chunk);
  const Place place = prepare_place(first_row, B, bias, ln_w);
  const int column = thread < 3 * D ? thread : 0;
  const float gamma_of = gamma_w[column_of(column)], beta_of = beta_w[column_of(column)];
  if (rotation && thread < D) memory.rotation[thread] = rotation[row * D + thread];
  prefetch_weights(ahead_qkv, 3 * C * C, ahead_proj, C * C, C / D * groups);
  cluster_wait();  // as in cluster_step.cu
  wait_for_previous_launch();

  compute_share<MLP_CLUSTERS>(memory.product, s, x, partials, B, place, head == 0);
  send_products(memory.product, w);
  wait_for_copies<AHEAD>();
  load_copies(w_proj, proj_copies);
  const float value = receive_products(memory.product, column, gamma_of, beta_of, eps);
  if (thread < 3 * D) memory.qkv[thread] = low_half(pack(value, 0));
  block_barrier();

  float q[8], a[8], y[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    q[i] = memory.qkv[part * 8 + i], a[i] = memory.qkv[D + part * 8 + i], y[i] = memory.qkv[2 * D + part * 8 + i];
  if (rotation) load_rotated(q, memory.qkv, memory.rotation, part * 8);
  if (rotation) load_rotated(a, memory.qkv + D, memory.rotation, part * 8);
  const auto score_of = [&](uint4 k) {
    float key[8], dot = 0;
    unpack(key, k);
#pragma unroll
    for (int e = 0; e < 8; e++) dot += key[e] * q[e];
    return scale * sum_lanes(dot, 1, 4);
  };
  // an online softmax of the keys of these 8 lanes; it begins with the newest position, or with no key
  const uint4 new_k = packed(a);
  const float new_score = score_of(new_k);
  const bool has_newest = first_key == newest % KEYS_AT_ONCE;
  if (has_newest && used) {
    *(uint4*)(row_cache + (size_t)newest * 2 * C) = new_k;
    *(uint4*)(row_cache + (size_t)newest * 2 * C + C) = packed(y);
  }
  float maximum = has_newest ? new_score : SMALLEST, sum = has_newest ? 1 : 0;
#pragma unroll
  for (int e = 0; e < 8; e++) y[e] = has_newest ? y[e] : 0;
  for (int chunk = 0; chunk * CHUNK_KEYS < keys; chunk++) {
    wait_for_copies<AHEAD - 1>();
    const uint4* k = copies + chunk % AHEAD * CHUNK * 2 * BLOCK_THREADS;
    float score[CHUNK], old = maximum;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const int key = chunk * CHUNK_KEYS + i * KEYS_AT_ONCE + first_key;
      score[i] = score_of(k[i * 2 * BLOCK_THREADS]);
      if (key >= keys || key == newest) score[i] = SMALLEST;
      maximum = fmaxf(maximum, score[i]);
    }
    const float rescale = fast_exp2(old - maximum);
    sum *= rescale;
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] *= rescale;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const float weight = fast_exp2(score[i] - maximum);
      float values[8];
      unpack(values, k[(i * 2 + 1) * BLOCK_THREADS]);
      sum += weight;
#pragma unroll
      for (int e = 0; e < 8; e++) y[e] += weight * values[e];
    }
    start_chunk(chunk + AHEAD);
  }

  // combine the 4 keys of a warp, then the 8 warps: a thread has one element of y, and sends it to two blocks
  float top = fmaxf(maximum, exchange(maximum, 8));
  top = fmaxf(top, exchange(top, 16));
  const float factor = fast_exp2(maximum - top);  // 0 if these lanes had no key
  sum = sum_lanes(sum * factor, 8, 16);
#pragma unroll
  for (int e = 0; e < 8; e++) y[e] = sum_lanes(y[e] * factor, 8, 16);
  if (lane < 8) {
    *(float4*)&memory.warp_y[warp][lane * 8] = make_float4(y[0], y[1], y[2], y[3]);
    *(float4*)&memory.warp_y[warp][lane * 8 + 4] = make_float4(y[4], y[5], y[6], y[7]);
  }
  if (lane == 0) memory.warp_stats[warp] = make_float2(top, sum);
  block_barrier();
  float element = 0;
  maximum = SMALLEST, sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) maximum = fmaxf(maximum, memory.warp_stats[i].x);
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const float weight = fast_exp2(memory.warp_stats[i].x - maximum);
    sum += weight * memory.warp_stats[i].y, element += weight * memory.warp_y[i][thread % D];
  }
  const Four four = split_lanes(fast_divide(element, sum));
  if (thread % 4 == 0)
#pragma unroll
    for (int i = 0; i < 2; i++) send(&memory.y[rank][thread % D / 4], &memory.y_arrived, thread / D + 4 * i, four);
  wait_for_signal(&memory.y_arrived);
  float* out = partials_out + ((size_t)head * B + first_row) * C + rank * SHARE;
  store_products(out, B - first_row, memory.sums, w_proj, memory.y);
}

struct alignas(16) RowsMlpMemory {
  Product product;
  Four hidden[ROWS][16 * UNITS + 1];  // g of this cluster, all rows
  float sums[2][ROWS][SHARE + 8];
  u64 hidden_arrived;
};

// The arguments are those of mlp_kernel in cluster_step.cu, for B sequences: partials_out (clusters, B, C), s and x
// (B, C), partials (parts, B, C).
CLUSTER_KERNEL rows_mlp_kernel(float* partials_out, float* s, const float* x, const float* partials, const u16* bias,
                               const u16* ln_w, const u16* fc, const float* gamma_w, const float* beta_w,
                               const u16* fc_proj, const u16* ahead_fc, const u16* ahead_proj, float eps, int B) {
  RowsMlpMemory& memory = shared_memory<RowsMlpMemory>();
  const int groups = (B + ROWS - 1) / ROWS, number = cluster_number() / groups, rank = rank_in_cluster();
  const int first_row = cluster_number() % groups * ROWS, first_unit = number * 64 * UNITS;
  const int thread = thread_number(), warp = thread / 32;

  if (thread == 0) {
    start_signal(&memory.product.arrived, CLUSTER * (64 * UNITS * 4 + 8));
    start_signal(&memory.hidden_arrived, ROWS * 16 * UNITS * 16);
  }
  const u64 policy = evict_first();
  cluster_arrive();
  uint4 w[UNITS][STEPS], w_proj[TILES][UNITS];
#pragma unroll
  for (int n = 0; n < UNITS; n++)
    load_columns(w[n], fc + (first_unit + (warp * UNITS + n) * 8) * C + rank * SHARE, C, policy);
  uint4* copies = dynamic_memory() + thread;
  copy_for_product<UNITS>(copies, fc_proj + first_unit, 4 * C);
  const Place place = prepare_place(first_row, B, bias, ln_w);
  const int unit = thread < 64 * UNITS ? thread : 0;
  const float gamma_of = gamma_w[first_unit + unit], beta_of = beta_w[first_unit + unit];
  prefetch_weights(ahead_fc, 4 * C * C, ahead_proj, 4 * C * C, MLP_CLUSTERS * groups);
  cluster_wait();
  wait_for_previous_launch();

  compute_share<C / D>(memory.product, s, x, partials, B, place, number == 0);
  send_products(memory.product, w);
  wait_for_copies<0>();
  load_copies(w_proj, copies);
  const float h = receive_products(memory.product, unit, gamma_of, beta_of, eps);
  const Four four = split_lanes(fast_divide(h, 1 + fast_exp2(h * (U1 + U3 * h * h))));  // GELU, see kernels/gelu.py
  if (thread < 64 * UNITS && thread % 4 == 0)
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) send(&memory.hidden[rank][thread / 4], &memory.hidden_arrived, i, four);
  wait_for_signal(&memory.hidden_arrived);
  float* out = partials_out + ((size_t)number * B + first_row) * C + rank * SHARE;
  store_products(out, B - first_row, memory.sums, w_proj, memory.hidden);
}

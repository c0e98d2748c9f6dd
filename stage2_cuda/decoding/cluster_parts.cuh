// What several kernels of cluster_step.cu and cluster_rows.cu use: vectors, products, the sum of the residual stream.

const int CLUSTER = 8;            // blocks
const int WARPS = 8;              // per block
const int D = 64;                 // head size
const int SHARE = C / CLUSTER;    // columns of s, and of the product with partial sums, that one block computes
const int TILES = SHARE / 32;     // of 8 of these columns; a warp multiplies TILES of them with half of the rows
const int STEPS = C / WARPS / 32; // of 32 rows: a warp's part of the C rows of a product
const float SMALLEST = -3.0e38f;  // the largest score of no keys; finite, because -inf - -inf would be NaN

// -- vectors and products ---------------------------------------------------------------------------------------------

// Four elements x[0..3] of a vector as 16-bit numbers: high 0 and 1, high 2 and 3, low 0 and 1, low 2 and 3.
typedef uint4 Four;

DEVICE Four split(const float (&x)[4]) {
  Four four;
  four.x = pack(x[0], x[1]), four.y = pack(x[2], x[3]);
  four.z = pack(x[0] - low_half(four.x), x[1] - high_half(four.x));
  four.w = pack(x[2] - low_half(four.y), x[3] - high_half(four.y));
  return four;
}

// Each lane has one element; lanes 4 i get the Four of the lanes 4 i to 4 i + 3.
DEVICE Four split_lanes(float x) {
  const float next = exchange(x, 1);
  const u32 high = pack(x, next), low = pack(x - low_half(high), next - high_half(high));
  return make_uint4(high, exchange(high, 2), low, exchange(low, 2));
}

// Load a part of a weight (N, K), stored transposed: for 8 columns, 32 rows per step. `first` is the address of the
// first element of the part.
template <int COUNT>
DEVICE void load_columns(uint4 (&loaded)[COUNT], const u16* first, int K, u64 policy) {
  const int lane = thread_number() % 32;
  const u16* address = first + lane / 4 * K + lane % 4 * 8;
#pragma unroll
  for (int j = 0; j < COUNT; j++) loaded[j] = load_once(address + 32 * j, policy);
}

// Add the products of 8 N columns of a weight with a vector x. store_sums() adds the high and the low parts of x, and
// stores the sums of all columns.
template <int N, int COUNT>
DEVICE void multiply(float (&sums)[N][4], const uint4 (&w)[N][COUNT], const Four* x) {
  const int lane = thread_number() % 32;
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    // multiply_add() expects other rows in a lane; their order does not matter if it is the same in x and w
    const Four a = x[(4 * j + lane % 4) * 2], b = x[(4 * j + lane % 4) * 2 + 1];
#pragma unroll
    for (int n = 0; n < N; n++) multiply_add(sums[n], a.x, a.z, a.y, a.w, w[n][j].x, w[n][j].y);
#pragma unroll
    for (int n = 0; n < N; n++) multiply_add(sums[n], b.x, b.z, b.y, b.w, w[n][j].z, w[n][j].w);
  }
}

// Lane 4 g + t of a warp has the columns 2t and 2t + 1 of each tile, in all 8 rows g; rows 8 to 15 have the low parts.
template <int N>
DEVICE void store_sums(float* out, const float (&sums)[N][4]) {
  const int lane = thread_number() % 32;
  if (lane < 4)
#pragma unroll
    for (int n = 0; n < N; n++)
      *(float2*)(out + 8 * n + 2 * lane) = make_float2(sums[n][0] + sums[n][2], sums[n][1] + sums[n][3]);
}

// -- parts of the kernels ---------------------------------------------------------------------------------------------

struct alignas(16) Row {
  Four x[C / 4];                  // s times the weight of LayerNorm
  float2 sums[CLUSTER * C / 128]; // of s and of its squares, over the 16 columns that one warp has sent
  u64 arrived;
};

// What a thread prepares for send_residual() before the previous kernel has ended: the addresses of its terms of s, and
// 4 elements of the bias and of LayerNorm's weight. 8 lanes add different terms of the same 4 columns.
struct Terms {
  const float* addresses[3];  // a null pointer if there are fewer
  float4 x;                   // without partial sums: the term x, because the previous kernel did not write it
  uint2 bias, gamma;
};

DEVICE int residual_column() { return rank_in_cluster() * SHARE + thread_number() / 8 * 4; }

// x (C); partials (parts, C) with at most 16 parts.
DEVICE Terms prepare_terms(const float* x, const float* partials, int parts, const u16* bias, const u16* ln_w) {
  Terms terms = {{}, make_float4(0, 0, 0, 0), make_uint2(0, 0), make_uint2(0, 0)};
  const int part = thread_number() % 8, column = residual_column();
  if (thread_number() < C / 4) {
    if (part < parts) terms.addresses[0] = partials + part * C + column;
    if (part + 8 < parts) terms.addresses[1] = partials + (part + 8) * C + column;
    if (part == 0 && parts > 0) terms.addresses[2] = x + column;
    if (part == 0 && parts == 0) terms.x = load_new(x + column);
    if (part == 1 && bias) terms.bias = *(const uint2*)(bias + column);
    terms.gamma = *(const uint2*)(ln_w + column);
  }
#pragma unroll
  for (int i = 0; i < 3; i++) compute_now(terms.addresses[i]);
  return terms;
}

// s = x + bias + partials[0] + partials[1] + ...; send the share of this block to all rows of the cluster. The first
// cluster stores s (C).
DEVICE void send_residual(Row& row, float* s, Terms terms) {
  const int part = thread_number() % 8, column = residual_column();
  if (thread_number() >= C / 4) return;
  float4 loaded[3];  // issue all loads before the first value is used
#pragma unroll
  for (int i = 0; i < 3; i++)
    loaded[i] = terms.addresses[i] ? load_new(terms.addresses[i]) : make_float4(0, 0, 0, 0);
  float v[4] = {terms.x.x + low_half(terms.bias.x), terms.x.y + high_half(terms.bias.x),
                terms.x.z + low_half(terms.bias.y), terms.x.w + high_half(terms.bias.y)};
#pragma unroll
  for (int i = 0; i < 3; i++) v[0] += loaded[i].x, v[1] += loaded[i].y, v[2] += loaded[i].z, v[3] += loaded[i].w;
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = sum_lanes(v[i], 1, 4);
  if (cluster_number() == 0 && part == 0) *(float4*)(s + column) = make_float4(v[0], v[1], v[2], v[3]);
  const float scaled[4] = {v[0] * low_half(terms.gamma.x), v[1] * high_half(terms.gamma.x),
                           v[2] * low_half(terms.gamma.y), v[3] * high_half(terms.gamma.y)};
  send(&row.x[column / 4], &row.arrived, part, split(scaled));
  const float total = sum_lanes(v[0] + v[1] + v[2] + v[3], 8, 16);
  const float squares = sum_lanes(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3], 8, 16);
  if (thread_number() % 32 < 8) send(&row.sums[column / 16], &row.arrived, part, make_float2(total, squares));
}

// The mean and the inverse standard deviation of the row; every warp computes both.
DEVICE float2 mean_and_rstd(const Row& row, float eps) {
  float total = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < C / 16; i += 32)
    if (i + thread_number() % 32 < C / 16) {
      const float2 sums = row.sums[i + thread_number() % 32];
      total += sums.x, squares += sums.y;
    }
  const float mean = sum_lanes(total, 1, 16) / C, mean_square = sum_lanes(squares, 1, 16) / C;
  return make_float2(mean, rsqrtf(fmaxf(mean_square - mean * mean, 0) + eps));
}

// LN(s) w + b for N columns; returns the value of column number lane % 32 in each warp. w: this warp's part of the
// weight; gamma_w, beta_w: of this column, from single_row.fold_layernorm(); sums: scratch memory.
template <int N>
DEVICE float layernorm_product(float (&sums)[WARPS][8 * N], const Row& row, const uint4 (&w)[N][STEPS], float gamma_w,
                               float beta_w, float eps) {
  const int warp = thread_number() / 32, lane = thread_number() % 32;
  float products[N][4] = {};
  multiply(products, w, row.x + warp * STEPS * 8);
  const float2 stats = mean_and_rstd(row, eps);  // while the tensor cores compute
  store_sums(sums[warp], products);
  block_barrier();
  float dot = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) dot += sums[i][lane < 8 * N ? lane : 0];
  return (dot - stats.x * gamma_w) * stats.y + beta_w;
}

// partials_out (C) = the product of a vector x with the columns of this block. The warps 0 to 3 have the first half of
// the rows, and the warps 4 to 7 the second half. sums: scratch memory.
template <int COUNT>
DEVICE void store_product(float* partials_out, float (&sums)[2][SHARE], const uint4 (&w)[TILES][COUNT], const Four* x) {
  const int thread = thread_number(), half = thread / 128;
  float products[TILES][4] = {};
  multiply(products, w, x + half * COUNT * 8);
  store_sums(sums[half] + thread / 32 % 4 * TILES * 8, products);
  block_barrier();
  if (thread < SHARE) partials_out[rank_in_cluster() * SHARE + thread] = sums[0][thread] + sums[1][thread];
}

// The part of a weight (C, K) that this warp needs in store_product().
template <int COUNT>
DEVICE void load_for_product(uint4 (&loaded)[TILES][COUNT], const u16* w, int K, u64 policy) {
  const int warp = thread_number() / 32, column = rank_in_cluster() * SHARE + warp % 4 * TILES * 8;
  const u16* first = w + column * K + warp / 4 * COUNT * 32;
#pragma unroll
  for (int n = 0; n < TILES; n++) load_columns(loaded[n], first + 8 * n * K, K, policy);
}

// x (8): the elements from `first` on of a row (D) of one head, rotated as by kernels/rotary.py; 8 divides `first`.
DEVICE void load_rotated(float (&x)[8], const float* row, const float* rotation, int first) {
  const int other = first ^ D / 2, pair = first % (D / 2);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float cos = rotation[pair + i], sin = rotation[D / 2 + pair + i];
    x[i] = row[first + i] * cos + row[other + i] * (first < D / 2 ? -sin : sin);
  }
}

// Each block copies its share of two weights with n_1 and n_2 elements to the L2 cache. ahead_1, ahead_2: the weights
// of the kernel after the next one, or null pointers.
DEVICE void prefetch_weights(const u16* ahead_1, int n_1, const u16* ahead_2, int n_2, int clusters) {
  const int blocks = clusters * CLUSTER, block = cluster_number() * CLUSTER + rank_in_cluster();
  if (thread_number() != 0 || !ahead_1) return;
  // a multiple of 16 bytes
  prefetch(ahead_1 + n_1 / blocks / 8 * 8 * block, n_1 / blocks / 8 * 16);
  prefetch(ahead_2 + n_2 / blocks / 8 * 8 * block, n_2 / blocks / 8 * 16);
}

// The kernel of residual_layernorm_backward() for some C on a Hopper GPU. A warp computes whole rows, so the sums over
// a row need no barrier. All lanes have the same number of columns; a Triton tile has a power of two of columns, so for
// C = 768 a quarter of it is masked. Before a warp computes a row, it starts to load its next row.
//
// Compiled after instructions.cuh and vectors.cuh. Macro: C, a multiple of 256.

const int WARPS = BLOCK_THREADS / 32;
const int VECTORS = C / 256;  // of 8 columns, that a lane has of each row

struct Sums { float dw[C], db[C], da_bias[C]; };
typedef uint4 Part[VECTORS];  // a lane's part of a row: vector j has the columns from 256 j + 8 lane on

DEVICE void load_part(Part& part, const u16* row) {
#pragma unroll
  for (int j = 0; j < VECTORS; j++) part[j] = load_stream(row + 256 * j + thread_number() % 32 * 8);
}

// dx, ds, dy, s (N, C); w (C); mean, rstd (N); partials (3, blocks, C). ds may be null.
KERNEL layernorm_backward(u16* dx, float* partials, const u16* ds, const u16* dy, const u16* s, const u16* w,
                          const float* mean, const float* rstd, int n) {
  Sums& sums = shared_memory<Sums>();
  const int lane = thread_number() % 32, warp = thread_number() / 32, rows_at_a_time = block_count() * WARPS;
  float dw[VECTORS][8] = {}, db[VECTORS][8] = {}, da_bias[VECTORS][8] = {};
  Part w_part, next_dy, next_s, next_ds = {};
  float next_mean = 0, next_rstd = 0;
  load_part(w_part, w);
  const auto load = [&](int row) {
    if (row >= n) return;
    const size_t offset = (size_t)row * C;
    load_part(next_dy, dy + offset), load_part(next_s, s + offset);
    if (ds) load_part(next_ds, ds + offset);
    next_mean = mean[row], next_rstd = rstd[row];
  };
  int row = block_number() * WARPS + warp;
  load(row);
  for (; row < n; row += rows_at_a_time) {
    Part dy_part, s_part, ds_part;
    const float row_mean = next_mean, row_rstd = next_rstd;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) dy_part[j] = next_dy[j], s_part[j] = next_s[j], ds_part[j] = next_ds[j];
    load(row + rows_at_a_time);

    float sum_g = 0, sum_gh = 0;  // g = dy w
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
      float g[8], h[8], y[8];
      unpack(g, w_part[j]), unpack(h, s_part[j]), unpack(y, dy_part[j]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        h[e] = (h[e] - row_mean) * row_rstd, g[e] *= y[e];
        dw[j][e] += y[e] * h[e], db[j][e] += y[e];
        sum_g += g[e], sum_gh += g[e] * h[e];
      }
    }
    const float mean_g = sum_lanes(sum_g, 1, 16) / C, mean_gh = sum_lanes(sum_gh, 1, 16) / C;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
      float g[8], h[8], y[8], d[8];
      unpack(g, w_part[j]), unpack(h, s_part[j]), unpack(y, dy_part[j]), unpack(d, ds_part[j]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        h[e] = (h[e] - row_mean) * row_rstd, g[e] *= y[e];
        d[e] += (g[e] - mean_g - h[e] * mean_gh) * row_rstd;
      }
      const uint4 rounded = packed(d);  // da_bias is the sum of dx as it is stored: see residual_bias_gradient()
      store_stream(dx + (size_t)row * C + 256 * j + 8 * lane, rounded);
      unpack(d, rounded);
#pragma unroll
      for (int e = 0; e < 8; e++) da_bias[j][e] += d[e];
    }
  }

  for (int turn = 0; turn < WARPS; turn++) {  // the warps add one after the other: a fixed order
    if (warp == turn)
#pragma unroll
      for (int j = 0; j < VECTORS; j++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const int column = 256 * j + 8 * lane + e;
          sums.dw[column] = (turn ? sums.dw[column] : 0) + dw[j][e];
          sums.db[column] = (turn ? sums.db[column] : 0) + db[j][e];
          sums.da_bias[column] = (turn ? sums.da_bias[column] : 0) + da_bias[j][e];
        }
    block_barrier();
  }
  for (int i = thread_number(); i < C; i += BLOCK_THREADS) {
    const size_t own = block_number() * C + i, size = block_count() * C;
    partials[own] = sums.dw[i], partials[own + size] = sums.db[i], partials[own + 2 * size] = sums.da_bias[i];
  }
}

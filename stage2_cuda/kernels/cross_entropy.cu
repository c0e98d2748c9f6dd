// The kernel of cross_entropy.py for large vocabularies on a Hopper GPU. A block keeps its row of logits in shared
// memory, so global memory is read once and written once. Two blocks run on a multiprocessor at a time: one computes
// while the other one waits for memory.
//
// Compiled after instructions.cuh and vectors.cuh.

const int WARPS = BLOCK_THREADS / 32;
const int QUARTERS = 4;  // a row is copied in four parts, so that the maximum of the first part is computed earlier
const float LOG2E = 1.4426950408889634f;
const float LOWEST = -2.0e38f;  // lower than all logits, and finite, because -inf - -inf would be NaN

struct Memory {
  float maxima[WARPS], sums[WARPS];
  u64 arrived[QUARTERS];
};

DEVICE float max_of_warp(float v) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) v = fmaxf(v, exchange(v, mask));
  return v;
}

// Columns >= vocab are padding: they become -inf.
DEVICE void mask_padding(uint4* vector, int first_column, int vocab) {
  u16* elements = (u16*)vector;
  for (int e = 0; e < 8; e++)
    if (first_column + e >= vocab) elements[e] = BF16 ? 0xFF80 : 0xFC00;
}

// dlogits, logits (N, width) may be the same array; width is a multiple of 32. Shared memory: 2 width bytes. The other
// arguments: see cross_entropy_forward_backward(). dy may be null; without dlogits there is no backward.
KERNEL cross_entropy_rows(u16* dlogits, float* maxima, float* sums, float* target_logits, const u16* logits,
                          const int* targets, const float* dy, float scale, int vocab, int width, int first) {
  Memory& memory = shared_memory<Memory>();
  uint4* row = dynamic_memory();  // vectors of 8 columns
  const int thread = thread_number(), warp = thread / 32, lane = thread % 32;
  const int vectors = width / 8, quarter = vectors / QUARTERS;
  const size_t offset = (size_t)block_number() * width;

  if (thread == 0)
    for (int i = 0; i < QUARTERS; i++) start_signal(&memory.arrived[i], quarter * 16);
  block_barrier();
  if (thread == 0)
    for (int i = 0; i < QUARTERS; i++)
      start_load(row + i * quarter, logits + offset + i * quarter * 8, quarter * 16, &memory.arrived[i]);
  const int target = targets[block_number()] - first;
  if (dy) scale *= *dy;

  float maximum = LOWEST;
  for (int i = 0; i < QUARTERS; i++) {
    wait_for_signal(&memory.arrived[i]);
    for (int at = i * quarter + thread; at < (i + 1) * quarter; at += BLOCK_THREADS) {
      if (at * 8 + 8 > vocab) mask_padding(row + at, at * 8, vocab);
      float v[8];
      unpack(v, row[at]);
#pragma unroll
      for (int e = 0; e < 8; e++) maximum = fmaxf(maximum, v[e]);
    }
  }
  maximum = max_of_warp(maximum);
  if (lane == 0) memory.maxima[warp] = maximum;
  block_barrier();
#pragma unroll
  for (int i = 0; i < WARPS; i++) maximum = fmaxf(maximum, memory.maxima[i]);

  // exp(x - maximum) = exp2(x log2(e) - shift)
  const float shift = maximum * LOG2E;
  float sum = 0;
  for (int at = thread; at < vectors; at += BLOCK_THREADS) {
    float v[8];
    unpack(v, row[at]);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += fast_exp2(v[e] * LOG2E - shift);
  }
  sum = sum_lanes(sum, 1, 16);
  if (lane == 0) memory.sums[warp] = sum;
  block_barrier();
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += memory.sums[i];

  const float weight = scale / sum;
  const bool has_target = 0 <= target && target < vocab;
  float target_logit = 0;
  if (thread == 0) {
    if (has_target) target_logit = low_half(((const u16*)row)[target]);
    maxima[block_number()] = maximum, sums[block_number()] = sum, target_logits[block_number()] = target_logit;
  }
  if (!dlogits) return;
  block_barrier();  // thread 0 has read the target's logit
  for (int at = thread; at < vectors; at += BLOCK_THREADS) {
    float v[8];
    unpack(v, row[at]);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = weight * fast_exp2(v[e] * LOG2E - shift);
    row[at] = packed(v);
  }
  block_barrier();
  if (thread == 0 && has_target)
    ((u16*)row)[target] = (u16)pack(weight * fast_exp2(target_logit * LOG2E - shift) - scale, 0);
  publish_writes();
  block_barrier();
  if (thread == 0) store_bytes(dlogits + offset, row, width * 2);
}

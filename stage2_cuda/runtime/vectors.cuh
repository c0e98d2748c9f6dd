// Vectors of 8 numbers of 16 bits, and sums over the lanes of a warp.

DEVICE void unpack(float (&v)[8], uint4 w) {
  v[0] = low_half(w.x), v[1] = high_half(w.x), v[2] = low_half(w.y), v[3] = high_half(w.y);
  v[4] = low_half(w.z), v[5] = high_half(w.z), v[6] = low_half(w.w), v[7] = high_half(w.w);
}

// The sum over the lanes whose numbers differ only in the bits first, 2 * first, ... and last.
DEVICE float sum_lanes(float v, int first, int last) {
#pragma unroll
  for (int mask = first; mask <= last; mask *= 2) v += exchange(v, mask);
  return v;
}

DEVICE uint4 packed(const float (&v)[8]) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

#include "../../tests/support/cuda_emulator.h"
#define GRID_KERNEL extern "C" void
static int grid_blocks;
static std::vector<std::vector<char>> dynamic_bytes;
DEVICE int block_number() { return current_cluster * 8 + current->block; }
DEVICE int block_count() { return grid_blocks; }
DEVICE uint4* dynamic_shared() { return (uint4*)dynamic_bytes[current->block].data(); }
DEVICE uint4 load_stream(const u16* a) { return load16(a); }
DEVICE void store16(u16* a, uint4 v) { *(uint4*)a = v; }
DEVICE void bulk_load(void* to, const void* from, int bytes, u64* signal) { std::memcpy(to, from, bytes); *signal -= bytes; }
DEVICE void bulk_store(void* to, const void* from, int bytes) { std::memcpy(to, from, bytes); }
DEVICE void wait_for_stores() {}
#include "rows.cu"
extern "C" void run(int which, int blocks, void** p, int n, int vocab, int width, float f) {
  grid_blocks = blocks;
  dynamic_bytes.assign(8, std::vector<char>(1 << 18));
  run_clusters(blocks / 8, [=] {
    if (which == 0) layernorm_backward_rows((u16*)p[0], (float*)p[1], (u16*)p[2], (u16*)p[3], (u16*)p[4], (u16*)p[5], (float*)p[6], (float*)p[7], n);
    if (which == 1) layernorm_forward_rows((u16*)p[0], (u16*)p[1], (float*)p[2], (float*)p[3], (u16*)p[4], (u16*)p[5], (u16*)p[6], (u16*)p[7], (u16*)p[8], n, f);
    if (which == 2) cross_entropy_rows((u16*)p[0], (float*)p[1], (float*)p[2], (float*)p[3], (int*)p[4], vocab, width, f);
  });
}

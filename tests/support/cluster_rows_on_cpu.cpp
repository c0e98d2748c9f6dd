// The kernels of cluster_rows.cu as functions of a shared library, run by the emulator.
#include "cuda_emulator.h"

#include "../../stage2_cuda/runtime/vectors.cuh"
#include "../../stage2_cuda/decoding/cluster_parts.cuh"
#include "../../stage2_cuda/decoding/cluster_rows.cu"

extern "C" void run_attention(int clusters, void** p, int block, float eps, float scale, int B) {
  run_clusters(clusters, [=] {
    rows_attention_kernel((float*)p[0], (float*)p[1], (u16*)p[2], (float*)p[3], (float*)p[4], (u16*)p[5], (u16*)p[6],
                          (u16*)p[7], (float*)p[8], (float*)p[9], (u16*)p[10], (int*)p[11], (float*)p[12], nullptr,
                          nullptr, block, eps, scale, B);
  });
}

extern "C" void run_mlp(int clusters, void** p, float eps, int B) {
  run_clusters(clusters, [=] {
    rows_mlp_kernel((float*)p[0], (float*)p[1], (float*)p[2], (float*)p[3], (u16*)p[4], (u16*)p[5], (u16*)p[6],
                    (float*)p[7], (float*)p[8], (u16*)p[9], nullptr, nullptr, eps, B);
  });
}

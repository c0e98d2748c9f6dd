// The kernels of cluster_step.cu as functions of a shared library, run by the emulator.
#include "cuda_emulator.h"

#include "../../stage2_cuda/runtime/vectors.cuh"
#include "../../stage2_cuda/decoding/cluster_parts.cuh"
#include "../../stage2_cuda/decoding/cluster_step.cu"

extern "C" void run_attention(int heads, void** p, int parts, int block, float eps, float scale) {
  run_clusters(heads, [=] {
    attention_kernel((float*)p[0], (float*)p[1], (u16*)p[2], (float*)p[3], (float*)p[4], (u16*)p[5], (u16*)p[6],
                     (u16*)p[7], (float*)p[8], (float*)p[9], (u16*)p[10], (int*)p[11], (float*)p[12], nullptr,
                     nullptr, parts, block, eps, scale);
  });
}

extern "C" void run_mlp(int clusters, void** p, int parts, float eps) {
  run_clusters(clusters, [=] {
    mlp_kernel((float*)p[0], (float*)p[1], (float*)p[2], (float*)p[3], (u16*)p[4], (u16*)p[5], (u16*)p[6],
               (float*)p[7], (float*)p[8], (u16*)p[9], nullptr, nullptr, parts, eps);
  });
}

extern "C" void run_logits(int clusters, void** p, int parts, int V, int rows, float eps) {
  run_clusters(clusters, [=] {
    logits_kernel((float*)p[0], (float*)p[1], (int*)p[2], (float*)p[3], (float*)p[4], (float*)p[5], (u16*)p[6],
                  (u16*)p[7], (u16*)p[8], (u16*)p[9], nullptr, nullptr, nullptr, nullptr, parts, V, rows, clusters,
                  eps);
  });
}

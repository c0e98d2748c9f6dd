// The kernel of layernorm_backward.cu or, without the macro C, that of cross_entropy.cu as a function of a shared
// library, run by the emulator.
#include "cuda_emulator.h"

#include "../../stage2_cuda/runtime/vectors.cuh"
#ifdef C
#include "../../stage2_cuda/kernels/layernorm_backward.cu"

extern "C" void run(int blocks, void** p, int n) {
  run_clusters(blocks / BLOCKS, [=] {
    layernorm_backward((u16*)p[0], (float*)p[1], (u16*)p[2], (u16*)p[3], (u16*)p[4], (u16*)p[5], (float*)p[6],
                       (float*)p[7], n);
  });
}
#else
#include "../../stage2_cuda/kernels/cross_entropy.cu"

extern "C" void run(int blocks, void** p, float scale, int vocab, int width, int first) {
  run_clusters(blocks / BLOCKS, [=] {
    cross_entropy_rows((u16*)p[0], (float*)p[1], (float*)p[2], (float*)p[3], (u16*)p[4], (int*)p[5], (float*)p[6],
                       scale, vocab, width, first);
  });
}
#endif

#define EMULATE
#include "decode_floor.cu"
#undef shared
struct Arguments { void* p[14]; int tokens, mode; } args;
static void entry() {
  void** p = args.p;
  decode((char*)p[0], (char*)p[1], (float*)p[2], (float*)p[3], (float*)p[4], (u16*)p[5], (float*)p[6], (u16*)p[7], (u32*)p[8],
         (float*)p[9], (float*)p[10], (int*)p[11], (int*)p[12], (u32*)p[13], args.tokens, args.mode);
  current->done = true;
  yield();
}
extern "C" void run(void** pointers, int tokens, int mode, int order) {
  memcpy(args.p, pointers, sizeof args.p);
  args.tokens = tokens, args.mode = mode;
  const size_t STACK = 16384;
  blocks.assign(G, Block());
  for (auto& b : blocks) { b.shared = (char*)aligned_alloc(1024, SHARED_BYTES + 1024 - SHARED_BYTES % 1024); memset(b.shared, 0x7F, SHARED_BYTES); }
  fibers.assign(G * THREADS, Fiber());
  char* stacks = (char*)aligned_alloc(4096, STACK * G * THREADS);
  for (int i = 0; i < G * THREADS; i++) {
    void** top = (void**)(stacks + STACK * (i + 1)) - 2;
    top[0] = (void*)entry;
    fibers[i] = {top - 6, i / THREADS, i % THREADS, false};
  }
  u32 random = 12345;
  for (size_t left = G * THREADS; left;) {
    left = 0;
    for (int w = 0; w < G * WARPS; w++) {
      random = random * 1664525 + 1013904223;
      int chosen = order == 0 ? w : order == 1 ? G * WARPS - 1 - w : (random >> 8) % (G * WARPS);
      for (int l = 0; l < 32; l++) {
        Fiber& f = fibers[chosen * 32 + l];
        if (!f.done) { current = &f; switch_stack(&main_stack, f.stack); }
      }
    }
    for (auto& f : fibers) left += !f.done;
  }
  for (auto& b : blocks) free(b.shared);
  free(stacks);
  printf("yields %ld\n", yields);
}

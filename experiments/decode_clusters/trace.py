"""When each block of each kernel of a decode step starts, is released, and ends (globaltimer)."""
import ctypes, os, sys, time
from pathlib import Path
import numpy as np
src = Path(__file__).with_name("run.py").read_text()
HEADS = src[: src.index("# 1. correctness")]
exec(HEADS)
TRACE = change(("const int CLUSTER = 8; ", '''__device__ long long ring[3][264][64][8];
__device__ int counts[3][264];
#define STAMP(i) if (threadIdx.x == 0) { long long u; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(u) :: "memory"); ring[KIND][blockIdx.x][slot][i] = u; }
#define BEGIN int slot = 0; if (threadIdx.x == 0) { slot = counts[KIND][blockIdx.x]++ % 64; int sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)); ring[KIND][blockIdx.x][slot][7] = sm; } STAMP(0)
const int CLUSTER = 8; '''),
    ("memory = shared_memory<AttentionMemory>();\n", "memory = shared_memory<AttentionMemory>(); const int KIND = 0; BEGIN\n"),
    ("memory = shared_memory<MlpMemory>();\n", "memory = shared_memory<MlpMemory>(); const int KIND = 1; BEGIN\n"),
    ("  Row& row = shared_memory<Row>();\n", "  Row& row = shared_memory<Row>(); const int KIND = 2; BEGIN\n"),
    ("  wait_for_signal(&row.arrived);\n", "  wait_for_signal(&row.arrived);\n  STAMP(3)\n"),
    ("  float maximum = SMALLEST;\n  int index", "  STAMP(4)\n  float maximum = SMALLEST;\n  int index"),
    ("  if (lane == 0) maxima[warp] =", "  STAMP(5)\n  STAMP(6)\n  if (lane == 0) maxima[warp] ="),
    ("  wait_for_previous_launch();\n\n", "  STAMP(1)\n  wait_for_previous_launch();\n  STAMP(2)\n"),
    ("  wait_for_signal(&memory.row.arrived);\n", "  wait_for_signal(&memory.row.arrived);\n  STAMP(3)\n"),
    ("  const u32 rounded", "  STAMP(4)\n  const u32 rounded"),
    ("  const Four four = split_lanes(h", "  STAMP(4)\n  const Four four = split_lanes(h"),
    ("  store_product(partials_out + head * C, memory.product_sums, w_proj, memory.y);\n", "  STAMP(5)\n  store_product(partials_out + head * C, memory.product_sums, w_proj, memory.y);\n  STAMP(6)\n"),
    ("  store_product(partials_out + cluster_number() * C, memory.product_sums, w_proj, memory.hidden);\n", "  STAMP(5)\n  store_product(partials_out + cluster_number() * C, memory.product_sums, w_proj, memory.hidden);\n  STAMP(6)\n"),
)
VARIANTS["trace"] = TRACE
from stage2_cuda.runtime import cuda_launch
rng = np.random.default_rng(0)
prompt = rng.integers(0, 50257, 256).tolist()
d = decoder_of("trace")
for _ in range(3):
    say("us/token", 1e6 * seconds_per_step(d, [prompt], 200))
f = cuda_launch.compiled(xp, "/tmp/v_trace.cu", cluster_step.macros(768, generator.model.head.data.dtype), "mlp_kernel", 0)
ring = np.zeros((3, 264, 64, 8), np.int64); counts = np.zeros((3, 264), np.int32)
xp.cuda.runtime.memcpy(ring.ctypes.data, f.module.get_global_var("ring"), ring.nbytes, 2)
xp.cuda.runtime.memcpy(counts.ctypes.data, f.module.get_global_var("counts"), counts.nbytes, 2)
np.savez(OUT / "trace.npz", ring=ring, counts=counts)
say("counts", counts[0, :3], counts[1, :3])
n = int(counts[0, 0])
launches = []
m = int(counts[2, 0])
for step in range(n - 36, n):
    for kind, blocks in ((0, 96), (1, 128)):
        launches.append((kind, ring[kind, :blocks, step % 64]))
for step in range(m - 3, m):
    launches.append((2, ring[2, :256, step % 64]))
launches.sort(key=lambda each: each[1][:, 0].min())
base = launches[0][1][:, 2].min()
def q(a): return f"{a.min():6d} {int(np.median(a)):6d} {a.max():6d}"
for i, (kind, t) in enumerate(launches):
    if 21 <= i <= 29 or 44 <= i < 56:
        say(("attention", "mlp      ", "logits   ")[kind], *(f"{name} {q(t[:, j] - base)} |" for j, name in enumerate(("start", "at wait", "released", "row", "product", "last", "end"))), "SMs", len(set(t[:, 7])))
